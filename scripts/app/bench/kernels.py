"""The bare kernels that a model step cannot do without, each in the fastest form that this machine has."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from model.config import ModelConfig
from model.layers import product
from model.transformer import FrameTransformer
from ringkv.attention.paths import fold
from ringkv.config import RingKVConfig
from ringkv.horizon import visible_frames
from scripts.app.bench.sampling import faster

Call = Callable[[], object]


def attention_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    """One attention call of q ``[B, H_q, T, D]`` over k and v ``[B, H, n, D]``, queries grouped or folded."""
    folded = fold(q, k.shape[1])

    def grouped_queries() -> object:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def folded_queries() -> object:
        return F.scaled_dot_product_attention(folded, k, v)

    calls = (grouped_queries, folded_queries)
    return calls[faster(calls)]


def product_kernel(x: torch.Tensor, weight: torch.Tensor) -> Call:
    """One product of x with ``weight``, by the library in their dtype or as the model does it."""

    def in_dtype() -> object:
        return F.linear(x, weight)

    def as_the_model() -> object:
        return product(x, weight)

    calls = (in_dtype, as_the_model)
    return calls[faster(calls)]


class FrameKernels:
    """Every product and every attention call of one frame of ``rows`` sessions at one clock, and nothing else.

    Products run on the model's own weights, attention over as many keys as the clock shows, contiguous.
    """

    def __init__(self, model: FrameTransformer, ring: RingKVConfig, rows: int) -> None:
        self._model, self._ring, self._rows = model, ring, rows
        self._passes = len(model.config.sigmas)
        self._attention: dict[int, Call] = {}
        self._products = [product_kernel(self._input(weight), weight) for weight in product_weights(model)]

    @torch.no_grad()
    def run(self, clock: int) -> None:
        """All kernels of the frame at ``clock``, pass after pass."""
        attention = [self._attention_over(tokens) for tokens in visible_tokens(self._ring, clock)]
        for _ in range(self._passes):
            for call in self._products:
                call()
            for call in attention:
                call()

    def prepare(self, clock: int) -> None:
        """Build what ``run`` needs at ``clock``, so that it is not timed."""
        for tokens in visible_tokens(self._ring, clock):
            self._attention_over(tokens)

    def _attention_over(self, tokens: int) -> Call:
        if tokens not in self._attention:
            config: ModelConfig = self._model.config
            dtype = self._model.position.dtype
            q = torch.randn(self._rows, config.num_heads, config.tokens_per_frame, config.head_dim).to(dtype)
            k, v = torch.randn(2, self._rows, config.num_kv_heads, tokens, config.head_dim).to(dtype).unbind(0)
            self._attention[tokens] = attention_kernel(q, k, v)
        return self._attention[tokens]

    def _input(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.randn(self._rows, self._model.config.tokens_per_frame, weight.shape[1]).to(weight.dtype)


def product_weights(model: FrameTransformer) -> list[torch.Tensor]:
    """The weights that one pass multiplies with, in order; the conditioning is looked up in a table."""
    blocks = [
        weight
        for block in model.blocks
        for weight in (block.qkv_weight, block.out_weight, block.up_weight, block.down_weight)
    ]
    return [each.detach() for each in (model.patch_in.weight, *blocks, model.head.weight)]


def visible_tokens(ring: RingKVConfig, clock: int) -> list[int]:
    """Tokens that a frame at ``clock`` attends to in each layer, its own included."""
    return [(len(visible_frames(layer, clock)) + 1) * ring.tokens_per_frame for layer in ring.layers]
