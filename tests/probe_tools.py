"""Probes of a small model with random weights, composed once for each kind and then changed."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from scripts.app import schema
from scripts.app.compose import CONF_DIR, compose_all
from scripts.app.probe.check import Probe, checked
from scripts.app.probe.drive import Setup, make_setup
from scripts.app.schema import ProbeConfig

SMALL = (
    "tracking=disabled",
    "threads=1",
    "checkpoint=null",
    "model.d_model=16",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "model.head_dim=8",
    "global_period=2",
    "sigmas=[1.0,0.0]",
)


@cache
def _composed(name: str) -> ProbeConfig:
    schema.register()
    (config,) = compose_all("probe", [f"probe={name}", *SMALL], multirun=False).points
    return config


def probe_of(name: str, /, **knobs: Any) -> Probe:
    """The checked probe ``name``.

    knobs: of conf/probe, of conf/model or of every job; ``kv`` names a file of conf/kv, ``data`` a kind of data, and
    ``side`` is the height and width of its frames.
    """
    config = copy.deepcopy(_composed(name))
    places = [config.probe, config.model, config.kv, config]
    for key, value in knobs.items():
        if key == "kv":
            loaded = OmegaConf.load(CONF_DIR / "kv" / f"{value}.yaml")
            for kv_key, kv_value in loaded.items():
                setattr(config.kv, str(kv_key), kv_value)
        elif key == "data":
            config.data.name = value
        elif key == "side":
            config.data.height = config.data.width = value
        else:
            setattr(next(place for place in places if hasattr(place, key)), key, value)
    return checked(config)


def setup_of(name: str, /, **knobs: Any) -> Setup:
    """The same with its weights, ready to measure."""
    return make_setup(probe_of(name, **knobs), lambda frames: None)
