"""Batch sizes that a step is padded to. No torch, so that a planner can ask."""

from __future__ import annotations


def batch_buckets(max_rows: int) -> tuple[int, ...]:
    """Powers of two up to the first that holds ``max_rows`` rows, ascending."""
    assert max_rows >= 1
    return tuple(1 << power for power in range((max_rows - 1).bit_length() + 1))


def bucket_for(rows: int) -> int:
    """The bucket that ``rows`` rows are padded to: the smallest that holds them."""
    return batch_buckets(rows)[-1]


def needs_padding(max_rows: int) -> bool:
    """Whether a step of some number of rows up to ``max_rows`` fills no bucket."""
    return max_rows > 2
