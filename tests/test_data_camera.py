"""The camera: places share nothing, moves add up, and a walk comes back when it says it does."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from model.data.camera import DOWN, LEFT, NOOP, RIGHT, UP, Camera, circuits, out_and_back
from model.data.photos import load_photo
from model.data.pixels import resize_area

STEP = {NOOP: (0, 0), UP: (-1, 0), RIGHT: (0, 1), DOWN: (1, 0), LEFT: (0, -1)}


@pytest.fixture(scope="module")
def camera() -> Camera:
    return Camera(load_photo("flower"), 2)


def test_a_frame_is_the_part_of_the_photo_that_the_moves_lead_to(camera: Camera):
    photo, moves = load_photo("flower"), [RIGHT, DOWN, NOOP, LEFT, UP, UP]
    walk = camera.film((3, 4), moves)
    row, column = 3, 4
    for frame, move in zip(walk.frames, [NOOP, *moves], strict=True):
        row, column = row + STEP[move][0], column + STEP[move][1]
        window = photo[32 * row : 32 * row + 32, 32 * column : 32 * column + 32]
        assert np.array_equal(frame, resize_area(window, 16, 16))
    assert walk.actions.tolist() == [NOOP, *moves]
    assert (walk.frames.dtype, walk.actions.dtype, walk.places.dtype) == (np.uint8, np.int64, np.int64)


@pytest.mark.parametrize("moves", [[UP], [LEFT], [RIGHT] * 20, [DOWN] * 13])
def test_a_move_off_the_photo_is_refused(camera: Camera, moves: list[int]):
    assert (camera.rows, camera.columns) == (13, 20)
    with pytest.raises(ValueError, match="leave the grid of 13 x 20 places"):
        camera.film((0, 0), moves)


@pytest.mark.parametrize("pitch", [0, 27])
def test_a_place_larger_than_the_photo_is_refused(pitch: int):
    with pytest.raises(ValueError, match=f"^pitch={pitch}: expected 1 to 26 for this photo"):
        Camera(load_photo("flower"), pitch)


@pytest.mark.parametrize("lead", [0, 3])
@pytest.mark.parametrize("pause", [0, 1])
def test_out_and_back_shows_each_place_again_after_the_gap_it_names_and_not_in_between(
    camera: Camera, lead: int, pause: int
):
    reach = 128
    walk = out_and_back(camera, lead, reach, pause)
    places, turn = walk.places.tolist(), lead + reach
    assert len(places) == 1 + lead + 2 * reach + pause
    assert len(set(places[: turn + 1])) == turn + 1
    gaps = []
    for step in range(1 - pause, reach + 1):
        clock, gap = turn + pause + step, 2 * step + pause
        seen = [earlier for earlier in range(clock) if places[earlier] == places[clock]]
        assert seen == [clock - gap]
        assert np.array_equal(walk.frames[clock], walk.frames[clock - gap])
        gaps.append(gap)
    assert gaps == list(range(2 - pause, 257 + pause, 2))
    distinct = np.unique(walk.frames[: turn + 1].reshape(turn + 1, -1), axis=0)
    assert len(distinct) == turn + 1


def test_a_walk_longer_than_the_photo_has_places_is_refused(camera: Camera):
    assert len(out_and_back(camera, 0, 259, 0).places) == 519
    with pytest.raises(ValueError, match=r"^lead=1 reach=259: 261 places, the photo has 260"):
        out_and_back(camera, 1, 259, 0)


@pytest.mark.parametrize("num_places", [2, 4, 6, 10])
def test_a_circuit_passes_each_place_once_a_lap_by_moves_to_a_neighbour(num_places: int):
    for walk in circuits("test", num_places, 3, 3, seed=0):
        places = walk.places.tolist()
        assert len(places) == len(walk.frames) == len(walk.actions) == 3 * num_places
        assert len(set(places[:num_places])) == num_places
        assert places == places[:num_places] * 3
        assert NOOP not in walk.actions[1:]
        values = walk.frames[:num_places].astype(float)
        assert min(np.sqrt(((a - b) ** 2).mean()) for a, b in pairwise(values)) >= 32
        wide = max(abs(a - b) for a, b in pairwise(places))
        assert {abs(a - b) for a, b in pairwise(places)} <= {1, wide}


def test_circuits_are_the_same_for_the_same_seed_and_differ_from_seed_to_seed():
    one, same, other = (circuits("test", 4, 1, 2, seed=seed) for seed in (0, 0, 1))
    assert all(np.array_equal(a.frames, b.frames) for a, b in zip(one, same, strict=True))
    assert not all(np.array_equal(a.frames, b.frames) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("num_places", [0, 1, 5])
def test_a_circuit_that_no_camera_can_go_round_is_refused(num_places: int):
    with pytest.raises(ValueError, match=f"^num_places={num_places}: expected an even number >= 2"):
        circuits("test", num_places, 1, 1, seed=0)
