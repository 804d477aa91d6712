"""dtypes, devices, layouts and heads at the cache's boundary."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ring_tools import (
    READ_PATHS,
    begin,
    build_layer,
    build_manager,
    clocks,
    drive,
    finish,
    ring,
    ring_config,
    run_stream,
    seen,
)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("commit", [False, True])
def test_fp32_input_is_rounded_once_to_the_dtype_of_the_cache(commit: bool, autocast: bool) -> None:
    """Keys came out of RoPE in fp32 while the cache was 16-bit; or the cache silently turned everything fp32."""
    cache = build_layer(3, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        k, v, visible = cache.upsert(torch.full((2, 1, 1, 2, 2), 1.01), clocks(0), commit, clocks(0))
    assert k.dtype == v.dtype == cache.kv.dtype == torch.bfloat16
    assert set(k[0, 0, visible].flatten().tolist()) == set(v[0, 0, visible].flatten().tolist()) == {1.0078125}
    assert set(cache.kv[:, :, :, 6:].flatten().tolist()) == {1.0078125}  # scratch
    assert set(cache.kv[:, :, :, :2].flatten().tolist()) == ({1.0078125} if commit else {0.0})  # slot 0


def test_autocast_does_not_round_what_an_fp32_cache_stores() -> None:
    cache = build_layer(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache.upsert(torch.full((2, 1, 1, 2, 2), 1.01), clocks(0), True, clocks(0))
    assert set(cache.kv[:, :, :, :2].flatten().tolist()) == {torch.tensor(1.01).item()}


def test_what_fp16_cannot_hold_becomes_inf() -> None:
    cache = build_layer(3, dtype=torch.float16)
    cache.upsert(torch.full((2, 1, 1, 2, 2), 1e5), clocks(0), True, clocks(0))
    assert bool(cache.kv[:, :, :, :2].isinf().all())
    assert bool(cache.kv[:, :, :, 6:].isinf().all())


@pytest.mark.parametrize("path", READ_PATHS)
def test_the_output_has_the_dtype_of_the_query(path: str) -> None:
    for cache_dtype in (torch.float32, torch.bfloat16):
        for query_dtype in (torch.float32, torch.bfloat16):
            manager = build_manager([ring(3)], attention=path, dtype=cache_dtype)
            manager.ingest_request("a")
            begin(manager, [("a", 0)])
            x = torch.ones(1, 1, 2, 2)
            out = manager.attend(x.to(query_dtype), x, x, 0, clocks(0), commit=False)
            assert out.dtype == query_dtype
            assert manager.layers[0].kv.dtype == cache_dtype


@pytest.mark.parametrize("path", READ_PATHS)
def test_query_heads_read_the_kv_head_of_their_own_group(path: str) -> None:
    """KV heads were tiled (0, 1, 0, 1) where queries expect grouped (0, 0, 1, 1)."""
    manager = build_manager([ring(3)], attention=path, num_kv_heads=2, num_qo_heads=4)
    manager.ingest_request("a")
    v = torch.ones(1, 2, 2, 2)
    v[:, 1] = -1
    for p in range(5):
        begin(manager, [("a", p)])
        out = manager.attend(torch.zeros(1, 4, 2, 2), torch.ones(1, 2, 2, 2), v, 0, clocks(p), commit=True)
        finish(manager, [("a", p)])
        expected = torch.tensor([1.0, 1.0, -1.0, -1.0]).reshape(1, 4, 1, 1).expand(1, 4, 2, 2)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


def test_query_heads_that_do_not_divide_are_refused_at_construction_and_per_call() -> None:
    with pytest.raises(ValueError, match="num_qo_heads=5"):
        ring_config([ring(3)], num_kv_heads=2, num_qo_heads=5)
    manager = build_manager([ring(3)], num_kv_heads=2, num_qo_heads=4)
    manager.ingest_request("a")
    begin(manager, [("a", 0)])
    kv = torch.ones(1, 2, 2, 2)
    with pytest.raises(ValueError):
        manager.attend(torch.ones(1, 5, 2, 2), kv, kv, 0, clocks(0), commit=True)
    with pytest.raises(ValueError):
        manager.attend(torch.ones(1, 4, 3, 2), kv, kv, 0, clocks(0), commit=True)
    assert not manager.layers[0].kv.any()


def test_helper_tensors_live_on_the_device_of_the_cache(tmp_path: Path) -> None:
    """Index and mask tensors were created on the default device."""
    x = torch.ones(2, 1, 2, 2, device="cpu")
    frame_pos = [torch.tensor([p, 0], device="cpu") for p in range(4)]
    torch.set_default_device("meta")
    try:
        manager = build_manager([ring(3), ring(2, 2)], device="cpu", num_sessions=2, padding_session=True)
        for rid in ("a", "b"):
            manager.ingest_request(rid)
        for p in range(4):
            begin(manager, [("a", p)], pads=1)
            for layer in range(2):
                _, _, visible = manager.upsert(x, x, layer, frame_pos[p], commit=False)
                assert visible.device.type == "cpu"
                assert manager.attend(x, x, x, layer, frame_pos[p], commit=True).device.type == "cpu"
            finish(manager, [("a", p)], pads=1)
        state = manager.get_state("a")
        assert all(t.device.type == "cpu" for pair in state["layers"] for t in pair)
        manager.load_state("b", state)
        manager.save("a", tmp_path / "a.safetensors")
        manager.load("b", tmp_path / "a.safetensors")
        manager.reset_request("a")
        manager.check_integrity()
    finally:
        torch.set_default_device(None)
    for cache in manager.layers:
        assert cache.kv.device.type == cache.written.device.type == "cpu"


def test_gradients_do_not_flow_into_the_cache() -> None:
    """A cache that keeps a graph alive holds every frame of the rollout."""
    manager = build_manager([ring(3)])
    manager.ingest_request("a")
    begin(manager, [("a", 0)])
    k = torch.ones(1, 1, 2, 2, requires_grad=True)
    manager.upsert(k, k, 0, clocks(0), commit=True)
    assert not manager.layers[0].kv.requires_grad
    finish(manager, [("a", 0)])
    assert all(not kv.requires_grad for kv, _ in manager.get_state("a")["layers"])


def test_steps_in_and_out_of_inference_mode_can_be_mixed() -> None:
    manager = build_manager([ring(3)], num_sessions=2)
    manager.ingest_request("b")
    with torch.inference_mode():
        run_stream(manager, "a", range(4))
        state = manager.get_state("a")
    manager.load_state("b", state)
    with torch.no_grad():
        assert run_stream(manager, "a", range(4, 5)) == [[[2, 3]]]
    assert run_stream(manager, "a", range(5, 7)) == [[[3, 4]], [[4, 5]]]
    assert run_stream(manager, "b", range(4, 6)) == [[[2, 3]], [[3, 4]]]


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 43])
def test_any_number_of_tokens_per_frame_works(tokens: int) -> None:
    manager = build_manager([ring(3)], tokens_per_frame=tokens, num_kv_heads=2, num_qo_heads=2)
    assert run_stream(manager, "a", range(6)) == [[[]], [[0]], [[0, 1]], [[1, 2]], [[2, 3]], [[3, 4]]]


def test_a_cache_in_each_storage_dtype_reads_back_what_it_can_hold() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        manager = build_manager([ring(2)], dtype=dtype)
        manager.ingest_request("a")
        histories = [[seen(*out, p) for out in drive(manager, [("a", p)])] for p in range(4)]
        assert histories == [[[]], [[0]], [[1]], [[2]]]
