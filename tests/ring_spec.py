"""What the specification knows, in plain Python: requests, slots, and the bytes that follow from them.

Letters: H KV heads, T tokens per frame, N visible tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from ringkv import RingKVLayerConfig, RingKVManager
from tests.ring_tools import clocks, reference_history, ring, step_of


@st.composite
def layer_geometry(draw: st.DrawFn) -> RingKVLayerConfig:
    frames = draw(st.integers(1, 5))
    return ring(draw(st.integers(1, frames)), draw(st.integers(1, 4)), frames)


@dataclasses.dataclass
class Request:
    """What the specification knows of a registered request."""

    holds: bool = False
    parked: bool = False
    contents: list[int] = dataclasses.field(default_factory=list)  # content of every committed frame
    admitted: bool = False  # at the next frame
    killed: bool = False  # the slot hidden at the next frame, by a commit that was not finished
    content: int = 0  # what the next frames will hold
    lost: dict[int, set[int]] = dataclasses.field(default_factory=dict)  # by layer, frames that a restore did not find
    undo: int = 0  # frames that it can be taken back

    def copy(self, content: int) -> Request:
        """Another request that stands where this one does, to go on with another content. Not admitted."""
        lost = {layer: set(frames) for layer, frames in self.lost.items()}
        return dataclasses.replace(
            self, holds=True, parked=False, contents=list(self.contents), admitted=False, content=content, lost=lost
        )

    @property
    def frame(self) -> int:
        return len(self.contents)

    @property
    def clock(self) -> int | None:
        return self.frame - 1 if self.contents else None


def slots_of(layer: RingKVLayerConfig, frames: int) -> dict[int, int]:
    """Slot -> frame once ``frames`` frames are committed."""
    slots: dict[int, int] = {}
    for count, frame in enumerate(range(0, frames, layer.pinned_dilation)):
        slots[count % layer.ring_buckets] = frame
    return slots


def taken_slot(layer: RingKVLayerConfig, frame: int) -> int | None:
    """Slot that ``frame`` will overwrite, if any."""
    d = layer.pinned_dilation
    return None if frame % d else (frame // d) % layer.ring_buckets


@dataclasses.dataclass
class Spec:
    """Geometry, and what a session of it holds and shows."""

    layers: Sequence[RingKVLayerConfig]
    tokens: int
    heads: int

    def frame_of(self, frame: int, content: float) -> tuple[Tensor, Tensor]:
        """K and V [H, T, 2] of one frame; every (content, frame, head, token) is a different vector."""
        second = torch.arange(self.tokens) + 4.0 * torch.arange(self.heads)[:, None] + 16.0 * content
        k = torch.stack([torch.full_like(second, frame + 1.0), second], dim=-1)
        return k, k * torch.tensor([-1.0, 1.0])

    def state_of(self, request: Request) -> list[tuple[Tensor, Tensor]]:
        """The layers of a state of ``request``."""
        out = []
        for index, layer in enumerate(self.layers):
            capacity = (layer.ring_frames + 1) * self.tokens
            kv, written = torch.zeros(2, 1, self.heads, capacity, 2), torch.zeros(capacity, dtype=torch.bool)
            written[-self.tokens :] = True
            for slot, frame in slots_of(layer, request.frame).items():
                killed = request.killed and slot == taken_slot(layer, request.frame)
                if not killed and frame not in request.lost.get(index, ()):
                    span = slice(slot * self.tokens, (slot + 1) * self.tokens)
                    kv[0, 0, :, span], kv[1, 0, :, span] = self.frame_of(frame, request.contents[frame])
                    written[span] = True
            out.append((kv, written))
        return out

    def visible(self, request: Request, index: int, own: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """K and V [H, N, 2] that the next frame of ``request`` sees in a layer, itself included."""
        layer, lost = self.layers[index], request.lost.get(index, ())
        history = reference_history(layer.ring_buckets, layer.pinned_dilation, request.frame)
        frames = [self.frame_of(frame, request.contents[frame]) for frame in history if frame not in lost] + [own]
        return torch.cat([k for k, _ in frames], dim=1), torch.cat([v for _, v in frames], dim=1)

    def play(self, manager: RingKVManager, rid: str, contents: Sequence[int]) -> None:
        """Commit these contents, frame by frame, in a manager of this geometry."""
        manager.ingest_request(rid)
        for frame, content in enumerate(contents):
            step, ctx = step_of([(rid, frame)])
            assert manager.admit(step, ctx).ok
            manager.plan(step, ctx)
            k, v = self.frame_of(frame, content)
            for index in range(len(self.layers)):
                manager.upsert(k[None], v[None], index, clocks(frame), commit=True, build_visibility=False)
            manager.commit(step, ctx)
