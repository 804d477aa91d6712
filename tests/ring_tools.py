"""Tools for ring tests: tagged frames that can be read back, and drivers that live a frame's whole life.

Nothing here is taken from the package under test beyond its public calls. ``reference_history`` is the tests' own
statement of which frames are visible (a dict and a loop); ``dense_attention`` is plain softmax in fp64.

Tagged data, D=2: token t of frame f has K = (f+1, t) and V = (-(f+1), t), exact in bf16 for f <= 255; KV head h adds
16*h to the second component. So every (frame, token, head) can be read back from what the cache returns.

Letters: B rows, S sessions, R buckets, d dilation, T tokens per frame, H KV heads, D head dim.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ringkv import (
    EngineResourceInfo,
    FrameStep,
    KVSpec,
    LayerRingCache,
    RingKVConfig,
    RingKVLayerConfig,
    RingKVManager,
    StepContext,
)

READ_PATHS = ("canonical", "sdpa", "segments", "lent", "auto")
PAD_TAG = 777.0
HEAD_TAG = 16.0

Rows = Sequence[tuple[str, int]]
Payload = Callable[[int, int], tuple[Tensor, Tensor]]
"""(row, frame) -> K and V of that row, each [H, T, D]."""


# -- geometry ------------------------------------------------------------------------------------------------


def ring(buckets: int, dilation: int = 1, frames: int | None = None) -> RingKVLayerConfig:
    """Layer geometry; ``frames`` slots are allocated, as many as are addressed unless given."""
    return RingKVLayerConfig(ring_frames=frames or buckets, ring_buckets=buckets, pinned_dilation=dilation)


def ring_config(layers: Sequence[RingKVLayerConfig], **changes: Any) -> RingKVConfig:
    """One-head config with T=2, D=2, S=1 unless changed."""
    values: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 2, "num_qo_heads": 1, "tokens_per_frame": 2}
    values |= {"num_sessions": 1} | changes
    return RingKVConfig(num_layers=len(layers), layers=tuple(layers), **values)


def build_manager(
    layers: Sequence[RingKVLayerConfig],
    *,
    attention: str = "auto",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **changes: Any,
) -> RingKVManager:
    """A manager, built the way an engine builds it."""
    spec = KVSpec(resource_key="kv", config=ring_config(layers, **changes))
    manager = spec.resource_class.build(spec, EngineResourceInfo(device=device, kv_dtype=dtype, attention=attention))
    assert isinstance(manager, RingKVManager)
    return manager


def build_layer(
    buckets: int,
    dilation: int = 1,
    *,
    frames: int | None = None,
    tokens: int = 2,
    sessions: int = 1,
    heads: int = 1,
    head_dim: int = 2,
    dtype: torch.dtype = torch.float32,
) -> LayerRingCache:
    """One layer's cache on the CPU."""
    return LayerRingCache(sessions, heads, frames or buckets, buckets, head_dim, tokens, dilation, dtype, "cpu")


# -- tagged data ---------------------------------------------------------------------------------------------


def tagged(
    frame: int, tokens: int = 2, heads: int = 1, dtype: torch.dtype = torch.float32, tag: float | None = None
) -> tuple[Tensor, Tensor]:
    """K and V of one frame, each [H, T, 2]; ``tag`` replaces f + 1."""
    value = float(frame + 1) if tag is None else tag
    second = torch.arange(tokens, dtype=dtype).expand(heads, tokens) + HEAD_TAG * torch.arange(heads)[:, None]
    k = torch.stack([torch.full_like(second, value), second], dim=-1).to(dtype)
    return k, k * torch.tensor([-1.0, 1.0], dtype=dtype)


