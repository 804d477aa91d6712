"""FlexAttention over the ring: masks and block lists, on the CPU and, in the accelerator's form, on CPU tensors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ringkv import RingKVManager
from ringkv.attention import flex
from ringkv.attention.flex import KV_BLOCK
from ringkv.ring import ops
from ringkv.ring.flex import FlexReader
from ringkv.ring.tables import BlockTable
from tests.ring_tools import (
    begin,
    build_manager,
    clocks,
    finish,
    reference_history,
    ring,
    same_bytes,
    write_pass,
)
from tests.strategies import build as build_strategy
from tests.test_canary import LAYERS, PHASES, Step, assert_bit_equal, outputs_under_garbage
from tests.test_read_paths import GEOMETRIES, LAYOUTS, TOLERANCE, Stream, gap, last_step, play
from tests.test_ring_ops import ForbidHostReads

CPU = torch.device("cpu")
HEADS = {"num_kv_heads": 2, "num_qo_heads": 4}
QUICK = (("T5-R3", torch.float32), ("R2-d4-of-7", torch.bfloat16))


def on_accelerator_path(manager: RingKVManager) -> RingKVManager:
    """The manager, its flex reads those of an accelerator: over the pool, all rows in one call."""
    config, sessions = manager.config, manager.layers[0].num_sessions
    manager._flex = FlexReader(config, sessions, manager._max_rows, CPU, over_pool=True)
    manager.reads_in_graph = True
    manager._addresses = manager._buffer_addresses()
    return manager


def host_reads(graph: torch.fx.GraphModule) -> list[str]:
    """Nodes of a traced graph that wait for a value."""
    return [node.name for node in graph.graph.nodes if node.target in ("item", "tolist", "cpu", "nonzero")]


def agree_with_canonical(geometry: str, dtype: torch.dtype, steps: int) -> None:
    layer, tokens, head_dim = GEOMETRIES[geometry]
    stream = Stream(layer, tokens, head_dim, (2, 4), dtype)
    for rows, out, _, largest in play(stream, ("canonical", "flex"), itertools.cycle(LAYOUTS), steps):
        assert out["flex"].dtype == out["canonical"].dtype
        assert gap(out["flex"], out["canonical"]) <= TOLERANCE[dtype] * largest, rows


@pytest.mark.parametrize(("geometry", "dtype"), QUICK)
def test_flex_agrees_with_canonical_on_the_same_contents(geometry: str, dtype: torch.dtype) -> None:
    agree_with_canonical(geometry, dtype, 9)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_flex_agrees_with_canonical_in_every_geometry_over_two_wraps(geometry: str, dtype: torch.dtype) -> None:
    agree_with_canonical(geometry, dtype, min(last_step(GEOMETRIES[geometry][0]), 70))


def test_a_strategy_that_lacks_flex_refuses_it_by_name() -> None:
    with pytest.raises(ValueError, match=r"attention='flex'.*canonical"):
        build_strategy("shift", [ring(3)], attention="flex")


def test_a_hole_in_a_loaded_state_is_not_read() -> None:
    """The clock says that a slot is held, its flag says no: lists know clocks only, so the mask must know the flag."""
    managers = {path: build_manager([ring(4)], attention=path, num_sessions=2, **HEADS) for path in ("sdpa", "flex")}
    donor = build_manager([ring(4)], **HEADS)
    donor.ingest_request("a")
    for frame in range(6):
        begin(donor, [("a", frame)])
        write_pass(donor, [("a", frame)], commit=True)
        finish(donor, [("a", frame)])
    state = donor.get_state("a")
    kv, written = state["layers"][0]
    kv[:, :, :, 6:8], written[6:8] = 0, False  # slot 3, which holds frame 3
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 2, 2, generator=generator) for heads in (4, 2, 2))
    outputs = {}
    for path, manager in managers.items():
        manager.ingest_request("a")
        manager.load_state("a", state)
        begin(manager, [("a", 6)])
        outputs[path] = manager.attend(q, k, v, 0, clocks(6), commit=False)
    assert gap(outputs["flex"], outputs["sdpa"]) <= 1e-5  # values up to 6


# -- what must not be seen -----------------------------------------------------------------------------------


@pytest.mark.parametrize("over_pool", [False, True], ids=["rows", "pool"])
@pytest.mark.parametrize(
    ("geometry", "phase"),
    [("dilated", "filling"), pytest.param("local-uncompacted", "wrapped", marks=pytest.mark.slow)],
)
def test_garbage_in_what_a_step_may_not_see_changes_no_bit(geometry: str, phase: str, over_pool: bool) -> None:
    for rows, pads in ((1, 0), (2, 2)):
        step = Step(LAYERS[geometry], "flex", PHASES[phase], rows, pads)
        if over_pool:
            on_accelerator_path(step.manager)
            begin(step.manager, step.rows, pads)
        assert_bit_equal(outputs_under_garbage(step, ~step.visible_slots(), commit=False))
        leak = ~step.visible_slots()
        leak[step.visible_slots().nonzero()[0]] = True
        with pytest.raises(AssertionError):  # and the check can fail
            assert_bit_equal(outputs_under_garbage(step, leak, commit=False))


def test_nan_in_another_session_does_not_reach_a_row_on_the_cpu() -> None:
    step = Step(LAYERS["local"], "flex", PHASES["wrapped"], 2, 2)
    foreign = torch.ones(step.manager.total_slots(0), dtype=torch.bool)
    for rid, _ in step.rows:
        session = step.manager.session_of(rid)
        assert session is not None
        lo, hi = step.manager.layers[0].session_span(session)
        foreign[lo:hi] = False
    assert_bit_equal(outputs_under_garbage(step, foreign, commit=False, values="poison"))


def test_block_lists_alone_would_read_hidden_slots_and_ours_come_with_a_mask() -> None:
    """An unfused call takes no notice of block lists: without a mask it reads everything."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    step = Step(LAYERS["local"], "flex", PHASES["wrapped"], 1, 0)
    cache, reader = step.manager.layers[0], step.manager._flex
    assert reader is not None
    session = step.manager.session_of("b")
    assert session is not None

    def lists_alone() -> Tensor:
        lo, hi = cache.session_span(session)
        num_blocks, blocks = reader._lists(cache.geometry, 0, 1)
        mask = BlockMask.from_kv_blocks(
            num_blocks[:, None, None], blocks[:, None, None], seq_lengths=(6, hi - lo), compute_q_blocks=False
        )
        folded = step.q.reshape(1, 2, 6, 8)
        return flex_attention(folded, *cache.kv[:, :, :, lo:hi].unbind(0), block_mask=mask)

    before = step.attend(commit=False), lists_alone()
    step.fill(~step.visible_slots(), seed=5)
    after = step.attend(commit=False), lists_alone()
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


