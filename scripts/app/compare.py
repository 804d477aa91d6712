"""The comparison: every strategy makes the same rollout, in turns, and what they took and made is set side by side.

Turns are blocks of frames, in the order A B C, C B A, A B C, ...: what drifts slowly (heat, a neighbour on the machine)
falls on all alike. Warm-up is a rollout of its own before the first turn. W&B gets its copy when all is measured, so
that its process takes no time from a turn.
"""

from __future__ import annotations

import dataclasses
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from model.config import ModelConfig
from model.data import Clip
from model.sampler import FrameSampler
from ringkv.harness.ledger import measure_frames
from ringkv.harness.machine import machine_card
from ringkv.harness.records import RunDir, dumps_strict, error_line, replace_text
from ringkv.harness.tracking import start_tracker
from scripts.app import build, compare_report
from scripts.app.compare_check import REFERENCE, Comparison
from scripts.app.compare_equality import measure_equality
from scripts.app.compare_lane import Lane
from scripts.app.compare_stats import block_sums, paired_ratio
from scripts.app.geometry import model_config
from scripts.app.strategies import kv_config, seen_past

OK, FAILED, REFUSED = 0, 1, 2
COMPARE_FILE, PLOT_FILE, PAGE_FILE = "compare.json", "compare.png", "compare.html"


def run_comparison(comparison: Comparison, run_dir: RunDir) -> int:
    """Run a checked comparison in a claimed folder; the exit code. Whatever ends it is recorded, Ctrl-C too.

    Each strategy has a folder of its own below, with the records of a rollout.
    """
    console = Console(soft_wrap=True, highlight=False)
    lanes: list[Lane] = []
    result: dict[str, Any] = {}
    error: BaseException | None = None
    code = OK
    with run_dir:
        try:
            run_dir.write_config(comparison.config)
            geometry = model_config(comparison.config)
            try:
                clips, model = _set_up(comparison, geometry, result)
            except ValueError:
                code = REFUSED
                raise
            compare_report.print_header(console, comparison, geometry, result)
            for name, config in comparison.rollouts.items():
                lane_dir = RunDir.create(run_dir.path / name)
                lane_dir.write_config(config)
                lanes.append(Lane(name, config, geometry, lane_dir, comparison.budget_bytes))
            _take_turns(comparison, lanes, model, clips, console)
            _measure_the_rest(comparison, lanes, model, clips[0], result)
        except BaseException as raised:  # Ctrl-C and a closed pipe too
            error, code = raised, code or FAILED
        for lane in lanes:
            if not lane.over:
                lane.end(error)
        failed = [lane.name for lane in lanes if lane.ended is not None and lane.ended.status == "failed"]
        if error is None and failed:
            error, code = RuntimeError(f"failed: {', '.join(failed)}; see {COMPARE_FILE}"), FAILED
        _write(comparison, lanes, result, run_dir, error)
    if code == REFUSED:
        print(f"error: {error}", file=sys.stderr)
        return code
    sync_lines = _track(comparison, lanes, run_dir.path.name)
    if lanes and "strategies" in result:
        compare_report.print_end(console, result, run_dir.path, sync_lines)
    if error is not None:
        traceback.print_exception(error)
        print(f"failed: {run_dir.path}", file=sys.stderr)
    return code


def _set_up(
    comparison: Comparison, geometry: ModelConfig, result: dict[str, Any]
) -> tuple[list[Clip], FrameSampler]:
    """Load what all share, and note where it comes from. ``ValueError`` for input that turns out unfit."""
    config = comparison.config
    assert config.threads is not None
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    clips = build.load_clips(config, geometry)
    weights = build.build_weights(config, geometry)
    result |= {
        "machine": machine_card(config.device, packages=("ringkv", "model", "scripts")),
        "model/parameters": geometry.num_parameters,
        "model/weights": "random" if weights.path is None else str(weights.path),
        "model/differs_from_training": build.differences_from_training(config, weights),
        "data/sources": [clip.source for clip in clips],
        "data/hashes": [clip.content_hash for clip in clips],
    }
    return clips, FrameSampler(weights.model)


def _take_turns(
    comparison: Comparison, lanes: list[Lane], model: FrameSampler, clips: list[Clip], console: Console
) -> None:
    config = comparison.config
    assert config.num_frames is not None
    for lane in lanes:
        lane.start(model, clips)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("frames", total=config.num_frames)
        order = lanes
        frames = config.context_frames  # the given frames are a turn of their own, which no ratio counts
        while any(lane.running for lane in lanes):
            for lane in order:
                lane.advance(frames)
            progress.update(task, completed=max(lane.made for lane in lanes))
            order = order[::-1] if frames == config.block_frames or not config.context_frames else order
            frames = config.block_frames
    for lane in lanes:
        if not lane.over:
            lane.end()


