"""The small parts: norm, modulation, patches, and the conditioning on noise level and action.

Letters: B rows, L layers, T tokens per frame, A actions.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from model.config import MODULATIONS, NOISE_FEATURES, ModelConfig

NORM_EPS = 1e-6
MAX_TABLES = 16
# False on a CPU without bf16 instructions (AVX-512, or Arm's), as oneDNN sees it.
_NATIVE_BF16 = not torch.backends.mkldnn.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of norms, embeddings and the residual stream: ``dtype``, at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    """``x`` over its root mean square along the last axis, in at least fp32; no gain."""
    return F.rms_norm(x.to(wide(x.dtype)), (x.shape[-1],), eps=NORM_EPS)


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``x`` ``[B, T, d]`` normed, then scaled and shifted by ``[B, d]`` each."""
    return torch.addcmul(shift[:, None], rms_norm(x), 1 + scale[:, None])


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``F.linear`` in the dtype of the weights.

    A CPU without bf16 instructions takes bf16 operands to fp32 and rounds the result once, as those instructions do:
    its own bf16 product takes five to ten times as long (two cores of an AMD EPYC 7003, widths 160 to 640).
    """
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or _NATIVE_BF16:
        return F.linear(x, weight, bias)
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(weight.dtype)


def mlp(x: torch.Tensor, up_weight: torch.Tensor, down_weight: torch.Tensor) -> torch.Tensor:
    """SiLU MLP without biases."""
    return product(F.silu(product(x, up_weight)), down_weight)


def patchify(frames: torch.Tensor, patch: int) -> torch.Tensor:
    """``[B, C, H, W]`` frames to ``[B, T, C * patch * patch]`` patches, row-major over the frame."""
    return rearrange(frames, "b c (h p) (w q) -> b (h w) (c p q)", p=patch, q=patch)


def unpatchify(patches: torch.Tensor, patch: int, grid: tuple[int, int]) -> torch.Tensor:
    """The inverse of ``patchify``; ``grid`` is rows and columns of patches."""
    return rearrange(patches, "b (h w) (c p q) -> b c (h p) (w q)", h=grid[0], w=grid[1], p=patch, q=patch).contiguous()


class Conditioning(nn.Module):
    """Six modulations for every layer, from noise level and action: ``W silu(noise MLP(sigma) + action) + bias``.

    A rollout meets few (sigma, action) pairs, so serving reads them from a table: per step it costs one gather in place
    of a product with the largest matrices outside the MLPs.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d = config.d_model
        matrices = 1 if config.shared_modulation else config.num_layers
        self.noise_in = nn.Linear(NOISE_FEATURES, d)
        self.noise_out = nn.Linear(d, d)
        self.action = nn.Embedding(config.num_actions, d)
        self.weight = nn.Parameter(torch.empty(matrices, MODULATIONS * d, d))
        self.bias = nn.Parameter(torch.empty(config.num_layers, MODULATIONS * d))
        self._tables: dict[float, torch.Tensor] = {}
        self._stamp: list[tuple[int, int, torch.dtype]] = []
        self._stamped: list[torch.Tensor] = []

    def forward(self, sigma: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """``[L, B, 6, d]`` modulations of ``[B]`` noise levels and int64 actions; at least fp32, under autocast too."""
        dtype = wide(self.weight.dtype)
        harmonics = torch.arange(NOISE_FEATURES, dtype=torch.float64, device=sigma.device)
        features = torch.cos(math.pi * harmonics * sigma.to(torch.float64)[:, None]).to(dtype)
        with torch.autocast(sigma.device.type, enabled=False):  # a table is shared by calls with and without autocast
            hidden = F.linear(features, self.noise_in.weight.to(dtype), self.noise_in.bias.to(dtype))
            noise = F.linear(F.silu(hidden), self.noise_out.weight.to(dtype), self.noise_out.bias.to(dtype))
            condition = F.silu(noise + F.embedding(action, self.action.weight).to(dtype))
            modulation = condition @ self.weight.to(dtype).mT + self.bias.to(dtype)[:, None]
        return modulation.unflatten(-1, (MODULATIONS, -1))

    def table(self, sigma: float) -> torch.Tensor:
        """``[L, A, 6, d]``: the modulations of every action at one noise level, kept until the weights change.

        Bit-equal to ``forward`` for one row: entries are computed a row at a time, so that they do not depend on how
        many actions there are. In-place updates, ``load_state_dict`` and ``to`` are noticed; a write through ``.data``
        is not. At most ``MAX_TABLES`` noise levels are kept.
        """
        weights = list(self.parameters())
        stamp = [(weight.data_ptr(), weight._version, weight.dtype) for weight in weights]
        if stamp != self._stamp:
            self._tables.clear()
            # Holding the storage keeps its address from being given to other weights.
            self._stamp, self._stamped = stamp, [weight.detach() for weight in weights]
        if sigma not in self._tables:
            if len(self._tables) == MAX_TABLES:
                del self._tables[next(iter(self._tables))]
            device = self.weight.device
            level = torch.tensor([sigma], dtype=torch.float64, device=device)
            actions = torch.arange(self.action.num_embeddings, device=device).split(1)
            with torch.no_grad():
                self._tables[sigma] = torch.cat([self(level, action) for action in actions], dim=1)
        return self._tables[sigma]
