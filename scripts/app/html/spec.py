"""What a report shows, as plain values: the page's script, the PNG files and the CSV files all draw from these.

Names and labels are text, never markup; whoever draws them escapes them. None stands for what was not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from scripts.app.html.stats import Interval

Tags = Mapping[str, str]
"""Knob -> value of what a mark shows; the page's filters choose by them. A mark without a knob passes its filter."""

Sheet = tuple[list[str], list[list[Any]]]
"""Column names and rows."""


@dataclass(frozen=True)
class Axis:
    """title: with its unit. zero: starts at zero. log: logarithmic. whole: ticks at integers only."""

    title: str
    zero: bool = False
    log: bool = False
    whole: bool = False


@dataclass(frozen=True)
class Curve:
    """One line. y: a value per x. strategy: whose colour and marker it has. variant: dash."""

    label: str
    strategy: str
    tags: Tags
    x: Sequence[float]
    y: Sequence[Interval]
    variant: int = 0


@dataclass(frozen=True)
class Point:
    """One mark of a scatter. x and y without a median were not measured. reason: why it failed, else None."""

    label: str
    strategy: str
    tags: Tags
    x: Interval
    y: Interval
    reason: str | None = None


@dataclass(frozen=True)
class Dot:
    """One mark of a dot plot, in the row ``label``. series: what is told apart by filled and open marks."""

    label: str
    strategy: str
    tags: Tags
    series: str
    value: Interval


@dataclass(frozen=True)
class Figure:
    """name: of its files and its anchor. caption: what it shows, what it does not, and under which conditions."""

    kind: ClassVar[str]
    name: str
    title: str
    caption: str
    x: Axis
    y: Axis

    def sheet(self) -> Sheet:
        """The numbers in it, a row per mark."""
        raise NotImplementedError


@dataclass(frozen=True)
class CurveFigure(Figure):
    """Lines. marks: with a marker and whiskers at each value, else with a band."""

    kind: ClassVar[str] = "curves"
    curves: Sequence[Curve] = ()
    marks: bool = False

    def sheet(self) -> Sheet:
        """A row per curve and x."""
        knobs = _knobs(curve.tags for curve in self.curves)
        rows = [
            [curve.label, *(curve.tags.get(knob) for knob in knobs), x, *_parts(y)]
            for curve in self.curves
            for x, y in zip(curve.x, curve.y, strict=True)
        ]
        return ["curve", *knobs, self.x.title, *_columns(self.y.title)], rows


@dataclass(frozen=True)
class PointFigure(Figure):
    """A scatter. better: of x and of y, ``low`` or ``high``; the front, what no point beats in both, follows."""

    kind: ClassVar[str] = "points"
    points: Sequence[Point] = ()
    better: tuple[str, str] = ("low", "high")

    def front(self) -> list[int]:
        """Indices of the points that no other point beats, by x. Of equal points the first."""
        signs = [1.0 if way == "low" else -1.0 for way in self.better]
        costs = {
            index: (signs[0] * point.x.median, signs[1] * point.y.median)
            for index, point in enumerate(self.points)
            if point.x.median is not None and point.y.median is not None
        }
        front, best = [], float("inf")
        for index in sorted(costs, key=lambda index: (*costs[index], index)):
            if costs[index][1] < best:
                front.append(index)
                best = costs[index][1]
        return sorted(front, key=lambda index: self.points[index].x.median or 0.0)

    def sheet(self) -> Sheet:
        """A row per point; ``front`` says whether it lies on it."""
        knobs, front = _knobs(point.tags for point in self.points), set(self.front())
        rows = [
            [
                point.label,
                *(point.tags.get(knob) for knob in knobs),
                *_parts(point.x),
                *_parts(point.y),
                index in front,
                point.reason,
            ]
            for index, point in enumerate(self.points)
        ]
        return ["point", *knobs, *_columns(self.x.title), *_columns(self.y.title), "front", "reason"], rows


