"""Medians and how sure they are: percentile bootstrap, seeded, so that the same records give the same page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DEFINITION = (
    "A value is the median over repeats: runs that agree in everything but the seed. The 95 % interval is from the "
    "2.5 % to the 97.5 % point of this median over 2,000 resamples of the repeats, drawn with replacement. It lies "
    "within the range of what was measured, and with fewer than about six repeats it says little more than that range; "
    "a single repeat has none. n is the number of repeats; for quality per frame, of repeats times sessions."
)
_RESAMPLES = 2_000
_SEED = 0


@dataclass(frozen=True)
class Interval:
    """Median of n values. low, high: its 95 % interval, None for fewer than two. n: None where it is not on record."""

    median: float | None
    low: float | None
    high: float | None
    n: int | None


def median_interval(values: Sequence[float | None]) -> Interval:
    """The median of those ``values`` that are finite numbers, with its interval."""
    band = median_band([[value] for value in values])
    return band[0] if band else Interval(None, None, None, 0)


def median_band(rows: Sequence[Sequence[float | None]]) -> list[Interval]:
    """Median and interval of each column, over the rows (repeats) that have a finite number there.

    rows: one repeat each; a shorter one, or a null, leaves its place empty. One Interval per column of the longest.
    """
    width = max(map(len, rows), default=0)
    values = np.full((len(rows), width), np.nan)
    for target, row in zip(values, rows, strict=True):
        target[: len(row)] = [math.nan if value is None else value for value in row]
    values[~np.isfinite(values)] = np.nan
    counts = np.isfinite(values).sum(0)
    bounds = np.full((2, width), np.nan)
    # Columns in which the same rows have a number are resampled together.
    patterns, group_of = np.unique(np.isfinite(values), axis=1, return_inverse=True)
    for group in range(patterns.shape[1]):
        columns, present = np.flatnonzero(group_of == group), patterns[:, group]
        if present.sum() >= 2:
            bounds[:, columns] = _resampled_bounds(values[np.ix_(present, columns)])
    out = []
    for column, (count, low, high) in enumerate(zip(counts.tolist(), *bounds.tolist(), strict=True)):
        median = float(np.nanmedian(values[:, column])) if count else None
        out.append(Interval(median, low if count > 1 else None, high if count > 1 else None, count))
    return out


def _resampled_bounds(values: np.ndarray) -> np.ndarray:
    """values: [n, columns] without gaps. The 2.5 % and 97.5 % points of the resampled median, [2, columns]."""
    count = len(values)
    chosen = np.random.default_rng(_SEED).integers(count, size=(_RESAMPLES, count))
    bounds = np.empty((2, values.shape[1]))
    for start in range(0, values.shape[1], 64):  # a thousand frames at once would take hundreds of MiB
        part = values[:, start : start + 64]
        bounds[:, start : start + 64] = np.percentile(np.median(part[chosen], axis=1), [2.5, 97.5], axis=0)
    return bounds
