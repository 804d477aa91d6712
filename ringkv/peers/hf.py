"""Hugging Face transformers' sliding cache behind the ``AttentionResource`` contract.

A ``DynamicSlidingWindowLayer`` of window W keeps the last ``W - 1`` tokens and hands an ``update`` those and its own
back. With ``W = (R - 1) * T + 1`` it keeps exactly ``R - 1`` frames of T tokens, which at dilation 1 are the frames
that a ring of R buckets shows.

transformers knows no passes: ``update`` is the write and the eviction. So a pass that does not commit concatenates its
own K and V without ``update``, and one that does runs with the layer's past recorded, transformers' own provision for
taking tokens back: ``crop(0)`` at the commit evicts what left the window, ``crop(-T)`` after an abort restores it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ringkv import horizon, layout
from ringkv.attention import paths
from ringkv.config import HFSlidingKVConfig
from ringkv.lifecycle import LifecycleResource
from ringkv.resource import MemoryReport, State
from ringkv.state import Layers, unmarked_frames

try:
    from transformers.cache_utils import Cache, DynamicSlidingWindowLayer
except ImportError as error:
    raise ImportError("hf_sliding needs transformers 5: pip install 'ringkv[peers]'") from error


@dataclass
class SlidingLayer:
    """What an attention layer's caches have in common. window_tokens: what transformers calls the sliding window."""

    window_tokens: int
    commits: int = 0


