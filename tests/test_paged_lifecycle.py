"""A request's life on the paged cache: reuse of sessions and pages, resets, cancelled and aborted frames."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ringkv.paged.manager import PagedKVManager
from tests.paged_tools import (
    PATHS,
    Windows,
    begin,
    build_paged,
    drive,
    mark,
    marked_frames,
    one_pass,
    owned_tokens,
    run,
    storage_of,
)
from tests.ring_tools import clocks, ring, same_bytes, step_of


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layers", [[ring(3)], None], ids=["windowed", "full"])
def test_a_new_request_sees_nothing_of_the_one_before_it(layers: Windows, path: str) -> None:
    """A buffer handed to the next request still held the former one's keys and values."""
    manager = build_paged(layers, num_pages=4, attention=path)
    thousand = torch.full((1, 2, 2), 1000.0)
    run(manager, "a", range(7), payload=lambda rid, frame, layer: (thousand, thousand))
    assert 1000.0 in manager.layers[0].kv
    manager.remove_request("a")
    one = torch.ones(1, 2, 2)
    out = drive(manager, [("b", 0)], payload=lambda rid, frame, layer: (one, one))[0]
    assert torch.equal(out, one[None])
    assert all(1000.0 not in kv for kv, _ in manager.get_state("b")["layers"])


def test_a_reset_puts_contents_pages_clock_and_claim_back_together() -> None:
    """A reset zeroed contents but kept the length, or zeroed a region still flagged valid."""
    layers = [ring(3), ring(2, 2)]
    manager = build_paged(layers, num_sessions=2, head_dim=24, num_pages=8)
    run(manager, "a", range(6))
    run(manager, "b", range(5))
    other = manager.get_state("b")
    owned = [owned_tokens(layer, 0) for layer in manager.layers]
    manager.reset_request("a")
    assert manager.session_of("a") is None
    assert manager.num_free_sessions == 1
    for layer, tokens in zip(manager.layers, owned, strict=True):
        assert not layer.kv[:, :, :, tokens].any()
        assert layer.table.num_owned(0) == 0
    manager.check_integrity()
    assert not manager.admit(*step_of([("a", 6)])).ok
    assert manager.num_free_sessions == 1
    assert manager.admit(*step_of([("a", 0)])).ok
    assert manager.num_free_sessions == 0
    fresh = build_paged(layers, num_sessions=2, head_dim=24, num_pages=8)
    fresh.ingest_request("a")
    assert fresh.admit(*step_of([("a", 0)])).ok
    assert same_bytes(manager.get_state("a"), fresh.get_state("a"))
    histories = [[marked_frames(manager, out[0]) for out in drive(manager, [("a", p)])] for p in range(4)]
    assert histories == [[[0], [0]], [[0, 1], [0, 1]], [[0, 1, 2], [0, 2]], [[1, 2, 3], [0, 2, 3]]]
    assert same_bytes(manager.get_state("b"), other)
    manager.check_integrity()


class ModelFailed(Exception):
    """What the model raises between plan and commit."""


def _after_ingest(manager: PagedKVManager) -> None:
    manager.ingest_request("a")


def _after_admit(manager: PagedKVManager) -> None:
    manager.ingest_request("a")
    assert manager.admit(*step_of([("a", 0)])).ok


def _between_plan_and_commit(manager: PagedKVManager) -> None:
    run(manager, "a", range(2))
    begin(manager, [("a", 2)])
    one_pass(manager, [("a", 2)], commit=True)


def _after_two_frames(manager: PagedKVManager) -> None:
    run(manager, "a", range(2))


