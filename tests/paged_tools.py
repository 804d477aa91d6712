"""Tools for tests of the paged cache: builders, a frame's life through ``attend`` alone, marks that can be read back.

A marked frame has K = 0 and, for its token t, V = the unit vector ``frame * T + t``. Under any query the softmax is
then uniform over what is visible, so the output names every visible token, once each, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ringkv import AttentionResource, EngineResourceInfo, KVSpec, RingKVLayerConfig
from ringkv.config import PagedKVConfig
from ringkv.paged.cache import LayerPagedCache
from ringkv.paged.manager import PagedKVManager
from tests.ring_tools import PAD_TAG, Rows, clocks, step_of

PATHS = ("canonical", "auto")
Windows = Sequence[RingKVLayerConfig] | None

LayerPayload = Callable[[str, int, int], tuple[Tensor, Tensor]]
"""(rid, frame, layer) -> K and V, each [H, T, D]."""


def build_paged(
    layers: Windows,
    *,
    page_tokens: int = 4,
    num_pages: int = 64,
    attention: str = "auto",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **changes: Any,
) -> PagedKVManager:
    """A manager, built the way an engine builds it: one head, T=2, D=2, S=1 unless changed."""
    values: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 2, "num_qo_heads": 1, "tokens_per_frame": 2}
    values |= {"num_sessions": 1, "num_layers": 1 if layers is None else len(layers)} | changes
    config = PagedKVConfig(
        layers=None if layers is None else tuple(layers), page_tokens=page_tokens, num_pages=num_pages, **values
    )
    spec = KVSpec(resource_key="kv", config=config)
    manager = spec.resource_class.build(spec, EngineResourceInfo(device=device, kv_dtype=dtype, attention=attention))
    assert isinstance(manager, PagedKVManager)
    return manager


def mark(manager: AttentionResource, frame: int) -> tuple[Tensor, Tensor]:
    """K and V of a marked frame, each [H, T, D]."""
    config = manager.config
    tokens, dim = config.tokens_per_frame, config.head_dim
    v = torch.eye(dim)[frame * tokens : (frame + 1) * tokens].expand(config.num_kv_heads, tokens, dim)
    return torch.zeros_like(v), v


def marked_frames(manager: AttentionResource, out: Tensor) -> list[int]:
    """Frames that an output row [H_q, T, D] shows, ascending; each must be whole, and all tokens weigh the same."""
    tokens = manager.config.tokens_per_frame
    names = sorted(out[0, 0].nonzero().flatten().tolist())
    frames = sorted({name // tokens for name in names})
    assert names == [frame * tokens + t for frame in frames for t in range(tokens)], names
    expected = torch.zeros_like(out[0, 0])
    expected[names] = 1 / len(names)
    torch.testing.assert_close(out, expected.expand_as(out), rtol=1e-5, atol=1e-7)
    return frames


def begin(manager: AttentionResource, rows: Rows, pads: int = 0) -> None:
    """Ingest, admit and plan."""
    for rid, _ in rows:
        manager.ingest_request(rid)
    step, ctx = step_of(rows, pads)
    outcome = manager.admit(step, ctx)
    assert outcome.ok, outcome.reason
    manager.plan(step, ctx)


def one_pass(
    manager: AttentionResource,
    rows: Rows,
    *,
    commit: bool,
    payload: LayerPayload | None = None,
    q: Tensor | None = None,
    pads: int = 0,
    layers: Sequence[int] | None = None,
) -> list[Tensor]:
    """One attend in every layer (or in ``layers``); frames are marked and queries zero unless given."""
    config = manager.config
    if q is None:
        q = torch.zeros(config.num_qo_heads, config.tokens_per_frame, config.head_dim)
    queries = q.expand(len(rows) + pads, *q.shape[-3:])
    frame_pos = clocks(*(frame for _, frame in rows), *([0] * pads))
    pad = torch.full((config.num_kv_heads, config.tokens_per_frame, config.head_dim), PAD_TAG)
    outputs = []
    for layer in range(config.num_layers) if layers is None else layers:
        pairs = [payload(rid, frame, layer) if payload else mark(manager, frame) for rid, frame in rows]
        k, v = (torch.stack([*kept, *[pad] * pads]) for kept in zip(*pairs, strict=True))
        outputs.append(manager.attend(queries, k, v, layer, frame_pos, commit=commit))
    return outputs


def drive(manager: AttentionResource, rows: Rows, *, noisy_passes: int = 1, **kwargs: Any) -> list[Tensor]:
    """A frame's whole life; what the committing pass put out, per layer. Denoise passes carry the pad's content."""
    begin(manager, rows, kwargs.get("pads", 0))
    config = manager.config
    noise = torch.full((config.num_kv_heads, config.tokens_per_frame, config.head_dim), -PAD_TAG)
    for _ in range(noisy_passes):
        one_pass(manager, rows, commit=False, **{**kwargs, "payload": lambda rid, frame, layer: (noise, noise)})
    out = one_pass(manager, rows, commit=True, **kwargs)
    manager.commit(*step_of(rows, kwargs.get("pads", 0)))
    return out


def run(manager: AttentionResource, rid: str, frames: range, **kwargs: Any) -> list[Tensor]:
    """Drive one request alone; what its frames put out in every layer, flat."""
    return [out for frame in frames for out in drive(manager, [(rid, frame)], **kwargs)]


def random_payload(manager: AttentionResource, dtype: torch.dtype = torch.float32) -> LayerPayload:
    """K and V drawn from (rid, frame, layer)."""
    config = manager.config
    shape = (2, config.num_kv_heads, config.tokens_per_frame, config.head_dim)

    def payload(rid: str, frame: int, layer: int) -> tuple[Tensor, Tensor]:
        seed = sum(map(ord, rid)) * 100_003 + frame * 101 + layer
        k, v = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        return k, v

    return payload


def owned_tokens(layer: LayerPagedCache, session: int) -> list[int]:
    """Token slots of a session's pages, in logical order, read from the table's entries alone."""
    first, end = layer.table.owned(session)
    size, row = layer.table.page_tokens, layer.table.entries[session].tolist()
    return [row[page % len(row)] * size + t for page in range(first, end) for t in range(size)]


def storage_of(manager: PagedKVManager) -> list[Any]:
    """A copy of everything that a refused call must leave alone."""
    layers = [(layer.kv.clone(), layer.table.entries.clone(), layer.table.pool.num_free) for layer in manager.layers]
    return [layers, manager.num_free_sessions]
