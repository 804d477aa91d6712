"""Masked call, joined segments and lent slot, over the grid that ``ringkv.attention.rule`` was fitted to.

Command: ``python benchmarks/read_rule.py [threads ...]`` (a minute and a half for each number of threads; 1 and 2 by
default). Prints the median time of the masked read in microseconds, the interleaved ratios of the others to it, and
whether the rule takes the faster of masked and lent (a ratio within 10 % of 1 counts as either); then what several
values of its constant would lose.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from ringkv import RingKVLayerConfig
from ringkv.attention import rule
from ringkv.ring.view import LayerPass, RingView

HEADS = ((8, 4, 64), (6, 3, 32))  # query heads, KV heads, head dim
TOKENS = (4, 16, 64, 128)
WINDOWS = (16, 64)
READS = ("sdpa", "lent", "segments")
SECONDS_PER_POINT = 0.15
SLACK = 0.10
CONSTANTS = (0, 1_000, 2_000, 3_000, 4_000, 6_000, 8_000, 12_000, 24_000, 10**9)


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Mean time of one call."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def interleaved(calls: list[Callable[[], object]]) -> tuple[float, list[float]]:
    """Median seconds of the first call, and the medians of the ratios of neighbouring samples to it."""
    repeats = max(1, int(0.003 / max(seconds(call, 2) for call in calls)))
    samples: list[list[float]] = []
    end = time.perf_counter() + SECONDS_PER_POINT
    while time.perf_counter() < end or len(samples) < 5:
        samples.append([seconds(call, repeats) for call in calls])
    ratios = [statistics.median(row[i] / row[0] for row in samples) for i in range(len(calls))]
    return statistics.median(row[0] for row in samples), ratios


def loss(points: list[tuple[float, float, int]], constant: float) -> float:
    """How much longer reads take than the faster of both would, in the geometric mean, with this constant.

    points: lent time over masked time, scores that lending saves, threads.
    """
    excess = [
        math.log((lent if saved > constant * threads else 1.0) / min(1.0, lent)) for lent, saved, threads in points
    ]
    return math.expm1(statistics.mean(excess))


def main(threads: tuple[int, ...]) -> None:
    """Print the grid, then the losses."""
    agreed = 0
    points: list[tuple[float, float, int]] = []
    print("threads dtype    H_q H_kv  D    T  window  filled   masked us   lent  segments  rule")
    grid = itertools.product(threads, (torch.float32, torch.bfloat16), HEADS, TOKENS, WINDOWS, (1, 2, 3, 4))
    for count, dtype, (q_heads, kv_heads, dim), tokens, window, quarters in grid:
        torch.set_num_threads(count)
        capacity = (window + 1) * tokens
        kv = torch.randn(2, 1, kv_heads, capacity, dim).to(dtype)
        q = torch.randn(1, q_heads, tokens, dim).to(dtype)
        layer = RingKVLayerConfig(ring_frames=window, ring_buckets=window, pinned_dilation=1)
        clock = window * quarters // 4 if quarters < 4 else window + window // 2  # wrapped: the gap is in the middle
        view = RingView(layer, clock, tokens)
        flags = torch.ones(1, capacity, dtype=torch.bool)
        passes = [
            LayerPass(slice(0, 1), view, kv, flags, query_heads=q_heads, tokens_per_frame=tokens, attention=read)
            for read in READS
        ]
        masked_s, (_, lent, joined) = interleaved([partial(each.read, q, commit=False) for each in passes])
        shape = (kv_heads, q_heads // kv_heads * tokens, view.span[1] - view.span[0], view.visible_tokens)
        lends = rule.prefer_lent(*shape)
        points.append((lent, rule.saved_scores(*shape), count))
        right = abs(lent - 1) <= SLACK or lends == (lent < 1)
        agreed += right
        print(
            f"{count:7d} {str(dtype)[6:]:8s} {q_heads:3d} {kv_heads:4d} {dim:2d} {tokens:4d} {window:7d} "
            f"{quarters}/4 {masked_s * 1e6:14.0f} {lent:6.2f} {joined:9.2f}  "
            f"{'lent' if lends else 'masked'}{'' if right else '  (slower)'}"
        )
    print(f"the rule takes the faster read, or one within {SLACK:.0%} of it, in {agreed} of {len(points)} points")
    for constant in CONSTANTS:
        print(f"SCORES_PER_LOAN = {constant:6d}: {100 * loss(points, constant):5.2f} % over the faster read")


if __name__ == "__main__":
    main(tuple(map(int, sys.argv[1:])) or (1, 2))
