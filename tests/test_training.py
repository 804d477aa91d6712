"""Batches, optimizer and the training loop's state."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from model.data.clip import Clip
from model.layers import patchify
from model.training.batches import MIN_SIGMA, draw_batch, with_own_history
from model.training.footage import FootageSource, GameFootage, LoopFootage
from model.training.optimizer import Muon, optimizers, orthogonalized
from model.training.recipe import Recipe
from model.training.sequence import SequenceModel, Sequences
from model.training.trainer import Trainer, start_from
from model.transformer import FrameTransformer
from tests.model_tools import SMALL

RECIPE = Recipe(
    steps=6, batch=4, frames=5, long_batch=1, long_frames=9, long_share=0.3, min_ring_frames=2, max_ring_frames=6,
    max_dilation=3, dilated_share=0.5, warmup_steps=2, seed=3,
)  # fmt: skip


def footage(seed: int = 0) -> GameFootage:
    """Two clips of noise with a pixel of background that never changes."""
    clips = []
    for index in range(2):
        rng = np.random.default_rng([seed, index])
        frames = rng.integers(256, size=(30, 8, 8, 1), dtype=np.uint8)
        frames[:, 0, 0] = 200
        clips.append(Clip.of(frames, rng.integers(3, size=30), num_actions=3, fps=15.0, source="noise"))
    return GameFootage(clips)


def same(one: object, other: object) -> bool:
    """Equality of nested dataclasses of tensors, to the bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    return one == other


def test_a_batch_follows_from_the_number_of_its_step_alone():
    source = footage()
    batches = [draw_batch(RECIPE, SMALL, source, None, step) for step in (7, 8, 7)]
    assert same(batches[0], batches[2])
    assert not same(batches[0], batches[1])


def test_half_of_each_batch_has_its_history_as_it_is_served_and_the_rest_a_little_noise():
    source, recipe = footage(), dataclasses.replace(RECIPE, batch=5, history_noise=0.2, long_share=0.0)
    for step in range(20):
        batch = draw_batch(recipe, SMALL, source, None, step)
        served = batch.sequences.clean[:, 1:] == batch.target[:, :-1]  # clean frame f is the target of noised frame f
        assert served.flatten(1).all(dim=1).tolist() == [True, True, True, False, False]
        noise = (batch.sequences.clean[:, 1:] - batch.target[:, :-1])[3:].std(dim=(1, 2, 3, 4))
        assert (noise < 0.25).all()


def test_late_what_moves_is_fainter_in_the_noisy_half_of_the_history_by_up_to_the_share_of_the_recipe():
    source, recipe = footage(), dataclasses.replace(RECIPE, history_noise=0.0, history_fade=0.6, long_share=0.0)
    recipe, background = dataclasses.replace(recipe, rollout_from=3), source.background()
    none = dataclasses.replace(recipe, history_fade=0.0)
    early, early_plain = (draw_batch(each, SMALL, source, background, 2) for each in (recipe, none))
    assert same(early, early_plain)
    batch, plain = (draw_batch(each, SMALL, source, background, 3) for each in (recipe, none))
    clean, whole = batch.sequences.clean, plain.sequences.clean
    assert torch.equal(clean[:2], whole[:2])
    differs = (whole - background).abs() > 0.05
    left = ((clean - background) / (whole - background))[2:][differs[2:]]
    assert 0.4 <= left.min() < 0.6
    assert 0.8 < left.max() <= 1
    torch.testing.assert_close(clean[~differs], whole[~differs], rtol=0, atol=0.05)


def test_a_noised_frame_lies_on_the_straight_line_between_its_target_and_noise():
    source = footage()
    for step in range(10):
        batch = draw_batch(RECIPE, SMALL, source, None, step)
        sigma = batch.sequences.sigma[:, :, None, None, None]
        assert MIN_SIGMA <= batch.sequences.sigma.min() <= batch.sequences.sigma.max() <= 1
        noise = (batch.sequences.noised - (1 - sigma) * batch.target) / sigma
        assert abs(noise.mean()) < 0.2
        assert 0.8 < noise.std() < 1.2


