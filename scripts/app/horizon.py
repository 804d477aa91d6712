"""The horizon map's knobs, read from a command line, and the map itself. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from model.config import preset
from ringkv.config import RingKVLayerConfig
from ringkv.harness.horizon_map import horizon_map, horizon_png, render_horizon
from ringkv.harness.records import dumps_strict, replace_text
from scripts.app.compose import CONF_DIR, VERSION_BASE, explain
from scripts.app.errors import BadInput
from scripts.app.schema import DataKnobs, ModelKnobs, RolloutConfig


@dataclass
class HorizonConfig:
    """Knobs of scripts/horizon.py; those that a rollout has too have its meaning and default.

    frame: clock of the frame being generated. png: where the picture goes.
    """

    frame: int = 1000
    ring_frames: int = RolloutConfig.ring_frames
    ring_buckets: int | None = None
    dilation: int = RolloutConfig.dilation
    global_period: int | None = None
    png: str = "outputs/horizon.png"
    model: ModelKnobs = field(default_factory=ModelKnobs)
    data: DataKnobs = field(default_factory=DataKnobs)


INTEGERS = {"frame": 0, "ring_frames": 1, "ring_buckets": 1, "dilation": 1, "global_period": 1}
"""The lowest value of each knob that is an integer."""

DATA_SUFFIX = ".horizon.json"
"""Beside the picture: title, frame and per layer index, dilation and visible ages, for scripts/report.py."""

KNOBS = tuple(each.name for each in dataclasses.fields(HorizonConfig) if each.name != "data")


def draw(argv: Sequence[str]) -> Path:
    """Print and draw the map that ``argv`` asks for; where the picture is. ``BadInput`` for what cannot be drawn."""
    config = read_config(argv)
    layers = ring_layers(config)
    rows = horizon_map(layers, config.frame)
    title = (
        f"{config.model.preset}, frame {config.frame}: what it sees of its past "
        f"(ring_frames={config.ring_frames}, dilation={config.dilation})"
    )
    path = Path(config.png)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        horizon_png(path, rows, title)
        replace_text(
            path.with_suffix(DATA_SUFFIX), dumps_strict({"title": title, "frame": config.frame, "layers": rows})
        )
    except OSError as error:
        raise BadInput(f"png={config.png}: cannot be written ({error.strerror}); expected a path for a file") from error
    console = Console(highlight=False)
    console.print(render_horizon(rows, title))
    console.print(str(path), soft_wrap=True)
    return path


def read_config(argv: Sequence[str]) -> HorizonConfig:
    """The knobs, well-typed and in range. ``BadInput`` names the one that is not."""
    for text in argv:
        _check(text)
    ConfigStore.instance().store("horizon_schema", node=HorizonConfig)
    try:
        with initialize_config_dir(str(CONF_DIR), version_base=VERSION_BASE, job_name="horizon"):
            config = OmegaConf.to_object(compose("horizon", list(argv)))
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise explain(error) from error
    assert isinstance(config, HorizonConfig)
    if config.ring_buckets is not None and config.ring_buckets > config.ring_frames:
        raise BadInput(f"ring_buckets={config.ring_buckets}: expected at most ring_frames={config.ring_frames}")
    return config


def ring_layers(config: HorizonConfig) -> list[RingKVLayerConfig]:
    """The geometry of each layer's ring."""
    model = preset(config.model.preset)
    if config.global_period is not None:
        model = dataclasses.replace(model, global_period=config.global_period)
    buckets = config.ring_frames if config.ring_buckets is None else config.ring_buckets
    return [
        RingKVLayerConfig(ring_frames=config.ring_frames, ring_buckets=buckets, pinned_dilation=dilation)
        for dilation in model.layer_dilations(config.dilation)
    ]


def _check(text: str) -> None:
    """Refuse an override with an unknown key or a value that its knob cannot have."""
    key, equals, value = text.partition("=")
    if not equals:
        raise BadInput(f"{text}: not an override; expected key=value")
    if key not in KNOBS:
        raise BadInput(f"{text}: unknown key; keys: {', '.join(KNOBS)}")
    if key in INTEGERS and not (value.isdecimal() and int(value) >= INTEGERS[key]):
        raise BadInput(f"{text}: expected an integer >= {INTEGERS[key]}")
    if key == "png" and not value.endswith(".png"):
        raise BadInput(f"{text}: expected a path that ends in .png")
    models = sorted(path.stem for path in (CONF_DIR / "model").glob("*.yaml"))
    if key == "model" and value not in models:
        raise BadInput(f"{text}: expected one of {', '.join(models)}")
