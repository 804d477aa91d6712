"""What scripts/probe.py measured: its series as curves, its tables as tables."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.app.html.palette import CYCLE
from scripts.app.html.spec import Axis, Column, Curve, CurveFigure, Figure, GridFigure, Row, Section, Table
from scripts.app.html.stats import Interval
from scripts.app.styles import COLORS


def probe_section(number: int, where: str, result: Mapping[str, Any]) -> Section:
    """The section of one probe.json; number: from 1, for the names of its figures."""
    prefix = f"probe_{number}"
    title = f"Probe: {result['probe']}"
    settings = "; ".join(f"{key} {_text(value)}" for key, value in (result.get("settings") or {}).items())
    machine = result.get("machine") or {}
    parts = [settings] if settings else []
    if machine:
        parts.append(f"{machine['device_name']}, torch {machine['torch']}, source {machine['source_hash'][:12]}")
    conditions = f"Conditions: {'; '.join(parts)}." if parts else ""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for series in result.get("series") or ():
        if all(value is None for value in series["y"]):
            continue  # nothing of it was measured
        groups.setdefault(series.get("panel") or title, []).append(series)
    figures: list[Figure] = [
        _curves(f"{prefix}_{index}", panel, members, conditions)
        for index, (panel, members) in enumerate(groups.items(), 1)
    ]
    figures += [
        _grid(f"{prefix}_grid_{index}", grid, conditions) for index, grid in enumerate(result.get("grids") or (), 1)
    ]
    sheets = [
        Table(
            f"{prefix}_table_{index}",
            table["title"],
            conditions,
            [_column(name, [row[place] for row in table["rows"]]) for place, name in enumerate(table["columns"])],
            [Row(row) for row in table["rows"]],
        )
        for index, table in enumerate(result.get("tables") or (), 1)
    ]
    intro = " ".join([f"{where}.", *(result.get("notes") or ()), result.get("intervals") or ""]).strip()
    return Section(prefix, title, [*figures, *sheets], intro)


def _grid(name: str, grid: Mapping[str, Any], conditions: str) -> GridFigure:
    known = [value for row in grid["z"] for value in row if value is not None]
    log = bool(grid.get("logarithmic")) and bool(known) and min(known) > 0
    return GridFigure(
        name,
        grid["panel"],
        f"{grid['z_label']}{', coloured by its logarithm' * log}. Empty: not measured. {conditions}".strip(),
        Axis(grid["x_label"]),
        Axis(grid["y_label"]),
        [f"{value:g}" for value in grid["x"]],
        [f"{value:g}" for value in grid["y"]],
        grid["z"],
        [[""] * len(row) for row in grid["z"]],
        grid["z_label"],
        span=(min(known, default=0.0), max(known, default=1.0)),
        log=log,
    )


def _curves(name: str, title: str, members: Sequence[Mapping[str, Any]], conditions: str) -> CurveFigure:
    """Series of one panel; its axes are those of the first."""
    x, y = Axis(members[0]["x_label"]), Axis(members[0]["y_label"])
    names = {series["name"] for series in members}
    lent = itertools.cycle([look for look in CYCLE if look not in names] or CYCLE)
    curves = []
    for series in members:
        empty = [None] * len(series["x"])
        low, high = series.get("low") or empty, series.get("high") or empty
        values = [
            Interval(middle, bottom, top, None) for middle, bottom, top in zip(series["y"], low, high, strict=True)
        ]
        look = series["name"] if series["name"] in COLORS else next(lent)
        curves.append(Curve(series["name"], look, {}, series["x"], values))
    banded = any(value.low is not None for curve in curves for value in curve.y)
    caption = f"The band is the probe's own interval. {conditions}" if banded else conditions
    return CurveFigure(name, title, caption.strip(), x, y, curves)


def _column(name: str, cells: Sequence[Any]) -> Column:
    known = [cell for cell in cells if cell is not None]
    if any(isinstance(cell, str | bool | list | dict) for cell in known) or not known:
        return Column(name)
    return Column(name, "number", 0 if all(isinstance(cell, int) for cell in known) else 4)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
