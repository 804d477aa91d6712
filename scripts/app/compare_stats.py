"""How much faster, and how sure: ratios of times that were taken in turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DEFINITION = (
    "Ratio: the summed times of the blocks that both strategies completed, over those of the reference. Interval: the "
    "2.5 % and 97.5 % points of this ratio over 10,000 resamples of the blocks, drawn with replacement, both times of "
    "a block together. Smallest detectable difference: exp(2.80 s) - 1, where s is the standard deviation of the "
    "logarithm of the resampled ratio: a true ratio that far from 1 is told from 1 by a two-sided 5 % test in 80 % of "
    "such runs (1.96 + 0.84 = 2.80). Where a ratio changes over the rollout, as for full context, all this is of its "
    "mean, and widens with the change."
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
    pairs = np.stack([np.asarray(times[:blocks], float), np.asarray(reference[:blocks], float)])
    own, other = pairs.sum(axis=1)
    if blocks < 2:
        return Ratio(float(own / other), None, None, None, blocks)
    chosen = np.random.default_rng(seed).integers(blocks, size=(_RESAMPLES, blocks))
    own_sums, other_sums = pairs[:, chosen].sum(axis=2)
    ratios = own_sums / other_sums
    low, high = np.percentile(ratios, [2.5, 97.5]).tolist()
    detectable = math.expm1(_DETECTABLE_DEVIATIONS * float(np.log(ratios).std()))
    return Ratio(float(own / other), low, high, detectable, blocks)


def block_sums(frame_ms: Sequence[float], block_frames: int) -> list[float]:
    """Sums of whole blocks of ``block_frames`` times; what is left over is left out."""
    starts = range(0, len(frame_ms) - block_frames + 1, block_frames)
    return [sum(frame_ms[start : start + block_frames]) for start in starts]