# -- block lists ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "tokens", "sessions"),
    [(ring(3), 5, 4), (ring(3, 2, 4), 50, 3), (ring(2, 4), 128, 2), (ring(5, 3, 17), 1, 9)],
)
def test_block_lists_name_exactly_the_blocks_with_a_visible_token_at_every_clock(
    layer: Any, tokens: int, sessions: int
) -> None:
    """Far beyond the two periods that the tables have, for sessions that begin anywhere in a block."""
    table = BlockTable(layer, tokens, sessions, CPU)
    buckets, dilation = layer.ring_buckets, layer.pinned_dilation
    capacity = (layer.ring_frames + 1) * tokens
    period = buckets * dilation
    every_clock = [*range(3 * period), 1000 * period + 1, 10**12 + 7]
    for session in range(sessions):
        counts, blocks = table.look_up(torch.full((len(every_clock),), session), clocks(*every_clock))
        assert (counts.dtype, blocks.dtype) == (torch.int32, torch.int32)
        for clock, count, listed in zip(every_clock, counts.tolist(), blocks.tolist(), strict=True):
            young = clock if clock < 3 * period else 2 * period + clock % period  # the reference plays every frame
            slots = [frame // dilation % buckets for frame in reference_history(buckets, dilation, young)]
            starts = [session * capacity + slot * tokens for slot in [*slots, layer.ring_frames]]
            expected = sorted({token // KV_BLOCK for start in starts for token in range(start, start + tokens)})
            assert listed[:count] == expected, (session, clock)
            own = range(session * capacity // KV_BLOCK, ((session + 1) * capacity - 1) // KV_BLOCK + 1)
            assert set(listed) <= set(own)


@pytest.mark.slow
def test_a_fused_kernel_that_skips_by_the_lists_agrees_with_canonical_and_compiles_once_per_batch_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The CPU's fused kernel, over the pool. It visits listed blocks only, as the accelerators' do."""
    torch.compiler.reset()
    monkeypatch.setattr(flex, "_flex_attention", lambda device: flex._fused())
    shape = {"num_sessions": 3, "tokens_per_frame": 40, "head_dim": 16, **HEADS}
    managers = {path: build_manager([ring(9, 2)], attention=path, **shape) for path in ("canonical", "flex")}
    flexing = on_accelerator_path(managers["flex"])
    reader, lists = flexing._flex, flexing._flex._lists
    pool_blocks = -(-flexing.total_slots(0) // KV_BLOCK)

    def as_wide_as_the_pool(*where: Any) -> tuple[Tensor, Tensor]:
        num_blocks, blocks = lists(*where)
        return num_blocks, F.pad(blocks, (0, pool_blocks - blocks.shape[1]))  # the CPU's kernel insists

    monkeypatch.setattr(reader, "_lists", as_wide_as_the_pool)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for step in range(30):
            rows = [("a", step)] if step < 3 else [("b", step - 3), ("a", step)]
            q, k, v = (torch.randn(len(rows), heads, 40, 16, generator=generator) for heads in (4, 2, 2))
            outputs = []
            with torch._dynamo.config.patch(error_on_recompile=step not in (0, 3)):
                for manager in managers.values():
                    manager.ingest_request("a")
                    manager.ingest_request("b")
                    begin(manager, rows)
                    frame_pos = clocks(*(frame for _, frame in rows))
                    outputs.append(manager.attend(q, k, v, 0, frame_pos, commit=True))
                    finish(manager, rows)
            assert gap(*outputs) <= 1e-6 * v.abs().max().item()
        assert int(reader._num_blocks[ring(9, 2)][0]) < reader._blocks[ring(9, 2)].shape[1] + 1


# -- the accelerator's path ----------------------------------------------------------------------------------


def test_staging_writing_and_masking_read_no_value_back() -> None:
    manager = on_accelerator_path(build_manager([ring(3, 2)], num_sessions=2, attention="flex", **HEADS))
    cache, reader = manager.layers[0], manager._flex
    assert reader is not None
    sessions, frame_pos = torch.tensor([1, 0]), clocks(5, 0)
    k, v = torch.randn(2, 2, 2, 2, 2)
    with ForbidHostReads():
        reader.stage(sessions, frame_pos)
        ops.write_on_device(cache.kv, cache.written, cache.commits, k, v, frame_pos, sessions, True, 3, 3, 2)
        cache.span_visibility(frame_pos, sessions)


def test_a_pass_with_its_read_is_one_graph_that_serves_every_clock_and_holds_no_copy_of_the_pool() -> None:
    """Fill, wrap, on and off the stride, rows at different clocks, a reset, a load: one graph per value of commit."""
    torch.compiler.reset()
    layers = [ring(3, 2)]
    eager = build_manager(layers, num_sessions=2, attention="canonical", head_dim=4, **HEADS)
    graphed = on_accelerator_path(build_manager(layers, num_sessions=2, attention="flex", head_dim=4, **HEADS))
    graphs = []

    def one_pass(manager: RingKVManager, q: Tensor, k: Tensor, v: Tensor, frame_pos: Tensor, commit: bool) -> Tensor:
        return manager.attend(q * 2, k + 1, v, 0, frame_pos, commit=commit).sin()

    def keep_graph(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    compiled = torch.compile(one_pass, fullgraph=True, dynamic=False, backend=keep_graph)
    addresses = graphed._buffer_addresses()
    generator = torch.Generator().manual_seed(0)
    at = {"a": 0, "b": 0}

    def advance(rids: tuple[str, ...], *, may_compile: bool) -> None:
        rows = [(rid, at[rid]) for rid in rids]
        for manager in (eager, graphed):
            for rid in rids:
                manager.ingest_request(rid)
            begin(manager, rows)
        for commit in (False, True):
            q, k, v = (torch.randn(len(rows), heads, 2, 4, generator=generator) for heads in (4, 2, 2))
            frame_pos = clocks(*(frame for _, frame in rows))
            expected = one_pass(eager, q, k, v, frame_pos, commit)
            with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=not may_compile):
                got = (
                    compiled(graphed, q, k, v, frame_pos, commit)
                    if len(rows) == 2
                    else one_pass(graphed, q, k, v, frame_pos, commit)
                )
            assert gap(got, expected) <= 1e-6 * max(1.0, v.abs().max().item())
        for manager in (eager, graphed):
            finish(manager, rows)
            manager.check_integrity()
        for rid in rids:
            at[rid] += 1

    for _ in range(3):
        advance(("a",), may_compile=True)  # alone, eagerly: from here on the two are at different clocks
    for step in range(12):
        if step == 5:
            for manager in (eager, graphed):
                manager.reset_request("b")
            at["b"] = 0
        if step == 9:
            for manager in (eager, graphed):
                manager.load_state("b", manager.get_state("a"))
            at["b"] = at["a"]
        advance(("a", "b") if step % 2 else ("b", "a"), may_compile=step == 0)
    assert len(graphs) == 2
    assert graphed._buffer_addresses() == addresses
    assert all(same_bytes(x.kv, y.kv) for x, y in zip(eager.layers, graphed.layers, strict=True))
    pool = graphed.layers[0].kv.numel()
    for graph in graphs:
        assert not host_reads(graph)
        made = [
            node.meta["example_value"].numel()
            for node in graph.graph.nodes
            if node.op != "placeholder"
            and isinstance(node.meta.get("example_value"), Tensor)
            and node.meta["example_value"]._base is None
        ]
        assert max(made) < pool
        assert sum(node.target is torch.ops.ringkv.ring_write.default for node in graph.graph.nodes) == 1


def test_a_host_read_in_a_graph_would_be_found() -> None:
    torch.compiler.reset()
    graphs = []

    def keep_graph(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    torch.compile(lambda x: x * x.sum().item(), backend=keep_graph)(torch.ones(2))
    assert any(map(host_reads, graphs)) or len(graphs) != 1  # in the graph, or between two halves of it
