"""Read paths against a dense softmax in fp64, and the fast ones against canonical on the same contents.

Canonical is slow and beyond doubt; it is held to the dense oracle. Each fast read is then held to canonical, one attend
call at a time: 1e-6 x max|V| in fp32, 2e-2 x max|V| in bf16.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ringkv import RingKVLayerConfig, RingKVManager
from tests.ring_tools import begin, build_layer, build_manager, clocks, dense_attention, finish, reference_history, ring

FAST = ("sdpa", "segments", "lent", "auto")
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}

# (layer, tokens per frame, head dim): kv lengths that are 1 mod 32, odd, or no multiple of a block; compact and not
GEOMETRIES = {
    "T1-R32": (ring(32), 1, 24),
    "T5-R3": (ring(3), 5, 24),
    "T43-R2": (ring(2), 43, 24),
    "R1": (ring(1), 4, 8),
    "R3-of-5": (ring(3, frames=5), 3, 16),
    "R3-d2": (ring(3, 2), 2, 8),
    "R2-d4-of-7": (ring(2, 4, 7), 5, 24),
    "R16-d8-of-20": (ring(16, 8, 20), 1, 8),
}


def contiguous(x: Tensor) -> Tensor:
    return x


def permuted(x: Tensor) -> Tensor:
    """[B, H, T, D] as a view of [B, T, H, D], the way a projection leaves it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def interleaved(x: Tensor) -> Tensor:
    """Every other element of something larger: no dimension has stride 1."""
    return torch.stack([x, x + 1], dim=-1)[..., 0]


def expanded(x: Tensor) -> Tensor:
    """One token's values for all tokens, stride 0."""
    return x[:, :, :1].expand_as(x)


LAYOUTS = {"contiguous": contiguous, "permuted": permuted, "interleaved": interleaved, "expanded": expanded}


