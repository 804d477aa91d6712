"""A request's life under every storage strategy: reuse, resets, refusals, states."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ringkv import FrameStep, StepContext
from tests.ring_tools import ring, same_bytes, step_of
from tests.strategies import (
    EVERY_READ,
    MAX_FRAMES,
    STRATEGIES,
    Rollout,
    accepts,
    build,
    history,
    kv_tensors,
)

every_read = pytest.mark.parametrize(("name", "read"), EVERY_READ)
every_strategy = pytest.mark.parametrize("name", STRATEGIES)


# -- reuse and resets ----------------------------------------------------------------------------------------


@every_read
@pytest.mark.parametrize("how", ["remove", "reset"])
def test_a_new_request_sees_nothing_of_the_one_before_it(name: str, read: str, how: str) -> None:
    """A buffer handed to the next request still held the former one's keys and values."""
    rollout = Rollout(name, [ring(3), ring(2, 2)], head_dim=8, attention=read)
    usual = rollout.content
    rollout.content = lambda *key: tuple(torch.full_like(t, 1000.0) for t in usual(*key))
    rollout.run("a", range(7))
    rid = "b" if how == "remove" else "a"
    (rollout.resource.remove_request if how == "remove" else rollout.resource.reset_request)("a")
    rollout.content = lambda *key: tuple(torch.ones_like(t) for t in usual(*key))
    for outputs in rollout.drive([(rid, 0)]):
        assert all(torch.equal(out, torch.ones_like(out)) for out in outputs)
    assert all(1000.0 not in kv for kv, _ in rollout.resource.get_state(rid)["layers"])
    fresh = Rollout(name, [ring(3), ring(2, 2)], head_dim=8, attention=read)
    fresh.content = rollout.content
    fresh.run(rid, range(1))
    assert same_bytes(rollout.run(rid, range(1, 9)), fresh.run(rid, range(1, 9)))


@every_strategy
def test_a_reset_puts_contents_clock_and_claim_back_together(name: str) -> None:
    """A reset zeroed contents but kept the length, or zeroed a region that was still valid."""
    rollout = Rollout(name, [ring(3), ring(2, 2)], marked=True, sessions=2)
    resource = rollout.resource
    empty = resource.memory_report()
    rollout.run("a", range(6))
    rollout.run("b", range(5))
    assert resource.num_free_sessions == 0
    other = resource.get_state("b")

    resource.reset_request("a")
    assert (resource.session_of("a"), resource.num_free_sessions) == (None, 1)
    assert not accepts(resource, "a", 6)
    assert resource.num_free_sessions == 1  # a refusal claims nothing
    assert accepts(resource, "a", 0)
    assert resource.num_free_sessions == 0
    fresh = build(name, [ring(3), ring(2, 2)], sessions=2)
    fresh.ingest_request("a")
    assert accepts(fresh, "a", 0)
    assert same_bytes(resource.get_state("a"), fresh.get_state("a"))
    assert resource.get_state("a")["clock"] is None

    assert rollout.histories("a", range(4)) == [history(name, ring(3), p) for p in range(4)]
    assert same_bytes(resource.get_state("b"), other)
    assert rollout.histories("b", [5]) == [history(name, ring(3), 5)]
    resource.check_integrity()
    for rid in "ab":
        resource.remove_request(rid)
    resource.post_warmup_validate()
    report = resource.memory_report()
    assert (report["resident"], report["in_use"]) == (empty["resident"], 0)


class ModelFailed(Exception):
    """What the model raises between plan and commit."""


def _after_ingest(rollout: Rollout) -> None:
    rollout.resource.ingest_request("a")


def _after_two_frames(rollout: Rollout) -> None:
    rollout.run("a", range(2))


def _between_plan_and_commit(rollout: Rollout) -> None:
    rollout.begin([("a", 0)])
    rollout.layer_pass([("a", 0)], 0, commit=True)


def _when_the_model_raises(rollout: Rollout) -> None:
    def broken(*_: object) -> Any:
        raise ModelFailed

    usual, rollout.content = rollout.content, broken
    with pytest.raises(ModelFailed):
        rollout.drive([("a", 0)])
    rollout.content = usual


@every_strategy
@pytest.mark.parametrize("cancel", [_after_ingest, _after_two_frames, _between_plan_and_commit, _when_the_model_raises])
def test_sessions_neither_leak_nor_come_free_twice(name: str, cancel: Callable[[Rollout], None]) -> None:
    """Cancelling at an awkward moment kept the blocks for ever, until nothing could be admitted."""
    rollout = Rollout(name, [ring(3)], sessions=3, padding=True, head_dim=8)
    resource = rollout.resource
    resident = resource.memory_bytes()
    for _ in range(20):
        cancel(rollout)
        resource.remove_request("a")
        resource.remove_request("a")
        resource.remove_request("nobody")
        assert resource.num_free_sessions == 3
    resource.post_warmup_validate()
    assert resource.memory_bytes() == resident
    for rid in "xyz":
        rollout.run(rid, range(1))
    assert sorted(resource.session_of(rid) for rid in "xyz") == [0, 1, 2]  # type: ignore[type-var]


