"""Masked call against joined segments, over the grid that ``ringkv.attention.rule`` was fitted to.

Command: ``python benchmarks/read_rule.py [threads ...]`` (a minute for each number of threads; 1 and 2 by default).
Prints the median time of both reads in microseconds, their interleaved ratio, and whether the rule takes the faster one
(a ratio within 10 % of 1 counts as either); then what several values of its constant would lose.
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

from ringkv.attention import paths, rule

HEADS = ((8, 4, 64), (6, 3, 32))  # query heads, KV heads, head dim
TOKENS = (4, 16, 64, 128)
WINDOWS = (16, 64)
SECONDS_PER_POINT = 0.12
SLACK = 0.10
CONSTANTS = (0, 2_000, 4_000, 6_000, 8_000, 10_000, 12_000, 16_000, 24_000, 48_000, 10**9)


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Mean time of one call."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def interleaved(a: Callable[[], object], b: Callable[[], object]) -> tuple[float, float, float]:
    """Median seconds of both calls and the median of the ratios b / a of neighbouring samples."""
    repeats = max(1, int(0.003 / max(seconds(a, 2), seconds(b, 2))))
    samples: list[tuple[float, float]] = []
    end = time.perf_counter() + SECONDS_PER_POINT
    while time.perf_counter() < end or len(samples) < 5:
        samples.append((seconds(a, repeats), seconds(b, repeats)))
    first, second = zip(*samples, strict=True)
    return statistics.median(first), statistics.median(second), statistics.median(y / x for x, y in samples)


def loss(points: list[tuple[float, float, float, int]], constant: float) -> float:
    """How much longer reads take than the faster of both would, in the geometric mean, with this constant.

    points: masked seconds, segments' seconds, scores that segments save, threads.
    """
    excess = [
        math.log((joined if saved > constant * threads else masked) / min(masked, joined))
        for masked, joined, saved, threads in points
    ]
    return math.expm1(statistics.mean(excess))


def main(threads: tuple[int, ...]) -> None:
    """Print the grid, then the losses."""
    agreed = 0
    points: list[tuple[float, float, float, int]] = []
    print("threads dtype    H_q H_kv  D    T  window  filled   masked us  segments us  ratio  rule")
    grid = itertools.product(threads, (torch.float32, torch.bfloat16), HEADS, TOKENS, WINDOWS, (1, 2, 3, 4))
    for count, dtype, (q_heads, kv_heads, dim), tokens, window, quarters in grid:
        torch.set_num_threads(count)
        capacity = (window + 1) * tokens
        k, v = torch.randn(2, 1, kv_heads, capacity, dim).to(dtype).unbind(0)
        q = torch.randn(1, q_heads, tokens, dim).to(dtype)
        if quarters == 4:  # wrapped, the slot in the middle about to be overwritten
            gap = (window // 2 * tokens, (window // 2 + 1) * tokens)
        else:
            gap = (window * quarters // 4 * tokens, window * tokens)
        segments = [(0, gap[0]), (gap[1], capacity)]
        bias = torch.zeros(capacity, dtype=dtype)
        bias[gap[0] : gap[1]] = float("-inf")
        keys, values = ([buffer[:, :, lo:hi] for lo, hi in segments] for buffer in (k, v))

        masked_s, joined_s, ratio = interleaved(
            partial(paths.masked, q, k, v, bias), partial(paths.segments, q, keys, values)
        )
        queries, visible = q_heads // kv_heads * tokens, capacity - (gap[1] - gap[0])
        split = rule.prefer_segments(kv_heads, queries, capacity, visible, 2)
        points.append((masked_s, ratio * masked_s, rule.saved_scores(kv_heads, queries, capacity, visible), count))
        right = abs(ratio - 1) <= SLACK or split == (ratio < 1)
        agreed += right
        print(
            f"{count:7d} {str(dtype)[6:]:8s} {q_heads:3d} {kv_heads:4d} {dim:2d} {tokens:4d} {window:7d} "
            f"{quarters}/4 {masked_s * 1e6:14.0f} {joined_s * 1e6:12.0f} {ratio:6.2f}  "
            f"{'segments' if split else 'masked'}{'' if right else '  (slower)'}"
        )
    print(f"the rule takes the faster read, or one within {SLACK:.0%} of it, in {agreed} of {len(points)} points")
    for constant in CONSTANTS:
        print(f"SCORES_PER_CALL = {constant:6d}: {100 * loss(points, constant):5.2f} % over the faster read")


if __name__ == "__main__":
    main(tuple(map(int, sys.argv[1:])) or (1, 2))
