"""Recomputing the past: from frame 0 it equals the ring bit for bit; from the window alone it does not.

The toy model has K = 0 and V the unit vector of the frame's clock, so what a pass saw in a layer can be read off the
output of ``attend``.
"""

from __future__ import annotations

import dataclasses
import gc
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import ModelConfig
from model.oracle import dense_pass
from model.sampler import FrameSampler, frame_noise
from model.transformer import FrameTransformer
from ringkv import EngineResourceInfo, RolloutRequest, StepRunner
from ringkv.config import WindowedKVConfig
from ringkv.recompute import RecomputeRunner
from ringkv.runner import FrameRunner
from tests.model_tools import SMALL, random_actions, random_frames, ring_for
from tests.ring_tools import reference_history, ring

RING, DILATION = 3, 2
CANONICAL = EngineResourceInfo(device="cpu", kv_dtype=torch.float32, attention="canonical")


def ring_runner(config: ModelConfig, sessions: int = 1, dilation: int = DILATION) -> StepRunner:
    resource = ring_for(config, ring_frames=RING, dilation=dilation, num_sessions=sessions, attention="canonical")
    return StepRunner(resource, FrameSampler(FrameTransformer(config)))


def recompute_runner(
    config: ModelConfig, sessions: int = 1, dilation: int = DILATION, *, window: bool = False
) -> RecomputeRunner:
    geometry = ring_runner(config, sessions, dilation).resource.config
    assert isinstance(geometry, WindowedKVConfig)
    return RecomputeRunner(geometry, CANONICAL, FrameSampler(FrameTransformer(config)), window=window)


def request(rid: str = "r", stream: int = 0, num_frames: int = 10, context: int = 2) -> RolloutRequest:
    return RolloutRequest(
        rid=rid,
        seed=5,
        stream=stream,
        num_frames=num_frames,
        context=random_frames(context, seed=stream),
        actions=random_actions(num_frames, seed=stream),
    )


def run(runner: Any, *requests: RolloutRequest) -> dict[str, Tensor]:
    """Rollouts by request, every frame once and in order."""
    for item in requests:
        runner.submit(item)
    return run_on(runner)


def run_on(runner: FrameRunner) -> dict[str, Tensor]:
    frames: dict[str, list[tuple[int, Tensor]]] = {}
    while runner.pending:
        for result in runner.step():
            frames.setdefault(result.rid, []).append((result.frame, result.image))
    for results in frames.values():
        assert [frame for frame, _ in results] == list(range(results[0][0], results[0][0] + len(results)))
    return {rid: torch.stack([image for _, image in results]) for rid, results in frames.items()}


# -- against the ring ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sessions", [1, 2])
def test_recomputing_everything_equals_the_ring_bit_for_bit_long_after_it_wrapped(sessions: int) -> None:
    requests = [request(f"r{i}", stream=i, num_frames=11) for i in range(sessions)]
    expected = run(ring_runner(SMALL, sessions), *requests)
    found = run(recompute_runner(SMALL, sessions), *requests)
    assert all(torch.equal(found[rid], expected[rid]) for rid in expected)
    assert len(found["r0"]) == 11


def test_recomputing_the_window_equals_the_ring_until_something_is_forgotten_and_then_does_not() -> None:
    expected = run(ring_runner(SMALL), request())["r"]
    found = run(recompute_runner(SMALL, window=True), request())["r"]
    gaps = (found - expected).abs().amax(dim=(1, 2, 3))
    print("largest gap of recompute_window to the ring, by frame:", [f"{gap:.1e}" for gap in gaps.tolist()])
    # Frame 3 is the first that does not see frame 0 in a local layer; frames 1 and 2, which it sees, did see it.
    assert torch.equal(found[:RING], expected[:RING])
    assert (gaps[RING:] > 1e-3).all()


def test_with_one_layer_nothing_is_relayed_and_the_window_is_all_there_is_to_recompute() -> None:
    for period in (1, 2):  # the layer dilated, and not
        one = dataclasses.replace(SMALL, num_layers=1, global_period=period)
        expected = run(ring_runner(one), request())["r"]
        assert torch.equal(run(recompute_runner(one, window=True), request())["r"], expected)


