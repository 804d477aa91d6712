"""What a device has room and time for, from geometry alone. No torch, nothing allocated.

Bytes come from ``strategies.kv_bytes`` and ``working_bytes``, by which a rollout that does not fit is refused, and
arithmetic from ``work.frame_flops``. Two walls bound the sessions that a device serves: memory, and frames per second.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from model.config import ModelConfig
from ringkv import memory
from ringkv.config import RingKVConfig
from ringkv.horizon import horizon_frames, visible_frames
from scripts.app.check import GIB, effective, job_knobs, take_over
from scripts.app.choices import kv_choices
from scripts.app.errors import BadInput
from scripts.app.geometry import model_config
from scripts.app.schema import PlanConfig, RolloutConfig
from scripts.app.strategies import kv_bytes, kv_config, working_bytes
from scripts.app.work import frame_flops

REFERENCE = "ring"
CURVE_POINTS = 40


@dataclass(frozen=True)
class Planned:
    """config: with its nulls filled in. rollouts: one session of each strategy, by its name in conf/kv."""

    config: PlanConfig
    rollouts: dict[str, RolloutConfig]


def checked(config: PlanConfig) -> Planned:
    """The plan that ``config`` asks for. ``BadInput`` for the first value that cannot work; changes nothing."""
    config = copy.deepcopy(config)
    if config.num_sessions != 1:
        raise BadInput(f"num_sessions={config.num_sessions}: a plan counts the sessions that fit; expected 1")
    for key in ("budget_gib", "device_tflops", "utilisation", "memory_gb_s", "link_gb_s", "disk_gb_s"):
        value = getattr(config, key)
        if not (math.isfinite(value) and value > 0):
            raise BadInput(f"{key}={value}: expected a number > 0")
    if config.utilisation > 1:
        raise BadInput(f"utilisation={config.utilisation}: expected a share of the peak, at most 1")
    if not 0 <= config.workspace_share < 1:
        raise BadInput(f"workspace_share={config.workspace_share}: expected a share of the memory, from 0 to below 1")
    for key in ("num_pages", "max_frames"):
        if getattr(config.kv, key) is not None:
            raise BadInput(f"kv.{key}={getattr(config.kv, key)}: follows from the length of the rollout; expected null")
    choices = kv_choices(config.strategies, config.kv, reference=REFERENCE)
    shared = job_knobs(config)
    rollouts = {name: effective(RolloutConfig(kv=kv, **shared), on_this_machine=False) for name, kv in choices.items()}
    take_over(config, rollouts[REFERENCE])
    return Planned(config, rollouts)


def calculate(planned: Planned) -> dict[str, Any]:
    """The whole plan as plain data, as plan.json holds it; bytes, FLOP, seconds."""
    config, model = planned.config, model_config(planned.config)
    assert config.num_frames is not None
    assert config.kv_dtype is not None
    ring = kv_config(planned.rollouts[REFERENCE], model)
    assert isinstance(ring, RingKVConfig)
    weights = model.num_parameters * memory.DTYPE_BYTES[config.dtype]
    room = max(0.0, config.budget_gib * GIB * (1 - config.workspace_share) - weights)
    session = memory.session_bytes(ring, config.kv_dtype)
    clocks = curve_clocks(config.num_frames)
    return {
        "config": config,
        "weights_bytes": weights,
        "room_bytes": room,
        "session_bytes": session,
        "token_bytes": memory.token_bytes(ring, config.kv_dtype),
        "crossover_frame": memory.crossover_frame(ring, config.kv_dtype),
        "full_context_bytes_per_s": config.target_fps * memory.full_context_bytes(ring, config.kv_dtype, 1),
        "snapshot_s": 2 * session / (config.memory_gb_s * 1e9),  # read and written in the same memory
        "park_to_host_s": session / (config.link_gb_s * 1e9),
        "park_to_disk_s": session / (min(config.link_gb_s, config.disk_gb_s) * 1e9),
        "layers": _layers(ring, config.kv_dtype, config.num_frames - 1),
        "strategies": [
            _strategy(name, config, rollout, model, clocks, room) for name, rollout in planned.rollouts.items()
        ],
    }


def session_bytes(config: RolloutConfig, model: ModelConfig, num_frames: int) -> int:
    """Bytes that one session needs for a rollout of ``num_frames`` frames: what it holds, and what it works in."""
    kv = dataclasses.replace(config.kv, max_frames=None, num_pages=None)  # what was filled in for the whole length
    shorter = dataclasses.replace(config, kv=kv, num_sessions=1, num_frames=num_frames)
    return kv_bytes(shorter, model) + working_bytes(shorter, model)


def curve_clocks(num_frames: int) -> list[int]:
    """Lengths from 1 to ``num_frames``, evenly spaced on a logarithmic axis, and where a doubling buffer doubles."""
    even = {round(num_frames ** (step / (CURVE_POINTS - 1))) for step in range(CURVE_POINTS)}
    doublings = {length for power in range(num_frames.bit_length()) for length in (2**power, 2**power + 1)}
    return sorted(even | {length for length in doublings if length <= num_frames})


def _strategy(
    name: str, config: PlanConfig, rollout: RolloutConfig, model: ModelConfig, lengths: list[int], room: float
) -> dict[str, Any]:
    per_second = config.device_tflops * 1e12 * config.utilisation
    held = [session_bytes(rollout, model, length) for length in lengths]
    work = [frame_flops(rollout, model, length - 1) for length in lengths]
    by_memory = [int(room // size) for size in held]
    by_compute = [per_second / (flops * config.target_fps) for flops in work]
    return {
        "strategy": name,
        "num_frames": lengths,
        "session_bytes": held,
        "frame_flops": work,
        "frame_s": [flops / per_second for flops in work],
        "sessions_by_memory": by_memory,
        "sessions_by_compute": by_compute,
    }


def _layers(ring: RingKVConfig, kv_dtype: str, clock: int) -> list[dict[str, Any]]:
    """A row for each kind of layer: how many there are, and what one of them holds and shows at ``clock``."""
    frame = memory.frame_bytes(ring, kv_dtype)
    rows = []
    for layer in dict.fromkeys(ring.layers):
        seen = visible_frames(layer, clock)
        rows.append(
            {
                "layers": ring.layers.count(layer),
                "ring_frames": layer.ring_frames,
                "dilation": layer.pinned_dilation,
                "horizon_frames": horizon_frames(layer),
                "visible_frames": len(seen),
                "oldest_age": clock - seen[0] if seen else None,
                "bytes_per_layer": memory.session_frames(layer) * frame,
            }
        )
    return rows
