"""ringkv: how an autoregressive video or world model keeps its past.

Public names are resolved on first use, so that ``import ringkv`` is cheap and a process that plans or validates does
not load torch, nor one storage strategy another.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringkv.config import CatKVConfig as CatKVConfig
    from ringkv.config import EngineResourceInfo as EngineResourceInfo
    from ringkv.config import FullKVConfig as FullKVConfig
    from ringkv.config import HFSlidingKVConfig as HFSlidingKVConfig
    from ringkv.config import KVConfig as KVConfig
    from ringkv.config import KVSpec as KVSpec
    from ringkv.config import PagedKVConfig as PagedKVConfig
    from ringkv.config import RingKVConfig as RingKVConfig
    from ringkv.config import RingKVLayerConfig as RingKVLayerConfig
    from ringkv.config import ShiftKVConfig as ShiftKVConfig
    from ringkv.events import Event as Event
    from ringkv.events import EventStream as EventStream
    from ringkv.horizon import visible_frames as visible_frames
    from ringkv.policies import LruPark as LruPark
    from ringkv.policies import NoSeat as NoSeat
    from ringkv.resource import AttentionResource as AttentionResource
    from ringkv.resource import NoRoom as NoRoom
    from ringkv.resource import RestoreReport as RestoreReport
    from ringkv.ring.cache import LayerRingCache as LayerRingCache
    from ringkv.ring.manager import RingKVManager as RingKVManager
    from ringkv.ring.manager import RingPlan as RingPlan
    from ringkv.runner import FrameResult as FrameResult
    from ringkv.runner import RolloutRequest as RolloutRequest
    from ringkv.runner import RolloutState as RolloutState
    from ringkv.runner import StepRunner as StepRunner
    from ringkv.step import AdmitOutcome as AdmitOutcome
    from ringkv.step import FrameStep as FrameStep
    from ringkv.step import StepContext as StepContext

_HOME = {
    "KVConfig": "config",
    "RingKVConfig": "config",
    "RingKVLayerConfig": "config",
    "CatKVConfig": "config",
    "FullKVConfig": "config",
    "HFSlidingKVConfig": "config",
    "PagedKVConfig": "config",
    "ShiftKVConfig": "config",
    "KVSpec": "config",
    "EngineResourceInfo": "config",
    "FrameStep": "step",
    "StepContext": "step",
    "AdmitOutcome": "step",
    "visible_frames": "horizon",
    "Event": "events",
    "EventStream": "events",
    "LruPark": "policies",
    "NoSeat": "policies",
    "AttentionResource": "resource",
    "NoRoom": "resource",
    "RestoreReport": "resource",
    "LayerRingCache": "ring.cache",
    "RingKVManager": "ring.manager",
    "RingPlan": "ring.manager",
    "FrameResult": "runner",
    "RolloutRequest": "runner",
    "RolloutState": "runner",
    "StepRunner": "runner",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ringkv' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ringkv.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
