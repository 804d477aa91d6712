"""Objects that belong to one thread."""

from __future__ import annotations

import threading


class OneThread:
    """Refuses every thread but the first that asks."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._owner: int | None = None

    def check(self) -> None:
        """Raise ``RuntimeError`` unless this is the thread that asked first."""
        caller = threading.get_ident()
        if self._owner is None:
            self._owner = caller
        if self._owner != caller:
            raise RuntimeError(
                f"{self._what} belongs to thread {self._owner}, called from thread {caller}: make every call from one "
                "thread, or build one for each"
            )
