"""A clip: frames and the actions that led to them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Actions = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Clip:
    """Consecutive frames of one source.

    frames: uint8 [N, H, W, C]. actions: int64 [N], each in ``range(num_actions)``; row f is the executed action that
    led to frame f, and row 0 is NOOP (0). fps: frames per second at which the clip plays in real time.
    source: one line that says where it came from. content_hash: sha256 (hex) of shape, frames and actions.
    """

    frames: Pixels
    actions: Actions
    num_actions: int
    fps: float
    source: str
    content_hash: str

    @classmethod
    def of(cls, frames: Pixels, actions: Actions, *, num_actions: int, fps: float, source: str) -> Clip:
        """A clip with its hash worked out."""
        return cls(frames, actions, num_actions, fps, source, content_hash(frames, actions))


def content_hash(frames: Pixels, actions: Actions) -> str:
    """sha256 (hex) of the shape, the frames in C order and the actions as little-endian int64."""
    digest = hashlib.sha256(repr(frames.shape).encode())
    digest.update(np.ascontiguousarray(frames).data)
    digest.update(np.ascontiguousarray(actions, dtype="<i8").data)
    return digest.hexdigest()
