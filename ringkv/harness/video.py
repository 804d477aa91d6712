"""Videos that a person can watch: ground truth beside rollout, enlarged, labelled, several sessions as a grid."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ringkv.files import replaced_atomically

if TYPE_CHECKING:
    from PIL import ImageFont

Pixels = npt.NDArray[np.uint8]

CONTEXT_COLOR = (64, 156, 255)
GENERATED_COLOR = (255, 146, 43)
_TRUTH_COLOR = (110, 110, 118)
_BACKGROUND = (18, 18, 22)
_BLANK = (44, 44, 50)
_TEXT_COLOR = (236, 236, 240)

_BORDER = 4
_GAP = 12
_STRIP = 26
_MIN_PANEL_WIDTH = 288
"""Pixels: a label such as "rollout  frame 1234  generated" has to fit above its panel."""


@dataclass(frozen=True)
class SessionFrames:
    """What one session showed.

    name: the request id. truth: uint8 [N, H, W, C] real frames, context included. rollout: uint8 [M, H, W, C], the
    same clocks, context included; shorter than ``truth`` where a request ended early. context_frames: how many
    frames at the start were given, not generated.
    """

    name: str
    truth: Pixels
    rollout: Pixels
    context_frames: int


def write_mp4(path: str | os.PathLike[str], frames: Iterable[Pixels], fps: float) -> int:
    """Encode frames, each uint8 [H, W, 3], as h264 yuv420p; the file appears when it is complete.

    An odd height or width is padded by repeating the last row or column, which yuv420p needs. Returns the number of
    frames. ``ValueError`` for no frames at all, a frame of another shape, or an ``fps`` not finite and above 0.
    """
    import av

    if not 0 < fps < math.inf:
        raise ValueError(f"video fps={fps!r}: expected a finite number > 0")
    path = Path(path)
    count, shape = 0, None
    with replaced_atomically(path) as temporary, av.open(str(temporary), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        stream.pix_fmt = "yuv420p"
        stream.options = {"preset": "veryfast", "crf": "18"}
        for frame in frames:
            if shape is None:
                shape = frame.shape
                stream.height, stream.width = (size + size % 2 for size in shape[:2])
            if frame.shape != shape or frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8:
                raise ValueError(f"video frame {count}: {frame.dtype} {frame.shape}, expected uint8 [H, W, 3]")
            even = np.pad(frame, ((0, shape[0] % 2), (0, shape[1] % 2), (0, 0)), mode="edge")
            container.mux(stream.encode(av.VideoFrame.from_ndarray(even, format="rgb24")))
            count += 1
        if count == 0:
            raise ValueError(f"video {path.name}: no frames; expected at least one")
        container.mux(stream.encode())
    return count


def compose_grid(sessions: Sequence[SessionFrames], *, scale: int = 6) -> Iterator[Pixels]:
    """Yield the frames of the video, uint8 [H', W', 3]: per session truth beside rollout, the sessions as a grid.

    Each pixel of a panel becomes a square of ``scale`` x ``scale``, more where the panel would be too narrow for
    its label. The label says what the panel is, the frame number and its phase; the rollout's border has the
    phase's colour. A frame that a session does not have is a blank panel. Frames are made one at a time: a long
    grid never lies in memory.

    ``ValueError`` for no sessions, a ``scale`` below 1, or frames of unlike sizes.
    """
    if not sessions:
        raise ValueError("video grid: no sessions; expected at least one")
    if scale < 1:
        raise ValueError(f"video grid scale={scale}: expected an integer >= 1")
    sizes = {frames.shape[1:3] for session in sessions for frames in (session.truth, session.rollout)}
    if len(sizes) != 1:
        raise ValueError(f"video grid: frames of sizes {sorted(sizes)}; expected one size for all sessions")
    scale = max(scale, -(-_MIN_PANEL_WIDTH // next(iter(sizes))[1]))
    return _grid_frames(sessions, scale)


def side_by_side(panels: Mapping[str, Pixels], given_frames: int, *, scale: int = 3) -> Iterator[Pixels]:
    """Yield frames uint8 [H', W', 3]: the panels, each uint8 [N, H, W, C], in a row under their names.

    A panel's border and label have the colour of a given frame below ``given_frames`` and of a generated one above.
    ``ValueError`` for no panels, panels of unlike shapes, or a ``scale`` below 1.
    """
    shapes = {frames.shape for frames in panels.values()}
    if len(shapes) != 1 or scale < 1:
        raise ValueError(f"panels of shapes {sorted(shapes)} at scale {scale}: expected one shape, and a scale >= 1")
    for index in range(next(iter(shapes))[0]):
        color = CONTEXT_COLOR if index < given_frames else GENERATED_COLOR
        row = [_panel(frames, index, scale, f"{name}  {index}", color) for name, frames in panels.items()]
        yield _padded(np.concatenate(row, axis=1), _GAP // 2, _BACKGROUND)


def write_gif(path: str | os.PathLike[str], frames: Iterable[Pixels], fps: float) -> int:
    """Write frames, each uint8 [H, W, 3] of one size, as a GIF that repeats; the file appears when it is complete.

    Colours are rounded to one palette of 256 for all frames, and times to hundredths of a second, as the format has
    them.
    Returns the number of frames. ``ValueError`` for no frames at all.
    """
    from PIL import Image

    pixels = list(frames)
    if not pixels:
        raise ValueError(f"gif {Path(path).name}: no frames; expected at least one")
    # Maximum coverage keeps a small sprite's colour, which a median cut would give up for shades of the background; one
    # palette, since a background whose shade changes with every frame flickers.
    palette = Image.fromarray(np.concatenate(pixels)).quantize(256, Image.Quantize.MAXCOVERAGE)
    images = [Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE) for frame in pixels]
    with replaced_atomically(path) as temporary:
        images[0].save(
            temporary, "GIF", save_all=True, append_images=images[1:], duration=round(100 / fps) * 10, loop=0
        )
    return len(images)


def to_rgb(frames: Pixels) -> Pixels:
    """uint8 [N, H, W, C] as uint8 [N, H, W, 3]: grey (C = 1) repeated, of latents (C > 3) the first three channels.

    ``ValueError`` for two channels or another rank.
    """
    if frames.ndim != 4 or frames.shape[3] in (0, 2):
        raise ValueError(f"frames of shape {frames.shape}: expected [N, H, W, C] with C = 1 or C >= 3")
    return np.repeat(frames, 3, axis=3) if frames.shape[3] == 1 else frames[..., :3]


def _grid_frames(sessions: Sequence[SessionFrames], scale: int) -> Iterator[Pixels]:
    columns = int(np.ceil(np.sqrt(len(sessions))))
    for index in range(max(len(session.truth) for session in sessions)):
        cells = [_cell(session, index, scale, named=len(sessions) > 1) for session in sessions]
        cells += [np.full_like(cells[0], _BACKGROUND)] * (-len(cells) % columns)
        rows = [np.concatenate(cells[i : i + columns], axis=1) for i in range(0, len(cells), columns)]
        yield _padded(np.concatenate(rows, axis=0), _GAP // 2, _BACKGROUND)


def _cell(session: SessionFrames, index: int, scale: int, *, named: bool) -> Pixels:
    context = index < session.context_frames
    phase = "context" if context else "generated"
    has_rollout = index < len(session.rollout)
    label = f"rollout  frame {index}  {phase}" if has_rollout else f"rollout  frame {index}  none"
    color = CONTEXT_COLOR if context else GENERATED_COLOR
    pair = np.concatenate(
        [
            _panel(session.truth, index, scale, f"truth  frame {index}", _TRUTH_COLOR),
            _panel(session.rollout, index, scale, label, color if has_rollout else _TRUTH_COLOR),
        ],
        axis=1,
    )
    return np.concatenate([_label(session.name, pair.shape[1], _BACKGROUND), pair], axis=0) if named else pair


def _panel(frames: Pixels, index: int, scale: int, label: str, color: tuple[int, int, int]) -> Pixels:
    height, width = frames.shape[1:3]
    if index < len(frames):
        image = to_rgb(frames[index : index + 1])[0].repeat(scale, axis=0).repeat(scale, axis=1)
    else:
        image = np.full((height * scale, width * scale, 3), _BLANK, np.uint8)
    bordered = _padded(image, _BORDER, color)
    return _padded(np.concatenate([_label(label, bordered.shape[1], color), bordered]), _GAP // 2, _BACKGROUND)


def _padded(image: Pixels, width: int, color: tuple[int, int, int]) -> Pixels:
    height, across = image.shape[:2]
    out = np.full((height + 2 * width, across + 2 * width, 3), color, np.uint8)
    out[width:-width, width:-width] = image
    return out


@cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    from PIL import ImageFont

    return ImageFont.load_default(15)


@lru_cache(maxsize=64)
def _label(text: str, width: int, color: tuple[int, int, int]) -> Pixels:
    """A strip uint8 [_STRIP, width, 3] of background ``color`` with ``text`` in it, cut off at its end."""
    from PIL import Image, ImageDraw

    strip = Image.new("RGB", (width, _STRIP), color)
    ink = _TEXT_COLOR if sum(color) < 384 else _BACKGROUND
    ImageDraw.Draw(strip).text((8, _STRIP // 2), text, fill=ink, font=_font(), anchor="lm")
    return np.asarray(strip)