class HFSlidingKVManager(LifecycleResource):
    """One transformers cache object per session, a new one for each request.

    Padding rows stand at clock 0 and see themselves alone, so they need no storage.
    """

    config_class = HFSlidingKVConfig
    fixed_addresses: ClassVar[bool] = False
    config: HFSlidingKVConfig
    layers: list[SlidingLayer]

    def __init__(
        self,
        config: HFSlidingKVConfig,
        name: str,
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
        attention: str = "auto",
    ) -> None:
        super().__init__(config, name, device, dtype, attention)
        tokens = config.tokens_per_frame
        self.layers = [SlidingLayer((layer.ring_buckets - 1) * tokens + 1) for layer in config.layers]
        # Any: transformers types a cache's layers as a union of everything that a layer could be.
        self._caches: list[Any] = [self._new_cache() for _ in range(config.num_sessions)]

    def memory_bytes(self) -> int:
        return sum(
            tensor.untyped_storage().nbytes() for layer in self._initialized() for tensor in (layer.keys, layer.values)
        )

    def memory_report(self) -> MemoryReport:
        return {
            "resident": self.memory_bytes(),
            "in_use": sum(layer.keys.nbytes + layer.values.nbytes for layer in self._initialized()),
            "padding": 0,
            "undo": 0,
            "flags": 0,
            "parked": self._parking.nbytes,
        }

    def cleanup(self) -> None:
        super().cleanup()
        self._caches = []

    # -- what the lifecycle asks for ---------------------------------------------------------------------------

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_idx: int, frame_pos: torch.Tensor, commit: bool
    ) -> torch.Tensor:
        if commit:
            self.layers[layer_idx].commits += 1
        plan = self._require_plan()
        k, v = k.detach().to(self.dtype), v.detach().to(self.dtype)
        outputs = []
        for row, (session, clock) in enumerate(zip(plan.session_indices, plan.clocks, strict=True)):
            one = slice(row, row + 1)
            if session == self._padding_session:
                keys, values = k[one], v[one]
            elif commit:
                self._take_back(session, layer_idx, clock)
                keys, values = self._caches[session].update(k[one], v[one], layer_idx)
            else:
                past_keys, past_values = self._history(session, layer_idx, clock)
                keys, values = torch.cat([past_keys, k[one]], dim=2), torch.cat([past_values, v[one]], dim=2)
            outputs.append(self._read(q[one], keys, values))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _read(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if self.attention == "canonical":
            tokens = self.config.tokens_per_frame
            return paths.canonical(q, keys.split(tokens, dim=2), values.split(tokens, dim=2))
        return paths.masked(q, keys, values, None)

    def _committed(self, session: int, frame: int) -> None:
        for layer in self._caches[session].layers:
            layer.crop(0)

    def _clear_aborted(self, rid: str, session: int) -> None:
        for layer_idx in range(len(self.layers)):
            self._take_back(session, layer_idx, self._next_clock(rid))

    def _erase(self, session: int) -> None:
        self._caches[session] = self._new_cache()

    def _export(self, rid: str, session: int, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The window in frame order from the left, then the scratch frame that every state ends with."""
        config = self.config
        capacity = config.layers[layer_idx].ring_buckets * config.tokens_per_frame
        kv = torch.zeros(2, 1, config.num_kv_heads, capacity, config.head_dim, dtype=self.dtype, device=self.device)
        written = torch.zeros(capacity, dtype=torch.bool, device=self.device)
        written[-config.tokens_per_frame :] = True
        for target, past in zip(kv, self._history(session, layer_idx, self._next_clock(rid)), strict=True):
            target[:, :, : past.shape[2]] = past
            written[: past.shape[2]] = True
        return kv, written

    def _check_extra(self, state: State) -> None:
        for index, (_, written) in enumerate(state["layers"]):
            places = layout.places(self._geometry, index, state["clock"])
            holes = unmarked_frames(places, written, self.config.tokens_per_frame)
            if holes:
                raise ValueError(
                    f"state layers[{index}] written does not mark frames {sorted(holes)}, held at clock "
                    f"{state['clock']}: a transformers cache cannot have holes"
                )

    def _import(self, session: int, layers: Layers, clock: int | None, holes: Sequence[set[int]]) -> None:
        for layer_idx, (kv, _) in enumerate(layers):
            tokens = self._window_frames(layer_idx, horizon.frame_after(clock)) * self.config.tokens_per_frame
            if tokens:
                self._caches[session].update(kv[0, :, :, :tokens], kv[1, :, :, :tokens], layer_idx)

    def _lacks(self) -> Mapping[str, str]:
        return {
            "restore": "a transformers cache counts its tokens from the left and cannot have holes",
            "rewind": "a transformers cache evicts for good",
        }

    def _check_storage(self) -> None:
        held = {session: rid for rid, session in self._table.holders.items()}
        tokens = self.config.tokens_per_frame
        for session, cache in enumerate(self._caches):
            for index, layer in enumerate(cache.layers):
                found = layer.keys.shape[2] if layer.is_initialized else 0
                if session not in held:
                    expected = {0}
                else:
                    window = self._window_frames(index, self._next_clock(held[session])) * tokens
                    expected = {window, window + tokens} if self._is_aborted(held[session]) else {window}
                if found not in expected:
                    raise RuntimeError(
                        f"layer {index} session {session}: {found} tokens cached, expected {sorted(expected)}"
                    )

    # -- inside ------------------------------------------------------------------------------------------------

    def _new_cache(self) -> Cache:
        layers: list[Any] = []
        with self.device:  # transformers makes a helper tensor of each layer on the default device
            for layer in self.layers:
                layers.append(DynamicSlidingWindowLayer(sliding_window=layer.window_tokens))
                layers[-1].activate_past_recording()
        return Cache(layers=layers)

    def _initialized(self) -> list[Any]:
        return [layer for cache in self._caches for layer in cache.layers if layer.is_initialized]

    def _window_frames(self, layer_idx: int, clock: int) -> int:
        """Frames that the frame at ``clock`` sees, its own not counted; all that a cache keeps."""
        return len(horizon.visible_frames(self.config.layers[layer_idx], clock))

    def _history(self, session: int, layer_idx: int, clock: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V ``[1, H, n * T, D]`` that the frame at ``clock`` sees, without a frame that is not committed."""
        config, layer = self.config, self._caches[session].layers[layer_idx]
        tokens = self._window_frames(layer_idx, clock) * config.tokens_per_frame
        if not tokens:
            none = torch.empty(1, config.num_kv_heads, 0, config.head_dim, dtype=self.dtype, device=self.device)
            return none, none
        return layer.keys[:, :, :tokens], layer.values[:, :, :tokens]

    def _take_back(self, session: int, layer_idx: int, clock: int) -> None:
        """Undo the ``update`` of a committing pass at ``clock`` that was not committed, if there was one."""
        layer, tokens = self._caches[session].layers[layer_idx], self.config.tokens_per_frame
        if layer.is_initialized and layer.keys.shape[2] > self._window_frames(layer_idx, clock) * tokens:
            layer.crop(-tokens)
