"""Which fast read to take on the CPU: one masked call over a span, or one call per contiguous segment."""

from __future__ import annotations

MASK_COST = 1.0
CALL_COST = 0


def prefer_segments(queries: int, span_tokens: int, visible_tokens: int, num_segments: int) -> bool:
    """placeholder until measured"""
    return num_segments == 1 or queries >= 64
