"""A few photo crops shown over and over: what can be predicted there can only be remembered."""

from __future__ import annotations

import numpy as np

from model.data.clip import Clip
from model.data.names import game_actions
from model.data.photos import photo_loops
from model.data.pixels import to_size

MIN_LOOP, MAX_LOOP = 3, 8
"""Shortest and longest loop, in frames."""

_FPS = 15.0


def render(num_frames: int, channels: int, height: int, width: int, seed: int, index: int = 0) -> Clip:
    """A loop of ``MIN_LOOP`` to ``MAX_LOOP`` crops of the held-out photos, repeated to ``num_frames`` frames.

    Frames are [height, width, channels], channels 1 or 3, resized from 16 x 16. Every (seed, index) gives a loop of its
    own. ``ValueError`` where the photos are not installed.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=(index,))
    length = int(np.random.default_rng(sequence).integers(MIN_LOOP, MAX_LOOP + 1))
    (pictures,) = photo_loops("test", length, 1, int(sequence.generate_state(1, np.uint64)[0]))
    loop = np.stack([to_size(each, channels=channels, height=height, width=width) for each in pictures])
    return Clip.of(
        loop[np.arange(num_frames) % length],
        np.zeros(num_frames, np.int64),
        num_actions=game_actions("loops"),
        fps=_FPS,
        source=f"loop of {length} crops of held-out photos, seed {seed}, clip {index}",
    )
