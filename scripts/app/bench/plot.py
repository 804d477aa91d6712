"""The picture of a benchmark: read paths against their floors, steps against their kernels, rollouts by strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ringkv.harness.plots import new_figure, save_png
from scripts.app.bench.targets import Levels, Rows
from scripts.app.styles import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FLOOR, _ACCENT = "#999999", COLORS["ring"]


def write_png(path: Path, levels: Levels, title: str) -> bool:
    """Write the picture of the levels that it knows; False, and nothing is written, where none of them has a row."""
    panels: list[tuple[Callable[[Axes, Rows], None], Rows]] = []
    drawn: Mapping[str, Callable[[Axes, Rows], None]] = {"reads": _reads, "frame": _frames, "rollout": _rollouts}
    for level, draw in drawn.items():
        measured = [row for row in levels.get(level, ()) if row.get("status", "ok") == "ok"]
        if measured:
            panels.append((draw, measured))
    if not panels:
        return False
    figure = new_figure(9.5, 3.4 * len(panels))
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axis, (draw, rows) in zip(axes, panels, strict=True):
        draw(axis, rows)
        axis.grid(alpha=0.15)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.suptitle(title, fontsize=10)
    save_png(figure, path)
    return True


def _reads(axis: Axes, rows: Rows) -> None:
    """Every point of the grid: its ratio with interval over the time of its floor."""
    for held, color, label in ((True, _ACCENT, "held"), (False, _FLOOR, "floor below 200 us")):
        chosen = [row for row in rows if row["held"] is held]
        ratios = [row["ratio"] for row in chosen]
        errors = [
            [ratio.ratio - (ratio.ratio if ratio.low is None else ratio.low) for ratio in ratios],
            [(ratio.ratio if ratio.high is None else ratio.high) - ratio.ratio for ratio in ratios],
        ]
        if chosen:
            axis.errorbar(
                [row["floor_s"] * 1e6 for row in chosen],
                [ratio.ratio for ratio in ratios],
                yerr=errors,
                fmt="o",
                markersize=3,
                linewidth=0.8,
                color=color,
                label=label,
            )
    for level in (1.0, 1.05, 1.2):
        axis.axhline(level, color=_FLOOR, linewidth=0.8, linestyle="-" if level == 1.0 else "--")
    axis.set_xscale("log")
    axis.set_xlabel("floor, us per pass")
    axis.set_ylabel("read path / floor")
    axis.legend(fontsize=8)


def _frames(axis: Axes, rows: Rows) -> None:
    """A step beside the sum of its kernels."""
    labels = [f"{row['mode']}\n{row['sessions']} session{'s' * (row['sessions'] > 1)}" for row in rows]
    axis.bar(labels, [row["step_s"] * 1e3 for row in rows], color=_ACCENT, label="step")
    axis.bar(labels, [row["floor_s"] * 1e3 for row in rows], width=0.5, color=_FLOOR, label="its kernels alone")
    axis.set_ylabel("ms per frame")
    axis.legend(fontsize=8)


def _rollouts(axis: Axes, rows: Rows) -> None:
    """Frames per second over the number of sessions, eager solid and compiled dashed."""
    for name in dict.fromkeys(row["strategy"] for row in rows):
        for mode, style in (("eager", "-"), ("compiled", "--")):
            chosen = sorted(
                (row for row in rows if (row["strategy"], row["mode"]) == (name, mode)), key=lambda row: row["sessions"]
            )
            if chosen:
                axis.plot(
                    [row["sessions"] for row in chosen],
                    [row["frames_per_s"] for row in chosen],
                    style,
                    marker="o",
                    markersize=3,
                    color=COLORS[name],
                    label=name if mode == "eager" else None,
                )
    axis.set_xlabel("sessions (compiled dashed)")
    axis.set_ylabel("frames per second")
    axis.legend(fontsize=7, ncols=2)