def _measure_the_rest(
    comparison: Comparison, lanes: list[Lane], model: FrameSampler, clip: Clip, result: dict[str, Any]
) -> None:
    """What needs no clock: the ledger of each strategy, and who agrees with whom."""
    config = comparison.config
    assert config.equality_frames is not None
    geometry = model.model.config
    if config.ledger:
        result["ledger"] = {lane.name: _ledger(lane, geometry) for lane in lanes}
    started = {lane.name: lane.config for lane in lanes if lane.made}
    if config.equality_frames:
        result["equality"] = measure_equality(started, geometry, model, clip, config.equality_frames)


def _ledger(lane: Lane, geometry: ModelConfig) -> dict[str, Any] | None:
    """Means over the last frames that a strategy made, one period of its dilation; None without a cache or a frame."""
    kept = kv_config(dataclasses.replace(lane.config, num_sessions=1), geometry)
    if not lane.made or not kept.resource_path:
        return None
    period = max(geometry.layer_dilations(lane.config.dilation)) if seen_past(lane.config) == "window" else 1
    frames = range(max(0, lane.made - period), lane.made)
    resource = build.build_resource(kept, build.resource_info(lane.config))
    measured = measure_frames(resource, frames=frames, denoise_passes=len(geometry.sigmas) - 1)
    count = len(measured)
    return {
        "frames": [frames[0], frames[-1]],
        "frame_writes_by_layer": [
            sum(layer.frame_writes for layer in layers) / count for layers in zip(*measured, strict=True)
        ],
        "bytes_written_per_frame": sum(layer.bytes_written for layers in measured for layer in layers) / count,
        "bytes_read_per_frame": sum(layer.bytes_read for layers in measured for layer in layers) / count,
    }


def _strategies(comparison: Comparison, lanes: list[Lane], result: dict[str, Any]) -> list[dict[str, Any]]:
    """The row of each strategy, with its curves."""
    block_frames = comparison.config.block_frames
    blocks = {lane.name: block_sums(lane.frame_ms, block_frames) for lane in lanes}
    rows = []
    for lane in lanes:
        ratio = paired_ratio(blocks[lane.name], blocks[REFERENCE], seed=comparison.config.seed)
        rows.append(
            {
                "strategy": lane.name,
                "sees": seen_past(lane.config),
                "status": lane.ended.status if lane.ended else "ok",
                "ended": lane.ended,
                "frames": lane.made,
                "ratio": ratio,
                "ledger": result.get("ledger", {}).get(lane.name),
            }
            | lane.summary()
            | {
                "curves": {
                    "frame": list(range(lane.made)),
                    "phase": [row["phase"] for row in lane.rows],
                    "frame_ms": [row["latency_ms"] for row in lane.rows],
                    "kv_bytes": [row["kv_bytes"] for row in lane.rows],
                    "kv_in_use_bytes": [row["kv_in_use_bytes"] for row in lane.rows],
                }
            }
        )
    return rows


def _write(
    comparison: Comparison,
    lanes: list[Lane],
    result: dict[str, Any],
    run_dir: RunDir,
    error: BaseException | None,
) -> None:
    """compare.json always; the pictures when there is something to draw."""
    result["strategies"] = _strategies(comparison, lanes, result)
    result.pop("ledger", None)
    result |= {
        "status": "ok" if error is None else "failed",
        "error": None if error is None else error_line(error),
        "block_frames": comparison.config.block_frames,
        "num_frames": comparison.config.num_frames,
        "context_frames": comparison.config.context_frames,
        "reference": REFERENCE,
        "definitions": compare_report.DEFINITIONS,
    }
    replace_text(run_dir.path / COMPARE_FILE, dumps_strict(result, indent=1) + "\n")
    run_dir.write_summary(
        {key: value for key, value in result.items() if key not in ("strategies", "status", "error")}, error=error
    )
    if any(lane.frame_ms for lane in lanes):
        compare_report.write_pictures(comparison, result, run_dir.path / PLOT_FILE, run_dir.path / PAGE_FILE)


def _track(comparison: Comparison, lanes: list[Lane], name: str) -> list[str]:
    """One W&B run per strategy in one group; the lines that upload them."""
    tracking, lines = comparison.config.tracking, []
    for lane in lanes:
        tracker = start_tracker(
            tracking.mode,
            project=tracking.project,
            group=tracking.group or name,
            name=lane.name,
            config=lane.config,
            directory=lane.run_dir.path,
        )
        with tracker:
            for row in lane.rows:
                tracker.log_frame(row)
            tracker.summary(lane.summary())
            line = tracker.finish(0 if lane.ended is None else 1)
        lines += [] if line is None else [line]
    return lines


def folder_files(folder: Path) -> list[tuple[str, Path]]:
    """What a comparison leaves for a person to look at."""
    return [(label, folder / name) for label, name in (("page", PAGE_FILE), ("plot", PLOT_FILE), ("rows", COMPARE_FILE))]
