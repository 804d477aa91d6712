"""One rollout: prime the cache with real frames, generate the rest, measure, and leave a record behind."""

from __future__ import annotations

import math
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from model.data import frames_to_uint8
from ringkv import StepRunner
from ringkv.harness.frames import frame_checksum, psnr_db
from ringkv.harness.machine import machine_card
from ringkv.harness.meters import FrameMeter, PeakRss
from ringkv.harness.records import SNAPSHOT_FOLDER, RunDir, to_plain
from ringkv.harness.tracking import Tracker, start_tracker
from ringkv.harness.video import Pixels
from ringkv.recompute import RecomputeRunner
from ringkv.runner import FrameResult
from scripts.app import build, report
from scripts.app.geometry import ring_wraps
from scripts.app.restart import Restart, look_up, new_segment
from scripts.app.rollout import Rollout
from scripts.app.schema import RolloutConfig
from scripts.app.snapshots import Snapshots
from scripts.app.strategies import kv_bytes, ring_layers, seen_past
from scripts.app.trace import TRACE_FILE, StepTrace

OK, FAILED, REFUSED = 0, 1, 2


def run_rollout(config: RolloutConfig, run_dir: RunDir, *, name: str, group: str | None) -> int:
    """Run a checked config in a claimed folder, or go on in a reopened one; the exit code.

    Whatever ends the run is recorded, Ctrl-C too. name, group: of the W&B run, null for that of the folder; a reopened
    run keeps those that it began with. Input that only turned out unfit once it was decoded (a video that is too
    short), and a run that cannot go on here, are told in one line, with exit code 2, like any other bad input; the
    latter stays as it is.
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
            group = group or run_dir.path.name
            if not run_dir.resumes:
                run_dir.write_config(config)
                tracker = _track(config, run_dir, Restart(), group=group, name=name)
            try:
                rollout = Rollout.set_up(config)
                restart = look_up(run_dir, config, rollout)
            except ValueError:
                code = REFUSED
                raise
            facts |= _facts(rollout)
            if run_dir.resumes:
                if restart.segments:
                    group, name = restart.segments[0]["group"], restart.segments[0]["name"]
                run_dir.continue_run()
                tracker = _track(config, run_dir, restart, group=group, name=name)
            assert tracker is not None
            segment = new_segment(restart, rollout, facts["machine"], group=group, name=name, wandb_id=tracker.run_id)
            run_dir.write_segments([*restart.segments, segment])
            restart.hand_over(rollout, meter)
            report.print_header(console, rollout.geometry, config, facts)
            report.print_restart(console, restart, facts)
            if config.compile or (run_dir.resumes and config.warmup):
                ahead_ms = _run_ahead(rollout)
                facts["compile/ms_total"] = ahead_ms if config.compile else 0.0
            _drive(rollout, meter, rss, run_dir, restart, tracker, console)
            report.write_media(rollout, run_dir.path)
        except BaseException as raised:  # Ctrl-C and a closed pipe too: whatever ends the run is on record
            error, code = raised, code or FAILED
        summary = meter.summary() | facts | _memory(rollout, rss) | {"quality/psnr_db": _mean_psnr_db(rollout)}
        if run_dir.begun:
            run_dir.write_summary(summary, error=error)
        if error is None:
            shutil.rmtree(run_dir.path / SNAPSHOT_FOLDER, ignore_errors=True)
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


def _track(config: RolloutConfig, run_dir: RunDir, restart: Restart, *, group: str, name: str) -> Tracker:
    """The W&B run of this segment. A later one names, in its config, those that it goes on from."""
    tracked = to_plain(config)
    if restart.segments:
        earlier = [segment["wandb_id"] for segment in restart.segments]
        tracked["resumed"] = {"segment": len(earlier), "first_step": len(restart.rows), "wandb_ids": earlier}
    return start_tracker(
        config.tracking.mode,
        project=config.tracking.project,
        group=group,
        name=name,
        config=tracked,
        directory=run_dir.path,
        last_step=len(restart.rows) - 1 if restart.rows else None,
    )


def _drive(
    rollout: Rollout,
    meter: FrameMeter,
    rss: PeakRss,
    run_dir: RunDir,
    restart: Restart,
    tracker: Tracker,
    console: Console,
) -> None:
    """Run every request to its end, a row per step. Raises what failed a request, once the others are through."""
    config, runner = rollout.config, rollout.runner
    assert config.num_frames is not None
    trace = None
    if config.profile:
        generating = config.num_frames - config.context_frames
        skipped = config.warmup if config.warmup < generating else 0
        trace = StepTrace(run_dir.path / TRACE_FILE, config.context_frames + skipped, torch.device(config.device))
    snapshots = Snapshots(run_dir.path / SNAPSHOT_FOLDER, config.snapshot_every, restart.snapshot)
    _submit(rollout, restart)
    if restart.nothing_generated:  # else the first frame was an earlier process's
        meter.mark_start()
    with _progress(console) as progress:
        total, done = config.num_frames * config.num_sessions, restart.from_step * config.num_sessions
        task = progress.add_task("frames", total=total, completed=done)
        step = restart.from_step
        while runner.pending:
            again = step < len(restart.rows)
            if trace is not None:
                trace.before_step(step)
            if not again:
                meter.start()
            results = runner.step()
            generated = sum(result.phase == "generated" for result in results)
            timed = meter.stop(frames=generated) if results and not again else None
            if trace is not None:
                trace.after_step(step)
            if again and runner.failed:
                break  # what was logged cannot be made again
            if not results:
                continue  # every row failed: nothing was committed
            images = frames_to_uint8(torch.stack([result.image for result in results]))
            row = frame_row(step, results, images, rollout.truths, runner, rss)
            if timed is None:
                restart.compare(row)
            else:
                row |= {"latency_ms": timed.ms, "warmup": timed.warmup}
                rollout.rows.append(row)
                run_dir.write_frame(row)
                tracker.log_frame(row)
            for result, image in zip(results, images, strict=True):
                rollout.frames[result.rid].append(image)
            progress.advance(task, len(results))
            step += 1
            # Not while priming, whose end is what latency/first_frame_ms waits for.
            wanted = generated and runner.pending and not runner.failed
            if wanted and isinstance(runner, StepRunner) and snapshots.due(step):
                run_dir.flush_frames()
                snapshots.take(runner, rollout.frames, meter.first_frame_ms)
    if trace is not None:
        trace.close()
    if runner.failed:
        rid, failure = next(iter(runner.failed.items()))
        failure.add_note(f"in request {rid!r}; {len(runner.failed)} of {config.num_sessions} requests failed")
        raise failure


def _submit(rollout: Rollout, restart: Restart) -> None:
    """Queue every session, from its state if there is one."""
    config, runner = rollout.config, rollout.runner
    assert config.num_frames is not None
    states = {} if restart.snapshot is None else restart.snapshot.states
    for request in build.rollout_requests(config, rollout.clips, config.num_frames):
        if request.rid in states:
            assert isinstance(runner, StepRunner)
            runner.submit(request, states[request.rid])
        else:
            runner.submit(request)


def frame_row(
    step: int,
    results: Sequence[FrameResult],
    images: Pixels,
    truths: Mapping[str, Pixels],
    runner: StepRunner | RecomputeRunner,
    rss: PeakRss,
) -> dict[str, Any]:
    """The row of ``records.FRAME_COLUMNS`` of one step, without its time.

    images: uint8 [B, H, W, C], the frames of ``results``. truths: per session the recorded frames, uint8 [N, H, W, C].
    """
    reserved, in_use = build.kv_held(runner)
    psnr = [
        psnr_db(image, truths[result.rid][result.frame]) if result.phase == "generated" else None
        for result, image in zip(results, images, strict=True)
    ]
    return {
        "step": step,
        "phase": "generated" if any(result.phase == "generated" for result in results) else "context",
        "clocks": [result.frame for result in results],
        "frames": [[result.rid, result.frame] for result in results],
        "sessions": build.sessions_held(runner),
        "kv_bytes": reserved,
        "kv_in_use_bytes": in_use,
        "rss_bytes": rss.current_bytes(),
        "checksums": [frame_checksum(image) for image in images],
        "psnr_db": psnr,
    }


def _run_ahead(rollout: Rollout) -> float:
    """Run a short rollout through every shape of pass and drop it; the milliseconds that took.

    It compiles, where the config says so. A resumed run, whose warm-up steps are on record, is warmed up by it.
    """
    started = time.perf_counter()
    runner = rollout.runner
    if isinstance(runner, StepRunner) and runner.captured is not None:
        runner.captured.warm_up()
        return (time.perf_counter() - started) * 1000.0
    for request in build.rollout_requests(rollout.config, rollout.clips, 2, prefix="ahead-"):
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
    rows = rollout.rows if rollout else []
    return {
        "memory/kv_bytes": build.kv_held(rollout.runner)[0] if rollout else None,
        "memory/kv_in_use_bytes": max((row["kv_in_use_bytes"] for row in rows), default=None),
        "memory/peak_rss_bytes": max([rss.peak_bytes(), *(row["rss_bytes"] for row in rows)]),
    }


def _mean_psnr_db(rollout: Rollout | None) -> float | None:
    values = [value for row in rollout.rows for value in row["psnr_db"] if value is not None] if rollout else []
    return math.fsum(values) / len(values) if values else None


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
