"""The window rebuilt by concatenation on every pass, behind the ``AttentionResource`` contract."""

from __future__ import annotations

from typing import ClassVar

import torch

from ringkv import horizon
from ringkv.config import CatKVConfig, KVConfig, RingKVLayerConfig
from ringkv.ordered import OrderedKVManager
from ringkv.ordered_layer import OrderedLayer, Visible

Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys and values ``[1, H, n, D]`` of n tokens, each with a storage of its own."""


class CatLayer(OrderedLayer):
    """Per session a pair of tensors, which every pass concatenates with its own frame into a fresh pair.

    The pair of a kept frame's committing pass is the history of the frames that follow it, until the next kept frame
    takes its place. That one no longer sees the oldest frame of a full window, which stays in storage that long.
    """

    def __init__(self, config: KVConfig, geometry: RingKVLayerConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        self.geometry = geometry
        self._past: list[Pair] = [self._nothing() for _ in range(self.num_sessions)]
        self._pending: dict[int, Pair] = {}

    def write(self, session: int, clock: int, k: torch.Tensor, v: torch.Tensor, *, commit: bool) -> Visible:
        kept = horizon.is_kept(self.geometry, clock)
        hidden = self.tokens_per_frame if kept and self.held[session] == self.geometry.ring_buckets else 0
        past_keys, past_values = self._past[session]
        keys = torch.cat([past_keys[:, :, hidden:], k[None].to(self.dtype)], dim=2)
        values = torch.cat([past_values[:, :, hidden:], v[None].to(self.dtype)], dim=2)
        if commit and kept:
            self._pending[session] = (keys, values)
        return Visible(keys, values, None)

    def settle(self, session: int, clock: int) -> None:
        if horizon.is_kept(self.geometry, clock):
            self._past[session] = self._pending.pop(session)
            self.held[session] = self._past[session][0].shape[2] // self.tokens_per_frame

    def discard(self, session: int) -> None:
        self._pending.pop(session, None)

    def erase(self, session: int) -> None:
        self._pending.pop(session, None)
        self._past[session] = self._nothing()
        self.held[session] = 0

    def frames_at(self, clock: int) -> list[int]:
        return [*horizon.visible_frames(self.geometry, clock), clock]

    def history(self, session: int, frames: int) -> torch.Tensor:
        first = (self.held[session] - frames) * self.tokens_per_frame
        return torch.stack([past[:, :, first:] for past in self._past[session]])

    def restore(self, session: int, history: torch.Tensor) -> None:
        self._past[session] = (history[0].clone(), history[1].clone())
        self.held[session] = history.shape[3] // self.tokens_per_frame

    def session_bytes(self, session: int) -> int:
        pending = self._pending.get(session, ())
        return sum(tensor.untyped_storage().nbytes() for tensor in (*self._past[session], *pending))

    def in_use_frames(self, session: int) -> int:
        return self.held[session] + (session in self._pending)

    def expected_held(self, clock: int | None) -> set[int]:
        visible = horizon.num_visible(self.geometry, horizon.frame_after(clock))  # all that a loaded session has
        return {visible, len(horizon.held_frames(self.geometry, clock))}

    def is_empty(self, session: int) -> bool:
        return self.session_bytes(session) == 0

    def _nothing(self) -> Pair:
        shape = (1, self.num_kv_heads, 0, self.head_dim)
        return (
            torch.empty(shape, dtype=self.dtype, device=self.device),
            torch.empty(shape, dtype=self.dtype, device=self.device),
        )


class CatKVManager(OrderedKVManager):
    """One ``CatLayer`` per layer. What many published samplers do: no buffer to manage, a new window in every pass."""

    config_class = CatKVConfig
    fixed_addresses: ClassVar[bool] = False
    config: CatKVConfig
    layers: list[CatLayer]

    def _build_layer(self, layer_idx: int) -> CatLayer:
        return CatLayer(self.config, self.config.layers[layer_idx], self.dtype, self.device)
