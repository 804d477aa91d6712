"""Videos and figures, decoded again: sizes, colours, enlargement, and what a viewer is told about each frame."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from ringkv.harness import video
from ringkv.harness.plots import frames_png, strip_png
from ringkv.harness.video import CONTEXT_COLOR, GENERATED_COLOR, SessionFrames, compose_grid, to_rgb, write_mp4


def clip(frames: int, channels: int = 3, size: int = 16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (frames, size, size, channels), dtype=np.uint8)


def decode(path: Path) -> tuple[list[np.ndarray], Any]:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        facts = (stream.codec_context.name, stream.codec_context.pix_fmt, stream.average_rate)
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)], facts


def has_color(image: np.ndarray, color: tuple[int, int, int]) -> bool:
    return bool((image == np.array(color, np.uint8)).all(axis=-1).any())


def contains(image: np.ndarray, panel: np.ndarray) -> bool:
    """Whether ``panel`` lies in ``image`` somewhere, pixel for pixel; candidates are found by its first pixel."""
    height, width = panel.shape[:2]
    corners = image[: image.shape[0] - height + 1, : image.shape[1] - width + 1]
    starts = np.argwhere((corners == panel[0, 0]).all(axis=-1))
    return any((image[y : y + height, x : x + width] == panel).all() for y, x in starts)


def enlarged(frame: np.ndarray, scale: int) -> np.ndarray:
    return np.kron(frame, np.ones((scale, scale, 1), np.uint8))


def test_a_video_decodes_to_its_frames_in_h264_yuv420p_at_its_rate(tmp_path: Path):
    levels = [10, 60, 110, 160, 210, 250, 30]
    frames = np.stack([np.full((48, 64, 3), level, np.uint8) for level in levels])
    assert write_mp4(tmp_path / "v.mp4", frames, 12.5) == 7
    decoded, facts = decode(tmp_path / "v.mp4")
    assert facts == ("h264", "yuv420p", 12.5)
    assert [frame.shape for frame in decoded] == [(48, 64, 3)] * 7
    assert np.abs([frame.mean() for frame in decoded] - np.array(levels)).max() < 4


def test_an_odd_size_is_padded_to_an_even_one(tmp_path: Path):
    write_mp4(tmp_path / "v.mp4", np.full((2, 33, 47, 3), 128, np.uint8), 10)
    decoded, _ = decode(tmp_path / "v.mp4")
    assert decoded[0].shape == (34, 48, 3)
    assert np.abs(decoded[0].astype(int) - 128).max() < 6


@pytest.mark.parametrize(
    ("frames", "fps", "message"),
    [
        (np.zeros((0, 8, 8, 3), np.uint8), 10, "no frames"),
        (np.zeros((1, 8, 8, 3), np.float32), 10, "float32"),
        (np.zeros((1, 8, 8, 1), np.uint8), 10, r"\(8, 8, 1\)"),
        ([np.zeros((8, 8, 3), np.uint8), np.zeros((8, 10, 3), np.uint8)], 10, "frame 1"),
        (np.zeros((1, 8, 8, 3), np.uint8), 0, "fps=0"),
        (np.zeros((1, 8, 8, 3), np.uint8), float("inf"), "fps=inf"),
        (np.zeros((1, 8, 8, 3), np.uint8), float("nan"), "fps=nan"),
    ],
)
def test_a_video_that_cannot_be_written_leaves_no_file(tmp_path: Path, frames, fps, message):
    with pytest.raises(ValueError, match=message):
        write_mp4(tmp_path / "v.mp4", frames, fps)
    assert list(tmp_path.iterdir()) == []


def test_truth_and_rollout_stand_side_by_side_enlarged_pixel_for_pixel():
    truth, rollout = clip(3, size=48), clip(3, size=48, seed=1)
    images = list(compose_grid([SessionFrames("a", truth, rollout, 1)]))
    assert len(images) == 3
    for index, image in enumerate(images):
        left, right = image[:, : image.shape[1] // 2], image[:, image.shape[1] // 2 :]
        assert contains(left, enlarged(truth[index], 6))
        assert contains(right, enlarged(rollout[index], 6))
        assert not contains(left, enlarged(rollout[index], 6))


def test_the_border_tells_context_from_generated_and_the_label_the_frame_number():
    images = list(compose_grid([SessionFrames("a", clip(5), clip(5), 2)]))
    assert [has_color(image, CONTEXT_COLOR) for image in images] == [True, True, False, False, False]
    assert [has_color(image, GENERATED_COLOR) for image in images] == [False, False, True, True, True]
    still = clip(1).repeat(5, axis=0)
    labelled = list(compose_grid([SessionFrames("a", still, still, 0)]))
    assert all((one != two).any() for one, two in itertools.pairwise(labelled))


def test_the_labels_say_what_a_panel_is_its_frame_and_its_phase(monkeypatch):
    labels: list[str] = []

    def record(text: str, width: int, color: tuple[int, int, int]) -> np.ndarray:
        labels.append(text)
        return np.full((video._STRIP, width, 3), color, np.uint8)

    monkeypatch.setattr(video, "_label", record)
    list(compose_grid([SessionFrames("a", clip(3), clip(2), 1)]))
    assert labels == [
        *("truth  frame 0", "rollout  frame 0  context"),
        *("truth  frame 1", "rollout  frame 1  generated"),
        *("truth  frame 2", "rollout  frame 2  none"),
    ]
    labels.clear()
    list(compose_grid([SessionFrames(name, clip(1), clip(1), 0) for name in ("a", "b")]))
    assert [label for label in labels if "frame" not in label] == ["a", "b"]


def test_small_frames_are_enlarged_further_so_that_their_label_fits():
    (image,) = compose_grid([SessionFrames("a", clip(1, size=8), clip(1, size=8), 0)])
    assert contains(image, enlarged(clip(1, size=8)[0], 36))


def test_sessions_form_a_grid_and_a_request_that_ended_early_is_blank():
    lengths = [4, 2, 4]
    sessions = [SessionFrames(f"s{i}", clip(4, seed=i), clip(4, seed=10 + i)[: lengths[i]], 0) for i in range(3)]
    images = list(compose_grid(sessions))
    single = next(compose_grid(sessions[:1]))
    assert len(images) == 4
    assert images[0].shape[0] > 2 * single.shape[0] - 40
    assert images[0].shape[1] > 2 * single.shape[1] - 40
    for i in range(3):
        assert contains(images[0], enlarged(sessions[i].truth[0], 18))
        assert contains(images[0], enlarged(sessions[i].rollout[0], 18))
    assert contains(images[3], enlarged(sessions[1].truth[3], 18))
    assert not contains(images[3], enlarged(clip(4, seed=11)[3], 18))


def test_grey_is_repeated_and_of_latents_three_channels_are_shown():
    grey, latents = clip(2, channels=1), clip(2, channels=16)
    assert (to_rgb(grey) == np.stack([grey[..., 0]] * 3, axis=-1)).all()
    assert (to_rgb(latents) == latents[..., :3]).all()
    with pytest.raises(ValueError, match=r"C = 1 or C >= 3"):
        to_rgb(clip(2, channels=2))


@pytest.mark.parametrize(
    ("sessions", "scale", "message"),
    [
        ([], 6, "no sessions"),
        ([SessionFrames("a", clip(1), clip(1), 0)], 0, "scale=0"),
        ([SessionFrames("a", clip(1), clip(1, size=8), 0)], 6, "one size"),
    ],
)
def test_a_grid_that_cannot_be_composed_is_refused_when_it_is_asked_for(sessions, scale, message):
    with pytest.raises(ValueError, match=message):
        compose_grid(sessions, scale=scale)


def test_the_strip_shows_the_chosen_frames_of_both_rows(tmp_path: Path):
    truth = np.stack([np.full((8, 8, 1), 20 * i, np.uint8) for i in range(10)])
    rollout = truth + 5
    strip_png(tmp_path / "strip.png", truth, rollout, [0, 4, 9], 3)
    image = np.asarray(Image.open(tmp_path / "strip.png").convert("RGB"))
    for index in (0, 4, 9):
        assert has_color(image, (20 * index,) * 3)
        assert has_color(image, (20 * index + 5,) * 3)
    assert not has_color(image, (20 * 7 + 5,) * 3)
    assert has_color(image, CONTEXT_COLOR)
    assert has_color(image, GENERATED_COLOR)


@pytest.mark.parametrize("indices", [[], [3], [-1]])
def test_a_strip_of_frames_that_are_not_there_is_refused(tmp_path: Path, indices):
    with pytest.raises(ValueError, match=r"expected one or more of 0 \.\. 2"):
        strip_png(tmp_path / "strip.png", clip(5), clip(3), indices, 1)
    assert list(tmp_path.iterdir()) == []


def frame_rows(latencies: list[float | None], warmup: int) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "phase": "generated",
            "latency_ms": latency,
            "warmup": step < warmup,
            "kv_bytes": 1 << 20,
            "kv_in_use_bytes": None if latency is None else step << 16,
        }
        for step, latency in enumerate(latencies)
    ]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        frame_rows([5.0, 6.0], warmup=2),
        frame_rows([500.0, None, float("nan"), 6.0, 7.0], warmup=1),
        frame_rows([None, float("nan")], warmup=0),
    ],
    ids=["no-rows", "warm-up-only", "gaps", "nothing-measured"],
)
def test_the_plot_of_a_run_is_written_whatever_could_not_be_measured(tmp_path: Path, rows, recwarn):
    frames_png(tmp_path / "frames.png", rows)
    assert [path.name for path in tmp_path.iterdir()] == ["frames.png"]
    image = np.asarray(Image.open(tmp_path / "frames.png").convert("L"))
    assert image.shape[0] > 300
    assert (image < 128).mean() > 0.005
    assert [str(warning.message) for warning in recwarn] == []


def test_the_plot_draws_measured_frames_only_where_there_are_some(tmp_path: Path):
    for name, rows in (("some", frame_rows([9.0, 5.0, 6.0], 1)), ("none", frame_rows([9.0, 5.0, 6.0], 3))):
        frames_png(tmp_path / name, rows)
    some, none = (np.asarray(Image.open(tmp_path / name).convert("RGB")) for name in ("some", "none"))
    assert has_color(some, GENERATED_COLOR)
    assert not has_color(none, GENERATED_COLOR)


def test_plotting_needs_no_display_and_leaves_no_global_figure(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.pyplot", None)
    frames_png(tmp_path / "frames.png", [])
    assert (tmp_path / "frames.png").exists()
