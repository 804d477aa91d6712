"""What registering the ring's write costs per call: plain Python, the low-level registration, a ``custom_op``.

Command: ``python benchmarks/op_cost.py``. One thread, one row, a non-committing pass of 16 tokens, 4 KV heads, head dim
64; interleaved, medians of the samples in microseconds. The bodies are the same, so the differences are the dispatch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from ringkv.ring import ops
from ringkv.ring.cache import LayerRingCache

SAMPLES, CALLS = 60, 200


@torch.library.custom_op("ringkv_bench::ring_write", mutates_args=("kv", "written", "commits"))
def custom_write(
    kv: torch.Tensor,
    written: torch.Tensor,
    commits: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    frame_pos: torch.Tensor,
    session_idx: torch.Tensor,
    commit: bool,
    ring_frames: int,
    ring_buckets: int,
    pinned_dilation: int,
) -> None:
    """The same body behind ``torch.library.custom_op``."""
    ops.write_on_host(
        kv, written, commits, k, v, frame_pos, session_idx, commit, ring_frames, ring_buckets, pinned_dilation
    )


def main() -> None:
    """Print the medians."""
    torch.set_num_threads(1)
    cache = LayerRingCache(2, 4, 16, 16, 64, 16, 1, torch.float32, "cpu")
    k, v = torch.randn(2, 1, 4, 16, 64).unbind(0)
    args = (cache.kv, cache.written, cache.commits, k, v, torch.tensor([5]), torch.tensor([1]), False, 16, 16, 1)
    calls: dict[str, Callable[[], object]] = {
        "plain Python body": lambda: ops.write_on_host(*args),
        "ops.ring_write (resolved once)": lambda: ops.ring_write(*args),
        "torch.ops.ringkv.ring_write (looked up)": lambda: torch.ops.ringkv.ring_write(*args),
        "custom_op": lambda: custom_write(*args),
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(SAMPLES):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            samples[name].append((time.perf_counter() - start) / CALLS * 1e6)
    base = statistics.median(samples["plain Python body"])
    for name, values in samples.items():
        median = statistics.median(values)
        print(f"{name:42s} {median:6.1f} us  dispatch {median - base:+5.1f} us")


if __name__ == "__main__":
    main()