def _when_the_model_raises(manager: PagedKVManager) -> None:
    def broken(rid: str, frame: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        if layer == 1:
            raise ModelFailed
        return mark(manager, frame)

    begin(manager, [("a", 0)])
    with pytest.raises(ModelFailed):
        one_pass(manager, [("a", 0)], commit=True, payload=broken)


@pytest.mark.parametrize(
    "cancel", [_after_ingest, _after_admit, _between_plan_and_commit, _after_two_frames, _when_the_model_raises]
)
def test_neither_sessions_nor_pages_leak_or_are_freed_twice(cancel: Callable[[PagedKVManager], None]) -> None:
    """Cancel at an awkward moment kept the blocks for ever, until nothing could be admitted."""
    manager = build_paged([ring(2), ring(2, 2)], num_sessions=3, num_pages=6, head_dim=12, padding_session=True)
    for _ in range(30):
        cancel(manager)
        manager.remove_request("a")
        manager.remove_request("a")
        manager.remove_request("nobody")
        assert manager.num_free_sessions == 3
        assert [layer.table.pool.num_free for layer in manager.layers] == [6, 6]
        manager.check_integrity()
    begin(manager, [("x", 0), ("y", 0), ("z", 0)])
    assert sorted(manager.session_of(rid) or 0 for rid in "xyz") == [0, 1, 2]
    manager.check_integrity()


def test_one_bad_row_refuses_the_whole_step() -> None:
    """A batch answered "rejected" had already applied its good rows."""
    manager = build_paged([ring(3)], num_sessions=2, num_pages=6, head_dim=16)
    for rid in ("a", "b"):
        run(manager, rid, range(3))
    before = storage_of(manager)
    for rows in ([("a", 3), ("b", 5)], [("a", 3), ("a", 3)], [("a", 3), ("a", 4)]):
        assert not manager.admit(*step_of(rows)).ok
        with pytest.raises(RuntimeError):
            manager.plan(*step_of(rows))
        assert same_bytes(storage_of(manager), before)
    drive(manager, [("a", 3), ("b", 3)])
    manager.check_integrity()


def test_two_newcomers_for_one_session_claim_nothing() -> None:
    manager = build_paged([ring(3)], num_pages=6)
    for rid in ("a", "b"):
        manager.ingest_request(rid)
    before = storage_of(manager)
    assert manager.admit(*step_of([("a", 0), ("b", 0)])).retryable
    assert same_bytes(storage_of(manager), before)


@pytest.mark.parametrize("layers", [[ring(3), ring(2, 2)], None], ids=["windowed", "full"])
def test_nothing_of_an_aborted_commit_survives(layers: Windows) -> None:
    manager = build_paged(layers, num_layers=2, head_dim=32, num_pages=12, tokens_per_frame=3)
    run(manager, "a", range(4))
    kept = manager.get_state("a")
    noise = torch.full((1, 3, 32), 1000.0)
    begin(manager, [("a", 4)])
    one_pass(manager, [("a", 4)], commit=True, payload=lambda rid, frame, layer: (noise, noise), layers=[0])
    with pytest.raises(RuntimeError, match="layers \\[1\\]"):
        manager.commit(*step_of([("a", 4)]))
    assert same_bytes(manager.get_state("a"), kept)
    assert 1000.0 in manager.layers[0].kv
    begin(manager, [("a", 4)])
    assert 1000.0 not in manager.layers[0].kv
    assert same_bytes(manager.get_state("a"), kept)
    out = one_pass(manager, [("a", 4)], commit=True)
    manager.commit(*step_of([("a", 4)]))
    undisturbed = build_paged(layers, num_layers=2, head_dim=32, num_pages=12, tokens_per_frame=3)
    run(undisturbed, "a", range(4))
    assert same_bytes(out, drive(undisturbed, [("a", 4)]))
    assert same_bytes(manager.get_state("a"), undisturbed.get_state("a"))


def test_a_pass_that_does_not_commit_leaves_every_page_byte_identical() -> None:
    manager = build_paged([ring(3), ring(2, 2)], head_dim=24)
    run(manager, "a", range(5))
    for p in (5, 6):
        begin(manager, [("a", p)])
        before = storage_of(manager)
        for _ in range(3):
            one_pass(manager, [("a", p)], commit=False)
        assert same_bytes(storage_of(manager), before)
        one_pass(manager, [("a", p)], commit=True)
        once = storage_of(manager)
        one_pass(manager, [("a", p)], commit=True)
        assert same_bytes(storage_of(manager), once)
        manager.commit(*step_of([("a", p)]))


def test_a_plan_dies_with_the_request_that_it_holds() -> None:
    manager = build_paged(None, num_sessions=2, head_dim=16)
    run(manager, "b", range(2))
    for event in (manager.reset_request, manager.remove_request):
        begin(manager, [("a", 0), ("b", 2)])
        event("a")
        before = storage_of(manager)
        with pytest.raises(RuntimeError, match="'a'"):
            one_pass(manager, [("a", 0), ("b", 2)], commit=True)
        assert same_bytes(storage_of(manager), before)
    one = torch.zeros(1, 1, 2, 16)
    begin(manager, [("b", 2)])
    with pytest.raises(ValueError, match="frame_pos"):
        manager.attend(one, one, one, 0, clocks(3), commit=True)
