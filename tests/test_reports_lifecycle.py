"""A request's life: reuse of sessions, resets, refusals, and what must be left untouched by each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ringkv import FrameStep, RingKVManager, StepContext
from tests.ring_tools import (
    READ_PATHS,
    accepts,
    begin,
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
    step_of,
    tagged,
    write_pass,
)


@pytest.mark.parametrize("path", READ_PATHS)
@pytest.mark.parametrize("how", ["remove", "reset"])
def test_a_new_request_sees_nothing_of_the_one_before_it(path: str, how: str) -> None:
    """A buffer handed to the next request still held the former one's keys and values."""
    manager = build_manager([ring(3)], attention=path)
    manager.ingest_request("a")
    thousand = torch.full((1, 2, 2), 1000.0)
    for p in range(7):
        drive(manager, [("a", p)], payload=lambda row, frame: (thousand, thousand))
    assert 1000.0 in manager.layers[0].kv
    if how == "remove":
        manager.remove_request("a")
        manager.ingest_request("b")
        rid = "b"
    else:
        manager.reset_request("a")
        rid = "a"
    one = torch.ones(1, 1, 2, 2)
    begin(manager, [(rid, 0)])
    out = manager.attend(one, one, one, 0, clocks(0), commit=True)
    assert torch.equal(out, one)
    assert int(manager.upsert(one, one, 0, clocks(0), commit=True)[2].sum()) == 2
    finish(manager, [(rid, 0)])
    state = manager.get_state(rid)
    assert all(1000.0 not in kv for kv, _ in state["layers"])
    assert 1000.0 not in manager.layers[0].kv


def test_a_reset_puts_contents_flags_clock_and_claim_back_together() -> None:
    """A reset zeroed contents but kept the length, or zeroed a region still flagged valid."""
    manager = build_manager([ring(3), ring(2, 2)], num_sessions=2)
    run_stream(manager, "a", range(6))
    run_stream(manager, "b", range(5))
    assert manager.num_free_sessions == 0
    session_b = manager.session_of("b")
    assert session_b is not None
    other = session_bytes_of(manager, session_b)

    manager.reset_request("a")
    assert manager.session_of("a") is None
    assert manager.num_free_sessions == 1
    assert not accepts(manager, "a", 6)
    assert manager.num_free_sessions == 1  # a refusal claims nothing
    assert accepts(manager, "a", 0)
    assert manager.num_free_sessions == 0
    fresh = build_manager([ring(3), ring(2, 2)], num_sessions=2)
    fresh.ingest_request("a")
    assert accepts(fresh, "a", 0)
    assert same_bytes(manager.get_state("a"), fresh.get_state("a"))
    assert manager.get_state("a")["clock"] is None

    assert [history[0] for history in run_stream(manager, "a", range(4))] == [[], [0], [0, 1], [1, 2]]
    assert same_bytes(session_bytes_of(manager, session_b), other)
    assert accepts(manager, "b", 5)
    manager.check_integrity()


def test_resets_of_requests_that_hold_nothing() -> None:
    manager = build_manager([ring(3)])
    manager.ingest_request("a")
    manager.reset_request("a")
    manager.reset_request("a", free=True)
    assert manager.num_free_sessions == 1
    run_stream(manager, "a", range(1))
    manager.ingest_request("a")  # registered: a no-op
    assert accepts(manager, "a", 1)


def test_overrides_of_one_request_are_refused_by_name() -> None:
    manager = build_manager([ring(3)])
    with pytest.raises(ValueError, match="ring_frames"):
        manager.ingest_request("a", overrides={"ring_frames": 4})
    assert not accepts(manager, "a", 0)
    manager.ingest_request("a", overrides={})
    with pytest.raises(ValueError, match="ring_frames"):
        manager.ingest_request("a", overrides={"ring_frames": 4})
    assert accepts(manager, "a", 0)


class ModelFailed(Exception):
    """What the model raises between plan and commit."""


def _cancel_after_ingest(manager: RingKVManager) -> None:
    manager.ingest_request("a")


def _cancel_after_admit(manager: RingKVManager) -> None:
    manager.ingest_request("a")
    assert accepts(manager, "a", 0)


def _cancel_between_plan_and_commit(manager: RingKVManager) -> None:
    manager.ingest_request("a")
    begin(manager, [("a", 0)])
    write_pass(manager, [("a", 0)], commit=True)


