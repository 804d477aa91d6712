"""What a step allocates.

A dispatch mode sees every operator but not inside a registered one, so a write's Python bodies run under the mode
themselves, and the registered call is measured by the profiler. Both checks are shown to fail on a body that clones
the pool.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from ringkv import LayerRingCache, RingKVManager
from ringkv.ring import ops
from tests.ring_tools import (
    READ_PATHS,
    begin,
    build_layer,
    build_manager,
    clocks,
    drive,
    ring,
)

Call = Callable[[], Any]
TOKENS, HEADS, HEAD_DIM = 8, 2, 32
FRAME_BYTES = HEADS * TOKENS * HEAD_DIM * 4  # K of one row
BODIES = {"host": ops.write_on_host, "device": ops.write_on_device}


class FreshStorage(TorchDispatchMode):
    """Records the bytes of every operator output that does not alias one of the operator's inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage()._cdata for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)}
        for t in tree_flatten(out)[0]:
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in inputs:
                self.allocated.append(t.untyped_storage().nbytes())
        return out


class CaughtWrite(TorchDispatchMode):
    """Catches the arguments of the registered write."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.ringkv.ring_write.default:
            assert not kwargs
            self.calls.append(args)
        return func(*args, **(kwargs or {}))


def under_mode(call: Call) -> list[int]:
    """Bytes of each fresh storage among what the operators of ``call`` return."""
    with FreshStorage() as mode:
        call()
    return mode.allocated


def under_profiler(call: Call, path: Path) -> list[int]:
    """Bytes of each allocation that the profiler saw during ``call``; warmed up first."""
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    profiler.export_chrome_trace(str(path / "trace.json"))
    events = json.loads((path / "trace.json").read_text())["traceEvents"]
    sizes = [int(event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]"]
    return [size for size in sizes if size > 0]


def check_no_pool_sized_work(measure: Callable[[int], list[int]], pool_bytes: int, row_bytes: int = 0) -> None:
    """``measure(S)`` gives the allocations of one call at S sessions. ``pool_bytes`` is the pool's at S=8, and
    ``row_bytes`` what one more session may add: its part of the visibility rows.
    """
    small, large = measure(8), measure(64)
    assert max(small, default=0) < pool_bytes, f"an allocation as large as the pool: {max(small)} B"
    assert max(large, default=0) < 8 * pool_bytes, f"an allocation as large as the pool: {max(large)} B"
    assert sum(large) - sum(small) <= 56 * row_bytes, f"{sum(large) - sum(small)} B more at S=64 than at S=8"


def layer_at_work(sessions: int) -> LayerRingCache:
    """Sessions 0 and 1 of a layer, in the middle of wrapping."""
    cache = build_layer(3, sessions=sessions, tokens=TOKENS, heads=HEADS, head_dim=HEAD_DIM)
    for p in range(5):
        cache.upsert(torch.ones(2, 1, HEADS, 2 * TOKENS, HEAD_DIM), clocks(p, p), True, clocks(0, 1))
    return cache


def upsert_call(sessions: int, *, commit: bool, build_visibility: bool = True) -> tuple[LayerRingCache, Call]:
    """A call of two rows at different clocks."""
    cache = layer_at_work(sessions)
    kv = torch.ones(2, 1, HEADS, 2 * TOKENS, HEAD_DIM)
    frame_pos, rows = clocks(5, 5), clocks(1, 0)
    return cache, lambda: cache.upsert(kv, frame_pos, commit, rows, build_visibility=build_visibility)


def write_arguments(sessions: int, *, commit: bool) -> tuple[Any, ...]:
    """What a layer hands to the registered write."""
    _, call = upsert_call(sessions, commit=commit)
    with CaughtWrite() as caught:
        call()
    (arguments,) = caught.calls
    return arguments


def with_clone(body: Callable[..., None]) -> Callable[..., None]:
    """``body`` with the fault planted: the whole pool is cloned, as functionalisation would."""

    def leaky(kv: torch.Tensor, *rest: Any) -> None:
        copy = kv.clone()
        body(kv, *rest)
        assert copy.shape == kv.shape

    return leaky


def pool_bytes(sessions: int = 8) -> int:
    return sessions * 4 * 2 * FRAME_BYTES


@pytest.fixture
def leaky_write() -> Iterator[Any]:
    """The registered write with the fault planted in its body, under another namespace."""
    library = torch.library.Library("ringkv_leaky", "DEF")
    schema = str(torch.ops.ringkv.ring_write.default._schema).replace("ringkv::", "", 1)
    library.define(schema)
    library.impl("ring_write", with_clone(ops.write_on_host), "CPU")
    yield torch.ops.ringkv_leaky.ring_write.default
    library._destroy()


@pytest.mark.parametrize("commit", [False, True])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_write_body_makes_no_pool_sized_tensor(body: Callable[..., None], commit: bool) -> None:
    """A scatter into a view of the cache was functionalised: clone the buffer, write, copy back."""

    def measure(sessions: int) -> list[int]:
        arguments = write_arguments(sessions, commit=commit)
        return under_mode(lambda: body(*arguments))

    check_no_pool_sized_work(measure, pool_bytes())


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_the_check_under_the_mode_fails_on_a_planted_clone(body: Callable[..., None]) -> None:
    def measure(sessions: int) -> list[int]:
        arguments = write_arguments(sessions, commit=True)
        return under_mode(lambda: with_clone(body)(*arguments))

    with pytest.raises(AssertionError, match="as large as the pool"):
        check_no_pool_sized_work(measure, pool_bytes())


@pytest.mark.parametrize("commit", [False, True])
def test_the_registered_write_allocates_nothing_that_grows_with_the_pool(commit: bool, tmp_path: Path) -> None:
    def measure(sessions: int) -> list[int]:
        arguments = write_arguments(sessions, commit=commit)
        return under_profiler(lambda: torch.ops.ringkv.ring_write.default(*arguments), tmp_path)

    check_no_pool_sized_work(measure, pool_bytes())


def test_the_check_under_the_profiler_fails_on_a_planted_clone(leaky_write: Any, tmp_path: Path) -> None:
    def measure(sessions: int) -> list[int]:
        arguments = write_arguments(sessions, commit=True)
        return under_profiler(lambda: leaky_write(*arguments), tmp_path)

    with pytest.raises(AssertionError, match="as large as the pool"):
        check_no_pool_sized_work(measure, pool_bytes())


def test_the_check_fails_on_an_allocation_that_only_grows(tmp_path: Path) -> None:
    """Smaller than the pool at any size, but one element a session."""
    for measure in (
        lambda sessions: under_mode(lambda: torch.zeros(sessions)),
        lambda sessions: under_profiler(lambda: torch.zeros(64 * sessions), tmp_path),
    ):
        with pytest.raises(AssertionError, match="more at S=64"):
            check_no_pool_sized_work(measure, pool_bytes())


def test_both_bodies_of_the_write_store_the_same_bytes() -> None:
    for dilation in (1, 2, 3):
        layers = []
        for body in BODIES.values():
            cache = build_layer(3, dilation, sessions=3, frames=4)
            for p in range(14):
                for commit in (False, True):
                    with CaughtWrite() as caught:
                        k = torch.full((2, 1, 1, 4, 2), float(p)) + torch.arange(4.0)[:, None] / 8
                        other = build_layer(3, dilation, sessions=3, frames=4)
                        other.upsert(k, clocks(p, p + 1), commit, clocks(2, 0))
                    ((_, _, _, *rest),) = caught.calls
                    body(cache.kv, cache.written, torch.zeros_like(caught.calls[0][2]), *rest)
            layers.append(cache)
        assert torch.equal(layers[0].kv, layers[1].kv)
        assert torch.equal(layers[0].written, layers[1].written)
        assert layers[0].kv.any()


@pytest.mark.parametrize("commit", [False, True])
@pytest.mark.parametrize("measured", ["mode", "profiler"])
def test_an_upsert_allocates_the_visibility_rows_and_nothing_else_that_grows(
    commit: bool, measured: str, tmp_path: Path
) -> None:
    def measure(sessions: int, build_visibility: bool = True) -> list[int]:
        _, call = upsert_call(sessions, commit=commit, build_visibility=build_visibility)
        return under_mode(call) if measured == "mode" else under_profiler(call, tmp_path)

    check_no_pool_sized_work(measure, pool_bytes(), row_bytes=2 * 4 * TOKENS)  # two rows of bools
    check_no_pool_sized_work(lambda sessions: measure(sessions, build_visibility=False), pool_bytes())


@pytest.mark.parametrize("commit", [False, True])
@pytest.mark.parametrize("path", READ_PATHS)
@pytest.mark.parametrize("measured", ["mode", "profiler"])
def test_attention_allocates_the_same_in_a_small_and_a_large_pool(
    path: str, commit: bool, measured: str, tmp_path: Path
) -> None:
    def measure(sessions: int) -> list[int]:
        manager = manager_at_work(sessions, path)
        x = torch.ones(2, HEADS, TOKENS, HEAD_DIM)
        frame_pos = clocks(5, 5)
        begin(manager, [("a", 5), ("b", 5)])

        def call() -> None:
            manager.attend(x, x, x, 0, frame_pos, commit=commit)

        return under_mode(call) if measured == "mode" else under_profiler(call, tmp_path)

    check_no_pool_sized_work(measure, pool_bytes())


def manager_at_work(sessions: int, path: str = "auto") -> RingKVManager:
    """Requests a and b in the middle of wrapping."""
    geometry: dict[str, Any] = {
        "tokens_per_frame": TOKENS,
        "head_dim": HEAD_DIM,
        "num_kv_heads": HEADS,
        "num_qo_heads": HEADS,
    }
    manager = build_manager([ring(3)], attention=path, num_sessions=sessions, **geometry)
    ones = torch.ones(HEADS, TOKENS, HEAD_DIM)
    for rid in ("a", "b"):
        manager.ingest_request(rid)
    for p in range(5):
        drive(manager, [("a", p), ("b", p)], payload=lambda row, frame: (ones, ones), noisy_passes=0)
    return manager


@pytest.mark.parametrize("commit", [False, True])
@pytest.mark.parametrize("measured", ["mode", "profiler"])
def test_k_and_v_are_written_without_being_stacked_first(commit: bool, measured: str, tmp_path: Path) -> None:
    manager = manager_at_work(8)
    x = torch.ones(2, HEADS, TOKENS, HEAD_DIM)
    frame_pos = clocks(5, 5)
    begin(manager, [("a", 5), ("b", 5)])

    def call() -> None:
        manager.upsert(x, x, 0, frame_pos, commit=commit, build_visibility=False)

    allocated = under_mode(call) if measured == "mode" else under_profiler(call, tmp_path)
    assert max(allocated, default=0) < FRAME_BYTES, allocated
