"""Which fast read to take where what is visible has a gap: a mask over it, or the frame lent the slot in it.

Both compute the same scores; what differs is the work. A masked call also scores the hidden tokens of its span and
adds the mask, about a thirty-second of its work; a lent slot costs three copies of a frame in every denoise pass.

Measured with ``benchmarks/read_rule.py`` on an Intel Xeon with AMX, PyTorch 2.13, one thread, fp32 and bf16, head dim
32 and 64, 4 to 128 tokens per frame, windows of 16 and 64 frames, filling and wrapped: lent reads take 0.80 to 0.99 of
the masked time once wrapped and 0.23 to 0.99 before, and are nowhere slower. So time alone would always lend. The
constant leaves the smallest reads masked, which move a third of the bytes: reads take 1.8 % longer than the faster of
both in the geometric mean of the grid, always masked 53 %. Joined segments (``attention=segments``) take 1.0 to 1.3
times as long as lent ones from 64 tokens up, and up to twice as long below.
"""

from __future__ import annotations

import torch

SCORES_PER_LOAN = 4_000
MASK_SHARE = 1 / 32


def saved_scores(kv_heads: int, queries: int, span_tokens: int, visible_tokens: int) -> float:
    """Scores of a masked call that lending saves, the addition of the mask counted as such too.

    queries: folded queries per KV head, ``H_q // H * T``. span_tokens: keys that a masked call would score, of which
    visible_tokens are visible.
    """
    return kv_heads * queries * (span_tokens - visible_tokens + span_tokens * MASK_SHARE)


def prefer_lent(kv_heads: int, queries: int, span_tokens: int, visible_tokens: int) -> bool:
    """Whether lending saves enough."""
    saved = saved_scores(kv_heads, queries, span_tokens, visible_tokens)
    return saved > SCORES_PER_LOAN * torch.get_num_threads()
