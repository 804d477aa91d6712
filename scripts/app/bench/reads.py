"""Levels ``reads`` and ``peers``: what a cache adds to bare attention, frame by frame, without a model around it.

Letters: B rows, H_q query heads, H KV heads, T tokens per frame, D head dim.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any, Literal

import torch

from ringkv import AttentionResource, EngineResourceInfo, FrameStep, KVConfig, KVSpec, RingKVConfig, StepContext
from ringkv.config import CatKVConfig, HFSlidingKVConfig, PagedKVConfig, RingKVLayerConfig, ShiftKVConfig
from ringkv.horizon import horizon_frames
from ringkv.ring.manager import RingKVManager
from scripts.app.bench.check import Bench
from scripts.app.bench.kernels import Call, attention_kernel, visible_tokens
from scripts.app.bench.sampling import Budget, Clock, interleave
from scripts.app.build import torch_dtype
from scripts.app.compare_stats import paired_ratio

QUERY_HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
DENOISE_PASSES = 4
HELD_FROM_S = 200e-6
LONG_FRAME_S = 0.25
AT_MOST = 80

Fill = Literal["filling", "wrapped"]


@dataclass(frozen=True)
class ReadPoint:
    """One point of the grid. window: frames of a ring. sessions: rows of a step, all at one clock."""

    tokens_per_frame: int
    window: int
    sessions: int
    dtype: str
    fill: Fill
    dilation: int
    threads: int

    @property
    def layer(self) -> RingKVLayerConfig:
        """Its one layer."""
        return RingKVLayerConfig(ring_frames=self.window, ring_buckets=self.window, pinned_dilation=self.dilation)

    @property
    def clocks(self) -> tuple[int, int | None]:
        """First and last clock that is measured: the middle half of a filling ring, or one turn after it is full on."""
        horizon = horizon_frames(self.layer)
        return (horizon // 4, 3 * horizon // 4) if self.fill == "filling" else (horizon + 1, None)


def read_points(bench: Bench) -> list[ReadPoint]:
    """The grid, cheap points first: what they leave of their time goes to the dear ones."""
    grid = bench.config.grid
    fills: tuple[Fill, ...] = ("filling", "wrapped")
    points = [
        ReadPoint(tokens, window, sessions, dtype, fill, dilation, threads)
        for tokens, window, sessions, dtype, fill, dilation, threads in itertools.product(
            grid.tokens,
            grid.windows,
            grid.sessions,
            grid.dtypes,
            fills,
            dict.fromkeys((1, bench.config.dilation)),
            grid.threads,
        )
    ]
    return sorted(points, key=lambda p: p.tokens_per_frame**2 * p.window * p.sessions)


class CacheFrames:
    """Frames of ``sessions`` requests through a one-layer resource, with random content and no model.

    A frame has ``denoise`` passes and a committing one; where it has fewer than four of the former, each counts for as
    many as it stands for.
    """

    def __init__(self, resource: AttentionResource, sessions: int, clock: Clock = time.perf_counter) -> None:
        self.resource = resource
        self.denoise = DENOISE_PASSES
        self.frame = 0
        self._clock = clock
        self._rids = tuple(f"session-{index}" for index in range(sessions))
        config, dtype = resource.config, resource.dtype
        shape = (sessions, config.tokens_per_frame, config.head_dim)
        self.q, self.k, self.v = (
            torch.randn(shape[0], heads, *shape[1:]).to(dtype)
            for heads in (config.num_qo_heads, config.num_kv_heads, config.num_kv_heads)
        )
        for rid in self._rids:
            resource.ingest_request(rid)

    def run(self, *, whole: bool) -> float:
        """Seconds of the next frame: of its calls of ``attend``, or of its whole life from ``plan`` to ``commit``."""
        step, ctx = self._step()
        outcome = self.resource.admit(step, ctx)
        assert outcome.ok, outcome.reason
        start = self._clock()
        self.resource.plan(step, ctx)
        planned = self._clock()
        position = torch.full((len(self._rids),), self.frame, dtype=torch.int64)
        seconds = 0.0
        for commit in (*[False] * self.denoise, True):
            begun = self._clock()
            self.resource.attend(self.q, self.k, self.v, 0, position, commit=commit)
            seconds += (self._clock() - begun) * (1 if commit else DENOISE_PASSES // self.denoise)
        read = self._clock()
        self.resource.commit(step, ctx)
        self.frame += 1
        return seconds + (planned - start + self._clock() - read if whole else 0.0)

    def skip_to(self, frame: int) -> None:
        """Commit frames without measuring them; of a ring by writes alone. Starts anew to go back."""
        if frame < self.frame:
            for rid in self._rids:
                self.resource.reset_request(rid)
            self.frame = 0
        while self.frame < frame:
            step, ctx = self._step()
            assert self.resource.admit(step, ctx).ok
            self.resource.plan(step, ctx)
            position = torch.full((len(self._rids),), self.frame, dtype=torch.int64)
            if isinstance(self.resource, RingKVManager):
                self.resource.upsert(self.k, self.v, 0, position, commit=True, build_visibility=False)
            else:
                self.resource.attend(self.q, self.k, self.v, 0, position, commit=True)
            self.resource.commit(step, ctx)
            self.frame += 1

    def _step(self) -> tuple[FrameStep, StepContext]:
        frames = tuple((rid, self.frame) for rid in self._rids)
        return FrameStep(frames=frames), StepContext(request_ids=self._rids)


class Floor:
    """The same frame's attention over exactly the visible keys, contiguous, without a cache."""

    def __init__(self, frames: CacheFrames, ring: RingKVConfig, clock: Clock = time.perf_counter) -> None:
        self._frames, self._ring, self._clock = frames, ring, clock
        self._tokens = 0
        self._call: Call = lambda: None

    def prepare(self, frame: int) -> None:
        """Build and warm what ``run`` needs for the frame at clock ``frame``."""
        (tokens,) = visible_tokens(self._ring, frame)
        if tokens != self._tokens:
            q = self._frames.q
            shape = (2, len(q), self._ring.num_kv_heads, tokens, self._ring.head_dim)
            k, v = torch.randn(shape).to(q.dtype).unbind(0)
            self._tokens, self._call = tokens, attention_kernel(q, k, v)

    def run(self) -> float:
        """Seconds of all passes of the frame."""
        passes = self._frames.denoise + 1
        start = self._clock()
        for _ in range(passes):
            self._call()
        return (self._clock() - start) * (DENOISE_PASSES + 1) / passes