@every_strategy
def test_retry_and_never_are_told_apart(name: str) -> None:
    """A request that could never fit was retried for ever at the head of the queue."""
    rollout = Rollout(name, [ring(3)], head_dim=8)
    resource = rollout.resource
    rollout.run("a", range(3))
    for rid in "bc":
        resource.ingest_request(rid)
    state = resource.get_state("a")
    for _ in range(3):
        outcome = resource.admit(*step_of([("b", 0)]))
        assert (outcome.ok, outcome.retryable, outcome.rid) == (False, True, "b")
    alone = StepContext(request_ids=("c",))
    never: list[tuple[FrameStep, StepContext]] = [
        *(step_of([("c", frame)]) for frame in (1, -1, None, 1.5)),  # type: ignore[list-item]
        (FrameStep(frames=(("c", 0), ("b", 0))), alone),
        *(step_of([("a", frame)]) for frame in (2, 4)),
        step_of([("a", 3), ("a", 3)]),
        step_of([("a", 3), ("a", 4)]),
        step_of([("nobody", 0)]),
    ]
    for step, ctx in never:
        outcome = resource.admit(step, ctx)
        assert (outcome.ok, outcome.retryable) == (False, False), step
        assert outcome.reason
        with pytest.raises(RuntimeError):
            resource.plan(step, ctx)
    assert same_bytes(resource.get_state("a"), state)
    assert accepts(resource, "a", 3)
    resource.remove_request("a")
    assert accepts(resource, "b", 0)


@every_strategy
def test_one_bad_row_leaves_no_trace_of_the_good_ones(name: str) -> None:
    """A batch answered "rejected" had already applied its good rows."""
    rollout = Rollout(name, [ring(3)], sessions=2, head_dim=8)
    resource = rollout.resource
    for rid in "ab":
        rollout.run(rid, range(3))
    states = [resource.get_state(rid) for rid in "ab"]
    held = [t.clone() for t in kv_tensors(resource)]
    assert not resource.admit(*step_of([("a", 3), ("b", 5)])).ok
    assert same_bytes(states, [resource.get_state(rid) for rid in "ab"])
    assert same_bytes(held, kv_tensors(resource))
    rollout.drive([("a", 3), ("b", 3)])
    resource.remove_request("b")
    for rid in "xy":
        resource.ingest_request(rid)
    outcome = resource.admit(*step_of([("x", 0), ("y", 0)]))
    assert (outcome.ok, outcome.retryable, resource.num_free_sessions) == (False, True, 1)
    resource.check_integrity()


@pytest.mark.parametrize("name", ["full_static", "full_static_windowed"])
def test_a_frame_beyond_a_preallocated_buffer_is_refused_for_good(name: str) -> None:
    rollout = Rollout(name, [ring(3)], head_dim=8)
    rollout.run("a", range(MAX_FRAMES), noisy=0)
    outcome = rollout.resource.admit(*step_of([("a", MAX_FRAMES)]))
    assert (outcome.ok, outcome.retryable, outcome.rid) == (False, False, "a")
    assert f"max_frames={MAX_FRAMES}" in outcome.reason
    longer = {**rollout.resource.get_state("a"), "clock": MAX_FRAMES}
    with pytest.raises(ValueError, match=f"clock={MAX_FRAMES}.*max_frames={MAX_FRAMES}"):
        rollout.resource.load_state("a", longer)
    rollout.resource.reset_request("a")
    rollout.run("a", range(1))


# -- states --------------------------------------------------------------------------------------------------


@every_read
def test_a_restored_session_goes_on_as_if_nothing_had_happened(name: str, read: str, tmp_path: Path) -> None:
    """Restoring put K and V back but lost the clock, or packed the slots in another order; here in another session."""
    windows = [ring(3), ring(2, 3)]
    for end, through in ((1, "memory"), (7, "file"), (10, "memory")):
        source = Rollout(name, windows, head_dim=8, attention=read)
        source.run("a", range(end))
        target = Rollout(name, windows, head_dim=8, sessions=4, padding=True, attention=read)
        for rid in "xyz":
            target.run(rid, range(2))
        target.resource.remove_request("y")  # so "a" lands in session 1
        target.resource.ingest_request("a")
        others = [target.resource.get_state(rid) for rid in "xz"]
        if through == "memory":
            target.resource.load_state("a", source.resource.get_state("a"))
        else:
            source.resource.save("a", tmp_path / "state.safetensors")
            target.resource.load("a", tmp_path / "state.safetensors")
        assert same_bytes(target.resource.get_state("a"), source.resource.get_state("a"))
        assert target.resource.session_of("a") == 1
        for frame in (0, end - 1, end + 1):
            assert not accepts(target.resource, "a", frame)
        for frame in range(end, end + 7):
            assert same_bytes(target.drive([("a", frame)]), source.drive([("a", frame)]))
        assert same_bytes(others, [target.resource.get_state(rid) for rid in "xz"])
        target.resource.check_integrity()


