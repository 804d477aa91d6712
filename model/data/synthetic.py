"""Moving shapes that need no file, no emulator and no network: any number of channels, any size.

Blocks bounce over a shaded background, and one block, drawn last, is moved by the actions. All positions are whole
pixels and all arithmetic is on integers, so a clip is the same on every machine.
"""

from __future__ import annotations

import numpy as np

from model.data.clip import Clip
from model.data.names import game_actions

_FPS = 15.0
_BOUNCING_BLOCKS = 3
_MOVES = np.array([(0, 0), (-1, 0), (0, 1), (1, 0), (0, -1)])
"""Rows and columns, in steps, by action index: NOOP, UP, RIGHT, DOWN, LEFT."""

_MAX_HOLD_FRAMES = 8


def render(num_frames: int, channels: int, height: int, width: int, seed: int, index: int = 0) -> Clip:
    """A clip of ``num_frames`` frames [height, width, channels], the same for the same arguments.

    Its first frames are those of a longer clip. In a frame too small for a block to move, nothing moves.
    """
    # Two generators: how many actions are drawn must not depend on, or change, what the scene looks like.
    scene, player = (np.random.default_rng(s) for s in np.random.SeedSequence(seed, spawn_key=(index,)).spawn(2))
    size = np.array([max(1, height // 8), max(1, width // 8)])
    room = np.array([height, width]) - size
    background = _background(scene, channels, height, width)
    colors = scene.integers(128, 256, size=(_BOUNCING_BLOCKS + 1, channels), dtype=np.uint8)
    starts = scene.integers(0, room + 1, size=(_BOUNCING_BLOCKS + 1, 2))
    speeds = scene.integers(1, 4, size=(_BOUNCING_BLOCKS, 2)) * scene.choice([-1, 1], size=(_BOUNCING_BLOCKS, 2))
    step = np.maximum(1, size // 2)

    actions = _draw_actions(player, num_frames)
    frames = np.empty((num_frames, height, width, channels), np.uint8)
    driven = starts[-1]
    for frame in range(num_frames):
        frames[frame] = background
        driven = np.clip(driven + _MOVES[actions[frame]] * step, 0, room)
        corners = [*_bounced(starts[:-1] + speeds * frame, room), driven]
        for (row, column), color in zip(corners, colors, strict=True):
            frames[frame, row : row + size[0], column : column + size[1]] = color
    return Clip.of(
        frames,
        actions,
        num_actions=game_actions("synthetic"),
        fps=_FPS,
        source=f"synthetic, seed {seed}, clip {index}",
    )


def _background(rng: np.random.Generator, channels: int, height: int, width: int) -> np.ndarray:
    """uint8 [H, W, C] up to 111, a slope per channel: darker than any block, so that a block never vanishes."""
    rows, columns = np.arange(height)[:, None, None], np.arange(width)[None, :, None]
    row_rise, column_rise = rng.integers(0, 56, size=(2, channels))
    return (row_rise * rows // height + column_rise * columns // width).astype(np.uint8)


def _bounced(position: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Fold an unbounded position, int [..., 2], into ``0..room``: reflection at both ends."""
    period = np.maximum(2 * room, 1)
    phase = position % period
    return np.minimum(phase, 2 * room - phase)


def _draw_actions(rng: np.random.Generator, num_frames: int) -> np.ndarray:
    """int64 [num_frames]: NOOP, then choices held for 1 to 8 frames each."""
    actions = np.zeros(num_frames, np.int64)
    frame = 1
    while frame < num_frames:
        held = int(rng.integers(1, _MAX_HOLD_FRAMES + 1))
        actions[frame : frame + held] = rng.integers(len(_MOVES))
        frame += held
    return actions
