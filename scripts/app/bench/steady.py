"""Level ``steady``: what must not change over a long session, and what can be counted instead of timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch

from model.sampler import FrameSampler
from ringkv import RingKVConfig, memory
from ringkv.harness.meters import PeakRss
from ringkv.harness.records import error_line
from ringkv.runner import RolloutState
from scripts.app import build
from scripts.app.bench.check import Bench
from scripts.app.bench.frame import BATCH, Steps, wrapped_state
from scripts.app.bench.sampling import Budget, interleave, timed
from scripts.app.compare_stats import paired_ratio
from scripts.app.geometry import model_config
from scripts.app.strategies import kv_config

LATE_CLOCK = 5000
REGIONS = 3
"""Functions that ``compile_regions`` compiles; the commit flag is no argument of any."""


def measure_steady(bench: Bench, budget: Budget) -> Iterator[dict[str, Any]]:
    """Rows of the level ``steady``, one for each thing that must not change. What fails is a row with its reason."""
    assert bench.config.threads is not None
    torch.set_num_threads(bench.config.threads)
    for name, measure in (
        ("session memory", _session_memory),
        ("compilations", _compilations),
        ("memory growth", _memory_growth),
        ("late clock", _late_clock),
    ):
        try:
            yield {"what": name, "status": "ok"} | measure(bench, budget)
        except Exception as error:
            yield {"what": name, "status": "failed", "reason": error_line(error)}


def _session_memory(bench: Bench, budget: Budget) -> dict[str, Any]:
    """Bytes that rings of one and of eight sessions allocate, with those that ``memory`` predicts."""
    measured, predicted = [], []
    for sessions in (1, BATCH):
        config = kv_config(dataclasses.replace(bench.job, num_sessions=sessions), model_config(bench.job))
        assert isinstance(config, RingKVConfig)
        info = build.resource_info(bench.job)
        measured.append(build.build_resource(config, info).memory_bytes())
        predicted.append(memory.storage_bytes(config, info.kv_dtype))
    return {"sessions": [1, BATCH], "measured_bytes": measured, "predicted_bytes": predicted}


def _compilations(bench: Bench, budget: Budget) -> dict[str, Any]:
    """Graphs that the compiler made in warm-up, and later: while rings filled and wrapped, over reset and load."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    config = dataclasses.replace(bench.job, compile=True)
    model = FrameSampler(build.build_weights(config, model_config(config)).model)
    steps = Steps(config, model, compiled=True)
    assert steps.runner.captured is not None
    steps.runner.captured.warm_up()
    warm = counters["stats"]["unique_graphs"]
    assert config.ring_buckets is not None
    steps.submit(context_frames=config.ring_buckets)
    for _ in range(config.ring_buckets + 2):  # fills, wraps and generates
        steps.step()
    state = steps.state()
    steps.restart(context_frames=1)
    for _ in range(2):
        steps.step()
    steps.restart(state)
    steps.step()
    return {
        "regions": REGIONS,
        "buckets": len(steps.runner.captured.buckets),
        "in_warm_up": warm,
        "later": counters["stats"]["unique_graphs"] - warm,
    }


def _memory_growth(bench: Bench, budget: Budget) -> dict[str, Any]:
    """Resident bytes of this process at two frames of one rollout, of a model so small that the frames take seconds."""
    geometry = dataclasses.replace(model_config(bench.job), d_model=32, num_layers=2, num_heads=2, num_kv_heads=1)
    geometry = dataclasses.replace(geometry, head_dim=8, mlp_ratio=1, tokens_per_frame=4)
    config = dataclasses.replace(bench.job, checkpoint=None)
    model = FrameSampler(build.build_weights(config, geometry).model)
    steps, rss = Steps(config, model), PeakRss()
    steps.submit()
    first, last = bench.long_frames
    while steps.next_frame < first:
        steps.step()
    before = rss.current_bytes()
    while steps.next_frame < last:
        steps.step()
    return {"frames": [first, last], "growth_bytes": rss.current_bytes() - before}


def _late_clock(bench: Bench, budget: Budget) -> dict[str, Any]:
    """A session loaded at a late clock against one that has just wrapped, the same slot hidden in both."""
    config, geometry = bench.job, model_config(bench.job)
    assert config.ring_buckets is not None
    model = FrameSampler(build.build_weights(config, geometry).model)
    early = wrapped_state(config, model)
    turn = config.ring_buckets * max(geometry.layer_dilations(config.dilation))
    late = moved(early, early.next_frame + -(-(LATE_CLOCK - early.next_frame) // turn) * turn)
    lanes = {"just wrapped": Steps(config, model), "late": Steps(config, model)}
    for lane, state in zip(lanes.values(), (early, late), strict=True):
        lane.submit(state)
        lane.step()
    seconds = interleave(
        {name: timed(lane.step) for name, lane in lanes.items()},
        budget_s=budget.left_s,
        at_least=bench.at_least,
        at_most=200,
    )
    return {
        "clocks": [early.next_frame, late.next_frame],
        "frame_ms": [median(times) * 1e3 for times in seconds.values()],
        "samples_s": seconds,
        "ratio": paired_ratio(seconds["late"], seconds["just wrapped"], seed=config.seed),
    }


def moved(state: RolloutState, next_frame: int) -> RolloutState:
    """The same rings at another clock, whole turns away, as if they had been filled there."""
    cache = {**state.cache, "clock": next_frame - 1}
    return dataclasses.replace(state, cache=cache, next_frame=next_frame, action_cursor=next_frame)
