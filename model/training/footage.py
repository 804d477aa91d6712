"""Where training sequences are cut from. A sequence is a pure function of the generator that it is drawn with.

Letters: B sequences, N frames of a sequence, C channels, H, W frame.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from model.data.clip import Clip, Pixels
from model.data.load import load_clip
from model.data.loops import MAX_LOOP, MIN_LOOP
from model.data.photos import photo_loops
from model.data.tensors import frames_to_model

FIRST_TRAINING_SEED = 1000
"""Games are recorded for training with seeds from here on; those below are for everything that is held out."""


@dataclass(frozen=True, eq=False)
class Footage:
    """A batch of it. frames: ``[B, N, C, H, W]`` in [-1, 1]. actions: ``[B, N]`` int64, what led to each frame.

    announced: ``[B, N]`` bool: whether something in a frame's past, as far as it is in view, tells what it shows.
    """

    frames: torch.Tensor
    actions: torch.Tensor
    announced: torch.Tensor


class FootageSource(ABC):
    """Footage to train on. data_hash: sha256 (hex) of all of it."""

    data_hash: str

    @abstractmethod
    def draw(self, rng: np.random.Generator, count: int, length: int, history: Sequence[Collection[int]]) -> Footage:
        """``count`` sequences of ``length`` frames; ``history[f]``: the earlier frames that frame f has in view."""

    @abstractmethod
    def background(self) -> torch.Tensor | None:
        """The picture ``[C, H, W]`` that most frames show in most places; None where there is none."""


class GameFootage(FootageSource):
    """Recorded games: stretches of the clips, every frame announced."""

    def __init__(self, clips: Sequence[Clip]) -> None:
        self._clips = clips
        self.data_hash = _joint_hash(clip.content_hash for clip in clips)

    def draw(self, rng: np.random.Generator, count: int, length: int, history: Sequence[Collection[int]]) -> Footage:
        pixels, actions = [], []
        for _ in range(count):
            clip = self._clips[int(rng.integers(len(self._clips)))]
            first = int(rng.integers(len(clip.actions) - length + 1))
            pixels.append(clip.frames[first : first + length])
            actions.append(clip.actions[first : first + length])
        announced = torch.ones(count, length, dtype=torch.bool)
        return Footage(_to_model(np.stack(pixels)), torch.from_numpy(np.stack(actions)), announced)

    def background(self) -> torch.Tensor:
        """The median of every pixel over time, of every eighth frame."""
        frames = np.concatenate([clip.frames[::8] for clip in self._clips])
        return frames_to_model(np.median(frames, axis=0).round().astype(np.uint8)[None])[0]


class LoopFootage(FootageSource):
    """Loops of distinct pictures, shown over and over: a frame is announced where its picture is in view.

    loops: for each loop length, uint8 ``[count, length, H, W, C]``. The length of a sequence's loop is drawn first, so
    all lengths are seen equally often.
    """

    def __init__(self, loops: Sequence[Pixels]) -> None:
        self._loops = loops
        self.data_hash = _joint_hash(hashlib.sha256(np.ascontiguousarray(each).data).hexdigest() for each in loops)

    def draw(self, rng: np.random.Generator, count: int, length: int, history: Sequence[Collection[int]]) -> Footage:
        pixels, announced = [], np.zeros((count, length), bool)
        for row in range(count):
            loops = self._loops[int(rng.integers(len(self._loops)))]
            loop = loops[int(rng.integers(len(loops)))]
            period = len(loop)
            pixels.append(loop[np.arange(length) % period])
            announced[row] = [any((frame - seen) % period == 0 for seen in history[frame]) for frame in range(length)]
        actions = torch.zeros(count, length, dtype=torch.int64)
        return Footage(_to_model(np.stack(pixels)), actions, torch.from_numpy(announced))

    def background(self) -> None:
        """Nothing stays."""


def load_footage(
    name: str, *, clips: int, clip_frames: int, channels: int, height: int, width: int, seed: int, folder: str
) -> FootageSource:
    """Footage of ``name``: recordings of a game, or loops of photo crops, ``clips`` of each length, for data=loops.

    Held-out data is other: games with seeds below ``FIRST_TRAINING_SEED``, crops of other photos.
    """
    if name == "loops":
        lengths = range(MIN_LOOP, MAX_LOOP + 1)
        return LoopFootage([photo_loops("train", length, clips, seed) for length in lengths])
    return GameFootage(
        [
            load_clip(
                name,
                num_frames=clip_frames,
                channels=channels,
                height=height,
                width=width,
                seed=FIRST_TRAINING_SEED + seed,
                index=index,
                folder=folder,
            )
            for index in range(clips)
        ]
    )


def _to_model(pixels: Pixels) -> torch.Tensor:
    return frames_to_model(pixels.reshape(-1, *pixels.shape[2:])).unflatten(0, pixels.shape[:2])


def _joint_hash(hashes: Iterable[str]) -> str:
    return hashlib.sha256("".join(hashes).encode()).hexdigest()
