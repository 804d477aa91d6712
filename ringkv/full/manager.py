"""Full context behind the ``AttentionResource`` contract, which documents the methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self, cast

from ringkv.config import EngineResourceInfo, FullKVConfig, KVSpec, RingKVLayerConfig
from ringkv.full.layer import FullLayer, StaticLayer
from ringkv.horizon import frame_after
from ringkv.ordered import OrderedKVManager
from ringkv.step import AdmitOutcome, FrameStep


class FullKVManager(OrderedKVManager):
    """One ``FullLayer`` per layer: memory grows with the rollout. ``build`` of a config with ``max_frames`` gives a
    ``StaticFullKVManager``.

    A state has every committed frame, of windowed layers too, and so a session can be taken back to any of them.
    """

    config_class = FullKVConfig
    fixed_addresses: ClassVar[bool] = False
    config: FullKVConfig
    layers: list[FullLayer]

    @classmethod
    def build(cls, spec: KVSpec, info: EngineResourceInfo) -> Self:
        config = spec.deployed_config()
        if cls is FullKVManager and isinstance(config, FullKVConfig) and config.max_frames is not None:
            return cast(Self, StaticFullKVManager.build(spec, info))
        return super().build(spec, info)

    def _build_layer(self, layer_idx: int) -> FullLayer:
        return FullLayer(self.config, self._window(layer_idx), self.dtype, self.device)

    def _lacks(self) -> Mapping[str, str]:
        return {}

    def _rewind(self, rid: str, session: int, clock: int | None) -> None:
        for layer in self.layers:
            layer.truncate(session, frame_after(clock))
        self._holes.prune(session, clock)

    def _window(self, layer_idx: int) -> RingKVLayerConfig | None:
        return None if self.config.layers is None else self.config.layers[layer_idx]


class StaticFullKVManager(FullKVManager):
    """One ``StaticLayer`` per layer, ``max_frames`` frames for each session. No frame beyond them is admitted, ever."""

    fixed_addresses: ClassVar[bool] = True

    def _room_refusal(self, step: FrameStep) -> AdmitOutcome | None:
        for rid, frame in step.frames:
            if frame >= self._max_frames:
                return AdmitOutcome(
                    ok=False,
                    reason=f"request {rid!r} is at frame {frame}: max_frames={self._max_frames} frames are allocated "
                    "for a session; raise max_frames",
                    rid=rid,
                )
        return None

    def _build_layer(self, layer_idx: int) -> StaticLayer:
        return StaticLayer(
            self.config,
            self._window(layer_idx),
            self.dtype,
            self.device,
            max_frames=self._max_frames,
            masked=self.attention != "canonical",
        )

    def _check_clock(self, clock: int | None) -> None:
        if clock is not None and clock >= self._max_frames:
            raise ValueError(
                f"state clock={clock}: max_frames={self._max_frames} frames are allocated for a session; "
                "expected a clock below that"
            )

    @property
    def _max_frames(self) -> int:
        assert self.config.max_frames is not None, "build picks this class for a config with max_frames"
        return self.config.max_frames
