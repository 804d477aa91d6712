"""Area averaging against exact fractions, and the way between pixels and the model's floats."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.data import frames_to_model, frames_to_uint8
from model.data.pixels import center_crop, luma, resize_area, to_size


def averaged_by_fractions(frame: np.ndarray, height: int, width: int) -> np.ndarray:
    """Every output pixel as a sum of exact fractions of the input pixels it covers, halves rounded up."""
    in_height, in_width, channels = frame.shape
    out = np.zeros((height, width, channels), np.uint8)

    def covered(size: int, out_size: int, position: int) -> list[tuple[int, Fraction]]:
        start, end = Fraction(position * size, out_size), Fraction((position + 1) * size, out_size)
        return [
            (cell, min(end, Fraction(cell + 1)) - max(start, Fraction(cell))) for cell in range(floor(start), ceil(end))
        ]

    for row in range(height):
        for column in range(width):
            for channel in range(channels):
                total = sum(
                    int(frame[y, x, channel]) * part_y * part_x
                    for y, part_y in covered(in_height, height, row)
                    for x, part_x in covered(in_width, width, column)
                )
                mean = total * Fraction(height * width, in_height * in_width)
                out[row, column, channel] = floor(mean + Fraction(1, 2))
    return out


@settings(max_examples=40, deadline=None)
@given(
    size=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3)),
    height=st.integers(1, 11),
    width=st.integers(1, 11),
    seed=st.integers(0, 1000),
)
def test_area_averaging_is_exact_for_every_ratio(
    size: tuple[int, int, int], height: int, width: int, seed: int
) -> None:
    frame = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    assert np.array_equal(resize_area(frame, height, width), averaged_by_fractions(frame, height, width))


def test_a_white_frame_of_full_hd_stays_white_and_halves_round_up() -> None:
    white = np.full((1080, 1920, 3), 255, np.uint8)
    assert (resize_area(white, 77, 131) == 255).all()
    assert resize_area(np.array([[[0], [1]]], np.uint8), 1, 1).item() == 1


def test_luma_weighs_the_colours_and_keeps_grey() -> None:
    colors = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255], [142, 142, 142], [255, 255, 255]]], np.uint8)
    assert luma(colors)[..., 0].tolist() == [[76, 150, 29, 142, 255]]
    assert to_size(colors, channels=1, height=1, width=5)[..., 0].tolist() == [[76, 150, 29, 142, 255]]


@pytest.mark.parametrize(
    ("shape", "target", "expected"),
    [((90, 160), (64, 64), (90, 90)), ((160, 90), (64, 64), (90, 90)), ((90, 160), (9, 16), (90, 160))],
)
def test_the_crop_is_the_largest_centred_part_with_the_aspect_asked_for(
    shape: tuple[int, int], target: tuple[int, int], expected: tuple[int, int]
) -> None:
    rows, columns = np.indices(shape)
    cropped = center_crop(np.stack([rows, columns], -1).astype(np.uint8), *target)
    assert cropped.shape[:2] == expected
    assert cropped[0, 0].tolist() == [(shape[0] - expected[0]) // 2, (shape[1] - expected[1]) // 2]


def test_every_pixel_value_survives_the_way_to_the_model_and_back() -> None:
    frames = np.arange(2 * 256 * 3, dtype=np.int64).reshape(2, 16, 16, 3).astype(np.uint8)
    assert len(np.unique(frames)) == 256
    model_frames = frames_to_model(frames)
    assert model_frames.shape == (2, 3, 16, 16)
    assert model_frames.dtype == torch.float32
    assert (model_frames.min().item(), model_frames.max().item()) == (-1.0, 1.0)
    assert model_frames[1, 2, 3, 4].item() == pytest.approx(frames[1, 3, 4, 2] / 127.5 - 1)
    assert np.array_equal(frames_to_uint8(model_frames), frames)


def test_what_the_model_overshoots_is_clipped_in_any_float_type() -> None:
    frames = torch.tensor([-7.0, -1.0, 0.0, 1.0, 1.5]).reshape(1, 1, 1, 5)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        assert frames_to_uint8(frames.to(dtype)).ravel().tolist() == [0, 0, 128, 255, 255]


def test_a_frame_that_is_not_finite_or_not_a_frame_is_refused() -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="NaN or infinity"):
            frames_to_uint8(torch.full((1, 1, 1, 1), value))
    with pytest.raises(ValueError, match=r"\[2, 2\]: expected \[N, C, H, W\]"):
        frames_to_uint8(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="expected uint8"):
        frames_to_model(np.zeros((1, 2, 2, 3), np.float32))
