"""Frames from noise: rectified flow in a few Euler steps, then the committing pass.

A frame at noise ``s`` is ``x_s = (1 - s) x + s e``; the network predicts x, so the flow's velocity is ``(x_s - x) / s``
and an Euler step from s to s' is ``x_s' = x + (s' / s) (x_s - x)`` with the predicted x.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from model.checkpoint import fingerprint
from model.config import checked_sigmas
from model.layers import wide
from model.transformer import FrameTransformer
from ringkv.resource import AttentionResource


def frame_noise(
    seed: int, stream: int, frame: int, pass_idx: int, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Standard normal noise of ``shape``, on the CPU: a pure function of (seed, stream, frame, pass_idx), any integers.

    Drawn in fp32 whatever ``dtype`` is, so that rollouts in several dtypes start from the same noise. The key feeds a
    counter-based generator whole: seeding torch's would keep 32 bits of it, and two of some 65,000 frames would share
    their noise.
    """
    key = hashlib.blake2b(f"{seed} {stream} {frame} {pass_idx}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    return torch.from_numpy(generator.standard_normal(tuple(shape), dtype=np.float32)).to(dtype)


class FrameSampler:
    """Drives a ``FrameTransformer`` over a cache: ``observe`` real frames, ``generate`` new ones.

    sigmas: noise levels, falling strictly from at most 1 to 0; each but the last is one denoise pass. None takes the
    model's. A start below 1 is that much noise over a zero (mid-grey) frame. Both calls expect a step that is planned,
    work for rows at different clocks, and leave ``commit`` to the caller.
    """

    def __init__(self, model: FrameTransformer, sigmas: Sequence[float] | None = None) -> None:
        self.model = model
        self.sigmas = checked_sigmas("FrameSampler", model.config.sigmas if sigmas is None else sigmas)

    @property
    def fingerprint(self) -> str:
        """Names the weights; reads all of them, every time."""
        return fingerprint(self.model)

    @property
    def frame_shape(self) -> tuple[int, int, int]:
        """C, H, W."""
        config = self.model.config
        return config.channels, config.height, config.width

    @property
    def weights_version(self) -> object:
        """Where the weights lie and how often they were written; a write through ``.data`` is not noticed."""
        return [(weight.data_ptr(), weight._version) for weight in self.model.parameters()]

    @torch.no_grad()
    def observe(
        self, resource: AttentionResource, frames: torch.Tensor, actions: torch.Tensor, frame_pos: torch.Tensor
    ) -> None:
        """Make real ``frames`` ``[B, C, H, W]`` history: one committing pass at sigma 0.

        actions, frame_pos: ``[B]`` int64; ``actions[b]`` led to ``frames[b]``.
        """
        self.model(frames, 0.0, actions, frame_pos, resource, commit=True)

    @torch.no_grad()
    def generate(
        self,
        resource: AttentionResource,
        seeds: Sequence[int],
        streams: Sequence[int],
        actions: torch.Tensor,
        frame_pos: torch.Tensor,
    ) -> torch.Tensor:
        """The frames ``[B, C, H, W]``, at least fp32, that ``actions`` ``[B]`` led to at clocks ``frame_pos`` ``[B]``.

        Row b's noise is that of ``(seeds[b], streams[b], frame_pos[b], 0)``, drawn once: the flow is deterministic.
        """
        return self.denoise(resource, self.noise(seeds, streams, frame_pos.tolist()), actions, frame_pos)

    def noise(self, seeds: Sequence[int], streams: Sequence[int], clocks: Sequence[int]) -> torch.Tensor:
        """The noise ``[B, C, H, W]`` that the rows' frames start from, at least fp32, on the CPU."""
        if not len(seeds) == len(streams) == len(clocks):
            raise ValueError(
                f"{len(seeds)} seeds, {len(streams)} streams, {len(clocks)} clocks: expected as many of each"
            )
        dtype = wide(self.model.position.dtype)
        keys = zip(seeds, streams, clocks, strict=True)
        return torch.stack(
            [frame_noise(seed, stream, clock, 0, self.frame_shape, dtype) for seed, stream, clock in keys]
        )

    @torch.no_grad()
    def denoise(
        self, resource: AttentionResource, noise: torch.Tensor, actions: torch.Tensor, frame_pos: torch.Tensor
    ) -> torch.Tensor:
        """``generate`` from the rows' noise ``[B, C, H, W]``: the denoise passes and the committing one."""
        x = self.sigmas[0] * noise.to(self.model.position.device)
        for sigma, next_sigma in pairwise(self.sigmas):
            clean = self.model(x, sigma, actions, frame_pos, resource, commit=False)
            x = torch.lerp(clean, x, next_sigma / sigma)
        self.model(x, 0.0, actions, frame_pos, resource, commit=True)
        return x
