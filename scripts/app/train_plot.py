"""The curve of a training run, drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ringkv.harness.plots import new_figure, save_png

_SMOOTHED_STEPS = 50


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
    names = sorted({key for row in rows for key in row if key.startswith("psnr/")})
    for name in names:
        taken = [(row["step"], row[name]) for row in rows if name in row]
        dashes = "--" if "ring" not in name else "-"
        right.plot(*zip(*taken, strict=True), dashes, marker=".", linewidth=1, label=name.removeprefix("psnr/"))
    right.set(xlabel="step", ylabel="PSNR of a held-out rollout (dB)")
    if names:
        right.legend(fontsize=5, ncol=2)
    save_png(figure, path)
