"""Noise as a pure function of its key, and the sampler's passes."""

from __future__ import annotations

import pytest
import torch

from model.config import preset
from model.sampler import FrameSampler, frame_noise
from model.transformer import FrameTransformer
from tests.model_tools import SMALL, random_actions, random_frames, request, ring_for, run

SHAPE = (1, 8, 8)


class RecordingModel:
    """Stands in for the transformer: predicts a constant and notes every pass."""

    def __init__(self, prediction=0.25):
        self.config = SMALL
        self.position = torch.zeros(1)
        self.prediction = prediction
        self.passes = []

    def __call__(self, x, sigma, action, frame_pos, resource, *, commit):
        assert not torch.is_grad_enabled()
        self.passes.append((x.clone(), sigma, commit))
        return torch.full_like(x, self.prediction)


def clocks(*values):
    return torch.tensor(values, dtype=torch.int64)


def generate(sampler, seeds=(1,), streams=(2,), frames=(3,)):
    rows = len(frames)
    return sampler.generate(None, seeds, streams, torch.zeros(rows, dtype=torch.int64), clocks(*frames))


def test_noise_depends_on_each_part_of_its_key_and_on_nothing_else():
    noise = frame_noise(1, 2, 3, 0, SHAPE, torch.float32)
    torch.manual_seed(5)
    assert torch.equal(noise, frame_noise(1, 2, 3, 0, SHAPE, torch.float32))
    keys = [(1, 2, 3, 0), (2, 2, 3, 0), (1, 3, 3, 0), (1, 2, 4, 0), (1, 2, 3, 1), (12, 3, 0, 0), (1, 23, 0, 0)]
    keys += [(1 + 2**32, 2, 3, 0), (-1, 2, 3, 0), (2**80, 2, 3, 0)]
    drawn = [frame_noise(*key, SHAPE, torch.float32) for key in keys]
    assert len({tuple(each.flatten().tolist()) for each in drawn}) == len(keys)


def test_noise_is_standard_normal_and_the_same_in_every_dtype():
    noise = frame_noise(0, 0, 0, 0, (256, 256), torch.float64)
    assert noise.dtype == torch.float64
    assert abs(noise.mean().item()) < 0.02
    assert abs(noise.std().item() - 1) < 0.02
    assert torch.equal(noise.float(), frame_noise(0, 0, 0, 0, (256, 256), torch.float32))
    assert torch.equal(noise.bfloat16(), frame_noise(0, 0, 0, 0, (256, 256), torch.bfloat16))


def test_a_row_gets_the_noise_that_it_gets_alone():
    alone, batch = RecordingModel(), RecordingModel()
    generate(FrameSampler(alone), (7,), (1,), (9,))
    generate(FrameSampler(batch), (5, 7, 5), (0, 1, 0), (9, 9, 2))
    assert torch.equal(alone.passes[0][0][0], batch.passes[0][0][1])
    assert not torch.equal(batch.passes[0][0][0], batch.passes[0][0][2])


def test_the_published_schedule_is_four_denoise_passes_and_one_that_commits_the_result():
    model = RecordingModel()
    out = generate(FrameSampler(model))
    assert [(sigma, commit) for _, sigma, commit in model.passes] == [
        (1.0, False),
        (0.9, False),
        (0.75, False),
        (0.3, False),
        (0.0, True),
    ]
    assert torch.equal(model.passes[-1][0], out)


def test_euler_steps_walk_the_straight_line_from_noise_to_the_predicted_frame():
    """With a constant prediction c the flow is ``(1 - s) c + s e`` at every noise level, and c at the end."""
    model = RecordingModel(0.25)
    out = generate(FrameSampler(model))
    noise = frame_noise(1, 2, 3, 0, SHAPE, torch.float32)
    for x, sigma, _ in model.passes:
        torch.testing.assert_close(x[0], (1 - sigma) * 0.25 + sigma * noise)
    assert torch.equal(out, torch.full((1, *SHAPE), 0.25))


def test_the_schedule_is_a_knob_and_is_checked():
    model = RecordingModel()
    generate(FrameSampler(model, [0.5, 0]))
    assert [(sigma, commit) for _, sigma, commit in model.passes] == [(0.5, False), (0.0, True)]
    torch.testing.assert_close(model.passes[0][0][0], 0.5 * frame_noise(1, 2, 3, 0, SHAPE, torch.float32))
    with pytest.raises(ValueError) as caught:
        FrameSampler(model, (0.5, 0.6, 0.0))
    assert str(caught.value) == (
        "FrameSampler.sigmas=[0.5, 0.6, 0.0]: expected two or more numbers falling strictly from at most 1 to 0"
    )


def test_a_seed_and_a_stream_are_needed_for_every_row():
    model = RecordingModel()
    with pytest.raises(ValueError, match=r"^1 seeds, 2 streams, 2 clocks: expected as many of each$"):
        generate(FrameSampler(model), (1,), (0, 1), (3, 3))
    assert not model.passes


def test_observing_is_one_committing_pass_over_the_frames_themselves():
    model, frames = RecordingModel(), random_frames(2)
    FrameSampler(model).observe(None, frames, random_actions(2), clocks(0, 5))
    ((x, sigma, commit),) = model.passes
    assert torch.equal(x, frames)
    assert (sigma, commit) == (0.0, True)


def test_a_rollout_is_the_same_alone_or_in_a_batch_with_others_at_other_clocks():
    """Not bit for bit: a product over three rows differs from one over one row in the last bits."""
    model = FrameTransformer(SMALL, seed=1)
    requests = [
        request(f"r{i}", 10, context=random_frames(1, seed=i), actions=random_actions(10, seed=i), seed=3, stream=i)
        for i in range(3)
    ]
    together = run(ring_for(SMALL, num_sessions=3), FrameSampler(model), requests, steps_apart=2)
    alone = run(ring_for(SMALL), FrameSampler(model), [requests[1]])["r1"]
    assert (together["r1"] - alone).abs().max() <= 1e-5 * alone.abs().max()
    assert not torch.allclose(together["r0"], together["r1"], atol=0.1)


def test_the_fingerprint_names_the_weights():
    first, same = FrameSampler(FrameTransformer(SMALL, seed=1)), FrameSampler(FrameTransformer(SMALL, seed=1))
    assert first.fingerprint == same.fingerprint
    with torch.no_grad():
        same.model.value_mix[1] += 1e-6
    assert first.fingerprint != same.fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_untrained_tiny_rollout_stays_finite_and_bounded(dtype):
    config = preset("tiny")
    model = FrameTransformer(config).to(dtype)
    each = request("r", 8, context=random_frames(1, config), actions=random_actions(8, config))
    frames = run(ring_for(config, dtype=dtype), FrameSampler(model), [each])["r"]
    assert frames.isfinite().all()
    assert 0.1 < frames[1:].std() < 1.0
    assert frames.abs().max() < 5
