"""What a comparison shows a person: the first lines, the tables, the picture and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from model.config import ModelConfig
from ringkv.harness.records import replace_text
from ringkv.harness.tables import NOT_AVAILABLE, format_value
from scripts.app import compare_html, compare_plot
from scripts.app.compare_check import Comparison
from scripts.app.compare_equality import BY_DESIGN, CLOSE, EQUAL
from scripts.app.compare_stats import DEFINITION

COMPARE_FILE, PLOT_FILE, PAGE_FILE = "compare.json", "compare.png", "compare.html"

DEFINITIONS = {
    "time": "Milliseconds of a frame of all sessions, all its passes, to the end of its work on the device. Strategies "
    "take turns of block_frames frames, in the order A B C, C B A, and so on. Warm-up is a rollout of its own before "
    "the first turn; the given (context) frames count nowhere.",
    "ratio": DEFINITION,
    "memory": "Bytes of K and V after a frame: allocated, and those in use. Of recomputation, which keeps no K and V "
    "between frames: of the frames that it keeps.",
    "ledger": "Bytes of K and V written to cache buffers and fresh tensors, and read, per generated frame of one "
    "session over all layers: the mean over the last frames made, one period of the dilation. A frame-write is one "
    "frame's K and V in one layer. No clock is involved. The doubling of full context shows where it falls on one of "
    "those frames.",
    "equality": "Free-running rollouts of the first session under attention=canonical. Equal: every bit of every "
    "frame.",
    "fast_reads": "Each call of attend in those rollouts, answered by the fast read too: the largest difference, and "
    "the same over the largest |V| so far.",
}

Cells = list[list[str]]


def print_header(console: Console, comparison: Comparison, geometry: ModelConfig, facts: Mapping[str, Any]) -> None:
    """Say what runs on what."""
    config = comparison.config
    sessions = "1 session" if config.num_sessions == 1 else f"{config.num_sessions} sessions"
    threads = "1 thread" if config.threads == 1 else f"{config.threads} threads"
    for line in (
        f"model    {geometry.name}: {geometry.num_parameters / 1e6:.2f} M parameters, {geometry.num_layers} layers, "
        f"{geometry.tokens_per_frame} tokens per frame, weights {facts['model/weights']}",
        f"data     {facts['data/sources'][0]}",
        f"run      {sessions} of {config.num_frames} frames, {config.context_frames} of them context, ring_frames="
        f"{config.ring_frames}, dilation={config.dilation}; {config.device}, {config.dtype}, {threads}",
        f"turns    of {config.block_frames} frames: {', '.join(config.strategies)}, and back",
    ):
        console.print(line, markup=False)


def print_end(console: Console, result: Mapping[str, Any], folder: Path, *, offline: bool) -> None:
    """Print the tables, where everything lies, and how to upload W&B runs that are offline."""
    for title, heading, cells in tables(result):
        console.print(_table(title, heading, cells))
    for line in notes(result):
        console.print(line, markup=False)
    for label, name in (("page", PAGE_FILE), ("plot", PLOT_FILE), ("rows", COMPARE_FILE)):
        if (folder / name).exists():
            console.print(f"{label:<8} {folder / name}", markup=False)
    if offline:
        console.print(f"{'upload':<8} wandb sync {folder}/*/wandb/offline-run-*", markup=False)


def write_pictures(result: Mapping[str, Any], folder: Path) -> None:
    """Write compare.png and compare.html."""
    config = result["config"]
    block_frames, rows = config["block_frames"], result["strategies"]
    sessions = "1 session" if config["num_sessions"] == 1 else f"{config['num_sessions']} sessions"
    title = (
        f"{config['model']['preset']}, {config['ring_frames']} frames in a ring, dilation {config['dilation']}, "
        f"{sessions}, {config['device']}, {config['dtype']}, threads {config['threads']}"
    )
    compare_plot.write_png(folder / PLOT_FILE, rows, title=title, block_frames=block_frames)
    svg = compare_plot.to_svg(rows, block_frames=block_frames)
    page = compare_html.render(
        title, svg, tables(result), notes(result), DEFINITIONS, result["machine"], result["data/sources"]
    )
    replace_text(folder / PAGE_FILE, page)


# -- for the console and for the page -----------------------------------------------------------------------------


def tables(result: Mapping[str, Any]) -> list[compare_html.Grid]:
    """Title, heading and cells of each table that has a row."""
    grids = [("Time", *_time_cells(result)), ("Memory, and what a frame moves", *_memory_cells(result))]
    if result["equality"] is not None:
        grids += [
            ("Who agrees with whom, under canonical reads", *_equality_cells(result["equality"])),
            ("Fast reads against canonical, call by call", *_fast_read_cells(result["equality"])),
        ]
    return [grid for grid in grids if grid[2]]


def notes(result: Mapping[str, Any]) -> list[str]:
    """Who ended early and why; what the signs of the matrix mean, and why what differs does."""
    lines = []
    for row in result["strategies"]:
        if row["ended"] is not None:
            lines.append(
                f"× {row['strategy']} {row['status']} at frame {row['ended']['frame']}: {row['ended']['reason']}"
            )
    equality = result["equality"]
    if equality is None or not equality["pairs"]:
        return lines
    verdicts = [pair["verdict"] for pair in equality["pairs"]]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in (EQUAL, CLOSE, BY_DESIGN))
    lines.append(
        f"{equality['frames']} frames each; pairs: {counts}. Signs: = every bit of every frame, ~ not equal though it "
        "should be (largest gap), ≠ differs by design (from this frame on)."
    )
    apart: dict[str, float] = {}
    for pair in equality["pairs"]:
        if pair["verdict"] == BY_DESIGN:
            apart[pair["reason"]] = max(apart.get(pair["reason"], 0.0), pair["max_gap"] or 0.0)
    lines += [f"≠ {reason}: up to {gap:.1e} apart, of a frame in [-1, 1]" for reason, gap in apart.items()]
    lines += [f"{name} ended its canonical rollout early: {why}" for name, why in equality["stopped"].items()]
    return lines


def _time_cells(result: Mapping[str, Any]) -> tuple[list[str], Cells]:
    heading = ["strategy", "frames", "fps", "p50 ms", f"over {result['reference']}", "95 % interval", "detectable"]
    cells = []
    for row in result["strategies"]:
        ratio = row["ratio"]
        interval = detectable = NOT_AVAILABLE
        if ratio is not None and ratio["low"] is not None and row["strategy"] != result["reference"]:
            interval = f"{ratio['low']:.3f}-{ratio['high']:.3f}"
            detectable = f"{100 * ratio['detectable']:.1f} %"
        made = str(row["frames"]) + ("" if row["ended"] is None else " ×")
        speed, median = row["throughput/frames_per_s"], row["latency/frame_ms_p50"]
        numbers = [_number(speed, ".2f"), _number(median, ".1f"), _number(ratio and ratio["ratio"], ".3f")]
        cells.append([row["strategy"], made, *numbers, interval, detectable])
    return heading, cells


def _memory_cells(result: Mapping[str, Any]) -> tuple[list[str], Cells]:
    heading = ["strategy", "reserved", "in use", "frame-writes", "written", "read"]
    cells = []
    for row in result["strategies"]:
        ledger = row["ledger"]
        sizes = [_bytes(row["memory/kv_bytes"]), _bytes(row["memory/kv_in_use_bytes"])]
        moved = [_bytes(ledger and ledger[f"bytes_{way}_per_frame"]) for way in ("written", "read")]
        cells.append([row["strategy"], *sizes, _writes(ledger), *moved])
    return heading, cells


def _equality_cells(equality: Mapping[str, Any]) -> tuple[list[str], Cells]:
    """The lower triangle of the matrix."""
    found = {(pair["a"], pair["b"]): pair for pair in equality["pairs"]}
    names = list(dict.fromkeys(name for pair in equality["pairs"] for name in (pair["a"], pair["b"])))
    cells = []
    for row, name in enumerate(names):
        verdicts = [_verdict(found[other, name]) for other in names[:row]]
        cells.append([f"{row + 1} {name}", *verdicts, *[""] * (len(names) - row)])
    return ["strategy", *(str(number + 1) for number in range(len(names)))] if names else [], cells


def _fast_read_cells(equality: Mapping[str, Any]) -> tuple[list[str], Cells]:
    heading = ["strategy", "read", "calls", "largest gap", "over max |V|", "bound", "within"]
    cells = []
    for row in equality["fast_reads"]:
        bound, gap = row["bound"], row["relative_gap"]
        within = NOT_AVAILABLE if bound is None else "yes" if gap is not None and gap <= bound else "no"
        numbers = [_number(row["max_gap"], ".1e"), _number(gap, ".1e"), _number(bound, ".0e")]
        cells.append([row["strategy"], row["read"], str(row["calls"]), *numbers, within])
    return heading, cells


def _verdict(pair: Mapping[str, Any]) -> str:
    if pair["verdict"] == EQUAL:
        return "="
    if pair["verdict"] == CLOSE:
        return "~" + _number(pair["max_gap"], ".0e")
    return f"≠ {pair['first_difference']}"


def _writes(ledger: Mapping[str, Any] | None) -> str:
    """Per layer: one number, or the least and the most."""
    if ledger is None:
        return NOT_AVAILABLE
    by_layer = ledger["frame_writes_by_layer"]
    low, high = f"{min(by_layer):.4g}", f"{max(by_layer):.4g}"
    return low if low == high else f"{low} to {high}"


def _bytes(value: float | None) -> str:
    return " ".join(format_value("kv_bytes", value)).strip()


def _number(value: float | None, spec: str) -> str:
    return NOT_AVAILABLE if value is None else format(value, spec)


def _table(title: str, heading: Sequence[str], cells: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, name in enumerate(heading):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in cells:
        table.add_row(*row)
    return table
