"""How much faster, and how sure: ratios of times that were taken in turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DEFINITION = (
    "Ratio: the median, over the whole blocks that both strategies completed, of a block's time over the reference's "
    "time for the same frames. Interval: the 2.5 % and 97.5 % points of this median over 10,000 resamples of the "
    "blocks, drawn with replacement, both times of a block together. Smallest detectable difference: exp(2.80 s) - 1, "
    "where s is the standard deviation of the logarithm of the resampled median: a true ratio that far from 1 is told "
    "from 1 by a two-sided 5 % test in 80 % of such runs (1.96 + 0.84 = 2.80). Where a ratio changes over the rollout, "
    "as for full context, all this is of its middle, and widens with the change."
)
_RESAMPLES = 10_000
_DETECTABLE_DEVIATIONS = 1.96 + 0.84


@dataclass(frozen=True)
class Ratio:
    """Time over the reference's time. low, high, detectable: None for fewer than two blocks. See ``DEFINITION``."""

    ratio: float
    low: float | None
    high: float | None
    detectable: float | None
    blocks: int


def paired_ratio(times: Sequence[float], reference: Sequence[float], *, seed: int = 0) -> Ratio | None:
    """The ratio of ``times`` to ``reference``, both one value > 0 per block, over their first common blocks.

    None when there is no common block.
    """
    blocks = min(len(times), len(reference))
    if blocks == 0:
        return None
    ratios = np.asarray(times[:blocks], float) / np.asarray(reference[:blocks], float)
    middle = float(np.median(ratios))
    if blocks < 2:
        return Ratio(middle, None, None, None, blocks)
    chosen = np.random.default_rng(seed).integers(blocks, size=(_RESAMPLES, blocks))
    resampled = np.median(ratios[chosen], axis=1)
    low, high = np.percentile(resampled, [2.5, 97.5]).tolist()
    detectable = math.expm1(_DETECTABLE_DEVIATIONS * float(np.log(resampled).std()))
    return Ratio(middle, low, high, detectable, blocks)


def block_sums(frame_ms: Sequence[float], block_frames: int) -> list[float]:
    """Sums of whole blocks of ``block_frames`` times; what is left over is left out."""
    starts = range(0, len(frame_ms) - block_frames + 1, block_frames)
    return [sum(frame_ms[start : start + block_frames]) for start in starts]
