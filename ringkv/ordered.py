"""Strategies that keep a session's frames in frame order, behind the ``AttentionResource`` contract.

A strategy is an ``OrderedLayer`` and a few lines; states, reads and memory figures are here. Rows of a step are written
and read one after the other, so that no read spans two sessions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence, Set
from itertools import compress

import torch

from ringkv import layout, memory
from ringkv.attention import paths
from ringkv.config import KVConfig
from ringkv.holes import Holes
from ringkv.lifecycle import LifecycleResource
from ringkv.ordered_layer import OrderedLayer, Visible
from ringkv.resource import MemoryReport
from ringkv.state import Layers


class OrderedKVManager(LifecycleResource):
    """One ``OrderedLayer`` per attention layer.

    A state's layer has the frames that later frames may need left-aligned in frame order, and scratch as its last
    frame. An aborted commit leaves nothing to lose: the frame was never among the held ones. Frames in order are one
    segment, read in one call without a join, so ``auto`` is ``sdpa``. A hole is zeros in storage and
    masked out of every read.
    """

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
        self._holes = Holes(self._geometry)

    @abstractmethod
    def _build_layer(self, layer_idx: int) -> OrderedLayer:
        """The storage of one layer, empty."""

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
            "undo": 0,
            "flags": sum(layer.flag_bytes for layer in self.layers),
            "parked": self._parking.nbytes,
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
            holes = self._holes.of(session, layer_idx)
            if holes:
                visible = self._without(holes, visible, layer.frames_at(clock))
            outputs.append(self._read(q[row : row + 1], visible))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _read(self, q: torch.Tensor, visible: Visible) -> torch.Tensor:
        if self.attention != "canonical":
            return paths.masked(q, *visible)
        tokens = self.config.tokens_per_frame
        keys, values = visible.keys.split(tokens, dim=2), visible.values.split(tokens, dim=2)
        if visible.mask is not None:
            marks = visible.mask[::tokens].tolist()
            keys, values = tuple(compress(keys, marks)), tuple(compress(values, marks))
        return paths.canonical(q, keys, values)

    def _without(self, holes: Set[int], visible: Visible, frames: Sequence[int]) -> Visible:
        """``visible``, whose keys are those of ``frames``, with holes masked out."""
        marks = torch.tensor([frame not in holes for frame in frames], dtype=torch.bool, device="cpu")
        mask = marks.repeat_interleave(self.config.tokens_per_frame).to(self.device)
        return visible._replace(mask=mask if visible.mask is None else mask & visible.mask)

    def _committed(self, session: int, frame: int) -> None:
        for layer in self.layers:
            layer.settle(session, frame)
        self._holes.prune(session, frame)

    def _clear_aborted(self, rid: str, session: int) -> None:
        for layer in self.layers:
            layer.discard(session)

    def _erase(self, session: int) -> None:
        for layer in self.layers:
            layer.erase(session)
        self._holes.drop(session)

    def _export(self, rid: str, session: int, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        layer, config, clock = self.layers[layer_idx], self.config, self._table.clock_of(rid)
        places, tokens = layout.places(self._geometry, layer_idx, clock), config.tokens_per_frame
        room = layout.room(self._geometry, layer_idx, clock)
        shape = (2, 1, config.num_kv_heads, room * tokens, config.head_dim)
        kv = torch.zeros(shape, dtype=self.dtype, device=self.device)
        kv[:, :, :, : len(places) * tokens].copy_(layer.history(session, len(places)))
        marks = torch.zeros(room, dtype=torch.bool, device="cpu")
        holes = self._holes.of(session, layer_idx)
        marks[[place for frame, place in places.items() if frame not in holes]] = True
        marks[-1] = True
        return kv, marks.repeat_interleave(tokens).to(self.device)

    def _import(self, session: int, layers: Layers, clock: int | None, holes: Sequence[set[int]]) -> None:
        tokens = self.config.tokens_per_frame
        for index, (layer, (kv, written)) in enumerate(zip(self.layers, layers, strict=True)):
            end = len(layout.places(self._geometry, index, clock)) * tokens
            history = kv[:, :, :, :end]
            if holes[index]:
                history = history.clone()
                history[:, :, :, ~written[:end]] = 0
            layer.restore(session, history)
        self._holes.put(session, holes)

    def _check_storage(self) -> None:
        clocks = {session: self._table.clock_of(rid) for rid, session in self._table.holders.items()}
        for index, layer in enumerate(self.layers):
            try:
                layer.check(clocks)
            except RuntimeError as error:
                raise RuntimeError(f"layer {index}: {error}") from error
