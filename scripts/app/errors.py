"""What a person did wrong, as opposed to what went wrong."""

from __future__ import annotations


class BadInput(ValueError):
    """Input that is refused before anything runs: one line naming key, value and what is allowed. Exit code 2."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
