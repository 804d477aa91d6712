"""Nested values under dotted names, as the command line names them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of nested mappings, and their values."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
