"""Every file under conf/ composes into a config that can be built, and says what it should."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from model.config import preset
from model.transformer import FrameTransformer
from ringkv.config import RingKVConfig
from ringkv.harness.records import dumps_strict, to_plain
from ringkv.memory import storage_bytes
from scripts.app import schema
from scripts.app.check import effective
from scripts.app.compose import CONF_DIR, compose_all, typed
from scripts.app.errors import BadInput
from scripts.app.geometry import model_config
from scripts.app.schema import RolloutConfig
from scripts.app.strategies import kv_config

schema.register()

SEARCHED = {"pareto"}
"""Experiments of which a sweeper that is an extra chooses the points: tests/test_sweep_launchers.py runs them."""


def options(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF_DIR / group).glob("*.yaml"))


def compose_one(*overrides: str) -> RolloutConfig:
    (config,) = compose_all("rollout", overrides, multirun=False).points
    return config


def test_every_group_has_files_and_is_one_of_those_that_are_tested_here():
    groups = sorted(folder.name for folder in CONF_DIR.iterdir() if folder.is_dir())
    assert groups == ["data", "experiment", "kv", "model", "probe", "recipe", "runtime", "tracking"]
    assert (CONF_DIR / "rollout.yaml").is_file()
    assert all(options(group) for group in groups)


@pytest.mark.parametrize("kv", options("kv"))
@pytest.mark.parametrize("name", options("model"))
def test_every_model_with_every_strategy_gives_a_geometry_that_can_be_built(name: str, kv: str):
    knobs = ["ring_frames=16", "num_frames=24", "dtype=bfloat16", "threads=1"]
    config = effective(compose_one(f"model={name}", f"kv={kv}", f"dilation={1 if kv == 'hf_sliding' else 8}", *knobs))
    geometry = model_config(config)
    with torch.device("meta"):
        model = FrameTransformer(geometry)
    assert sum(weight.numel() for weight in model.parameters()) == geometry.num_parameters
    assert (
        geometry.weight_geometry().items()
        >= {"d_model": preset(name).d_model, "head_dim": preset(name).head_dim}.items()
    )
    assert kv_config(config, geometry).num_layers == len(model.blocks)


def test_the_waypoint_presets_take_the_published_memory_in_a_ring_of_16_frames():
    """816 MiB and 204 MiB a session: 17 frames of 24 layers, 16 KV heads of 64, bf16."""
    for name, expected in (("waypoint_720p", 855_638_016), ("waypoint_360p", 855_638_016 // 4)):
        config = effective(compose_one(f"model={name}", "ring_frames=16", "dilation=8", "kv_dtype=bfloat16"))
        ring = kv_config(config, model_config(config))
        assert isinstance(ring, RingKVConfig)
        assert storage_bytes(ring, config.kv_dtype or "") == expected
        assert [layer.pinned_dilation for layer in ring.layers].count(8) == 6
        assert config.data.name == "synthetic"


@pytest.mark.parametrize("name", options("data"))
def test_every_kind_of_data_composes_and_the_model_follows_it(name: str, tmp_path: Path):
    (tmp_path / "0.png").write_bytes(b"")
    path = [f"data.path={tmp_path}"] if name == "video" else []
    config = effective(compose_one(f"data={name}", "data.channels=1", "data.height=32", "tokens_per_frame=32", *path))
    geometry = model_config(config)
    assert config.data.name == name
    assert (geometry.channels, geometry.height, geometry.width) == (1, 32, 64)


def test_data_gives_the_model_its_number_of_actions():
    numbers = {name: model_config(compose_one(f"data={name}")).num_actions for name in options("data")}
    assert numbers == {"breakout": 4, "freeway": 3, "pong": 6, "loops": 1, "synthetic": 5, "video": 1}


@pytest.mark.parametrize("mode", options("tracking"))
def test_every_kind_of_tracking_composes(mode: str):
    assert compose_one(f"tracking={mode}").tracking.mode == mode
    assert compose_one(f"tracking.mode={mode}").tracking.mode == mode


def test_a_runtime_sets_device_and_dtype_and_a_knob_beside_it_wins():
    assert [(c.device, c.dtype) for c in (compose_one(f"runtime={name}") for name in options("runtime"))] == [
        ("cpu", "float32"),
        ("cuda", "bfloat16"),
    ]
    assert compose_one("runtime=cuda", "dtype=float32").dtype == "float32"


@pytest.mark.parametrize("name", options("experiment"))
def test_every_experiment_opens_with_its_command_and_with_what_it_answers(name: str):
    package, command, blank, *rest = (CONF_DIR / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert package == "# @package _global_"
    assert command == f"# python scripts/rollout.py -m experiment={name}"
    assert blank == "#"
    comment = list(itertools.takewhile(lambda line: line.startswith("# "), rest))
    assert "?" in "".join(comment)
    assert rest[len(comment)] == ""


@pytest.mark.parametrize("name", sorted({*options("experiment")} - SEARCHED))
def test_each_point_of_every_experiment_is_valid_and_its_geometry_can_be_built(name: str):
    composed = compose_all("rollout", [f"experiment={name}", "repeats=1"], multirun=False)
    assert composed.multirun, "an experiment that sweeps does so without -m too, or its points would be dropped"
    assert len(composed.points) > 1
    for point in composed.points:
        config = effective(point)
        geometry = model_config(config)
        assert kv_config(config, geometry).num_layers == geometry.num_layers


def test_the_strategies_experiment_has_repeats_and_dilated_layers():
    composed = compose_all("rollout", ["experiment=strategies", "kv=ring"], multirun=False)
    assert [(point.repeats, point.repeat) for point in composed.points] == [(3, 0), (3, 1), (3, 2)]
    assert max(model_config(composed.points[0]).layer_dilations(composed.points[0].dilation)) > 1


def test_the_horizon_experiment_sweeps_the_ring_and_the_command_line_can_change_it():
    points = compose_all("rollout", ["experiment=horizon"], multirun=True).points
    assert [(point.ring_frames, point.num_frames) for point in points] == [(4, 96), (8, 96), (16, 96), (32, 96)]
    changed = compose_all("rollout", ["experiment=horizon", "ring_frames=2,3", "num_frames=9"], multirun=True).points
    assert [(point.ring_frames, point.num_frames) for point in changed] == [(2, 9), (3, 9)]


# -- what a null stands for ---------------------------------------------------------------------------------------


def test_the_effective_config_has_the_values_that_nulls_stand_for_and_absolute_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    asked = compose_one("model=tiny", "ring_frames=32", "dtype=bfloat16", "data.folder=cached")
    config = effective(asked)
    assert (config.ring_buckets, config.num_frames, config.kv_dtype) == (32, 96, "bfloat16")
    assert (config.tokens_per_frame, config.global_period, config.sigmas) == (64, 3, [1.0, 0.9, 0.75, 0.3, 0.0])
    assert (config.data.channels, config.data.height, config.data.width) == (3, 64, 64)
    assert config.model.d_model == 160
    assert config.threads is not None
    assert config.threads >= 1
    assert config.data.folder == str(tmp_path / "cached")
    assert asked.ring_buckets is None, "what was asked for is left as it was"
    assert effective(config) == config


@pytest.mark.parametrize(("ring_frames", "expected"), [(1, 9), (2, 10), (4, 12), (8, 24), (32, 96)])
def test_by_default_a_ring_wraps_twice_and_there_is_room_to_generate(ring_frames: int, expected: int):
    config = effective(compose_one(f"ring_frames={ring_frames}"))
    assert config.num_frames == expected >= 3 * ring_frames
    assert config.context_frames == 8


def test_the_logged_config_is_plain_json_with_interpolations_resolved_and_types_kept():
    """Config nodes, dtypes and paths have broken loggers' JSON before; ints became floats or text."""
    knobs = ["model=tiny", "ring_frames=32", "seed=${num_sessions}", "num_sessions=2", "dtype=bfloat16"]
    config = effective(compose_one(*knobs))
    logged = json.loads(dumps_strict(to_plain(config)))
    assert logged["ring_frames"] == 32
    assert type(logged["ring_frames"]) is int
    assert logged["seed"] == 2
    assert logged["dtype"] == "bfloat16"
    assert logged["sigmas"] == [1.0, 0.9, 0.75, 0.3, 0.0]
    assert logged["model"]["preset"] == "tiny"


def test_the_logged_config_gives_the_same_run_again():
    config = effective(compose_one("model=small", "sigmas=[1.0,0.5,0.0]", "data.channels=1"))
    node = OmegaConf.structured(RolloutConfig)
    node.merge_with(json.loads(dumps_strict(config)))
    assert typed(node) == config


def test_a_missing_mandatory_value_is_named():
    with pytest.raises(BadInput) as refused:
        typed(OmegaConf.structured(RolloutConfig))
    assert str(refused.value) == "model.preset=???: a mandatory value is missing; give it one"
