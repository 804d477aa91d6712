"""Loops of photo crops: bundled photos only, test photos apart from training photos, frames that can be told apart."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

import numpy as np
import pytest

from model.data import load_clip, photos
from model.data.loops import MAX_LOOP, MIN_LOOP
from model.data.photos import MIN_GAP, MIN_STD, PHOTOS, crop, load_photo, photo_loops
from model.data.pixels import resize_area

RUN = 16


def runs_of(photo: np.ndarray) -> np.ndarray:
    """A fingerprint of every horizontal run of 16 pixels whose ends differ, at every offset: uint64, sorted."""
    values = photo.astype(np.uint64) @ np.array([1, 256, 65536], np.uint64)
    height, width = values.shape
    prints = np.zeros((height, width - RUN + 1), np.uint64)
    for offset in range(RUN):
        prints = prints * np.uint64(6364136223846793005) + values[:, offset : width - RUN + 1 + offset]
    bright = photo[..., 1].astype(int)
    return np.unique(prints[np.abs(bright[:, RUN - 1 :] - bright[:, : width - RUN + 1]) >= 24])


def test_no_photo_belongs_to_both_splits():
    train, test = set(PHOTOS["train"]), set(PHOTOS["test"])
    assert train
    assert test
    assert not train & test
    assert len(train) + len(test) == len(PHOTOS["train"] + PHOTOS["test"])


def test_no_run_of_sixteen_pixels_of_a_test_photo_occurs_in_a_training_photo():
    """By content: a photo under another name, cropped or shifted would share very many."""
    train = np.unique(np.concatenate([runs_of(load_photo(name)) for name in PHOTOS["train"]]))
    for name in PHOTOS["test"]:
        runs = runs_of(load_photo(name))
        assert len(runs) > 10_000
        assert not np.isin(runs, train).any(), name
    shifted = load_photo("coffee")[40:80, 7:200]
    assert np.isin(runs_of(shifted), train).all()


def test_every_photo_lies_in_its_package_and_is_read_without_a_network(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    photos._decoded.cache_clear()
    for name in PHOTOS["train"] + PHOTOS["test"]:
        photo = load_photo(name)
        assert photo.dtype == np.uint8
        assert photo.shape[2] == 3
        assert min(photo.shape[:2]) >= 300
    for package in ("skimage", "sklearn"):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert Path(
            spec.submodule_search_locations[0], photos._FILES["coffee" if package == "skimage" else "china"][1]
        ).is_file()


def test_a_package_that_is_missing_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch):
    photos._decoded.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"^photo='rocket': skimage with data/rocket.jpg .*pip install 'ringkv\[probes\]'$"
    ):
        load_photo("rocket")
    with pytest.raises(ValueError, match=r"^photo='lena': expected one of astronaut"):
        load_photo("lena")


@pytest.mark.parametrize("pitch", [1, 3, 12])
def test_a_crop_is_the_area_average_that_the_recorder_uses(pitch: int):
    photo = load_photo("chelsea")
    tops, lefts = [0, 17, 300 - 16 * pitch], [5, 0, 451 - 16 * pitch]
    crops = crop(photo, pitch, tops, lefts)
    for made, top, left in zip(crops, tops, lefts, strict=True):
        window = photo[top : top + 16 * pitch, left : left + 16 * pitch]
        assert np.array_equal(made, resize_area(window, 16, 16))


@pytest.mark.parametrize(("top", "left"), [(-1, 0), (0, -1), (300 - 31, 0), (0, 451 - 31)])
def test_a_window_that_leaves_the_photo_is_refused(top: int, left: int):
    with pytest.raises(ValueError, match="expected inside 300 x 451"):
        crop(load_photo("chelsea"), 2, [top], [left])


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("n_frames", [3, 8])
def test_frames_of_a_loop_are_neither_flat_nor_alike(split: photos.Split, n_frames: int):
    loops = photo_loops(split, n_frames, 12, seed=5)
    assert loops.shape == (12, n_frames, 16, 16, 3)
    assert loops.dtype == np.uint8
    values = loops.astype(np.float64)
    for loop in values:
        for index, frame in enumerate(loop):
            assert np.sqrt(np.mean([frame[..., c].var() for c in range(3)])) >= MIN_STD
            for other in loop[:index]:
                assert np.sqrt(((frame - other) ** 2).mean()) >= MIN_GAP


def test_loops_depend_on_split_and_seed_alone_and_the_first_ones_not_on_how_many_there_are():
    loops = photo_loops("train", 4, 6, seed=1)
    assert np.array_equal(photo_loops("train", 4, 3, seed=1), loops[:3])
    assert not np.array_equal(photo_loops("train", 4, 3, seed=2), loops[:3])
    assert not np.array_equal(photo_loops("test", 4, 3, seed=1), loops[:3])
    assert len(np.unique(loops.reshape(24, -1), axis=0)) == 24


@pytest.mark.parametrize(
    ("split", "n_frames", "count", "line"),
    [
        ("dev", 4, 1, "split='dev': expected one of train, test"),
        ("test", 0, 1, "n_frames=0: expected an integer >= 1"),
        ("test", 4, 0, "count=0: expected an integer >= 1"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(split: photos.Split, n_frames: int, count: int, line: str):
    with pytest.raises(ValueError) as refusal:
        photo_loops(split, n_frames, count, seed=0)
    assert str(refusal.value) == line


def test_more_frames_than_can_be_told_apart_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(photos, "MIN_GAP", 256.0)
    with pytest.raises(ValueError, match=r"^n_frames=3: expected fewer, 1 frame"):
        photo_loops("test", 3, 1, seed=0)


def test_the_loops_of_the_main_job_repeat_and_differ_from_seed_to_seed_and_clip_to_clip():
    request = {"num_frames": 20, "channels": 3, "height": 16, "width": 16}
    clips = [load_clip("loops", seed=seed, index=index, **request) for seed in range(3) for index in range(2)]
    lengths = set()
    for clip in clips:
        length = len(np.unique(clip.frames.reshape(20, -1), axis=0))
        assert MIN_LOOP <= length <= MAX_LOOP
        assert f"loop of {length} crops" in clip.source
        assert np.array_equal(clip.frames[length:], clip.frames[:-length])
        assert not clip.actions.any()
        lengths.add(length)
    assert len(lengths) > 1
    assert len({clip.content_hash for clip in clips}) == len(clips)
    again = load_clip("loops", seed=2, index=1, **request | {"num_frames": 12})
    assert np.array_equal(again.frames, clips[-1].frames[:12])
    gray = load_clip("loops", seed=0, **request | {"channels": 1, "height": 8, "width": 32})
    assert gray.frames.shape == (20, 8, 32, 1)
