"""One transformer block: two pure functions with the cache's ``attend`` between them, and the two in one, ``between``.

Everything that a function reads is an argument, weights and the value-residual lambda included, so that one compiled
version of each serves every layer, and the eager and the compiled model run the same code.

Letters: B rows, H_q query heads, H KV heads, T tokens per frame, D head dim, d model width.
"""

from __future__ import annotations

import torch
from torch import nn

from model.config import ModelConfig
from model.layers import mlp, modulate, product, rms_norm
from model.rope import rotate


class Block(nn.Module):
    """Weights of one block. ``qkv_weight`` ``[(H_q + 2 H) * D, d]`` is fused: rows of q, then of k, then of v."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, query = config.d_model, config.num_heads * config.head_dim
        key_value = 2 * config.num_kv_heads * config.head_dim
        self.qkv_weight = nn.Parameter(torch.empty(query + key_value, d))
        self.temperature = nn.Parameter(torch.empty(config.num_heads))
        self.out_weight = nn.Parameter(torch.empty(d, query))
        self.up_weight = nn.Parameter(torch.empty(config.mlp_ratio * d, d))
        self.down_weight = nn.Parameter(torch.empty(d, config.mlp_ratio * d))

    def matrices(self) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter, nn.Parameter]:
        """The weights of its products, in the order in which they are used."""
        return self.qkv_weight, self.out_weight, self.up_weight, self.down_weight


def before_attend(
    x: torch.Tensor,
    modulation: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    first_v: torch.Tensor,
    value_mix: torch.Tensor,
    qkv_weight: torch.Tensor,
    temperature: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q ``[B, H_q, T, D]``, k and v ``[B, H, T, D]``, contiguous, ready for the cache, in the dtype of the products.

    x: ``[B, T, d]``. modulation: ``[B, 6, d]``. cos, sin: ``[B, 1, T, D / 2]``. first_v: ``[B, H, T, D]``, layer 0's V
    before its lerp. value_mix: scalar, the weight of ``first_v``; layer 0 passes 0. temperature: ``[H_q]``, folded into
    q, because the cache's softmax has a fixed scale.
    """
    shift, scale = modulation[:, 0], modulation[:, 1]
    kv_heads, head_dim = first_v.shape[1], first_v.shape[3]
    qkv = product(modulate(x, shift, scale).to(qkv_weight.dtype), qkv_weight)
    query_heads = len(temperature)
    qk, v = qkv.unflatten(-1, (-1, head_dim)).transpose(1, 2).split([query_heads + kv_heads, kv_heads], dim=1)
    # Norm and rotation once for q and k together: on a CPU each is a run of small operators.
    gain = torch.cat([temperature, temperature.new_ones(kv_heads)])
    qk = rotate(rms_norm(qk) * gain[:, None, None], cos, sin).to(qkv.dtype)
    q, k = (heads.contiguous() for heads in qk.split([query_heads, kv_heads], dim=1))
    v = torch.lerp(v.contiguous(), first_v.to(v.dtype), value_mix.to(v.dtype))
    return q, k, v


def after_attend(
    x: torch.Tensor,
    attended: torch.Tensor,
    modulation: torch.Tensor,
    out_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
) -> torch.Tensor:
    """The block's output ``[B, T, d]`` from its input x and what attention returned, ``[B, H_q, T, D]``."""
    _, _, attention_gate, shift, scale, mlp_gate = modulation.unbind(1)
    merged = attended.transpose(1, 2).flatten(2)
    x = x + attention_gate[:, None] * product(merged, out_weight)
    return x + mlp_gate[:, None] * mlp(modulate(x, shift, scale).to(up_weight.dtype), up_weight, down_weight)


def between(
    x: torch.Tensor,
    attended: torch.Tensor,
    modulation: torch.Tensor,
    out_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    next_modulation: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    first_v: torch.Tensor,
    value_mix: torch.Tensor,
    qkv_weight: torch.Tensor,
    temperature: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """From what one layer's attention returned to the next one's q, k, v: the residual stream, then those.

    ``after_attend`` of a block and ``before_attend`` of the next, whose arguments come last. One function, because
    entering a compiled one costs as much as a small operator or ten.
    """
    x = after_attend(x, attended, modulation, out_weight, up_weight, down_weight)
    return x, *before_attend(x, next_modulation, cos, sin, first_v, value_mix, qkv_weight, temperature)