@dataclass(frozen=True)
class DotFigure(Figure):
    """Rows of marks with whiskers. y is the axis of the rows. reference: a value to compare with, drawn as a line."""

    kind: ClassVar[str] = "dots"
    dots: Sequence[Dot] = ()
    reference: float | None = None

    def sheet(self) -> Sheet:
        """A row per dot."""
        rows = [[dot.label, dot.series, *_parts(dot.value)] for dot in self.dots]
        return [self.y.title, "series", *_columns(self.x.title)], rows


@dataclass(frozen=True)
class GridFigure(Figure):
    """Cells of a colour scale. Rows of ``cells`` belong to y_values, columns to x_values.

    cells: number, or None. notes: why a cell has none, "" where it has one or was not run. unit: of the cells.
    knobs: what the filters
    call x and y. tags: of the whole grid. span: of the colour scale. log: colours by the logarithm.
    """

    kind: ClassVar[str] = "grid"
    x_values: Sequence[str] = ()
    y_values: Sequence[str] = ()
    cells: Sequence[Sequence[float | None]] = ()
    notes: Sequence[Sequence[str]] = ()
    unit: str = ""
    knobs: tuple[str, str] = ("", "")
    tags: Tags = field(default_factory=dict)
    span: tuple[float, float] = (0.0, 1.0)
    log: bool = False

    def sheet(self) -> Sheet:
        """A row per cell."""
        rows = [
            [x, y, cell, note or None]
            for y, cells, notes in zip(self.y_values, self.cells, self.notes, strict=True)
            for x, cell, note in zip(self.x_values, cells, notes, strict=True)
        ]
        return [self.x.title, self.y.title, self.unit, "reason"], rows


@dataclass(frozen=True)
class MapFigure(Figure):
    """Cells of a few classes. x_values: of the columns. classes: label of each value of a cell, and its colour."""

    kind: ClassVar[str] = "map"
    x_values: Sequence[int] = ()
    y_values: Sequence[str] = ()
    cells: Sequence[Sequence[int]] = ()
    classes: Sequence[tuple[str, str]] = ()
    tags: Tags = field(default_factory=dict)

    def sheet(self) -> Sheet:
        """A row per cell."""
        rows = [
            [y, x, self.classes[cell][0]]
            for y, cells in zip(self.y_values, self.cells, strict=True)
            for x, cell in zip(self.x_values, cells, strict=True)
        ]
        return [self.y.title, self.x.title, "class"], rows


@dataclass(frozen=True)
class Column:
    """kind: ``text``, ``long`` (text that wants room), ``number``, ``interval`` (cells are Interval), ``verdict`` or
    ``command`` (with a copy button). digits: behind the point.
    """

    label: str
    kind: str = "text"
    digits: int = 2


@dataclass(frozen=True)
class Row:
    """cells: one per column. tags: for the filters."""

    cells: Sequence[Any]
    tags: Tags = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """folded: shown behind a line to click on. See Figure for the rest."""

    name: str
    title: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    folded: bool = False

    def sheet(self) -> Sheet:
        """Its cells; an interval takes four columns."""
        names: list[str] = []
        for column in self.columns:
            names += _columns(column.label) if column.kind == "interval" else [column.label]
        rows = []
        for row in self.rows:
            cells: list[Any] = []
            for column, cell in zip(self.columns, row.cells, strict=True):
                cells += _parts(cell) if column.kind == "interval" else [cell]
            rows.append(cells)
        return names, rows


@dataclass(frozen=True)
class Strip:
    """A picture of one run that is put into the page."""

    label: str
    path: Path
    tags: Tags


@dataclass(frozen=True)
class Gallery:
    """Strips with one caption."""

    caption: str
    strips: Sequence[Strip]


@dataclass(frozen=True)
class Section:
    """name: its anchor. intro: a line or two of what is in it; "" for none."""

    name: str
    title: str
    items: Sequence[Figure | Table | Gallery]
    intro: str = ""


def _knobs(tags: Any) -> list[str]:
    return list(dict.fromkeys(knob for each in tags for knob in each))


def _columns(title: str) -> list[str]:
    return [title, f"{title}, 95 % low", f"{title}, 95 % high", f"{title}, n"]


def _parts(value: Interval) -> list[Any]:
    return [value.median, value.low, value.high, value.n]
