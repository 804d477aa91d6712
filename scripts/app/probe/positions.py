"""Where sprites are in generated frames, against where they are in the recorded ones, both read by the same tracker.

A frame in which the truth's own sprite cannot be placed (hidden, leaving the screen) is no test. Where the truth's can
and the generated one cannot, the generated frame has failed. A correlation of the frames in which both are placed
says nothing of those, so there is a second one, in which the sprite has stayed where it was last placed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from model.data.clip import Pixels
from model.trackers import MIN_SIDE as MIN_SIDE
from model.trackers import FreewayTracker, PongTracker, empty_field
from scripts.app.probe.result import Found, Series, Sheet, number, spread_text
from scripts.app.probe.stats import Bootstrap, Interval, Values

NEAR_PIXELS = 2.0
CAR_FRAMES = 16
BALL_FRAMES = 12
BALL_UNITS = 64
"""The ball's distances are told in pixels of a frame of so many rows and columns, whatever the frames' own size."""


def measure_freeway(given: Pixels, truth: Pixels, made: Pixels, bootstrap: Bootstrap, found: Found) -> None:
    """The chicken's height, and each lane's car.

    given: the context, uint8 [clips, frames, H, W, 3]. truth, made: what comes after it, [clips, predicted, H, W, 3].
    """
    tracker = FreewayTracker(_field(given, truth))
    frames = list(range(1, truth.shape[1] + 1))
    before, real, ours = (_heights(each, tracker.chicken) for each in (given, truth, made))
    _add_error("chicken's height", np.abs(ours - real), frames, bootstrap, found)
    real_cars, our_cars = (_read(each, tracker.cars) for each in (truth, made))
    error = np.abs(our_cars - real_cars)
    _add_error("cars, all lanes", _mean_known(error), frames, bootstrap, found)
    # A car near an edge is being hidden by it: two readings that differ by a hair may fall on both sides of "found".
    inner = (real_cars >= NEAR_PIXELS + 1) & (real_cars <= truth.shape[3] - 2 - NEAR_PIXELS)
    missed = inner & ~(error <= NEAR_PIXELS)
    until = min(CAR_FRAMES, len(frames))
    kept = ~missed[:, :until].any(axis=1)
    shares = [bootstrap.mean(kept[:, lane].astype(float)) for lane in range(tracker.LANES)]
    tests = inner[:, :until].mean(axis=(0, 1))
    found.tables.append(
        Sheet(
            f"Freeway: cars within {NEAR_PIXELS:g} px of the truth through predicted frame {until}",
            ["lane, from the top", "share of clips", "share of frames that test it"],
            [[lane, spread_text(each), number(tests[lane])] for lane, each in enumerate(shares)],
        )
    )
    _add_track("chicken", before, real, ours, bootstrap, found)
    found.summary.update(
        {
            "fidelity/cars_kept_worst_lane": min(float(each.middle) for each in shares),
            "fidelity/cars_kept_mean": float(np.mean([each.middle for each in shares])),
        }
    )


def measure_pong(given: Pixels, truth: Pixels, made: Pixels, bootstrap: Bootstrap, found: Found) -> None:
    """Both paddles' heights, and the ball. given, truth, made: as of ``measure_freeway``."""
    tracker = PongTracker(_field(given, truth))
    frames = list(range(1, truth.shape[1] + 1))
    paddles = {
        name: tuple(_heights(each, follow) for each in (given, truth, made))
        for name, follow in (("paddle", tracker.paddle), ("opponent", tracker.opponent))
    }
    for name, (_, real, ours) in paddles.items():
        _add_error(f"{name}'s height", np.abs(ours - real), frames, bootstrap, found)
    real_ball, our_ball = (_read(each, lambda frame: tracker.ball(frame) or (None, None)) for each in (truth, made))
    error = np.hypot(*np.moveaxis((our_ball - real_ball) * BALL_UNITS / truth.shape[2:4], -1, 0))
    _add_error(f"ball, px of {BALL_UNITS}", error, frames, bootstrap, found)
    until = min(BALL_FRAMES, len(frames))
    early = bootstrap.mean(error[:, :until])
    found.tables.append(
        Sheet(
            f"Pong: the ball through predicted frame {until}, pixels of {BALL_UNITS}",
            ["frame", "error, px", "median, px", "share of balls found"],
            [
                [
                    frame + 1,
                    spread_text(Interval(*(None if e is None else e[frame] for e in early))),  # type: ignore[arg-type]
                    _median_known(error[:, frame]),
                    _all_placed(real_ball[:, [frame], 0], our_ball[:, [frame], 0]),
                ]
                for frame in range(until)
            ],
        )
    )
    for name, (before, real, ours) in paddles.items():
        _add_track(name, before, real, ours, bootstrap, found)
    found.summary.update(
        {
            "fidelity/ball_error_px_worst_frame": number(np.max(early.middle)),
            "fidelity/ball_found": _all_placed(real_ball[:, :until, 0], our_ball[:, :until, 0]),
        }
    )


