"""The figures of a report as PNG files, from the same data as the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from ringkv.harness.plots import new_figure, save_png
from scripts.app.html.palette import DASHES, MARKERS, look_of
from scripts.app.html.spec import Axis, CurveFigure, DotFigure, Figure, GridFigure, MapFigure, PointFigure
from scripts.app.html.stats import Interval
from scripts.app.styles import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

_MAX_LEGEND = 14
_INK, _DIM, _NONE = "#1b1f27", "#5a6270", "#e6e6ea"
_SCALE = ("#eaf2fa", "#00508f")


def write_png(figure: Figure, path: Path) -> None:
    """Draw ``figure`` to ``path``. Its caption is not in the picture: it stands in the report."""
    draw, height = _KINDS[type(figure)]
    canvas = new_figure(8.0, height(figure))
    draw(canvas, figure)
    canvas.suptitle(plain("\n".join(wrap(figure.title, 90))), fontsize=11, x=0.01, ha="left", color=_INK)
    save_png(canvas, path)


def plain(text: str) -> str:
    """``text`` with its dollar signs kept, which matplotlib takes for mathematics."""
    return text.replace("$", r"\$")


def _curves(canvas: Canvas, figure: Figure) -> None:
    assert isinstance(figure, CurveFigure)
    axes = canvas.subplots()
    for index, curve in enumerate(figure.curves):
        name = look_of(curve.strategy, index)
        style: dict[str, Any] = {
            "color": COLORS[name],
            "linestyle": DASHES[curve.variant % len(DASHES)][1],
            "linewidth": 1.5,
        }
        x, y, low, high = np.array(curve.x, dtype=float), *_arrays(curve.y)
        if figure.marks or len(x) == 1:
            fill = COLORS[name] if not MARKERS[name][0].endswith("-open") else "white"
            style |= {"marker": MARKERS[name][1], "markerfacecolor": fill, "markersize": 6}
        if figure.marks:
            axes.errorbar(x, y, yerr=_errors(curve.y), capsize=3, label=plain(curve.label), **style)
        else:
            axes.plot(x, y, label=plain(curve.label), **style)
            axes.fill_between(x, low, high, color=COLORS[name], alpha=0.16, linewidth=0)
    _dress(axes, figure.x, figure.y)
    if len(figure.curves) <= _MAX_LEGEND:
        _legend(canvas, axes)


def _points(canvas: Canvas, figure: Figure) -> None:
    assert isinstance(figure, PointFigure)
    failed = [point for point in figure.points if point.reason is not None and point.x.median is not None]
    axes, *regions = canvas.subplots(
        1 + bool(failed), 1, sharex=True, height_ratios=(6, 1)[: 1 + bool(failed)], squeeze=False
    )[:, 0]
    front = [figure.points[index] for index in figure.front()]
    if len(front) > 1:
        axes.plot([p.x.median for p in front], [p.y.median for p in front], ":", color=_DIM, linewidth=1.3, zorder=1)
    seen: dict[str, str] = {}
    for point in figure.points:
        if point.x.median is None or point.y.median is None:
            continue
        new = point.strategy not in seen
        name = seen.setdefault(point.strategy, look_of(point.strategy, len(seen)))
        fill = COLORS[name] if not MARKERS[name][0].endswith("-open") else "white"
        axes.errorbar(
            [point.x.median],
            [point.y.median],
            xerr=_errors([point.x]),
            yerr=_errors([point.y]),
            fmt=MARKERS[name][1],
            color=COLORS[name],
            markerfacecolor=fill,
            markersize=7,
            capsize=2,
            elinewidth=1,
            label=plain(point.strategy) if new else None,
        )
    _dress(axes, figure.x, figure.y)
    for region in regions:
        axes.set_xlabel("")
        region.set_facecolor(_NONE)
        region.plot([point.x.median for point in failed], [0.5] * len(failed), "x", color="#a33a00", markeredgewidth=2)
        region.set_ylim(0, 1)
        region.set_yticks([])
        region.set_ylabel("no\nresult", fontsize=9, color=_DIM, rotation=0, ha="right", va="center")
        region.set_xlabel(plain(figure.x.title), fontsize=9, color=_DIM)
        region.tick_params(colors=_DIM, labelsize=8)
        region.spines[:].set_visible(False)
    _legend(canvas, axes)


def _dots(canvas: Canvas, figure: Figure) -> None:
    assert isinstance(figure, DotFigure)
    axes = canvas.subplots()
    labels, series = (list(dict.fromkeys(getattr(dot, key) for dot in figure.dots)) for key in ("label", "series"))
    for dot in figure.dots:
        if dot.value.median is None:
            continue
        at, row = series.index(dot.series), labels.index(dot.label)
        offset = (at / (len(series) - 1) - 0.5) * 0.5 if len(series) > 1 else 0.0
        color = COLORS[look_of(dot.strategy, row)]
        fill = color if at == 0 or len(series) > 3 else "white"
        axes.errorbar(
            [dot.value.median],
            [row + offset],
            xerr=_errors([dot.value]),
            fmt="o",
            color=color,
            markerfacecolor=fill,
            capsize=3,
            elinewidth=1.2,
        )
    if figure.reference is not None:
        axes.axvline(figure.reference, color=_DIM, linewidth=1, linestyle=":", zorder=0)
    _dress(axes, figure.x, Axis(""))
    axes.set_yticks(range(len(labels)), [plain(label) for label in labels])
    axes.set_ylim(len(labels) - 0.4, -0.6)
    if 1 < len(series) <= 3:
        axes.set_title(plain("filled: " + "; open: ".join(series)), fontsize=8, loc="right", color=_DIM)


def _grid(canvas: Canvas, figure: Figure) -> None:
    assert isinstance(figure, GridFigure)
    from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
    from matplotlib.patches import Rectangle

    axes = canvas.subplots()
    scale = LinearSegmentedColormap.from_list("report", _SCALE)
    low, high = figure.span
    norm = (LogNorm if figure.log else Normalize)(low, high if high > low else low + 1)
    for row, (cells, notes) in enumerate(zip(figure.cells, figure.notes, strict=True)):
        for column, (cell, note) in enumerate(zip(cells, notes, strict=True)):
            if cell is None and not note:
                continue
            failed, share = cell is None, 0.0 if cell is None else float(norm(cell))
            color = _NONE if failed else scale(share)
            hatch = "////" if failed else None
            axes.add_patch(
                Rectangle(
                    (column - 0.48, row - 0.48),
                    0.96,
                    0.96,
                    facecolor=color,
                    hatch=hatch,
                    edgecolor="#a9adb5" if failed else color,
                )
            )
            ink = _INK if share < 0.55 else "white"
            axes.text(column, row, "×" if failed else f"{cell:.4g}", ha="center", va="center", fontsize=9, color=ink)
    _dress(axes, figure.x, figure.y)
    axes.grid(False)
    axes.set_xticks(range(len(figure.x_values)), [plain(value) for value in figure.x_values])
    axes.set_yticks(range(len(figure.y_values)), [plain(value) for value in figure.y_values])
    axes.set_xlim(-0.55, len(figure.x_values) - 0.45)
    axes.set_ylim(-0.55, len(figure.y_values) - 0.45)
    axes.set_title(f"{figure.unit}; hatched: no result", fontsize=8, loc="right", color=_DIM)


def _map(canvas: Canvas, figure: Figure) -> None:
    assert isinstance(figure, MapFigure)
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    axes = canvas.subplots()
    colors = [color for _, color in figure.classes]
    axes.imshow(
        np.array(figure.cells),
        cmap=ListedColormap(colors),
        vmin=-0.5,
        vmax=len(colors) - 0.5,
        aspect="auto",
        interpolation="nearest",
        extent=(figure.x_values[0] + 0.5, figure.x_values[-1] - 0.5, len(figure.cells) - 0.5, -0.5),
    )
    _dress(axes, figure.x, figure.y)
    axes.grid(False)
    axes.set_yticks(range(len(figure.y_values)), figure.y_values, fontsize=7)
    handles = [Patch(facecolor=color, label=label) for label, color in figure.classes]
    canvas.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8, frameon=False)


_KINDS: dict[type[Figure], tuple[Callable[[Canvas, Figure], None], Callable[[Any], float]]] = {
    CurveFigure: (_curves, lambda figure: 4.2),
    PointFigure: (_points, lambda figure: 4.6),
    DotFigure: (_dots, lambda figure: 1.3 + 0.34 * len({dot.label for dot in figure.dots})),
    GridFigure: (_grid, lambda figure: 1.3 + 0.5 * len(figure.y_values)),
    MapFigure: (_map, lambda figure: 1.6 + 0.24 * len(figure.cells)),
}
"""How each kind is drawn, and its height in inches."""


def _dress(axes: Axes, x: Axis, y: Axis) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(plain(x.title), fontsize=9, color=_DIM)
    axes.set_ylabel(plain(y.title), fontsize=9, color=_DIM)
    axes.grid(color=_INK, alpha=0.1, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_DIM, labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c8cdd5")
    if x.log:
        axes.set_xscale("log")
    if x.whole:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if x.zero:
        axes.set_xlim(left=0)
    if y.zero:
        axes.set_ylim(bottom=0)


def _legend(canvas: Canvas, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        columns = max(1, min(4, 96 // (max(map(len, labels)) + 8)))
        canvas.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def _arrays(values: Sequence[Interval]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Medians and bounds, NaN where there are none."""
    parts = ([v.median for v in values], [v.low for v in values], [v.high for v in values])
    median, low, high = (np.array([np.nan if v is None else v for v in part], dtype=float) for part in parts)
    return median, low, high


def _errors(values: Sequence[Interval]) -> np.ndarray:
    """Whiskers below and above, [2, n]; none where there is no interval."""
    median, low, high = _arrays(values)
    return np.nan_to_num(np.stack([median - low, high - median]).clip(min=0))
