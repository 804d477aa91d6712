"""The smallest moving things of each game survive the way down to 64 x 64.

What moves is found on the emulator's own 210 x 160 screen by its colour, and taken out by painting the background
over it. The two screens then go through the recorder's cropping and averaging, so that every pixel that differs is
due to that one sprite.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from model.data.atari import Player, render

TENTH_OF_FULL_SCALE = 0.1 * 255
STEPS = 161

PONG_BALL, PONG_FIELD = (236, 236, 236), (144, 72, 17)
BREAKOUT_BALL, BREAKOUT_FIELD = (200, 72, 72), (0, 0, 0)
CHICKEN = (252, 252, 84)


@cache
def screens(game: str) -> np.ndarray:
    player = Player(game, np.random.default_rng(11))
    played = []
    for _ in range(STEPS):
        if player.over:
            player.reset()
        player.step()
        played.append(player.screen)
    return np.stack(played)


@cache
def empty_road() -> np.ndarray:
    """Each sprite is elsewhere on most screens: the median over time is the road without them."""
    return np.median(screens("freeway")[::4], axis=0).astype(np.uint8)


def ball_mask(screen: np.ndarray, color: tuple[int, int, int], rows: slice, columns: slice) -> np.ndarray | None:
    """Where the whole ball is, 2 x 4 pixels; None if it is absent, cut off, or touches something of its colour."""
    mask = np.zeros(screen.shape[:2], bool)
    mask[rows, columns] = (screen[rows, columns] == color).all(-1)
    row, column = np.nonzero(mask)
    whole = len(row) == 8 and np.ptp(row) == 3 and np.ptp(column) == 1
    return mask if whole else None


def with_and_without(game: str) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Sprite, screen with it, the same screen without it."""
    if game == "freeway":
        road = empty_road()
        for screen in screens(game):
            moving = (screen != road).any(-1)
            chicken = moving & (screen == CHICKEN).all(-1)
            chicken[:, 80:] = False  # the other player's chicken stands still on the right
            if chicken.sum() >= 20:
                yield "chicken", screen, np.where(chicken[..., None], road, screen)
            for lane in range(10):
                span = slice(24 + 16 * lane, 39 + 16 * lane)
                car = np.zeros_like(moving)
                car[span] = moving[span]
                across = np.nonzero(car)[1]
                alone = len(across) and not (car & (screen == CHICKEN).all(-1)).any() and np.ptp(across) < 9
                if alone and across.min() >= 12 and across.max() < 158:  # whole, not leaving the screen
                    yield f"car {lane}", screen, np.where(car[..., None], road, screen)
        return
    color, field, rows, columns = {
        "pong": (PONG_BALL, PONG_FIELD, slice(34, 194), slice(0, 160)),
        "breakout": (BREAKOUT_BALL, BREAKOUT_FIELD, slice(93, 189), slice(8, 152)),  # below bricks, above the paddle
    }[game]
    for screen in screens(game):
        mask = ball_mask(screen, color, rows, columns)
        if mask is not None:
            yield "ball", screen, np.where(mask[..., None], np.array(field, np.uint8), screen)


def changed_pixels(game: str, one: np.ndarray, other: np.ndarray, channels: int) -> int:
    small = [render(game, s, channels=channels, height=64, width=64).astype(int) for s in (one, other)]
    return int((np.abs(small[0] - small[1]).max(-1) >= TENTH_OF_FULL_SCALE).sum())


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("game", ["freeway", "pong", "breakout"])
def test_every_moving_sprite_changes_at_least_two_pixels_by_a_tenth_of_full_scale(game: str, channels: int) -> None:
    samples: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for sprite, shown, hidden in with_and_without(game):
        samples.setdefault(sprite, []).append((shown, hidden))
    assert set(samples) == ({"chicken", *(f"car {lane}" for lane in range(10))} if game == "freeway" else {"ball"})
    assert all(len(pairs) >= 60 for pairs in samples.values())
    fewest = {
        sprite: min(changed_pixels(game, shown, hidden, channels) for shown, hidden in pairs[:60])
        for sprite, pairs in samples.items()
    }
    assert {sprite: pixels for sprite, pixels in fewest.items() if pixels < 2} == {}


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("game", ["pong", "breakout"])
def test_a_ball_that_moves_changes_at_least_two_pixels_from_one_frame_to_the_next(game: str, channels: int) -> None:
    """The same empty screen with the ball where it was, and where it went: paddles and bricks do not count."""
    color, field, rows = {
        "pong": (PONG_BALL, PONG_FIELD, slice(34, 194)),
        "breakout": (BREAKOUT_BALL, BREAKOUT_FIELD, slice(93, 189)),
    }[game]
    masks = [ball_mask(screen, color, rows, slice(8, 152)) for screen in screens(game)]
    changed = []
    for before, after in pairwise(masks):
        if before is not None and after is not None and (before != after).any():
            empty = np.full((210, 160, 3), field, np.uint8)
            there, gone = (np.where(m[..., None], np.array(color, np.uint8), empty) for m in (before, after))
            changed.append(changed_pixels(game, there, gone, channels))
    assert len(changed) >= 40
    assert min(changed) >= 2
