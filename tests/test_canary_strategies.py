"""Leak canary over every strategy and read: what must not be visible must not matter.

The test does not know how a strategy stores frames. It reaches every K or V tensor from the resource and looks at it
vector by vector (the last dim): the content is random, so a vector that equals one of a visible frame is that one, and
every other vector is something that no row of the step may see. All of those are overwritten with garbage, be they
frames out of the window, other sessions, the padding session, unwritten slots, freed pages or staging areas; a pass of
the step must not notice, bit by bit. That the check can fail is shown by overwriting one visible vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from ringkv import RingKVLayerConfig
from tests.ring_tools import ring
from tests.strategies import EVERY_READ, Rollout, history, kv_tensors, normal

every_read = pytest.mark.parametrize(("name", "read"), EVERY_READ)

WINDOWS = {"local": ring(3), "dilated": ring(3, 2), "sparse": ring(2, 3), "one-bucket": ring(1, 2)}
PHASES = {"fresh": 0, "filling": 2, "full": 3, "wrapped": 9, "wrapped-off-stride": 13}
"""Committed frames of the slowest row."""

BATCHES = ((1, 0), (3, 0), (2, 2))
"""Real rows and padding rows."""


class Step:
    """A planned step of one or several rows in a pool of five sessions: a resident one is never part of it, one was
    removed before, and the step's own rows had a commit aborted at this very frame."""

    def __init__(self, name: str, read: str, window: RingKVLayerConfig, frames: int, rows: int, pads: int) -> None:
        self.rollout = Rollout(
            name,
            [window],
            tokens=3,
            heads=2,
            q_heads=4,
            head_dim=8,
            sessions=5,
            padding=pads > 0,
            attention=read,
        )
        ends = {"gone": 6, "a": frames, "b": frames + 1, "c": frames + 4, "stranger": 7}
        for rid, end in ends.items():
            self.rollout.run(rid, range(end), noisy=0)
        self.rollout.resource.remove_request("gone")
        self.rows = [(rid, ends[rid]) for rid in (("b", "a", "c")[:rows])]
        self.pads = pads
        self.rollout.begin(self.rows)
        self.rollout.full_pass(self.rows, commit=True)  # aborted by the plan that follows
        self.rollout.begin(self.rows, pads)

    def visible_frames(self, rid: str, frame: int) -> list[tuple[Tensor, Tensor]]:
        """K and V of the history that a row may see."""
        past = history(self.rollout.name, self.rollout.windows[0], frame)
        return [self.rollout.content(rid, old, 0, 0)[1:] for old in past]

    def visible(self, tensor: Tensor) -> Tensor:
        """bool over ``tensor`` without its last dim: which vectors belong to the history of a row."""
        allowed = [pair for rid, frame in self.rows for pair in self.visible_frames(rid, frame)]
        out = torch.zeros(tensor.shape[:-1], dtype=torch.bool)
        for vector in torch.cat([t.reshape(-1, t.shape[-1]) for pair in allowed for t in pair]) if allowed else ():
            out |= (tensor == vector).all(dim=-1)
        return out

    def plant(self, seed: int, keep: Callable[[Tensor], Tensor] | None = None, values: str = "finite") -> int:
        """Garbage of magnitude 1e4 (or NaN and infinities) in every vector not kept; how many were overwritten."""
        count = 0
        for index, tensor in enumerate(kv_tensors(self.rollout.resource)):
            garbage = 1e4 * normal(*tensor.shape, key=(seed, index)).sign() * 2
            if values == "poison":
                garbage = torch.where(garbage > 0, float("nan"), float("inf"))
            chosen = ~(keep or self.visible)(tensor)
            tensor[chosen] = garbage[chosen]
            count += int(chosen.sum())
        return count

    def attend(self, commit: bool) -> Tensor:
        return self.rollout.layer_pass(self.rows, 0, commit=commit, pads=self.pads).clone()


def assert_bit_equal(outputs: Sequence[Tensor]) -> None:
    assert outputs[0].isfinite().all()
    for out in outputs[1:]:
        assert torch.equal(out, outputs[0])


