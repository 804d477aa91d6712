"""Rotary embedding of a token's column x, row y and its frame's clock t, on disjoint slices of the head.

Element i of a head is rotated together with element ``i + head_dim / 2``. The pairs are shared out in order::

    pair      0 ... D/8 | D/8 ... D/4 | D/4 ... D/2
    axis          x     |      y      |      t

so x and y turn a quarter of the head each and t turns half of it. Halves rather than neighbours are paired because a
rotation is then two contiguous multiply-adds. Pair j of n on an axis turns by ``position * BASE ** (-j / n)`` radians.

Letters: B rows, H heads, T tokens per frame, D head dim.
"""

from __future__ import annotations

from functools import lru_cache

import torch

BASE = 100.0
"""The slowest of t's pairs takes hundreds of frames to come round, longer than any ring that the presets use."""


def rotation(
    frame_pos: torch.Tensor, grid: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, ``[B, 1, T, D / 2]`` each in ``dtype``, of every token of the frames at clocks ``frame_pos``.

    frame_pos: ``[B]`` int64. grid: rows and columns of tokens. Angles are computed in fp64 from the integer clock and
    rounded once, as cos and sin: an angle rounded to fp32 is off by 0.004 radians at clock 100,000, and a clock rounded
    to bf16 does not tell frame 256 from 257.
    """
    space_cos, space_sin = _space(grid, head_dim, dtype, frame_pos.device)
    time = _angles(frame_pos, head_dim // 4)[:, None, None].expand(-1, 1, space_cos.shape[0], -1)
    space_shape = (len(frame_pos), 1, -1, -1)
    cos = torch.cat([space_cos.expand(space_shape), time.cos().to(dtype)], dim=-1)
    return cos, torch.cat([space_sin.expand(space_shape), time.sin().to(dtype)], dim=-1)


@lru_cache(maxsize=8)
def _space(
    grid: tuple[int, int], head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, ``[T, D / 4]`` each, of the slices for x and y, which are the same in every frame."""
    rows, columns = grid
    with torch.inference_mode(False):  # kept, and so also read by a later pass that wants gradients
        token = torch.arange(rows * columns, device=device)
        angles = [_angles(token % columns, head_dim // 8), _angles(token // columns, head_dim // 8)]
        space = torch.cat(angles, dim=-1)
        return space.cos().to(dtype), space.sin().to(dtype)


def _angles(position: torch.Tensor, pairs: int) -> torch.Tensor:
    """``[N]`` integer positions to ``[N, pairs]`` angles in fp64."""
    pair = torch.arange(pairs, dtype=torch.float64, device=position.device)
    return position.to(torch.float64)[:, None] * BASE ** (-pair / pairs)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``heads`` ``[B, H, T, D]`` rotated, contiguous, in the wider of the dtypes."""
    a, b = heads.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
