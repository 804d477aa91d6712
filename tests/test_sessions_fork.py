"""Forks: copies that go on bit for bit as the original does, all or none of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ringkv import AttentionResource
from tests.ring_tools import ring, same_bytes
from tests.strategies import EVERY_READ, STRATEGIES, Rollout, accepts, held_kv_bytes, kv_tensors

WINDOWS = (ring(3), ring(2, 3))
every_strategy = pytest.mark.parametrize("name", STRATEGIES)


def rollout_of(name: str, sessions: int = 4, **changes: object) -> Rollout:
    """A rollout whose content does not depend on the request, so that forks can be told from their original."""
    rollout = Rollout(name, WINDOWS, head_dim=8, sessions=sessions, **changes)
    usual = rollout.content
    rollout.content = lambda rid, *key: usual(rid[0], *key)
    return rollout


def registered(rollout: Rollout, *rids: str) -> AttentionResource:
    for rid in rids:
        rollout.resource.ingest_request(rid)
    return rollout.resource


@pytest.mark.parametrize(("name", "read"), EVERY_READ)
@pytest.mark.parametrize("frames", [1, 8])
def test_forks_equal_their_original_bit_for_bit_and_do_not_share_with_it(name: str, read: str, frames: int) -> None:
    rollout = rollout_of(name, attention=read, padding=True)
    rollout.run("a", range(frames))
    rollout.run("b", range(2))
    other = rollout.resource.get_state("b")
    resource = registered(rollout, "a1", "a2")
    state = resource.get_state("a")
    resource.fork("a", ["a1", "a2"])
    for rid in ("a", "a1", "a2"):
        assert same_bytes(resource.get_state(rid), state)
        assert [accepts(resource, rid, frame) for frame in (frames - 1, frames + 1, frames)] == [False, False, True]
    resource.check_integrity()
    for frame in range(frames, frames + 7):
        outputs = [rollout.drive([(rid, frame)]) for rid in ("a1", "a", "a2")]
        assert same_bytes(outputs[0], outputs[1])
        assert same_bytes(outputs[2], outputs[1])
    assert same_bytes(resource.get_state("a1"), resource.get_state("a"))
    state = resource.get_state("a")
    usual = rollout.content
    rollout.content = lambda *key: tuple(-t for t in usual(*key))  # type: ignore[assignment]
    rollout.run("a1", range(frames + 7, frames + 10))
    assert same_bytes(resource.get_state("a"), state)
    assert same_bytes(resource.get_state("a2"), state)
    assert same_bytes(resource.get_state("b"), other)
    resource.check_integrity()


@every_strategy
@pytest.mark.parametrize("layers", [1, 2])
def test_a_fork_of_an_aborted_commit_goes_on_as_its_original_does(name: str, layers: int) -> None:
    """At frame 6 both windows of the ring are full, so the aborted pass overwrote a slot in each of its layers."""
    rollout = rollout_of(name)
    rollout.run("a", range(6))
    rollout.begin([("a", 6)])
    for layer in range(layers):
        rollout.layer_pass([("a", 6)], layer, variant=3, commit=True)
    resource = registered(rollout, "a1")
    resource.fork("a", ["a1"])
    assert same_bytes(resource.get_state("a1"), resource.get_state("a"))
    for frame in range(6, 12):
        assert same_bytes(rollout.drive([("a1", frame)]), rollout.drive([("a", frame)]))
        assert same_bytes(resource.get_state("a1"), resource.get_state("a"))
        resource.check_integrity()


@every_strategy
def test_forking_leaves_a_pending_frame_of_the_original_as_it_is(name: str) -> None:
    rollout, twin = rollout_of(name), rollout_of(name)
    for r in (rollout, twin):
        r.run("a", range(6))
        r.begin([("a", 6)])
        r.full_pass([("a", 6)], variant=1)
    registered(rollout, "a1").fork("a", ["a1"])
    for r in (rollout, twin):
        r.full_pass([("a", 6)], commit=True)
        r.finish([("a", 6)])
    assert same_bytes(rollout.resource.get_state("a"), twin.resource.get_state("a"))
    assert same_bytes(rollout.drive([("a1", 6)]), rollout_of_seven(name))


def rollout_of_seven(name: str) -> list[list[Tensor]]:
    rollout = rollout_of(name)
    rollout.run("a", range(6))
    return rollout.drive([("a", 6)])


@every_strategy
@pytest.mark.parametrize(
    ("new_rids", "error", "message"),
    [
        (["a1", "a2", "a3"], RuntimeError, "into 3: 2 of 4 sessions are free"),
        (["a1", "nobody"], ValueError, "'nobody' is not registered"),
        (["a1", "b"], ValueError, "'b' holds a session"),
        (["a1", "a"], ValueError, "'a' holds a session"),
        (["a1", "a2", "a1"], ValueError, "'a1' stands twice"),
        ("a1", ValueError, "expected a sequence"),
    ],
)
def test_a_fork_that_cannot_be_made_changes_nothing(
    name: str, new_rids: list[str], error: type[Exception], message: str
) -> None:
    rollout = rollout_of(name)
    rollout.run("a", range(5))
    rollout.run("b", range(2))
    resource = registered(rollout, "a1", "a2", "a3")
    held = [t.clone() for t in kv_tensors(resource)]
    with pytest.raises(error, match=message):
        resource.fork("a", new_rids)
    assert same_bytes(held, kv_tensors(resource))
    assert resource.num_free_sessions == 2
    resource.check_integrity()
    for rid in ("nobody", "a1"):
        with pytest.raises(ValueError, match="not registered" if rid == "nobody" else "holds no session"):
            resource.fork(rid, ["a2"])
    resource.fork("a", [])
    rollout.drive([("a", 5), ("b", 2)])


@every_strategy
def test_a_fork_that_runs_out_of_memory_half_way_leaves_no_copy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = rollout_of(name)
    rollout.run("a", range(5))
    resource = registered(rollout, "a1", "a2")
    state, held = resource.get_state("a"), held_kv_bytes(resource)
    usual: Callable[..., None] = resource._import  # type: ignore[attr-defined]
    calls = []

    def failing(*args: object) -> None:
        calls.append(args)
        usual(*args)
        if len(calls) == 2:
            raise MemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(resource, "_import", failing)
        with pytest.raises(MemoryError):
            resource.fork("a", ["a1", "a2"])
    assert (resource.num_free_sessions, held_kv_bytes(resource)) == (3, held)
    resource.check_integrity()
    assert same_bytes(resource.get_state("a"), state)
    resource.fork("a", ["a1", "a2"])
    assert same_bytes(resource.get_state("a2"), state)


def test_pages_that_forks_need_are_counted_for_all_of_them() -> None:
    """12 tokens of 6 frames in pages of 3 are 4 pages; 15 more are free, one fewer than four forks take."""
    rollout = Rollout("paged", [ring(3)], head_dim=8, sessions=5)
    total = rollout.resource.config.num_pages  # type: ignore[attr-defined]
    rollout.run("a", range(6))
    resource = registered(rollout, "b", "c", "d")
    filler = total - 4 - 11
    while resource.layers[0].table.pool.num_free > 11:
        resource.layers[0].table.pool.allocate(1)
    assert filler > 0
    before = resource.num_free_sessions
    with pytest.raises(RuntimeError, match="3 x a state at clock 5 needs 12 pages of layer 0, 11 of"):
        resource.fork("a", ["b", "c", "d"])
    assert (resource.num_free_sessions, resource.layers[0].table.pool.num_free) == (before, 11)
    resource.fork("a", ["b", "c"])
    assert same_bytes(resource.get_state("b"), resource.get_state("a"))
    assert torch.equal(resource.get_state("c")["layers"][0][0], resource.get_state("a")["layers"][0][0])
