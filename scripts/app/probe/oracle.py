"""A reader with hand-built keys and values: it finds a place again exactly when the cache still shows it.

No weights, no training. Each frame is one token. Its key is the one-hot code of the place that the frame shows, its
value the frame itself. Where the camera comes to, the reader asks for that place's code. Its own token of that moment
answers to every question, half as loud as a match: softmax then puts its whole weight, to the last bit, on the frame of
that place where it is in view, and otherwise on the reader's own token, whose value stands for "not found".

A match scores 2 g, the own token g, any other frame 0, with g = 295 at 768 dimensions: exp(-g) is 0 even in fp64.
Keys are powers of two and values multiples of 1/128 below 1, so that bf16 and fp16 caches hold them exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from model.config import ModelConfig
from model.data.clip import Pixels
from ringkv import AttentionResource
from ringkv.runner import RolloutRequest

HEAD_DIM = 768
"""Elements of a frame of 16 x 16 RGB, which is one value; and one more than the places that keys can tell apart."""

_LOUD, _HALF = 128.0, 64.0
_NOT_FOUND = 2.0


class OracleReader:
    """A ``FrameModel``: ``actions`` are the places of the frames, and what is generated is the truth, committed.

    walks: frames ``[num_frames, 3, 16, 16]`` of each stream, from ``to_values``. retrieved: what each layer found, by
    stream and clock, ``[L, 3, 16, 16]``.
    """

    fingerprint = "oracle reader"

    def __init__(self, num_layers: int, walks: Mapping[int, torch.Tensor]) -> None:
        self._num_layers, self._walks = num_layers, walks
        self.retrieved: dict[tuple[int, int], torch.Tensor] = {}

    def observe(
        self, resource: AttentionResource, frames: torch.Tensor, actions: torch.Tensor, frame_pos: torch.Tensor
    ) -> None:
        """Make ``frames`` ``[B, 3, 16, 16]``, of the places ``actions``, history in every layer."""
        keys, values = _codes(actions), frames.reshape(len(frames), 1, 1, HEAD_DIM)
        for layer in range(self._num_layers):
            resource.attend(keys, keys, values, layer, frame_pos, commit=True)

    def generate(
        self,
        resource: AttentionResource,
        seeds: Sequence[int],
        streams: Sequence[int],
        actions: torch.Tensor,
        frame_pos: torch.Tensor,
    ) -> torch.Tensor:
        """Ask for the places ``actions`` in every layer, write down what is found, and go on with the truth."""
        queries = _codes(actions)
        queries[..., -1] = _LOUD
        own_key = torch.zeros_like(queries)
        own_key[..., -1] = _HALF
        own_value = torch.full_like(queries, _NOT_FOUND)
        answers = [
            resource.attend(queries, own_key, own_value, layer, frame_pos, commit=False).cpu()
            for layer in range(self._num_layers)
        ]
        clocks = frame_pos.tolist()
        for row, key in enumerate(zip(streams, clocks, strict=True)):
            self.retrieved[key] = torch.stack([answer[row].reshape(3, 16, 16) for answer in answers])
        truth = torch.stack([self._walks[stream][clock] for stream, clock in zip(streams, clocks, strict=True)])
        self.observe(resource, truth.to(queries.device), actions, frame_pos)
        return truth

    def hits(self, stream: int, clock: int) -> list[bool]:
        """Whether each layer found the very frame."""
        truth = self._walks[stream][clock]
        return [torch.equal(found, truth) for found in self.retrieved[stream, clock]]


def oracle_model(dilations: Sequence[int]) -> ModelConfig:
    """The geometry of a reader with one layer for each of ``dilations``: (1,), (d,) or (1, d)."""
    return ModelConfig(
        name="oracle",
        channels=3,
        height=16,
        width=16,
        tokens_per_frame=1,
        d_model=HEAD_DIM,
        num_layers=len(dilations),
        num_heads=1,
        num_kv_heads=1,
        head_dim=HEAD_DIM,
        num_actions=HEAD_DIM - 1,
        global_period=1 if len(dilations) == 1 and dilations[0] > 1 else 2,
    )


def oracle_requests(
    frames: Sequence[Pixels], places: Sequence[np.ndarray], given: Sequence[int]
) -> list[RolloutRequest]:
    """A request per walk, uint8 [num_frames, 16, 16, 3] and its places int64 [num_frames], ``given`` of them given."""
    return [
        RolloutRequest(
            rid=f"walk-{stream}",
            seed=0,
            stream=stream,
            num_frames=len(walk),
            context=to_values(walk[:first]),
            actions=torch.from_numpy(where),
        )
        for stream, (walk, where, first) in enumerate(zip(frames, places, given, strict=True))
    ]


def to_values(frames: Pixels) -> torch.Tensor:
    """uint8 [N, 16, 16, 3] as fp32 [N, 3, 16, 16]: multiples of 1/128 from -1 to below 1, exact in bf16 and fp16."""
    return (torch.from_numpy(frames).permute(0, 3, 1, 2).to(torch.float32) - 128.0) / 128.0


def _codes(places: torch.Tensor) -> torch.Tensor:
    """``[B, 1, 1, HEAD_DIM]``: one-hot keys of ``places`` ``[B]``, which are below ``HEAD_DIM - 1``."""
    codes = torch.zeros(len(places), 1, 1, HEAD_DIM, device=places.device)
    codes[torch.arange(len(places), device=places.device), 0, 0, places] = _LOUD
    return codes