def _cancel_after_two_frames(manager: RingKVManager) -> None:
    run_stream(manager, "a", range(2))


def _cancel_when_the_model_raises(manager: RingKVManager) -> None:
    manager.ingest_request("a")
    begin(manager, [("a", 0)])
    try:
        k, v = tagged(0)
        manager.upsert(k[None], v[None], 0, clocks(0), commit=True)
        raise ModelFailed
    except ModelFailed:
        pass


@pytest.mark.parametrize(
    "life",
    [
        _cancel_after_ingest,
        _cancel_after_admit,
        _cancel_between_plan_and_commit,
        _cancel_after_two_frames,
        _cancel_when_the_model_raises,
    ],
    ids=lambda life: life.__name__.strip("_"),
)
def test_no_way_to_end_a_request_leaks_a_session_or_frees_one_twice(life: Callable[[RingKVManager], None]) -> None:
    manager = build_manager([ring(3), ring(2, 2)], num_sessions=3, padding_session=True)
    for _ in range(20):
        life(manager)
        manager.remove_request("a")
        assert manager.num_free_sessions == 3
        manager.remove_request("a")  # twice
        manager.remove_request("nobody")
        assert manager.num_free_sessions == 3
        assert manager.session_of("a") is None
        manager.check_integrity()
    rows = [("b", 0), ("c", 0), ("d", 0)]
    for rid, _ in rows:
        manager.ingest_request(rid)
    begin(manager, rows)
    assert sorted(manager.session_of(rid) or 0 for rid, _ in rows) == [0, 1, 2]
    assert not any(layer.kv.any() for layer in manager.layers)


def test_a_hundred_short_lives_leave_the_pool_as_it_was() -> None:
    manager = build_manager([ring(3)], num_sessions=3)
    for i in range(100):
        run_stream(manager, f"r{i}", range(2))
        manager.remove_request(f"r{i}")
        assert manager.num_free_sessions == 3
    fresh = build_manager([ring(3)], num_sessions=3)
    assert same_bytes(bytes_of(manager), bytes_of(fresh))


def _full_pool() -> RingKVManager:
    manager = build_manager([ring(3)])
    run_stream(manager, "a", range(3))
    for rid in ("b", "c"):
        manager.ingest_request(rid)
    return manager


