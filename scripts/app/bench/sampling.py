"""Samples taken in turns, and the time that may be spent on them. No torch; the clock is an argument."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from scripts.app.compare_stats import Ratio

Clock = Callable[[], float]
"""Seconds, monotonic."""

Sample = Callable[[], float]
"""Runs something once and returns the seconds of the part that counts."""

_RESAMPLES = 2_000


class Budget:
    """Seconds that are left of ``seconds`` from now on."""

    def __init__(self, seconds: float, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left_s(self) -> float:
        """Never below 0."""
        return max(0.0, self._end - self._clock())

    def share_s(self, of: int) -> float:
        """What each of ``of`` things still to be measured may take, so that what one leaves unused goes to the rest."""
        return self.left_s / max(1, of)


def timed(call: Callable[[], object], clock: Clock = time.perf_counter) -> Sample:
    """A sample of the whole of ``call``."""

    def sample() -> float:
        start = clock()
        call()
        return clock() - start

    return sample


def interleave(
    samples: Mapping[str, Sample],
    *,
    budget_s: float,
    at_least: int,
    at_most: int,
    clock: Clock = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds by name, one per round. A round takes one sample of each, in turn from first to last and back.

    So a slow drift falls on all alike and neighbours are paired. Rounds go on while the last one, taken again, would
    still end within ``budget_s``; there are ``at_least`` of them whatever that takes, and ``at_most``.
    """
    seconds: dict[str, list[float]] = {name: [] for name in samples}
    order = list(samples)
    start = round_start = clock()
    last_round = 0.0
    for done in range(at_most):
        if done >= at_least and round_start + last_round - start > budget_s:
            break
        for name in order:
            seconds[name].append(samples[name]())
        order.reverse()
        now = clock()
        last_round, round_start = now - round_start, now
    return seconds


def faster(calls: Sequence[Callable[[], object]], *, rounds: int = 5, clock: Clock = time.perf_counter) -> int:
    """Index of the call whose fastest run is the fastest, all run in turns."""
    named = {str(index): timed(call, clock) for index, call in enumerate(calls)}
    interleave(named, budget_s=0.0, at_least=1, at_most=1, clock=clock)
    seconds = interleave(named, budget_s=0.0, at_least=rounds, at_most=rounds, clock=clock)
    return int(np.argmin([min(values) for values in seconds.values()]))


def median_of_ratios(points: Sequence[tuple[Sequence[float], Sequence[float]]], *, seed: int = 0) -> Ratio | None:
    """The median over points of each point's median ratio of its first times to its second ones.

    Its interval resamples the rounds of every point, both times of a round together; it says how well this grid was
    measured, not what another grid would give. None without points.
    """
    if not points:
        return None
    generator = np.random.default_rng(seed)
    middles, resampled = [], []
    for times, reference in points:
        ratios = np.asarray(times, float) / np.asarray(reference, float)
        middles.append(np.median(ratios))
        chosen = generator.integers(len(ratios), size=(_RESAMPLES, len(ratios)))
        resampled.append(np.median(ratios[chosen], axis=1))
    medians = np.median(np.stack(resampled), axis=0)
    low, high = np.percentile(medians, [2.5, 97.5]).tolist()
    return Ratio(float(np.median(middles)), low, high, None, len(points))
