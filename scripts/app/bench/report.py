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
from scripts.app.bench.targets import Levels, Rows, Target, point_name
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
    console.print(_table("Targets", ["what", "wanted", "measured", "95 % interval", "n", ""], cells))
    for target in measured:
        if target.note:
            console.print(f"{target.name}: {target.note}", markup=False)
    absent = [
        f"{target.name} ({target.note})" if target.note else target.name for target in found if target not in measured
    ]
    if absent:
        console.print(f"not measured: {'; '.join(absent)}", markup=False)


def print_levels(console: Console, levels: Levels) -> None:
    """A table for each level that has one."""
    for title, heading, cells in (
        ("Read path over its floor", *_read_cells(levels.get("reads", ()))),
        ("Other caches over the ring, frames from plan to commit", *_peer_cells(levels.get("peers", ()))),
        ("Steps of the main job", *_frame_cells(levels.get("frame", ()))),
        ("Rollouts, ms per frame of all sessions (frames per second)", *_rollout_cells(levels.get("rollout", ()))),
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


def _read_cells(rows: Rows) -> Cells:
    heading = ["point", "floor us", "ring us", "ratio", "95 % interval", "n", ""]
    cells = []
    for row in rows:
        ratio: Ratio = row["ratio"]
        cells.append(
            [
                point_name(row),
                f"{row['floor_s'] * 1e6:.0f}",
                f"{row['ring_s'] * 1e6:.0f}",
                f"{ratio.ratio:.3f}",
                _interval(ratio.low, ratio.high),
                str(ratio.blocks),
                "" if row["held"] else "not held",
            ]
        )
    return heading, cells


def _peer_cells(rows: Rows) -> Cells:
    names = list(dict.fromkeys(name for row in rows for name in row["ratios"] if name != "ring"))
    cells = []
    for row in rows:
        ratios = [row["ratios"].get(name) for name in names]
        point = f"{row['tokens_per_frame']} tokens, window {row['window']}, {row['dtype']}"
        cells.append([point, f"{row['frame_s']['ring'] * 1e6:.0f} ({row['best_read']['ring']})", *map(_ratio, ratios)])
    return ["point", "ring us (read)", *names], cells


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


def _rollout_cells(rows: Rows) -> Cells:
    done = [row for row in rows if row["status"] == "ok"]
    cases = list(dict.fromkeys((row["mode"], row["sessions"]) for row in done))
    found = {(row["strategy"], row["mode"], row["sessions"]): row for row in done}
    cells = []
    for name in dict.fromkeys(row["strategy"] for row in done):
        line = [name]
        for mode, sessions in cases:
            row = found.get((name, mode, sessions))
            line.append(NOT_AVAILABLE if row is None else f"{row['frame_ms']:.1f} ({row['frames_per_s']:.1f})")
        cells.append(line)
    return ["strategy", *(f"{mode} {sessions}" for mode, sessions in cases)], cells


def _label(row: Mapping[str, Any]) -> str:
    return " ".join(str(row[key]) for key in ("what", "strategy", "mode", "sessions") if key in row)


def _ratio(ratio: Ratio | None) -> str:
    return NOT_AVAILABLE if ratio is None else f"{ratio.ratio:.2f} ({_interval(ratio.low, ratio.high)})"


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{low:.3f}-{high:.3f}"


def _table(title: str, heading: Sequence[str], cells: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, name in enumerate(heading):
        table.add_column(name, justify="right" if index else "left", no_wrap=index > 0)
    for row in cells:
        table.add_row(*row)
    return table