def measure_point(point: ReadPoint, *, budget_s: float, at_least: int, seed: int) -> dict[str, Any]:
    """A row of the level ``reads``; seconds are of one pass of all sessions."""
    torch.set_num_threads(point.threads)
    config = _kv_config(RingKVConfig, point.tokens_per_frame, point.layer, point.sessions)
    assert isinstance(config, RingKVConfig)
    frames = CacheFrames(_build(config, point.dtype, "auto"), point.sessions)
    floor = Floor(frames, config)
    first, last = point.clocks
    frames.skip_to(first)
    floor.prepare(first)
    if max(floor.run(), frames.run(whole=False)) > LONG_FRAME_S:
        frames.denoise = 1
    seconds: dict[str, list[float]] = {"ring": [], "floor": []}
    budget = Budget(budget_s)
    while len(seconds["ring"]) < at_least or (len(seconds["ring"]) < AT_MOST and budget.left_s > 0):
        if last is not None and frames.frame >= last:
            frames.skip_to(first)
        floor.prepare(frames.frame)
        if len(seconds["ring"]) % 2:
            seconds["floor"].append(floor.run())
            seconds["ring"].append(frames.run(whole=False))
        else:
            seconds["ring"].append(frames.run(whole=False))
            seconds["floor"].append(floor.run())
    floor_s = median(seconds["floor"]) / (DENOISE_PASSES + 1)
    return asdict(point) | {
        "floor_s": floor_s,
        "ring_s": median(seconds["ring"]) / (DENOISE_PASSES + 1),
        "held": floor_s >= HELD_FROM_S,
        "denoise_passes_timed": frames.denoise,
        "samples_s": seconds,
        "ratio": paired_ratio(seconds["ring"], seconds["floor"], seed=seed),
    }


