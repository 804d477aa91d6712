"""What a comparison must satisfy before anything runs. No torch."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import psutil

from scripts.app.check import GIB, effective, job_knobs, take_over, weight_bytes
from scripts.app.choices import bracketed, kv_choices
from scripts.app.errors import BadInput
from scripts.app.geometry import model_config
from scripts.app.schema import CompareConfig, RolloutConfig
from scripts.app.strategies import kv_bytes, working_bytes

REFERENCE = "ring"
MIB = 1024.0**2


@dataclass(frozen=True)
class Comparison:
    """config: with its nulls filled in. rollouts: what each strategy is to do, by its name in conf/kv."""

    config: CompareConfig
    rollouts: dict[str, RolloutConfig]

    @property
    def budget_bytes(self) -> float:
        """KV memory that a strategy may hold at once."""
        return math.inf if self.config.budget_mib is None else self.config.budget_mib * MIB


def checked(config: CompareConfig) -> Comparison:
    """The comparison that ``config`` means. ``BadInput`` for the first value that cannot work; changes nothing."""
    config = copy.deepcopy(config)
    knobs = kv_choices(config.strategies, config.kv, reference=REFERENCE)
    if config.block_frames < 1:
        raise BadInput(f"block_frames={config.block_frames}: expected an integer >= 1")
    if config.equality_frames is not None and config.equality_frames < 0:
        raise BadInput(f"equality_frames={config.equality_frames}: expected an integer >= 0")
    if config.budget_mib is not None and not (math.isfinite(config.budget_mib) and config.budget_mib > 0):
        raise BadInput(f"budget_mib={config.budget_mib}: expected a number > 0")
    shared = job_knobs(config)
    budget = Comparison(config, {}).budget_bytes
    rollouts = {name: effective(RolloutConfig(kv=kv, **shared), budget_bytes=budget) for name, kv in knobs.items()}
    take_over(config, rollouts[REFERENCE])
    assert config.num_frames is not None
    assert config.ring_buckets is not None
    if config.equality_frames is None:
        config.equality_frames = max(config.ring_buckets, config.context_frames) + 4
    config.equality_frames = min(config.equality_frames, config.num_frames)
    comparison = Comparison(config, rollouts)
    _check_memory(comparison)
    return comparison


def _check_memory(comparison: Comparison) -> None:
    """Refuse strategies that do not fit into this machine side by side; each alone has been checked."""
    if comparison.config.device != "cpu":
        return
    model = model_config(comparison.config)
    kv = sum(min(kv_bytes(config, model), comparison.budget_bytes) for config in comparison.rollouts.values())
    kv += max(working_bytes(config, model) for config in comparison.rollouts.values())
    weights, available = weight_bytes(comparison.config, model), psutil.virtual_memory().total
    if kv + weights > available:
        raise BadInput(
            f"strategies={bracketed(comparison.config.strategies)}: {kv / GIB:.1f} GiB of KV together and "
            f"{weights / GIB:.1f} GiB of weights; expected at most the {available / GIB:.1f} GiB of this machine: name "
            "fewer, or set budget_mib"
        )
