"""The picture of a probe: a panel for each figure of its result."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ringkv.harness.plots import new_figure, save_png
from scripts.app.probe.result import Found, Grid, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 2


def probe_png(path: Path, found: Found, title: str) -> None:
    """Draw every grid and every panel of curves with its interval."""
    panels = list(dict.fromkeys(series.panel for series in found.series))
    count = len(found.grids) + len(panels)
    columns = min(_COLUMNS, count)
    rows = -(-count // columns)
    figure = new_figure(6.2 * columns, 3.9 * rows + 0.4)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, grid in zip(axes, found.grids, strict=False):
        _draw_grid(axis, grid)
    for axis, panel in zip(axes[len(found.grids) :], panels, strict=False):
        _draw_curves(axis, [series for series in found.series if series.panel == panel])
    for axis in axes[count:]:
        axis.set_axis_off()
    figure.suptitle(title, fontsize=10)
    save_png(figure, path)


def _draw_grid(axis: Axes, grid: Grid) -> None:
    from matplotlib.colors import LogNorm

    values = np.array([[np.nan if value is None else value for value in row] for row in grid.z], float)
    norm = LogNorm() if grid.logarithmic and (values > 0).any() else None
    image = axis.imshow(values, aspect="auto", origin="lower", cmap="viridis", norm=norm)
    axis.set_xticks(range(len(grid.x)), [f"{x:g}" for x in grid.x])
    axis.set_yticks(range(len(grid.y)), [f"{y:g}" for y in grid.y])
    middle = np.nanmedian(np.log(values[values > 0])) if norm else np.nanmean(values)
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            if np.isfinite(value):
                dark = (np.log(value) if norm and value > 0 else value) <= middle
                axis.text(column, row, f"{value:.2g}", ha="center", va="center", fontsize=6, color="w" if dark else "k")
    axis.set(xlabel=grid.x_label, ylabel=grid.y_label)
    axis.set_title(grid.panel, fontsize=9)
    axis.figure.colorbar(image, ax=axis, label=grid.z_label)


def _draw_curves(axis: Axes, members: list[Series]) -> None:
    for index, series in enumerate(members):
        y, low, high = (_floats(each) for each in (series.y, series.low, series.high))
        assert y is not None
        color = f"C{index % 10}"
        axis.plot(series.x, y, marker="." if len(series.x) <= 40 else "", linewidth=1.2, color=color, label=series.name)
        if low is not None and high is not None:
            axis.fill_between(series.x, low, high, color=color, alpha=0.2, linewidth=0)
    known = [value for series in members for value in series.y if value is not None]
    if any(series.logarithmic for series in members) and any(value > 0 for value in known):
        axis.set_yscale("log")
    if not known:
        axis.text(0.5, 0.5, "nothing found", transform=axis.transAxes, ha="center", va="center")
    axis.set(xlabel=members[0].x_label, ylabel=members[0].y_label)
    axis.set_title(members[0].panel, fontsize=9)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=6, ncols=1 if len(members) <= 6 else 2)


def _floats(values: object) -> np.ndarray | None:
    if values is None:
        return None
    return np.array([np.nan if value is None else value for value in values], float)  # type: ignore[attr-defined]
