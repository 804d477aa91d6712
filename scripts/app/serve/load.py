"""Who comes when, and wants how much: drawn once from a seed, the same for every policy and pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scripts.app.schema import ServeConfig


@dataclass(frozen=True)
class Visit:
    """A request: ``num_frames`` frames from ``arrival_s`` on. pauses: seconds without a wish, by the frame before."""

    rid: str
    arrival_s: float
    num_frames: int
    pauses: dict[int, float]


def draw_visits(config: ServeConfig, arrivals_per_min: float) -> Sequence[Visit]:
    """Poisson arrivals over ``minutes``; lengths uniform from half to one and a half ``num_frames``.

    A visitor wants a frame every ``1 / target_fps`` seconds for a burst, then none for a pause; both are exponential.
    """
    assert config.num_frames is not None
    # A spawn key, so that another rate is another crowd and not the same one sooner.
    rng = np.random.default_rng(np.random.SeedSequence(config.seed, spawn_key=(round(1000 * arrivals_per_min),)))
    visits: list[Visit] = []
    now = float(rng.exponential(60.0 / arrivals_per_min))
    while now < 60.0 * config.minutes:
        num_frames = max(1, round(config.num_frames * rng.uniform(0.5, 1.5)))
        pauses: dict[int, float] = {}
        frame = 0
        while config.pause_s > 0:
            frame += 1 + int(rng.exponential(config.burst_s) * config.target_fps)
            if frame >= num_frames:
                break
            pauses[frame - 1] = float(rng.exponential(config.pause_s))
        visits.append(Visit(f"visit-{len(visits)}", now, num_frames, pauses))
        now += float(rng.exponential(60.0 / arrivals_per_min))
    return visits
