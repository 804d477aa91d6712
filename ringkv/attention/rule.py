"""Which fast read to take on the CPU: one masked call over a span, or one unmasked call per contiguous segment.

Both compute the same scores; what differs is the work. A masked call also scores the hidden tokens of its span and
adds the mask, about a thirty-second of its work; every segment after the first costs one more call and its share of
the join. So segments win once the scores they save outweigh their calls.

Measured with ``benchmarks/read_rule.py`` on an AMD EPYC 7003 (AVX2), PyTorch 2.13, fp32 and bf16, head dim 32 and 64, 4
to 128 tokens per frame, windows of 16 and 64 frames, filling and wrapped: one extra call costs what 24,000 scores do on
one thread and twice that on two, since only the scores are shared between threads. With it reads take 0.2 % longer than
the faster of both would in the geometric mean of the grid, on one thread; always masked 32 %, always in segments 20 %.
At 16 tokens per frame a wrapped ring is mostly faster masked (segments take 0.95 to 1.6 times as long), from 64 up it
is as fast or faster in segments (0.85 to 1.02); while a ring of 64 or more tokens per frame is half full, segments take
0.5 to 0.7 of the masked time.
"""

from __future__ import annotations

import torch

SCORES_PER_CALL = 24_000
MASK_SHARE = 1 / 32


def saved_scores(kv_heads: int, queries: int, span_tokens: int, visible_tokens: int) -> float:
    """Scores of a masked call that reading in segments saves, the addition of the mask counted as such too.

    queries: folded queries per KV head, ``H_q // H * T``. span_tokens: keys that a masked call would score, of which
    visible_tokens are visible.
    """
    return kv_heads * queries * (span_tokens - visible_tokens + span_tokens * MASK_SHARE)


def prefer_segments(kv_heads: int, queries: int, span_tokens: int, visible_tokens: int, num_segments: int) -> bool:
    """Whether segments are the faster read; the visible tokens lie in num_segments runs."""
    saved = saved_scores(kv_heads, queries, span_tokens, visible_tokens)
    return saved > SCORES_PER_CALL * (num_segments - 1) * torch.get_num_threads()
