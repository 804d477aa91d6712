"""What is recorded of a frame's pixels: a checksum, and how far it is from the recorded one."""

from __future__ import annotations

import hashlib
import math

import numpy as np

from ringkv.harness.video import Pixels

_PEAK = 255.0


def frame_checksum(frame: Pixels) -> str:
    """blake2b with 8 bytes, as 16 hex digits, of the bytes of a frame uint8 [H, W, C] in that order."""
    return hashlib.blake2b(np.ascontiguousarray(frame).data, digest_size=8).hexdigest()


def psnr_db(frame: Pixels, truth: Pixels) -> float | None:
    """Peak signal-to-noise ratio in dB of two frames uint8 [H, W, C]: 10 log10(255^2 / mean squared error).

    The mean is over all pixels and channels. None where the two are equal, which have an infinite one.
    """
    error = float(np.mean(np.square(frame.astype(np.float64) - truth.astype(np.float64))))
    return 10.0 * math.log10(_PEAK**2 / error) if error > 0.0 else None