def _canary(name: str, read: str, window: RingKVLayerConfig, frames: int, rows: int, pads: int, commit: bool) -> None:
    clean = Step(name, read, window, frames, rows, pads).attend(commit)
    step = Step(name, read, window, frames, rows, pads)
    outputs = [clean]
    for seed in (100, 200):  # before the first pass, and between passes, when histories may have been gathered
        step.plant(seed)
        outputs += [step.attend(commit=False), step.attend(commit)]
    assert_bit_equal(outputs)


@pytest.mark.parametrize(("window", "phase"), [("local", "wrapped"), ("dilated", "filling"), ("dilated", "wrapped")])
@every_read
def test_what_a_step_may_not_see_does_not_change_its_output(name: str, read: str, window: str, phase: str) -> None:
    for rows, pads in BATCHES[1:]:
        _canary(name, read, WINDOWS[window], PHASES[phase], rows, pads, commit=pads > 0)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("window", WINDOWS)
@every_read
def test_the_same_in_every_phase_and_window(name: str, read: str, window: str, phase: str) -> None:
    for rows, pads in BATCHES:
        for commit in (False, True):
            _canary(name, read, WINDOWS[window], PHASES[phase], rows, pads, commit)


@every_read
def test_nan_and_inf_of_other_sessions_do_not_poison_a_step(name: str, read: str) -> None:
    """What is masked still poisons (0 x NaN is NaN), so no read spans another session's storage."""
    for window, (rows, pads) in zip(("local", "sparse", "dilated"), BATCHES, strict=True):
        clean, step = (Step(name, read, WINDOWS[window], 9, rows, pads) for _ in range(2))
        own = [step.rollout.content(rid, frame, 0, 0)[1:] for rid, end in step.rows for frame in range(end + 1)]
        vectors = torch.cat([t.reshape(-1, 8) for pair in own for t in pair])

        def keep(tensor: Tensor, vectors: Tensor = vectors) -> Tensor:
            own = (tensor[..., None, :] == vectors).all(dim=-1).any(dim=-1)
            return own | (tensor == 0).all(dim=-1)  # room of its own that a session has not written yet

        assert step.plant(7, keep, values="poison") > 0
        assert_bit_equal([clean.attend(False), step.attend(False), step.attend(True)])


@every_read
def test_the_canary_dies_of_garbage_in_a_single_visible_vector(name: str, read: str) -> None:
    for window, (rows, pads), which in zip(("local", "sparse", "dilated"), BATCHES, (0, -1, 0), strict=True):
        clean, step = (Step(name, read, WINDOWS[window], 9, rows, pads) for _ in range(2))
        rid, frame = step.rows[which]
        key = step.visible_frames(rid, frame)[which][0][-1, -1]

        def keep(tensor: Tensor, step: Step = step, key: Tensor = key) -> Tensor:
            return step.visible(tensor) & ~(tensor == key).all(dim=-1)

        step.plant(100, keep)
        with pytest.raises(AssertionError):
            assert_bit_equal([clean.attend(False), step.attend(False)])


@every_read
def test_the_canary_dies_of_a_cache_that_shows_one_frame_too_many(name: str, read: str) -> None:
    """A leak in the code and not in the data: the cache has a bucket more than the specification that is checked."""
    clean, step = (Step(name, read, ring(4), 9, 1, 0) for _ in range(2))
    past = step.visible_frames
    step.visible_frames = lambda rid, frame: past(rid, frame)[1:]  # type: ignore[method-assign]
    step.plant(100)
    with pytest.raises(AssertionError):
        assert_bit_equal([clean.attend(False), step.attend(False)])


@every_read
def test_the_canary_reaches_the_storage(name: str, read: str) -> None:
    """Every visible vector is found, once at least, and there is something else to overwrite."""
    step = Step(name, read, ring(3), 9, 3, 0)
    expected = sum(2 * k.shape[0] * k.shape[1] for rid, frame in step.rows for k, _ in step.visible_frames(rid, frame))
    found = sum(int(step.visible(tensor).sum()) for tensor in kv_tensors(step.rollout.resource))
    assert found >= expected
    assert step.plant(100) > 0
