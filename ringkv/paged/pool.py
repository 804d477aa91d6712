"""Who owns which page. Pure bookkeeping: nothing here holds or moves a key or a value.

A session's tokens have *logical* positions, 0 for the first token it ever keeps, and live in logical pages of
``page_tokens`` positions each. A block table says in which page of the pool a logical page is; logical pages that
follow one another may lie anywhere.
"""

from __future__ import annotations

import heapq

import torch

Span = tuple[int, int]
"""``[lo, hi)``, in tokens unless said otherwise."""


class PagePool:
    """Pages ``0 .. num_pages - 1``, each free or owned. The lowest free page is handed out first, so that a session
    that is alone gets neighbouring pages."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages))  # a heap
        self._is_free = [True] * num_pages

    @property
    def num_free(self) -> int:
        """Pages nobody owns."""
        return len(self._free)

    def is_free(self, page: int) -> bool:
        """Whether nobody owns ``page``."""
        return self._is_free[page]

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` pages; the caller has seen that there are as many."""
        assert count <= self.num_free, f"{count} pages wanted, {self.num_free} of {self.num_pages} free"
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._is_free[page] = False
        return pages

    def release(self, pages: list[int]) -> None:
        """Take ``pages`` back."""
        for page in pages:
            assert not self._is_free[page], f"page {page} is freed twice"
            self._is_free[page] = True
            heapq.heappush(self._free, page)


class BlockTable:
    """Logical pages of every session, mapped to pages of one pool.

    ``entries`` ``[num_sessions + reserved_rows, width]`` int64 on the host, never rebound: logical page n of a session
    is at column ``n % width``. What a session owns is one run of logical pages, ``first`` to ``end``, at most ``width``
    of them: it grows at the end and, behind a window, shrinks from the front, so a rollout of any length fits. Every
    other entry holds ``sentinel``, one page past the storage, which no lookup accepts.

    A padding session, the last row, owns the pages after the pool's for good.
    """

    def __init__(self, pool: PagePool, num_sessions: int, width: int, page_tokens: int, padding_pages: int = 0) -> None:
        self.pool = pool
        self.num_sessions = num_sessions
        self.width = max(width, padding_pages)
        self.page_tokens = page_tokens
        self.sentinel = pool.num_pages + padding_pages
        rows = num_sessions + (padding_pages > 0)
        self.entries = torch.full((rows, self.width), self.sentinel, dtype=torch.int64, device="cpu")
        self._owned: list[Span] = [(0, 0)] * num_sessions
        if padding_pages:
            self.entries[-1, :padding_pages] = torch.arange(pool.num_pages, self.sentinel, device="cpu")
            self._owned.append((0, padding_pages))

    def owned(self, session: int) -> Span:
        """``[first, end)``: the logical pages that a session owns."""
        return self._owned[session]

    def num_owned(self, session: int) -> int:
        """How many pages a session owns."""
        first, end = self._owned[session]
        return end - first

    def pages_of(self, session: int) -> list[int]:
        """The pages that a session owns, in logical order."""
        first, end = self._owned[session]
        row = self.entries[session].tolist()
        return [row[page % self.width] for page in range(first, end)]

    def missing(self, session: int | None, tokens: Span) -> int:
        """How many pages a session (None: one that owns nothing) would have to be given to hold these positions."""
        first, end = self._grown(session, tokens)
        return end - first - (self.num_owned(session) if session is not None else 0)

    def grow(self, session: int, tokens: Span) -> None:
        """Give a session the pages that ``missing`` counts."""
        first, end = self._grown(session, tokens)
        assert end - first <= self.width, f"session {session}: {end - first} pages in a table of {self.width}"
        new = self.pool.allocate(self.missing(session, tokens))
        for logical, page in zip(range(end - len(new), end), new, strict=True):
            self.entries[session, logical % self.width] = page
        self._owned[session] = (first, end)

    def shrink(self, session: int, tokens: Span) -> None:
        """Free the pages that lie wholly before positions ``tokens``, which are the last; all if there are none."""
        lo, hi = tokens
        first, end = self._owned[session]
        self._free(session, first, lo // self.page_tokens if lo < hi else end)

    def truncate(self, session: int, tokens: Span) -> None:
        """Free the pages that lie wholly after positions ``tokens``, which are the first."""
        first, end = self._owned[session]
        kept = -(-tokens[1] // self.page_tokens)
        self._release(session, kept, end)
        self._owned[session] = (first, kept)

    def clear(self, session: int) -> None:
        """Free everything that a session owns; it begins anew wherever it grows next."""
        self._free(session, *self._owned[session])
        self._owned[session] = (0, 0)

    def runs(self, session: int, tokens: Span) -> list[Span]:
        """Where positions ``tokens`` of a session are: token spans of the storage, in order, neighbours joined."""
        lo, hi = tokens
        first, end = self._owned[session]
        size = self.page_tokens
        assert lo == hi or (first * size <= lo and hi <= end * size), f"session {session} does not own {tokens}"
        row = self.entries[session].tolist()
        runs: list[Span] = []
        for logical in range(lo // size, -(-hi // size)):
            shift = (row[logical % self.width] - logical) * size
            start, stop = max(lo, logical * size) + shift, min(hi, (logical + 1) * size) + shift
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((start, stop))
        return runs

    def check(self) -> None:
        """Raise ``RuntimeError`` with the counts unless every page has one owner or none, and the rest is sentinel."""
        owners: dict[int, int] = {}
        for session in range(self.num_sessions):
            for page in self.pages_of(session):
                if page in owners or not 0 <= page < self.pool.num_pages or self.pool.is_free(page):
                    raise RuntimeError(f"page {page} of session {session} is free or another's: {owners.get(page)}")
                owners[page] = session
        if len(owners) + self.pool.num_free != self.pool.num_pages:
            raise RuntimeError(
                f"{len(owners)} pages owned and {self.pool.num_free} free: expected {self.pool.num_pages} in all"
            )
        mapped = int((self.entries != self.sentinel).sum())
        if mapped != len(owners) + self.sentinel - self.pool.num_pages:
            raise RuntimeError(f"{mapped} table entries are set, {len(owners)} pages are owned")

    def _grown(self, session: int | None, tokens: Span) -> Span:
        """What a session would own, in logical pages, if it had to hold ``tokens`` too."""
        lo, hi = tokens
        first, end = self._owned[session] if session is not None else (0, 0)
        if lo == hi:
            return first, end
        if first == end:  # owns nothing: it begins where it is asked to
            first = end = lo // self.page_tokens
        assert first <= lo // self.page_tokens <= end, f"{tokens} does not follow on pages {first} to {end}"
        return first, max(end, -(-hi // self.page_tokens))

    def _free(self, session: int, first: int, end: int) -> None:
        self._release(session, first, end)
        self._owned[session] = (end, self._owned[session][1])

    def _release(self, session: int, first: int, end: int) -> None:
        row = self.entries[session]
        columns = [page % self.width for page in range(first, end)]
        self.pool.release([int(row[column]) for column in columns])
        for column in columns:
            row[column] = self.sentinel
