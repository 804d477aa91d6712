"""The executable specification against a slot simulation of its own and against lists worked out by hand.

Everything else is checked against ``visible_frames``; here it is checked against nothing that shares code with it.
"""

from __future__ import annotations

import pytest

from ringkv import RingKVLayerConfig, visible_frames
from ringkv.horizon import (
    held_frames,
    hidden_slot,
    horizon_frames,
    is_kept,
    overwritten_frames,
    session_start,
    slot_of,
)
from tests.ring_tools import ring

GEOMETRIES = [(buckets, dilation) for buckets in range(1, 6) for dilation in range(1, 5)]

# (R, d): what frames 0, 1, 2, ... see, worked out by hand
LITERAL = {
    (1, 1): [[], [], [], []],
    (1, 2): [[], [0], [], [2], [], [4]],
    (1, 3): [[], [0], [0], [], [3], [3], []],
    (1, 4): [[], [0], [0], [0], [], [4], [4], [4], []],
    (2, 1): [[], [0], [1], [2], [3]],
    (2, 2): [[], [0], [0], [0, 2], [2], [2, 4], [4], [4, 6], [6]],
    (2, 3): [[], [0], [0], [0], [0, 3], [0, 3], [3], [3, 6], [3, 6], [6], [6, 9]],
    (2, 4): [[], [0], [0], [0], [0], [0, 4], [0, 4], [0, 4], [4], [4, 8], [4, 8], [4, 8], [8]],
    (3, 1): [[], [0], [0, 1], [1, 2], [2, 3], [3, 4], [4, 5]],
    (3, 2): [[], [0], [0], [0, 2], [0, 2], [0, 2, 4], [2, 4], [2, 4, 6], [4, 6], [4, 6, 8]],
    (3, 3): [[], [0], [0], [0], [0, 3], [0, 3], [0, 3], [0, 3, 6], [0, 3, 6], [3, 6], [3, 6, 9]],
    (4, 1): [[], [0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]],
    (4, 2): [[], [0], [0], [0, 2], [0, 2], [0, 2, 4], [0, 2, 4], [0, 2, 4, 6], [2, 4, 6], [2, 4, 6, 8], [4, 6, 8]],
    (5, 1): [[], [0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]],
    (5, 2): [
        *([], [0], [0], [0, 2], [0, 2], [0, 2, 4], [0, 2, 4], [0, 2, 4, 6], [0, 2, 4, 6], [0, 2, 4, 6, 8]),
        *([2, 4, 6, 8], [2, 4, 6, 8, 10], [4, 6, 8, 10]),
    ],
}


def simulate(buckets: int, dilation: int, last: int) -> list[tuple[list[int], list[int]]]:
    """For each frame up to ``last``: what it sees, and what is held once it is committed."""
    slots: dict[int, int] = {}  # slot -> frame
    arrivals = 0
    out = []
    for frame in range(last + 1):
        takes = arrivals % buckets if frame % dilation == 0 else None
        before = sorted(held for slot, held in slots.items() if slot != takes)
        if takes is not None:
            slots[takes] = frame
            arrivals += 1
        out.append((before, sorted(slots.values())))
    return out


@pytest.mark.parametrize(("buckets", "dilation"), GEOMETRIES)
def test_visible_and_held_frames_are_those_of_a_slot_simulation(buckets: int, dilation: int) -> None:
    layer = ring(buckets, dilation)
    for frame, (before, after) in enumerate(simulate(buckets, dilation, 60)):
        assert visible_frames(layer, frame) == before, f"frame {frame}"
        assert held_frames(layer, frame) == after, f"frame {frame}"


@pytest.mark.parametrize(("buckets", "dilation"), GEOMETRIES)
def test_overwritten_frames_are_all_that_going_back_any_step_needs(buckets: int, dilation: int) -> None:
    layer, steps = ring(buckets, dilation), simulate(buckets, dilation, 30)
    for clock in range(31):
        for frames in range(clock + 2):
            earlier = [set(steps[clock - back][1]) if back <= clock else set() for back in range(frames + 1)]
            assert overwritten_frames(layer, clock, frames) == sorted(set().union(*earlier) - earlier[0])


@pytest.mark.parametrize(("geometry", "lists"), LITERAL.items(), ids=[f"R{r}-d{d}" for r, d in LITERAL])
def test_visible_frames_are_the_lists_worked_out_by_hand(geometry: tuple[int, int], lists: list[list[int]]) -> None:
    layer = ring(*geometry)
    assert [visible_frames(layer, frame) for frame in range(len(lists))] == lists


