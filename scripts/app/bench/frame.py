"""Level ``frame``: the step of the main job against its bare kernels, eager and compiled, one session and eight.

Level ``steady`` drives the same steps. A step is everything from admission to the frame's row of figures.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from model.data import frames_to_uint8
from model.sampler import FrameSampler
from ringkv import RingKVConfig, StepRunner
from ringkv.harness.meters import PeakRss
from ringkv.harness.records import error_line
from ringkv.runner import RolloutRequest, RolloutState
from scripts.app import build
from scripts.app.bench.check import Bench
from scripts.app.bench.kernels import FrameKernels
from scripts.app.bench.sampling import Budget, Clock, Sample, interleave, timed
from scripts.app.compare_stats import paired_ratio
from scripts.app.geometry import model_config
from scripts.app.job import frame_row
from scripts.app.schema import RolloutConfig
from scripts.app.strategies import kv_config

BATCH = 8
HOST_CALLS = ("admit", "plan", "commit")
_NEVER = 1_000_000
"""Frames of a request that is to go on for as long as it is measured."""


class Steps:
    """The main job's steps, from frame to frame, with no end.

    next_frame: the clock of the next one. host_s: seconds of each step that went by outside the model.
    """

    def __init__(
        self, config: RolloutConfig, model: FrameSampler, *, compiled: bool = False, clock: Clock = time.perf_counter
    ) -> None:
        geometry = model.model.config
        runner = build.build_runner(
            config.kv.strategy,
            kv_config(config, geometry),
            build.resource_info(config),
            model,
            compiled=model if compiled else None,
        )
        assert isinstance(runner, StepRunner)
        self.runner, self.resource = runner, runner.resource
        self.next_frame = 0
        self.host_s: list[float] = []
        self._config, self._clock, self._rss = config, clock, PeakRss()
        self._spent = 0.0
        self._frame_shape = (geometry.channels, geometry.height, geometry.width)
        for name in HOST_CALLS:
            setattr(self.resource, name, self._counted(getattr(self.resource, name)))

    def submit(self, state: RolloutState | None = None, *, context_frames: int = 0) -> None:
        """Queue a request for every session: from random context frames, or all from one state."""
        for index in range(self._config.num_sessions):
            request = RolloutRequest(
                rid=f"session-{index}",
                seed=self._config.seed,
                stream=0 if state is None else state.stream,
                num_frames=_NEVER,
                context=torch.rand(context_frames, *self._frame_shape) * 2 - 1,
                actions=torch.zeros(1, dtype=torch.int64).expand(_NEVER),
            )
            self.runner.submit(request, state)
        self.next_frame = 0 if state is None else state.next_frame

    def restart(self, state: RolloutState | None = None, *, context_frames: int = 0) -> None:
        """End every request and begin anew."""
        for rid in self.runner.resident:
            self.runner.cancel(rid)
        self.submit(state, context_frames=context_frames)

    def step(self) -> None:
        """One frame of every session, and its row of figures."""
        self._spent = 0.0
        results = self.runner.step()
        if self.runner.failed:
            raise next(iter(self.runner.failed.values()))
        start = self._clock()
        images = frames_to_uint8(torch.stack([result.image for result in results]))
        black = {result.rid: np.broadcast_to(np.uint8(0), (result.frame + 1, *images.shape[1:])) for result in results}
        frame_row(self.next_frame, results, images, black, self.runner, self._rss)
        self.host_s.append(self._spent + self._clock() - start)
        self.next_frame += 1

    def state(self) -> RolloutState:
        """Where the first session stands."""
        return self.runner.state_of("session-0")

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            start = self._clock()
            try:
                return call(*args)
            finally:
                self._spent += self._clock() - start

        return counted


def wrapped_state(config: RolloutConfig, model: FrameSampler) -> RolloutState:
    """Where a session stands whose rings have all just wrapped: its frames are random ones, observed, not generated."""
    assert config.ring_buckets is not None
    steps = Steps(dataclasses.replace(config, num_sessions=1), model)
    frames = config.ring_buckets * max(model.model.config.layer_dilations(config.dilation)) + 1
    steps.submit(context_frames=frames)
    for _ in range(frames):
        steps.step()
    return steps.state()


def measure_frames(bench: Bench, budget: Budget) -> Iterator[dict[str, Any]]:
    """Rows of the level ``frame``: a row for each number of sessions and mode, all measured in turns."""
    assert bench.config.threads is not None
    torch.set_num_threads(bench.config.threads)
    config, geometry = bench.job, model_config(bench.job)
    eager = FrameSampler(build.build_weights(config, geometry).model)
    state = wrapped_state(config, eager)
    lanes: dict[tuple[int, str], Steps] = {}
    failures: dict[tuple[int, str], str] = {}
    kernels: dict[int, FrameKernels] = {}
    for sessions in (1, BATCH):
        ring = kv_config(dataclasses.replace(config, num_sessions=sessions), geometry)
        assert isinstance(ring, RingKVConfig)
        kernels[sessions] = FrameKernels(eager.model, ring, sessions)
        lanes[sessions, "eager"] = _started(config, eager, state, sessions, compiled=False)
    try:
        compiled = FrameSampler(build.build_weights(dataclasses.replace(config, compile=True), geometry).model)
        for sessions in (1, BATCH):
            lanes[sessions, "compiled"] = _started(config, compiled, state, sessions, compiled=True)
    except Exception as error:  # no compiler on this machine, say: a row of the result
        absent = [key for key in ((1, "compiled"), (BATCH, "compiled")) if key not in lanes]
        failures = dict.fromkeys(absent, error_line(error))
    samples: dict[str, Sample] = {f"{mode} {count}": timed(steps.step) for (count, mode), steps in lanes.items()}
    for sessions, bare in kernels.items():
        samples[f"floor {sessions}"] = partial(_kernel_sample, bare, lanes[sessions, "eager"])
    interleave(samples, budget_s=0.0, at_least=1, at_most=1)
    for steps in lanes.values():
        steps.host_s.clear()
    seconds = interleave(samples, budget_s=budget.left_s, at_least=bench.at_least, at_most=100)
    for (count, mode), steps in lanes.items():
        times, floor = seconds[f"{mode} {count}"], seconds[f"floor {count}"]
        yield {
            "sessions": count,
            "mode": mode,
            "status": "ok",
            "step_s": median(times),
            "floor_s": median(floor),
            "samples_s": {"step": times, "floor": floor, "host": list(steps.host_s)},
            "fraction": paired_ratio(floor, times, seed=config.seed),
            "host_share": paired_ratio(steps.host_s, times, seed=config.seed),
        }
    for (count, mode), reason in failures.items():
        yield {"sessions": count, "mode": mode, "status": "failed", "reason": reason}


def _started(
    config: RolloutConfig, model: FrameSampler, state: RolloutState, sessions: int, *, compiled: bool
) -> Steps:
    steps = Steps(dataclasses.replace(config, num_sessions=sessions, compile=compiled), model, compiled=compiled)
    if steps.runner.captured is not None:
        steps.runner.captured.warm_up()
    steps.submit(state)
    return steps


def _kernel_sample(kernels: FrameKernels, steps: Steps) -> float:
    clock = steps.next_frame
    kernels.prepare(clock)
    return timed(lambda: kernels.run(clock))()
