"""Strides, lengths, heads, dtypes, devices and read paths, under every storage strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ringkv import EngineResourceInfo, KVSpec
from tests.ring_tools import clocks, ring, same_bytes, step_of
from tests.strategies import EVERY_READ, STRATEGIES, Content, Rollout, assert_close, build, kv_tensors, normal

every_read = pytest.mark.parametrize(("name", "read"), EVERY_READ)
every_strategy = pytest.mark.parametrize("name", STRATEGIES)


@every_read
@pytest.mark.parametrize(
    ("tokens", "buckets", "head_dim"), [(1, 32, 8), (5, 3, 24), (43, 2, 16)], ids=["33 keys", "20 keys", "129 keys"]
)
def test_strided_inputs_and_awkward_lengths(name: str, read: str, tokens: int, buckets: int, head_dim: int) -> None:
    """SDPA gave wrong numbers for strided or broadcast K and V, and for key lengths off a block size."""
    shape: dict[str, Any] = {"tokens": tokens, "heads": 2, "q_heads": 4, "head_dim": head_dim, "attention": read}
    for dtype in (torch.float32, torch.bfloat16):
        twins = [Rollout(name, [ring(buckets)], dtype=dtype, **shape) for _ in range(2)]
        usual = twins[0].content

        def content(
            rid: str, frame: int, layer: int, variant: int, usual: Content = usual
        ) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = usual(rid, frame, layer, variant)
            return q, k, v[:1, :1].expand_as(v)  # every head and token of V the same

        attend = twins[1].resource.attend

        def strided(
            q: Tensor, k: Tensor, v: Tensor, *rest: Any, attend: Callable[..., Tensor] = attend, **named: Any
        ) -> Tensor:
            k = k.transpose(1, 2).contiguous().transpose(1, 2)
            v = v[:, :1, :1].clone().expand_as(v)
            assert not k.is_contiguous() or tokens == 1
            assert v.stride(1) == 0
            return attend(q, k, v, *rest, **named)

        twins[1].resource.attend = strided  # type: ignore[method-assign]
        for rollout in twins:
            rollout.content = content
        for frame in range(min(2 * buckets + 1, 36)):
            left, right = (rollout.drive([("a", frame)], noisy=0)[-1][0][0] for rollout in twins)
            assert torch.equal(left, right)
            if frame % 5 == 0 or frame in (buckets - 1, buckets):
                expected = twins[0].expected("a", frame, 0)
                assert_close(left, expected, content("a", frame, 0, 0)[2], dtype)


@every_read
def test_query_heads_read_grouped_kv_heads(name: str, read: str) -> None:
    """KV heads were tiled (0, 1, 0, 1) where queries expect them grouped (0, 0, 1, 1)."""
    resource = build(name, [ring(3)], heads=2, q_heads=4, head_dim=8, attention=read)
    resource.ingest_request("a")
    q, k = torch.zeros(1, 4, 2, 8), normal(1, 2, 2, 8, key="k")
    v = torch.ones(1, 2, 2, 8)
    v[:, 1] = -1
    for frame in range(5):
        step, ctx = step_of([("a", frame)])
        assert resource.admit(step, ctx).ok
        resource.plan(step, ctx)
        out = resource.attend(q, k, v, 0, clocks(frame), commit=True)
        resource.commit(step, ctx)
        expected = torch.tensor([1.0, 1.0, -1.0, -1.0])[:, None, None].expand(4, 2, 8)
        assert torch.allclose(out[0], expected, atol=1e-6)
    with pytest.raises(ValueError, match="num_qo_heads=5"):
        build(name, [ring(3)], heads=2, q_heads=5)


@every_read
def test_a_cache_of_less_precision_stores_and_reads_the_rounding(name: str, read: str) -> None:
    """Keys came out of RoPE in fp32 while values and cache were 16-bit, or the cache silently turned fp32."""
    rollout = Rollout(name, [ring(3), ring(2, 2)], dtype=torch.bfloat16, head_dim=8, attention=read)
    for frame, passes in enumerate(rollout.stream("a", range(8))):
        for layer, out in enumerate(passes[-1]):
            assert out.dtype == torch.float32
            assert_close(out[0], rollout.expected("a", frame, layer), torch.tensor(1.0))
    assert {t.dtype for t in kv_tensors(rollout.resource)} == {torch.bfloat16}
    assert all(kv.dtype == torch.bfloat16 for kv, _ in rollout.resource.get_state("a")["layers"])


@every_read
def test_no_tensor_is_made_on_the_default_device(name: str, read: str) -> None:
    """Index or mask tensors were created on the default device, not the cache's."""
    twins = [Rollout(name, [ring(3), ring(2, 2)], head_dim=8, sessions=2, padding=True, attention=read)]
    expected = twins[0].run("a", range(6))
    torch.set_default_device("meta")
    try:
        rollout = Rollout(name, [ring(3), ring(2, 2)], head_dim=8, sessions=2, padding=True, attention=read)
        found = rollout.run("a", range(4))
        rollout.drive([("b", 0)], pads=1)
        state = rollout.resource.get_state("a")
        rollout.resource.reset_request("a")
        rollout.resource.load_state("a", state)
        found += rollout.run("a", range(4, 6))
        rollout.resource.check_integrity()
        rollout.resource.memory_report()
    finally:
        torch.set_default_device(None)
    assert {t.device.type for t in kv_tensors(rollout.resource)} == {"cpu"}
    assert same_bytes(found, expected)


@every_strategy
def test_a_read_path_that_is_not_there_is_refused_with_those_that_are(name: str) -> None:
    for read in {"segments", "lent", "flex", "linear"} - {*type(build(name, [ring(3)])).read_paths}:
        with pytest.raises(ValueError, match=f"attention='{read}'.*canonical") as refusal:
            build(name, [ring(3)], attention=read)
        assert all(path in str(refusal.value) for path in STRATEGIES[name].reads)


@every_strategy
def test_a_config_of_another_strategy_is_refused(name: str) -> None:
    resource = build(name, [ring(3)])
    other = next(o for o in STRATEGIES if type(build(o, [ring(3)]).config) is not type(resource.config))
    foreign = KVSpec(resource_key="kv", config=build(other, [ring(3)]).config)
    with pytest.raises(ValueError, match=type(resource.config).__name__):
        type(resource).build(foreign, EngineResourceInfo(device="cpu", kv_dtype=torch.float32))
