"""How much arithmetic a rollout takes under each choice of conf/kv. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from model.config import ModelConfig
from model.flops import pass_flops
from ringkv.config import RingKVLayerConfig
from ringkv.horizon import visible_frames
from scripts.app.schema import RolloutConfig
from scripts.app.strategies import ring_layers, seen_past


def frame_flops(config: RolloutConfig, model: ModelConfig, clock: int) -> int:
    """FLOP of generating frame ``clock`` of one session: all its passes and, in recomputation, its past's before it."""
    seen = _seen_frames(config, model, clock)
    own = len(model.sigmas) * _pass(model, seen)
    if config.kv.strategy == "recompute_all":
        return own + sum(_pass(model, _seen_frames(config, model, past)) for past in range(clock))
    if config.kv.strategy == "recompute_window":
        return own + _window_replay(model, ring_layers(config, model), clock)
    return own


def rollout_flops(config: RolloutConfig, model: ModelConfig) -> int:
    """FLOP of the whole job, all sessions: one committing pass for a given frame, ``frame_flops`` for a generated one.

    Recomputation makes no pass over a given frame until a generated one needs it.
    """
    assert config.num_frames is not None
    given = min(config.context_frames, config.num_frames)
    total = sum(frame_flops(config, model, clock) for clock in range(given, config.num_frames))
    if not config.kv.strategy.startswith("recompute"):
        total += sum(_pass(model, _seen_frames(config, model, clock)) for clock in range(given))
    return config.num_sessions * total


def _seen_frames(config: RolloutConfig, model: ModelConfig, clock: int) -> list[int]:
    """How many frames frame ``clock`` attends to in each layer, itself included."""
    if seen_past(config) == "everything":
        return [clock + 1] * model.num_layers
    by_layer = {layer: len(visible_frames(layer, clock)) + 1 for layer in set(ring_layers(config, model))}
    return [by_layer[layer] for layer in ring_layers(config, model)]


def _window_replay(model: ModelConfig, layers: Sequence[RingKVLayerConfig], clock: int) -> int:
    """FLOP of one pass over each frame that ``clock`` sees in any layer; it sees what both it and ``clock`` may see."""
    shown = {layer: set(visible_frames(layer, clock)) for layer in set(layers)}
    total = 0
    for past in sorted(set.union(*shown.values())):
        by_layer = {layer: len(shown[layer].intersection(visible_frames(layer, past))) + 1 for layer in shown}
        total += _pass(model, [by_layer[layer] for layer in layers])
    return total


def _pass(model: ModelConfig, seen_frames: Sequence[int]) -> int:
    return pass_flops(model, [count * model.tokens_per_frame for count in seen_frames])
