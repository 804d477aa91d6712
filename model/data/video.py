"""The user's own frames: a video file or a folder of images, decoded with PyAV.

Frames are taken as they are stored, in display orientation, whatever their time stamps: a video of varying frame
rate is not resampled. Pixels are taken as square.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from model.data.clip import Clip, Pixels
from model.data.folder import image_files
from model.data.pixels import center_crop, to_size

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer

DEFAULT_FPS = 15.0
"""For what has no frame rate of its own, such as a folder of images."""


def check_video(path: Path) -> None:
    """Raise ``ValueError``, one line, unless ``path`` opens as a file with a video stream."""
    _frame_rate(path)


def read(path: str | os.PathLike[str], num_frames: int, channels: int, height: int, width: int, index: int = 0) -> Clip:
    """Frames ``index * num_frames`` and on of ``path``, centre-cropped to the aspect of ``height`` x ``width`` and
    area-averaged to it. There is one action, NOOP.

    ``ValueError``, one line, if the file or an image cannot be decoded, or if there are too few frames.
    """
    path = Path(path)
    first, needed = index * num_frames, (index + 1) * num_frames

    def fit(frame: VideoFrame) -> Pixels:
        return to_size(center_crop(_upright(frame), height, width), channels=channels, height=height, width=width)

    if path.is_dir():
        files = image_files(path)
        found = len(files)
        frames = [fit(_decode_image(file)) for file in files[first:needed]]
    else:
        found, frames = 0, []
        with closing(_decode(path)) as decoded:
            for frame in islice(decoded, needed):
                if found >= first:
                    frames.append(fit(frame))
                found += 1
    if found < needed:
        fitting = found // num_frames
        raise ValueError(
            f"data.path={str(path)!r}: {found} frames found, {needed} needed for session {index} at {num_frames} "
            f"frames a session; {fitting} {'session fits' if fitting == 1 else 'sessions fit'}"
        )
    return Clip.of(
        np.stack(frames),
        np.zeros(num_frames, np.int64),
        num_actions=1,
        fps=DEFAULT_FPS if path.is_dir() else _frame_rate(path),
        source=f"{path.name}, frames {first} to {needed - 1}",
    )


@contextmanager
def _opened(path: Path) -> Iterator[InputContainer]:
    import av

    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise ValueError(f"data.path={str(path)!r}: no picture in this file; expected a video or images")
            yield container
    except av.FFmpegError as error:
        raise ValueError(f"data.path={str(path)!r}: cannot be decoded ({error.strerror})") from error


def _frame_rate(path: Path) -> float:
    """Frames per second of the first video stream; ``DEFAULT_FPS`` if it does not say."""
    with _opened(path) as container:
        return float(container.streams.video[0].average_rate or DEFAULT_FPS)


def _decode(path: Path) -> Generator[VideoFrame, None, None]:
    with _opened(path) as container:
        yield from container.decode(video=0)


def _decode_image(path: Path) -> VideoFrame:
    with closing(_decode(path)) as decoded:
        for frame in decoded:
            return frame
    raise ValueError(f"data.path={str(path.parent)!r}: no picture in {path.name}")


def _upright(frame: VideoFrame) -> Pixels:
    """RGB uint8 [H, W, 3], turned the way the file says it is to be shown (phones film sideways)."""
    return np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)
