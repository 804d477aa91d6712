"""A comparison: time and memory over frames, ratios to the reference, what a frame moves, and who agrees with whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scripts.app.compare_report import notes, tables
from scripts.app.html.runs import MIB, STRATEGY
from scripts.app.html.spec import Axis, Column, Curve, CurveFigure, Dot, DotFigure, Figure, Row, Section, Table
from scripts.app.html.stats import Interval, median_band

_SHORT_HASH = 12


def comparison_section(number: int, where: str, result: Mapping[str, Any]) -> Section:
    """The section of one compare.json; number: from 1, for the names of its figures."""
    prefix = f"compare_{number}"
    conditions = _conditions(result)
    figures: list[Figure] = [
        figure
        for figure in (
            _ratios(prefix, result, conditions),
            _times(prefix, result, conditions),
            _memory(prefix, result, conditions),
            _ledger(prefix, result, conditions),
        )
        if figure is not None
    ]
    grids = []
    for index, (title, heading, cells) in enumerate(tables(result), 1):
        columns = [
            Column(name, "verdict" if "agrees" in title and place else "text") for place, name in enumerate(heading)
        ]
        rows = [
            Row(row, {STRATEGY: row[0]} if heading[0] == STRATEGY and "agrees" not in title else {}) for row in cells
        ]
        caption = " ".join(notes(result)) if "agrees" in title else conditions
        grids.append(Table(f"{prefix}_table_{index}", title, caption, columns, rows))
    terms = [Row([term.replace("_", " "), text]) for term, text in result["definitions"].items()]
    columns = [Column("term"), Column("what it is", "long")]
    grids.append(Table(f"{prefix}_terms", "What the numbers are", "", columns, terms, folded=True))
    return Section(prefix, f"Comparison: {_name(result)}", [*figures, *grids], f"{where}.")


def _name(result: Mapping[str, Any]) -> str:
    config = result["config"]
    return f"{config['model']['preset']}, ring_frames={config['ring_frames']}, {len(result['strategies'])} strategies"


def _conditions(result: Mapping[str, Any]) -> str:
    config, machine = result["config"], result["machine"]
    threads = "1 thread" if config["threads"] == 1 else f"{config['threads']} threads"
    sessions = "1 session" if config["num_sessions"] == 1 else f"{config['num_sessions']} sessions"
    return (
        f"Conditions: model {config['model']['preset']}; weights {result['model/weights']}; {config['dtype']}; "
        f"{threads}; {sessions} of {config['num_frames']} frames, {config['context_frames']} of them context; "
        f"ring_frames={config['ring_frames']}, dilation={config['dilation']}; "
        f"{machine['device_name']}, torch {machine['torch']}; source {machine['source_hash'][:_SHORT_HASH]}."
    )


def _ratios(prefix: str, result: Mapping[str, Any], conditions: str) -> DotFigure | None:
    dots = [
        Dot(name, name, {STRATEGY: name}, "", Interval(ratio["ratio"], ratio["low"], ratio["high"], ratio["blocks"]))
        for name, ratio in ((row["strategy"], row["ratio"]) for row in result["strategies"])
        if ratio is not None
    ]
    if not dots:
        return None
    reference = result["reference"]
    caption = (
        f"Time of a block of frames over that of {reference} for the same frames: the median over blocks and its 95 % "
        f"interval; n counts blocks. Left of the line is faster than {reference}. {conditions}"
    )
    x = Axis(f"time over {reference} (ratio)")
    return DotFigure(f"{prefix}_ratio", f"Time over {reference}", caption, x, Axis("strategy"), dots, reference=1.0)


def _times(prefix: str, result: Mapping[str, Any], conditions: str) -> CurveFigure | None:
    block = result["config"]["block_frames"]
    curves = []
    for row in result["strategies"]:
        made = [
            (frame, ms)
            for frame, phase, ms in zip(*(row["curves"][key] for key in ("frame", "phase", "latency_ms")), strict=True)
            if phase == "generated"
        ]
        starts = range(0, len(made), block)
        if not made:
            continue
        chunks = [[ms for _, ms in made[start : start + block]] for start in starts]
        repeats = [[chunk[k] if k < len(chunk) else None for chunk in chunks] for k in range(block)]
        name = row["strategy"]
        curves.append(Curve(name, name, {STRATEGY: name}, [made[start][0] for start in starts], median_band(repeats)))
    if not curves:
        return None
    caption = (
        f"Median of each block of {block} frames, drawn at its first, with the 95 % interval of that median over its "
        f"frames; n counts frames. Strategies took turns of a block. {conditions}"
    )
    x, y = Axis("frame index", whole=True), Axis("time per frame (ms)", zero=True)
    return CurveFigure(f"{prefix}_time", "Time per frame", caption, x, y, curves)


def _memory(prefix: str, result: Mapping[str, Any], conditions: str) -> CurveFigure | None:
    curves = [
        Curve(
            row["strategy"],
            row["strategy"],
            {STRATEGY: row["strategy"]},
            row["curves"]["frame"],
            [_single(None if size is None else size / MIB) for size in row["curves"]["kv_bytes"]],
        )
        for row in result["strategies"]
        if row["curves"]["frame"]
    ]
    if not curves:
        return None
    caption = f"{result['definitions']['memory']} Here: allocated. {conditions}"
    x, y = Axis("frame index", whole=True), Axis("KV memory held (MiB)", zero=True)
    return CurveFigure(f"{prefix}_memory", "KV memory", caption, x, y, curves)


def _ledger(prefix: str, result: Mapping[str, Any], conditions: str) -> DotFigure | None:
    dots = [
        Dot(row["strategy"], row["strategy"], {STRATEGY: row["strategy"]}, way, _single(size / MIB))
        for row in result["strategies"]
        if row["ledger"] is not None
        for way in ("written", "read")
        if (size := row["ledger"][f"bytes_{way}_per_frame"])
    ]
    if not dots:
        return None
    caption = f"{result['definitions']['ledger']} {conditions}"
    x = Axis("K and V moved per frame (MiB)", log=True)
    return DotFigure(f"{prefix}_ledger", "What a frame moves", caption, x, Axis("strategy"), dots)


def _single(value: float | None) -> Interval:
    return Interval(value, None, None, 0 if value is None else 1)


def strategies_of(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every strategy that was compared, in order."""
    return list(dict.fromkeys(row["strategy"] for result in results for row in result["strategies"]))
