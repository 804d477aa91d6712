"""How much arithmetic a frame takes, from the geometry alone. No torch.

A multiply-add counts as two operations. Counted are the products with weights and the two products of attention, which
are all that grows with the model or with the past; norms, rotations, softmax and the conditioning, which serving looks
up in a table, are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from model.config import ModelConfig


def weight_flops(model: ModelConfig) -> int:
    """FLOP of one pass over one frame that go into products with weights."""
    d = model.d_model
    query, key_value = model.num_heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    block = d * (query + key_value) + query * d + 2 * model.mlp_ratio * d * d
    per_token = 2 * model.patch_elements * d + model.num_layers * block  # a patch goes in and a patch comes out
    return 2 * model.tokens_per_frame * per_token


def attention_flops(model: ModelConfig, visible_tokens: Sequence[int]) -> int:
    """FLOP of one pass over one frame that go into scores and weighted values.

    visible_tokens: in each layer, the tokens that a query attends to, its own frame's included. A read that computes
    hidden scores too, to mask them, does more than is counted.
    """
    if len(visible_tokens) != model.num_layers:
        raise ValueError(f"visible_tokens={list(visible_tokens)}: expected {model.num_layers} counts, one per layer")
    return 4 * model.num_heads * model.head_dim * model.tokens_per_frame * sum(visible_tokens)


def pass_flops(model: ModelConfig, visible_tokens: Sequence[int]) -> int:
    """FLOP of one pass over one frame; ``visible_tokens`` as in ``attention_flops``."""
    return weight_flops(model) + attention_flops(model, visible_tokens)
