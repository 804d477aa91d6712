"""One rollout: prime the cache with real frames, generate the rest, measure, and leave a record behind."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from model.data import frames_to_uint8
from ringkv import StepRunner
from ringkv.harness.machine import machine_card
from ringkv.harness.meters import FrameMeter, PeakRss
from ringkv.harness.records import RunDir
from ringkv.harness.tracking import Tracker, start_tracker
from ringkv.recompute import RecomputeRunner
from ringkv.runner import FrameResult
from scripts.app import build, report
from scripts.app.geometry import ring_wraps
from scripts.app.rollout import Rollout
from scripts.app.schema import RolloutConfig
from scripts.app.strategies import kv_bytes, ring_layers, seen_past
from scripts.app.trace import TRACE_FILE, StepTrace

OK, FAILED, REFUSED = 0, 1, 2


def run_rollout(config: RolloutConfig, run_dir: RunDir, *, name: str, group: str | None) -> int:
    """Run a checked config in a claimed folder; the exit code. Whatever ends the run is recorded, Ctrl-C too.

    name, group: of the W&B run. Input that only turned out unfit once it was decoded (a video that is too short) is
    told in one line, with exit code 2, like any other bad input.
    """
    console = Console(soft_wrap=True, highlight=False)
    rss = PeakRss()
    tracker: Tracker | None = None
    meter = FrameMeter(synchronizer(config.device), warmup=config.warmup, target_fps=config.target_fps)
    rollout: Rollout | None = None
    facts: dict[str, Any] = {"compile/ms_total": 0.0}
    error: BaseException | None = None
    code = OK
    with run_dir:
        try:
            run_dir.write_config(config)
            tracker = start_tracker(
                config.tracking.mode,
                project=config.tracking.project,
                group=group,
                name=name,
                config=config,
                directory=run_dir.path,
            )
            try:
                rollout = Rollout.set_up(config)
            except ValueError:
                code = REFUSED
                raise
            facts |= _facts(rollout)
            report.print_header(console, rollout.geometry, config, facts)
            if config.compile:
                facts["compile/ms_total"] = _compile_ahead(rollout)
            _drive(rollout, meter, rss, run_dir, tracker, console)
            report.write_media(rollout, run_dir.path)
        except BaseException as raised:  # Ctrl-C and a closed pipe too: whatever ends the run is on record
            error, code = raised, code or FAILED
        summary = meter.summary() | facts | _memory(rollout, rss)
        run_dir.write_summary(summary, error=error)
    sync_line = _finish(tracker, summary, run_dir, error)
    if error is not None:
        if code == REFUSED:
            print(f"error: {error}", file=sys.stderr)
        else:
            traceback.print_exception(error)
            print(f"failed: {run_dir.path}", file=sys.stderr)
        return code
    report.print_end(console, summary, run_dir.path, sync_line)
    return OK


def _drive(
    rollout: Rollout, meter: FrameMeter, rss: PeakRss, run_dir: RunDir, tracker: Tracker, console: Console
) -> None:
    """Run every request to its end, a row per step. Raises what failed a request, once the others are through."""
    config, runner = rollout.config, rollout.runner
    assert config.num_frames is not None
    trace = None
    if config.profile:
        generating = config.num_frames - config.context_frames
        skipped = config.warmup if config.warmup < generating else 0
        trace = StepTrace(run_dir.path / TRACE_FILE, config.context_frames + skipped, torch.device(config.device))
    for request in build.rollout_requests(config, rollout.clips, config.num_frames):
        runner.submit(request)
    meter.mark_start()
    with _progress(console) as progress:
        task = progress.add_task("frames", total=config.num_frames * config.num_sessions)
        step = 0
        while runner.pending:
            if trace is not None:
                trace.before_step(step)
            meter.start()
            results = runner.step()
            timed = meter.stop(frames=sum(result.phase == "generated" for result in results)) if results else None
            if trace is not None:
                trace.after_step(step)
            if timed is None:
                continue  # every row failed: nothing was committed
            row = frame_row(step, results, runner, rss) | {"latency_ms": timed.ms, "warmup": timed.warmup}
            rollout.rows.append(row)
            run_dir.write_frame(row)
            tracker.log_frame(row)
            images = frames_to_uint8(torch.stack([result.image for result in results]))
            for result, image in zip(results, images, strict=True):
                rollout.frames[result.rid].append(image)
            progress.advance(task, len(results))
            step += 1
    if trace is not None:
        trace.close()
    if runner.failed:
        rid, failure = next(iter(runner.failed.items()))
        failure.add_note(f"in request {rid!r}; {len(runner.failed)} of {config.num_sessions} requests failed")
        raise failure


def frame_row(
    step: int, results: list[FrameResult], runner: StepRunner | RecomputeRunner, rss: PeakRss
) -> dict[str, Any]:
    """The row of ``records.FRAME_COLUMNS`` of one step, without its time."""
    reserved, in_use = build.kv_held(runner)
    return {
        "step": step,
        "phase": "generated" if any(result.phase == "generated" for result in results) else "context",
        "clocks": [result.frame for result in results],
        "frames": [[result.rid, result.frame] for result in results],
        "sessions": build.sessions_held(runner),
        "kv_bytes": reserved,
        "kv_in_use_bytes": in_use,
        "rss_bytes": rss.current_bytes(),
    }


def _compile_ahead(rollout: Rollout) -> float:
    """Run a short rollout through every shape of pass and drop it; the milliseconds that took."""
    started = time.perf_counter()
    runner = rollout.runner
    for request in build.rollout_requests(rollout.config, rollout.clips, 2, prefix="compile-"):
        runner.submit(request)
    while runner.pending:
        runner.step()
    failed = list(runner.failed.values())
    for rid in runner.resident:
        runner.cancel(rid)
    if failed:
        raise failed[0]
    return (time.perf_counter() - started) * 1000.0


def _facts(rollout: Rollout) -> dict[str, Any]:
    """What the summary says of a run besides its measurements."""
    config, weights = rollout.config, rollout.weights
    layers = () if seen_past(config) == "everything" else ring_layers(config, rollout.geometry)
    assert config.num_frames is not None
    return {
        "machine": machine_card(config.device, packages=("ringkv", "model", "scripts")),
        "memory/kv_bytes_predicted": kv_bytes(config, rollout.geometry),
        "ring/frames": [layer.ring_frames for layer in layers],
        "ring/dilation": [layer.pinned_dilation for layer in layers],
        "ring/wraps": [ring_wraps(layer, config.num_frames) for layer in layers],
        "model/parameters": rollout.geometry.num_parameters,
        "model/weights": "random" if weights.path is None else str(weights.path),
        "model/differs_from_training": build.differences_from_training(config, weights),
        "data/sources": [clip.source for clip in rollout.clips],
        "data/hashes": [clip.content_hash for clip in rollout.clips],
        "data/fps": rollout.clips[0].fps,
    }


def _memory(rollout: Rollout | None, rss: PeakRss) -> dict[str, Any]:
    in_use = [row["kv_in_use_bytes"] for row in rollout.rows] if rollout else []
    return {
        "memory/kv_bytes": build.kv_held(rollout.runner)[0] if rollout else None,
        "memory/kv_in_use_bytes": max(in_use, default=None),
        "memory/peak_rss_bytes": rss.peak_bytes(),
    }


def _finish(
    tracker: Tracker | None, summary: dict[str, Any], run_dir: RunDir, error: BaseException | None
) -> str | None:
    """Close the W&B run, as failed if the rollout did; the line that uploads it."""
    if tracker is None:
        return None
    try:
        tracker.summary(summary)
        if error is None:
            tracker.media(video=run_dir.path / report.VIDEO_FILE, image=run_dir.path / report.STRIP_FILE)
    finally:
        sync_line = tracker.finish(0 if error is None else 1)
    return sync_line


def synchronizer(device: str) -> Callable[[], None]:
    """What waits until the device has done all that was asked of it."""
    if device.startswith("cuda"):
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
