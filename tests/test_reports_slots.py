"""Slots and windows: off-by-ones, evictions and geometry mix-ups that other caches had, with the values to expect."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ring_tools import (
    READ_PATHS,
    batch,
    begin,
    build_layer,
    build_manager,
    clocks,
    dense_attention,
    drive,
    finish,
    ring,
    run_stream,
    seen,
    slot_tags,
    stacked,
    tagged,
    write_pass,
    write_tagged,
)


def test_a_ring_that_wraps_drops_the_oldest_frame_and_keeps_the_newest() -> None:
    """A cache was right only when exactly full; another dropped the newest frame instead of the oldest."""
    cache = build_layer(3)
    histories = [seen(*write_tagged(cache, p, commit=True), p) for p in range(7)]
    assert histories == [[], [0], [0, 1], [1, 2], [2, 3], [3, 4], [4, 5]]
    assert [tag - 1 for tag in slot_tags(cache)[:3]] == [6, 4, 5]
    assert all(p - 1 in histories[p] for p in range(1, 7))


@pytest.mark.parametrize("buckets", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 2])
def test_the_visible_token_count_stops_growing_exactly_when_the_ring_is_full(buckets: int, tokens: int) -> None:
    """Mask and cache disagreed on whether the window counts the current item."""
    cache = build_layer(buckets, tokens=tokens)
    counts = []
    for p in range(7):
        _, _, visible = write_tagged(cache, p, commit=True, tokens=tokens)
        counts.append(int(visible.sum()))
    expected = {(3, 2): [2, 4, 6, 6, 6, 6, 6], (3, 1): [1, 2, 3, 3, 3, 3, 3]}
    assert counts == expected.get((buckets, tokens), [tokens * (min(p, buckets - 1) + 1) for p in range(7)])
    if buckets == 1:
        assert counts == [tokens] * 7


@pytest.mark.parametrize("path", READ_PATHS)
@pytest.mark.parametrize("buckets", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 2])
def test_the_output_is_attention_over_the_window_and_not_over_one_frame_more(
    path: str, buckets: int, tokens: int
) -> None:
    manager = build_manager([ring(buckets)], attention=path, tokens_per_frame=tokens, head_dim=4)
    generator = torch.Generator().manual_seed(buckets)
    k, v, q = (torch.randn(7, 1, tokens, 4, generator=generator) for _ in range(3))
    manager.ingest_request("a")

    def dense(first: int, p: int) -> Tensor:
        window = [t[first : p + 1].transpose(0, 1).reshape(1, -1, 4) for t in (k, v)]
        return dense_attention(q[p], *window).float()

    for p in range(7):
        begin(manager, [("a", p)])
        out = manager.attend(q[p : p + 1], k[p : p + 1], v[p : p + 1], 0, clocks(p), commit=True)[0]
        finish(manager, [("a", p)])
        torch.testing.assert_close(out, dense(max(0, p - buckets + 1), p), rtol=0, atol=1e-6)
        if p >= buckets:
            assert (out - dense(p - buckets, p)).abs().max() > 1e-4


@pytest.mark.parametrize("buckets", [1, 2, 3])
def test_the_oldest_frame_stays_in_its_slot_until_the_pass_that_commits(buckets: int) -> None:
    cache = build_layer(buckets)
    for p in range(buckets):
        write_tagged(cache, p, commit=True)
    write_tagged(cache, buckets, commit=False)
    assert slot_tags(cache)[0] - 1 == 0
    write_tagged(cache, buckets, commit=True)
    assert slot_tags(cache)[0] - 1 == buckets


def test_a_frame_off_the_stride_overwrites_nothing_and_so_hides_nothing() -> None:
    """A trim was computed from the allocated size, so each one lost valid history for good."""
    cache = build_layer(3, 2)
    histories = [seen(*write_tagged(cache, p, commit=True), p) for p in range(10)]
    assert histories == [[], [0], [0], [0, 2], [0, 2], [0, 2, 4], [2, 4], [2, 4, 6], [4, 6], [4, 6, 8]]


def test_frames_off_the_stride_never_enter_a_slot() -> None:
    cache = build_layer(3, 2)
    for p in range(10):
        write_tagged(cache, p, commit=True)
        assert all(tag == 0 or (tag - 1) % 2 == 0 for tag in slot_tags(cache)[:3])
        assert slot_tags(cache)[3] - 1 == p


@pytest.mark.parametrize("path", READ_PATHS)
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("frames", [3, 5])
def test_slots_that_hold_nothing_do_not_dilute_attention(path: str, dilation: int, frames: int) -> None:
    """Zero-initialised entries were attended to; all of them visible at frame 0 would give 0.25 for 1.0."""
    manager = build_manager([ring(3, dilation, frames)], attention=path)
    manager.ingest_request("a")
    one = torch.ones(1, 1, 2, 2)
    for p in range(9):
        begin(manager, [("a", p)])
        for commit in (False, True):
            out = manager.attend(torch.zeros(1, 1, 2, 2), one, one, 0, clocks(p), commit=commit)
            torch.testing.assert_close(out, one, rtol=0, atol=1e-6)
        finish(manager, [("a", p)])


@pytest.mark.parametrize("path", READ_PATHS)
def test_the_output_depends_on_nothing_that_left_the_window(path: str) -> None:
    """Writes into a full ring changed the result although the suffix that was kept was the same."""
    generator = torch.Generator().manual_seed(5)
    left = torch.randn(3, 9, 1, 1, 2, 4, generator=generator)  # q, k, v; frame; B, H, T, D
    right = left.clone()
    right[:, :5] = torch.randn(3, 5, 1, 1, 2, 4, generator=generator)
    outputs = []
    for stream in (left, right):
        manager = build_manager([ring(3)], attention=path, head_dim=4)
        manager.ingest_request("a")
        out = []
        for p in range(9):
            begin(manager, [("a", p)])
            out.append(manager.attend(*stream[:, p], 0, clocks(p), commit=True))
            finish(manager, [("a", p)])
        outputs.append(out)
    assert torch.equal(outputs[0][7], outputs[1][7])
    assert torch.equal(outputs[0][8], outputs[1][8])
    assert not torch.equal(outputs[0][6], outputs[1][6])


@pytest.mark.parametrize("length", [8, 3, 1, 0])
def test_input_that_is_not_one_frame_is_refused_before_any_write(length: int) -> None:
    """A prefill longer than the window wrapped inside one call, and early queries saw later keys."""
    cache = build_layer(3)
    for p in range(3):
        write_tagged(cache, p, commit=True)
    kv, written = cache.kv.clone(), cache.written.clone()
    long = torch.full((2, 1, 1, length, 2), 9.0)
    for commit in (False, True):
        with pytest.raises(ValueError):
            cache.upsert(long, clocks(3), commit, clocks(0))
    assert torch.equal(cache.kv, kv)
    assert torch.equal(cache.written, written)
    assert seen(*write_tagged(cache, 3, commit=True), 3) == [1, 2]


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 2, 2), (2, 2, 1, 2, 2), (2, 1, 2, 2, 2), (2, 1, 1, 2, 3), (2, 1, 2, 2)], ids=str
)
def test_input_of_another_geometry_is_refused_before_any_write(shape: tuple[int, ...]) -> None:
    cache = build_layer(3)
    write_tagged(cache, 0, commit=True)
    kv, written = cache.kv.clone(), cache.written.clone()
    with pytest.raises(ValueError):
        cache.upsert(torch.full(shape, 9.0), clocks(1), True, clocks(0))
    assert torch.equal(cache.kv, kv)
    assert torch.equal(cache.written, written)


def test_more_clocks_or_sessions_than_rows_are_refused_before_any_write() -> None:
    cache = build_layer(3, sessions=2)
    kv = stacked([tagged(0)])
    before = cache.kv.clone()
    for frame_pos, sessions in ((clocks(0, 0), clocks(0)), (clocks(0), clocks(0, 1)), (clocks(-1), clocks(0))):
        with pytest.raises(ValueError):
            cache.upsert(kv, frame_pos, True, sessions)
    assert torch.equal(cache.kv, before)


def test_a_conditioning_prefix_goes_in_frame_by_frame() -> None:
    manager = build_manager([ring(3)])
    assert run_stream(manager, "a", range(6))[5] == [[3, 4]]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_every_layer_follows_its_own_geometry_in_either_order_of_calls(order: tuple[int, int]) -> None:
    """One mask was computed once and reused for every layer; one window was checked for all layers."""
    manager = build_manager([ring(2), ring(2, 4)])
    manager.ingest_request("a")
    histories: dict[int, dict[int, list[int]]] = {}
    for p in range(10):
        rows = [("a", p)]
        begin(manager, rows)
        k, v, frame_pos = batch(rows, lambda _, frame: tagged(frame))
        out = {layer: manager.upsert(k, v, layer, frame_pos, commit=True) for layer in order}
        finish(manager, rows)
        histories[p] = {layer: seen(*out[layer], p) for layer in order}
    assert histories[8] == {0: [7], 1: [4]}
    assert histories[9] == {0: [8], 1: [4, 8]}
    assert histories[7] == {0: [6], 1: [0, 4]}


def test_uncompacted_slots_are_never_addressed() -> None:
    cache = build_layer(2, 2, frames=5)
    for p, history in enumerate([[], [0], [0], [0, 2], [2], [2, 4], [4], [4, 6], [6]]):
        assert seen(*write_tagged(cache, p, commit=True), p) == history
        assert slot_tags(cache)[2:5] == [0, 0, 0]


def test_the_seed_names_and_shapes_hold() -> None:
    cache = build_layer(3, sessions=2, heads=2)
    assert cache.kv.shape == (2, 1, 2, 2 * (3 + 1) * 2, 2)
    assert cache.session_span(0) == (0, 8)
    assert cache.session_span(1) == (8, 16)
    assert cache.memory_bytes == cache.kv.numel() * 4
    assert cache.written.dtype == torch.bool
    assert [int(i) for i in cache.written.nonzero()] == [6, 7, 14, 15]  # scratch is always written
    k, v, visible = write_tagged(cache, 0, commit=False, session=1)
    assert k.shape == v.shape == (1, 2, 16, 2)
    assert visible.shape == (16,)
    assert visible.dtype == torch.bool
    assert [int(i) for i in visible.nonzero()] == [14, 15]
    assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() == cache.kv.untyped_storage().data_ptr()
    kv = stacked([tagged(0, heads=2), tagged(0, heads=2)])
    assert cache.upsert(kv, clocks(0, 0), True, clocks(0, 1))[2].shape == (2, 16)
    assert cache.upsert(kv, clocks(0, 0), True, clocks(0, 1), build_visibility=False)[2].numel() == 0

    manager = build_manager([ring(3), ring(2, 4, 6)], num_sessions=2, padding_session=True)
    assert (manager.capacity(0), manager.capacity(1)) == (8, 14)
    assert (manager.total_slots(0), manager.total_slots(1)) == (24, 42)
    assert manager.tokens_per_frame == 2
    assert manager.num_sessions == 2


def test_a_reset_of_one_layer_session_empties_it_and_rearms_its_scratch() -> None:
    cache = build_layer(3, sessions=2)
    for session in (0, 1):
        for p in range(4):
            write_tagged(cache, p, commit=True, session=session)
    other = cache.kv[:, :, :, 8:].clone()
    cache.reset(0)
    assert not cache.kv[:, :, :, :8].any()
    assert [int(i) for i in cache.written[:8].nonzero()] == [6, 7]
    assert torch.equal(cache.kv[:, :, :, 8:], other)
    assert bool(cache.written[8:].all())
    assert seen(*write_tagged(cache, 0, commit=True), 0) == []


def test_a_manager_pass_is_one_upsert_of_each_layer() -> None:
    manager = build_manager([ring(3)])
    manager.ingest_request("a")
    drive(manager, [("a", 0)])
    begin(manager, [("a", 1)])
    ((k, v, visible),) = write_pass(manager, [("a", 1)], commit=False)
    assert k.shape == (1, 1, 8, 2)
    assert seen(k, v, visible, 1) == [0]
    assert k.data_ptr() == manager.layers[0].kv.data_ptr()