def test_rings_lengths_and_clocks_are_drawn_from_all_that_the_recipe_names():
    source = footage()
    batches = [draw_batch(RECIPE, SMALL, source, None, step) for step in range(200)]
    assert {batch.layers[0].ring_frames for batch in batches} == {2, 3, 4, 5, 6}
    assert {batch.layers[0].pinned_dilation for batch in batches} == {1}
    assert {batch.layers[1].pinned_dilation for batch in batches} == {1, 2, 3}  # SMALL's second layer is global
    assert {tuple(batch.target.shape[:2]) for batch in batches} == {(4, 5), (1, 9)}
    starts = [batch.sequences.start for batch in batches]
    assert min(starts) < 20
    assert 180 < max(starts) <= RECIPE.max_start


def test_steps_of_a_long_past_draw_long_rings_if_they_are_told_to():
    recipe, source = dataclasses.replace(RECIPE, long_min_ring_frames=5), footage()
    drawn: dict[int, set[int]] = {}
    for step in range(200):
        batch = draw_batch(recipe, SMALL, source, None, step)
        drawn.setdefault(batch.target.shape[1], set()).add(batch.layers[0].ring_frames)
    assert drawn == {recipe.frames: {2, 3, 4, 5, 6}, recipe.long_frames: {5, 6}}


def test_pixels_that_differ_from_the_background_weigh_more():
    source = footage()
    background = source.background()
    assert background[0, 0, 0] == pytest.approx(200 / 127.5 - 1)
    batch = draw_batch(RECIPE, SMALL, source, background, 1)
    schedule = 0.5 / batch.sequences.sigma.clamp_min(0.3)
    weight = batch.weight[:, :, 0] / schedule[:, :, None, None]
    torch.testing.assert_close(weight[:, :, 0, 0], torch.ones_like(schedule))  # the pixel that never changes
    differs = (batch.target[:, :, 0] - background[0]).abs() > RECIPE.object_threshold
    torch.testing.assert_close(weight, torch.where(differs, RECIPE.object_weight, 1.0))


def test_later_the_weight_goes_to_what_the_objects_of_the_frame_before_can_reach():
    frames = np.zeros((12, 8, 8, 1), np.uint8)
    frames[4:, 3, 5] = 255  # one object, there from frame 4 on
    source = GameFootage([Clip.of(frames, np.zeros(12, np.int64), num_actions=3, fps=15.0, source="one pixel")])
    recipe = dataclasses.replace(RECIPE, frames=11, batch=1, long_share=0.0, rollout_from=5, object_reach=2)
    weights = []
    for step in (4, 5):
        batch = draw_batch(recipe, SMALL, source, torch.full((1, 8, 8), -1.0), step)
        schedule = 0.5 / batch.sequences.sigma.clamp_min(0.3)
        weights.append((batch.weight[0, :, 0] / schedule[0, :, None, None]).round())
    early, late = (weight == recipe.object_weight for weight in weights)
    here, around = torch.zeros(2, 8, 8, dtype=torch.bool)
    here[3, 5] = True
    around[1:6, 3:8] = True
    for frame in range(1, 12):
        assert torch.equal(early[frame - 1], here if frame >= 4 else torch.zeros_like(here))
        assert torch.equal(late[frame - 1], around if frame >= 5 else torch.zeros_like(around))


def test_the_late_object_weight_is_that_of_the_steps_from_rollout_from_on():
    source = footage()
    background = source.background()
    recipe = dataclasses.replace(RECIPE, object_weight=30.0, rollout_from=5)
    for late, expected in ((0.0, (30.0, 30.0)), (3.0, (30.0, 3.0))):
        for step, weight in zip((4, 5), expected, strict=True):
            batch = draw_batch(dataclasses.replace(recipe, late_object_weight=late), SMALL, source, background, step)
            schedule = 0.5 / batch.sequences.sigma.clamp_min(0.3)
            shares = batch.weight[:, :, 0] / schedule[:, :, None, None]
            differs = (batch.target[:, :, 0] - background[0]).abs() > recipe.object_threshold
            torch.testing.assert_close(shares, torch.where(differs, weight, 1.0))


