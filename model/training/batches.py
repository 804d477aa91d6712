"""The batch of a training step: a pure function of recipe, model, footage and the number of the step.

So nothing about randomness has to be saved: the number of the next step is the whole cursor.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from model.config import ModelConfig
from model.training.footage import FootageSource
from model.training.recipe import Recipe
from model.training.sequence import SequenceModel, Sequences, history_of
from ringkv import RingKVLayerConfig

MIN_SIGMA = 0.02
_FADE_CELLS = 8
"""Rows and columns of the grid over which a faded history differs from place to place."""


@dataclass(frozen=True, eq=False)
class Batch:
    """What the model is shown and what it should say.

    layers: the ring of each layer. target: ``[B, T, C, H, W]``, frames 1 to T. weight: ``[B, T, 1, H, W]`` of every
    pixel in the loss. own: ``[B // 2, T - 1]`` bool, for the last sequences: whether the model's own frame is to stand
    in for clean frame 1, 2, ... own_noise: ``[B // 2, T, C, H, W]``, what it makes them from.
    """

    sequences: Sequences
    layers: tuple[RingKVLayerConfig, ...]
    target: torch.Tensor
    weight: torch.Tensor
    own: torch.Tensor
    own_noise: torch.Tensor


def draw_batch(
    recipe: Recipe, config: ModelConfig, source: FootageSource, background: torch.Tensor | None, step: int
) -> Batch:
    """The batch of step ``step``."""
    rng = np.random.default_rng([recipe.seed, step])
    long = rng.random() < recipe.long_share
    count, length = (recipe.long_batch, recipe.long_frames) if long else (recipe.batch, recipe.frames)
    layers = _draw_layers(recipe, config, rng, long=long)
    start = int(rng.integers(recipe.max_start + 1))
    histories = [history_of(layer, start, length) for layer in layers]
    in_view = [set().union(*seen) for seen in zip(*histories, strict=True)]
    footage = source.draw(rng, count, length + 1, in_view)

    clean, target = footage.frames[:, :-1], footage.frames[:, 1:]
    rollout = step >= recipe.rollout_from
    served = count - count // 2  # sequences whose history is as it is; the rest is the noisy half
    if rollout and recipe.history_fade and background is not None:
        clean = torch.cat([clean[:served], _faded(rng, clean[served:], background, recipe)])
    level = torch.zeros(count)
    level[served:] = torch.from_numpy(rng.uniform(0, recipe.history_noise, count - served))
    clean = clean + level[:, None, None, None, None] * _normal(rng, clean.shape)
    u = torch.from_numpy(rng.random((count, length)))
    sigma = (3 * u / (1 + 2 * u)).clamp_min(MIN_SIGMA).float()
    noised = torch.lerp(target, _normal(rng, target.shape), sigma[:, :, None, None, None])

    weight = torch.ones_like(target[:, :, :1])
    if background is not None:
        reach = recipe.object_reach if rollout else 0
        shown = footage.frames[:, :-1] if reach else target
        differs = (shown - background).abs().amax(dim=2, keepdim=True) > recipe.object_threshold
        near = F.max_pool2d(differs.flatten(0, 1).float(), 2 * reach + 1, stride=1, padding=reach)
        object_weight = recipe.late_object_weight if rollout and recipe.late_object_weight else recipe.object_weight
        weight = weight + (object_weight - 1) * near.view_as(weight)
    announced = torch.where(footage.announced[:, 1:], 1.0, recipe.unpredictable_weight)
    weight = weight * (announced * 0.5 / sigma.clamp_min(0.3))[:, :, None, None, None]
    share = recipe.own_share if rollout else 0.0
    own = torch.from_numpy(rng.random((count // 2, length - 1)) < share)
    own_noise = _normal(rng, target[: count // 2].shape) if share > 0 else torch.empty(0)
    return Batch(Sequences(clean, noised, sigma, footage.actions, start), layers, target, weight, own, own_noise)


@torch.no_grad()
def with_own_history(batch: Batch, model: SequenceModel) -> Sequences:
    """The batch's sequences, with frames in the history that ``model`` made in one pass where ``own`` says so.

    A rollout's history holds the model's own frames, errors included; so does this one, one pass deep, while the frames
    to be predicted stay the true ones: small errors are to be undone, not passed on.
    """
    sequences, count = batch.sequences, len(batch.own)
    if not bool(batch.own.any()):
        return sequences
    last = slice(len(sequences.clean) - count, None)
    seen = dataclasses.replace(
        sequences,
        clean=sequences.clean[last],
        noised=batch.own_noise,
        sigma=torch.ones_like(sequences.sigma[last]),
        actions=sequences.actions[last],
    )
    made = model(seen, batch.layers)[:, :-1]  # frames 1 to T - 1
    clean = sequences.clean.clone()
    clean[last, 1:] = torch.where(batch.own[:, :, None, None, None], made, clean[last, 1:])
    return dataclasses.replace(sequences, clean=clean)


def loss(predicted: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Mean squared error of the clean frames, each pixel with its weight (not normalised: weights are meant)."""
    return ((predicted - batch.target).square() * batch.weight).mean()


def _draw_layers(
    recipe: Recipe, config: ModelConfig, rng: np.random.Generator, *, long: bool
) -> tuple[RingKVLayerConfig, ...]:
    if long and recipe.long_min_ring_frames:
        ring_frames = int(rng.integers(recipe.long_min_ring_frames, recipe.max_ring_frames + 1))
    else:
        ends = math.log(recipe.min_ring_frames), math.log(recipe.max_ring_frames + 1)
        ring_frames = int(math.exp(rng.uniform(*ends)))
    dilation = int(rng.integers(2, recipe.max_dilation + 1)) if rng.random() < recipe.dilated_share else 1
    return tuple(
        RingKVLayerConfig(ring_frames=ring_frames, ring_buckets=ring_frames, pinned_dilation=each)
        for each in config.layer_dilations(dilation)
    )


def _faded(rng: np.random.Generator, frames: torch.Tensor, background: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """``[B, T, C, H, W]`` with what differs from the background fainter, by a share that varies over a grid."""
    shape = frames.shape[:2]
    share = torch.from_numpy(
        rng.uniform(0, recipe.history_fade, (shape.numel(), 1, _FADE_CELLS, _FADE_CELLS)).astype(np.float32)
    )
    share = F.interpolate(share, frames.shape[-2:], mode="bilinear").unflatten(0, shape)
    return torch.lerp(frames, background, share)


def _normal(rng: np.random.Generator, shape: torch.Size) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(tuple(shape), dtype=np.float32))
