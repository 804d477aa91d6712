"""Runs the rollouts of a probe: weights, caches of any geometry, many clips side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from model.sampler import FrameSampler
from ringkv import AttentionResource
from ringkv.config import KVConfig
from ringkv.runner import FrameModel, RolloutRequest
from scripts.app import build
from scripts.app.geometry import model_config
from scripts.app.probe.check import Probe
from scripts.app.schema import RolloutConfig
from scripts.app.strategies import kv_config

Tick = Callable[[int], None]
"""Told how many frames were made."""


@dataclass(frozen=True)
class Setup:
    """What all rollouts of a probe share. tick: told about every frame made."""

    probe: Probe
    weights: build.Weights
    sampler: FrameSampler
    tick: Tick

    @property
    def trained(self) -> bool:
        """Whether the weights come from a file."""
        return self.weights.path is not None

    @property
    def weights_name(self) -> str:
        """For labels: the checkpoint's file name, or random."""
        return "random weights" if self.weights.path is None else self.weights.path.stem

    def roll(
        self, config: RolloutConfig, requests: Sequence[RolloutRequest], *, model: FrameModel | None = None
    ) -> dict[str, torch.Tensor]:
        """The generated frames of each request, ``[n, C, H, W]`` by rid, in the cache that ``config`` asks for.

        model: what is driven in place of the sampler.
        """
        return self.roll_in(config, kv_config(config, model_config(config)), requests, model or self.sampler)

    def roll_in(
        self, config: RolloutConfig, kept: KVConfig, requests: Sequence[RolloutRequest], model: FrameModel
    ) -> dict[str, torch.Tensor]:
        """The same in a cache of geometry ``kept``. A rollout that fails raises what ended it."""
        runner = build.build_runner(config.kv.strategy, kept, build.resource_info(config), model)
        for request in requests:
            runner.submit(request)
        images: dict[str, list[torch.Tensor]] = {request.rid: [] for request in requests}
        while runner.pending:
            results = runner.step()
            for result in results:
                if result.phase == "generated":
                    images[result.rid].append(result.image.cpu())
            if runner.failed:
                raise next(iter(runner.failed.values()))
            self.tick(len(results))
        return {rid: torch.stack(frames) for rid, frames in images.items()}


def make_setup(probe: Probe, tick: Tick) -> Setup:
    """Load or draw the weights. ``ValueError`` for a checkpoint that turns out unfit."""
    config = probe.config
    assert config.threads is not None
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    weights = build.build_weights(config, model_config(config))
    return Setup(probe, weights, FrameSampler(weights.model), tick)


def num_frames(probe: Probe) -> int:
    """Frames that the points' rollouts have together, one session each: what progress is counted by, roughly."""
    return sum(config.num_frames or 0 for config in probe.points.values())


class TeacherForced:
    """A model whose history is always the given truth: what it generates is written down and not gone on with.

    truth: frames ``[num_frames, C, H, W]`` of each stream. made: what was generated, by stream and clock.
    """

    def __init__(self, model: FrameModel, truth: dict[int, torch.Tensor]) -> None:
        self._model, self._truth = model, truth
        self.made: dict[tuple[int, int], torch.Tensor] = {}

    @property
    def fingerprint(self) -> str:
        """That of the model."""
        return self._model.fingerprint

    def observe(
        self, resource: AttentionResource, frames: torch.Tensor, actions: torch.Tensor, frame_pos: torch.Tensor
    ) -> None:
        """As the model does."""
        self._model.observe(resource, frames, actions, frame_pos)

    def generate(
        self,
        resource: AttentionResource,
        seeds: Sequence[int],
        streams: Sequence[int],
        actions: torch.Tensor,
        frame_pos: torch.Tensor,
    ) -> torch.Tensor:
        """Generate without committing, then commit the truth and return it."""
        uncommitted = cast(AttentionResource, _Uncommitted(resource))  # a model calls nothing but ``attend``
        clocks = frame_pos.tolist()
        made = self._model.generate(uncommitted, seeds, streams, actions, frame_pos)
        for stream, clock, frame in zip(streams, clocks, made, strict=True):
            self.made[stream, clock] = frame.cpu()
        truth = torch.stack([self._truth[stream][clock] for stream, clock in zip(streams, clocks, strict=True)])
        truth = truth.to(made.device, made.dtype)
        self._model.observe(resource, truth, actions, frame_pos)
        return truth


class _Uncommitted:
    """A resource in which nothing that is generated becomes history."""

    def __init__(self, resource: AttentionResource) -> None:
        self._resource = resource

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer_idx: int,
        frame_pos: torch.Tensor,
        *,
        commit: bool,
    ) -> torch.Tensor:
        return self._resource.attend(q, k, v, layer_idx, frame_pos, commit=False)
