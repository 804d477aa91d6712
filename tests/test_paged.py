"""The paged cache: pages by frame, what its frames see, and refusals."""

from __future__ import annotations

import pytest
import torch

from ringkv import FrameStep, StepContext
from ringkv import memory as bytes_ahead
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
from tests.ring_tools import reference_history, ring, same_bytes, step_of

# -- pages by frame ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_a_page_is_freed_once_no_frame_of_it_can_be_seen_and_not_before(path: str) -> None:
    """The count of skippable tokens was off, so pages stayed too long or went while part of them was in the window."""
    manager = build_paged([ring(3)], num_pages=3, head_dim=200, attention=path)
    layer = manager.layers[0]
    first_pages: list[int] = []
    for p in range(100):
        begin(manager, [("a", p)])
        first, end = layer.table.owned(0)
        assert end - first == bytes_ahead.session_pages(manager.config, ring(3), p) <= 3
        assert first == max(0, p - 2) // 2  # p=3 needs frames 1 and 2: page 0 stays; p=4 needs 2 and 3: it may go
        assert end == p // 2 + 1
        first_pages.append(first)
        out = one_pass(manager, [("a", p)], commit=True)[0][0]
        manager.commit(*step_of([("a", p)]))
        assert marked_frames(manager, out) == list(range(max(0, p - 2), p + 1))
        manager.check_integrity()
    assert first_pages[:7] == [0, 0, 0, 0, 1, 1, 2]
    manager.remove_request("a")
    assert layer.table.pool.num_free == 3


def test_frames_that_straddle_pages_take_the_pages_that_they_touch() -> None:
    """Capacity computed by plain division ignored straddling."""
    manager = build_paged(None, tokens_per_frame=3, head_dim=18, num_pages=5)
    layer = manager.layers[0]
    held = []
    for p in range(6):
        out = drive(manager, [("a", p)])[0][0]
        held.append(layer.table.num_owned(0))
        assert marked_frames(manager, out) == list(range(p + 1))
    assert held == [1, 2, 3, 3, 4, 5]
    tokens = owned_tokens(layer, 0)
    assert tokens[3] // 4 != tokens[4] // 4, "frame 1 has its tokens in two pages"
    assert torch.equal(layer.kv[1, 0, 0, tokens[3:6]], mark(manager, 1)[1][0])


def test_a_reused_table_row_keeps_nothing_of_its_former_owner() -> None:
    """A reused table row kept the former owner's entries, so a request that grew wrote into another's pages."""
    manager = build_paged(None, tokens_per_frame=3, head_dim=18, num_pages=4, num_sessions=2)
    layer = manager.layers[0]

    def beyond_is_sentinel() -> None:
        for session in (0, 1):
            row, owned = layer.table.entries[session].tolist(), layer.table.num_owned(session)
            assert row[owned:] == [layer.table.sentinel] * (len(row) - owned)
            assert layer.table.sentinel not in row[:owned]

    run(manager, "a", range(3))
    assert layer.table.num_owned(0) == 3
    manager.remove_request("a")
    beyond_is_sentinel()
    run(manager, "b", range(1))
    run(manager, "c", range(2))
    assert [layer.table.num_owned(session) for session in (0, 1)] == [1, 2]
    beyond_is_sentinel()
    c_pages = owned_tokens(layer, 1)
    before = layer.kv[:, :, :, c_pages].clone()
    out = run(manager, "b", range(1, 2))[0][0]
    beyond_is_sentinel()
    assert marked_frames(manager, out) == [0, 1]
    assert layer.table.num_owned(0) == 2
    assert same_bytes(layer.kv[:, :, :, c_pages], before)


GEOMETRIES = [[ring(1), ring(3), ring(2, 4), ring(4, 3, frames=5), ring(1, 2)], None]