def stacked(rows: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Rows of (K, V) as one layer-level input [2, 1, H, B*T, D]."""
    k = torch.cat([k for k, _ in rows], dim=1)
    v = torch.cat([v for _, v in rows], dim=1)
    return torch.stack([k, v])[:, None]


def clocks(*values: int) -> Tensor:
    """[B] int64."""
    return torch.tensor(values, dtype=torch.int64)


def write_tagged(
    cache: LayerRingCache, frame: int, *, commit: bool, session: int = 0, tokens: int = 2, tag: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Upsert one tagged frame of one session."""
    kv = stacked([tagged(frame, tokens, cache.kv.shape[2], cache.kv.dtype, tag)])
    return cache.upsert(kv, clocks(frame), commit, clocks(session))


def read_tags(k: Tensor, v: Tensor, visible: Tensor, tokens: int = 2) -> list[int]:
    """Frames (own one included) at the True positions of one visibility row, ascending.

    Every frame must be there once, with all its tokens in all heads and with the V that belongs to its K.
    """
    keys, values = k[0, :, visible].float(), v[0, :, visible].float()  # [H, N, 2]
    heads = keys.shape[0]
    assert torch.equal(values[..., 0], -keys[..., 0]), "a V that belongs to another K"
    assert torch.equal(values[..., 1], keys[..., 1]), "a V that belongs to another K"
    found = [(int(frame) - 1, int(token)) for frame, token in keys[0].tolist()]
    assert len(set(found)) == len(found), f"a token is visible twice: {sorted(found)}"
    frames = sorted({frame for frame, _ in found})
    assert sorted(found) == [(frame, token) for frame in frames for token in range(tokens)], sorted(found)
    for head in range(1, heads):
        shift = torch.tensor([0.0, HEAD_TAG * head])
        assert torch.equal(keys[head], keys[0] + shift), "heads disagree"
    return frames


def seen(k: Tensor, v: Tensor, visible: Tensor, frame: int, tokens: int = 2) -> list[int]:
    """History frames of one visibility row: its frames minus the own one, which must be there, with T tokens."""
    frames = read_tags(k, v, visible, tokens)
    assert frames[-1:] == [frame], f"frame {frame} does not see itself last: {frames}"
    return frames[:-1]


def slot_tags(cache: LayerRingCache, session: int = 0) -> list[int]:
    """First K component (head 0, token 0) of each slot of a session, scratch last."""
    low, high = cache.session_span(session)
    tokens = (high - low) // (slots_of(cache, session))
    return [int(value) for value in cache.kv[0, 0, 0, low:high:tokens, 0].tolist()]


def slots_of(cache: LayerRingCache, session: int = 0) -> int:
    """Slots of one session, scratch included."""
    low, high = cache.session_span(session)
    return (high - low) // cache.tokens_per_frame


# -- specification and oracle --------------------------------------------------------------------------------


def reference_history(buckets: int, dilation: int, frame: int) -> list[int]:
    """Frames that ``frame`` sees, by playing the stream into a dict of slots."""
    slots: dict[int, int] = {}
    for committed in range(0, frame, dilation):
        slots[(committed // dilation) % buckets] = committed
    if frame % dilation == 0:
        slots.pop((frame // dilation) % buckets, None)
    return sorted(slots.values())


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention in fp64. q [H_q, T, D], k and v [H, N, D] of the visible tokens; query head h reads h // G."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[0] // k.shape[0]
    out = []
    for head in range(q.shape[0]):
        scores = q[head] @ k[head // group].T / q.shape[-1] ** 0.5
        out.append(torch.softmax(scores, dim=-1) @ v[head // group])
    return torch.stack(out)


# -- a frame's life ------------------------------------------------------------------------------------------


def step_of(rows: Rows, pads: int = 0) -> tuple[FrameStep, StepContext]:
    """The step and context of these (rid, frame) rows, padded by ``pads`` dummy rids that nobody registered."""
    rids = tuple(rid for rid, _ in rows)
    padded = (*rids, *(f"pad-{i}" for i in range(pads))) if pads else None
    return FrameStep(frames=tuple(rows)), StepContext(request_ids=rids, padded_request_ids=padded)


def batch(rows: Rows, payload: Payload, pads: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """K and V [B, H, T, D] and clocks [B] of a step; padding rows carry ``PAD_TAG`` at clock 0."""
    pairs = [payload(row, frame) for row, (_, frame) in enumerate(rows)]
    pairs += [(torch.full_like(pairs[0][0], PAD_TAG), torch.full_like(pairs[0][1], PAD_TAG))] * pads
    frame_pos = clocks(*(frame for _, frame in rows), *([0] * pads))
    return torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs]), frame_pos


def begin(manager: RingKVManager, rows: Rows, pads: int = 0) -> None:
    """Admit and plan."""
    step, ctx = step_of(rows, pads)
    outcome = manager.admit(step, ctx)
    assert outcome.ok, outcome.reason
    manager.plan(step, ctx)


def finish(manager: RingKVManager, rows: Rows, pads: int = 0) -> None:
    """Commit."""
    manager.commit(*step_of(rows, pads))


def tagged_payload(manager: RingKVManager, tag: float | None = None) -> Payload:
    """Tagged frames in the geometry of ``manager``."""
    config = manager.config
    return lambda row, frame: tagged(frame, config.tokens_per_frame, config.num_kv_heads, manager.dtype, tag)


def write_pass(
    manager: RingKVManager, rows: Rows, *, commit: bool, payload: Payload | None = None, pads: int = 0
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """One upsert in every layer; what each returned."""
    k, v, frame_pos = batch(rows, payload or tagged_payload(manager), pads)
    return [manager.upsert(k, v, i, frame_pos, commit=commit) for i in range(len(manager.layers))]


def drive(
    manager: RingKVManager,
    rows: Rows,
    *,
    payload: Payload | None = None,
    noisy_passes: int = 1,
    pads: int = 0,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Admit, plan, denoise passes with tag 99, committing pass, commit. What the committing pass's upserts returned."""
    begin(manager, rows, pads)
    for _ in range(noisy_passes):
        write_pass(manager, rows, commit=False, payload=tagged_payload(manager, 99.0), pads=pads)
    out = write_pass(manager, rows, commit=True, payload=payload, pads=pads)
    finish(manager, rows, pads)
    return out


def run_stream(manager: RingKVManager, rid: str, frames: Iterable[int], **kwargs: Any) -> list[list[list[int]]]:
    """Drive one request through ``frames``; what each frame saw, per layer."""
    manager.ingest_request(rid)
    histories = []
    for frame in frames:
        out = drive(manager, [(rid, frame)], **kwargs)
        histories.append([seen(k, v, visible, frame, manager.tokens_per_frame) for k, v, visible in out])
    return histories


def accepts(manager: RingKVManager, rid: str, frame: int) -> bool:
    """Whether ``rid`` is admitted at ``frame``. It may be admitted there again, so asking spends nothing."""
    return manager.admit(*step_of([(rid, frame)])).ok


# -- bytes ---------------------------------------------------------------------------------------------------


def bytes_of(manager: RingKVManager) -> list[tuple[Tensor, Tensor]]:
    """A copy of every layer's storage and flags."""
    return [(layer.kv.clone(), layer.written.clone()) for layer in manager.layers]


def same_bytes(left: Any, right: Any) -> bool:
    """Whether two nests of tensors, sequences, dicts and plain values are equal bit by bit (NaN equals itself)."""
    if isinstance(left, Tensor):
        if not isinstance(right, Tensor) or left.shape != right.shape or left.dtype != right.dtype:
            return False
        return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_bytes(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(same_bytes(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


def session_bytes_of(manager: RingKVManager, session: int) -> list[tuple[Tensor, Tensor]]:
    """A copy of one session's storage and flags, scratch included, in every layer."""
    out = []
    for layer in manager.layers:
        low, high = layer.session_span(session)
        out.append((layer.kv[:, :, :, low:high].clone(), layer.written[low:high].clone()))
    return out


def deep_copy(state: dict[str, Any]) -> dict[str, Any]:
    """An independent copy of a state."""
    return copy.deepcopy(state)
