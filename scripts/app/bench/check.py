"""What a benchmark must satisfy before anything runs. No torch."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringkv.memory import DTYPE_BYTES
from scripts.app.check import effective, job_knobs, take_over
from scripts.app.choices import bracketed, kv_choices
from scripts.app.errors import BadInput
from scripts.app.schema import BenchConfig, GridKnobs, KVKnobs, RolloutConfig

LEVELS = ("reads", "peers", "frame", "rollout", "steady")
SHARES = {"reads": 0.42, "peers": 0.06, "frame": 0.12, "rollout": 0.28, "steady": 0.12}
"""Of the budget, by level; those that are not asked for leave theirs to the others."""

REFERENCE = "ring"


@dataclass(frozen=True)
class Bench:
    """config: with its nulls filled in. job: the main job that levels frame and steady take apart. choices: of conf/kv.

    at_least: rounds of samples that every point gets, however little time there is. long_frames: where memory growth
    is measured from and to.
    """

    config: BenchConfig
    job: RolloutConfig
    choices: dict[str, KVKnobs]
    at_least: int
    long_frames: tuple[int, int]

    def rollout(self, name: str, **changes: Any) -> RolloutConfig:
        """The main job under another strategy, with other knobs; checked again."""
        kv = copy.deepcopy(self.choices[name])
        return effective(dataclasses.replace(self.job, kv=kv, **{"num_frames": None} | changes))

    def seconds_of(self, level: str) -> float:
        """What the level may take."""
        chosen = sum(SHARES[each] for each in self.config.levels)
        return self.config.budget_s * SHARES[level] / chosen


def checked(config: BenchConfig) -> Bench:
    """The benchmark that ``config`` means. ``BadInput`` for the first value that cannot work; changes nothing."""
    config = copy.deepcopy(config)
    _check_list("levels", config.levels, LEVELS)
    if config.device != "cpu":
        raise BadInput(f"device={config.device}: the floors are measured on the CPU; expected cpu")
    if config.num_sessions != 1:
        raise BadInput(f"num_sessions={config.num_sessions}: the level rollout has its own; expected 1")
    if config.compile:
        raise BadInput("compile=true: eager and compiled are both measured; expected false")
    if not (math.isfinite(config.budget_s) and config.budget_s > 0):
        raise BadInput(f"budget_s={config.budget_s}: expected a number > 0")
    cores = os.cpu_count() or 1
    if config.quick:
        config.grid = GridKnobs(tokens=[4], windows=[4], sessions=[2], dtypes=["float32"], threads=[1])
        config.rollout_sessions = [2]
        config.ring_frames, config.dilation = 2, 2
        config.budget_s = min(config.budget_s, 5.0)
    config.grid.threads = [count for count in config.grid.threads if count <= cores]
    _check_list("grid.dtypes", config.grid.dtypes, tuple(DTYPE_BYTES))
    for key, values in (
        ("grid.tokens", config.grid.tokens),
        ("grid.windows", config.grid.windows),
        ("grid.sessions", config.grid.sessions),
        ("grid.threads", config.grid.threads),
        ("rollout_sessions", config.rollout_sessions),
    ):
        if not values or min(values) < 1 or len(set(values)) < len(values):
            raise BadInput(f"{key}={values}: expected different integers >= 1")
    if min(config.grid.windows) < 2:
        raise BadInput(f"grid.windows={config.grid.windows}: a window of one frame holds no past; expected 2 or more")
    choices = kv_choices(config.strategies, config.kv, reference=REFERENCE)
    job = effective(RolloutConfig(kv=copy.deepcopy(choices[REFERENCE]), **job_knobs(config)))
    take_over(config, job)
    bench = Bench(
        config,
        job,
        choices,
        at_least=3 if config.quick else 5,
        long_frames=(20, 60) if config.quick else (1000, 5000),
    )
    for name in choices:
        bench.rollout(name, num_sessions=max(config.rollout_sessions), dilation=1)
    return bench


def _check_list(key: str, values: Sequence[str], allowed: Sequence[str]) -> None:
    for value in values:
        if value not in allowed or list(values).count(value) > 1:
            raise BadInput(f"{key}={bracketed(values)}: expected some of {', '.join(allowed)}, each once")
    if not values:
        raise BadInput(f"{key}=[]: expected some of {', '.join(allowed)}")
