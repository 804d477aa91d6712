"""Which frames each layer shows to the frame at one clock: as rows, as a table and as a picture. No torch.

The age of a frame is how many frames before the one being generated it was: the frame just before has age 1.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from ringkv.config import RingKVLayerConfig
from ringkv.harness.plots import new_figure, save_png
from ringkv.horizon import visible_frames

UNSEEN, UNSEEN_NEWEST, SEEN, OWN = range(4)
COLORS = ("#eceff1", "#f6b8ae", "#1f6fb4", "#f28e2b")
LABELS = ("not visible", "not visible, though newer than all that is", "visible", "the frame itself")


@dataclass(frozen=True)
class LayerHorizon:
    """What layer ``index`` shows at a clock. ages: of the visible frames, youngest first, the frame itself left out."""

    index: int
    dilation: int
    ages: tuple[int, ...]

    @property
    def unseen_newest(self) -> int:
        """How many of the newest frames are invisible; 0 when there is no history."""
        return self.ages[0] - 1 if self.ages else 0

    @property
    def ages_in_words(self) -> str:
        """``1 to 31``, ``8, 16 ... 248``, or ``none``. Ages of one layer are always evenly spaced."""
        if len(self.ages) < 4:
            return ", ".join(map(str, self.ages)) or "none"
        if self.dilation == 1:
            return f"{self.ages[0]} to {self.ages[-1]}"
        return f"{self.ages[0]}, {self.ages[1]} ... {self.ages[-1]}"


def horizon_map(layers: Sequence[RingKVLayerConfig], frame: int) -> list[LayerHorizon]:
    """One row per layer at clock ``frame``."""
    return [
        LayerHorizon(
            index, layer.pinned_dilation, tuple(frame - seen for seen in reversed(visible_frames(layer, frame)))
        )
        for index, layer in enumerate(layers)
    ]


def render_horizon(rows: Sequence[LayerHorizon], title: str) -> Table:
    """A line per layer: what it keeps, and which ages it shows."""
    table = Table(title=title, title_justify="left")
    table.add_column("layer", justify="right")
    table.add_column("keeps")
    table.add_column("visible", justify="right")
    table.add_column("their ages")
    table.add_column("newest not visible", justify="right")
    for row in rows:
        keeps = "every frame" if row.dilation == 1 else f"1 frame in {row.dilation}"
        unseen = str(row.unseen_newest) if row.ages else "n/a"
        table.add_row(
            str(row.index),
            keeps,
            str(len(row.ages)),
            row.ages_in_words,
            unseen,
            style=None if row.dilation == 1 else "bold",
        )
    return table


def horizon_png(path: str | os.PathLike[str], rows: Sequence[LayerHorizon], title: str) -> None:
    """Draw the map: a row per layer, a column per age, the frame being generated at the right."""
    import numpy as np
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    oldest = max((row.ages[-1] for row in rows if row.ages), default=0)
    cells = np.full((len(rows), oldest + 1), UNSEEN)
    for cell_row, row in zip(cells, rows, strict=True):
        cell_row[oldest - np.array(row.ages, dtype=int)] = SEEN
        cell_row[oldest - row.unseen_newest : oldest] = UNSEEN_NEWEST
        cell_row[oldest] = OWN
    figure = new_figure(10.0, 1.6 + 0.24 * len(rows))
    axes = figure.subplots()
    axes.imshow(
        cells,
        cmap=ListedColormap(COLORS),
        vmin=UNSEEN,
        vmax=OWN,
        aspect="auto",
        interpolation="nearest",
        extent=(oldest + 0.5, -0.5, len(rows) - 0.5, -0.5),
    )
    axes.set_yticks(range(len(rows)), [str(row.index) for row in rows], fontsize=8)
    for row in rows[1:]:
        axes.axhline(row.index - 0.5, color="white", linewidth=1.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))
    axes.set_xlabel("age: frames before the one being generated", fontsize=9)
    axes.set_ylabel("layer", fontsize=9)
    axes.set_title(title, fontsize=10, loc="left")
    axes.tick_params(length=2, labelsize=8)
    for spine in axes.spines.values():
        spine.set_visible(False)
    right = axes.secondary_yaxis("right")
    counts = [f"{len(row.ages)} visible" + (f", 1 in {row.dilation}" if row.dilation > 1 else "") for row in rows]
    right.set_yticks(range(len(rows)), counts, fontsize=8)
    right.tick_params(length=0)
    right.spines["right"].set_visible(False)
    handles = [Patch(facecolor=color, label=label) for color, label in zip(COLORS, LABELS, strict=True)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    save_png(figure, path)
