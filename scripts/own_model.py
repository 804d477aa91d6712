"""A transformer that knows nothing of ``model/``, on ringkv: the whole of what bringing your own model takes.

    python scripts/own_model.py

It predicts each frame of a token video from a learned start frame and its past. The only call into the library on the
forward path is ``attend``; around it, one admit, plan and commit per frame. Everything above ``rollout`` is yours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ringkv import EngineResourceInfo, FrameStep, KVSpec, RingKVConfig, RingKVLayerConfig, StepContext

LAYERS, HEADS, KV_HEADS, HEAD_DIM, TOKENS, DIM = 2, 4, 2, 16, 8, 64
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    """Pre-norm attention and MLP; ``attend`` stands where ``scaled_dot_product_attention`` stood."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)  # [B, heads, T, D]
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class FrameModel(nn.Module):
    """Maps the tokens of one frame ``[B, T, DIM]`` at clock ``p`` to those of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, TOKENS, DIM))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor, attend: Callable[[int], Attend]) -> Tensor:
        for layer, block in enumerate(self.blocks):
            x = block(x, attend(layer))
        return x


@torch.no_grad()
def rollout(model: FrameModel, num_frames: int, ring_frames: int) -> tuple[Tensor, int]:
    """``num_frames`` frames ``[num_frames, T, DIM]`` and the cache's bytes, which do not depend on ``num_frames``."""
    layer = RingKVLayerConfig(ring_frames=ring_frames, ring_buckets=ring_frames)
    config = RingKVConfig(
        num_layers=LAYERS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        num_qo_heads=HEADS,
        tokens_per_frame=TOKENS,
        num_sessions=1,
        layers=(layer,) * LAYERS,
    )
    spec = KVSpec(resource_key="kv", config=config)
    cache = spec.resource_class.build(spec, EngineResourceInfo(device="cpu", kv_dtype=torch.float32))
    cache.ingest_request("mine")
    ctx, x, frames = StepContext(request_ids=("mine",)), model.start, []
    for frame in range(num_frames):
        step, frame_pos = FrameStep(frames=(("mine", frame),)), torch.tensor([frame])
        outcome = cache.admit(step, ctx)
        if not outcome.ok:
            raise RuntimeError(outcome.reason)
        cache.plan(step, ctx)
        x = model(x, lambda i, p=frame_pos: lambda q, k, v: cache.attend(q, k, v, i, p, commit=True))
        cache.commit(step, ctx)
        frames.append(x[0])
    return torch.stack(frames), cache.memory_bytes()


def main(argv: list[str]) -> int:
    """Roll out past the ring and say what it took."""
    if argv:
        print(f"own_model.py takes no arguments: {' '.join(argv)}", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    frames, kv_bytes = rollout(FrameModel(), num_frames=40, ring_frames=8)
    print(f"{len(frames)} frames through a ring of 8: {kv_bytes:,} bytes of KV, the same at every frame")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