@every_strategy
def test_a_state_is_a_copy_and_loading_does_not_change_it(name: str) -> None:
    """A snapshot held references that later steps changed."""
    rollout = Rollout(name, [ring(3), ring(2, 2)], sessions=3, head_dim=8)
    rollout.run("a", range(5))
    state = rollout.resource.get_state("a")
    before = copy.deepcopy(state)
    rollout.run("a", range(5, 10))
    assert same_bytes(state, before)
    for rid in "bc":
        rollout.resource.ingest_request(rid)
        rollout.resource.load_state(rid, state)
    rollout.run("b", range(5, 7))
    assert same_bytes(state, before)
    assert same_bytes(rollout.resource.get_state("c"), state)


@every_strategy
def test_a_load_drops_what_was_there_and_voids_the_plan(name: str) -> None:
    rollout = Rollout(name, [ring(3), ring(2, 2)], marked=True)
    rollout.run("a", range(5))
    state = rollout.resource.get_state("a")
    rollout.run("a", range(5, 9))
    rollout.begin([("a", 9)])
    rollout.full_pass([("a", 9)], commit=True)
    rollout.resource.load_state("a", state)
    for call in (lambda: rollout.full_pass([("a", 9)]), lambda: rollout.finish([("a", 9)])):
        with pytest.raises(RuntimeError, match="loaded"):
            call()
    assert same_bytes(rollout.resource.get_state("a"), state)
    assert rollout.histories("a", [5, 6, 7]) == [history(name, ring(3), p) for p in (5, 6, 7)]


@every_strategy
def test_a_load_in_the_middle_of_a_frame_replaces_what_was_gathered_for_it(name: str) -> None:
    windows = [ring(3), ring(2, 3)]
    source = Rollout(name, windows, head_dim=8)
    source.run("other", range(9))
    twins = [Rollout(name, windows, head_dim=8) for _ in range(2)]
    twins[0].run("a", range(9))
    twins[0].begin([("a", 9)])
    twins[0].full_pass([("a", 9)])
    twins[1].resource.ingest_request("a")
    for rollout in twins:
        rollout.resource.load_state("a", source.resource.get_state("other"))
    assert same_bytes(*(rollout.drive([("a", 9)]) for rollout in twins))


def _spoilt(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The state with one fault each."""
    kv, written = state["layers"][0]
    rest = state["layers"][1:]
    return {
        "version": {**state, "version": 99},
        "dtype": {**state, "dtype": "float16"},
        "strategy": {**state, "geometry": {**state["geometry"], "strategy": "other"}},
        "clock": {**state, "clock": -1},
        "flags at another clock": {**state, "clock": 0},
        "nothing committed": {**state, "clock": None},
        "scratch": {**state, "layers": [(kv, written & (torch.arange(len(written)) < len(written) - 2)), *rest]},
        "shape": {**state, "layers": [(kv[..., :-1], written), *rest]},
        "kv dtype": {**state, "layers": [(kv.double(), written), *rest]},
        "flag dtype": {**state, "layers": [(kv, written.int()), *rest]},
    }


@every_strategy
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(name: str) -> None:
    rollout = Rollout(name, [ring(3), ring(2, 2)], head_dim=8, sessions=2)
    rollout.run("a", range(6))
    rollout.run("b", range(3))
    state, kept = rollout.resource.get_state("a"), rollout.resource.get_state("b")
    for fault, spoilt in _spoilt(state).items():
        with pytest.raises(ValueError) as refusal:
            rollout.resource.load_state("b", spoilt)
        assert "\n" not in str(refusal.value), fault
        assert same_bytes(rollout.resource.get_state("b"), kept), fault
    with pytest.raises(ValueError, match="not registered"):
        rollout.resource.load_state("nobody", state)
    rollout.resource.ingest_request("c")
    with pytest.raises(RuntimeError, match="pool is full"):
        rollout.resource.load_state("c", state)
    with pytest.raises(ValueError, match="holds no session"):
        rollout.resource.get_state("c")
    rollout.drive([("b", 3)])
