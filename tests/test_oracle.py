"""The served model equals a dense recomputation that has no cache.

Why they must agree: a frame's keys and values depend only on frames that it saw when it was committed, and a ring
keeps them unchanged until they leave the horizon. So running all frames at once under the mask of ``visible_frames``
computes the same numbers, and any difference is a key in the wrong slot, a wrong angle, a stale or a missing frame.
Twenty frames over three slots wrap a local layer six times and a layer of dilation 2 three times.
"""

from __future__ import annotations

import functools

import pytest
import torch

from model.oracle import dense_pass, rollout
from model.sampler import FrameSampler
from model.transformer import FrameTransformer
from tests.model_tools import SMALL, random_actions, random_frames, request, ring_for, ring_layers, run

NUM_FRAMES, CONTEXT, RING_FRAMES, DILATION = 20, 2, 3, 2
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


class WatchedSampler(FrameSampler):
    """Keeps the clocks of every generating batch."""

    def __init__(self, model):
        super().__init__(model)
        self.batches = []

    def generate(self, resource, seeds, streams, actions, frame_pos):
        self.batches.append(tuple(frame_pos.tolist()))
        return super().generate(resource, seeds, streams, actions, frame_pos)


def request_of(index, dtype=torch.float32, num_frames=NUM_FRAMES):
    return request(
        f"r{index}",
        num_frames,
        context=random_frames(CONTEXT, seed=index).to(dtype),
        actions=random_actions(num_frames, seed=index),
        seed=11,
        stream=index,
    )


def recomputed(model, each, ring_frames=RING_FRAMES, dilation=DILATION):
    return rollout(
        model.state_dict(),
        SMALL,
        ring_layers(SMALL, ring_frames, dilation),
        each.context,
        each.actions,
        seed=each.seed,
        stream=each.stream,
        sigmas=SMALL.sigmas,
    )


@functools.cache
def expected(index, dtype):
    """The oracle's rollout of one request, computed once for all read paths and batches that must equal it."""
    return recomputed(FrameTransformer(SMALL, seed=1).to(dtype), request_of(index, dtype))


def gap(left, right):
    return ((left - right).abs().max() / right.abs().max()).item()


@pytest.mark.parametrize(
    ("dtype", "attention"),
    [
        *((torch.float32, attention) for attention in ("auto", "canonical", "sdpa", "segments", "lent")),
        *((torch.float64, attention) for attention in ("auto", "canonical")),
    ],
    ids=str,
)
def test_a_rollout_over_three_wraps_equals_the_dense_recomputation(dtype, attention):
    model = FrameTransformer(SMALL, seed=1).to(dtype)
    resource = ring_for(SMALL, dtype=dtype, attention=attention)
    served = run(resource, FrameSampler(model), [request_of(0, dtype)])["r0"]
    assert served.dtype == dtype
    assert gap(served, expected(0, dtype)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("attention", ["auto", "canonical"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_three_rollouts_at_different_clocks_in_one_batch_equal_the_dense_recomputation(dtype, attention):
    model = FrameTransformer(SMALL, seed=1).to(dtype)
    sampler = WatchedSampler(model)
    resource = ring_for(SMALL, num_sessions=3, dtype=dtype, attention=attention)
    served = run(resource, sampler, [request_of(i, dtype) for i in range(3)], steps_apart=3)
    full = [clocks for clocks in sampler.batches if len(clocks) == 3]
    assert len(full) >= 10
    assert all(len(set(clocks)) == 3 and len({clock % DILATION for clock in clocks}) == 2 for clocks in full)
    for index in range(3):
        assert gap(served[f"r{index}"], expected(index, dtype)) <= TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("ring_frames", "dilation"), [(RING_FRAMES + 1, DILATION), (RING_FRAMES - 1, DILATION), (RING_FRAMES, DILATION + 1)]
)
def test_the_comparison_tells_a_horizon_that_is_one_frame_off(ring_frames, dilation):
    model = FrameTransformer(SMALL, seed=1)
    each = request_of(0, num_frames=8)
    served = run(ring_for(SMALL), FrameSampler(model), [each])["r0"]
    assert gap(served, recomputed(model, each)) <= 1e-5
    assert gap(served, recomputed(model, each, ring_frames, dilation)) > 1e-3


def test_a_frame_is_influenced_from_beyond_the_window_of_any_single_layer():
    """With L layers that each see R - 1 frames back, L * (R - 1) frames back have an influence, and no more."""
    reach = SMALL.num_layers * (RING_FRAMES - 1)
    frames, actions = random_frames(reach + 2).double(), random_actions(reach + 2)
    weights = FrameTransformer(SMALL, seed=1).double().state_dict()
    layers = ring_layers(SMALL, RING_FRAMES, 1)

    def last(changed):
        other = frames.clone()
        other[changed] = 0.25
        return dense_pass(weights, SMALL, layers, other, actions, 1.0)[-1]

    untouched = dense_pass(weights, SMALL, layers, frames, actions, 1.0)[-1]
    assert not torch.equal(last(1), untouched)
    assert torch.equal(last(0), untouched)


def test_an_action_takes_effect_in_the_frame_that_it_led_to_and_in_none_before():
    model = FrameTransformer(SMALL, seed=1)
    each = request_of(0)
    changed = each.actions.clone()
    changed[7] = (changed[7] + 1) % SMALL.num_actions
    other = request("r0", NUM_FRAMES, context=each.context, actions=changed, seed=each.seed, stream=each.stream)
    plain = run(ring_for(SMALL), FrameSampler(model), [each])["r0"]
    steered = run(ring_for(SMALL), FrameSampler(model), [other])["r0"]
    assert torch.equal(steered[:7], plain[:7])
    assert gap(steered[7], plain[7]) > 1e-3


def test_layer_zeros_values_are_taken_before_the_lerp_and_layer_zero_mixes_nothing():
    """Served and recomputed agree at lambda 0 and 1 too, where taking the mixed values instead would show."""
    each = request_of(0, num_frames=8)
    rollouts = []
    for mix in (0.0, 1.0):
        model = FrameTransformer(SMALL, seed=1)
        with torch.no_grad():
            model.value_mix.fill_(mix)
        served = run(ring_for(SMALL), FrameSampler(model), [each])["r0"]
        assert gap(served, recomputed(model, each)) <= 1e-5
        rollouts.append(served)
    assert gap(*rollouts) > 1e-3
