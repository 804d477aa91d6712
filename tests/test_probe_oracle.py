"""The oracle reader finds a place exactly when some layer still shows it, in every strategy and geometry.

What it should find is written down from ``visible_frames``, or as literal steps; what it does find comes back through
``attend``, to the last bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from model.data.photos import photo_loops
from ringkv import RingKVLayerConfig, visible_frames
from scripts.app.probe.drive import TeacherForced
from scripts.app.probe.oracle import to_values
from scripts.app.probe.recall import loop_requests, oracle_hits
from scripts.app.probe.returning import oracle_curve
from tests.probe_tools import setup_of


def returns(ring: int, dilation: int, max_gap: int, **knobs: Any) -> np.ndarray:
    asked = {"clips": 1, "rings": [ring], "dilations": [dilation], "max_gap": max_gap, "gaps": [2]}
    return oracle_curve(setup_of("return", **asked, **knobs), ring, dilation, max_gap)


def specified(ring: int, dilation: int, max_gap: int, *, dilated_only: bool = False) -> list[float]:
    """Share of clocks, over a period far from the start, at which a frame g back is visible in some layer."""
    kinds = {dilation} if dilated_only else {1, dilation}
    layers = [RingKVLayerConfig(ring_frames=ring, ring_buckets=ring, pinned_dilation=each) for each in kinds]
    clocks = range(10_000, 10_000 + dilation)
    shares = []
    for gap in range(1, max_gap + 1):
        seen = [any(clock - gap in visible_frames(layer, clock) for layer in layers) for clock in clocks]
        shares.append(sum(seen) / dilation)
    return shares


@pytest.mark.parametrize(("ring", "max_gap"), [(1, 4), (2, 5), (5, 12), (12, 30)])
def test_one_kind_of_layer_steps_from_one_to_zero_at_its_horizon(ring: int, max_gap: int):
    assert returns(ring, 1, max_gap).tolist() == [1.0] * (ring - 1) + [0.0] * (max_gap - ring + 1)


@pytest.mark.parametrize(("ring", "dilation"), [(3, 2), (4, 3), (2, 8), (6, 4)])
def test_local_and_dilated_layers_retain_what_the_specification_shows(ring: int, dilation: int):
    max_gap = ring * dilation + 3
    curve = returns(ring, dilation, max_gap).tolist()
    assert curve == pytest.approx(specified(ring, dilation, max_gap), abs=1e-12)
    assert curve[ring - 2] == 1.0
    assert 0 < curve[ring * dilation - dilation - 1] < 1
    assert curve[ring * dilation - 1 :] == [0.0] * 4


def test_a_dilated_layer_alone_brings_back_one_frame_in_d():
    curve = returns(3, 4, 14, global_period=1).tolist()
    assert curve == pytest.approx(specified(3, 4, 14, dilated_only=True), abs=1e-12)
    assert curve == [0.25] * 11 + [0.0] * 3


WINDOWED = ("ring", "ring_uncompacted", "paged_windowed", "shift", "cat", "full_windowed", "recompute_window")


@pytest.mark.parametrize("kv", [*WINDOWED, "recompute_all"])
def test_every_windowed_strategy_retains_the_same(kv: str):
    assert returns(3, 2, 8, kv=kv).tolist() == pytest.approx(specified(3, 2, 8), abs=1e-12)


def test_hugging_face_s_sliding_cache_retains_the_same_window():
    pytest.importorskip("transformers")
    assert returns(4, 1, 7, kv="hf_sliding").tolist() == [1, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("kv", ["full", "full_static", "paged"])
def test_full_context_retains_everything(kv: str):
    assert returns(2, 2, 9, kv=kv).tolist() == [1.0] * 9


@pytest.mark.parametrize("attention", ["canonical", "sdpa", "segments", "lent"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "float64"])
def test_no_read_path_and_no_dtype_of_the_cache_blurs_it(attention: str, kv_dtype: str):
    curve = returns(3, 2, 8, attention=attention, kv_dtype=kv_dtype)
    assert curve.tolist() == pytest.approx(specified(3, 2, 8), abs=1e-12)


def test_the_step_is_exact_over_256_frames_at_dilation_8():
    assert returns(32, 8, 256).tolist() == pytest.approx(specified(32, 8, 256), abs=1e-9)


@pytest.mark.parametrize("loop", [2, 4, 5])
def test_a_loop_is_found_again_exactly_from_a_ring_of_one_more_frame_on(loop: int):
    setup = setup_of("recall", clips=2, loop_frames=[loop], rings=[2])
    loops = photo_loops("test", loop, 2, seed=0)
    found = [float(oracle_hits(setup, loops, ring, 1, 2 * loop + 1)[0]) for ring in range(1, loop + 3)]
    assert found == [0.0] * loop + [1.0, 1.0]


def test_of_an_even_loop_a_layer_of_dilation_two_brings_back_every_other_frame_and_never_the_rest():
    setup = setup_of("recall", clips=2, loop_frames=[6], rings=[2])
    loops = photo_loops("test", 6, 2, seed=0)
    assert oracle_hits(setup, loops, 4, 2, 24).tolist() == [1.0, 0.0] * 6
    assert oracle_hits(setup, loops, 3, 2, 24).tolist() == [0.0] * 12


def test_values_are_exact_in_the_narrowest_cache():
    shades = np.arange(256, dtype=np.uint8).repeat(3).reshape(1, 16, 16, 3)
    values = to_values(shades)
    assert torch.equal(values.to(torch.bfloat16).float(), values)
    assert len(torch.unique(values)) == 256


# -- teacher forcing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["ring", "paged_windowed", "recompute_all"])
def test_a_forced_frame_is_what_the_model_makes_of_the_true_past(kv: str):
    """Bit for bit: the same as a rollout that was given all frames before it."""
    setup = setup_of("recall", clips=1, loop_frames=[4], rings=[3], kv=kv)
    loops = photo_loops("test", 4, 1, seed=0)
    point = setup.probe.points["dilated", 4]
    ((request),) = loop_requests(loops, 8, 12, seed=0)
    truth = torch.cat([request.context, request.context[:4]])
    forced = TeacherForced(setup.sampler, {0: truth})
    made = setup.roll(point, [request], model=forced)
    assert torch.equal(made["loop-0"], truth[8:])
    for clock in range(8, 12):
        (given,) = loop_requests(loops, clock, clock + 1, seed=0)
        alone: dict[str, Any] = setup.roll(point, [given])
        assert torch.equal(alone["loop-0"][0], forced.made[0, clock])
        assert not torch.equal(alone["loop-0"][0], truth[clock])
