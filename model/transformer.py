"""The frame transformer: one pass over one frame for each of B rows, its past in an ``AttentionResource``.

Letters: B rows, L layers, C, H, W frame, T tokens per frame, d model width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import nn

from model.attention import Block, after_attend, before_attend, between
from model.config import MODULATIONS, ModelConfig
from model.layers import Conditioning, patchify, product, rms_norm, unpatchify, wide
from model.rope import rotation
from ringkv.resource import AttentionResource


class FrameTransformer(nn.Module):
    """Predicts the clean frame from a noised one. Weights are random, from ``seed`` alone, until others are loaded.

    The residual stream is at least fp32; the products of the blocks, and what goes into the cache, have the dtype of
    the weights (or of autocast).
    """

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        d = config.d_model
        self.patch_in = nn.Linear(config.patch_elements, d, bias=False)
        self.position = nn.Parameter(torch.empty(config.tokens_per_frame, d))
        self.noised_tag = nn.Parameter(torch.empty(d))
        self.conditioning = Conditioning(config)
        self.blocks = cast("Sequence[Block]", nn.ModuleList(Block(config) for _ in range(config.num_layers)))
        self.value_mix = nn.Parameter(torch.empty(config.num_layers - 1))
        self.head = nn.Linear(d, config.patch_elements)
        self.before_attend, self.between, self.after_attend = before_attend, between, after_attend
        # One attribute, so that threads that share a model never pair one's clocks with another's angles.
        self._rotated: tuple[tuple[list[int], torch.dtype], tuple[torch.Tensor, torch.Tensor]] | None = None
        if not self.position.is_meta:
            self.reset_parameters(seed)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Draw all weights anew. Products keep unit variance, gates open half-way and the head aims at [-1, 1]."""
        generator = torch.Generator(self.position.device).manual_seed(seed)

        def normal(weight: torch.Tensor, std: float) -> None:
            weight.normal_(0.0, std, generator=generator)

        def product(weight: torch.Tensor, gain: float = 1.0) -> None:
            normal(weight, gain / math.sqrt(weight.shape[-1]))

        product(self.patch_in.weight)
        normal(self.position, 0.5)
        normal(self.noised_tag, 0.5)
        conditioning = self.conditioning
        for linear in (conditioning.noise_in, conditioning.noise_out):
            product(linear.weight)
            linear.bias.zero_()
        normal(conditioning.action.weight, 1.0)
        product(conditioning.weight, 0.1)
        conditioning.bias.zero_()
        conditioning.bias.unflatten(-1, (MODULATIONS, -1))[:, (2, 5)] = 0.5
        for block in self.blocks:
            for weight in (block.qkv_weight, block.out_weight, block.up_weight, block.down_weight):
                product(weight)
            block.temperature.fill_(2.0)
        self.value_mix.fill_(0.5)
        product(self.head.weight, 0.5)
        self.head.bias.zero_()

    def forward(
        self,
        x: torch.Tensor,
        sigma: float,
        action: torch.Tensor,
        frame_pos: torch.Tensor,
        resource: AttentionResource,
        *,
        commit: bool,
    ) -> torch.Tensor:
        """The predicted clean frames ``[B, C, H, W]``, in at least fp32, of ``x`` ``[B, C, H, W]`` at noise ``sigma``.

        sigma: 0 to 1, the same for all rows. action: ``[B]`` int64, what led to this frame. frame_pos: ``[B]`` int64
        clocks. ``resource.attend`` is called once in every layer; ``commit`` makes this pass history. Raises
        ``ValueError`` before the cache is touched.
        """
        self._check(x, sigma, action, frame_pos)
        config = self.config
        modulations = self._modulations(sigma, action)
        cos, sin = self._rotation(frame_pos)
        hidden = self._embed(x, noised=sigma > 0)
        # Layer 0 mixes nothing in: a weight of 0 says so, and all layers run the same code on the same shapes.
        mix = torch.cat([self.value_mix.new_zeros(1), self.value_mix])
        first_v = torch.zeros(
            len(x), config.num_kv_heads, config.tokens_per_frame, config.head_dim, dtype=mix.dtype, device=x.device
        )
        blocks = self.blocks
        q, k, v = self.before_attend(
            hidden, modulations[0], cos, sin, first_v, mix[0], blocks[0].qkv_weight, blocks[0].temperature
        )
        first_v = v
        for layer, (block, after) in enumerate(pairwise(blocks)):
            hidden, q, k, v = self.between(
                hidden,
                resource.attend(q, k, v, layer, frame_pos, commit=commit),
                modulations[layer],
                block.out_weight,
                block.up_weight,
                block.down_weight,
                modulations[layer + 1],
                cos,
                sin,
                first_v,
                mix[layer + 1],
                after.qkv_weight,
                after.temperature,
            )
        attended, last = resource.attend(q, k, v, len(blocks) - 1, frame_pos, commit=commit), blocks[-1]
        hidden = self.after_attend(hidden, attended, modulations[-1], last.out_weight, last.up_weight, last.down_weight)
        weight, bias = self.head.weight, self.head.bias
        patches = product(rms_norm(hidden).to(weight.dtype), weight, bias).to(hidden.dtype)
        return unpatchify(patches, config.patch, config.grid)

    def _modulations(self, sigma: float, action: torch.Tensor) -> torch.Tensor:
        """``[L, B, 6, d]``: from the table when serving, computed where a gradient may be wanted."""
        if torch.is_grad_enabled():
            return self.conditioning(torch.full(action.shape, sigma, dtype=torch.float64, device=action.device), action)
        return self.conditioning.table(sigma).index_select(1, action)

    def _rotation(self, frame_pos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``rotation`` of the clocks; the passes of a frame share it where clocks can be read without waiting."""
        config, dtype = self.config, wide(self.position.dtype)
        if not frame_pos.is_cpu:
            return rotation(frame_pos, config.grid, config.head_dim, dtype)
        key, known = (frame_pos.tolist(), dtype), self._rotated
        if known is None or known[0] != key:
            with torch.inference_mode(False):  # kept, and so also read by a later pass that wants gradients
                known = self._rotated = key, rotation(frame_pos.clone(), config.grid, config.head_dim, dtype)
        return known[1]

    def _embed(self, x: torch.Tensor, *, noised: bool) -> torch.Tensor:
        """``[B, T, d]``, the start of the residual stream."""
        dtype = wide(self.position.dtype)
        tokens = product(patchify(x.to(self.patch_in.weight.dtype), self.config.patch), self.patch_in.weight)
        hidden = tokens.to(dtype) + self.position.to(dtype)
        return hidden + self.noised_tag.to(dtype) if noised else hidden

    def _check(self, x: torch.Tensor, sigma: float, action: torch.Tensor, frame_pos: torch.Tensor) -> None:
        config = self.config
        shape = (config.channels, config.height, config.width)
        if x.dim() != 4 or len(x) < 1 or tuple(x.shape[1:]) != shape or not x.is_floating_point():
            raise ValueError(f"x is {x.dtype} {list(x.shape)}: expected floating [B, {', '.join(map(str, shape))}]")
        if not 0 <= sigma <= 1:
            raise ValueError(f"sigma={sigma}: expected 0 to 1")
        for name, index in (("action", action), ("frame_pos", frame_pos)):
            if index.dtype != torch.int64 or tuple(index.shape) != (len(x),):
                raise ValueError(f"{name} is {index.dtype} {list(index.shape)}: expected int64 [{len(x)}]")
        if action.is_cpu:  # on an accelerator the gather checks; asking here would wait for the device
            bad = [value for value in action.tolist() if not 0 <= value < config.num_actions]
            if bad:
                raise ValueError(f"action={bad[0]}: expected 0 to {config.num_actions - 1}")


def compile_regions(model: FrameTransformer) -> None:
    """Compile the three functions around ``attend`` in place; ``attend`` itself stays eager.

    Each compiles once for a batch size, and ``between`` is shared by all layers; batch sizes are bucketed by who runs
    the model, so shapes are static.
    """
    model.before_attend = torch.compile(before_attend, fullgraph=True, dynamic=False)
    model.between = torch.compile(between, fullgraph=True, dynamic=False)
    model.after_attend = torch.compile(after_attend, fullgraph=True, dynamic=False)
