"""Any rollout recomputed densely and without a cache: what the served model must equal.

To predict frame p the oracle runs the network over all frames 0 ... p at once, from the pixels up, under a mask that
says which frames each layer lets a frame see. Frames before p are there as their committing passes saw them, clean at
sigma 0; frame p is there at the noise of the moment, and nothing looks at it but itself. Nothing is kept from frame to
frame, so there is nothing that could be stale, overwritten or misplaced.

Depth relays history: a layer's keys were computed from hidden states that had already looked back. The dense pass
repeats that exactly, which recomputing the visible window alone would not.

Shared with the served model: the weights, by name; ``visible_frames``; and ``frame_noise``, which is an input of a
rollout like its actions, not something that serving computes. The rest is written here a second time, plainly: patches
by unfolding, rotation by complex numbers, norms, modulation, softmax, Euler steps. Everything runs in the weights'
dtype, fp32 or fp64.

Letters: N frames, T tokens per frame, H_q query heads, H KV heads, D head dim, d model width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from model.config import ModelConfig
from model.sampler import frame_noise
from ringkv.config import RingKVLayerConfig
from ringkv.horizon import visible_frames

Weights = Mapping[str, Tensor]


@torch.no_grad()
def rollout(
    weights: Weights,
    config: ModelConfig,
    layers: Sequence[RingKVLayerConfig],
    context: Tensor,
    actions: Tensor,
    *,
    seed: int,
    stream: int,
    sigmas: Sequence[float],
) -> Tensor:
    """All frames ``[N, C, H, W]`` of one rollout: ``context`` ``[n, C, H, W]``, then what the model makes of it.

    weights: ``state_dict`` of a ``FrameTransformer``. layers: ring geometry of each layer. actions: ``[N]`` int64,
    entry f leading to frame f. sigmas: noise levels, the last one 0.
    """
    frames = context.to(weights["position"].dtype)
    for frame in range(len(context), len(actions)):
        shape = (config.channels, config.height, config.width)
        x = sigmas[0] * frame_noise(seed, stream, frame, 0, shape, frames.dtype)
        for sigma, next_sigma in pairwise(sigmas):
            clean = dense_pass(weights, config, layers, torch.cat([frames, x[None]]), actions[: frame + 1], sigma)[-1]
            velocity = (x - clean) / sigma
            x = x + (next_sigma - sigma) * velocity
        frames = torch.cat([frames, x[None]])
    return frames


def dense_pass(
    weights: Weights,
    config: ModelConfig,
    layers: Sequence[RingKVLayerConfig],
    frames: Tensor,
    actions: Tensor,
    last_sigma: float,
) -> Tensor:
    """Predicted clean frames ``[N, C, H, W]``: the last of ``frames`` at noise ``last_sigma``, the others at 0."""
    count = len(frames)
    sigmas = [0.0] * (count - 1) + [last_sigma]
    side = math.isqrt(config.height * config.width // config.tokens_per_frame)
    x = _patches(frames, side) @ weights["patch_in.weight"].T + weights["position"]
    if last_sigma > 0:
        x[-1] += weights["noised_tag"]
    turns = _turns(count, config.height // side, config.width // side, config.head_dim)
    condition = torch.stack([_condition(weights, s, a) for s, a in zip(sigmas, actions.tolist(), strict=True)])
    first_values = None
    for index, layer in enumerate(layers):
        shared = len(weights["conditioning.weight"]) == 1
        matrix, bias = weights["conditioning.weight"][0 if shared else index], weights["conditioning.bias"][index]
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = (condition @ matrix.T + bias)[:, None].chunk(6, dim=-1)

        block = {name: weights[f"blocks.{index}.{name}"] for name in _BLOCK_WEIGHTS}
        q, k, v = _qkv(_norm(x) * (1 + scale_a) + shift_a, block, config)
        q = _turned(_norm(q) * block["temperature"][:, None], turns)
        k = _turned(_norm(k), turns)
        if first_values is None:
            first_values = v
        else:
            share = weights["value_mix"][index - 1]
            v = (1 - share) * v + share * first_values
        x = x + gate_a * (_attention(q, k, v, _mask(layer, count)) @ block["out_weight"].T)

        hidden = (_norm(x) * (1 + scale_m) + shift_m) @ block["up_weight"].T
        x = x + gate_m * (_silu(hidden) @ block["down_weight"].T)
    patches = _norm(x) @ weights["head.weight"].T + weights["head.bias"]
    return _frames(patches, side, config.height, config.width)


_BLOCK_WEIGHTS = ("qkv_weight", "temperature", "out_weight", "up_weight", "down_weight")


def _patches(frames: Tensor, side: int) -> Tensor:
    """``[N, C, H, W]`` to ``[N, T, C * side * side]``."""
    return torch.nn.functional.unfold(frames, side, stride=side).transpose(1, 2)


def _frames(patches: Tensor, side: int, height: int, width: int) -> Tensor:
    """The inverse of ``_patches``."""
    return torch.nn.functional.fold(patches.transpose(1, 2), (height, width), side, stride=side)


def _norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()


def _silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def _condition(weights: Weights, sigma: float, action: int) -> Tensor:
    """``[d]``, of one frame."""
    dtype = weights["position"].dtype
    names = ("noise_in.weight", "noise_in.bias", "noise_out.weight", "noise_out.bias", "action.weight")
    w_in, b_in, w_out, b_out, actions = (weights[f"conditioning.{name}"] for name in names)
    features = torch.tensor([math.cos(math.pi * k * sigma) for k in range(w_in.shape[1])], dtype=dtype)
    return _silu(w_out @ _silu(w_in @ features + b_in) + b_out + actions[action])


def _turns(count: int, rows: int, columns: int, head_dim: int) -> Tensor:
    """``[N, T, 1, D / 2]`` complex128 of modulus 1: by how much each pair of a head is turned."""
    quarter, half = head_dim // 8, head_dim // 4
    table = [
        [
            [column / 100 ** (j / quarter) for j in range(quarter)]
            + [row / 100 ** (j / quarter) for j in range(quarter)]
            + [frame / 100 ** (j / half) for j in range(half)]
            for row in range(rows)
            for column in range(columns)
        ]
        for frame in range(count)
    ]
    return torch.exp(1j * torch.tensor(table, dtype=torch.float64))[:, :, None]


def _turned(heads: Tensor, turns: Tensor) -> Tensor:
    """``[N, T, H, D]``: elements i and i + D / 2 as one complex number, turned; computed in fp64."""
    real, imaginary = heads.double().chunk(2, dim=-1)
    turned = torch.complex(real, imaginary) * turns
    return torch.cat([turned.real, turned.imag], dim=-1).to(heads.dtype)


def _qkv(x: Tensor, block: Weights, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """``[N, T, heads, D]`` each."""
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = (x @ block["qkv_weight"].T).split([query, key_value, key_value], dim=-1)
    q, k, v = (part.reshape(*part.shape[:2], -1, config.head_dim) for part in parts)
    return q, k, v


def _mask(layer: RingKVLayerConfig, count: int) -> Tensor:
    """``[N, N]`` bool: row f is True at the frames that frame f attends to, itself included."""
    mask = torch.eye(count, dtype=torch.bool)
    for frame in range(count):
        mask[frame, visible_frames(layer, frame)] = True
    return mask


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """``[N, T, H_q * D]``: explicit softmax over every token of every frame that ``mask`` leaves visible."""
    count, tokens, heads, dim = q.shape
    allowed = mask.repeat_interleave(tokens, dim=0).repeat_interleave(tokens, dim=1)
    outputs = []
    for head in range(heads):
        source = head // (heads // k.shape[2])
        queries, keys, values = (
            t.reshape(count * tokens, dim) for t in (q[:, :, head], k[:, :, source], v[:, :, source])
        )
        scores = (queries @ keys.T / math.sqrt(dim)).masked_fill(~allowed, -math.inf)
        weights = (scores - scores.amax(dim=-1, keepdim=True)).exp()
        outputs.append(weights @ values / weights.sum(dim=-1, keepdim=True))
    return torch.stack(outputs, dim=1).reshape(count, tokens, heads * dim)
