"""A ring of R buckets is full context under a window, and so is every other way of keeping that window.

Why they must agree. Attention is a sum over the visible frames, each with a weight that depends on its keys and the
query; neither knows where a frame is stored. Keys are stored after RoPE, so a frame's bytes do not change with its
place, and nothing is ever rotated again. So once two strategies show the same frames, given the same K and V, the only
freedom left is the order in which floating-point numbers are added. ``canonical`` takes that away too: it gathers the
visible frames in frame order into one contiguous tensor, whatever the storage, and makes one call. Two strategies then
hand the same bytes to the same call, one batch row at a time, and the outputs are equal bit by bit. That which frames
are visible is the same, at every clock, is what the slot arithmetic of a ring, the pages of a table and the shifts of a
window must each get right, and so the equality of outputs is a proof of all of them at once::

    ring = ring_uncompacted = paged(window) = shift = cat = full(window) = full_static(window)
    paged = full = full_static

Fast reads add in another order, or in parts: they are held to ``canonical`` call by call on the same contents, since
over a free-running rollout two roundings may drift apart without either being wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ring_tools import ring, same_bytes
from tests.strategies import EVERY_READ, STRATEGIES, TOLERANCE, UNBOUNDED, WINDOWED, Rollout

LAYERS = {
    "local": [ring(3), ring(1)],
    "dilated": [ring(3, 2), ring(2, 4)],
    "mixed": [ring(4), ring(2, 3), ring(1, 2)],
}
"""Layers of one model; the widest horizon is 8 frames."""

FRAMES = 25
"""Three wraps of the widest horizon."""

LAG = {"a": 0, "b": 1, "c": 5}
"""How many steps after the first each session begins, so that clocks differ in every step but the first."""

GEOMETRY: dict[str, Any] = {"tokens": 3, "heads": 2, "q_heads": 4, "head_dim": 8, "sessions": 3, "padding": True}


def steps(
    rollouts: list[Rollout], frames: int = FRAMES, noisy: int = 1
) -> Iterator[tuple[list[tuple[str, int]], list]]:
    """Rows of each step, and per rollout its outputs by pass and layer. Rows change order; some steps are padded."""
    for step in range(frames):
        rows = [(rid, step - lag) for rid, lag in LAG.items() if step >= lag]
        rows = rows[step % len(rows) :] + rows[: step % len(rows)]
        yield rows, [rollout.drive(rows, noisy=noisy, pads=step % 3) for rollout in rollouts]


def rollouts_of(names: tuple[str, ...], layers: str, dtype: torch.dtype) -> list[Rollout]:
    return [Rollout(name, LAYERS[layers], attention="canonical", dtype=dtype, **GEOMETRY) for name in names]


@pytest.mark.parametrize(
    ("layers", "dtype"),
    [
        ("local", torch.float32),
        ("dilated", torch.bfloat16),
        ("mixed", torch.float32),
        pytest.param("local", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("dilated", torch.float32, marks=pytest.mark.slow),
        pytest.param("mixed", torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", [WINDOWED, UNBOUNDED], ids=["window", "everything"])
def test_strategies_that_must_agree_agree_bit_by_bit(family: tuple[str, ...], layers: str, dtype: torch.dtype) -> None:
    assert len(family) >= 3
    rollouts = rollouts_of(family, layers, dtype)
    for rows, outputs in steps(rollouts):
        for name, found in zip(family[1:], outputs[1:], strict=True):
            assert same_bytes(found, outputs[0]), (family[0], name, rows)
    for rollout in rollouts:
        rollout.resource.check_integrity()


@pytest.mark.parametrize("layers", LAYERS)
def test_window_and_full_context_part_when_the_window_is_full(layers: str) -> None:
    """The matrix would also hold if nobody had a window: it must not, from the first frame that lost one."""
    windowed, everything = rollouts_of(("ring", "full"), layers, torch.float32)
    for frame in range(12):
        left, right = (rollout.drive([("a", frame)])[-1] for rollout in (windowed, everything))
        for window, one, other in zip(windowed.windows, left, right, strict=True):
            # Nothing is left out while every older frame is visible, and that needs every frame to be kept.
            complete = frame == 0 or (window.pinned_dilation == 1 and frame < window.ring_buckets)
            one_kept = frame == 1 and (window.ring_buckets > 1 or window.pinned_dilation > 1)
            assert torch.equal(one, other) == (complete or one_kept), (window, frame)


def _gaps(fast: Rollout, slow: Rollout, frames: int) -> list[tuple[float, float]]:
    """Per call the largest gap, and the largest value that the call could have read."""
    out = []
    for rows, (left, right) in steps([fast, slow], frames):
        for variant, found, expected in zip((1, 0), left, right, strict=True):
            for layer, (one, other) in enumerate(zip(found, expected, strict=True)):
                gap = (one.double() - other.double()).abs().max().item()
                # A safe floor of max |V|: what the rows wrote in this very call.
                largest = max(fast.content(*row, layer, variant)[2].abs().max().item() for row in rows)
                out.append((gap, largest))
    return out


FAST_READS = [("ring", "auto"), *((name, read) for name, read in EVERY_READ if read != "canonical")]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("name", "read"), FAST_READS)
def test_a_fast_read_is_close_to_canonical_call_by_call(name: str, read: str, dtype: torch.dtype) -> None:
    """Queries, keys and values in ``dtype``, as a model in that precision hands them over."""
    fast, slow = (
        _in(dtype, Rollout(name, LAYERS["mixed"], attention=path, dtype=dtype, **GEOMETRY))
        for path in (read, "canonical")
    )
    for gap, largest in _gaps(fast, slow, frames=14):
        assert gap <= TOLERANCE[dtype] * largest


def _in(dtype: torch.dtype, rollout: Rollout) -> Rollout:
    """``rollout`` fed with content in ``dtype``."""
    usual = rollout.content
    rollout.content = lambda *key: tuple(t.to(dtype) for t in usual(*key))
    return rollout


def test_the_check_of_fast_reads_fails_on_one_frame_too_many() -> None:
    wide, narrow = (
        Rollout("shift", [ring(buckets)], attention="sdpa", dtype=torch.bfloat16, **GEOMETRY) for buckets in (4, 3)
    )
    gaps = _gaps(wide, narrow, frames=8)
    assert any(gap > TOLERANCE[torch.bfloat16] * largest for gap, largest in gaps)


@pytest.mark.slow
@pytest.mark.parametrize("buckets", [1, 2, 3, 5])
@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_the_matrix_over_many_geometries(buckets: int, dilation: int, tokens: int) -> None:
    geometry: dict[str, Any] = {**GEOMETRY, "tokens": tokens, "attention": "canonical"}
    for family in (WINDOWED, UNBOUNDED):
        rollouts = [Rollout(name, [ring(buckets, dilation), ring(2)], **geometry) for name in family]
        for rows, outputs in steps(rollouts, frames=min(3 * buckets * dilation + 1, 46), noisy=2):
            for name, found in zip(family[1:], outputs[1:], strict=True):
                assert same_bytes(found, outputs[0]), (family[0], name, rows)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens", [1, 16, 65])
@pytest.mark.parametrize("head_dim", [24, 64])
def test_fast_reads_over_many_shapes(tokens: int, head_dim: int, dtype: torch.dtype) -> None:
    geometry: dict[str, Any] = {**GEOMETRY, "tokens": tokens, "head_dim": head_dim, "dtype": dtype}
    for name, strategy in STRATEGIES.items():
        for read in strategy.reads:
            fast, slow = (
                _in(dtype, Rollout(name, [ring(4), ring(3, 3)], attention=path, **geometry))
                for path in (read, "canonical")
            )
            for gap, largest in _gaps(fast, slow, frames=16):
                assert gap <= TOLERANCE[dtype] * largest, (name, read)


def test_bit_equality_sees_a_single_bit() -> None:
    def flipped(out: Tensor) -> Tensor:
        bits = out.clone().view(torch.int32)
        bits.view(-1)[0] ^= 1
        return bits.view(torch.float32)

    (rollout,) = rollouts_of(("shift",), "local", torch.float32)
    out = rollout.drive([("a", 0)])[-1][0]
    assert same_bytes(out, out.clone())
    assert not same_bytes(out, flipped(out))
