"""Model geometry: what is refused, in one line; what the presets are; what fits which weights."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from model.config import PRESETS, ModelConfig, checked_sigmas, fitting_tokens, preset
from model.transformer import FrameTransformer
from tests.model_tools import SMALL


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "ModelConfig.num_heads=5: expected a multiple of num_kv_heads=2"),
        (
            {"head_dim": 12},
            "ModelConfig.head_dim=12: expected a multiple of 8, so that a quarter of the head holds whole rotation "
            "pairs",
        ),
        (
            {"tokens_per_frame": 5},
            "ModelConfig.tokens_per_frame=5: square patches of a 8 x 8 frame give 1, 4, 16, 64",
        ),
        ({"tokens_per_frame": 0}, "ModelConfig.tokens_per_frame=0: expected an integer >= 1"),
        ({"num_layers": 2.5}, "ModelConfig.num_layers=2.5: expected an integer >= 1"),
        ({"global_period": True}, "ModelConfig.global_period=True: expected an integer >= 1"),
        (
            {"sigmas": (1.0, 0.5)},
            "ModelConfig.sigmas=[1.0, 0.5]: expected two or more numbers falling strictly from at most 1 to 0",
        ),
    ],
)
def test_a_bad_value_is_refused_in_one_line_with_key_value_and_what_is_allowed(changes, message):
    with pytest.raises(ValueError) as caught:
        dataclasses.replace(SMALL, **changes)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "sigmas",
    [
        (),
        (0.0,),
        (1.0, 1.0, 0.0),
        (0.5, 0.7, 0.0),
        (1.5, 0.0),
        (1.0, 0.0, -1.0),
        (1.0, float("nan"), 0.0),
        "high",
        None,
    ],
)
def test_sigmas_must_fall_strictly_from_at_most_one_to_zero(sigmas):
    with pytest.raises(ValueError, match=r"sigmas=.*expected two or more numbers"):
        checked_sigmas("x", sigmas)


def test_a_sigma_list_becomes_a_tuple_of_floats():
    assert dataclasses.replace(SMALL, sigmas=[1, 0.5, 0]).sigmas == (1.0, 0.5, 0.0)


def test_tokens_fit_when_they_are_square_patches_of_a_frame_that_need_not_be_square():
    assert fitting_tokens(64, 64) == [1, 4, 16, 64, 256, 1024, 4096]
    assert fitting_tokens(16, 32) == [2, 8, 32, 128, 512]
    assert fitting_tokens(3, 5) == [15]
    wide = dataclasses.replace(SMALL, height=16, width=32, tokens_per_frame=8)
    assert (wide.patch, wide.grid) == (8, (2, 4))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_parameters_are_counted_without_allocating_the_model(name):
    with torch.device("meta"):
        model = FrameTransformer(preset(name))
    assert preset(name).num_parameters == sum(weight.numel() for weight in model.parameters())


def test_one_layer_and_shared_modulation_are_counted_too():
    config = dataclasses.replace(SMALL, num_layers=1, shared_modulation=True)
    assert config.num_parameters == sum(weight.numel() for weight in FrameTransformer(config).parameters())


def test_tiny_is_small_enough_for_two_cores_and_small_is_near_twenty_million():
    tiny = preset("tiny")
    assert (tiny.channels, tiny.height, tiny.width, tiny.tokens_per_frame) == (3, 64, 64, 64)
    assert 1_000_000 <= tiny.num_parameters <= 4_000_000
    assert tiny.num_kv_heads < tiny.num_heads
    assert 18_000_000 <= preset("small").num_parameters <= 22_000_000


@pytest.mark.parametrize(("name", "grid"), [("waypoint_360p", (8, 16)), ("waypoint_720p", (16, 32))])
def test_the_waypoint_presets_have_the_published_geometry(name, grid):
    config = preset(name)
    assert config.grid == grid
    assert config.tokens_per_frame == grid[0] * grid[1]
    assert (config.num_layers, config.d_model, config.mlp_ratio) == (24, 2048, 4)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 16, 64)
    assert [i for i, d in enumerate(config.layer_dilations(8)) if d == 8] == [3, 7, 11, 15, 19, 23]
    assert config.sigmas == (1.0, 0.9, 0.75, 0.3, 0.0)
    assert 1.1e9 <= config.num_parameters <= 1.25e9


def test_an_unknown_preset_is_refused_by_name():
    with pytest.raises(ValueError) as caught:
        preset("huge")
    names = "tiny, small, freeway, pong, recall, waypoint_360p, waypoint_720p"
    assert str(caught.value) == f"model='huge': expected one of {names}"


def test_every_global_period_th_layer_is_dilated():
    assert SMALL.layer_dilations(8) == (1, 8, 1, 8)
    assert dataclasses.replace(SMALL, global_period=1).layer_dilations(8) == (8, 8, 8, 8)
    assert dataclasses.replace(SMALL, global_period=5).layer_dilations(8) == (1, 1, 1, 1)
    with pytest.raises(ValueError, match=r"dilation\)=0: expected an integer >= 1"):
        SMALL.layer_dilations(0)


def test_weight_geometry_is_exactly_what_tensor_shapes_depend_on():
    def shapes(config: ModelConfig) -> list:
        with torch.device("meta"):
            return [(name, tuple(weight.shape)) for name, weight in FrameTransformer(config).state_dict().items()]

    unlike = {"global_period": 3, "sigmas": (1.0, 0.0), "name": "other"}
    for key, value in unlike.items():
        changed = dataclasses.replace(SMALL, **{key: value})
        assert changed.weight_geometry() == SMALL.weight_geometry()
        assert shapes(changed) == shapes(SMALL)
    alike = {
        "channels": 3,
        "tokens_per_frame": 16,
        "d_model": 40,
        "num_layers": 3,
        "num_heads": 6,
        "num_kv_heads": 1,
        "head_dim": 16,
        "mlp_ratio": 2,
        "num_actions": 4,
        "shared_modulation": True,
    }
    for key, value in alike.items():
        changed = dataclasses.replace(SMALL, **{key: value})
        assert changed.weight_geometry() != SMALL.weight_geometry()
        assert shapes(changed) != shapes(SMALL)
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    assert fields == set(unlike) | set(SMALL.weight_geometry())


def test_geometry_and_checkpoint_headers_are_read_without_torch():
    code = "import sys, model, model.config, model.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
