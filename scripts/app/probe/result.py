"""What a probe found: curves, grids and tables, as strict JSON, as tables for a person and as numbers to track."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from scripts.app.probe.stats import Interval

VERSION = 1
"""Of probe.json; raised when a key changes its meaning."""

RESULT_FILE, PLOT_FILE, TABLES_FILE = "probe.json", "probe.png", "probe.txt"


@dataclass(frozen=True)
class Series:
    """One curve. panel: title of the figure that it belongs to. low, high: 95 % interval; None without one.

    logarithmic: how it is best drawn.
    """

    panel: str
    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    x_label: str
    y_label: str
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    logarithmic: bool = False

    @classmethod
    def of(
        cls,
        panel: str,
        name: str,
        x: Sequence[float],
        values: Interval,
        *,
        x_label: str,
        y_label: str,
        logarithmic: bool = False,
    ) -> Series:
        """A curve with its interval; what is not finite becomes None."""
        middle, low, high = (None if each is None else numbers(each) for each in values)
        assert middle is not None
        return cls(panel, name, list(x), middle, x_label, y_label, low, high, logarithmic)


@dataclass(frozen=True)
class Grid:
    """A value for every pair: ``z[i][j]`` at ``y[i]`` and ``x[j]``. logarithmic: how it is best coloured."""

    panel: str
    x: Sequence[float]
    y: Sequence[float]
    z: Sequence[Sequence[float | None]]
    x_label: str
    y_label: str
    z_label: str
    logarithmic: bool = False


@dataclass(frozen=True)
class Sheet:
    """A table: a cell is text, a number or None."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Found:
    """What a probe hands over. settings: the conditions, plain values. summary: metrics, named like those of a run.

    notes: what a reader has to know, a line each.
    """

    settings: dict[str, Any]
    summary: dict[str, Any]
    series: list[Series] = field(default_factory=list)
    grids: list[Grid] = field(default_factory=list)
    tables: list[Sheet] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def numbers(values: Any) -> list[float | None]:
    """A one-dimensional array as plain numbers, None where one is not finite."""
    return [float(value) if math.isfinite(value) else None for value in np.asarray(values, np.float64)]


def number(value: Any) -> float | None:
    """One of them."""
    return numbers(np.atleast_1d(value))[0]


def spread_text(interval: Interval, digits: int = 3) -> str:
    """A scalar interval as ``middle (low to high)``; n/a where there is none."""
    middle, low, high = (None if each is None else number(each) for each in interval)
    if middle is None:
        return "n/a"
    return f"{middle:.{digits}g}" + ("" if low is None or high is None else f" ({low:.{digits}g} to {high:.{digits}g})")


def tracked_rows(series: Sequence[Series]) -> Iterator[tuple[int, dict[str, float]]]:
    """Rows for the tracker, ascending: at each whole x, every curve that has a value there, as ``panel/name``."""
    rows: dict[int, dict[str, float]] = {}
    for each in series:
        for x, y in zip(each.x, each.y, strict=True):
            if y is not None and float(x).is_integer():
                rows.setdefault(int(x), {})[f"{each.panel}/{each.name}"] = y
    yield from sorted(rows.items())


def print_found(console: Console, found: Found) -> None:
    """The tables, then what has to be known about them."""
    for sheet in found.tables:
        table = Table(title=sheet.title, title_justify="left")
        for place, name in enumerate(sheet.columns):
            text = any(isinstance(row[place], str) for row in sheet.rows)
            table.add_column(name, justify="left" if text and place == 0 else "right")
        for row in sheet.rows:
            table.add_row(*map(_cell, row))
        console.print(table)
    for note in found.notes:
        console.print(note, style="yellow", markup=False)


def tables_text(found: Found) -> str:
    """What ``print_found`` prints, for a file: as wide as the tables are."""
    text = io.StringIO()
    print_found(Console(file=text, width=500, soft_wrap=True, highlight=False), found)
    return text.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return "n/a"
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)