def _bad_steps() -> dict[str, tuple[Any, Any]]:
    only = StepContext(request_ids=("c",))
    return {
        "first frame 1": (FrameStep((("c", 1),)), only),
        "first frame -1": (FrameStep((("c", -1),)), only),
        "frame None": (FrameStep((("c", None),)), only),  # type: ignore[arg-type]
        "frame 1.5": (FrameStep((("c", 1.5),)), only),  # type: ignore[arg-type]
        "frame 0.0": (FrameStep((("c", 0.0),)), only),  # type: ignore[arg-type]
        "frame False": (FrameStep((("c", False),)), only),
        "rid not in the context": (FrameStep((("c", 0), ("b", 0))), only),
        "row without a clock": (FrameStep((("c", 0),)), StepContext(request_ids=("c", "b"))),
        "duplicate rid": (FrameStep((("c", 0), ("c", 0))), StepContext(request_ids=("c", "c"))),
        "duplicate row": (FrameStep((("c", 0),)), StepContext(request_ids=("c", "c"))),
        "unknown rid": (FrameStep((("nobody", 0),)), StepContext(request_ids=("nobody",))),
        "repeat": (FrameStep((("a", 2),)), StepContext(request_ids=("a",))),
        "skip": (FrameStep((("a", 4),)), StepContext(request_ids=("a",))),
        "not a pair": (FrameStep(("c",)), only),  # type: ignore[arg-type]
        "no frames": (FrameStep(None), only),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("name", _bad_steps())
def test_what_can_never_run_is_refused_for_good_even_while_the_pool_is_full(name: str) -> None:
    """A request that could never fit was retried for ever at the head of the queue."""
    manager = _full_pool()
    before = bytes_of(manager)
    step, ctx = _bad_steps()[name]
    outcome = manager.admit(step, ctx)
    assert (outcome.ok, outcome.retryable) == (False, False)
    assert outcome.reason
    assert "\n" not in outcome.reason
    assert manager.get_state("a")["clock"] == 2
    assert accepts(manager, "a", 3)
    assert manager.num_free_sessions == 0
    assert same_bytes(bytes_of(manager), before)


@pytest.mark.parametrize("name", [name for name in _bad_steps() if name not in ("unknown rid", "repeat", "skip")])
def test_a_malformed_first_step_claims_nothing_of_an_empty_pool(name: str) -> None:
    manager = build_manager([ring(3)], num_sessions=3)
    for rid in ("a", "b", "c"):
        manager.ingest_request(rid)
    step, ctx = _bad_steps()[name]
    outcome = manager.admit(step, ctx)
    assert (outcome.ok, outcome.retryable) == (False, False)
    assert manager.num_free_sessions == 3
    with pytest.raises((RuntimeError, ValueError)):
        manager.plan(step, ctx)


def test_a_full_pool_is_worth_asking_again_and_asking_has_no_side_effect() -> None:
    manager = _full_pool()
    before = bytes_of(manager)
    for _ in range(3):
        outcome = manager.admit(*step_of([("b", 0)]))
        assert (outcome.ok, outcome.retryable, outcome.rid) == (False, True, "b")
        assert outcome.reason
        assert manager.session_of("b") is None
    assert accepts(manager, "a", 3)
    assert same_bytes(bytes_of(manager), before)
    manager.remove_request("a")
    assert accepts(manager, "b", 0)


def test_one_bad_row_does_not_half_apply_a_step() -> None:
    """A step answered "rejected" had already applied its good rows."""
    manager = build_manager([ring(3)], num_sessions=2)
    for rid in ("a", "b"):
        run_stream(manager, rid, range(3))
    before = bytes_of(manager)
    bad = step_of([("a", 3), ("b", 5)])
    outcome = manager.admit(*bad)
    assert (outcome.ok, outcome.retryable, outcome.rid) == (False, False, "b")
    with pytest.raises(RuntimeError):
        manager.plan(*bad)
    with pytest.raises(RuntimeError):
        manager.plan(*step_of([("a", 3)]))  # the good row was not admitted either
    assert same_bytes(bytes_of(manager), before)
    out = drive(manager, [("a", 3), ("b", 3)])
    k, v, visible = out[0]
    assert [seen(k, v, row, 3) for row in visible] == [[1, 2], [1, 2]]


def test_two_newcomers_for_one_session_are_both_told_to_retry() -> None:
    manager = build_manager([ring(3)])
    for rid in ("a", "b"):
        manager.ingest_request(rid)
    outcome = manager.admit(*step_of([("a", 0), ("b", 0)]))
    assert (outcome.ok, outcome.retryable) == (False, True)
    assert manager.num_free_sessions == 1
    assert manager.session_of("a") is manager.session_of("b") is None
    assert accepts(manager, "b", 0)
    assert manager.num_free_sessions == 0


@pytest.mark.parametrize("rows", [[("a", 3), ("a", 3)], [("a", 3), ("a", 4)]], ids=["same clock", "two clocks"])
def test_one_request_cannot_be_two_rows_of_a_step(rows: list[tuple[str, int]]) -> None:
    """Duplicate targets of a scatter are not deterministic on a GPU."""
    manager = build_manager([ring(3)], num_sessions=2)
    run_stream(manager, "a", range(3))
    before = bytes_of(manager)
    outcome = manager.admit(*step_of(rows))
    assert (outcome.ok, outcome.retryable, outcome.rid) == (False, False, "a")
    assert accepts(manager, "a", 3)
    with pytest.raises((RuntimeError, ValueError)):
        manager.plan(*step_of(rows))
    assert same_bytes(bytes_of(manager), before)
    drive(manager, [("a", 3)])


def test_requests_without_a_session_have_no_state() -> None:
    manager = build_manager([ring(3)])
    for call in (manager.get_state, manager.reset_request):
        with pytest.raises(ValueError, match="nobody"):
            call("nobody")
    manager.ingest_request("a")
    with pytest.raises(ValueError, match="'a'"):
        manager.get_state("a")
    assert manager.session_of("a") is None
    assert manager.session_of("nobody") is None


def test_cleanup_drops_every_request() -> None:
    manager = build_manager([ring(3)], num_sessions=2)
    run_stream(manager, "a", range(3))
    manager.cleanup()
    assert manager.session_of("a") is None
