"""Denoise passes and commits: what a pass may change, and what an aborted commit leaves behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ringkv import RingKVManager
from tests.ring_tools import (
    begin,
    build_layer,
    build_manager,
    bytes_of,
    clocks,
    drive,
    finish,
    ring,
    run_stream,
    same_bytes,
    seen,
    slot_tags,
    stacked,
    tagged,
    write_pass,
    write_tagged,
)


def test_noisy_passes_stay_out_of_history_and_the_committed_content_goes_in() -> None:
    """Denoise passes leaked into history, or what was committed was not the clean rerun."""
    cache = build_layer(3)
    for p in range(4):
        write_tagged(cache, p, commit=True)
    rows = []
    for noise in (101.0, 102.0, 103.0):
        k, _, visible = write_tagged(cache, 4, commit=False, tag=noise)
        rows.append(visible.clone())
        assert slot_tags(cache) == [4, 2, 3, int(noise)]
        assert k[0, 0, visible, 0].tolist().count(noise) == 2  # its own scratch, this pass's value
    k, v, visible = write_tagged(cache, 4, commit=True)
    rows.append(visible.clone())
    assert slot_tags(cache) == [4, 5, 3, 5]
    assert all(torch.equal(row, rows[0]) for row in rows)
    assert seen(k, v, visible, 4) == [2, 3]


@pytest.mark.parametrize(("buckets", "dilation"), [(1, 1), (3, 1), (3, 2), (2, 3)])
def test_a_pass_that_does_not_commit_leaves_the_ring_byte_identical(buckets: int, dilation: int) -> None:
    cache = build_layer(buckets, dilation, frames=buckets + 1)
    scratch = cache.session_span(0)[1] - 2
    for p in range(3 * buckets * dilation):
        ring_before, written = cache.kv[:, :, :, :scratch].clone(), cache.written.clone()
        for noise in (101.0, float("nan"), float("inf")):
            write_tagged(cache, p, commit=False, tag=noise)
            assert same_bytes(cache.kv[:, :, :, :scratch], ring_before)
            assert torch.equal(cache.written, written)
        write_tagged(cache, p, commit=True)


@pytest.mark.parametrize("commit", [False, True])
def test_the_same_upsert_twice_changes_nothing_more(commit: bool) -> None:
    cache = build_layer(3)
    for p in range(4):
        write_tagged(cache, p, commit=True)
    first = [t.clone() for t in write_tagged(cache, 4, commit=commit)]
    kv, written = cache.kv.clone(), cache.written.clone()
    second = write_tagged(cache, 4, commit=commit)
    assert torch.equal(cache.kv, kv)
    assert torch.equal(cache.written, written)
    assert same_bytes(first, list(second))


def test_a_committing_pass_sees_what_the_denoise_passes_saw() -> None:
    """Otherwise the frame would be judged against other history than it was made from."""
    cache = build_layer(2, 2)
    for p in range(12):
        noisy = seen(*write_tagged(cache, p, commit=False), p)
        assert seen(*write_tagged(cache, p, commit=True), p) == noisy
        assert seen(*write_tagged(cache, p, commit=False), p) == noisy  # and once more afterwards


def test_a_visibility_row_is_not_changed_by_a_later_call() -> None:
    """An alias of a scratch buffer was returned and edited in place by the next layer."""
    cache = build_layer(3)
    for p in range(2):
        write_tagged(cache, p, commit=True)
    _, _, row = write_tagged(cache, 2, commit=True)
    copy = row.clone()
    write_tagged(cache, 3, commit=True)
    assert torch.equal(row, copy)


def test_two_layers_do_not_share_a_visibility_row() -> None:
    manager = build_manager([ring(2), ring(2, 4)])
    run_stream(manager, "a", range(9))
    begin(manager, [("a", 9)])
    first, second = write_pass(manager, [("a", 9)], commit=False)
    assert first[2].untyped_storage().data_ptr() != second[2].untyped_storage().data_ptr()
    assert seen(*first, 9) == [8]
    assert seen(*second, 9) == [4, 8]


def test_build_visibility_off_writes_the_same_bytes() -> None:
    with_row, without = build_layer(3), build_layer(3)
    for p in range(5):
        kv = stacked([tagged(p)])
        with_row.upsert(kv, clocks(p), True, clocks(0))
        assert without.upsert(kv, clocks(p), True, clocks(0), build_visibility=False)[2].numel() == 0
    assert torch.equal(with_row.kv, without.kv)
    assert torch.equal(with_row.written, without.written)


# -- an aborted commit ---------------------------------------------------------------------------------------


def _at_frame_4() -> RingKVManager:
    """Three layers (R=3 d=1, R=3 d=2, R=2 d=3 uncompacted), frames 0..3 committed; slots taken at 4: 1, 2, none."""
    manager = build_manager([ring(3), ring(3, 2), ring(2, 3, 4)])
    run_stream(manager, "a", range(4))
    return manager


def _commit_layers(manager: RingKVManager, frame: int, count: int, tag: float | None = None) -> None:
    k, v = tagged(frame, tag=tag)
    for layer in range(count):
        manager.upsert(k[None], v[None], layer, clocks(frame), commit=True)


def test_a_state_between_frames_keeps_the_slot_that_the_next_frame_will_take() -> None:
    manager = _at_frame_4()
    begin(manager, [("a", 4)])
    write_pass(manager, [("a", 4)], commit=False)
    kv, written = manager.get_state("a")["layers"][0]
    assert (kv[0, 0, 0, ::2, 0] - 1).tolist() == [3, 1, 2, -1]  # scratch is zero
    assert written.tolist() == [True] * 8


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("moment", ["pending", "planned again", "denoised again"])
def test_an_aborted_commit_kills_the_slot_it_may_have_overwritten_and_only_that(layers: int, moment: str) -> None:
    manager = _at_frame_4()
    begin(manager, [("a", 4)])
    _commit_layers(manager, 4, layers, tag=66.0)
    if moment != "pending":
        begin(manager, [("a", 4)])
        assert slot_tags(manager.layers[0])[:3] == [4, 0, 3]  # zeroed in place
        assert slot_tags(manager.layers[1])[:3] == [1, 3, 0]
        assert slot_tags(manager.layers[2])[:4] == [1, 4, 0, 0]  # frame 4 takes no slot here
    if moment == "denoised again":
        write_pass(manager, [("a", 4)], commit=False)
    state = manager.get_state("a")
    assert state["clock"] == 3
    expected = [
        ([4, 0, 3, 0], [True, False, True, True]),  # frame 1 is gone, 0 was overwritten by 3, 2 stays
        ([1, 3, 0, 0], [True, True, False, True]),
        ([1, 4, 0, 0, 0], [True, True, False, False, True]),
    ]
    for (kv, written), (tags, flags) in zip(state["layers"], expected, strict=True):
        assert kv[0, 0, 0, ::2, 0].tolist() == tags
        assert written[::2].tolist() == flags
        assert torch.equal(written[::2], written[1::2])
        assert not kv[:, :, :, ~written].any()
        assert 66.0 not in kv


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_an_aborted_frame_is_driven_again_as_if_nothing_had_happened(layers: int) -> None:
    manager, clean = _at_frame_4(), _at_frame_4()
    begin(manager, [("a", 4)])
    _commit_layers(manager, 4, layers, tag=66.0)
    for p in range(4, 12):
        again = [seen(*out, p) for out in drive(manager, [("a", p)])]
        assert again == [seen(*out, p) for out in drive(clean, [("a", p)])]
    assert same_bytes(bytes_of(manager), bytes_of(clean))
    manager.check_integrity()


def test_a_state_taken_after_an_abort_loads_and_goes_on() -> None:
    manager, other = _at_frame_4(), _at_frame_4()
    begin(manager, [("a", 4)])
    _commit_layers(manager, 4, 2, tag=66.0)
    state = manager.get_state("a")
    other.load_state("a", state)
    assert same_bytes(other.get_state("a"), state)
    for p in range(4, 12):
        left, right = drive(manager, [("a", p)]), drive(other, [("a", p)])
        assert [seen(*out, p) for out in left] == [seen(*out, p) for out in right]
    assert same_bytes(manager.get_state("a"), other.get_state("a"))


def test_a_commit_that_a_layer_missed_raises_and_moves_no_clock() -> None:
    manager = _at_frame_4()
    begin(manager, [("a", 4)])
    _commit_layers(manager, 4, 2)
    with pytest.raises(RuntimeError):
        finish(manager, [("a", 4)])
    assert manager.get_state("a")["clock"] == 3
    drive(manager, [("a", 4)])
    assert manager.get_state("a")["clock"] == 4


def test_a_commit_counts_passes_since_its_own_plan() -> None:
    """A committing pass of an aborted attempt must not stand in for one of this attempt."""
    manager = _at_frame_4()
    begin(manager, [("a", 4)])
    _commit_layers(manager, 4, 3)
    begin(manager, [("a", 4)])
    with pytest.raises(RuntimeError):
        finish(manager, [("a", 4)])


def test_a_plan_is_spent_by_its_commit() -> None:
    manager = _at_frame_4()
    drive(manager, [("a", 4)])
    before = bytes_of(manager)
    with pytest.raises(RuntimeError):
        finish(manager, [("a", 4)])
    with pytest.raises(RuntimeError):
        write_pass(manager, [("a", 4)], commit=True)
    assert manager.get_state("a")["clock"] == 4
    assert same_bytes(bytes_of(manager), before)


@pytest.mark.parametrize("frame_pos", [3, 5, 0])
def test_clocks_that_disagree_with_the_plan_are_refused_before_any_write(frame_pos: int) -> None:
    manager = _at_frame_4()
    begin(manager, [("a", 4)])
    before = bytes_of(manager)
    k, v = tagged(4)
    for call in _calls(manager):
        with pytest.raises((ValueError, RuntimeError)):
            call(k[None], v[None], clocks(frame_pos))
    assert same_bytes(bytes_of(manager), before)


@pytest.mark.parametrize(
    "frame_pos",
    [torch.tensor([4.0]), torch.tensor([4], dtype=torch.int32), torch.tensor(4), torch.tensor([[4]]), clocks(4, 4)],
    ids=["float", "int32", "scalar", "matrix", "two"],
)
def test_clocks_are_int64_with_one_entry_per_row(frame_pos: torch.Tensor) -> None:
    manager = _at_frame_4()
    begin(manager, [("a", 4)])
    before = bytes_of(manager)
    k, v = tagged(4)
    for call in _calls(manager):
        with pytest.raises(ValueError):
            call(k[None], v[None], frame_pos)
    assert same_bytes(bytes_of(manager), before)


def _calls(manager: RingKVManager) -> list[Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]]:
    """Both ways to write a committing pass of layer 0."""
    return [
        lambda k, v, frame_pos: manager.upsert(k, v, 0, frame_pos, commit=True),
        lambda k, v, frame_pos: manager.attend(k, k, v, 0, frame_pos, commit=True),
    ]


def test_a_layer_that_does_not_exist_is_refused() -> None:
    manager = _at_frame_4()
    begin(manager, [("a", 4)])
    k, v = tagged(4)
    for layer in (3, -1):
        with pytest.raises(ValueError):
            manager.upsert(k[None], v[None], layer, clocks(4), commit=False)
