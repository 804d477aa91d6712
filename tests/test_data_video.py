"""The user's own video or folder of images, written here with PyAV and read back."""

from __future__ import annotations

import struct
from pathlib import Path

import av
import numpy as np
import pytest

from model.data import check_path, load_clip


def level(frame: int) -> int:
    return 20 + 9 * frame


def write_video(path: Path, num_frames: int, fps: int = 24) -> None:
    """Grey frames 80 x 48 that brighten by the frame; the outer 16 columns are black."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": "1"})
        stream.width, stream.height, stream.pix_fmt = 80, 48, "yuv420p"
        for frame in range(num_frames):
            picture = np.zeros((48, 80, 3), np.uint8)
            picture[:, 16:64] = level(frame)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def write_image(path: Path, picture: np.ndarray) -> None:
    codec = {"png": "png", "jpg": "mjpeg"}[path.suffix[1:].lower()]
    with av.open(str(path), "w", format="image2", options={"update": "1"}) as container:
        stream = container.add_stream(codec)
        stream.width, stream.height = picture.shape[1], picture.shape[0]
        stream.pix_fmt = "rgb24" if codec == "png" else "yuvj444p"
        container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def video(path: Path, num_frames: int, index: int = 0, channels: int = 3, height: int = 12, width: int = 12):  # type: ignore[no-untyped-def]
    return load_clip(
        "video", path=path, num_frames=num_frames, index=index, channels=channels, height=height, width=width, seed=0
    )


@pytest.mark.parametrize("channels", [3, 1])
def test_a_video_is_cropped_to_the_aspect_averaged_and_read_from_where_its_session_starts(
    channels: int, tmp_path: Path
) -> None:
    path = tmp_path / "mine.mp4"
    write_video(path, 12)
    for index in (0, 1, 2):
        clip = video(path, 4, index, channels)
        assert clip.frames.shape == (4, 12, 12, channels)
        expected = [level(4 * index + frame) for frame in range(4)]
        assert np.abs(clip.frames.mean((1, 2, 3)) - expected).max() < 3  # black borders would take a third away
        assert (clip.actions.tolist(), clip.num_actions, clip.fps) == ([0] * 4, 1, 24.0)
        assert clip.source == f"mine.mp4, frames {4 * index} to {4 * index + 3}"


def test_too_few_frames_are_refused_with_path_found_needed_and_how_many_sessions_fit(tmp_path: Path) -> None:
    path = tmp_path / "short.mp4"
    write_video(path, 7)
    with pytest.raises(ValueError) as refused:
        video(path, 8)
    assert f"{str(path)!r}: 7 frames found, 8 needed for session 0" in str(refused.value)
    with pytest.raises(ValueError, match=r"7 frames found, 9 needed for session 2 at 3 frames a session; 2 sessions"):
        video(path, 3, index=2)


def test_a_video_cut_off_in_the_middle_is_one_line_too(tmp_path: Path) -> None:
    path = tmp_path / "cut.mp4"
    write_video(path, 12)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])  # the index of an mp4 comes last
    for refuse in (lambda: check_path(path), lambda: video(path, 12)):
        with pytest.raises(ValueError, match=r"^data\.path='.*cut\.mp4': cannot be decoded \(.+\)$"):
            refuse()


def test_a_video_filmed_sideways_is_shown_upright(tmp_path: Path) -> None:
    """The display matrix of an mp4 (in its tkhd box) says how the stored picture is to be turned."""
    path = tmp_path / "sideways.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=15, options={"crf": "1"})
        stream.width, stream.height, stream.pix_fmt = 64, 32, "yuv420p"
        picture = np.zeros((32, 64, 3), np.uint8)
        picture[:, 32:] = 255  # bright on the right
        container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    # x' = -y + h, y' = x: a quarter turn clockwise when shown, so that right becomes bottom.
    turn = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 32 << 16, 0, 1 << 30)
    data = bytearray(path.read_bytes())
    matrix = data.index(b"tkhd") + 4 + 40
    data[matrix : matrix + 36] = turn
    path.write_bytes(data)
    clip = video(path, 1, height=64, width=32)
    assert clip.frames[0, :28].mean() < 10
    assert clip.frames[0, 36:].mean() > 245


@pytest.mark.parametrize("suffix", ["png", "jpg", "PNG"])
def test_a_folder_of_images_is_read_in_the_order_of_their_names(suffix: str, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for number in (3, 0, 2, 1):
        write_image(folder / f"frame{number}.{suffix}", np.full((20, 30, 3), 50 * number + 30, np.uint8))
    (folder / "notes.txt").write_text("not a frame")
    check_path(folder)
    clip = video(folder, 2, index=1, height=10, width=15)
    assert np.abs(clip.frames.mean((1, 2, 3)) - [130, 180]).max() <= 1
    with pytest.raises(ValueError, match=r"4 frames found, 6 needed for session 1 at 3 frames a session; 1 session"):
        video(folder, 3, index=1)


def test_an_image_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", np.zeros((8, 8, 3), np.uint8))
    (tmp_path / "b.png").write_bytes(b"not a png")
    with pytest.raises(ValueError, match=r"^data\.path='.*b\.png': "):
        video(tmp_path, 2)


def test_a_file_that_holds_only_sound_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sound.wav"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(ValueError, match="no picture in this file"):
        check_path(path)
