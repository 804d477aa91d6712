"""The trackers see what is on the screen, by the console's own memory, and nothing where there is nothing to see.

The memory is read here by addresses of its own: what the emulator keeps of an object shares nothing with how its
colours are found in a small frame.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from model.data.atari import Player, render
from model.data.clip import Pixels
from model.trackers import FreewayTracker, PongTracker, empty_field

STEPS, SIDE = 260, 64


@cache
def played(game: str, side: int = SIDE) -> tuple[Pixels, np.ndarray]:
    """Frames uint8 [STEPS, side, side, 3] and the console's RAM [STEPS, 128]."""
    player = Player(game, np.random.default_rng(17))
    frames, memory = [], []
    for _ in range(STEPS):
        if player.over:
            player.reset()
        player.step()
        frames.append(render(game, player.screen, channels=3, height=side, width=side))
        memory.append(player.ram.copy())
    return np.stack(frames), np.stack(memory).astype(int)


def middle(first: np.ndarray, length: int, extent: int, side: int = SIDE) -> tuple[np.ndarray, np.ndarray]:
    """Middle of the visible part of screen pixels ``first .. first + length - 1`` of ``extent``, in frame pixels, and
    the share of it that is visible."""
    low, high = np.clip(first, 0, extent), np.clip(first + length, 0, extent)
    return (low + high) / 2 * side / extent - 0.5, (high - low) / length


def column(values: list[float | None]) -> np.ndarray:
    return np.array(values, dtype=float)


def test_the_chicken_is_where_the_console_has_it():
    frames, memory = played("freeway")
    tracker = FreewayTracker(empty_field(frames))
    read = column([tracker.chicken(frame) for frame in frames])
    truth, _ = middle(177 - memory[:, 14], 8, 180)
    found = np.isfinite(read)
    assert np.ptp(truth) > 30
    assert found.mean() > 0.9
    assert np.abs(read - truth)[found].max() < 1.0
    assert np.median(np.abs(read - truth)[found]) < 0.25


def test_every_lane_s_car_is_where_the_console_has_it():
    frames, memory = played("freeway")
    tracker = FreewayTracker(empty_field(frames))
    read = column([tracker.cars(frame) for frame in frames])  # type: ignore[arg-type]
    for lane in range(10):
        first = memory[:, 117 - lane] - (2 if lane == 4 else 3)
        truth, _ = middle(first, 8, 160)
        whole, found = (first >= 8) & (first <= 144), np.isfinite(read[:, lane])  # the console blanks the far left
        assert found[whole].mean() > 0.85, lane
        assert np.abs(read[:, lane] - truth)[found & whole].max() < 1.0, lane
        assert np.abs(read[:, lane] - truth)[found].max() < 2.0, lane
        assert np.median(np.abs(read[:, lane] - truth)[found]) < 0.2, lane


@pytest.mark.parametrize("side", [64, 48])
def test_pong_s_paddle_and_ball_are_where_the_console_has_them(side: int):
    frames, memory = played("pong", side)
    tracker = PongTracker(empty_field(frames))
    for follow, top, least in ((tracker.paddle, memory[:, 51] - 13, 1), (tracker.opponent, memory[:, 50] - 15, 0.97)):
        paddle = column([follow(frame) for frame in frames])
        truth, visible = middle(top - 34, 16, 160, side)
        shown = memory[:, 50] > 0  # a new game has no opponent for a moment
        whole, found = (visible == 1) & shown, np.isfinite(paddle)
        assert found[whole].mean() >= least
        assert np.abs(paddle - truth)[whole & found].max() < 0.75
        assert np.abs(paddle - truth)[found].max() < 2.0
        assert np.ptp(truth[shown]) > side / 3

    balls = [tracker.ball(frame) for frame in frames]
    row, _ = middle(memory[:, 54] - 14 - 34, 4, 160, side)
    across, _ = middle(memory[:, 49] - 49, 2, 160, side)
    absent = memory[:, 54] == 0
    open_field = ~absent & (across > 9 * side / 64) & (across < 54 * side / 64) & (row > 1) & (row < side - 2)
    assert open_field.sum() > 60
    assert absent.sum() > 10
    for index, ball in enumerate(balls):
        if open_field[index]:
            assert ball is not None
            assert abs(ball[0] - row[index]) < 0.75
            assert abs(ball[1] - across[index]) < 0.75
        if absent[index]:
            assert ball is None


def everything(game: str, frame: Pixels, field: Pixels) -> list[object]:
    if game == "freeway":
        freeway = FreewayTracker(field)
        return [freeway.chicken(frame), *freeway.cars(frame)]
    pong = PongTracker(field)
    return [pong.paddle(frame), pong.ball(frame), pong.opponent(frame)]


@pytest.mark.parametrize("game", ["freeway", "pong"])
def test_nothing_is_found_where_nothing_is(game: str):
    frames, _ = played(game)
    field = empty_field(frames)
    noise = np.random.default_rng(0).integers(0, 256, size=field.shape, dtype=np.uint8)
    for shown in (field, np.zeros_like(field), np.full_like(field, 255), noise, frames.mean(axis=0).astype(np.uint8)):
        assert set(everything(game, shown, field)) == {None}


@pytest.mark.parametrize("game", ["freeway", "pong"])
def test_a_sprite_that_is_there_twice_is_not_placed(game: str):
    frames, _ = played(game)
    field = empty_field(frames)
    tried = 0
    for frame in frames[::7]:
        found = everything(game, frame, field)
        shown = np.where(frame != field, frame, np.roll(frame, 24, axis=0 if game == "pong" else 1))
        twice = everything(game, shown, field)
        places = zip(found[1:], twice[1:], strict=True) if game == "freeway" else [(found[1], twice[1])]
        for one, other in places:
            middle_of_the_field = isinstance(one, float) and 4 < one < 32
            if middle_of_the_field or (isinstance(one, tuple) and 4 < one[0] < 32):
                tried += 1
                assert other is None
    assert tried > 8


def test_a_faded_sprite_of_another_colour_is_not_taken_for_the_car():
    frames, _ = played("freeway")
    field = empty_field(frames)
    tracker = FreewayTracker(field)
    frame = next(each for each in frames if None not in tracker.cars(each))
    difference = frame.astype(int) - field
    faded = np.clip(field + difference * 0.3, 0, 255).astype(np.uint8)
    assert tracker.cars(faded) == [None] * 10
    negative = np.clip(field - difference, 0, 255).astype(np.uint8)
    assert tracker.cars(negative) == [None] * 10
    whole = np.clip(field + difference * 0.9, 0, 255).astype(np.uint8)
    assert None not in tracker.cars(whole)


@pytest.mark.parametrize("shape", [(64, 64, 1), (32, 64, 3), (64, 64)])
def test_frames_in_which_sprites_cannot_be_told_apart_are_refused(shape: tuple[int, ...]):
    for tracker in (FreewayTracker, PongTracker):
        with pytest.raises(ValueError, match="expected RGB of 48 x 48 or more"):
            tracker(np.zeros(shape, np.uint8))
