"""A camera over a large photo that is moved by actions: it leaves a place, and comes back to it.

The photo is cut into a grid of places that share no pixel, and a step moves the camera by exactly one place. What it
sees where it comes back can therefore be known only from when it was there before, never from a neighbour's edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from model.data.clip import Actions, Pixels
from model.data.photos import MIN_GAP, MIN_STD, PHOTOS, SIDE, Split, crop, gaps, load_photo, spread

NOOP, UP, RIGHT, DOWN, LEFT = range(5)
"""Actions, by index."""

_MOVES = {NOOP: (0, 0), UP: (-1, 0), RIGHT: (0, 1), DOWN: (1, 0), LEFT: (0, -1)}
_MAX_PITCH = 4
_ATTEMPTS = 2000


@dataclass(frozen=True, eq=False)
class Walk:
    """What a camera saw. frames: uint8 [N, 16, 16, 3]. actions: int64 [N], entry f led to frame f, the first is NOOP.
    places: int64 [N], equal where the camera is at the same place.
    """

    frames: Pixels
    actions: Actions
    places: Actions


class Camera:
    """Sees 16 x 16 pixels, each the average of ``pitch`` x ``pitch`` pixels of the photo uint8 [H, W, 3]."""

    def __init__(self, photo: Pixels, pitch: int) -> None:
        """``ValueError`` where not even one place fits."""
        if pitch < 1 or min(photo.shape[:2]) < SIDE * pitch:
            raise ValueError(f"pitch={pitch}: expected 1 to {min(photo.shape[:2]) // SIDE} for this photo")
        self.rows, self.columns = (size // (SIDE * pitch) for size in photo.shape[:2])
        rows, columns = np.divmod(np.arange(self.rows * self.columns), self.columns)
        self._views = crop(photo, pitch, SIDE * pitch * rows, SIDE * pitch * columns)

    def film(self, start: tuple[int, int], moves: Sequence[int]) -> Walk:
        """The frames from ``start`` (row and column of a place) on, one more than ``moves``.

        ``ValueError`` for a move that leaves the photo.
        """
        path = np.cumsum([start, *(_MOVES[move] for move in moves)], axis=0)
        if (path < 0).any() or (path >= (self.rows, self.columns)).any():
            raise ValueError(f"start={start}: these moves leave the grid of {self.rows} x {self.columns} places")
        places = path[:, 0] * self.columns + path[:, 1]
        return Walk(frames=self._views[places], actions=np.array([NOOP, *moves], np.int64), places=places)


def out_and_back(camera: Camera, lead: int, reach: int, pause: int) -> Walk:
    """Out over ``lead + reach`` places never seen before, ``pause`` steps of standing still, and ``reach`` steps back.

    Standing still or the j-th step back (frame ``lead + reach + pause + j``) shows what was last seen
    ``2 j + pause`` frames ago, and not in between: with pauses of 0 and 1 every gap up to ``2 reach + 1`` occurs. The
    way out starts at the top left and sweeps row by row. ``ValueError`` if the grid has too few places.
    """
    places = camera.rows * camera.columns
    if lead + reach + 1 > places:
        raise ValueError(f"lead={lead} reach={reach}: {lead + reach + 1} places, the photo has {places}")
    sweep = ([RIGHT] * (camera.columns - 1) + [DOWN] + [LEFT] * (camera.columns - 1) + [DOWN]) * camera.rows
    out = sweep[: lead + reach]
    opposite = {UP: DOWN, DOWN: UP, LEFT: RIGHT, RIGHT: LEFT}
    back = [opposite[move] for move in out[lead:][::-1]]
    return camera.film((0, 0), [*out, *[NOOP] * pause, *back])


def circuits(split: Split, num_places: int, laps: int, count: int, seed: int) -> list[Walk]:
    """``count`` walks of ``laps`` rounds through ``num_places`` places, each place once a round.

    Photo, size of the places and start are random; places that are flat or look alike are avoided as in
    ``photos.photo_loops``. The same for the same arguments. ``ValueError`` for an odd number of places, which no
    camera can go round, and for more than a photo can tell apart.
    """
    if num_places < 2 or num_places % 2:
        raise ValueError(f"num_places={num_places}: expected an even number >= 2")
    down = num_places // 4
    across = num_places // 2 - down
    lap = [RIGHT] * across + [DOWN] * down + [LEFT] * across + [UP] * down
    walks: list[Walk] = []
    order = list(PHOTOS).index(split)
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(order, num_places)))
    for _ in range(_ATTEMPTS * count):
        if len(walks) == count:
            return walks
        name = PHOTOS[split][rng.integers(len(PHOTOS[split]))]
        camera = _camera(name, int(rng.integers(1, _MAX_PITCH + 1)))
        room = camera.rows - down, camera.columns - across
        if min(room) < 1:
            continue
        start = int(rng.integers(room[0])), int(rng.integers(room[1]))
        round_ = camera.film(start, lap[:-1])
        if _told_apart(round_.frames):
            walks.append(camera.film(start, (lap * laps)[:-1]))
    raise ValueError(f"num_places={num_places}: expected fewer, {len(walks)} of {count} circuits can be told apart")


@cache
def _camera(name: str, pitch: int) -> Camera:
    return Camera(load_photo(name), pitch)


def _told_apart(frames: Pixels) -> bool:
    """Whether none of uint8 [N, h, w, C] is flat or looks like another."""
    if spread(frames).min() < MIN_STD:
        return False
    return all(gaps(frames[index + 1 :], frames[index]).min() >= MIN_GAP for index in range(len(frames) - 1))
