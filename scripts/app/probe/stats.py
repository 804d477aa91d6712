"""Intervals by bootstrap over clips: all frames of a clip are drawn together, and so are both sides of a comparison.

Letters: N clips, R resamples, F frames.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

RESAMPLES = 10_000
DEFINITION = (
    f"Intervals are the 2.5 % and 97.5 % points over {RESAMPLES:,} resamples of the clips with replacement; both sides "
    "of a difference or a ratio come from the same resample."
)


class Interval(NamedTuple):
    """middle: the statistic of the clips as they are. low, high: None for a single clip. Arrays for curves."""

    middle: Values
    low: Values | None
    high: Values | None


class Bootstrap:
    """Resamples of N clips, the same for every statistic that is asked of it."""

    def __init__(self, clips: int, seed: int) -> None:
        self.clips = clips
        self._counts_RN = np.random.default_rng(seed).multinomial(clips, [1 / clips] * clips, size=RESAMPLES)

    def mean(self, values: Values) -> Interval:
        """Of ``[N, ...]`` over the clips. A NaN is a value that is missing; a mean of none is NaN."""
        there = np.isfinite(values)
        return self._ratio_of_sums(np.where(there, values, 0.0), there.astype(np.float64))

    def ratio(self, above: Values, below: Values) -> Interval:
        """Mean of ``above`` over mean of ``below``, both ``[N]``."""
        return self._ratio_of_sums(above, below)

    def correlation(self, a: Values, b: Values) -> Interval:
        """Pearson's, of all pairs of ``[N, F]`` together in which neither is NaN; NaN where one does not vary."""
        there = np.isfinite(a) & np.isfinite(b)
        x, y = np.where(there, a, 0.0), np.where(there, b, 0.0)
        sums_N5 = np.stack([each.sum(axis=1) for each in (x, y, x * x, y * y, x * y)], axis=1)
        count_N = there.sum(axis=1).astype(np.float64)
        middle = _pearson(count_N.sum(keepdims=True), sums_N5.sum(axis=0, keepdims=True))[0]
        if self.clips < 2:
            return Interval(middle, None, None)
        drawn = _pearson(self._counts_RN @ count_N, self._counts_RN @ sums_N5)
        return Interval(middle, *_percentiles(drawn))

    def _ratio_of_sums(self, above: Values, below: Values) -> Interval:
        with np.errstate(invalid="ignore", divide="ignore"):
            middle = above.sum(axis=0) / below.sum(axis=0)
            if self.clips < 2:
                return Interval(middle, None, None)
            flat = [np.asarray(each, np.float64).reshape(self.clips, -1) for each in (above, below)]
            drawn = (self._counts_RN @ flat[0]) / (self._counts_RN @ flat[1])
        return Interval(middle, *(edge.reshape(middle.shape) for edge in _percentiles(drawn)))


def first_touching(difference: Interval) -> int | None:
    """Index of the first frame whose interval does not lie above zero; None if there is none.

    Without intervals, the first whose middle does not.
    """
    edge = difference.middle if difference.low is None else difference.low
    below = np.nonzero(~(edge > 0))[0]
    return int(below[0]) if len(below) else None


def _pearson(count_R: Values, sums_R5: Values) -> Values:
    x, y, xx, yy, xy = sums_R5.T
    with np.errstate(invalid="ignore", divide="ignore"):
        spread_x, spread_y = xx - x * x / count_R, yy - y * y / count_R
        together = xy - x * y / count_R
        flat = (spread_x <= 1e-9 * xx) | (spread_y <= 1e-9 * yy)
        return np.where(flat, np.nan, together / np.sqrt(spread_x * spread_y))


def _percentiles(drawn: Values) -> tuple[Values, Values]:
    """Of each column of ``[R, ...]``, leaving out resamples in which the statistic does not exist."""
    with np.errstate(invalid="ignore"):
        if np.isfinite(drawn).all():
            low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
            return low, high
        columns = drawn.reshape(len(drawn), -1).T
        edges = [
            np.percentile(c[np.isfinite(c)], [2.5, 97.5]) if np.isfinite(c).any() else (np.nan,) * 2 for c in columns
        ]
        low, high = np.array(edges).T.reshape(2, *drawn.shape[1:])
        return low, high
