"""The curve of a training run, drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ringkv.harness.plots import new_figure, save_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SMOOTHED_STEPS = 50
_DASHES = ("-", "--", ":", "-.")


def curve_png(path: Path, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Loss per step with its running mean, and the PSNR of held-out rollouts where it was taken."""
    figure = new_figure(9.0, 3.6)
    left, right = figure.subplots(1, 2)
    steps = np.array([row["step"] for row in rows])
    losses = np.array([row["loss"] for row in rows])
    left.semilogy(steps, losses, ".", markersize=1.5, color="0.75", label="one step")
    window = min(_SMOOTHED_STEPS, len(losses))
    smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
    left.semilogy(steps[window - 1 :], smooth, color="C0", label=f"mean of {window}")
    left.set(xlabel="step", ylabel="loss", title=title)
    left.legend(fontsize=8)
    _draw_quality(right, rows)
    save_png(figure, path)


def _draw_quality(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """A colour for each predicted frame, a dash for each ring; of the baselines the last frame alone."""
    from matplotlib.lines import Line2D

    axes.set(xlabel="step", ylabel="PSNR of a held-out rollout (dB)")
    taken = [row for row in rows if any(key.startswith("psnr/") for key in row)]
    if not taken:
        return
    steps = [row["step"] for row in taken]
    keys = [key.split("/")[1:] for key in taken[-1] if key.startswith("psnr/")]
    frames = list(dict.fromkeys(frame for _, frame in keys))
    names = list(dict.fromkeys(name for name, _ in keys))
    rings = [name for name in names if name.startswith("ring")]
    dashes = dict(zip(rings, cycle(_DASHES), strict=False))
    for ring, dash in dashes.items():
        for index, frame in enumerate(frames):
            axes.plot(
                steps,
                [row.get(f"psnr/{ring}/{frame}", math.nan) for row in taken],
                dash,
                color=f"C{index}",
                linewidth=1,
            )
    for name, shade in zip([name for name in names if name not in rings], ("0.6", "0.3"), strict=False):
        axes.plot(steps, [row.get(f"psnr/{name}/{frames[-1]}", math.nan) for row in taken], color=shade, linewidth=1)
        where = steps[len(steps) // 2], taken[-1][f"psnr/{name}/{frames[-1]}"]
        axes.annotate(name.replace("_", " "), where, fontsize=6, va="bottom")
    colours = [
        Line2D([], [], color=f"C{i}", label=f"predicted {frame[:5]} {frame[5:]}") for i, frame in enumerate(frames)
    ]
    lines = [Line2D([], [], color="0", linestyle=dash, label=f"ring of {ring[4:]}") for ring, dash in dashes.items()]
    # Below, because no corner is free in every run: curves rise to the right, baselines lie low.
    axes.legend(handles=colours + lines, fontsize=6, ncol=4, loc="upper center", bbox_to_anchor=(0.5, -0.16))
