"""Arithmetic counted from the geometry, against the published geometry's figures and against torch's own counter."""

from __future__ import annotations

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from model.config import preset
from model.flops import attention_flops, pass_flops, weight_flops
from model.sampler import FrameSampler
from model.transformer import FrameTransformer
from scripts.app import schema
from scripts.app.build import build_runner, load_clips, resource_info, rollout_requests
from scripts.app.check import effective
from scripts.app.compose import compose_all
from scripts.app.geometry import model_config
from scripts.app.strategies import kv_config
from scripts.app.work import frame_flops, rollout_flops

schema.register()
TERA = 1e12

SMALL = [
    "model=tiny",
    "model.d_model=32",
    "model.num_layers=3",
    "global_period=3",
    "data=synthetic",
    "tokens_per_frame=16",
    "ring_frames=3",
    "dilation=2",
    "num_frames=9",
    "context_frames=2",
    "num_sessions=2",
    "sigmas=[1.0,0.5,0.0]",
    "attention=canonical",
]


def test_a_720p_frame_takes_the_published_arithmetic() -> None:
    """4.1 TFLOP of attention and about 6.1 of weights for the five passes of one latent frame, sixteen frames seen."""
    model = preset("waypoint_720p")
    visible = [16 * model.tokens_per_frame] * model.num_layers
    assert 5 * attention_flops(model, visible) / TERA == pytest.approx(4.1, rel=0.02)
    assert 5 * weight_flops(model) / TERA == pytest.approx(6.1, rel=0.08)
    assert pass_flops(model, visible) == attention_flops(model, visible) + weight_flops(model)


def test_a_count_of_layers_that_is_not_the_models_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 24 counts"):
        attention_flops(preset("waypoint_720p"), [512])


@pytest.mark.parametrize("kv", ["ring", "cat", "full", "full_windowed", "paged", "recompute_all", "recompute_window"])
def test_a_rollout_does_the_arithmetic_that_was_counted(kv: str) -> None:
    (point,) = compose_all("rollout", [*SMALL, f"kv={kv}"], multirun=False).points
    config = effective(point)
    geometry = model_config(config)
    model = FrameTransformer(geometry).eval()
    for sigma in geometry.sigmas:
        model.conditioning.table(sigma)  # looked up from then on, and not counted
    runner = build_runner(kv, kv_config(config, geometry), resource_info(config), FrameSampler(model, geometry.sigmas))
    assert config.num_frames is not None
    for request in rollout_requests(config, load_clips(config, geometry), config.num_frames):
        runner.submit(request)
    # The counter knows plain products; the fused CPU kernel is none that it has a formula for.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        while runner.pending:
            runner.step()
    assert not runner.failed
    assert counter.get_total_flops() == rollout_flops(config, geometry)


def test_recomputing_takes_more_with_every_frame_and_a_ring_does_not() -> None:
    def at(kv: str, clock: int) -> int:
        (point,) = compose_all("rollout", [*SMALL, f"kv={kv}"], multirun=False).points
        config = effective(point)
        return frame_flops(config, model_config(config), clock)

    assert at("ring", 8) == at("ring", 80)
    assert at("full", 8) < at("full", 80)
    assert at("recompute_window", 80) == at("recompute_window", 800)
    assert at("recompute_all", 8) < at("recompute_all", 80)
