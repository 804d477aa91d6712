"""Strategies that keep a session's frames in frame order, behind the ``AttentionResource`` contract.

A strategy is an ``OrderedLayer`` and a few lines; states, reads and memory figures are here. Rows of a step are written
and read one after the other, so that no read spans two sessions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ringkv import memory
from ringkv.attention import paths
from ringkv.config import KVConfig, RingKVLayerConfig
from ringkv.lifecycle import LifecycleResource
from ringkv.ordered_layer import OrderedLayer, Visible
from ringkv.resource import MemoryReport
from ringkv.state import check_tensor


class OrderedKVManager(LifecycleResource):
    """One ``OrderedLayer`` per attention layer.

    A state's layer has the frames that later frames may need left-aligned in frame order, and scratch as its last
    frame. An aborted commit leaves nothing to lose: the frame was never among the held ones. Frames in order are one
    segment, read in one call without a join, so ``auto`` is ``sdpa``.
    """

    strategy: ClassVar[str]
    layers: Sequence[OrderedLayer]

    def __init__(
        self,
        config: KVConfig,
        name: str,
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
        attention: str = "auto",
    ) -> None:
        super().__init__(config, name, device, dtype, attention)
        self.layers = [self._build_layer(index) for index in range(config.num_layers)]

    @abstractmethod
    def _build_layer(self, layer_idx: int) -> OrderedLayer:
        """The storage of one layer, empty."""

    @abstractmethod
    def _layer_geometry(self) -> Sequence[RingKVLayerConfig] | None:
        """The window of each layer, None when every frame is seen."""

    def memory_bytes(self) -> int:
        return sum(layer.session_bytes(s) for layer in self.layers for s in range(layer.num_sessions))

    def memory_report(self) -> MemoryReport:
        held = self._table.holders.values()
        frames = sum(layer.in_use_frames(session) for layer in self.layers for session in held)
        padding = self._padding_session
        return {
            "resident": self.memory_bytes(),
            "in_use": frames * memory.frame_bytes(self.config, self.dtype),
            "padding": 0 if padding is None else sum(layer.session_bytes(padding) for layer in self.layers),
            "flags": sum(layer.flag_bytes for layer in self.layers),
        }

    # -- what the lifecycle asks for ---------------------------------------------------------------------------

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_idx: int, frame_pos: torch.Tensor, commit: bool
    ) -> torch.Tensor:
        plan, layer = self._require_plan(), self.layers[layer_idx]
        k, v = k.detach(), v.detach()  # else storage would join the caller's graph and keep it alive
        if commit:
            layer.commits += 1
        outputs = []
        for row, (session, clock) in enumerate(zip(plan.session_indices, plan.clocks, strict=True)):
            # A padding row never becomes history.
            visible = layer.write(session, clock, k[row], v[row], commit=commit and row < plan.num_real)
            outputs.append(self._read(q[row : row + 1], visible))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _read(self, q: torch.Tensor, visible: Visible) -> torch.Tensor:
        if self.attention != "canonical":
            return paths.masked(q, *visible)
        assert visible.mask is None, "a canonical read is of visible frames only"
        tokens = self.config.tokens_per_frame
        return paths.canonical(q, visible.keys.split(tokens, dim=2), visible.values.split(tokens, dim=2))

    def _committed(self, session: int, frame: int) -> None:
        for layer in self.layers:
            layer.settle(session, frame)

    def _clear_aborted(self, rid: str, session: int) -> None:
        for layer in self.layers:
            layer.discard(session)

    def _erase(self, session: int) -> None:
        for layer in self.layers:
            layer.erase(session)

    def _geometry(self) -> dict[str, Any]:
        config, windows = self.config, self._layer_geometry()
        return {
            "strategy": self.strategy,
            "num_layers": config.num_layers,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "tokens_per_frame": config.tokens_per_frame,
            "layers": None if windows is None else [[w.ring_buckets, w.pinned_dilation] for w in windows],
        }

    def _export(self, rid: str, session: int, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        layer, config = self.layers[layer_idx], self.config
        frames, room = layer.state_frames(self._table.clock_of(rid))
        tokens = frames * config.tokens_per_frame
        shape = (2, 1, config.num_kv_heads, room * config.tokens_per_frame, config.head_dim)
        kv = torch.zeros(shape, dtype=self.dtype, device=self.device)
        kv[:, :, :, :tokens].copy_(layer.history(session, frames))
        return kv, self._state_flags(frames, room)

    def _check_layer(self, layer_idx: int, kv: torch.Tensor, written: torch.Tensor, clock: int | None) -> None:
        config = self.config
        frames, room = self.layers[layer_idx].state_frames(clock)
        tokens = room * config.tokens_per_frame
        what = f"state layers[{layer_idx}]"
        check_tensor(f"{what} kv", kv, (2, 1, config.num_kv_heads, tokens, config.head_dim), self.dtype)
        check_tensor(f"{what} written", written, (tokens,), torch.bool)
        if not torch.equal(written.to(self.device), self._state_flags(frames, room)):
            raise ValueError(
                f"{what} written: at clock {clock} it marks {frames} frames from the start and the last one"
            )

    def _import(self, session: int, layers: list[tuple[torch.Tensor, torch.Tensor]], clock: int | None) -> None:
        for layer, (kv, _) in zip(self.layers, layers, strict=True):
            frames, _ = layer.state_frames(clock)
            layer.restore(session, kv[:, :, :, : frames * self.config.tokens_per_frame])

    def _check_storage(self) -> None:
        clocks = {session: self._table.clock_of(rid) for rid, session in self._table.holders.items()}
        for index, layer in enumerate(self.layers):
            try:
                layer.check(clocks)
            except RuntimeError as error:
                raise RuntimeError(f"layer {index}: {error}") from error

    def _state_flags(self, frames: int, room: int) -> torch.Tensor:
        """``[room * T]`` bool: the committed frames and, last, scratch."""
        flags = torch.zeros(room, dtype=torch.bool, device=self.device)
        flags[:frames] = True
        flags[-1] = True
        return flags.repeat_interleave(self.config.tokens_per_frame)