def measure_reads(bench: Bench, budget: Budget) -> Iterator[dict[str, Any]]:
    """Rows of the level ``reads``."""
    points = read_points(bench)
    for index, point in enumerate(points):
        share = budget.share_s(len(points) - index)
        yield measure_point(point, budget_s=share, at_least=bench.at_least, seed=bench.config.seed)


def _kv_config(
    kind: Callable[..., KVConfig], tokens: int, layer: RingKVLayerConfig, sessions: int, **more: Any
) -> KVConfig:
    return kind(
        num_layers=1,
        num_kv_heads=KV_HEADS,
        num_qo_heads=QUERY_HEADS,
        head_dim=HEAD_DIM,
        tokens_per_frame=tokens,
        num_sessions=sessions,
        layers=(layer,),
        **more,
    )


def _build(config: KVConfig, dtype: str, attention: str) -> AttentionResource:
    spec = KVSpec(resource_key="kv", config=config)
    return spec.resource_class.build(
        spec, EngineResourceInfo(device="cpu", kv_dtype=torch_dtype(dtype), attention=attention)
    )


# -- peers -------------------------------------------------------------------------------------------------------


PEERS: Mapping[str, tuple[Callable[..., KVConfig], tuple[str, ...]]] = {
    "ring": (RingKVConfig, ("auto", "sdpa", "segments", "lent")),
    "shift": (ShiftKVConfig, ("sdpa",)),
    "cat": (CatKVConfig, ("sdpa",)),
    "paged_windowed": (PagedKVConfig, ("sdpa",)),
    "hf_sliding": (HFSlidingKVConfig, ("sdpa",)),
}
"""Ways of keeping the window, and the reads of each, of which the fastest counts."""

PAGE_TOKENS = 16


def measure_peers(bench: Bench, budget: Budget) -> Iterator[dict[str, Any]]:
    """Rows of the level ``peers``: one for each of a few points of the grid, local layers, wrapped, one session."""
    grid = bench.config.grid
    points = [
        ReadPoint(tokens, window, 1, dtype, "wrapped", 1, 1)
        for tokens, window, dtype in itertools.product(grid.tokens, grid.windows, grid.dtypes)
        if tokens * window <= 2048  # beyond, all that counts is attention itself
    ]
    for index, point in enumerate(points):
        yield _measure_peers_at(point, bench, budget.share_s(len(points) - index))


def _measure_peers_at(point: ReadPoint, bench: Bench, budget_s: float) -> dict[str, Any]:
    torch.set_num_threads(point.threads)
    peers = {name: peer for name, peer in PEERS.items() if name != "hf_sliding" or find_spec("transformers")}
    lanes: dict[str, CacheFrames] = {}
    for name, (kind, reads) in peers.items():
        pool: dict[str, Any] = {}
        if kind is PagedKVConfig:
            pages = -(-(point.window + 1) * point.tokens_per_frame // PAGE_TOKENS) + 1
            pool = {"page_tokens": PAGE_TOKENS, "num_pages": pages}
        config = _kv_config(kind, point.tokens_per_frame, point.layer, 1, **pool)
        for read in reads:
            lanes[f"{name}/{read}"] = lane = CacheFrames(_build(config, point.dtype, read), 1)
            lane.skip_to(point.clocks[0])
            lane.run(whole=True)
    seconds = interleave(
        {name: partial(lane.run, whole=True) for name, lane in lanes.items()},
        budget_s=budget_s,
        at_least=bench.at_least,
        at_most=AT_MOST,
    )
    best: dict[str, str] = {}
    for name, (_, reads) in peers.items():
        medians = {read: median(seconds[f"{name}/{read}"]) for read in reads}
        best[name] = min(medians, key=medians.__getitem__)
    times = {name: seconds[f"{name}/{read}"] for name, read in best.items()}
    return asdict(point) | {
        "best_read": best,
        "frame_s": {name: median(values) for name, values in times.items()},
        "samples_s": times,
        "ratios": {name: paired_ratio(times[name], times["ring"], seed=bench.config.seed) for name in times},
    }