def test_two_layers_of_one_model_see_different_frames_at_the_same_clock() -> None:
    near, far = ring(2, 1), ring(2, 4)
    assert [visible_frames(near, p) for p in (7, 8, 9)] == [[6], [7], [8]]
    assert [visible_frames(far, p) for p in (7, 8, 9)] == [[0, 4], [4], [4, 8]]


def test_uncompacted_storage_changes_nothing_that_is_visible() -> None:
    for frame in range(40):
        assert visible_frames(ring(3, 2, frames=7), frame) == visible_frames(ring(3, 2), frame)


@pytest.mark.parametrize(("buckets", "dilation"), GEOMETRIES)
def test_a_frame_takes_the_slot_of_the_oldest_kept_frame_and_hides_only_that_one(buckets: int, dilation: int) -> None:
    layer = ring(buckets, dilation)
    for frame in range(61):
        if frame % dilation:
            assert not is_kept(layer, frame)
            assert hidden_slot(layer, frame) is None
            hidden = []
        else:
            assert is_kept(layer, frame)
            assert hidden_slot(layer, frame) == slot_of(layer, frame) in range(buckets)
            hidden = [
                old for old in held_frames(layer, frame - 1 if frame else None) if frame - old == buckets * dilation
            ]
            assert all(slot_of(layer, old) == slot_of(layer, frame) for old in hidden)
        held = held_frames(layer, frame - 1 if frame else None)
        assert visible_frames(layer, frame) == [old for old in held if old not in hidden]
        kept_slots = [slot_of(layer, old) for old in held]
        assert len(set(kept_slots)) == len(kept_slots)


def test_slots_are_taken_in_turn_and_start_over_after_the_last() -> None:
    assert [slot_of(ring(3), frame) for frame in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [slot_of(ring(2, 4), frame) for frame in (0, 4, 8, 12)] == [0, 1, 0, 1]
    assert [hidden_slot(ring(2, 4), frame) for frame in range(5)] == [0, None, None, None, 1]
    assert [slot_of(ring(3), frame) for frame in range(255, 260)] == [0, 1, 2, 0, 1]


def test_a_frame_that_is_not_kept_has_no_slot() -> None:
    with pytest.raises(AssertionError, match="frame 3"):
        slot_of(ring(3, 2), 3)


def test_a_session_without_a_committed_frame_holds_nothing() -> None:
    assert held_frames(ring(3), None) == []
    assert held_frames(ring(3), 0) == [0]
    assert held_frames(ring(3), 6) == [4, 5, 6]
    assert held_frames(ring(3, 2), 6) == [2, 4, 6]
    assert held_frames(ring(3, 2), 7) == [2, 4, 6]


@pytest.mark.parametrize(("buckets", "dilation"), GEOMETRIES)
def test_no_visible_frame_is_older_than_the_horizon_and_the_oldest_one_reaches_it(buckets: int, dilation: int) -> None:
    layer = ring(buckets, dilation)
    assert horizon_frames(layer) == buckets * dilation
    ages = [frame - min(visible_frames(layer, frame), default=frame) for frame in range(61)]
    assert max(ages) == buckets * dilation - 1


def test_the_published_geometry_sees_what_its_authors_state() -> None:
    local, world = ring(16), ring(16, 8, frames=128)
    assert {len(visible_frames(local, p)) for p in range(200, 232)} == {15}
    assert {len(visible_frames(world, p)) for p in range(1000, 1008)} == {15, 16}
    oldest = sorted({p - visible_frames(world, p)[0] for p in range(1000, 1008)})
    assert oldest == [120, 121, 122, 123, 124, 125, 126, 127]
    assert horizon_frames(world) == 128


def test_the_first_token_of_a_session_in_a_large_pool_is_not_a_32_bit_number() -> None:
    assert session_start(69_999, 40_000) == 2_799_960_000
    assert session_start(0, 40_000) == 0


def test_geometry_is_read_from_the_layer_and_not_from_what_it_allocates() -> None:
    layer = RingKVLayerConfig(ring_frames=128, ring_buckets=16, pinned_dilation=8)
    assert horizon_frames(layer) == 128
    assert len(held_frames(layer, 5000)) == 16
