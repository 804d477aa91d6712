"""Rows that one call reads, the join of segments, and products on a CPU without bf16 instructions.

Rows at one clock in evenly spaced sessions are read by one call. That must change no bit: how a row is read may not
depend on who shares its step.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from model import layers
from model.rope import rotation
from ringkv.attention import paths
from ringkv.ring.view import LayerPass, RingView, lockstep
from tests.ring_tools import (
    READ_PATHS,
    begin,
    build_manager,
    clocks,
    dense_attention,
    drive,
    finish,
    reference_history,
    ring,
)

FAST = ("auto", "sdpa", "segments", "lent")


def payload(row: int, frame: int) -> tuple[Tensor, Tensor]:
    k, v = normal(2, 2, 16, 16, seed=frame)
    return k, v


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- what is seen ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize(("buckets", "frames"), [(1, 1), (1, 3), (2, 2), (3, 3), (3, 5), (4, 4)])
def test_segments_are_the_visible_frames_of_the_specification_and_scratch(
    buckets: int, frames: int, dilation: int
) -> None:
    layer = ring(buckets, dilation, frames)
    for clock in range(3 * buckets * dilation + 2):
        history = reference_history(buckets, dilation, clock)
        slots = {frame // dilation % buckets for frame in history} | {frames}
        view = RingView(layer, clock, 2)
        tokens = [token for lo, hi in view.segments for token in range(lo, hi)]
        assert tokens == sorted(2 * slot + part for slot in slots for part in (0, 1)), clock
        assert all(end < start for (_, end), (start, _) in pairwise(view.segments)), clock
        assert view.frames == tuple((2 * s, 2 * s + 2) for s in [f // dilation % buckets for f in history] + [frames])
        assert view.visible_tokens == len(tokens)


def test_missing_slots_are_left_out_of_frames_and_segments() -> None:
    view = RingView(ring(5), 12, 1, {0, 3})  # the slot about to be overwritten is 2
    assert view.segments == ((1, 2), (4, 6))
    assert view.frames == ((4, 5), (1, 2), (5, 6))


@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize(("buckets", "frames"), [(1, 1), (1, 3), (2, 2), (3, 3), (3, 5), (4, 4)])
def test_with_the_frame_in_its_home_what_it_sees_is_the_first_tokens_of_its_session(
    buckets: int, frames: int, dilation: int
) -> None:
    layer = ring(buckets, dilation, frames)
    for clock in range(3 * buckets * dilation + 2):
        view = RingView(layer, clock, 2)
        slots = {frame // dilation % buckets for frame in reference_history(buckets, dilation, clock)}
        assert sorted(slots | {view.home[0] // 2}) == list(range(view.visible_tokens // 2)), clock
        if clock % dilation == 0:
            assert view.home == (2 * (clock // dilation % buckets), 2 * (clock // dilation % buckets) + 2), clock


def test_a_ring_with_a_hole_lends_nothing_unless_the_hole_is_the_slot_itself() -> None:
    assert RingView(ring(3), 4, 2, {0}).has_holes
    assert not RingView(ring(3), 4, 2, {1}).has_holes


@pytest.mark.parametrize("fails", [False, True])
def test_a_lent_slot_is_given_back_bit_for_bit_even_by_a_read_that_fails(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = normal(2, 1, 1, 12, 4, seed=0)
    kv[:, :, :, 3:6] = float("nan")  # slot 1, which frame 4 is about to overwrite: nothing that it holds may be read
    before = kv.clone()
    view = RingView(ring(3), 4, 3)
    flags = torch.ones(1, 12, dtype=torch.bool)
    lent = LayerPass(slice(0, 1), view, kv, flags, query_heads=2, tokens_per_frame=3, attention="lent")
    q = normal(1, 2, 3, 4, seed=1)
    if fails:
        monkeypatch.setattr(paths, "masked", lambda *_: (_ for _ in ()).throw(MemoryError("scores")))
        with pytest.raises(MemoryError):
            lent.read(q, commit=False)
    else:
        seen = torch.cat([kv[:, 0, :, :3], kv[:, 0, :, 6:]], dim=2)
        assert (lent.read(q, commit=False)[0].double() - dense_attention(q[0], *seen)).abs().max() <= 1e-5
    assert torch.equal(kv.view(torch.int32), before.view(torch.int32))


def test_a_lent_slot_is_given_back_when_an_interrupt_comes_while_the_frame_moves_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kv = normal(2, 1, 1, 12, 4, seed=0)
    before, view, flags = kv.clone(), RingView(ring(3), 4, 3), torch.ones(1, 12, dtype=torch.bool)
    lent = LayerPass(slice(0, 1), view, kv, flags, query_heads=2, tokens_per_frame=3, attention="lent")
    calls = []

    class Interrupted(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is Tensor.copy_:
                calls.append(func)
                if len(calls) == 1:
                    raise KeyboardInterrupt
            return result

    with Interrupted(), pytest.raises(KeyboardInterrupt):
        lent.read(normal(1, 2, 3, 4, seed=1), commit=False)
    assert len(calls) == 2
    assert torch.equal(kv, before)


@pytest.mark.parametrize("path", FAST)
def test_a_gradient_through_a_read_is_that_of_dense_attention(path: str) -> None:
    """It is taken after the call: what a read has put back by then must not be what the gradient is taken over."""
    kv, q = normal(2, 1, 2, 36, 8, seed=0), normal(1, 4, 4, 8, seed=1).requires_grad_()
    view, flags = RingView(ring(8), 12, 4), torch.ones(1, 36, dtype=torch.bool)
    one = LayerPass(slice(0, 1), view, kv, flags, query_heads=4, tokens_per_frame=4, attention=path)
    seen = torch.cat([kv[:, :, :, lo:hi] for lo, hi in view.segments], dim=3)
    repeated = seen.repeat_interleave(2, dim=2)
    (wanted,) = torch.autograd.grad(F.scaled_dot_product_attention(q, *repeated).square().sum(), q)
    (got,) = torch.autograd.grad(one.read(q, commit=False).square().sum(), q)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


# -- who is read together --------------------------------------------------------------------------------------


def grouped(views: str, sessions: list[int]) -> list[tuple[list[int], list[int]]]:
    """Rows and sessions of each group; ``views`` names one view per row."""
    by_name = {name: RingView(ring(3), 4, 2) for name in views}
    groups = lockstep([by_name[name] for name in views], sessions)
    return [(list(range(*rows.indices(99))), list(range(*which.indices(99)))) for rows, which in groups]


@pytest.mark.parametrize(
    ("views", "sessions", "expected"),
    [
        ("a", [5], [([0], [5])]),
        ("aaa", [0, 1, 2], [([0, 1, 2], [0, 1, 2])]),
        ("aaa", [1, 4, 7], [([0, 1, 2], [1, 4, 7])]),
        ("aaaa", [0, 1, 3, 5], [([0, 1], [0, 1]), ([2, 3], [3, 5])]),
        ("aab", [0, 1, 2], [([0, 1], [0, 1]), ([2], [2])]),
        ("aba", [0, 1, 2], [([0], [0]), ([1], [1]), ([2], [2])]),
        ("aaa", [2, 1, 0], [([0], [2]), ([1], [1]), ([2], [0])]),
        ("aaa", [3, 3, 3], [([0], [3]), ([1], [3]), ([2], [3])]),  # padding rows share one session
        ("baa", [0, 3, 5], [([0], [0]), ([1, 2], [3, 5])]),
    ],
)
def test_neighbours_with_one_view_in_evenly_spaced_sessions_are_read_together(
    views: str, sessions: list[int], expected: list[tuple[list[int], list[int]]]
) -> None:
    assert grouped(views, sessions) == expected


@pytest.mark.parametrize("path", FAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_row_read_with_others_has_the_bits_of_a_row_read_beside_strangers(path: str, dtype: torch.dtype) -> None:
    """Row a once in step with b and c, once while b and c are at other clocks; all else is the same."""
    outputs = []
    for offset in (0, 1):
        manager = build_manager(
            [ring(4)],
            attention=path,
            dtype=dtype,
            tokens_per_frame=16,
            num_kv_heads=2,
            num_qo_heads=4,
            head_dim=16,
            num_sessions=3,
        )
        ends = {"a": 6, "b": 6 + offset, "c": 6 + 2 * offset}
        for rid, end in ends.items():
            manager.ingest_request(rid)
            for p in range(end):
                drive(manager, [(rid, p)], payload=payload, noisy_passes=0)
        rows = list(ends.items())
        begin(manager, rows)
        q, k, v = (normal(3, heads, 16, 16, seed=seed).to(dtype) for seed, heads in enumerate((4, 2, 2)))
        out = manager.attend(q, k, v, 0, clocks(*ends.values()), commit=True)
        assert len(manager._passes[0]) == (1 if offset == 0 else 3)
        finish(manager, rows)
        outputs.append(out[0])
    assert torch.equal(*outputs)


@pytest.mark.parametrize("path", [path for path in READ_PATHS if path != "flex"])
def test_rows_read_together_see_their_own_sessions(path: str) -> None:
    manager = build_manager(
        [ring(3)], attention=path, tokens_per_frame=2, num_kv_heads=1, num_qo_heads=2, head_dim=8, num_sessions=3
    )
    rids = ("a", "b", "c")
    content: dict[str, list[tuple[Tensor, Tensor]]] = {rid: [] for rid in rids}
    for rid in rids:
        manager.ingest_request(rid)
    for p in range(7):
        rows = [(rid, p) for rid in rids]
        begin(manager, rows)
        q, k, v = (normal(3, heads, 2, 8, seed=10 * p + i) for i, heads in enumerate((2, 1, 1)))
        out = manager.attend(q, k, v, 0, clocks(p, p, p), commit=True)
        finish(manager, rows)
        for row, rid in enumerate(rids):
            content[rid].append((k[row], v[row]))
            seen = content[rid][-3:]
            dense = dense_attention(q[row], *(torch.cat([pair[i] for pair in seen], dim=1) for i in (0, 1)))
            assert (out[row].double() - dense).abs().max() <= 1e-6 * 5


# -- the join --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(5,), (1, 4), (2, 3, 9), (1, 2, 3, 4, 5)])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str
)
def test_any_number_of_segments_joins_to_the_softmax_over_all(
    cuts: tuple[int, ...], dtype: torch.dtype, bound: float
) -> None:
    q, k, v = (normal(2, heads, n, 8, seed=i).to(dtype) for i, (heads, n) in enumerate(((4, 3), (2, 11), (2, 11))))
    keys, values = (x.tensor_split(cuts, dim=2) for x in (k, v))
    joined = paths.segments(q, keys, values)
    dense = torch.stack([dense_attention(q[row], k[row], v[row]) for row in range(2)])
    assert joined.dtype == dtype
    assert (joined.double() - dense).abs().max() <= bound * v.abs().max()


def test_a_segment_that_outweighs_the_others_beyond_all_range_is_the_answer() -> None:
    q = torch.full((1, 1, 1, 4), 50.0)
    keys = [torch.full((1, 1, 1, 4), value) for value in (-50.0, 50.0, 0.0)]
    values = [torch.full((1, 1, 1, 4), value) for value in (1.0, 2.0, 3.0)]
    assert torch.equal(paths.segments(q, keys, values), torch.full((1, 1, 1, 4), 2.0))


def test_a_bias_of_minus_infinity_hides_what_a_false_in_a_mask_hides_bit_for_bit() -> None:
    view = RingView(ring(4), 9, 3)
    bias = view.bias(torch.float32, torch.device("cpu"))
    assert bias is not None
    lo, hi = view.span
    visible = torch.zeros(hi - lo, dtype=torch.bool)
    for first, last in view.segments:
        visible[first - lo : last - lo] = True
    assert torch.equal(bias == 0, visible)
    q, k, v = (normal(1, heads, n, 8, seed=i) for i, (heads, n) in enumerate(((4, 3), (2, hi - lo), (2, hi - lo))))
    assert torch.equal(paths.masked(q, k, v, bias), paths.masked(q, k, v, visible))


# -- products --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("native", [True, False])
def test_a_bf16_product_is_the_rounded_fp32_product_of_the_same_values(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "_NATIVE_BF16", native)
    x, weight, bias = (each.bfloat16() for each in (normal(5, 24, seed=0), normal(7, 24, seed=1), normal(7, seed=2)))
    out = layers.product(x, weight, bias)
    exact = F.linear(x.double(), weight.double(), bias.double())
    assert out.dtype == torch.bfloat16
    assert ((out.double() - exact).abs() <= exact.abs().clamp(min=1e-3) * 2**-8).all()
    if not native:
        assert torch.equal(out, F.linear(x.float(), weight.float(), bias.float()).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_other_dtypes_are_multiplied_as_they_are(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_NATIVE_BF16", False)
    x, weight = normal(5, 24, seed=0).to(dtype), normal(7, 24, seed=1).to(dtype)
    assert torch.equal(layers.product(x, weight), F.linear(x, weight))


def test_a_rotation_first_met_in_inference_mode_can_be_trained_through() -> None:
    """What is kept between frames must not be an inference tensor."""
    grid, dim = (2, 5), 24  # not met elsewhere
    with torch.inference_mode():
        rotation(clocks(3), grid, dim, torch.float32)
    cos, _ = rotation(clocks(3), grid, dim, torch.float32)
    heads = torch.ones(1, 1, 10, 12, requires_grad=True)
    (heads * cos).sum().backward()
    assert heads.grad is not None
    assert torch.equal(heads.grad, cos)
