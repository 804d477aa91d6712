"""Loops of small real pictures: crops of photos that scikit-image and scikit-learn carry inside their packages.

Nothing is downloaded. The photos are split by name, so that no training frame shows what a test frame shows. A crop is
the exact area average of a square window, whose size varies.

Letters: M crops, P pixels of the photo per pixel of a crop, h, w rows and columns of a crop, C channels.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from model.data.clip import Pixels

Split = Literal["train", "test"]

SIDE = 16
"""Rows and columns of a crop."""

PHOTOS: dict[str, tuple[str, ...]] = {
    "train": ("astronaut", "china", "coffee", "hubble_deep_field", "ihc", "motorcycle_left"),
    "test": ("chelsea", "flower", "rocket"),
}
"""Names of the photos of each split."""

MIN_STD = 16.0
"""A crop is flat below this: grey levels, the standard deviation over its pixels (channels as one mean variance)."""

MIN_GAP = 32.0
"""Two crops of one loop look alike below this: grey levels, the root of their mean squared difference."""

_FILES = {
    "astronaut": ("skimage", "data/astronaut.png"),
    "chelsea": ("skimage", "data/chelsea.png"),
    "china": ("sklearn", "datasets/images/china.jpg"),
    "coffee": ("skimage", "data/coffee.png"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
    "hubble_deep_field": ("skimage", "data/hubble_deep_field.jpg"),
    "ihc": ("skimage", "data/ihc.png"),
    "motorcycle_left": ("skimage", "data/motorcycle_left.png"),
    "rocket": ("skimage", "data/rocket.jpg"),
}
_MAX_PITCH = 12  # pixels of a photo per pixel of a crop: a window of up to 192, most of the height of the smallest
_ATTEMPTS = 200  # rounds of candidates for one loop; eight frames take two to five


def load_photo(name: str) -> Pixels:
    """The photo ``name`` as RGB, uint8 [H, W, 3], read-only.

    ``ValueError`` for another name, and where the package that carries it is not installed.
    """
    if name not in _FILES:
        raise ValueError(f"photo={name!r}: expected one of {', '.join(_FILES)}")
    return _decoded(name)


def crop(photo: Pixels, pitch: int, tops: npt.ArrayLike, lefts: npt.ArrayLike, side: int = SIDE) -> Pixels:
    """Square windows of ``side * pitch`` pixels of ``photo`` [H, W, C], area-averaged: uint8 [M, side, side, C].

    tops, lefts: [M], the first row and column of each window. Halves round up, as in ``pixels.resize_area``.
    ``ValueError`` for a window that is not inside.
    """
    top, left = np.asarray(tops, np.int64), np.asarray(lefts, np.int64)
    height, width = photo.shape[:2]
    last_row, last_column = height - side * pitch, width - side * pitch
    if pitch < 1 or ((top < 0) | (top > last_row) | (left < 0) | (left > last_column)).any():
        raise ValueError(f"windows of {side * pitch} pixels at {top}, {left}: expected inside {height} x {width}")
    return _averaged(_summed(photo), pitch, top, left, side)


def photo_loops(split: Split, n_frames: int, count: int, seed: int) -> Pixels:
    """``count`` loops of ``n_frames`` distinct frames: uint8 [count, n_frames, 16, 16, 3].

    A frame comes from any photo of ``split``; flat ones, and ones like another of their loop, are left out
    (``MIN_STD``, ``MIN_GAP``). The same for the same arguments; loop i does not depend on ``count``. ``ValueError`` for
    another split, fewer than one frame or loop, and more frames than can be told apart.
    """
    if split not in PHOTOS:
        raise ValueError(f"split={split!r}: expected one of {', '.join(PHOTOS)}")
    for key, value in (("n_frames", n_frames), ("count", count)):
        if value < 1:
            raise ValueError(f"{key}={value}: expected an integer >= 1")
    order = list(PHOTOS).index(split)
    seeds = (np.random.SeedSequence(seed, spawn_key=(order, loop)) for loop in range(count))
    return np.stack([_loop(split, n_frames, np.random.default_rng(each)) for each in seeds])


def spread(crops: Pixels) -> npt.NDArray[np.float64]:
    """Standard deviation of each of uint8 [M, h, w, C] over its pixels, the channels as one mean variance: [M]."""
    return np.sqrt(crops.astype(np.float64).var(axis=(1, 2)).mean(axis=-1))


def gaps(crops: Pixels, other: Pixels) -> npt.NDArray[np.float64]:
    """Root mean squared difference of each of ``crops`` uint8 [M, h, w, C] and ``other`` [h, w, C], grey levels [M]."""
    return np.sqrt(np.square(crops.astype(np.float64) - other).mean(axis=(1, 2, 3)))


def _loop(split: Split, n_frames: int, rng: np.random.Generator) -> Pixels:
    chosen: list[Pixels] = []
    for _ in range(_ATTEMPTS):
        candidates = _candidates(split, 2 * n_frames, rng)
        for candidate in candidates[spread(candidates) >= MIN_STD]:
            if not chosen or gaps(np.stack(chosen), candidate).min() >= MIN_GAP:
                chosen.append(candidate)
            if len(chosen) == n_frames:
                return np.stack(chosen)
    raise ValueError(f"n_frames={n_frames}: expected fewer, {len(chosen)} frames of a loop can be told apart")


def _candidates(split: Split, count: int, rng: np.random.Generator) -> Pixels:
    """Crops of random photos, windows and places, in random order: uint8 [count, 16, 16, 3]."""
    photos = rng.integers(len(PHOTOS[split]), size=count)
    pitches = rng.integers(1, _MAX_PITCH + 1, size=count)
    places = rng.random((count, 2))
    crops = np.empty((count, SIDE, SIDE, 3), np.uint8)
    for index, (photo, pitch, (down, across)) in enumerate(zip(photos, pitches, places, strict=True)):
        sums = _photo_sums(PHOTOS[split][photo])
        top, left = (
            np.array([int(share * (size - SIDE * pitch))])
            for share, size in ((down, sums.shape[0]), (across, sums.shape[1]))
        )
        crops[index] = _averaged(sums, int(pitch), top, left, SIDE)[0]
    return crops


def _summed(photo: Pixels) -> npt.NDArray[np.int64]:
    """[H + 1, W + 1, C]: entry (y, x) is the sum over all pixels above y and left of x."""
    sums = np.zeros((photo.shape[0] + 1, photo.shape[1] + 1, photo.shape[2]), np.int64)
    np.cumsum(photo, axis=0, out=sums[1:, 1:])
    np.cumsum(sums[1:, 1:], axis=1, out=sums[1:, 1:])
    return sums


def _averaged(
    sums: npt.NDArray[np.int64], pitch: int, top_M: npt.NDArray[np.int64], left_M: npt.NDArray[np.int64], side: int
) -> Pixels:
    steps = pitch * np.arange(side + 1)
    rows_Mh, columns_Mw = top_M[:, None] + steps, left_M[:, None] + steps
    corners = sums[rows_Mh[:, :, None], columns_Mw[:, None, :]]
    totals_MhwC = np.diff(np.diff(corners, axis=1), axis=2)
    area = pitch**2
    return ((2 * totals_MhwC + area) // (2 * area)).astype(np.uint8)


@cache
def _photo_sums(name: str) -> npt.NDArray[np.int64]:
    return _summed(load_photo(name))


@cache
def _decoded(name: str) -> Pixels:
    from PIL import Image

    package, file = _FILES[name]
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    path = Path(folders[0]) / file if folders else None
    if path is None or not path.is_file():
        raise ValueError(
            f"photo={name!r}: {package} with {file} is not installed; expected pip install 'ringkv[probes]'"
        )
    with Image.open(path) as image:
        pixels = np.array(image.convert("RGB"))
    pixels.flags.writeable = False
    return pixels
