"""Level ``rollout``: frames per second of the main job, every strategy, several sessions, eager and compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from model.data import Clip
from model.sampler import FrameSampler
from ringkv import StepRunner
from ringkv.harness.records import error_line
from ringkv.recompute import RecomputeRunner
from scripts.app import build
from scripts.app.bench.check import REFERENCE, Bench
from scripts.app.bench.sampling import Budget, interleave, timed
from scripts.app.compare_stats import paired_ratio
from scripts.app.geometry import model_config
from scripts.app.schema import RolloutConfig
from scripts.app.strategies import kv_config

_MOST_FRAMES = 48
"""Generated frames of a rollout at most: it has a recording, and memory, for so many."""


class _Lane:
    """One strategy's rollouts, primed with context, then a generated frame of all sessions at a time."""

    def __init__(self, config: RolloutConfig, model: FrameSampler, clips: list[Clip]) -> None:
        self.runner: StepRunner | RecomputeRunner = build.build_runner(
            config.kv.strategy,
            kv_config(config, model.model.config),
            build.resource_info(config),
            model,
            compiled=model if config.compile else None,
        )
        if isinstance(self.runner, StepRunner) and self.runner.captured is not None:
            self.runner.captured.warm_up()
        assert config.num_frames is not None
        for request in build.rollout_requests(config, clips, config.num_frames):
            self.runner.submit(request)
        for _ in range(config.context_frames):
            self.step()

    def step(self) -> None:
        self.runner.step()
        if self.runner.failed:
            raise next(iter(self.runner.failed.values()))


def measure_rollouts(bench: Bench, budget: Budget) -> Iterator[dict[str, Any]]:
    """Rows of the level ``rollout``.

    All layers are local and the context fills the ring, so that every strategy makes the same frames and every window
    is full from the first generated frame on.
    """
    assert bench.config.threads is not None
    torch.set_num_threads(bench.config.threads)
    geometry = model_config(bench.job)
    slow = [name for name, kv in bench.choices.items() if kv.strategy in ("recompute_all", "recompute_window")]
    quick = [name for name in bench.choices if name not in slow]
    cases = [(sessions, compiled) for compiled in (False, True) for sessions in bench.config.rollout_sessions]
    models: dict[bool, FrameSampler] = {}
    for index, (sessions, compiled) in enumerate(cases):
        share = Budget(budget.share_s(len(cases) - index))
        if compiled not in models:
            weights = build.build_weights(dataclasses.replace(bench.job, compile=compiled), geometry)
            models[compiled] = FrameSampler(weights.model)
        yield from _measure_case(bench, models[compiled], sessions, compiled, quick, share)
    if slow:  # a frame takes them seconds: in turns with the others, they would leave those no time
        rows = _measure_case(
            bench, models[False], min(bench.config.rollout_sessions), False, [REFERENCE, *slow], Budget(0)
        )
        yield from (row for row in rows if row["strategy"] != REFERENCE)


def _measure_case(
    bench: Bench, model: FrameSampler, sessions: int, compiled: bool, names: Sequence[str], budget: Budget
) -> Iterator[dict[str, Any]]:
    lanes: dict[str, _Lane] = {}
    common = {"sessions": sessions, "mode": "compiled" if compiled else "eager"}
    window = bench.job.ring_frames
    clips: list[Clip] = []
    for name in names:
        config = bench.rollout(
            name,
            num_sessions=sessions,
            compile=compiled,
            dilation=1,
            context_frames=window,
            num_frames=window + _MOST_FRAMES,
        )
        try:
            clips = clips or build.load_clips(config, model.model.config)
            lanes[name] = _Lane(config, model, clips)
            lanes[name].step()
        except Exception as error:
            lanes.pop(name, None)
            yield common | {"strategy": name, "status": "failed", "reason": error_line(error)}
    seconds = interleave(
        {name: timed(partial(_Lane.step, lane)) for name, lane in lanes.items()},
        budget_s=budget.left_s,
        at_least=min(3, bench.at_least),
        at_most=_MOST_FRAMES - 2,
    )
    for name, times in seconds.items():
        yield common | {
            "strategy": name,
            "status": "ok",
            "frame_ms": median(times) * 1e3,
            "frames_per_s": sessions / median(times),
            "samples_s": times,
            "ratio": paired_ratio(times, seconds[REFERENCE], seed=bench.config.seed) if REFERENCE in seconds else None,
        }
