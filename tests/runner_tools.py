"""A toy model whose frames tell history, and drivers of a runner.

The toy writes a frame as K and V and attends with q = 0, so a generated frame is the mean of what it may see plus its
action: two rollouts agree only if cache, clock, action and noise agree.
"""

from __future__ import annotations

import torch

from ringkv import EngineResourceInfo, KVSpec, RingKVConfig, RingKVLayerConfig, RolloutRequest, StepRunner

CHANNELS, HEIGHT, WIDTH = 1, 2, 1  # a frame is two tokens of one number


class ToyModel:
    """Two layers of attention over the resource; ``fail_on`` holds (clock, session-free stream) pairs that raise."""

    fingerprint = "toy"

    def __init__(self):
        self.fail_on: set[tuple[int, int]] = set()
        self.fail_after_layer = 1
        self.batches: list[tuple[str, int]] = []

    def _pass(self, resource, frames, frame_pos, *, commit, layers=2):
        rows = frames.shape[0]
        kv = frames.reshape(rows, 1, HEIGHT * WIDTH, 1).expand(rows, 1, HEIGHT * WIDTH, 2).contiguous()
        for layer in range(layers):
            out = resource.attend(torch.zeros_like(kv), kv, kv, layer, frame_pos, commit=commit)
        return out[..., :1].reshape(rows, CHANNELS, HEIGHT, WIDTH)

    def observe(self, resource, frames, actions, frame_pos):
        self.batches.append(("context", frames.shape[0]))
        self._pass(resource, frames, frame_pos, commit=True)

    def generate(self, resource, seeds, streams, actions, frame_pos):
        self.batches.append(("generated", len(streams)))
        rows = zip(seeds, streams, frame_pos.tolist(), strict=True)
        noise = torch.tensor([100 * seed + stream + clock / 16 for seed, stream, clock in rows])
        frames = noise.view(-1, 1, 1, 1).expand(-1, CHANNELS, HEIGHT, WIDTH)
        frames = self._pass(resource, frames, frame_pos, commit=False) + actions.view(-1, 1, 1, 1)
        for clock, stream in zip(frame_pos.tolist(), streams, strict=True):
            if (clock, stream) in self.fail_on:
                self._pass(resource, frames, frame_pos, commit=True, layers=self.fail_after_layer)
                raise FloatingPointError(f"frame {clock} of stream {stream}")
        self._pass(resource, frames, frame_pos, commit=True)
        return frames


def build(num_sessions, parking_dir=None, buckets=(3, 2), **more):
    layers = (
        RingKVLayerConfig(ring_frames=buckets[0], ring_buckets=buckets[0], pinned_dilation=1),
        RingKVLayerConfig(ring_frames=3, ring_buckets=buckets[1], pinned_dilation=2),
    )
    config = RingKVConfig(
        num_layers=2,
        num_kv_heads=1,
        head_dim=2,
        num_qo_heads=1,
        tokens_per_frame=2,
        num_sessions=num_sessions,
        layers=layers,
        **more,
    )
    spec = KVSpec(resource_key="kv", config=config)
    info = EngineResourceInfo(device="cpu", kv_dtype=torch.float32, parking_dir=parking_dir)
    return spec.resource_class.build(spec, info)


def request(rid, stream=0, num_frames=8, context=2):
    return RolloutRequest(
        rid=rid,
        seed=1,
        stream=stream,
        num_frames=num_frames,
        context=torch.arange(context * HEIGHT, dtype=torch.float32).view(context, CHANNELS, HEIGHT, WIDTH),
        actions=torch.arange(num_frames) % 3,
    )


def run_all(runner, steps=1000):
    """Every frame of every request by rid, each once and in order."""
    frames: dict[str, list] = {}
    for _ in range(steps):
        if not runner.pending:
            return frames
        for result in runner.step():
            assert result.frame == len(frames.setdefault(result.rid, []))
            frames[result.rid].append(result.image)
    raise AssertionError(f"{runner.pending} requests still pending after {steps} steps")


def run_all_frames(runner, steps=1000):
    """The frames of all requests in the order they are made, of at most ``steps`` steps."""
    images = []
    while runner.pending and steps:
        images += [result.image for result in runner.step()]
        steps -= 1
    return images


def solo(stream, **kwargs):
    return torch.stack(run_all_of(StepRunner(build(1), ToyModel()), request("solo", stream, **kwargs))["solo"])


def run_all_of(runner, *requests):
    for item in requests:
        runner.submit(item)
    return run_all(runner)
