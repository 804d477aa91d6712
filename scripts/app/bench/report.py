"""What a benchmark shows a person: targets and figures as tables. ``plot`` draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ringkv.harness.tables import NOT_AVAILABLE
from scripts.app.bench.check import Bench
from scripts.app.bench.targets import Levels, Rows, Target
from scripts.app.compare_stats import DEFINITION, Ratio

BENCH_FILE, PLOT_FILE = "bench.json", "bench.png"

DEFINITIONS = {
    "reads": "One layer, 8 query heads, 4 KV heads, head dim 64. A frame is four passes that do not commit and one "
    "that does; ring: its calls of attend; floor: as many attention calls over exactly the visible keys, contiguous, "
    "queries grouped or folded, whichever is faster. Both take their turn at every frame. Where five passes took "
    "longer than a quarter of a second, one denoise pass is timed for all four. A point is held to the targets if its "
    "floor is 200 us or more per call.",
    "peers": "The same frames through other caches, from plan to commit, each by its fastest read. Of the grid: one "
    "session, one thread, local layers, wrapped, windows of up to 2,048 tokens, beyond which attention is all.",
    "frame": "A step of the main job, from admission to the row of figures, after its rings have wrapped; floor: "
    "every product and attention call of that frame alone, each as fast as this machine has it.",
    "rollout": "Generated frames of the main job, all layers local, from a full window on. Strategies that recompute "
    "their past take a few frames of one session, eager.",
    "steady": "What a long session must not change. Memory growth: of the whole process, over frames of a tiny one.",
    "ratio": DEFINITION,
    "median of the grid": "The median over points of their ratios; its interval resamples the samples of each point.",
    "short": "In the table of reads: a floor too short to be held to the targets.",
    "targets": "held or short by the measured figure alone; the interval says how sure that is. n: samples, of a "
    "median of the grid points.",
}


def print_targets(console: Console, found: Sequence[Target]) -> None:
    """The table of targets that were measured, and a line for those that were not."""
    measured = [target for target in found if target.verdict != "not measured"]
    cells = []
    for target in measured:
        interval, count = _interval(target.low, target.high), "" if target.n is None else str(target.n)
        cells.append([target.name, target.wanted, f"{target.measured:.3f}", interval, count, target.verdict])
    heading = ["what", "wanted", "measured", "95 % interval", "n", ""]
    console.print(_table("Targets", heading, cells, wrap_first=True))
    for target in measured:
        if target.note:
            console.print(f"{target.name}: {target.note}", markup=False)
    absent = [
        f"{target.name} ({target.note})" if target.note else target.name for target in found if target not in measured
    ]
    if absent:
        console.print(f"not measured: {'; '.join(absent)}", markup=False)


def print_levels(console: Console, levels: Levels) -> None:
    """A table or two for each level that has some; each fits 80 columns."""
    rollouts = levels.get("rollout", ())
    for title, heading, cells in (
        (
            "Read path over its floor: T tokens per frame, window W, S sessions, dilation d, threads t",
            *_read_cells(levels.get("reads", ())),
        ),
        ("Other caches over the ring, frames from plan to commit", *_peer_cells(levels.get("peers", ()))),
        ("Steps of the main job", *_frame_cells(levels.get("frame", ()))),
        ("Rollouts, ms per frame of all sessions (frames per second), eager", *_rollout_cells(rollouts, "eager")),
        ("The same, compiled", *_rollout_cells(rollouts, "compiled")),
    ):
        if cells:
            console.print(_table(title, heading, cells))
    for level, rows in levels.items():
        for row in rows:
            if row.get("status") == "failed":
                console.print(f"× {level} {_label(row)}: {row['reason']}", markup=False)


def print_header(console: Console, bench: Bench, machine: Mapping[str, Any]) -> None:
    """Say what is measured on what."""
    config = bench.config
    console.print(f"machine  {machine.get('cpu')}, torch {machine.get('torch')}", markup=False)
    console.print(f"levels   {', '.join(config.levels)}; {config.budget_s:g} s of samples", markup=False)
    console.print(
        f"job      {config.model.preset}, {config.dtype}, ring_frames={config.ring_frames}, "
        f"dilation={config.dilation}, threads={config.threads}",
        markup=False,
    )


def print_end(console: Console, folder: Path, sync_line: str | None) -> None:
    """Where everything lies."""
    for label, name in (("plot", PLOT_FILE), ("rows", BENCH_FILE)):
        if (folder / name).exists():
            console.print(f"{label:<8} {folder / name}", markup=False)
    if sync_line is not None:
        console.print(f"{'upload':<8} {sync_line}", markup=False)


# -- cells ---------------------------------------------------------------------------------------------------------

Cells = tuple[list[str], list[list[str]]]

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


def _read_cells(rows: Rows) -> Cells:
    heading = ["T/W/S", "floor us", "ring us", "ratio", "95 % interval", "n", ""]
    cells = []
    for row in rows:
        ratio: Ratio = row["ratio"]
        sizes = "/".join(str(row[key]) for key in ("tokens_per_frame", "window", "sessions"))
        dtype, threads = _SHORT.get(row["dtype"], row["dtype"]), f"t{row['threads']}"
        point = f"{sizes} {dtype} {row['fill']} d{row['dilation']} {threads}"
        figures = [f"{row['floor_s'] * 1e6:.0f}", f"{row['ring_s'] * 1e6:.0f}", f"{ratio.ratio:.3f}"]
        held = "" if row["held"] else "short"
        cells.append([point, *figures, _interval(ratio.low, ratio.high), str(ratio.blocks), held])
    return heading, cells


def _peer_cells(rows: Rows) -> Cells:
    cells = []
    for row in rows:
        point = [str(row["tokens_per_frame"]), str(row["window"]), _SHORT.get(row["dtype"], row["dtype"])]
        for name, ratio in row["ratios"].items():
            us, read = f"{row['frame_s'][name] * 1e6:.0f}", row["best_read"][name]
            over = ["1", ""] if name == "ring" else [f"{ratio.ratio:.3f}", _interval(ratio.low, ratio.high)]
            cells.append([*point, name, read, us, *over])
    return ["T", "W", "dtype", "cache", "best read", "us", "over the ring", "95 % interval"], cells


def _frame_cells(rows: Rows) -> Cells:
    heading = ["sessions", "mode", "step ms", "floor ms", "fraction", "95 % interval", "host share", "n"]
    cells = []
    for row in rows:
        if row["status"] == "ok":
            fraction: Ratio = row["fraction"]
            figures = [f"{row[key] * 1e3:.2f}" for key in ("step_s", "floor_s")]
            figures += [f"{fraction.ratio:.3f}", _interval(fraction.low, fraction.high)]
            figures += [f"{row['host_share'].ratio:.4f}", str(fraction.blocks)]
            cells.append([str(row["sessions"]), row["mode"], *figures])
    return heading, cells


def _rollout_cells(rows: Rows, mode: str) -> Cells:
    done = [row for row in rows if row["status"] == "ok" and row["mode"] == mode]
    counts = list(dict.fromkeys(row["sessions"] for row in done))
    found = {(row["strategy"], row["sessions"]): row for row in done}
    cells = []
    for name in dict.fromkeys(row["strategy"] for row in done):
        line = [name]
        for sessions in counts:
            row = found.get((name, sessions))
            line.append(NOT_AVAILABLE if row is None else f"{row['frame_ms']:.1f} ({row['frames_per_s']:.1f})")
        cells.append(line)
    return ["strategy", *(f"{count} session{'s' * (count > 1)}" for count in counts)], cells


def _label(row: Mapping[str, Any]) -> str:
    return " ".join(str(row[key]) for key in ("what", "strategy", "mode", "sessions") if key in row)


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{low:.3f}-{high:.3f}"


def _table(title: str, heading: Sequence[str], cells: Sequence[Sequence[str]], *, wrap_first: bool = False) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, name in enumerate(heading):
        table.add_column(name, justify="right" if index else "left", no_wrap=index > 0 or not wrap_first)
    for row in cells:
        table.add_row(*row)
    return table