def test_the_window_variant_is_a_dense_pass_over_the_window() -> None:
    """Rotations are relative, so at dilation 1 the window may be renumbered; a replay with wrong clocks would show."""
    frames, length = request(num_frames=9), 9
    model = FrameTransformer(SMALL)
    found = run(recompute_runner(SMALL, dilation=1, window=True), frames)["r"]
    shape = (SMALL.channels, SMALL.height, SMALL.width)
    layers = [ring(RING)] * SMALL.num_layers
    for clock in range(4, length):
        first = clock - RING + 1
        x = SMALL.sigmas[0] * frame_noise(5, 0, clock, 0, shape, torch.float32)
        for sigma, next_sigma in pairwise(SMALL.sigmas):
            past = torch.cat([found[first:clock], x[None]])
            clean = dense_pass(model.state_dict(), SMALL, layers, past, frames.actions[first : clock + 1], sigma)[-1]
            x = x + (next_sigma - sigma) * (x - clean) / sigma
        torch.testing.assert_close(found[clock], x, rtol=1e-5, atol=1e-5)


# -- what a replayed frame sees ------------------------------------------------------------------------------

LAYERS = (ring(3), ring(2, 3), ring(3), ring(4, 2))
MARKS, PIXELS = 32, (1, 2, 1)  # a frame is two tokens of one number


def geometry(sessions: int = 1) -> WindowedKVConfig:
    return WindowedKVConfig(
        num_layers=len(LAYERS),
        num_kv_heads=1,
        head_dim=MARKS,
        num_qo_heads=1,
        tokens_per_frame=2,
        num_sessions=sessions,
        layers=LAYERS,
    )


class ToyModel:
    """Records what every pass saw: (clocks, committing, frames seen per row and layer). Frame f is 100 * stream + f."""

    fingerprint = "toy"

    def __init__(self) -> None:
        self.passes: list[tuple[list[int], bool, list[list[list[int]]]]] = []
        self.observed: list[tuple[list[int], Tensor, list[int]]] = []
        self.fail_on: set[tuple[int, int]] = set()

    def _pass(self, resource: Any, frame_pos: Tensor, *, commit: bool) -> None:
        zero = torch.zeros(len(frame_pos), 1, 2, MARKS)
        v = torch.nn.functional.one_hot(frame_pos, MARKS).float()[:, None, None].expand_as(zero)
        outs = [resource.attend(zero, zero, v, layer, frame_pos, commit=commit) for layer in range(len(LAYERS))]
        seen = [[out[row, 0, 0].nonzero().flatten().tolist() for out in outs] for row in range(len(frame_pos))]
        self.passes.append((frame_pos.tolist(), commit, seen))

    def observe(self, resource: Any, frames: Tensor, actions: Tensor, frame_pos: Tensor) -> None:
        self.observed.append((frame_pos.tolist(), frames.clone(), actions.tolist()))
        self._pass(resource, frame_pos, commit=True)

    def generate(self, resource: Any, seeds: Any, streams: Any, actions: Tensor, frame_pos: Tensor) -> Tensor:
        self._pass(resource, frame_pos, commit=False)
        for clock, stream in zip(frame_pos.tolist(), streams, strict=True):
            if (clock, stream) in self.fail_on:
                raise FloatingPointError(f"frame {clock} of stream {stream}")
        self._pass(resource, frame_pos, commit=True)
        return (frame_pos + 100 * torch.tensor(streams)).float().view(-1, 1, 1, 1).expand(-1, *PIXELS)


def toy_request(rid: str = "r", stream: int = 0, num_frames: int = 12, context: int = 2) -> RolloutRequest:
    return RolloutRequest(
        rid=rid,
        seed=0,
        stream=stream,
        num_frames=num_frames,
        context=torch.full((context, *PIXELS), -1.0 - stream),
        actions=torch.arange(num_frames) + 10 * stream,
    )


def history(frame: int) -> list[set[int]]:
    return [set(reference_history(layer.ring_buckets, layer.pinned_dilation, frame)) for layer in LAYERS]


@pytest.mark.parametrize("window", [False, True])
def test_every_frame_sees_its_visible_frames_and_replayed_ones_what_they_share_with_it(window: bool) -> None:
    model = ToyModel()
    run(RecomputeRunner(geometry(), CANONICAL, model, window=window), toy_request(num_frames=20))
    for clock in range(2, 20):
        shown = history(clock)
        expected = sorted(set().union(*shown)) if window else list(range(clock))
        replayed, model.passes = model.passes[: len(expected)], model.passes[len(expected) :]
        assert [(clocks, commit) for clocks, commit, _ in replayed] == [([frame], True) for frame in expected]
        for (frame,), _, (seen,) in replayed:
            allowed = [both & own if window else own for both, own in zip(shown, history(frame), strict=True)]
            assert seen == [sorted(past | {frame}) for past in allowed]
        own, model.passes = model.passes[:2], model.passes[2:]
        assert own == [([clock], commit, [[sorted(past | {clock}) for past in shown]]) for commit in (False, True)]
    assert model.passes == []


