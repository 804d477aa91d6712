"""What a rollout shows a person: the first lines, the pictures, and the last lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from model.config import ModelConfig
from ringkv.harness.plots import frames_png, strip_png
from ringkv.harness.records import PLOT_FILE, STRIP_FILE, SUMMARY_FILE, VIDEO_FILE
from ringkv.harness.tables import format_value, print_summary
from ringkv.harness.video import SessionFrames, compose_grid, write_mp4
from scripts.app.restart import Restart
from scripts.app.rollout import Rollout
from scripts.app.schema import RolloutConfig

MAX_SESSIONS_SHOWN = 9
_STRIP_COLUMNS = 10


def print_header(console: Console, model: ModelConfig, config: RolloutConfig, facts: Mapping[str, Any]) -> None:
    """Say what runs on what, and what to expect of it."""
    sessions = "1 session" if config.num_sessions == 1 else f"{config.num_sessions} sessions"
    past = "the whole past in each layer"
    if facts["ring/dilation"]:
        dilated = sum(dilation > 1 for dilation in facts["ring/dilation"])
        past = (
            f"{config.ring_frames} frames in each layer ({dilated} of {model.num_layers} layers keep one frame in "
            f"{config.dilation})"
        )
    kv_bytes = " ".join(format_value("kv_bytes", facts["memory/kv_bytes_predicted"]))
    for line in (
        f"model   {model.name}: {model.num_parameters / 1e6:.2f} M parameters, {model.num_layers} layers, frames of "
        f"{model.channels} x {model.height} x {model.width} in {model.tokens_per_frame} tokens",
        f"data    {facts['data/sources'][0]}" + (f" and {config.num_sessions - 1} more" * (config.num_sessions > 1)),
        f"cache   {config.kv.strategy} of {past}, {kv_bytes} in {config.kv_dtype}",
        f"run     {sessions} of {config.num_frames} frames, {config.context_frames} of them context; {config.device}, "
        f"{config.dtype}, {config.threads} {'thread' if config.threads == 1 else 'threads'}",
    ):
        console.print(line, markup=False)
    if facts["model/weights"] == "random":
        why = (
            "checkpoint=null"
            if config.checkpoint is None
            else f"none that ships fits this geometry and data={config.data.name}"
        )
        console.print(f"weights random ({why}): the generated frames are noise", style="yellow", markup=False)
    else:
        console.print(f"weights {facts['model/weights']}", markup=False)
    for line in facts["model/differs_from_training"]:
        console.print(f"        {line}", style="yellow", markup=False)


def print_restart(console: Console, restart: Restart, facts: Mapping[str, Any]) -> None:
    """Say where a resumed run goes on, and what it ran before if that was other code."""
    if not restart.segments:
        return
    again = len(restart.rows) - restart.from_step
    where = f"from frame {restart.from_step}" if restart.snapshot else "from frame 0, as it has no snapshot"
    console.print(
        f"resumed {where}; {again} logged {'frame is' if again == 1 else 'frames are'} made again and compared",
        markup=False,
    )
    if restart.segments[-1]["source_hash"] != facts["machine"]["source_hash"]:
        console.print("        the source files are not those that it ran before", style="yellow", markup=False)


def write_media(rollout: Rollout, folder: Path) -> None:
    """Write the video, the strip of the first session and the plot of latency and memory."""
    config = rollout.config
    sessions = [
        SessionFrames(name, clip.frames, np.stack(frames), config.context_frames)
        for (name, frames), clip in zip(rollout.frames.items(), rollout.clips, strict=True)
    ]
    write_mp4(folder / VIDEO_FILE, compose_grid(sessions[:MAX_SESSIONS_SHOWN]), fps=rollout.clips[0].fps)
    first = sessions[0]
    columns = strip_columns(len(first.rollout), config.context_frames)
    strip_png(folder / STRIP_FILE, first.truth, first.rollout, columns, config.context_frames)
    frames_png(folder / PLOT_FILE, rollout.rows)


def print_end(console: Console, summary: Mapping[str, Any], folder: Path, sync_line: str | None) -> None:
    """Print the table of results and where everything lies."""
    print_summary(summary, console)
    if summary["ring/wraps"]:
        console.print(f"ring wrapped, by layer: {', '.join(map(str, summary['ring/wraps']))}", markup=False)
    for label, name in (("video", VIDEO_FILE), ("strip", STRIP_FILE), ("plot", PLOT_FILE), ("summary", SUMMARY_FILE)):
        console.print(f"{label:<8}{folder / name}", markup=False)
    if sync_line is not None:
        console.print(f"{'upload':<8}{sync_line}", markup=False)


def strip_columns(num_frames: int, context_frames: int) -> list[int]:
    """Frames to show: evenly spread over the rollout, the last given and the first generated one among them."""
    spread = np.linspace(0, num_frames - 1, min(_STRIP_COLUMNS, num_frames)).round().astype(int).tolist()
    edge = {context_frames - 1, context_frames} if context_frames else {0}
    return sorted({*spread, *edge})
