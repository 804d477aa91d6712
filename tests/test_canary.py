"""Leak canary: what must not be visible must not matter, on any read path.

The same step runs twice with different finite garbage in every token slot that no row of the step may see: sessions of
others (their scratch too), the slot that the frame will overwrite, slots nothing was written to, slots between
``ring_buckets`` and ``ring_frames``, and the padding session. The outputs must be equal bit by bit. That the check can
fail is shown by putting the garbage into one visible slot.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ringkv import RingKVLayerConfig, RingKVManager
from tests.ring_tools import READ_PATHS, Payload, begin, build_manager, clocks, drive, reference_history, ring

TOKENS, KV_HEADS, Q_HEADS, HEAD_DIM = 3, 2, 4, 8

LAYERS = {
    "local": ring(3),
    "local-uncompacted": ring(3, frames=6),
    "dilated": ring(3, 2),
    "dilated-uncompacted": ring(2, 3, 5),
    "one-bucket": ring(1, 2),
}
PHASES = {"fresh": 0, "filling": 2, "full": 3, "wrapped": 9, "wrapped-off-stride": 13}
"""Committed frames of the slowest row."""


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def payload(layer_seed: int) -> Payload:
    return lambda row, frame: tuple(normal(2, KV_HEADS, TOKENS, HEAD_DIM, seed=1000 * layer_seed + 10 * frame + row))


class Step:
    """A planned step of one or several rows in a pool of four sessions, one of which is never part of it."""

    def __init__(self, layer: RingKVLayerConfig, path: str, frames: int, rows: int, pads: int):
        self.layer, self.pads = layer, pads
        self.manager: RingKVManager = build_manager(
            [layer],
            attention=path,
            tokens_per_frame=TOKENS,
            num_kv_heads=KV_HEADS,
            num_qo_heads=Q_HEADS,
            head_dim=HEAD_DIM,
            num_sessions=4,
            padding_session=pads > 0,
        )
        rids = ("a", "b", "c", "stranger")
        ends = {"a": frames, "b": frames + 1, "c": frames + 4, "stranger": 7}
        for rid in rids:
            self.manager.ingest_request(rid)
            for p in range(ends[rid]):
                drive(self.manager, [(rid, p)], payload=payload(0), noisy_passes=0)
        order = ("b", "a", "c")[:rows] if rows > 1 else ("b",)
        self.rows = [(rid, ends[rid]) for rid in order]
        begin(self.manager, self.rows, pads)
        count = rows + pads
        self.q = normal(count, Q_HEADS, TOKENS, HEAD_DIM, seed=1)
        self.k = normal(count, KV_HEADS, TOKENS, HEAD_DIM, seed=2)
        self.v = normal(count, KV_HEADS, TOKENS, HEAD_DIM, seed=3)
        self.frame_pos = clocks(*(frame for _, frame in self.rows), *[0] * pads)

    def visible_slots(self) -> Tensor:
        """bool [total_slots]: history that some row of the step may see. Own scratch is rewritten by the pass."""
        out = torch.zeros(self.manager.total_slots(0), dtype=torch.bool)
        for rid, frame in self.rows:
            session = self.manager.session_of(rid)
            assert session is not None
            for old in reference_history(self.layer.ring_buckets, self.layer.pinned_dilation, frame):
                slot = (old // self.layer.pinned_dilation) % self.layer.ring_buckets
                low = session * self.manager.capacity(0) + slot * TOKENS
                out[low : low + TOKENS] = True
        return out

    def fill(self, where: Tensor, seed: int, values: str = "finite") -> None:
        """Garbage of magnitude 1e4 (or NaN and infinities) at ``where`` [total_slots]."""
        kv = self.manager.layers[0].kv
        garbage = 1e4 * normal(*kv.shape, seed=seed).sign() * (1 + normal(*kv.shape, seed=seed + 1).abs())
        if values == "poison":
            garbage = torch.where(garbage > 0, float("nan"), float("inf"))
        kv[:, :, :, where] = garbage[:, :, :, where]

    def attend(self, *, commit: bool) -> Tensor:
        out = self.manager.attend(self.q, self.k, self.v, 0, self.frame_pos, commit=commit)
        return out[: len(self.rows)].clone()


def outputs_under_garbage(step: Step, where: Tensor, *, commit: bool, values: str = "finite") -> list[Tensor]:
    """The same pass with nothing planted, and twice with different garbage at ``where``."""
    outputs = [step.attend(commit=commit)]
    for seed in (100, 200):
        step.fill(where, seed, values)
        outputs.append(step.attend(commit=commit))
    return outputs


def assert_bit_equal(outputs: list[Tensor]) -> None:
    assert outputs[0].isfinite().all()
    for out in outputs[1:]:
        assert torch.equal(out, outputs[0])


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("geometry", LAYERS)
@pytest.mark.parametrize("path", READ_PATHS)
def test_what_a_step_may_not_see_does_not_change_its_output(path: str, geometry: str, phase: str) -> None:
    for rows, pads in ((1, 0), (3, 0), (2, 2)):
        for commit in (False, True):
            step = Step(LAYERS[geometry], path, PHASES[phase], rows, pads)
            assert_bit_equal(outputs_under_garbage(step, ~step.visible_slots(), commit=commit))


@pytest.mark.parametrize("geometry", LAYERS)
@pytest.mark.parametrize("path", READ_PATHS)
def test_nan_and_inf_in_another_session_do_not_poison_a_step(path: str, geometry: str) -> None:
    """What is masked still poisons (0 x NaN is NaN), so no read spans another session's slots."""
    for rows, pads in ((1, 0), (3, 0), (2, 2)):
        step = Step(LAYERS[geometry], path, 9, rows, pads)
        foreign = torch.ones(step.manager.total_slots(0), dtype=torch.bool)
        capacity = step.manager.capacity(0)
        for rid, _ in step.rows:
            session = step.manager.session_of(rid)
            assert session is not None
            foreign[session * capacity : (session + 1) * capacity] = False
        assert foreign.any()
        assert_bit_equal(outputs_under_garbage(step, foreign, commit=False, values="poison"))


