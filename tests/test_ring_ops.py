"""The registered write: two bodies with one meaning, no waiting on a device, compiled regions that stay in place."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from ringkv import (
    EngineResourceInfo,
    FrameStep,
    KVSpec,
    LayerRingCache,
    RingKVConfig,
    RingKVLayerConfig,
    StepContext,
)
from ringkv.ring import ops


class ForbidHostReads(TorchDispatchMode):
    """Raises where the host would wait for a tensor's value, which a captured graph cannot do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("a value was read back on the host")
        return func(*args, **(kwargs or {}))


def caches(sessions=3, **geometry):
    shape = {"ring_frames": 4, "ring_buckets": 3, "pinned_dilation": 2} | geometry
    return tuple(
        LayerRingCache(sessions, 2, d_head=4, tokens_per_frame=2, dtype=torch.float32, device="cpu", **shape)
        for _ in range(2)
    )


def arguments(cache, k, v, clocks, sessions, commit):
    layer = cache.geometry
    return (
        cache.kv,
        cache.written,
        cache.commits,
        k,
        v,
        torch.tensor(clocks),
        torch.tensor(sessions),
        commit,
        layer.ring_frames,
        layer.ring_buckets,
        layer.pinned_dilation,
    )


@pytest.mark.parametrize("dilation", [1, 2, 3])
def test_the_accelerator_body_writes_what_the_host_body_writes_and_never_reads_a_value_back(dilation):
    host, device = caches(pinned_dilation=dilation)
    generator = torch.Generator().manual_seed(dilation)
    for clock in range(14):
        clocks, sessions = [clock, max(0, clock - 5)], [2, 0]
        for commit in (False, True):
            k, v = torch.randn(2, 2, 2, 2, 4, generator=generator).unbind(0)
            ops.write_on_host(*arguments(host, k, v, clocks, sessions, commit))
            with ForbidHostReads():
                ops.write_on_device(*arguments(device, k, v, clocks, sessions, commit))
            assert torch.equal(host.kv, device.kv)
            assert torch.equal(host.written, device.written)
            assert torch.equal(host.commits, device.commits)


def test_the_mode_that_forbids_host_reads_catches_one():
    with pytest.raises(AssertionError, match="read back"), ForbidHostReads():
        torch.tensor([1]).item()


def test_visibility_is_computed_without_reading_a_value_back():
    cache, _ = caches()
    with ForbidHostReads():
        cache.visibility(torch.tensor([5, 0]), torch.tensor([0, 2]))


@pytest.mark.parametrize("key", ["CPU", "CompositeExplicitAutograd"])
def test_the_host_body_serves_the_cpu_and_the_other_every_device_that_has_none(key):
    assert torch._C._dispatch_has_kernel_for_dispatch_key("ringkv::ring_write", key)


def test_the_operator_declares_exactly_the_buffers_it_mutates():
    schema = torch.ops.ringkv.ring_write.default._schema
    mutated = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    assert mutated == ["kv", "written", "commits"]
    assert not schema.returns


def test_a_compiled_step_is_one_graph_that_never_recompiles_and_never_copies_the_pool():
    """Fill, wrap, on and off the stride, other clocks, a reset: two graphs in all, one per value of ``commit``."""
    torch._dynamo.reset()
    eager, compiled_cache = caches(sessions=64)
    graphs = []

    def step(cache, kv, frame_pos, session_idx, commit):
        keys, values, visible = cache.upsert(kv * 2, frame_pos, commit, session_idx)
        own = torch.where(visible[:, None, :, None], keys, 0).sum(dim=2)
        return own, torch.where(visible[:, None, :, None], values, 0).sum(dim=2)

    def count_graphs(module, inputs):
        graphs.append(module)
        return torch._inductor.compile(module, inputs)

    compiled = torch.compile(step, fullgraph=True, dynamic=False, backend=count_graphs)
    addresses = compiled_cache.kv.data_ptr(), compiled_cache.written.data_ptr()
    generator = torch.Generator().manual_seed(0)
    for clock in range(13):
        if clock == 7:
            eager.reset(1)
            compiled_cache.reset(1)
        for commit in (False, True):
            kv = torch.randn(2, 1, 2, 4, 4, generator=generator)
            pos, sessions = torch.tensor([clock, max(0, clock - 7)]), torch.tensor([63, 1])
            expected = step(eager, kv, pos, sessions, commit)
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                got = compiled(compiled_cache, kv, pos, sessions, commit)
            if clock:  # the first calls compile
                largest = max((event.cpu_memory_usage for event in profiler.events()), default=0)
                assert largest < compiled_cache.memory_bytes
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
            assert torch.equal(eager.kv, compiled_cache.kv)
            assert torch.equal(eager.written, compiled_cache.written)
    assert len(graphs) == 2
    assert (compiled_cache.kv.data_ptr(), compiled_cache.written.data_ptr()) == addresses
    for graph in graphs:
        assert sum(node.target is torch.ops.ringkv.ring_write.default for node in graph.graph.nodes) == 1


def test_a_compiled_pass_through_the_manager_is_counted_and_two_graphs_serve_every_clock_row_order_and_padding():
    """The manager's checks stay on the host and its plan is data, so neither breaks the graph nor guards on a step."""
    torch._dynamo.reset()
    config = RingKVConfig(
        num_layers=2,
        num_kv_heads=2,
        head_dim=4,
        num_qo_heads=2,
        tokens_per_frame=2,
        num_sessions=2,
        padding_session=True,
        layers=tuple(RingKVLayerConfig(ring_frames=3, ring_buckets=3, pinned_dilation=d) for d in (1, 2)),
    )
    spec = KVSpec(resource_key="kv", config=config)
    info = EngineResourceInfo(device="cpu", kv_dtype=torch.float32)
    eager, compiled_manager = (spec.resource_class.build(spec, info) for _ in range(2))
    graphs = []

    def one_pass(manager, k, v, frame_pos, commit):
        sums = []
        for layer in range(2):
            keys, _, visible = manager.upsert(k * 2, v, layer, frame_pos, commit=commit)
            sums.append(torch.where(visible[:, None, :, None], keys, 0).sum(dim=(2, 3)))
        return torch.stack(sums)

    def count_graphs(module, inputs):
        graphs.append(module)
        return module.forward

    compiled = torch.compile(one_pass, fullgraph=True, dynamic=False, backend=count_graphs)
    for manager in (eager, compiled_manager):
        manager.ingest_request("a")
        manager.ingest_request("b")
    generator = torch.Generator().manual_seed(0)
    for frame in range(8):
        rids = ("a", "b") if frame % 2 else ("b", "a")
        step = FrameStep(frames=tuple((rid, frame) for rid in rids))
        ctx = StepContext(request_ids=rids, padded_request_ids=(*rids, "pad", "pad"))
        for manager in (eager, compiled_manager):
            assert manager.admit(step, ctx).ok
            manager.plan(step, ctx)
        for commit in (False, True):
            k, v = torch.randn(2, 4, 2, 2, 4, generator=generator).unbind(0)
            frame_pos = torch.tensor([frame, frame, 0, 0])
            expected = one_pass(eager, k, v, frame_pos, commit)
            torch.testing.assert_close(compiled(compiled_manager, k, v, frame_pos, commit), expected)
        for manager in (eager, compiled_manager):
            manager.commit(step, ctx)
            manager.check_integrity()
        for ours, theirs in zip(eager.layers, compiled_manager.layers, strict=True):
            assert torch.equal(ours.kv, theirs.kv)
            assert torch.equal(ours.written, theirs.written)
    assert len(graphs) == 2
