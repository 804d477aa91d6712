"""The training forward is the served one: same weights, same history, same frame, same prediction.

Training runs a whole sequence at once and reads history in groups; serving runs one frame at a time through a ring.
Nothing keeps the two together but these tests: a model that trained on another view of the past than it is served
would still train, and roll out badly.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from model.config import ModelConfig
from model.training.attention import HistoryGroup, history_attention
from model.training.sequence import SequenceModel, Sequences, history_of
from model.transformer import FrameTransformer
from ringkv import FrameStep, RingKVLayerConfig, StepContext
from tests.model_tools import SMALL, ring_for, ring_layers

LENGTH, ROWS = 9, 2
COLOUR = dataclasses.replace(SMALL, channels=3, shared_modulation=True)


def sequences(config: ModelConfig, start: int) -> Sequences:
    generator = torch.Generator().manual_seed(start)
    shape = (ROWS, LENGTH, config.channels, config.height, config.width)
    return Sequences(
        clean=torch.rand(shape, generator=generator) * 2 - 1,
        noised=torch.randn(shape, generator=generator),
        sigma=torch.rand(ROWS, LENGTH, generator=generator) * 0.98 + 0.02,
        actions=torch.randint(config.num_actions, (ROWS, LENGTH + 1), generator=generator),
        start=start,
    )


def served(model: FrameTransformer, batch: Sequences, ring_frames: int, dilation: int) -> torch.Tensor:
    """Each noised frame, predicted one by one over a ring that holds the clean frames before it."""
    rows = []
    for row in range(ROWS):
        ring = ring_for(model.config, ring_frames=ring_frames, dilation=dilation)
        ring.ingest_request("a")
        predicted = []
        for frame in range(LENGTH + 1):
            step, context = FrameStep(frames=(("a", frame),)), StepContext(request_ids=("a",))
            assert ring.admit(step, context).ok
            ring.plan(step, context)
            action, clock = batch.actions[row, frame : frame + 1], torch.tensor([frame])
            if frame > 0:
                sigma = float(batch.sigma[row, frame - 1])
                noised = batch.noised[row, frame - 1 : frame]
                predicted.append(model(noised, sigma, action, clock, ring, commit=False)[0])
            if frame < LENGTH:
                model(batch.clean[row, frame : frame + 1], 0.0, action, clock, ring, commit=True)
                ring.commit(step, context)
        rows.append(torch.stack(predicted))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("config", "ring_frames", "dilation"),
    [(SMALL, 2, 1), (SMALL, 4, 1), (SMALL, 32, 1), (SMALL, 2, 3), (SMALL, 3, 2), (COLOUR, 4, 2)],
)
def test_every_noised_frame_of_a_sequence_is_predicted_as_it_is_served(
    config: ModelConfig, ring_frames: int, dilation: int
):
    model, batch = FrameTransformer(config, seed=1), sequences(config, start=0)
    with torch.no_grad():
        trained = SequenceModel(model)(batch, ring_layers(config, ring_frames, dilation))
        expected = served(model, batch, ring_frames, dilation)
    torch.testing.assert_close(trained, expected, rtol=0, atol=1e-4)
    assert (trained[0] - trained[1]).abs().max() > 0.1


@pytest.mark.parametrize("dilation", [1, 3])
def test_a_late_start_of_the_clock_shows_the_frames_since_then_and_no_others(dilation: int):
    layer = RingKVLayerConfig(ring_frames=3, ring_buckets=3, pinned_dilation=dilation)
    expected = {
        1: [[], [0], [0, 1], [1, 2], [2, 3], [3, 4]],  # clocks 7 to 12
        3: [[], [], [], [2], [2], [2]],  # of them only clock 9 is kept, and clock 12 for frames to come
    }
    assert history_of(layer, start=7, length=5) == expected[dilation]


def test_only_the_clock_differences_matter_to_a_prediction():
    model, early = FrameTransformer(SMALL, seed=1), sequences(SMALL, start=0)
    layers = ring_layers(SMALL, ring_frames=4, dilation=1)
    with torch.no_grad():
        first = SequenceModel(model)(early, layers)
        later = SequenceModel(model)(dataclasses.replace(early, start=150), layers)
    torch.testing.assert_close(first, later, rtol=0, atol=1e-4)


@torch.no_grad()
def test_products_in_bf16_predict_the_same_to_their_precision_and_leave_the_residual_stream_alone():
    model, batch = FrameTransformer(SMALL, seed=1), sequences(SMALL, start=0)
    layers = ring_layers(SMALL, ring_frames=4, dilation=1)
    exact, rounded = SequenceModel(model)(batch, layers), SequenceModel(model, torch.bfloat16)(batch, layers)
    assert rounded.dtype == torch.float32
    error = (rounded - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 1e-4 < error < 0.02


def test_a_prediction_depends_on_exactly_the_clean_frames_that_depth_can_relay():
    """Four layers that see two frames back each reach eight frames; the frame itself is seen noised only."""
    model, batch = FrameTransformer(SMALL, seed=1), sequences(SMALL, start=0)
    layers = ring_layers(SMALL, ring_frames=3, dilation=1)
    clean = batch.clean.clone().requires_grad_()
    predicted = SequenceModel(model)(dataclasses.replace(batch, clean=clean), layers)
    predicted[0, -1].sum().backward()  # frame LENGTH
    assert clean.grad is not None
    reached = clean.grad.abs().amax(dim=(2, 3, 4))
    assert reached[1].max() == 0
    oldest = LENGTH - 2 * SMALL.num_layers
    assert (reached[0] > 0).tolist() == [frame >= oldest for frame in range(LENGTH)]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_attention_and_its_gradients_are_those_of_a_softmax_over_the_visible_frames(kv_heads: int):
    generator = torch.Generator().manual_seed(kv_heads)

    def draw(frames: int, heads: int) -> torch.Tensor:
        return torch.randn(2, frames, heads, 3, 8, generator=generator, dtype=torch.float64).requires_grad_()

    q, k, v, past_k, past_v = draw(5, 4), draw(5, kv_heads), draw(5, kv_heads), draw(4, kv_heads), draw(4, kv_heads)
    groups = [HistoryGroup(1, 3, [0]), HistoryGroup(3, 4, [0, 1, 2]), HistoryGroup(4, 5, [0, 2, 3])]
    seen = [[], [0], [0], [0, 1, 2], [0, 2, 3]]

    def plainly() -> torch.Tensor:
        frames = []
        for frame in range(5):
            keys = torch.cat([past_k[:, f] for f in seen[frame]] + [k[:, frame]], dim=2)
            values = torch.cat([past_v[:, f] for f in seen[frame]] + [v[:, frame]], dim=2)
            keys, values = (x.repeat_interleave(4 // kv_heads, dim=1) for x in (keys, values))
            frames.append((q[:, frame] @ keys.mT / 8**0.5).softmax(dim=-1) @ values)
        return torch.stack(frames, dim=1)

    inputs = (q, k, v, past_k, past_v)
    weights = torch.randn(q.shape, generator=generator, dtype=torch.float64)
    for mine, expected in zip(
        (out := history_attention(*inputs, groups), *torch.autograd.grad((out * weights).sum(), inputs)),
        (out := plainly(), *torch.autograd.grad((out * weights).sum(), inputs)),
        strict=True,
    ):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)
