"""Sessions at different clocks in one step, padding rows, and rows that are not sessions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringkv import FrameStep, RingKVManager, StepContext
from tests.ring_tools import (
    PAD_TAG,
    READ_PATHS,
    batch,
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
    session_bytes_of,
    slot_tags,
    stacked,
    step_of,
    tagged,
    write_pass,
    write_tagged,
)


def _two_sessions(dilation: int, first: int, second: int) -> Any:
    cache = build_layer(3, dilation, sessions=2)
    for session, frames in ((0, first), (1, second)):
        for p in range(frames):
            write_tagged(cache, p, commit=True, session=session)
    return cache


def test_a_wrapped_row_and_a_filling_row_each_follow_their_own_clock() -> None:
    """One row's write cursor was used as everybody's length."""
    cache = _two_sessions(1, 7, 1)
    k, v, visible = cache.upsert(stacked([tagged(7), tagged(1)]), clocks(7, 1), True, clocks(0, 1))
    assert [seen(k, v, visible[0], 7), seen(k, v, visible[1], 1)] == [[5, 6], [0]]
    assert slot_tags(cache, 0)[:3] == [7, 8, 6]
    assert slot_tags(cache, 1)[:3] == [1, 2, 0]
    assert not visible[0, 8:].any()
    assert not visible[1, :8].any()


def test_a_row_off_the_stride_and_a_row_on_it_share_a_step() -> None:
    cache = _two_sessions(2, 7, 2)
    history = cache.kv[:, :, :, :6].clone()
    k, v, visible = cache.upsert(stacked([tagged(7), tagged(2)]), clocks(7, 2), True, clocks(0, 1))
    assert [seen(k, v, visible[0], 7), seen(k, v, visible[1], 2)] == [[2, 4, 6], [0]]
    assert torch.equal(cache.kv[:, :, :, :6], history)
    assert slot_tags(cache, 1) == [1, 3, 0, 3]
    assert not visible[0, 8:].any()
    assert not visible[1, :8].any()


def _at_frame_4(path: str = "canonical", padding: bool = True) -> RingKVManager:
    manager = build_manager([ring(3), ring(2, 2)], num_sessions=2, padding_session=padding, attention=path)
    for rid in ("a", "b"):
        run_stream(manager, rid, range(4))
    return manager


def _attend_all(manager: RingKVManager, rows: list[tuple[str, int]], pads: int) -> list[torch.Tensor]:
    k, v, frame_pos = batch(rows, lambda row, frame: tagged(frame, tag=100.0 + row), pads)
    q = torch.linspace(-1, 1, k.numel()).reshape(k.shape)
    q[: len(rows)] = torch.linspace(-1, 1, 4).reshape(1, 1, 2, 2)
    out = []
    begin(manager, rows, pads)
    for commit in (False, True):
        for layer in range(2):
            out.append(manager.attend(q, k, v, layer, frame_pos, commit=commit)[: len(rows)])
    finish(manager, rows, pads)
    return out


@pytest.mark.parametrize("path", READ_PATHS)
@pytest.mark.parametrize("rids", [("a", "b"), ("a",), ("b",)], ids="+".join)
@pytest.mark.parametrize("pads", [1, 2])
def test_padding_rows_change_nothing_for_real_ones(path: str, rids: tuple[str, ...], pads: int) -> None:
    """Padded tokens were stored like real ones; a -1 marker addressed the last session and overwrote it."""
    rows = [(rid, 4) for rid in rids]
    plain, padded = _at_frame_4(path), _at_frame_4(path)
    idle = [session_bytes_of(padded, i) for i in (0, 1) if ("a", "b")[i] not in rids]
    expected, out = _attend_all(plain, rows, 0), _attend_all(padded, rows, pads)
    if path == "canonical":
        assert same_bytes(out, expected)
    for got, want in zip(out, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)  # values are of the order of 100
    for session in (0, 1):
        assert same_bytes(session_bytes_of(padded, session), session_bytes_of(plain, session))
    assert same_bytes(idle, [session_bytes_of(padded, i) for i in (0, 1) if ("a", "b")[i] not in rids])
    for layer in padded.layers:
        high = layer.session_span(1)[1]
        assert PAD_TAG not in layer.kv[:, :, :, :high]
        assert PAD_TAG in layer.kv[:, :, :, high:]
    padded.check_integrity()


def test_padding_rows_come_last_at_clock_0_in_one_session_outside_the_pool() -> None:
    manager = _at_frame_4()
    step, ctx = step_of([("b", 4), ("a", 4)], pads=2)
    assert manager.admit(step, ctx).ok
    plan = manager.plan(step, ctx)
    assert plan.clocks == (4, 4, 0, 0)
    assert plan.request_ids == ("b", "a", "pad-0", "pad-1")
    assert plan.session_indices == (1, 0, 2, 2)
    assert manager.num_sessions == 2


def test_a_step_of_padding_rows_works_while_the_pool_is_full() -> None:
    manager = build_manager([ring(3)], num_sessions=3, padding_session=True)
    rows = [("a", 0), ("b", 0), ("c", 0)]
    for rid, _ in rows:
        manager.ingest_request(rid)
    k, v, visible = drive(manager, rows, pads=1)[0]
    assert manager.num_free_sessions == 0
    assert visible.shape == (4, 4 * 8)
    assert [seen(k, v, visible[row], 0) for row in range(3)] == [[], [], []]


def test_padding_without_a_padding_session_raises_and_changes_nothing() -> None:
    manager = _at_frame_4(padding=False)
    before = bytes_of(manager)
    step, ctx = step_of([("a", 4)], pads=1)
    manager.admit(step, ctx)
    with pytest.raises(ValueError, match="padding_session"):
        manager.plan(step, ctx)
    assert same_bytes(bytes_of(manager), before)
    drive(manager, [("a", 4)])


@pytest.mark.parametrize(
    "padded",
    [("pad", "a"), ("b", "a"), ("a", "a"), ()],
    ids=["pad first", "others first", "a row twice", "fewer than the real rows"],
)
def test_padded_ids_that_are_not_the_real_rows_and_then_dummies_are_refused(padded: tuple[str, ...]) -> None:
    manager = _at_frame_4()
    before = bytes_of(manager)
    step, _ = step_of([("a", 4)])
    ctx = StepContext(request_ids=("a",), padded_request_ids=padded)
    assert manager.admit(*step_of([("a", 4)])).ok
    with pytest.raises((ValueError, RuntimeError)):
        manager.plan(step, ctx)
    assert same_bytes(bytes_of(manager), before)


def test_a_padding_row_that_bears_the_name_of_a_real_request_stays_off_its_session() -> None:
    manager = _at_frame_4()
    before = session_bytes_of(manager, 1)
    assert manager.admit(*step_of([("a", 4)])).ok
    plan = manager.plan(step_of([("a", 4)])[0], StepContext(request_ids=("a",), padded_request_ids=("a", "b")))
    assert plan.session_indices == (0, 2)
    k, v, frame_pos = batch([("a", 4)], lambda _, frame: tagged(frame), pads=1)
    for layer in range(2):
        manager.upsert(k, v, layer, frame_pos, commit=True)
    assert same_bytes(session_bytes_of(manager, 1), before)


def test_padding_ids_need_not_be_registered_and_hold_nothing() -> None:
    manager = _at_frame_4()
    drive(manager, [("a", 4)], pads=3)
    assert manager.session_of("pad-0") is None
    assert manager.num_free_sessions == 0
    with pytest.raises(ValueError):
        manager.get_state("pad-0")


@pytest.mark.parametrize("sessions", [(0, -1), (0, 0), (0, 2), (1, 7)], ids=str)
def test_session_indices_of_a_layer_are_in_range_and_distinct(sessions: tuple[int, int]) -> None:
    """-1 means "the last session" to an indexed assignment, and duplicates race in a scatter."""
    cache = build_layer(3, sessions=2)
    for session in (0, 1):
        write_tagged(cache, 0, commit=True, session=session)
    kv, written = cache.kv.clone(), cache.written.clone()
    for commit in (False, True):
        with pytest.raises(ValueError):
            cache.upsert(stacked([tagged(1), tagged(1)]), clocks(1, 1), commit, clocks(*sessions))
    assert torch.equal(cache.kv, kv)
    assert torch.equal(cache.written, written)


def test_a_batch_larger_than_the_pool_is_refused() -> None:
    cache = build_layer(3, sessions=2)
    with pytest.raises(ValueError):
        cache.upsert(stacked([tagged(0)] * 3), clocks(0, 0, 0), True, clocks(0, 1, 2))
    assert not cache.kv.any()


def test_batches_of_any_size_and_order_equal_each_session_alone() -> None:
    """A static cache worked only for the batch size that it was built for; a row was taken for a session."""
    cache = build_layer(3, sessions=3)
    alone = [build_layer(3) for _ in range(3)]
    clock = [0, 0, 0]
    for sessions in [(0,), (2, 0, 1), (1, 2), (2,), (1, 0), (0, 2), (2, 1, 0), (1,), (0,)] * 2:
        rows = [tagged(clock[s], tag=clock[s] + 1 + 50.0 * s) for s in sessions]
        idle = [cache.kv[:, :, :, 8 * s : 8 * s + 8].clone() for s in range(3) if s not in sessions]
        k, v, visible = cache.upsert(stacked(rows), clocks(*(clock[s] for s in sessions)), True, clocks(*sessions))
        visible = visible.reshape(len(sessions), -1)
        for row, session in enumerate(sessions):
            k1, v1, visible1 = alone[session].upsert(stacked([rows[row]]), clocks(clock[session]), True, clocks(0))
            assert torch.equal(k[:, :, visible[row]], k1[:, :, visible1])
            assert torch.equal(v[:, :, visible[row]], v1[:, :, visible1])
            assert torch.equal(cache.kv[:, :, :, 8 * session : 8 * session + 8], alone[session].kv)
            clock[session] += 1
        assert same_bytes(idle, [cache.kv[:, :, :, 8 * s : 8 * s + 8] for s in range(3) if s not in sessions])
    assert len(set(clock)) > 1  # they ended at different clocks


def test_staged_indices_do_not_follow_the_callers_list() -> None:
    """Host memory was refilled for the next step while the previous one still read it."""
    manager = _at_frame_4()
    frames, rids = [("a", 4), ("b", 4)], ["a", "b"]
    step, ctx = FrameStep(frames=frames), StepContext(request_ids=rids)
    assert manager.admit(step, ctx).ok
    plan = manager.plan(step, ctx)
    frames.reverse()
    rids.reverse()
    assert plan.request_ids == ("a", "b")
    k, v, frame_pos = batch([("a", 4), ("b", 4)], lambda row, frame: tagged(frame, tag=60.0 + row))
    for layer in range(2):
        manager.upsert(k, v, layer, frame_pos, commit=True)
    assert [slot_tags(manager.layers[0], session)[1] for session in (0, 1)] == [60, 61]


def test_an_earlier_plan_does_not_outlive_a_later_one() -> None:
    manager = _at_frame_4()
    begin(manager, [("a", 4)])
    begin(manager, [("b", 4)])
    with pytest.raises((RuntimeError, ValueError)):
        finish(manager, [("a", 4)])
    write_pass(manager, [("b", 4)], commit=True)
    finish(manager, [("b", 4)])
    assert manager.get_state("a")["clock"] == 3
    assert manager.get_state("b")["clock"] == 4


def test_warm_up_leaves_no_trace_and_a_trace_is_found() -> None:
    """Dummy capture batches left bad data in a shared block."""
    fresh = build_manager([ring(3), ring(2, 2)], num_sessions=3, padding_session=True)
    warmed = build_manager([ring(3), ring(2, 2)], num_sessions=3, padding_session=True)
    warmed.build_accelerator_graph_buffers(1, 4, 8)
    rows = [("w0", 0), ("w1", 0)]
    for rid, _ in rows:
        warmed.ingest_request(rid)
    drive(warmed, rows, pads=2)
    for rid, _ in rows:
        warmed.remove_request(rid)
    warmed.post_warmup_validate()
    for session in range(3):
        assert same_bytes(session_bytes_of(warmed, session), session_bytes_of(fresh, session))
    assert warmed.num_free_sessions == 3
    warmed.layers[1].written[warmed.layers[1].session_span(1)[0]] = True
    with pytest.raises(RuntimeError):
        warmed.post_warmup_validate()


@pytest.mark.parametrize("harm", ["flag", "no scratch flag", "bytes"])
def test_integrity_check_finds_what_does_not_belong(harm: str) -> None:
    manager = _at_frame_4()
    manager.check_integrity()
    manager.reset_request("a")
    manager.check_integrity()
    layer = manager.layers[0]
    if harm == "flag":
        layer.written[0] = True  # a session nobody holds
    elif harm == "no scratch flag":
        layer.written[layer.session_span(1)[1] - 1] = False
    else:
        layer.kv[0, 0, 0, 1, 0] = 3.0  # a session nobody holds
    with pytest.raises(RuntimeError):
        manager.check_integrity()
