"""Every storage strategy by name, and a driver that lives frames through the contract alone.

What a strategy should have answered is worked out here from the content that was given and ``reference_history``, with
plain softmax; nothing is read out of a cache but what ``attend`` and ``get_state`` return.

Letters: B rows, L layers, T tokens per frame, H_q query heads, H KV heads, D head dim.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringkv import AttentionResource, EngineResourceInfo, KVConfig, KVSpec, RingKVConfig, RingKVLayerConfig
from ringkv.config import CatKVConfig, FullKVConfig, PagedKVConfig, ShiftKVConfig
from tests.ring_tools import PAD_TAG, Rows, dense_attention, reference_history, ring, step_of

MAX_FRAMES = 48
"""Frames that a preallocated or paged session has room for."""

Layers = Sequence[RingKVLayerConfig]
Content = Callable[[str, int, int, int], tuple[Tensor, Tensor, Tensor]]
"""(rid, frame, layer, variant) -> q [H_q, T, D], k and v [H, T, D]; variant 0 is what the committing pass gets."""


def _uncompacted(layers: Layers) -> tuple[RingKVLayerConfig, ...]:
    return tuple(
        ring(layer.ring_buckets, layer.pinned_dilation, layer.ring_buckets * layer.pinned_dilation) for layer in layers
    )


def _paged(window: Layers | None, common: dict[str, Any]) -> PagedKVConfig:
    page_tokens = common["tokens_per_frame"] + 1  # frames straddle pages
    pages = -(-MAX_FRAMES * common["tokens_per_frame"] // page_tokens)
    layers = None if window is None else tuple(window)
    return PagedKVConfig(layers=layers, page_tokens=page_tokens, num_pages=common["num_sessions"] * pages, **common)


@dataclass(frozen=True)
class Strategy:
    """config: of the given layers and the common values. windowed: sees the window, else every frame.

    reads: its paths, of which ``auto`` picks one.
    """

    config: Callable[[Layers, dict[str, Any]], KVConfig]
    windowed: bool = True
    reads: tuple[str, ...] = ("canonical", "sdpa")


STRATEGIES: dict[str, Strategy] = {
    "ring": Strategy(
        lambda layers, common: RingKVConfig(layers=tuple(layers), **common),
        reads=("canonical", "sdpa", "segments", "lent"),
    ),
    "ring_uncompacted": Strategy(
        lambda layers, common: RingKVConfig(layers=_uncompacted(layers), **common),
        reads=("canonical", "sdpa", "segments", "lent"),
    ),
    "paged_windowed": Strategy(_paged),
    "shift": Strategy(lambda layers, common: ShiftKVConfig(layers=tuple(layers), **common)),
    "cat": Strategy(lambda layers, common: CatKVConfig(layers=tuple(layers), **common)),
    "full_windowed": Strategy(lambda layers, common: FullKVConfig(layers=tuple(layers), **common)),
    "full_static_windowed": Strategy(
        lambda layers, common: FullKVConfig(layers=tuple(layers), max_frames=MAX_FRAMES, **common)
    ),
    "paged": Strategy(lambda layers, common: _paged(None, common), windowed=False),
    "full": Strategy(lambda layers, common: FullKVConfig(**common), windowed=False),
    "full_static": Strategy(lambda layers, common: FullKVConfig(max_frames=MAX_FRAMES, **common), windowed=False),
}
WINDOWED = tuple(name for name, strategy in STRATEGIES.items() if strategy.windowed)
UNBOUNDED = tuple(name for name, strategy in STRATEGIES.items() if not strategy.windowed)
EVERY_READ = tuple((name, read) for name, strategy in STRATEGIES.items() for read in strategy.reads)


def build(
    name: str,
    layers: Layers,
    *,
    tokens: int = 2,
    heads: int = 1,
    q_heads: int | None = None,
    head_dim: int = 64,
    sessions: int = 1,
    padding: bool = False,
    attention: str = "auto",
    dtype: torch.dtype = torch.float32,
    parking_dir: Path | None = None,
    **more: Any,
) -> AttentionResource:
    """A resource of strategy ``name``, built the way an engine builds it. What sees everything ignores the windows.

    more: fields that this strategy's config has beyond the common ones.
    """
    common = {
        "num_layers": len(layers),
        "num_kv_heads": heads,
        "num_qo_heads": q_heads or heads,
        "head_dim": head_dim,
        "tokens_per_frame": tokens,
        "num_sessions": sessions,
        "padding_session": padding,
        **more,
    }
    spec = KVSpec(resource_key="kv", config=STRATEGIES[name].config(layers, common))
    info = EngineResourceInfo(device="cpu", kv_dtype=dtype, attention=attention, parking_dir=parking_dir)
    return spec.resource_class.build(spec, info)


def history(name: str, layer: RingKVLayerConfig, frame: int) -> list[int]:
    """Frames that ``frame`` sees in a layer, itself not included."""
    if not STRATEGIES[name].windowed:
        return list(range(frame))
    return reference_history(layer.ring_buckets, layer.pinned_dilation, frame)


# -- content -------------------------------------------------------------------------------------------------


def normal(*shape: int, key: object) -> Tensor:
    """Standard normal numbers that depend on ``key`` alone."""
    return torch.randn(
        shape, generator=torch.Generator("cpu").manual_seed(zlib.crc32(repr(key).encode())), device="cpu"
    )


def random_content(resource: AttentionResource, seed: object = 0) -> Content:
    """Random q, k, v in fp32."""
    c = resource.config

    @cache
    def content(rid: str, frame: int, layer: int, variant: int) -> tuple[Tensor, Tensor, Tensor]:
        key = (seed, rid, frame, layer, variant)
        q = normal(c.num_qo_heads, c.tokens_per_frame, c.head_dim, key=(key, "q"))
        k = normal(c.num_kv_heads, c.tokens_per_frame, c.head_dim, key=(key, "k"))
        return q, k, normal(c.num_kv_heads, c.tokens_per_frame, c.head_dim, key=(key, "v"))

    return content


NOISE_DIMS = 4


def marked_content(resource: AttentionResource) -> Content:
    """q = 0, so all that is visible weighs the same, and v of token t of frame f the unit vector ``f * T + t``.

    Variant n > 0 has the unit vector n from the end. So an output tells which tokens were visible, and how often.
    """
    c = resource.config

    def content(rid: str, frame: int, layer: int, variant: int) -> tuple[Tensor, Tensor, Tensor]:
        v = torch.zeros(c.num_kv_heads, c.tokens_per_frame, c.head_dim, device="cpu")
        for token in range(c.tokens_per_frame):
            mark = c.head_dim - variant if variant else frame * c.tokens_per_frame + token
            assert variant or mark < c.head_dim - NOISE_DIMS
            v[:, token, mark] = 1.0
        q = torch.zeros(c.num_qo_heads, c.tokens_per_frame, c.head_dim, device="cpu")
        return q, normal(*v.shape, key=(rid, frame, variant)), v

    return content


def seen(out: Tensor, tokens: int) -> list[int]:
    """Frames in one row's output ``[H_q, T, D]`` of marked content, ascending, each whole and once."""
    weights = out[0, 0]
    assert torch.equal(out, weights.expand_as(out)), "heads or tokens of one frame see different things"
    marks = weights.nonzero().flatten().tolist()
    assert torch.allclose(weights[marks], torch.tensor(1 / len(marks)), atol=1e-6), "a token is seen twice"
    frames = sorted({mark // tokens for mark in marks})
    assert marks == [frame * tokens + token for frame in frames for token in range(tokens)], "part of a frame is seen"
    return frames


# -- the driver ----------------------------------------------------------------------------------------------


class Rollout:
    """A resource and what to feed it."""

    def __init__(self, name: str, layers: Layers, *, marked: bool = False, seed: object = 0, **geometry: Any) -> None:
        self.name, self.windows = name, tuple(layers)
        self.resource = build(name, layers, **geometry)
        self.content = marked_content(self.resource) if marked else random_content(self.resource, seed)

    def begin(self, rows: Rows, pads: int = 0) -> None:
        """Ingest if need be, admit, plan."""
        for rid, _ in rows:
            self.resource.ingest_request(rid)
        step, ctx = step_of(rows, pads)
        outcome = self.resource.admit(step, ctx)
        assert outcome.ok, outcome.reason
        self.resource.plan(step, ctx)

    def layer_pass(self, rows: Rows, layer: int, *, variant: int = 0, commit: bool = False, pads: int = 0) -> Tensor:
        """``attend`` in one layer: ``[B, H_q, T, D]`` of the real rows. Padding rows carry ``PAD_TAG`` at clock 0."""
        q, k, v = (
            torch.stack(batch)
            for batch in zip(*(self.content(rid, frame, layer, variant) for rid, frame in rows), strict=True)
        )
        if pads:
            q, k, v = (torch.cat([t, torch.full_like(t[:1], PAD_TAG).repeat(pads, 1, 1, 1)]) for t in (q, k, v))
        frame_pos = torch.tensor([*(frame for _, frame in rows), *([0] * pads)], dtype=torch.int64, device="cpu")
        return self.resource.attend(q, k, v, layer, frame_pos, commit=commit)[: len(rows)]

    def full_pass(self, rows: Rows, *, variant: int = 0, commit: bool = False, pads: int = 0) -> list[Tensor]:
        """``layer_pass`` in every layer."""
        return [
            self.layer_pass(rows, layer, variant=variant, commit=commit, pads=pads)
            for layer in range(len(self.windows))
        ]

    def finish(self, rows: Rows, pads: int = 0) -> None:
        """Commit."""
        self.resource.commit(*step_of(rows, pads))

    def drive(self, rows: Rows, *, noisy: int = 1, pads: int = 0) -> list[list[Tensor]]:
        """A frame's life. Outputs by pass, then layer; the committing pass last."""
        self.begin(rows, pads)
        out = [self.full_pass(rows, variant=1 + i, pads=pads) for i in range(noisy)]
        out.append(self.full_pass(rows, commit=True, pads=pads))
        self.finish(rows, pads)
        return out

    def stream(self, rid: str, frames: Sequence[int], *, noisy: int = 1) -> Iterator[list[list[Tensor]]]:
        """``drive`` of one request through ``frames``, frame by frame."""
        for frame in frames:
            yield self.drive([(rid, frame)], noisy=noisy)

    def run(self, rid: str, frames: Sequence[int], *, noisy: int = 1) -> list[Tensor]:
        """Outputs of the committing passes of layer 0, one ``[H_q, T, D]`` per frame."""
        return [out[-1][0][0] for out in self.stream(rid, frames, noisy=noisy)]

    def histories(self, rid: str, frames: Sequence[int], layer: int = 0) -> list[list[int]]:
        """What each frame of a marked stream saw in a layer, itself taken off."""
        out = []
        for frame, passes in zip(frames, self.stream(rid, frames), strict=True):
            tags = seen(passes[-1][layer][0], self.resource.config.tokens_per_frame)
            assert tags[-1:] == [frame], f"frame {frame} does not see itself last: {tags}"
            out.append(tags[:-1])
        return out

    def expected(self, rid: str, frame: int, layer: int, variant: int = 0, more: Sequence[int] = ()) -> Tensor:
        """``[H_q, T, D]`` fp64: dense attention of a pass over the frames it should see, and over ``more``."""
        dtype = self.resource.dtype
        q, k, v = self.content(rid, frame, layer, variant)
        past = sorted({*history(self.name, self.windows[layer], frame), *more})
        frames = [self.content(rid, old, layer, 0)[1:] for old in past] + [(k, v)]
        keys, values = (torch.cat([pair[i].to(dtype) for pair in frames], dim=1) for i in (0, 1))
        return dense_attention(q, keys, values)


def accepts(resource: AttentionResource, rid: str, frame: int) -> bool:
    """Whether ``rid`` is admitted at ``frame``; asking does not spend it, since a frame may be admitted again."""
    return resource.admit(*step_of([(rid, frame)])).ok


# -- what a resource holds -----------------------------------------------------------------------------------


def held_tensors(resource: AttentionResource) -> list[Tensor]:
    """Every tensor that can be reached from a resource, each once."""
    found: dict[int, Tensor] = {}
    visited: set[int] = set()

    def visit(value: object) -> None:
        if isinstance(value, Tensor):
            found[id(value)] = value
        elif id(value) not in visited:
            visited.add(id(value))
            if isinstance(value, dict):
                children = list(value.values())
            elif isinstance(value, list | tuple | set):
                children = list(value)
            else:
                children = list(getattr(value, "__dict__", {}).values())
            for child in children:
                visit(child)

    visit(resource)
    return list(found.values())


def kv_tensors(resource: AttentionResource) -> list[Tensor]:
    """Those that hold K or V: floating, with the head dim last."""
    head_dim = resource.config.head_dim
    return [t for t in held_tensors(resource) if t.is_floating_point() and t.dim() >= 3 and t.shape[-1] == head_dim]


def held_kv_bytes(resource: AttentionResource) -> int:
    """Bytes of the distinct storages behind them."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kv_tensors(resource)}
    return sum(size for address, size in storages.items() if address)


# -- tolerance -----------------------------------------------------------------------------------------------

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}


def assert_close(out: Tensor, expected: Tensor, v: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """``out`` within the read tolerance of ``dtype``, as a share of the largest value."""
    gap = (out.double() - expected).abs().max().item()
    assert gap <= TOLERANCE[dtype] * v.abs().max().item(), gap