class Stream:
    """Two requests that start three frames apart, and what each committed, as the cache stores it."""

    def __init__(
        self, layer: RingKVLayerConfig, tokens: int, head_dim: int, heads: tuple[int, int], dtype: torch.dtype
    ):
        self.layer, self.tokens, self.head_dim, self.dtype = layer, tokens, head_dim, dtype
        self.kv_heads, self.q_heads = heads
        self.generator = torch.Generator().manual_seed(11)
        self.committed: dict[str, list[tuple[Tensor, Tensor]]] = {"a": [], "b": []}

    def manager(self, path: str, num_sessions: int = 2) -> RingKVManager:
        manager = build_manager(
            [self.layer],
            attention=path,
            dtype=self.dtype,
            tokens_per_frame=self.tokens,
            head_dim=self.head_dim,
            num_kv_heads=self.kv_heads,
            num_qo_heads=self.q_heads,
            num_sessions=num_sessions,
        )
        for rid in ("a", "b"):
            manager.ingest_request(rid)
        return manager

    def rows(self, step: int) -> list[tuple[str, int]]:
        """At ``step``, a is at frame step and b three frames behind it."""
        return [("a", step)] if step < 3 else [("b", step - 3), ("a", step)]

    def draw(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        shapes = [(rows, heads, self.tokens, self.head_dim) for heads in (self.q_heads, self.kv_heads, self.kv_heads)]
        q, k, v = (torch.randn(shape, generator=self.generator) for shape in shapes)
        return q, k, v

    def dense(self, row: tuple[str, int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """fp64 softmax over the frames that the specification names, from this class's own record."""
        rid, frame = row
        history = reference_history(self.layer.ring_buckets, self.layer.pinned_dilation, frame)
        seen = [self.committed[rid][f] for f in history] + [(k.to(self.dtype), v.to(self.dtype))]
        return dense_attention(q, torch.cat([k for k, _ in seen], dim=1), torch.cat([v for _, v in seen], dim=1))


def last_step(layer: RingKVLayerConfig) -> int:
    """Enough for both rows to wrap."""
    return 2 * layer.ring_buckets * layer.pinned_dilation + 3


def play(
    stream: Stream, paths: tuple[str, ...], layouts: Iterator[str], steps: int
) -> Iterator[tuple[list[tuple[str, int]], dict[str, Tensor], Tensor, float]]:
    """Play ``steps`` steps on a manager of each path; per call the rows, each path's output, the oracle's, max|V|."""
    managers = {path: stream.manager(path) for path in paths}
    for step in range(steps + 1):
        rows = stream.rows(step)
        frame_pos = clocks(*(frame for _, frame in rows))
        for manager in managers.values():
            begin(manager, rows)
        for commit in (False, True):
            layout = LAYOUTS[next(layouts)]
            q, k, v = (layout(x) for x in stream.draw(len(rows)))
            if stream.dtype is torch.bfloat16:
                q = q.to(stream.dtype)
            out = {path: m.attend(q, k, v, 0, frame_pos, commit=commit) for path, m in managers.items()}
            dense = torch.stack([stream.dense(row, q[i], k[i], v[i]) for i, row in enumerate(rows)])
            values = [v, *(v for rid, _ in rows for _, v in stream.committed[rid])]
            largest = max(value.abs().max().item() for value in values)
            yield rows, out, dense, largest
        for manager in managers.values():
            finish(manager, rows)
        for i, (rid, _) in enumerate(rows):
            stream.committed[rid].append((k[i].to(stream.dtype).clone(), v[i].to(stream.dtype).clone()))


def gap(left: Tensor, right: Tensor) -> float:
    return (left.double() - right.double()).abs().max().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_canonical_is_dense_attention_over_the_visible_frames(geometry: str, dtype: torch.dtype) -> None:
    layer, tokens, head_dim = GEOMETRIES[geometry]
    stream = Stream(layer, tokens, head_dim, (2, 4), dtype)
    for rows, out, dense, largest in play(stream, ("canonical",), itertools.cycle(LAYOUTS), min(last_step(layer), 70)):
        assert gap(out["canonical"], dense) <= TOLERANCE[dtype] * largest, rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_every_fast_read_agrees_with_canonical_on_the_same_contents(geometry: str, dtype: torch.dtype) -> None:
    layer, tokens, head_dim = GEOMETRIES[geometry]
    stream = Stream(layer, tokens, head_dim, (2, 4), dtype)
    layouts = itertools.cycle(LAYOUTS)
    for rows, out, dense, largest in play(stream, ("canonical", *FAST), layouts, min(last_step(layer), 70)):
        for path in FAST:
            assert gap(out[path], out["canonical"]) <= TOLERANCE[dtype] * largest, (path, rows)
            assert gap(out[path], dense) <= 2 * TOLERANCE[dtype] * largest, (path, rows)


@pytest.mark.parametrize("heads", [(1, 1), (1, 4), (3, 3), (2, 6)], ids=lambda pair: f"{pair[0]}kv-{pair[1]}q")
def test_every_grouping_of_heads_agrees_with_the_oracle(heads: tuple[int, int]) -> None:
    stream = Stream(ring(3, 2, 4), 3, 8, heads, torch.float32)
    for rows, out, dense, largest in play(stream, ("canonical", *FAST), itertools.cycle(LAYOUTS), 16):
        for path in ("canonical", *FAST):
            assert gap(out[path], dense) <= 1e-6 * largest, (path, rows)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("heads", [(1, 1), (1, 4), (3, 3), (2, 6)], ids=lambda pair: f"{pair[0]}kv-{pair[1]}q")
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_every_combination_agrees_with_the_oracle_over_two_periods(
    geometry: str, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    layer, tokens, head_dim = GEOMETRIES[geometry]
    stream = Stream(layer, tokens, head_dim, heads, dtype)
    for rows, out, dense, largest in play(stream, ("canonical", *FAST), itertools.cycle(LAYOUTS), last_step(layer)):
        for path in ("canonical", *FAST):
            assert gap(out[path], dense) <= TOLERANCE[dtype] * largest, (path, rows)


@pytest.mark.parametrize("path", ["canonical", *FAST])
def test_strided_and_expanded_inputs_give_what_contiguous_ones_give(path: str) -> None:
    """SDPA gave wrong numbers for strided or broadcast K and V."""
    for name, layout in LAYOUTS.items():
        stream = Stream(ring(3), 5, 24, (2, 4), torch.float32)
        plain, strided = stream.manager(path), stream.manager(path)
        for p in range(7):
            q, k, v = (layout(x) for x in stream.draw(1))
            assert name == "contiguous" or not k.is_contiguous()
            outputs = []
            for manager, inputs in ((plain, [x.contiguous() for x in (q, k, v)]), (strided, [q, k, v])):
                begin(manager, [("a", p)])
                outputs.append(manager.attend(*inputs, 0, clocks(p), commit=True))
                finish(manager, [("a", p)])
            assert gap(*outputs) <= 1e-6 * 5
        assert torch.equal(plain.layers[0].kv, strided.layers[0].kv)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layer_level_input_may_be_a_view_of_another_layout(layout: str) -> None:
    """kv as a permuted view of [2, B, T, H, D]."""
    plain, strided = (build_layer(3, tokens=5, heads=2, head_dim=24, sessions=2) for _ in range(2))
    for p in range(7):
        raw = torch.randn(2, 2, 5, 2, 24, generator=torch.Generator().manual_seed(p))
        kv = raw.permute(0, 3, 1, 2, 4).reshape(2, 1, 2, 10, 24)
        view = LAYOUTS[layout](kv[:, 0])[:, None]
        for cache, value in ((plain, view.contiguous()), (strided, view)):
            cache.upsert(value, clocks(p, p), True, clocks(1, 0))
    assert torch.equal(plain.kv, strided.kv)


def test_the_softmax_scale_is_that_of_the_head_dim() -> None:
    """A read that used another scale would still sum to one."""
    manager = build_manager([ring(2)], attention="canonical", tokens_per_frame=1, head_dim=16)
    manager.ingest_request("a")
    for p, (key, value) in enumerate([(0.0, 0.0), (1.0, 1.0)]):
        begin(manager, [("a", p)])
        k, v = torch.full((1, 1, 1, 16), key), torch.full((1, 1, 1, 16), value)
        out = manager.attend(torch.ones(1, 1, 1, 16), k, v, 0, clocks(p), commit=True)
        finish(manager, [("a", p)])
    # scores 0 and 16 / sqrt(16) = 4: the own frame weighs e^4 / (1 + e^4)
    torch.testing.assert_close(out, torch.full_like(out, 0.98201379), rtol=0, atol=1e-6)


@pytest.mark.parametrize("path", FAST)
def test_large_scores_do_not_overflow_when_parts_are_joined(path: str) -> None:
    """exp of an unshifted score overflows in fp32 from 89 on; a log-sum-exp of parts must shift too."""
    stream = Stream(ring(3, frames=4), 4, 8, (1, 2), torch.float32)
    managers = {name: stream.manager(name) for name in ("canonical", path)}
    for p in range(8):
        q, k, v = stream.draw(1)
        out = {}
        for name, manager in managers.items():
            begin(manager, [("a", p)])
            out[name] = manager.attend(q * 100, k * 10, v, 0, clocks(p), commit=True)
            finish(manager, [("a", p)])
        assert out[path].isfinite().all()
        assert gap(out[path], out["canonical"]) <= 1e-4  # scores near 1e3 carry 1e-4 of rounding


@pytest.mark.parametrize("paths", [("canonical", "canonical"), ("auto", "auto")], ids=["canonical", "auto"])
def test_the_same_run_twice_is_bit_equal(paths: tuple[str, str]) -> None:
    runs = []
    for path in paths:
        stream = Stream(ring(3, 2, 4), 3, 8, (2, 4), torch.float32)
        runs.append([out[path] for _, out, _, _ in play(stream, (path,), itertools.cycle(LAYOUTS), 14)])
    assert all(torch.equal(left, right) for left, right in zip(*runs, strict=True))


def test_canonical_does_not_depend_on_where_in_the_ring_a_frame_lies() -> None:
    """Two rings of different size that see the same frames give the same bits, wrapped or not."""
    small, large = ring(3), ring(8, frames=9)
    outputs = []
    for layer in (small, large):
        stream = Stream(layer, 3, 8, (2, 4), torch.float32)
        steps = list(play(stream, ("canonical",), itertools.cycle(["contiguous"]), 2))
        outputs.append([out["canonical"] for _, out, _, _ in steps])
    assert all(torch.equal(left, right) for left, right in zip(*outputs, strict=True))


def test_canonical_is_bit_equal_at_any_rotation_of_the_ring() -> None:
    """The same two visible frames, at a clock where they lie in order and at one where the newer lies first."""
    generator = torch.Generator().manual_seed(3)
    frames = torch.randn(3, 3, 1, 2, 4, 8, generator=generator)  # q, k, v; frame; B, H, T, D
    outputs = []
    for lead in range(6):  # frames before the three that matter
        manager = build_manager(
            [ring(3)], attention="canonical", tokens_per_frame=4, head_dim=8, num_kv_heads=2, num_qo_heads=2
        )
        manager.ingest_request("a")
        for p in range(lead + 3):
            q, k, v = frames[:, max(0, p - lead)] if p >= lead else torch.randn(3, 1, 2, 4, 8, generator=generator)
            begin(manager, [("a", p)])
            out = manager.attend(q, k, v, 0, clocks(p), commit=True)
            finish(manager, [("a", p)])
        outputs.append(out)
    assert all(torch.equal(out, outputs[0]) for out in outputs)
