"""Horizon maps: which frames each layer shows, of the rings that ran and of maps that scripts/horizon.py drew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ringkv.config import RingKVLayerConfig
from ringkv.harness.horizon_map import COLORS, LABELS, OWN, SEEN, UNSEEN, UNSEEN_NEWEST, LayerHorizon, horizon_map
from scripts.app.html.runs import Points
from scripts.app.html.spec import Axis, MapFigure

MAX_MAPS = 6
_CLASSES = tuple(zip(LABELS, COLORS, strict=True))
_CAPTION = (
    "A row per layer, a column per age: how many frames before the one being generated. This is what attention may "
    "read in each layer, not what influences the frame: depth relays more than that."
)


def maps_of_runs(points: Points) -> list[MapFigure]:
    """One for each ring geometry that ran, at the last frame of its rollout; at most ``MAX_MAPS``."""
    seen: dict[str, MapFigure] = {}
    for point in points.measured:
        row = point.any_run.row
        slots, dilations, frames = row.get("ring/frames"), row.get("ring/dilation"), row.get("num_frames")
        if not slots or not dilations or not frames:
            continue
        buckets = row.get("ring_buckets")
        key = repr((slots, buckets, dilations, frames))
        if key in seen or len(seen) == MAX_MAPS:
            continue
        layers = [
            RingKVLayerConfig(ring_frames=slot, ring_buckets=buckets or slot, pinned_dilation=dilation)
            for slot, dilation in zip(slots, dilations, strict=True)
        ]
        title = f"Rings of {slots[0]} frames" if len(set(slots)) == 1 else "Rings of several sizes"
        tags = {"ring_frames": point.tags["ring_frames"]} if "ring_frames" in point.tags else {}
        title = f"{title}, at frame {frames - 1}"
        seen[key] = _figure(f"horizon_{len(seen) + 1}", title, horizon_map(layers, frames - 1), tags)
    return list(seen.values())


def map_of_file(number: int, where: str, data: Mapping[str, Any]) -> MapFigure:
    """The map of the file ``where`` of scripts/horizon.py; number: from 1, for the name of its files."""
    rows = [LayerHorizon(row["index"], row["dilation"], tuple(row["ages"])) for row in data["layers"]]
    return _figure(f"horizon_map_{number}", f"{data['title']} ({where})", rows, {})


def _figure(name: str, title: str, rows: Sequence[LayerHorizon], tags: Mapping[str, str]) -> MapFigure:
    oldest = max((row.ages[-1] for row in rows if row.ages), default=0)
    cells = np.full((len(rows), oldest + 1), UNSEEN)
    for target, row in zip(cells, rows, strict=True):
        target[oldest - np.array(row.ages, dtype=int)] = SEEN
        target[oldest - row.unseen_newest : oldest] = UNSEEN_NEWEST
        target[oldest] = OWN
    labels = [f"{row.index}" if row.dilation == 1 else f"{row.index}, 1 in {row.dilation}" for row in rows]
    return MapFigure(
        name,
        title,
        _CAPTION,
        Axis("age (frames)"),
        Axis("layer"),
        list(range(oldest, -1, -1)),
        labels,
        cells.tolist(),
        _CLASSES,
        tags,
    )
