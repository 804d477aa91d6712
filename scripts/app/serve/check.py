"""What a simulation must satisfy before anything runs. No torch."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

from ringkv.policies import POLICIES
from scripts.app.check import effective, job_knobs, take_over
from scripts.app.errors import BadInput
from scripts.app.geometry import model_config
from scripts.app.schema import RolloutConfig, ServeConfig
from scripts.app.strategies import kv_bytes
from scripts.app.work import frame_flops


@dataclass(frozen=True)
class Serving:
    """config: with its nulls filled in. frame_s: of one frame of one session. session_bytes, move_s: of parking it."""

    config: ServeConfig
    frame_s: float
    session_bytes: int
    move_s: float


def checked(config: ServeConfig) -> Serving:
    """The simulation that ``config`` asks for. ``BadInput`` for the first value that cannot work; changes nothing."""
    config = copy.deepcopy(config)
    for key in ("minutes", "burst_s", "device_tflops", "utilisation", "link_gb_s"):
        _require_positive(key, getattr(config, key))
    if not (math.isfinite(config.pause_s) and config.pause_s >= 0):
        raise BadInput(f"pause_s={config.pause_s}: expected seconds >= 0")
    if config.deadline_s is not None:
        _require_positive("deadline_s", config.deadline_s)
    for key in ("arrivals_per_min", "policies", "pool_sizes"):
        if not getattr(config, key):
            raise BadInput(f"{key}=[]: expected one value or more")
    for rate in config.arrivals_per_min:
        _require_positive("arrivals_per_min", rate)
    for policy in config.policies:
        if policy not in POLICIES:
            raise BadInput(f"policies=[{','.join(config.policies)}]: {policy} is none; expected {', '.join(POLICIES)}")
    for key, value in (
        ("quantum_frames", config.quantum_frames),
        *(("pool_sizes", size) for size in config.pool_sizes),
    ):
        if value < 1:
            raise BadInput(f"{key}={value}: expected integers >= 1")
    if config.num_sessions != 1:
        raise BadInput(f"num_sessions={config.num_sessions}: pool_sizes says how many there are; expected 1")
    rollout = effective(RolloutConfig(kv=config.kv, **job_knobs(config)), on_this_machine=False)
    if rollout.kv.strategy != "ring":
        raise BadInput(f"kv={rollout.kv.strategy}: sessions of other strategies change their size; expected ring")
    take_over(config, rollout)
    model = model_config(rollout)
    assert rollout.num_frames is not None
    size = kv_bytes(rollout, model)
    rate = config.device_tflops * 1e12 * config.utilisation
    return Serving(
        config=config,
        frame_s=frame_flops(rollout, model, rollout.num_frames - 1) / rate,
        session_bytes=size,
        move_s=size / (config.link_gb_s * 1e9),
    )


def _require_positive(key: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise BadInput(f"{key}={value}: expected a number > 0")
