"""Between pixels and the model's floats."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from model.data.clip import Pixels


def frames_to_model(frames: Pixels) -> Tensor:
    """uint8 [N, H, W, C] to fp32 [N, C, H, W] in [-1, 1], a copy; 0 is -1 and 255 is 1.

    ``ValueError`` for another dtype or number of dimensions.
    """
    if frames.dtype != np.uint8 or frames.ndim != 4:
        raise ValueError(f"frames={frames.dtype}{list(frames.shape)}: expected uint8 [N, H, W, C]")
    pixels = torch.from_numpy(np.ascontiguousarray(frames.transpose(0, 3, 1, 2)))
    return pixels.to(torch.float32) / 127.5 - 1.0


def frames_to_uint8(frames: Tensor) -> Pixels:
    """Floats [N, C, H, W] of any dtype and device to uint8 [N, H, W, C]; inverse of ``frames_to_model``.

    Values beyond [-1, 1] are clipped. ``ValueError`` for another number of dimensions, and for a value that is not
    finite: a diverged rollout must not look like a black frame.
    """
    if frames.ndim != 4:
        raise ValueError(f"frames={list(frames.shape)}: expected [N, C, H, W]")
    values = frames.detach().to("cpu", torch.float32)
    if not bool(torch.isfinite(values).all()):
        raise ValueError("frames: expected finite values, found NaN or infinity")
    pixels = ((values.clamp(-1.0, 1.0) + 1.0) * 127.5).round().to(torch.uint8)
    return np.ascontiguousarray(pixels.permute(0, 2, 3, 1).numpy())
