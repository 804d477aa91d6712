"""Which fast read to take on the CPU: one masked call over a span, or one unmasked call per contiguous segment.

Both compute the same scores; what differs is the work. A masked call also scores the hidden tokens of its span and
adds the mask, about a thirty-second of its work; every segment after the first costs one more call and its share of
the join. So segments win once the scores they save outweigh their calls.

Measured with ``benchmarks/read_rule.py`` on two cores of an AMD EPYC 7003 (AVX2), PyTorch 2.13, fp32 and bf16, head dim
32 and 64, 4 to 256 tokens per frame, windows of 16 and 64 frames, filling and wrapped: one extra call costs what 24,000
scores do on one thread and twice that on two, since only the scores are shared between threads. At 16 tokens per frame
a wrapped ring is faster masked (segments take 1.1 to 1.6 times as long), from 64 up it is faster in segments (0.91 to
1.0); while a ring of 64 or more tokens per frame fills, segments take 0.25 to 0.9 of the masked time.
"""

from __future__ import annotations

import torch

SCORES_PER_CALL = 24_000
MASK_SHARE = 1 / 32


def prefer_segments(kv_heads: int, queries: int, span_tokens: int, visible_tokens: int, num_segments: int) -> bool:
    """Whether segments are the faster read.

    queries: folded queries per KV head, ``H_q // H * T``. span_tokens: keys that a masked call would score;
    visible_tokens of them are visible, in num_segments runs.
    """
    saved_scores = kv_heads * queries * (span_tokens - visible_tokens + span_tokens * MASK_SHARE)
    return saved_scores > SCORES_PER_CALL * (num_segments - 1) * torch.get_num_threads()
