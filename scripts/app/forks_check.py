"""What a fork must satisfy before anything runs. No torch."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

from model.data.names import action_names
from scripts.app.check import absolute, effective, job_knobs, take_over
from scripts.app.errors import BadInput
from scripts.app.schema import ForksConfig, RolloutConfig

SHARED_FRAMES = 8
"""Generated frames that the forks share by default."""


@dataclass(frozen=True)
class Forks:
    """config: with its nulls filled in. rollout: a session for the original and each fork. codes: of the actions."""

    config: ForksConfig
    rollout: RolloutConfig
    codes: dict[str, int]


def checked(config: ForksConfig) -> Forks:
    """The forks that ``config`` asks for. ``BadInput`` for the first value that cannot work; changes nothing."""
    config = copy.deepcopy(config)
    if config.num_sessions != 1:
        raise BadInput(f"num_sessions={config.num_sessions}: there is one for each of actions; expected 1")
    names = config.actions
    if not names or len(set(names)) != len(names):
        raise BadInput(f"actions=[{','.join(names)}]: expected one or more names of actions, each once")
    if config.kv.strategy.startswith("recompute"):
        raise BadInput(f"kv={config.kv.strategy}: keeps no sessions that could be forked; expected another")
    shared = job_knobs(config) | {"num_sessions": 1 + len(names)}
    rollout = effective(RolloutConfig(kv=config.kv, **shared))
    take_over(config, rollout, but=("num_sessions",))
    config.kv = rollout.kv
    known = action_names(config.data.name)
    for name in names:
        if name not in known:
            raise BadInput(f"actions=[{','.join(names)}]: data={config.data.name} has {', '.join(known)}")
    assert config.num_frames is not None
    if config.fork_frame is None:
        config.fork_frame = min(config.context_frames + SHARED_FRAMES, config.num_frames - 1)
    if not max(1, config.context_frames) <= config.fork_frame < config.num_frames:
        raise BadInput(
            f"fork_frame={config.fork_frame}: expected a generated frame, from {max(1, config.context_frames)} to "
            f"{config.num_frames - 1}"
        )
    if config.out is not None:
        config.out = absolute(config.out)
        if not config.out.endswith(".gif") or not Path(config.out).parent.is_dir():
            raise BadInput(f"out={config.out}: expected a path that ends in .gif, in a folder that is there")
    return Forks(config, rollout, {name: known.index(name) for name in names})