MEASURES: dict[str, Callable[[Pixels, Pixels, Pixels, Bootstrap, Found], None]] = {
    "freeway": measure_freeway,
    "pong": measure_pong,
}
"""By data name: adds what is known about the places of its sprites."""


def last_places(before: Values, ours: Values) -> Values:
    """``ours`` [clips, predicted] with each NaN replaced by the last place found before it, or else in the context.

    before: places in the context, [clips, frames]. NaN is left where there is none at all yet.
    """
    places = np.concatenate([before, ours], axis=1)
    clock = np.where(np.isfinite(places), np.arange(places.shape[1]), 0)
    return np.take_along_axis(places, np.maximum.accumulate(clock, axis=1), axis=1)[:, before.shape[1] :]


def _field(given: Pixels, truth: Pixels) -> Pixels:
    return empty_field(np.concatenate([given, truth], axis=1).reshape(-1, *truth.shape[2:]))


def _read(frames: Pixels, tracker: Callable[[Pixels], Any]) -> Values:
    """What ``tracker`` says of each of uint8 [clips, predicted, H, W, 3]: [clips, predicted, ...], NaN for None."""
    return np.array([[tracker(frame) for frame in clip] for clip in frames], dtype=np.float64)


def _heights(frames: Pixels, tracker: Callable[[Pixels], float | None]) -> Values:
    """The same of a tracker that says one number."""
    return _read(frames, lambda frame: [tracker(frame)])[..., 0]


def _mean_known(values: Values) -> Values:
    """Mean over the last axis of what is not NaN; NaN where all is."""
    there = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.where(there, values, 0.0).sum(axis=-1) / there.sum(axis=-1)


def _median_known(values: Values) -> float | None:
    """Of what is not NaN; None where all is."""
    return number(np.nanmedian(values)) if np.isfinite(values).any() else None


def _all_placed(real: Values, ours: Values) -> float | None:
    """Of the frames in which the truth is found, the share in which ours is."""
    there = np.isfinite(real)
    return float(np.isfinite(ours[there]).mean()) if there.any() else None


def _share_within(real: Values, ours: Values) -> float | None:
    """Of the frames in which the truth is found, the share in which ours is within ``NEAR_PIXELS`` of it."""
    there = np.isfinite(real)
    return float((np.abs(ours - real)[there] <= NEAR_PIXELS).mean()) if there.any() else None


def _add_error(name: str, error: Values, frames: list[int], bootstrap: Bootstrap, found: Found) -> None:
    curve = bootstrap.mean(error)
    found.series.append(
        Series.of(
            "places of sprites", name, frames, curve, x_label="predicted frame", y_label="distance from the truth (px)"
        )
    )


def _add_track(sprite: str, before: Values, real: Values, ours: Values, bootstrap: Bootstrap, found: Found) -> None:
    """A sprite's height: how well it follows the recorded one, where it is found and everywhere."""
    carried = last_places(before, ours)
    where_found, everywhere = (bootstrap.correlation(real, each) for each in (ours, carried))
    placed, within = _all_placed(real, ours), _share_within(real, ours)
    median = _median_known(np.abs(ours - real))
    share = f"share within {NEAR_PIXELS:g} px"
    found.tables.append(
        Sheet(
            f"The {sprite}'s height, {real.shape[1]} frames: generated against recorded",
            ["correlation where found", "correlation, all frames", "share found", share, "median, px"],
            [[spread_text(where_found), spread_text(everywhere), placed, within, median]],
        )
    )
    found.summary.update(
        {
            f"fidelity/{sprite}_correlation": number(where_found.middle),
            f"fidelity/{sprite}_correlation_all": number(everywhere.middle),
            f"fidelity/{sprite}_found": placed,
            f"fidelity/{sprite}_within_2px": within,
        }
    )
    nowhere = int((np.isfinite(real) & ~np.isfinite(carried)).sum())
    found.notes.append(
        f"Correlation, all frames: of those that show the {sprite} in the truth; where it is missing in the generated "
        "one, it counts at the place where it was last found in that rollout, or else in its context."
        + (f" Left out: {nowhere} frames before which it was found nowhere." if nowhere else "")
    )