@torch.no_grad()
def test_a_model_that_starts_from_the_background_sees_what_differs_from_it_and_predicts_it():
    background = torch.linspace(-1, 1, 64).view(1, 8, 8)
    fresh, started = FrameTransformer(SMALL, 0), FrameTransformer(SMALL, 0)
    start_from(started, background, 3.0)

    def embedded(model: FrameTransformer, frame: torch.Tensor) -> torch.Tensor:
        return model.patch_in(patchify(frame[None], SMALL.patch)) + model.position

    torch.testing.assert_close(embedded(started, background)[0], fresh.position)
    other = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(0))
    differs = fresh.patch_in(patchify((other - background)[None], SMALL.patch))
    torch.testing.assert_close(embedded(started, other) - fresh.position, 3 * differs)
    mean = started.head.bias.mean().item()
    assert mean == pytest.approx(background.mean().item(), abs=1e-6)
    changed = {
        name for name, weight in started.named_parameters() if not torch.equal(weight, fresh.get_parameter(name))
    }
    assert changed == {"patch_in.weight", "position", "head.bias"}


def test_only_a_recipe_that_says_so_starts_from_the_background():
    weights = [
        Trainer(dataclasses.replace(RECIPE, start_gain=gain), SMALL, footage()).average.position for gain in (0.0, 1.0)
    ]
    assert torch.equal(weights[0], FrameTransformer(SMALL, RECIPE.seed).position)
    assert not torch.equal(weights[0], weights[1])


class Alphabet(FootageSource):
    """Records which earlier frames a batch says are in view."""

    def __init__(self, source: FootageSource) -> None:
        self.source, self.history = source, []
        self.data_hash = source.data_hash

    def draw(self, rng: np.random.Generator, count: int, length: int, history: Sequence[Collection[int]]):
        self.history = [sorted(seen) for seen in history]
        return self.source.draw(rng, count, length, history)

    def background(self) -> None:
        return None


def test_a_frame_of_a_loop_counts_in_full_only_where_its_picture_is_in_view():
    rng = np.random.default_rng(0)
    source = Alphabet(LoopFootage([rng.integers(256, size=(3, period, 8, 8, 1), dtype=np.uint8) for period in (2, 4)]))
    recipe = dataclasses.replace(RECIPE, unpredictable_weight=0.02, dilated_share=0.3)
    told, untold = 0, 0
    for step in range(40):
        batch = draw_batch(recipe, SMALL, source, None, step)
        schedule = 0.5 / batch.sequences.sigma.clamp_min(0.3)
        weight = batch.weight[:, :, 0, 0, 0] / schedule
        served = batch.target  # frame f + 1 at index f
        for row in range(len(served)):
            for frame in range(1, served.shape[1] + 1):
                in_view = [seen for seen in source.history[frame] if seen > 0]
                twin = any(torch.equal(served[row, seen - 1], served[row, frame - 1]) for seen in in_view)
                if not twin and 0 in source.history[frame] and frame in (2, 4):
                    continue  # its picture may be that of frame 0, which is no target
                assert weight[row, frame - 1].item() == pytest.approx(1.0 if twin else 0.02)
                told, untold = told + twin, untold + (not twin)
    assert min(told, untold) > 50


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 32, 8), (2, 8, 32)])
def test_orthogonalizing_keeps_singular_vectors_and_brings_singular_values_near_one(shape: tuple[int, int, int]):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    result = orthogonalized(matrices)
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    turned = left.mT @ result @ right.mT
    values = torch.diagonal(turned, dim1=-2, dim2=-1)
    assert (turned - torch.diag_embed(values)).abs().max() < 1e-10
    assert values.min() > 0.3
    assert values.max() < 1.3