@pytest.mark.parametrize(
    ("tokens", "page_tokens", "path"),
    [(2, 4, "auto"), (3, 4, "auto"), (3, 4, "canonical"), (5, 2, "auto"), (5, 2, "canonical"), (1, 16, "auto")],
)
@pytest.mark.parametrize("layers", GEOMETRIES, ids=["windowed", "full"])
def test_a_frame_sees_exactly_its_window_wherever_its_pages_are(
    layers: Windows, tokens: int, page_tokens: int, path: str
) -> None:
    """Three sessions at their own clocks take pages in turn, so that none has two neighbouring pages for long."""
    frames = 26
    manager = build_paged(
        layers,
        tokens_per_frame=tokens,
        page_tokens=page_tokens,
        head_dim=frames * tokens + 2,
        num_pages=3 * (frames * tokens // page_tokens + 2),
        num_sessions=3,
        attention=path,
    )
    run(manager, "a", range(3), noisy_passes=0)
    run(manager, "b", range(1), noisy_passes=0)
    for step in range(20):
        rows = [("a", 3 + step), ("c", step), ("b", 1 + step)]
        outputs = drive(manager, rows)
        for index, out in enumerate(outputs):
            for row, (_, p) in enumerate(rows):
                history = list(range(p))
                if layers is not None:
                    history = reference_history(layers[index].ring_buckets, layers[index].pinned_dilation, p)
                assert marked_frames(manager, out[row]) == [*history, p]
        manager.check_integrity()


def test_pages_of_every_layer_are_as_predicted_at_every_frame() -> None:
    layers = [ring(1), ring(3), ring(2, 4), ring(4, 3), ring(1, 3)]
    manager = build_paged(layers, tokens_per_frame=3, page_tokens=4, head_dim=4, num_pages=20)
    zeros = torch.zeros(1, 3, 4)
    for p in range(40):
        begin(manager, [("a", p)])
        owned = [layer.table.num_owned(0) for layer in manager.layers]
        assert owned == [bytes_ahead.session_pages(manager.config, window, p) for window in layers]
        assert all(n <= bytes_ahead.max_session_pages(manager.config, w) for n, w in zip(owned, layers, strict=True))
        one_pass(manager, [("a", p)], commit=True, payload=lambda rid, frame, layer: (zeros, zeros))
        manager.commit(*step_of([("a", p)]))


# -- refusals ------------------------------------------------------------------------------------------------


def test_an_exhausted_pool_is_worth_another_try_and_says_what_it_lacks() -> None:
    manager = build_paged(None, num_pages=4, num_sessions=3, head_dim=16, num_layers=2)
    run(manager, "a", range(6))  # 3 of 4 pages
    for rid in ("b", "c"):
        manager.ingest_request(rid)
    before = storage_of(manager)
    both = step_of([("b", 0), ("c", 0)])
    for _ in range(3):
        outcome = manager.admit(*both)
        assert (outcome.ok, outcome.retryable, outcome.rid) == (False, True, "c")
        assert "2 pages wanted, 1 of 4 free, 1 short" in outcome.reason
        assert same_bytes(storage_of(manager), before)
        assert manager.session_of("b") is manager.session_of("c") is None
    grow = step_of([("a", 6), ("b", 0)])
    assert manager.admit(*grow).retryable
    assert same_bytes(storage_of(manager), before)
    manager.check_integrity()
    run(manager, "a", range(6, 7))  # still accepted at its own clock
    manager.remove_request("a")
    assert manager.admit(*both).ok
    assert manager.layers[1].table.pool.num_free == 2
    manager.check_integrity()


def test_a_wrong_step_is_refused_for_good_even_while_the_pool_is_exhausted() -> None:
    manager = build_paged(None, num_pages=2, num_sessions=2, head_dim=16)
    run(manager, "a", range(3))
    manager.ingest_request("b")
    assert manager.admit(*step_of([("b", 0)])).retryable
    bad: list[tuple[FrameStep, StepContext]] = [
        step_of([("b", 1)]),
        step_of([("b", -1)]),
        step_of([("a", 2)]),
        step_of([("a", 4)]),
        step_of([("nobody", 0)]),
        (FrameStep(frames=(("b", None),)), StepContext(request_ids=("b",))),  # type: ignore[arg-type]
        (FrameStep(frames=(("b", 0),)), StepContext(request_ids=("a",))),
    ]
    before = storage_of(manager)
    for step, ctx in bad:
        outcome = manager.admit(step, ctx)
        assert not outcome.ok
        assert not outcome.retryable, step
    assert same_bytes(storage_of(manager), before)
    assert manager.admit(*step_of([("a", 3)])).ok


def test_a_frame_that_no_pool_of_this_size_can_hold_is_never_retried() -> None:
    """A request that could never fit was retried for ever and blocked the rest."""
    manager = build_paged(None, num_pages=2, head_dim=16)
    run(manager, "a", range(4))
    outcome = manager.admit(*step_of([("a", 4)]))
    assert not outcome.ok
    assert not outcome.retryable
    assert "needs 3 pages" in outcome.reason
    assert "1 short" in outcome.reason
    assert outcome.rid == "a"


def test_no_free_session_is_retryable_and_takes_no_page() -> None:
    manager = build_paged(None, num_pages=9, head_dim=16)
    run(manager, "a", range(1))
    manager.ingest_request("b")
    assert manager.admit(*step_of([("b", 0)])).retryable
    assert manager.layers[0].table.pool.num_free == 8


def test_a_frame_that_is_admitted_again_takes_no_second_page() -> None:
    manager = build_paged([ring(3), ring(2, 2)], num_pages=9, head_dim=40)
    layers = manager.layers
    run(manager, "a", range(3))
    for p in (3, 4, 5):
        assert manager.admit(*step_of([("a", p)])).ok
        before = storage_of(manager)
        for _ in range(3):
            assert manager.admit(*step_of([("a", p)])).ok
        begin(manager, [("a", p)])
        one_pass(manager, [("a", p)], commit=True)
        assert manager.admit(*step_of([("a", p)])).ok
        assert same_bytes([layer.table.entries for layer in layers], [entry[1] for entry in before[0]])
        manager.check_integrity()
        run(manager, "a", range(p, p + 1))
