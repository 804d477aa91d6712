"""The comparison: every strategy makes the same rollout, in turns, and what they took and made is set side by side.

Turns are blocks of frames, in the order A B C, C B A, A B C, ...: what drifts slowly (heat, a neighbour on the machine)
falls on all alike. Warm-up is a rollout of its own before the first turn. W&B gets its copy when all is measured, so
that its process takes no time from a turn.
"""

from __future__ import annotations

import dataclasses
import sys
import traceback
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from model.config import ModelConfig
from model.data import Clip
from model.sampler import FrameSampler
from ringkv.harness.ledger import measure_frames
from ringkv.harness.machine import machine_card
from ringkv.harness.records import RunDir, dumps_strict, error_line, replace_text, to_plain
from ringkv.harness.tracking import start_tracker
from scripts.app import build, compare_report
from scripts.app.compare_check import REFERENCE, Comparison
from scripts.app.compare_equality import measure_equality
from scripts.app.compare_lane import Lane
from scripts.app.compare_stats import block_sums, paired_ratio
from scripts.app.geometry import model_config
from scripts.app.strategies import kv_config, seen_past

OK, FAILED, REFUSED = 0, 1, 2


def run_comparison(comparison: Comparison, run_dir: RunDir) -> int:
    """Run a checked comparison in a claimed folder; the exit code. Whatever ends it is recorded, Ctrl-C too.

    Each strategy has a folder of its own below, with the records of a rollout; the comparison's own frames.jsonl stays
    empty. A strategy that fails does not stop the others.
    """
    console = Console(soft_wrap=True, highlight=False)
    lanes: list[Lane] = []
    facts: dict[str, Any] = {}
    found: dict[str, Any] = {"ledger": {}, "equality": None}
    error: BaseException | None = None
    code = OK
    with run_dir:
        try:
            run_dir.write_config(comparison.config)
            geometry = model_config(comparison.config)
            try:
                clips, model = _set_up(comparison, geometry, facts)
            except ValueError:
                code = REFUSED
                raise
            compare_report.print_header(console, comparison, geometry, facts)
            for name, config in comparison.rollouts.items():
                lane_dir = RunDir.create(run_dir.path / name)
                lane_dir.write_config(config)
                lanes.append(Lane(name, config, geometry, lane_dir, comparison.budget_bytes))
            _take_turns(comparison, lanes, model, clips, console)
            _measure_the_rest(comparison, lanes, model, clips[0], found)
        except BaseException as raised:  # Ctrl-C and a closed pipe too
            error, code = raised, code or FAILED
        for lane in lanes:
            if not lane.over:
                lane.end(error)
        failures = [lane for lane in lanes if lane.ended is not None and lane.ended.status == "failed"]
        if error is None and failures:
            code = FAILED
            error = RuntimeError(f"strategies failed: {', '.join(lane.name for lane in failures)}")
        result = _result(comparison, lanes, facts, found, error)
        replace_text(run_dir.path / compare_report.COMPARE_FILE, dumps_strict(result, indent=1) + "\n")
        run_dir.write_summary(facts, error=error)
        if any(lane.frame_ms for lane in lanes):
            compare_report.write_pictures(result, run_dir.path)
    if code == REFUSED:
        print(f"error: {error}", file=sys.stderr)
        return code
    offline = _track(comparison, lanes, run_dir.path.name)
    if any(lane.rows for lane in lanes):
        compare_report.print_end(console, result, run_dir.path, offline=offline)
    if error is not None:
        if failures:
            for lane in failures:
                assert lane.ended is not None
                print(lane.ended.traceback, file=sys.stderr, end="")
        else:
            traceback.print_exception(error)
        print(f"failed: {run_dir.path}", file=sys.stderr)
    return code


def _set_up(comparison: Comparison, geometry: ModelConfig, facts: dict[str, Any]) -> tuple[list[Clip], FrameSampler]:
    """Load what all share, and note where it comes from. ``ValueError`` for input that turns out unfit."""
    config = comparison.config
    assert config.threads is not None
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    clips = build.load_clips(config, geometry)
    weights = build.build_weights(config, geometry)
    facts |= {
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
    for lane in lanes:
        lane.start(model, clips)
    for lane in lanes:
        lane.advance(config.context_frames)  # a turn that no ratio counts
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("frames", total=config.num_frames)
        turn = 0
        while any(lane.running for lane in lanes):
            for lane in lanes if turn % 2 == 0 else lanes[::-1]:
                lane.advance(config.block_frames)
            turn += 1
            progress.update(task, completed=max(lane.made for lane in lanes))
    for lane in lanes:
        if not lane.over:
            lane.end()


def _measure_the_rest(
    comparison: Comparison, lanes: list[Lane], model: FrameSampler, clip: Clip, found: dict[str, Any]
) -> None:
    """What needs no clock: the ledger of each strategy, and who agrees with whom."""
    config = comparison.config
    assert config.equality_frames is not None
    geometry = model.model.config
    if config.ledger:
        found["ledger"] = {lane.name: _ledger(lane, geometry) for lane in lanes}
    started = {lane.name: lane.config for lane in lanes if lane.made}
    if config.equality_frames:
        found["equality"] = measure_equality(started, geometry, model, clip, config.equality_frames)


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


def _result(
    comparison: Comparison,
    lanes: list[Lane],
    facts: dict[str, Any],
    found: dict[str, Any],
    error: BaseException | None,
) -> dict[str, Any]:
    """What compare.json holds; ``compare_report.DEFINITIONS`` says what its numbers are."""
    config = comparison.config
    blocks = {lane.name: block_sums(lane.frame_ms, config.block_frames) for lane in lanes}
    rows = []
    for lane in lanes:
        row = {
            "strategy": lane.name,
            "sees": seen_past(lane.config),
            "status": lane.ended.status if lane.ended else "ok",
            "ended": lane.ended,
            "frames": lane.made,
            "ratio": paired_ratio(blocks[lane.name], blocks[REFERENCE], seed=config.seed),
            "ledger": found["ledger"].get(lane.name),
        }
        curves = {
            "frame": list(range(lane.made)),
            **{key: [row[key] for row in lane.rows] for key in ("phase", "latency_ms", "kv_bytes", "kv_in_use_bytes")},
        }
        rows.append(row | lane.summary() | {"curves": curves})
    return to_plain(
        {
            "status": "ok" if error is None else "failed",
            "error": None if error is None else error_line(error),
            "reference": REFERENCE,
            "definitions": compare_report.DEFINITIONS,
            "config": config,
            **facts,
            "strategies": rows,
            "equality": found["equality"],
        }
    )


def _track(comparison: Comparison, lanes: list[Lane], name: str) -> bool:
    """One W&B run per strategy in one group; whether there are offline ones to upload."""
    tracking, offline = comparison.config.tracking, False
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
            offline |= tracker.finish(0 if lane.ended is None else 1) is not None
    return offline
