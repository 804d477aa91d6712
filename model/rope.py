"""Rotary embedding of a token's column x, row y and its frame's clock t, on disjoint slices of the head.

Element i of a head is rotated together with element ``i + head_dim / 2``. The pairs are shared out in order::

    pair      0 ... D/8 | D/8 ... D/4 | D/4 ... D/2
    axis          x     |      y      |      t

so x and y turn a quarter of the head each and t turns half of it. Halves rather than neighbours are paired because a
rotation is then two contiguous multiply-adds. Pair j of n on an axis turns by ``position * BASE ** (-j / n)`` radians.

Letters: B rows, H heads, T tokens per frame, D head dim.
"""

from __future__ import annotations

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
    rows, columns = grid
    token = torch.arange(rows * columns, device=frame_pos.device)
    x = _angles(token % columns, head_dim // 8)
    y = _angles(token // columns, head_dim // 8)
    t = _angles(frame_pos, head_dim // 4)
    space = torch.cat([x, y], dim=-1).expand(len(frame_pos), -1, -1)
    angles = torch.cat([space, t[:, None].expand(-1, len(token), -1)], dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _angles(position: torch.Tensor, pairs: int) -> torch.Tensor:
    """``[N]`` integer positions to ``[N, pairs]`` angles in fp64."""
    pair = torch.arange(pairs, dtype=torch.float64, device=position.device)
    return position.to(torch.float64)[:, None] * BASE ** (-pair / pairs)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``heads`` ``[B, H, T, D]`` rotated, contiguous, in the wider of the dtypes."""
    a, b = heads.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
