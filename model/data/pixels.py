"""Pixels to the size a model wants: luma and the exact area average, the same bytes on every machine.

Letters: H, W input rows and columns, h, w output rows and columns, C channels.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from model.data.clip import Pixels


def resize_area(frame: Pixels, height: int, width: int) -> Pixels:
    """Average ``frame`` uint8 [H, W, C] over the area of each output pixel: uint8 [height, width, C].

    An input pixel counts for the part of it that the output pixel covers, whatever the ratio, larger or smaller.
    Halves round up.
    """
    in_height, in_width, channels = frame.shape
    # Weights are whole numbers (an axis' weights sum to its input size), so every product and sum is a whole number
    # below 2**53 and exact in fp64: no summation order, BLAS or thread count can change a byte.
    rows_hH, columns_wW = _overlap(in_height, height), _overlap(in_width, width)
    by_rows_hWC = (rows_hH @ frame.reshape(in_height, in_width * channels)).reshape(height, in_width, channels)
    sums_hCw = by_rows_hWC.transpose(0, 2, 1) @ columns_wW.T
    sums_hwC = sums_hCw.transpose(0, 2, 1).astype(np.int64)
    area = in_height * in_width
    return ((2 * sums_hwC + area) // (2 * area)).astype(np.uint8)


def luma(frame: Pixels) -> Pixels:
    """BT.601 luma of an RGB frame: uint8 [H, W, 3] to uint8 [H, W, 1], rounded half up."""
    weighted = frame.astype(np.int64) @ np.array([299, 587, 114])
    return ((weighted + 500) // 1000).astype(np.uint8)[..., None]


def to_size(frame: Pixels, *, channels: int, height: int, width: int) -> Pixels:
    """RGB uint8 [H, W, 3] to uint8 [height, width, channels]: as it is for 3 channels, luma for 1, area-averaged."""
    return resize_area(luma(frame) if channels == 1 else frame, height, width)


def center_crop(frame: Pixels, height: int, width: int) -> Pixels:
    """The largest centred part of ``frame`` [H, W, C] with the aspect of ``height`` x ``width``."""
    in_height, in_width = frame.shape[:2]
    if in_width * height > in_height * width:
        crop_height, crop_width = in_height, max(1, round(in_height * width / height))
    else:
        crop_height, crop_width = max(1, round(in_width * height / width)), in_width
    top, left = (in_height - crop_height) // 2, (in_width - crop_width) // 2
    return frame[top : top + crop_height, left : left + crop_width]


@lru_cache(maxsize=16)
def _overlap(in_size: int, out_size: int) -> npt.NDArray[np.float64]:
    """[out_size, in_size]: how much of input cell i output cell o covers, in units of 1 / out_size of a cell."""
    cells, outputs = np.arange(in_size), np.arange(out_size)[:, None]
    upper = np.minimum((outputs + 1) * in_size, (cells + 1) * out_size)
    lower = np.maximum(outputs * in_size, cells * out_size)
    return np.maximum(upper - lower, 0).astype(np.float64)
