"""Bookkeeping of pages: random programs against a model of dicts and lists, and the prediction of pages by frame."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ringkv.config import PagedKVConfig
from ringkv.memory import max_session_pages, session_pages
from ringkv.paged.pool import BlockTable, PagePool
from tests.ring_tools import reference_history, ring

HAPPENED: Counter[str] = Counter()
MUST_HAPPEN = ("grew", "grew by nothing", "shrank", "shrank to nothing", "cleared", "did not fit", "wrapped the table")


class PoolMachine(RuleBasedStateMachine):
    """Sessions that keep tokens ``[first, end)`` each; ``pages[session]`` maps a logical page to its page.

    The model is told only where the table put a new page (any free one will do) and holds it to that from then on.
    """

    @initialize(
        num_pages=st.integers(1, 9),
        sessions=st.integers(1, 3),
        page_tokens=st.integers(1, 4),
        padding_pages=st.integers(0, 2),
        narrow=st.booleans(),
    )
    def build(self, num_pages: int, sessions: int, page_tokens: int, padding_pages: int, narrow: bool) -> None:
        self.num_pages, self.page_tokens, self.padding_pages = num_pages, page_tokens, padding_pages
        width = max(2, num_pages // 2) if narrow else num_pages
        self.table = BlockTable(PagePool(num_pages), sessions, width, page_tokens, padding_pages)
        self.address = self.table.entries.data_ptr()
        self.tokens = [(0, 0)] * sessions
        self.pages: list[dict[int, int]] = [{} for _ in range(sessions)]

    @property
    def free(self) -> int:
        return self.num_pages - sum(len(pages) for pages in self.pages)

    def touched(self, tokens: tuple[int, int]) -> set[int]:
        """Logical pages of a token span, counted token by token."""
        return {token // self.page_tokens for token in range(*tokens)}

    def learn(self, session: int) -> None:
        """Take over where the table put pages that the model does not know yet; those it knows must not have moved."""
        logical = sorted(self.touched(self.tokens[session]))
        places = dict(zip(logical, self.table.pages_of(session), strict=True))
        old = self.pages[session]
        assert {page: places[page] for page in old if page in places} == {p: old[p] for p in old if p in places}
        self.pages[session] = places

    @rule(data=st.data(), count=st.integers(0, 9))
    def grow(self, data: st.DataObject, count: int) -> None:
        session = data.draw(st.integers(0, len(self.tokens) - 1))
        first, end = self.tokens[session]
        if first == end:  # a state may begin anywhere
            first = end = data.draw(st.sampled_from([end, end + 1, 5, 100]))
        new = (end, end + count)
        wanted = self.touched((first, end + count))
        missing = len(wanted) - len(self.pages[session])
        assert self.table.missing(session, new) == missing
        if first == end:
            assert self.table.missing(None, new) == missing
        if missing > self.free or len(wanted) > self.table.width:
            HAPPENED["did not fit"] += missing > self.free
            return
        self.table.grow(session, new)
        self.tokens[session] = (first, end + count) if count else self.tokens[session]
        HAPPENED["grew" if missing else "grew by nothing"] += 1
        HAPPENED["wrapped the table"] += max(wanted, default=0) >= self.table.width > 0
        self.learn(session)

    @rule(data=st.data())
    def shrink_behind_a_window(self, data: st.DataObject) -> None:
        session = data.draw(st.integers(0, len(self.tokens) - 1))
        first, end = self.tokens[session]
        keep_from = data.draw(st.integers(first, end))
        self.table.shrink(session, (keep_from, end))
        self.tokens[session] = (keep_from, end)
        HAPPENED["shrank"] += len(self.touched((keep_from, end))) < len(self.pages[session])
        HAPPENED["shrank to nothing"] += keep_from == end > first
        self.learn(session)

    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        session = data.draw(st.integers(0, len(self.tokens) - 1))
        HAPPENED["cleared"] += bool(self.pages[session])
        self.table.clear(session)
        self.tokens[session] = (0, 0)
        self.learn(session)

    @precondition(lambda self: any(first < end for first, end in self.tokens))
    @rule(data=st.data())
    def look_up(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from([i for i, (first, end) in enumerate(self.tokens) if first < end]))
        first, end = self.tokens[session]
        lo = data.draw(st.integers(first, end))
        hi = data.draw(st.integers(lo, end))
        runs = self.table.runs(session, (lo, hi))
        found = [token for run in runs for token in range(*run)]
        size = self.page_tokens
        assert found == [self.pages[session][token // size] * size + token % size for token in range(lo, hi)]
        assert all(left[1] != right[0] for left, right in pairwise(runs)), "neighbours are joined"

    @invariant()
    def every_page_has_one_owner_or_none(self) -> None:
        table, pool = self.table, self.table.pool
        owned = [page for pages in self.pages for page in pages.values()]
        assert len(set(owned)) == len(owned)
        assert all(0 <= page < self.num_pages for page in owned)
        assert pool.num_free == self.free
        assert [page for page in range(self.num_pages) if not pool.is_free(page)] == sorted(owned)
        assert [table.num_owned(session) for session in range(len(self.pages))] == [len(p) for p in self.pages]
        table.check()

    @invariant()
    def what_is_not_owned_is_sentinel(self) -> None:
        table = self.table
        assert table.sentinel == self.num_pages + self.padding_pages
        assert table.entries.data_ptr() == self.address
        for session, pages in enumerate(self.pages):
            row = {logical % table.width: page for logical, page in pages.items()}
            assert table.entries[session].tolist() == [row.get(c, table.sentinel) for c in range(table.width)]
        if self.padding_pages:
            reserved = list(range(self.num_pages, table.sentinel))
            assert table.entries[-1].tolist() == reserved + [table.sentinel] * (table.width - self.padding_pages)
            assert table.pages_of(len(self.pages)) == reserved


def test_random_programs_keep_every_page_with_one_owner() -> None:
    HAPPENED.clear()
    run_state_machine_as_test(
        PoolMachine,
        settings=settings(
            max_examples=100,
            stateful_step_count=30,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
    assert all(HAPPENED[name] for name in MUST_HAPPEN), dict(HAPPENED)


@pytest.mark.parametrize("fault", ["an owned page is free too", "a page of two sessions", "a stale entry", "a hole"])
def test_the_check_finds_a_table_that_contradicts_the_pool(fault: str) -> None:
    table = BlockTable(PagePool(6), 2, 6, 4)
    table.grow(0, (0, 8))
    table.grow(1, (0, 8))
    table.check()
    if fault == "an owned page is free too":
        table.pool.release([table.pages_of(0)[0]])
    elif fault == "a page of two sessions":
        table.entries[1, 0] = table.entries[0, 0]
    elif fault == "a stale entry":
        table.entries[1, 5] = 3
    else:
        table.entries[0, 1] = table.sentinel
    with pytest.raises(RuntimeError):
        table.check()


def test_the_lowest_free_page_goes_first_whatever_order_they_came_back_in() -> None:
    pool = PagePool(5)
    assert pool.allocate(5) == [0, 1, 2, 3, 4]
    pool.release([3])
    pool.release([4, 1])
    assert pool.allocate(2) == [1, 3]
    assert pool.num_free == 1
    assert [pool.is_free(page) for page in range(5)] == [False, False, False, False, True]


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("page_tokens", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("geometry", [None, (1, 1), (3, 1), (2, 4), (4, 3), (1, 2)])
def test_predicted_pages_are_those_that_the_tokens_touch(
    tokens: int, page_tokens: int, geometry: tuple[int, int] | None
) -> None:
    config = PagedKVConfig(
        num_layers=1,
        num_kv_heads=1,
        num_qo_heads=1,
        head_dim=2,
        num_sessions=1,
        tokens_per_frame=tokens,
        page_tokens=page_tokens,
        num_pages=10_000,
        layers=None if geometry is None else (ring(*geometry),),
    )
    window = None if geometry is None else ring(*geometry)
    dilation = 1 if geometry is None else geometry[1]
    most = 0
    for frame in range(60):
        frames = list(range(frame)) if geometry is None else reference_history(*geometry, frame)
        frames += [frame] if frame % dilation == 0 else []
        positions = [f // dilation * tokens + t for f in frames for t in range(tokens)]
        pages = len({position // page_tokens for position in positions})
        assert session_pages(config, window, frame) == pages
        most = max(most, pages)
    assert most <= max_session_pages(config, window)
    if geometry is not None:
        buckets = geometry[0]
        assert max_session_pages(config, window) <= -(-buckets * tokens // page_tokens) + 1


def test_predicted_pages_by_hand() -> None:
    """Plain division ignored frames that straddle pages."""
    values: dict[str, Any] = {"num_layers": 1, "num_kv_heads": 1, "num_qo_heads": 1, "head_dim": 2, "num_sessions": 1}
    full = PagedKVConfig(tokens_per_frame=3, page_tokens=4, num_pages=9, **values)
    assert [session_pages(full, None, frame) for frame in range(6)] == [1, 2, 3, 3, 4, 5]
    assert max_session_pages(full, None) == 9
    local = PagedKVConfig(tokens_per_frame=2, page_tokens=4, num_pages=9, layers=(ring(3),), **values)
    assert [session_pages(local, ring(3), frame) for frame in range(8)] == [1, 1, 2, 2, 2, 2, 2, 2]
    assert max_session_pages(local, ring(3)) <= 3
