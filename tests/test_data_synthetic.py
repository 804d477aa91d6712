"""Synthetic motion: seeded, of any shape, with one block that the actions move."""

from __future__ import annotations

import numpy as np
import pytest

from model.data import Clip, load_clip


def synthetic(
    num_frames: int = 40, channels: int = 3, height: int = 32, width: int = 48, seed: int = 4, index: int = 0
) -> Clip:
    return load_clip(
        "synthetic", num_frames=num_frames, channels=channels, height=height, width=width, seed=seed, index=index
    )


def test_a_clip_is_the_same_for_the_same_seed_and_other_for_another_seed_or_index() -> None:
    hashes = [
        clip.content_hash
        for clip in (synthetic(), synthetic(), synthetic(seed=5), synthetic(index=1), synthetic(seed=2**32 + 4))
    ]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 4


def test_a_longer_clip_begins_with_the_shorter_one() -> None:
    short, long = synthetic(10), synthetic(40)
    assert np.array_equal(short.frames, long.frames[:10])
    assert np.array_equal(short.actions, long.actions[:10])


@pytest.mark.parametrize(("channels", "height", "width"), [(1, 1, 1), (1, 2, 3), (16, 32, 64), (3, 64, 64), (4, 7, 99)])
def test_any_number_of_channels_and_any_size_can_be_had(channels: int, height: int, width: int) -> None:
    clip = synthetic(6, channels, height, width)
    assert clip.frames.shape == (6, height, width, channels)
    assert (clip.frames.dtype, clip.actions.dtype, clip.num_actions) == (np.uint8, np.int64, 5)
    if height >= 8 and width >= 8:
        assert all((before != after).any() for before, after in zip(clip.frames, clip.frames[1:], strict=False))


def test_the_driven_block_follows_the_actions_and_stops_at_the_edges() -> None:
    """The block drawn last is never covered, so its colour is whole in every frame: find it and follow it."""
    clip = synthetic(200)
    colors, counts = np.unique(clip.frames.reshape(-1, 3), axis=0, return_counts=True)
    moves = {0: (0, 0), 1: (-2, 0), 2: (0, 3), 3: (2, 0), 4: (0, -3)}  # a block is 4 x 6, a step half of it
    whole = [c for c, n in zip(colors, counts, strict=True) if n == 200 * 4 * 6]
    tracks = []
    for color in whole:
        corners = [np.argwhere((frame == color).all(-1)).min(0) for frame in clip.frames]
        tracks.append(np.array(corners))
    room = np.array([32 - 4, 48 - 6])

    def follows(track: np.ndarray) -> bool:
        steps = zip(track, track[1:], clip.actions[1:], strict=False)
        return all((np.clip(here + moves[int(a)], 0, room) == there).all() for here, there, a in steps)

    assert sum(follows(track) for track in tracks) == 1
    assert clip.actions[0] == 0
    assert set(clip.actions.tolist()) == {0, 1, 2, 3, 4}