@pytest.mark.parametrize("geometry", [name for name in LAYERS if name != "one-bucket"])
@pytest.mark.parametrize("path", READ_PATHS)
def test_the_canary_dies_of_garbage_in_a_single_visible_token(path: str, geometry: str) -> None:
    for rows, pads in ((1, 0), (3, 0), (2, 2)):
        step = Step(LAYERS[geometry], path, 9, rows, pads)
        visible = step.visible_slots().nonzero().flatten()
        for token in (visible[0], visible[-1]):
            leak = ~step.visible_slots()
            leak[token] = True
            outputs = outputs_under_garbage(step, leak, commit=False)
            with pytest.raises(AssertionError):
                assert_bit_equal(outputs)
            step = Step(LAYERS[geometry], path, 9, rows, pads)


@pytest.mark.parametrize("path", READ_PATHS)
def test_the_canary_dies_of_a_cache_that_shows_one_frame_too_many(path: str) -> None:
    """A leak in the code and not in the data: every row reads one frame too many, the slot that should be hidden."""
    step = Step(LAYERS["local"], path, 9, 1, 0)
    leaky = build_manager(
        [ring(4)],
        attention=path,
        tokens_per_frame=TOKENS,
        num_kv_heads=KV_HEADS,
        num_qo_heads=Q_HEADS,
        head_dim=HEAD_DIM,
        num_sessions=4,
    )
    for rid, p in [("a", p) for p in range(9)] + [("b", p) for p in range(10)]:
        leaky.ingest_request(rid)
        drive(leaky, [(rid, p)], payload=payload(0), noisy_passes=0)
    begin(leaky, step.rows)
    step.manager = leaky  # sees one frame more than the specification of step.layer
    step.layer = ring(3)
    visible = torch.zeros(leaky.total_slots(0), dtype=torch.bool)
    session = leaky.session_of("b")
    assert session is not None
    for old in reference_history(3, 1, step.rows[0][1]):
        low = session * leaky.capacity(0) + (old % 4) * TOKENS
        visible[low : low + TOKENS] = True
    with pytest.raises(AssertionError):
        assert_bit_equal(outputs_under_garbage(step, ~visible, commit=False))


@pytest.mark.parametrize("geometry", LAYERS)
def test_the_visibility_rows_name_exactly_the_visible_slots_and_the_own_scratch(geometry: str) -> None:
    for frames in PHASES.values():
        step = Step(LAYERS[geometry], "canonical", frames, 3, 2)
        _, _, visible = step.manager.upsert(step.k, step.v, 0, step.frame_pos, commit=False)
        expected = step.visible_slots()
        capacity = step.manager.capacity(0)
        for rid, _ in step.rows:
            session = step.manager.session_of(rid)
            assert session is not None
            expected[(session + 1) * capacity - TOKENS : (session + 1) * capacity] = True
        assert torch.equal(visible[:3].any(dim=0), expected)
        assert int(visible[:3].sum()) == int(expected.sum())  # no slot in two rows
