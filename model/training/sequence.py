"""The served model over whole sequences: every frame denoised against the clean history that a ring would show it.

A sequence of T + 1 frames goes through as 2 T frames: clean ones 0 to T - 1, as their committing pass at sigma 0 writes
them, and noised ones 1 to T, as their denoise passes see them. A clean frame attends to itself and to the clean frames
that ``visible_frames`` names at its clock, a noised one to itself and to those of the same clock, which are strictly
earlier. Blocks, conditioning, rotation and embedding are the served ones, run over all frames at once as rows.

Frames are kept in the order ``clean 0, noised 1, clean 1, noised 2, ..., noised T``: both frames of a clock lie side by
side, and one product serves their common history.

Letters: B sequences, T frames, F frames in a row of queries, K tokens per frame, H query heads, D head dim, d width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from model.layers import patchify, rms_norm, unpatchify, wide
from model.rope import rotation
from model.training.attention import HistoryGroup, history_attention
from model.transformer import FrameTransformer
from ringkv import RingKVLayerConfig, visible_frames


@dataclass(frozen=True, eq=False)
class Sequences:
    """What a training step shows the model.

    clean: ``[B, T, C, H, W]``, frames 0 to T - 1 as history holds them. noised: ``[B, T, C, H, W]``, frames 1 to T.
    sigma: ``[B, T]``, noise level of each noised frame. actions: ``[B, T + 1]`` int64, what led to each frame. start:
    the clock of frame 0; nothing before it was committed.
    """

    clean: torch.Tensor
    noised: torch.Tensor
    sigma: torch.Tensor
    actions: torch.Tensor
    start: int


def history_of(layer: RingKVLayerConfig, start: int, length: int) -> list[list[int]]:
    """For frames 0 to ``length`` of a sequence that begins at clock ``start``: the earlier frames that each may see."""
    return [
        [seen - start for seen in visible_frames(layer, start + frame) if seen >= start] for frame in range(length + 1)
    ]


class SequenceModel(nn.Module):
    """Runs a ``FrameTransformer`` over sequences, with gradients; holds nothing but the model.

    products: dtype of the blocks' products; None: that of the weights. Attention is in that of the weights, because the
    CPU's backward pass of bf16 attention takes fifteen times as long as fp32 (PyTorch 2.13, frames of 16 tokens).
    """

    def __init__(self, model: FrameTransformer, products: torch.dtype | None = None) -> None:
        super().__init__()
        self.model, self._products = model, products

    def forward(self, batch: Sequences, layers: Sequence[RingKVLayerConfig]) -> torch.Tensor:
        """Predicted clean frames 1 to T: ``[B, T, C, H, W]``. layers: the ring of each layer."""
        model, config = self.model, self.model.config
        rows, length = batch.clean.shape[:2]
        frames = _side_by_side(batch.clean, batch.noised)
        sigma = _side_by_side(torch.zeros_like(batch.sigma), batch.sigma).flatten()
        action = _side_by_side(batch.actions[:, :-1], batch.actions[:, 1:]).flatten()
        clock = torch.arange(length, device=frames.device) + batch.start
        clocks = _side_by_side(clock[None], clock[None] + 1).expand(rows, -1).flatten()

        modulations = model.conditioning(sigma, action)
        cos, sin = rotation(clocks, config.grid, config.head_dim, wide(model.position.dtype))
        hidden = self._embed(frames.flatten(0, 1), sigma)
        mix = torch.cat([model.value_mix.new_zeros(1), model.value_mix])
        first_v = mix.new_zeros(len(hidden), config.num_kv_heads, config.tokens_per_frame, config.head_dim)
        for index, block in enumerate(model.blocks):
            modulation = modulations[index]
            qkv_weight, *weights = (self._in_products(weight) for weight in block.matrices())
            q, k, v = (
                heads.to(first_v.dtype)
                for heads in model.before_attend(
                    hidden, modulation, cos, sin, first_v, mix[index], qkv_weight, block.temperature
                )
            )
            if index == 0:
                first_v = v
            q, k, v = (heads.unflatten(0, (rows, -1)) for heads in (q, k, v))
            seen = history_of(layers[index], batch.start, length)
            history = k[:, ::2], v[:, ::2]
            if index + 1 < len(model.blocks):
                groups = [HistoryGroup(2 * c - 1, min(2 * c + 1, 2 * length), seen[c]) for c in range(1, length + 1)]
            else:  # nothing reads what the clean frames become after the last layer
                groups = [HistoryGroup(c - 1, c, seen[c]) for c in range(1, length + 1)]
                q, k, v = q[:, 1::2], k[:, 1::2], v[:, 1::2]
                hidden, modulation = (x.unflatten(0, (rows, -1))[:, 1::2].flatten(0, 1) for x in (hidden, modulation))
            attended = self._in_products(history_attention(q, k, v, *history, groups))
            hidden = model.after_attend(hidden, attended.flatten(0, 1), modulation, *weights)
        patches = model.head(rms_norm(hidden).to(model.head.weight.dtype)).to(hidden.dtype)
        return unpatchify(patches, config.patch, config.grid).unflatten(0, (rows, -1))

    def _in_products(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._products is None else x.to(self._products)

    def _embed(self, frames: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        model = self.model
        dtype = wide(model.position.dtype)
        tokens = model.patch_in(patchify(frames.to(model.patch_in.weight.dtype), model.config.patch))
        tag = (sigma > 0).to(dtype)[:, None, None] * model.noised_tag.to(dtype)
        return tokens.to(dtype) + model.position.to(dtype) + tag


def _side_by_side(clean: torch.Tensor, noised: torch.Tensor) -> torch.Tensor:
    """``[B, T, ...]`` twice to ``[B, 2 T, ...]``: clean 0, noised 1, clean 1, noised 2, ..."""
    return torch.stack([clean, noised], dim=2).flatten(1, 2)
