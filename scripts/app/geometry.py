"""The geometry that a config asks for. What it keeps of the past is in ``strategies``. No torch."""

from __future__ import annotations

import dataclasses

from model.config import ModelConfig, preset
from model.data.names import game_actions
from ringkv.config import RingKVLayerConfig
from scripts.app.errors import BadInput
from scripts.app.schema import JobKnobs, TrainConfig

MODEL_KNOBS = ("d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_ratio")
FRAME_KNOBS = ("channels", "height", "width")


def model_config(config: JobKnobs | TrainConfig) -> ModelConfig:
    """The preset with the changes that were asked for; frame and actions follow the data.

    ``BadInput`` names the knob where the geometry does not work out.
    """
    changes = {name: getattr(config.model, name) for name in MODEL_KNOBS}
    changes |= {name: getattr(config.data, name) for name in FRAME_KNOBS}
    changes |= {name: getattr(config, name) for name in ("tokens_per_frame", "global_period", "sigmas")}
    try:
        base = preset(config.model.preset)
        changes["num_actions"] = game_actions(config.data.name)
        return dataclasses.replace(base, **{name: value for name, value in changes.items() if value is not None})
    except ValueError as error:
        raise BadInput(_as_knob(str(error))) from error


def fill_in_geometry(config: JobKnobs | TrainConfig, model: ModelConfig) -> None:
    """Give the knobs that ``model`` was made from the values that their nulls stand for."""
    for name in FRAME_KNOBS:
        setattr(config.data, name, getattr(model, name))
    for name in MODEL_KNOBS:
        setattr(config.model, name, getattr(model, name))
    config.tokens_per_frame, config.global_period = model.tokens_per_frame, model.global_period
    config.sigmas = list(model.sigmas)


def ring_wraps(layer: RingKVLayerConfig, num_frames: int) -> int:
    """How often a layer's ring started over at slot 0 in a stream of ``num_frames`` frames."""
    kept = -(-num_frames // layer.pinned_dilation)
    return (kept - 1) // layer.ring_buckets


def _as_knob(message: str) -> str:
    """``ModelConfig.num_heads=5: ...`` as ``model.num_heads=5: ...``: the name that the command line knows."""
    field = message.removeprefix("ModelConfig.")
    name = field.split("=")[0]
    group = "model." if name in MODEL_KNOBS else "data." if name in FRAME_KNOBS else ""
    return group + field
