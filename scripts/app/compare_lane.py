"""One strategy of a comparison: its own cache and runner, driven a block of frames at a time, until it ends."""

from __future__ import annotations

import dataclasses
import traceback
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from model.config import ModelConfig
from model.data import Clip, frames_to_uint8
from model.sampler import FrameSampler
from ringkv import StepRunner
from ringkv.harness.meters import FrameMeter, PeakRss
from ringkv.harness.records import RunDir, error_line
from ringkv.harness.video import Pixels
from ringkv.recompute import RecomputeRunner
from ringkv.runner import StepRefused
from scripts.app import build
from scripts.app.job import frame_row, synchronizer
from scripts.app.schema import RolloutConfig
from scripts.app.strategies import kv_bytes, kv_config

_MIB = 1024.0**2
_OUT_OF_ROOM = (StepRefused, MemoryError, torch.OutOfMemoryError)


class OverBudget(StepRefused):
    """The next frame would hold more KV memory than ``budget_mib`` allows."""


@dataclass(frozen=True)
class LaneEnd:
    """Why a strategy stopped at ``frame``, which it did not make. status: a budget is a result, a failure is not.

    Text only: the exception's traceback would keep the cache alive.
    """

    status: Literal["out of budget", "failed"]
    frame: int
    reason: str
    traceback: str


@dataclass
class Lane:
    """A strategy on its way. rows: of ``records.FRAME_COLUMNS``, one per frame of all sessions.

    over: whether ``end`` was called.
    """

    name: str
    config: RolloutConfig
    geometry: ModelConfig
    run_dir: RunDir
    budget_bytes: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    ended: LaneEnd | None = None
    warmup_ms: float = 0.0
    over: bool = False

    def __post_init__(self) -> None:
        self._runner: StepRunner | RecomputeRunner | None = None
        self._rss = PeakRss()
        self._truths: dict[str, Pixels] = {}
        self.meter = FrameMeter(synchronizer(self.config.device), warmup=0, target_fps=self.config.target_fps)

    @property
    def made(self) -> int:
        """Frames made, context included."""
        return len(self.rows)

    @property
    def frame_ms(self) -> list[float]:
        """Milliseconds of each generated frame."""
        return [row["latency_ms"] for row in self.rows if row["phase"] == "generated"]

    @property
    def running(self) -> bool:
        """Whether it has frames left to make and has not ended."""
        return self.ended is None and self._runner is not None and self._runner.pending > 0

    def start(self, model: FrameSampler, clips: list[Clip]) -> None:
        """Build the cache, warm up on a short rollout of its own, and queue the requests."""
        config = self.config
        assert config.num_frames is not None
        try:
            self._require_budget(0)
            self._runner = build.build_runner(
                config.kv.strategy,
                kv_config(config, self.geometry),
                build.resource_info(config),
                model,
                compiled=model if config.compile else None,
            )
        except Exception as error:
            self.end(error)
            return
        if config.warmup:
            frames = min(config.num_frames, config.warmup + bool(config.context_frames))
            self._warm_up(clips, frames)
        for request, clip in zip(build.rollout_requests(config, clips, config.num_frames), clips, strict=True):
            self._truths[request.rid] = clip.frames
            self._runner.submit(request)
        self.meter.mark_start()

    def advance(self, frames: int) -> None:
        """Make up to ``frames`` frames."""
        for _ in range(frames):
            if not self.running:
                return
            assert self._runner is not None
            try:
                self._require_budget(self.made)
            except StepRefused as error:
                self.end(error)
                return
            self.meter.start()
            results = self._runner.step()
            if self._runner.failed:
                self.end(next(iter(self._runner.failed.values())))
                return
            timed = self.meter.stop(frames=sum(result.phase == "generated" for result in results))
            try:
                images = frames_to_uint8(torch.stack([result.image for result in results]))
            except ValueError as error:  # not finite
                self.end(error)
                return
            row = frame_row(self.made, results, images, self._truths, self._runner, self._rss)
            self.rows.append(row | {"latency_ms": timed.ms, "warmup": timed.warmup})
            self.run_dir.write_frame(self.rows[-1])

    def end(self, error: BaseException | None = None) -> None:
        """Write the summary and give the memory back; ``error`` says why before the last frame. Only once."""
        if error is not None:
            refused = isinstance(error, StepRefused)
            self.ended = LaneEnd(
                status="out of budget" if isinstance(error, _OUT_OF_ROOM) else "failed",
                frame=self.made,
                reason=str(error) if refused else error_line(error),
                traceback="".join(traceback.format_exception(error)),
            )
        self.run_dir.write_summary(self.summary(), error=error)
        self.run_dir.close()
        self._runner, self.over = None, True

    def summary(self) -> dict[str, Any]:
        """As of ``records.SUMMARY_COLUMNS``, as far as one strategy can tell."""
        return self.meter.summary() | {
            "warmup/ms_total": self.warmup_ms,
            "memory/kv_bytes_predicted": kv_bytes(self.config, self.geometry),
            "memory/kv_bytes": self.rows[-1]["kv_bytes"] if self.rows else None,
            "memory/kv_in_use_bytes": max((row["kv_in_use_bytes"] for row in self.rows), default=None),
        }

    def _warm_up(self, clips: list[Clip], frames: int) -> None:
        runner = self._runner
        assert runner is not None
        meter = FrameMeter(synchronizer(self.config.device), warmup=0, target_fps=self.config.target_fps)
        meter.start()
        requests = build.rollout_requests(self.config, clips, frames, prefix="warm-up-")
        for request in requests:
            runner.submit(request)
        steps = 0
        while runner.pending and self._predicted(steps) <= self.budget_bytes:
            runner.step()
            steps += 1
        # What has no room here has none in the rollout either, and is told there.
        for request in requests:
            runner.cancel(request.rid)
        self.warmup_ms = meter.stop(frames=0).ms

    def _predicted(self, frame: int) -> int:
        """Bytes of KV held once ``frame`` is made."""
        return kv_bytes(dataclasses.replace(self.config, num_frames=frame + 1), self.geometry)

    def _require_budget(self, frame: int) -> None:
        wanted = self._predicted(frame)
        if wanted > self.budget_bytes:
            raise OverBudget(
                f"frame {frame} takes {wanted / _MIB:.2f} MiB of KV, above budget_mib={self.budget_bytes / _MIB:g}"
            )