def test_muon_takes_the_parts_of_a_fused_matrix_one_by_one():
    generator = torch.Generator().manual_seed(0)
    gradient = torch.cat([torch.randn(4, 4, generator=generator) * scale for scale in (1.0, 100.0)])
    steps = []
    for splits in (1, 2):
        weight = torch.nn.Parameter(torch.zeros(8, 4))
        weight.grad = gradient.clone()
        Muon([{"params": [weight], "splits": splits}], lr=1.0, momentum=0.9).step()
        steps.append(weight.detach())
    sizes = [[part.norm().item() for part in step.chunk(2)] for step in steps]
    assert sizes[0][0] < 0.2 * sizes[0][1]
    assert sizes[1][0] > 0.7 * sizes[1][1]


def test_every_parameter_has_exactly_one_optimizer():
    model = FrameTransformer(SMALL, 0)
    muon, adamw = optimizers(model, RECIPE)
    stepped = [id(p) for optimizer in (muon, adamw) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(stepped) == sorted(id(p) for p in model.parameters())
    assert {id(p) for group in muon.param_groups for p in group["params"]} == {
        id(p) for name, p in model.named_parameters() if name.startswith("blocks.") and p.dim() == 2
    }


def test_the_rate_rises_stays_and_falls():
    recipe = Recipe(steps=100, warmup_steps=10, flat_share=0.5, final_lr=0.1)
    assert [recipe.rate(step) for step in (0, 4, 9, 10, 49, 50)] == pytest.approx([0.1, 0.5, 1, 1, 1, 1])
    assert recipe.rate(75) == pytest.approx(0.55)
    assert recipe.rate(99) == pytest.approx(0.118)


def state_of(trainer: Trainer, folder: Path) -> dict[str, torch.Tensor]:
    trainer.save(folder / "state.safetensors")
    with safe_open(folder / "state.safetensors", framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (a file, not a dict)


def test_a_run_that_was_interrupted_goes_on_bit_for_bit(tmp_path: Path):
    straight = Trainer(RECIPE, SMALL, footage())
    losses = [straight.advance()["loss"] for _ in range(6)]
    first = Trainer(RECIPE, SMALL, footage())
    for _ in range(3):
        first.advance()
    first.save(tmp_path / "first.safetensors")
    second = Trainer(RECIPE, SMALL, footage())
    second.load(tmp_path / "first.safetensors")
    assert second.step == 3
    assert [second.advance()["loss"] for _ in range(3)] == losses[3:]
    expected, resumed = state_of(straight, tmp_path), state_of(second, tmp_path)
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    parts = {name.split(".")[0] for name in expected}
    assert parts == {"model", "average", "momentum", "exp_avg", "exp_avg_sq", "step"}


@pytest.mark.parametrize("more", [{}, {"bf16": True, "start_gain": 1.5}])
def test_training_lowers_the_loss_and_moves_every_parameter_and_the_average_behind_it(more: dict):
    recipe = dataclasses.replace(RECIPE, steps=40, long_share=0.0, history_noise=0.0, dilated_share=0.0, **more)
    still = np.repeat(np.random.default_rng(0).integers(256, size=(1, 8, 8, 1), dtype=np.uint8), 30, axis=0)
    clip = Clip.of(still, np.arange(30) % 3, num_actions=3, fps=15.0, source="a still picture")
    trainer = Trainer(recipe, SMALL, GameFootage([clip]))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    losses = [trainer.advance()["loss"] for _ in range(40)]
    assert sum(losses[-5:]) < 0.3 * sum(losses[:5])
    for name, weight in trainer.model.named_parameters():
        assert not torch.equal(weight, before[name]), name
    for (name, weight), average in zip(before.items(), trainer.average.parameters(), strict=True):
        assert not torch.equal(weight, average), name


@pytest.mark.parametrize(
    ("change", "key"),
    [({"lr": 1e-3}, "recipe"), ({"seed": 4}, "recipe")],
)
def test_a_state_of_another_recipe_is_refused_and_changes_nothing(tmp_path: Path, change: dict, key: str):
    other = Trainer(dataclasses.replace(RECIPE, **change), SMALL, footage())
    other.advance()
    other.save(tmp_path / "other.safetensors")
    trainer = Trainer(RECIPE, SMALL, footage())
    before = state_of(trainer, tmp_path)
    with pytest.raises(ValueError, match=f"saved with {key}=.*; this run has"):
        trainer.load(tmp_path / "other.safetensors")
    after = state_of(trainer, tmp_path)
    assert trainer.step == 0
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_state_of_other_data_or_model_or_no_state_at_all_is_refused(tmp_path: Path):
    trainer = Trainer(RECIPE, SMALL, footage())
    trainer.save(tmp_path / "state.safetensors")
    with pytest.raises(ValueError, match="data_hash"):
        Trainer(RECIPE, SMALL, footage(seed=1)).load(tmp_path / "state.safetensors")
    with pytest.raises(ValueError, match="model"):
        Trainer(RECIPE, dataclasses.replace(SMALL, num_layers=2), footage()).load(tmp_path / "state.safetensors")
    (tmp_path / "none.safetensors").write_text(json.dumps({}))
    with pytest.raises(ValueError, match="not a training state"):
        trainer.load(tmp_path / "none.safetensors")
    with pytest.raises(FileNotFoundError):
        trainer.load(tmp_path / "missing.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps=0: expected an integer >= 1"),
        ({"long_min_ring_frames": 7}, "long_min_ring_frames=7: expected at most max_ring_frames=6"),
        ({"max_ring_frames": 1}, "max_ring_frames=1: expected an integer >= 2"),
        ({"long_share": 1.5}, "long_share=1.5: expected 0 to 1"),
        ({"lr": float("nan")}, "lr=nan: expected a finite number >= 0"),
        ({"max_dilation": 1}, "max_dilation=1: expected at least 2 with dilated_share > 0"),
        ({"seed": -1}, "seed=-1: expected an integer >= 0"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused_by_the_name_of_its_knob(change: dict, message: str):
    with pytest.raises(ValueError) as caught:
        dataclasses.replace(RECIPE, **change).check()
    assert str(caught.value) == message


def test_own_frames_stand_in_for_clean_ones_only_where_and_when_the_recipe_says_so():
    recipe = dataclasses.replace(RECIPE, own_share=0.5, rollout_from=10, long_share=0.0, frames=8)
    model = SequenceModel(FrameTransformer(SMALL, 0))
    source = footage()
    early = draw_batch(recipe, SMALL, source, None, 9)
    assert with_own_history(early, model) is early.sequences
    batch = draw_batch(recipe, SMALL, source, None, 10)
    same_draws = draw_batch(dataclasses.replace(recipe, own_share=0.0), SMALL, source, None, 10)
    assert same(batch.sequences, same_draws.sequences)
    before, after = batch.sequences, with_own_history(batch, model)
    changed = (after.clean != before.clean).flatten(2).any(dim=2)
    assert not changed[:2].any()
    assert not changed[:, 0].any()
    assert torch.equal(changed[2:, 1:], batch.own)
    assert 0 < batch.own.sum() < batch.own.numel()
    # What stands there is the prediction from noise alone, given the history before any of it was replaced.
    row, frame = (2 + int(batch.own.nonzero()[0, 0]), 1 + int(batch.own.nonzero()[0, 1]))
    alone = Sequences(
        before.clean[row : row + 1, :frame],
        batch.own_noise[row - 2 : row - 1, :frame],
        torch.ones(1, frame),
        before.actions[row : row + 1, : frame + 1],
        before.start,
    )
    with torch.no_grad():
        made = model(alone, batch.layers)[0, -1]
    torch.testing.assert_close(after.clean[row, frame], made, rtol=0, atol=1e-5)
