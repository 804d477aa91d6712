"""Where buffers live, and what the memory figures say."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from ringkv import RingKVManager
from tests.ring_tools import (
    READ_PATHS,
    accepts,
    begin,
    build_manager,
    clocks,
    drive,
    finish,
    ring,
    run_stream,
    seen,
)


def tensors_of(owner: object, prefix: str = "", depth: int = 4) -> dict[str, torch.Tensor]:
    """Every tensor that ``owner`` holds, through attributes, lists and dicts, by name."""
    if isinstance(owner, torch.Tensor):
        return {prefix: owner}
    if depth == 0:
        return {}
    if isinstance(owner, dict):
        parts: Any = owner.items()
    elif isinstance(owner, list | tuple):
        parts = enumerate(owner)
    elif type(owner).__module__.startswith("ringkv"):
        slots = [name for kind in type(owner).__mro__ for name in getattr(kind, "__slots__", ())]
        parts = {**getattr(owner, "__dict__", {}), **{s: getattr(owner, s) for s in slots if hasattr(owner, s)}}.items()
    else:
        return {}
    out: dict[str, torch.Tensor] = {}
    for name, part in parts:
        out |= tensors_of(part, f"{prefix}.{name}", depth - 1)
    return out


@pytest.mark.parametrize("path", [*READ_PATHS, "flex"])
def test_no_buffer_ever_moves(path: str, tmp_path: Path) -> None:
    """After a reload or a session's end the buffers lived elsewhere, and a captured graph read stale memory."""
    manager = build_manager(
        [ring(3), ring(2, 2, 3)], num_sessions=2, padding_session=True, attention=path, num_qo_heads=2
    )
    assert manager.fixed_addresses is True
    layers = list(manager.layers)
    held = tensors_of(manager)
    pointers = {name: t.data_ptr() for name, t in held.items()}
    assert {id(layer.kv) for layer in layers} | {id(layer.written) for layer in layers} <= {
        id(t) for t in held.values()
    }
    staged = [t for t in held.values() if not t.dtype.is_floating_point and t.dtype is not torch.bool]
    assert staged, "session indices are staged in a tensor"
    assert {t.dtype for t in staged} - {torch.int32} == {torch.int64}  # flex has its block lists in int32

    def unmoved() -> None:
        now = tensors_of(manager)
        assert {name: now[name].data_ptr() for name in pointers} == pointers
        assert all(now[name] is held[name] for name in pointers)  # and no name was rebound
        assert list(manager.layers) == layers

    unmoved()
    run_stream(manager, "a", range(5))
    unmoved()
    state = manager.get_state("a")
    manager.save("a", tmp_path / "a.safetensors")
    manager.reset_request("a")
    unmoved()
    manager.load_state("a", state)
    unmoved()
    manager.ingest_request("b")
    manager.load("b", tmp_path / "a.safetensors")
    drive(manager, [("b", 5), ("a", 5)], pads=3)
    unmoved()
    manager.remove_request("a")
    manager.ingest_request("c")
    drive(manager, [("c", 0), ("b", 6)], pads=1)
    begin(manager, [("b", 7)])
    unmoved()
    q = torch.ones(1, 2, 2, 2)
    manager.attend(q, q[:, :1], q[:, :1], 0, clocks(7), commit=False)
    manager.build_accelerator_graph_buffers(4, 4, 8)
    unmoved()


def test_a_view_from_before_a_load_shows_what_was_loaded() -> None:
    """What a captured graph would read: the same memory, new contents."""
    manager = build_manager([ring(3)], num_sessions=2)
    run_stream(manager, "a", range(3))
    run_stream(manager, "b", range(6))
    begin(manager, [("a", 3)])
    k_all, v_all = (t for t in manager.upsert(*(torch.zeros(1, 1, 2, 2),) * 2, 0, clocks(3), commit=False)[:2])
    manager.load_state("a", manager.get_state("b"))
    begin(manager, [("a", 6)])
    one = torch.tensor([[[[7.0, 0.0], [7.0, 1.0]]]])
    _, _, visible = manager.upsert(one, one * torch.tensor([-1.0, 1.0]), 0, clocks(6), commit=False)
    assert seen(k_all, v_all, visible, 6) == [4, 5]


# -- figures -------------------------------------------------------------------------------------------------


def small_bf16(padding: bool) -> RingKVManager:
    return build_manager(
        [ring(3)],
        num_kv_heads=2,
        num_qo_heads=2,
        head_dim=4,
        num_sessions=2,
        padding_session=padding,
        dtype=torch.bfloat16,
    )


@pytest.mark.parametrize(("padding", "expected"), [(False, 512), (True, 768)])
def test_the_figure_is_what_is_held_and_never_changes(padding: bool, expected: int) -> None:
    """An estimator assumed less than is allocated; a lifetime counter inflated the figure after the wrap."""
    manager = small_bf16(padding)
    manager.ingest_request("a")
    frame = torch.ones(2, 2, 4)

    def figure() -> int:
        held = sum(t.numel() * t.element_size() for t in tensors_of(manager).values() if t.dtype.is_floating_point)
        assert held == manager.memory_bytes() == sum(layer.memory_bytes for layer in manager.layers)
        assert all(layer.kv.untyped_storage().nbytes() == layer.memory_bytes for layer in manager.layers)
        return manager.memory_bytes()

    assert figure() == expected
    for p in range(201):
        drive(manager, [("a", p)], payload=lambda row, frame_: (frame, frame), noisy_passes=0)
        if p in (0, 10, 200):
            assert figure() == expected


def test_the_memory_report_adds_up() -> None:
    manager = small_bf16(True)
    ones = torch.ones(2, 2, 4)
    frame_bytes = 2 * 2 * 4 * 2 * 2
    flags = sum(layer.written.numel() for layer in manager.layers)

    def check(frames_in_use: int) -> None:
        report = manager.memory_report()
        assert set(report) == {"resident", "in_use", "padding", "undo", "flags", "parked"}
        assert report["resident"] == 768
        assert report["padding"] == 256
        assert report["in_use"] == frames_in_use * frame_bytes
        assert report["flags"] >= flags

    check(0)
    for rid in ("a", "b"):
        manager.ingest_request(rid)
    check(0)
    assert accepts(manager, "a", 0)
    check(1)  # its scratch
    for p, frames in enumerate([2, 3, 4, 4, 4]):
        drive(manager, [("a", p)], payload=lambda row, frame: (ones, ones), noisy_passes=0)
        check(frames)
    drive(manager, [("b", 0)], payload=lambda row, frame: (ones, ones), noisy_passes=0, pads=1)
    check(4 + 2)
    manager.reset_request("a")
    check(2)
    manager.remove_request("b")
    check(0)


def test_the_number_of_live_tensors_is_flat() -> None:
    """The cache concatenated for ever."""
    manager = small_bf16(False)
    manager.ingest_request("a")
    ones = torch.ones(1, 2, 2, 4)

    def tensors() -> list[torch.Tensor]:
        gc.collect()
        return [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]

    others = tensors()  # held on to: an earlier test's tensor that dies meanwhile would make the count fall
    known = {id(item) for item in others}

    counts = {}
    for p in range(201):
        begin(manager, [("a", p)])
        for commit in (False, True):
            manager.attend(ones, ones, ones, 0, clocks(p), commit=commit)
        finish(manager, [("a", p)])
        if p in (20, 110, 200):
            counts[p] = sum(id(item) not in known for item in tensors())
    assert len(set(counts.values())) == 1, counts