def test_a_replay_is_given_the_frames_that_were_made_and_the_actions_that_led_to_them() -> None:
    model = ToyModel()
    run(RecomputeRunner(geometry(), CANONICAL, model), toy_request(stream=1, num_frames=5, context=2))
    (clocks, actions) = [clock for (clock,), _, _ in model.observed], [action for _, _, (action,) in model.observed]
    assert clocks == [0, 1, 0, 1, 2, 0, 1, 2, 3]
    assert actions == [10 + clock for clock in clocks]
    values = [frames.unique().item() for _, frames, _ in model.observed]
    assert values == [-2.0 if clock < 2 else 100.0 + clock for clock in clocks]


# -- as a runner ---------------------------------------------------------------------------------------------


def test_rows_at_one_clock_are_replayed_together_and_others_apart() -> None:
    model = ToyModel()
    requests = [toy_request("a", 0, 2, 0), toy_request("b", 1, 6, 0), toy_request("c", 2, 3, 0)]
    found = run(RecomputeRunner(geometry(2), CANONICAL, model), *requests)
    generated = [clocks for clocks, commit, _ in model.passes if not commit]
    assert generated == [
        [0, 0],
        [1, 1],
        [2],
        [0],
        [3],
        [1],
        [4],
        [2],
        [5],
    ]  # c takes the seat of a, beside b at frame 2
    assert [clocks for clocks, _, _ in model.observed][:4] == [[0, 0], [0], [1], [0]]
    assert {rid: images[:, 0, 0, 0].tolist() for rid, images in found.items()} == {
        "a": [0.0, 1.0],
        "b": [100.0 + clock for clock in range(6)],
        "c": [200.0, 201.0, 202.0],
    }


@pytest.mark.parametrize("window", [False, True])
def test_a_rollout_beside_another_at_another_clock_equals_the_same_rollout_alone(window: bool) -> None:
    requests = [request("a", 0, num_frames=3), request("b", 1, num_frames=8), request("c", 2, num_frames=5)]
    together = run(recompute_runner(SMALL, 2, window=window), *requests)
    alone = run(recompute_runner(SMALL, window=window), requests[2])
    assert torch.equal(together["c"], alone["c"])


def test_requests_beyond_the_seats_wait_in_order_and_a_cancelled_one_makes_room() -> None:
    runner = RecomputeRunner(geometry(2), CANONICAL, ToyModel())
    for stream, rid in enumerate("abcd"):
        runner.submit(toy_request(rid, stream, num_frames=3 + stream, context=0))
    with pytest.raises(ValueError, match="'a' is already queued or running"):
        runner.submit(toy_request("a"))
    assert runner.pending == 4
    runner.step()
    assert runner.resident == ("a", "b")
    runner.cancel("a")
    runner.cancel("nobody")
    runner.step()
    assert runner.resident == ("b", "c")
    frames = run_on(runner)
    assert {rid: len(images) for rid, images in frames.items()} == {"b": 2, "c": 4, "d": 6}
    assert runner.step() == []
    assert runner.resident == ()
    assert runner.memory_bytes() == 0


def test_a_failing_request_is_set_aside_and_drives_the_same_frame_again() -> None:
    model = ToyModel()
    model.fail_on = {(4, 1)}
    runner = RecomputeRunner(geometry(3), CANONICAL, model, window=True)
    frames = run(runner, *(toy_request(f"r{i}", i, num_frames=8) for i in range(3)))
    assert {rid: len(images) for rid, images in frames.items()} == {"r0": 8, "r1": 4, "r2": 8}
    assert isinstance(runner.failed["r1"], FloatingPointError)
    with pytest.raises(ValueError, match="'r0' has not failed"):
        runner.retry("r0")
    model.fail_on = set()
    runner.retry("r1")
    assert run_on(runner)["r1"][:, 0, 0, 0].tolist() == [104.0, 105.0, 106.0, 107.0]


def held_bytes() -> int:
    """Bytes of all float storages alive in this process."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) is Tensor and item.is_floating_point()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("window", [False, True])
def test_nothing_but_the_frames_is_kept_and_the_memory_figure_is_their_bytes(window: bool) -> None:
    runner, item = RecomputeRunner(geometry(), CANONICAL, ToyModel(), window=window), toy_request(context=0)
    runner.submit(item)
    elsewhere = held_bytes()
    for made in range(1, 13):
        runner.step()
        assert runner.memory_bytes() == made * 2 * 4
        if made in (1, 7, 12):
            runner.model.observed.clear()  # what the test itself keeps
            assert held_bytes() - elsewhere == runner.memory_bytes()
    runner.step()
    assert runner.memory_bytes() == 0
