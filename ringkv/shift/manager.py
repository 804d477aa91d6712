"""The window shifted left through a copy, behind the ``AttentionResource`` contract, which documents the methods."""

from __future__ import annotations

from typing import ClassVar

from ringkv.config import ShiftKVConfig
from ringkv.ordered import OrderedKVManager
from ringkv.shift.layer import ShiftLayer


class ShiftKVManager(OrderedKVManager):
    """One ``ShiftLayer`` per layer. Contiguous and in order, for a copy of the window per frame."""

    config_class = ShiftKVConfig
    fixed_addresses: ClassVar[bool] = True
    config: ShiftKVConfig
    layers: list[ShiftLayer]

    def _build_layer(self, layer_idx: int) -> ShiftLayer:
        return ShiftLayer(self.config, self.config.layers[layer_idx], self.dtype, self.device)
