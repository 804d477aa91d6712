"""States: complete, independent of live memory, checked before anything changes, in memory and on disk."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ringkv import RingKVManager
from tests.ring_tools import (
    accepts,
    batch,
    begin,
    build_manager,
    bytes_of,
    deep_copy,
    dense_attention,
    drive,
    finish,
    ring,
    run_stream,
    same_bytes,
    seen,
    session_bytes_of,
    slot_tags,
    tagged,
    tagged_payload,
    write_pass,
)

Mover = Callable[[RingKVManager, str, RingKVManager, str, Path], None]


def _by_state(source: RingKVManager, rid: str, target: RingKVManager, to: str, path: Path) -> None:
    target.load_state(to, source.get_state(rid))


def _by_file(source: RingKVManager, rid: str, target: RingKVManager, to: str, path: Path) -> None:
    source.save(rid, path / "state.safetensors")
    target.load(to, path / "state.safetensors")


both_ways = pytest.mark.parametrize("move", [_by_state, _by_file], ids=["state", "file"])


@both_ways
def test_a_restored_session_goes_on_at_the_next_frame_and_no_other(move: Mover, tmp_path: Path) -> None:
    """Restore put back K and V but left the clock at 0."""
    manager, other = build_manager([ring(3)]), build_manager([ring(3)])
    run_stream(manager, "a", range(6))
    other.ingest_request("a")
    move(manager, "a", other, "a", tmp_path)
    assert [accepts(other, "a", p) for p in (0, 5, 7, 6)] == [False, False, False, True]
    assert [seen(*out, 6) for out in drive(other, [("a", 6)])] == [[4, 5]]
    other.check_integrity()


@both_ways
@pytest.mark.parametrize(
    ("dilation", "slots_after_6", "histories", "slots_after_7"),
    [(1, [6, 4, 5], {7: [5, 6], 8: [6, 7]}, [6, 7, 5]), (2, [6, 2, 4], {7: [2, 4, 6], 8: [4, 6]}, [6, 2, 4])],
)
def test_frames_come_back_to_the_slots_they_had(
    move: Mover,
    dilation: int,
    slots_after_6: list[int],
    histories: dict[int, list[int]],
    slots_after_7: list[int],
    tmp_path: Path,
) -> None:
    """Ring cells came back packed in order, so that the continuation differed past the window."""
    source, target = build_manager([ring(3, dilation)]), build_manager([ring(3, dilation)], num_sessions=4)
    run_stream(source, "a", range(7))
    assert [tag - 1 for tag in slot_tags(source.layers[0])[:3]] == slots_after_6
    for rid in ("w", "x", "y", "z"):
        run_stream(target, rid, range(3))
    index = target.session_of("y")
    assert index == 2
    others = [session_bytes_of(target, session) for session in (0, 1, 3)]
    move(source, "a", target, "y", tmp_path)
    assert target.session_of("y") == 2
    for p in (7, 8):
        assert [seen(*out, p) for out in drive(target, [("y", p)])] == [histories[p]]
        drive(source, [("a", p)])
        if p == 7:
            assert [tag - 1 for tag in slot_tags(target.layers[0], 2)[:3]] == slots_after_7
    assert same_bytes(session_bytes_of(target, 2), session_bytes_of(source, 0))  # the uninterrupted run
    assert same_bytes([session_bytes_of(target, session) for session in (0, 1, 3)], others)


def test_a_state_is_a_copy_that_nothing_changes() -> None:
    """The snapshot held references that later steps changed."""
    manager = build_manager([ring(3), ring(2, 2, 3)], num_sessions=2)
    run_stream(manager, "a", range(5))
    state = manager.get_state("a")
    copy = deep_copy(state)
    run_stream(manager, "a", range(5, 10))
    assert same_bytes(state, copy)

    manager.ingest_request("b")
    manager.load_state("a", state)
    manager.load_state("b", state)
    run_stream(manager, "a", range(5, 7))
    assert same_bytes(state, copy)
    assert same_bytes(manager.get_state("b"), copy)
    for kv, written in state["layers"]:
        kv.fill_(55.0)
        written.logical_not_()
    assert same_bytes(manager.get_state("b"), copy)  # and loading kept nothing of the caller's


def test_what_a_state_holds() -> None:
    manager = build_manager([ring(3), ring(2, 4, 5)], num_kv_heads=2, num_qo_heads=4, dtype=torch.bfloat16)
    run_stream(manager, "a", range(2))
    state = manager.get_state("a")
    assert set(state) == {"version", "clock", "geometry", "dtype", "layers"}
    assert state["clock"] == 1
    assert json.loads(json.dumps(state["geometry"])) == state["geometry"]  # plain data
    assert "bfloat16" in str(state["dtype"])
    for (kv, written), layer, capacity, kept in zip(state["layers"], manager.layers, (8, 12), (2, 1), strict=True):
        assert kv.shape == (2, 1, 2, capacity, 2)
        assert kv.dtype == torch.bfloat16
        assert written.shape == (capacity,)
        assert written.dtype == torch.bool
        assert written.tolist() == [True] * 2 * kept + [False] * (capacity - 2 * kept - 2) + [True] * 2
        assert not kv[:, :, :, ~written].any()
        assert not kv[:, :, :, -2:].any()  # scratch: the noise of the last pass is nobody's history
        assert kv.untyped_storage().data_ptr() != layer.kv.untyped_storage().data_ptr()
        assert kv.untyped_storage().nbytes() == kv.numel() * 2  # not a view into a copy of the pool


def test_a_state_of_a_session_that_committed_nothing_is_a_fresh_session() -> None:
    manager = build_manager([ring(3)], num_sessions=2)
    for rid in ("a", "b"):
        manager.ingest_request(rid)
    begin(manager, [("a", 0)])
    write_pass(manager, [("a", 0)], commit=False)
    state = manager.get_state("a")
    assert state["clock"] is None
    assert not state["layers"][0][0].any()
    run_stream(manager, "b", range(3))
    manager.load_state("b", state)
    assert same_bytes(manager.get_state("b"), state)
    assert run_stream(manager, "b", range(4))[-1] == [[1, 2]]


def test_states_of_equal_sessions_are_equal_wherever_they_live() -> None:
    manager = build_manager([ring(3)], num_sessions=3)
    for rid in ("a", "b"):
        run_stream(manager, rid, range(5))
    assert same_bytes(manager.get_state("a"), manager.get_state("b"))
    drive(manager, [("b", 5)])
    assert not same_bytes(manager.get_state("a"), manager.get_state("b"))


@both_ways
def test_loading_claims_a_session_or_says_that_there_is_none(move: Mover, tmp_path: Path) -> None:
    source, target = build_manager([ring(3)]), build_manager([ring(3)])
    run_stream(source, "a", range(4))
    for rid in ("b", "c"):
        target.ingest_request(rid)
    move(source, "a", target, "b", tmp_path)
    assert target.num_free_sessions == 0
    before = bytes_of(target)
    with pytest.raises(RuntimeError):
        move(source, "a", target, "c", tmp_path)
    assert target.session_of("c") is None
    assert same_bytes(bytes_of(target), before)
    with pytest.raises(ValueError, match="nobody"):
        move(source, "a", target, "nobody", tmp_path)
    assert same_bytes(bytes_of(target), before)
    target.remove_request("b")
    move(source, "a", target, "c", tmp_path)
    assert accepts(target, "c", 4)


def _other_clock(clock: object) -> Callable[[dict[str, Any]], None]:
    return lambda state: state.__setitem__("clock", clock)


def _edit_layer(edit: Callable[[torch.Tensor, torch.Tensor], tuple[Any, Any]]) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["layers"].__setitem__(1, edit(*state["layers"][1]))


def _unwrite(slot: int) -> Callable[[torch.Tensor, torch.Tensor], tuple[Any, Any]]:
    def edit(kv: torch.Tensor, written: torch.Tensor) -> tuple[Any, Any]:
        written[2 * slot : 2 * slot + 2] = False
        kv[:, :, :, 2 * slot : 2 * slot + 2] = 0
        return kv, written

    return edit


def test_a_state_with_a_hole_loads_and_every_read_skips_it_until_it_is_overwritten() -> None:
    """R=2 d=2, frames 0..3 committed, slot 1 (frame 2) lost: 4 sees nothing kept, 5 sees 4, and 6 fills the hole."""
    for attention in ("canonical", "sdpa", "segments", "lent"):
        manager = build_manager([ring(2, 2, 4)], attention=attention)
        run_stream(manager, "a", range(4))
        state = manager.get_state("a")
        state["layers"][0] = _unwrite(1)(*state["layers"][0])
        manager.load_state("a", state)
        assert same_bytes(manager.get_state("a"), state)
        manager.check_integrity()
        history = []
        for frame in range(4, 8):
            begin(manager, [("a", frame)])
            k, v, frame_pos = batch([("a", frame)], tagged_payload(manager))
            out = manager.attend(torch.ones_like(k), k, v, 0, frame_pos, commit=True)
            history.append(seen(*manager.upsert(k, v, 0, frame_pos, commit=True), frame))
            keys, values = (torch.cat([tagged(f)[i] for f in [*history[-1], frame]], dim=1) for i in (0, 1))
            torch.testing.assert_close(
                out[0].double(), dense_attention(torch.ones_like(k[0]), keys, values), rtol=1e-5, atol=1e-5
            )
            finish(manager, [("a", frame)])
            manager.check_integrity()
        assert history == [[], [4], [4], [4, 6]]


def test_the_slot_that_the_next_frame_takes_may_be_missing_from_a_state() -> None:
    manager = build_manager([ring(3), ring(2, 2, 4)])
    run_stream(manager, "a", range(4))
    state = manager.get_state("a")
    state["layers"][1] = _unwrite(0)(*state["layers"][1])  # frame 0, which frame 4 overwrites
    manager.load_state("a", state)
    assert same_bytes(manager.get_state("a"), state)
    assert [seen(*out, 4) for out in drive(manager, [("a", 4)])] == [[2, 3], [2]]


def _half_a_frame(kv: torch.Tensor, written: torch.Tensor) -> tuple[Any, Any]:
    written[0] = False
    return kv, written


def _all_written(kv: torch.Tensor, written: torch.Tensor) -> tuple[Any, Any]:
    return kv, torch.ones_like(written)


def _no_scratch(kv: torch.Tensor, written: torch.Tensor) -> tuple[Any, Any]:
    written[-2:] = False
    return kv, written


MISFITS: dict[str, Callable[[dict[str, Any]], None]] = {
    "version": lambda state: state.__setitem__("version", 99),
    "no version": lambda state: state.pop("version"),
    "no clock": lambda state: state.pop("clock"),
    "no layers": lambda state: state.pop("layers"),
    "no geometry": lambda state: state.pop("geometry"),
    "dtype": lambda state: state.__setitem__("dtype", "float16"),
    "clock -1": _other_clock(-1),
    "clock 1.0": _other_clock(1.0),
    "clock True": _other_clock(True),
    "clock None with frames": _other_clock(None),
    "clock that had fewer frames": _other_clock(0),
    "one layer fewer": lambda state: state["layers"].pop(),
    "one layer more": lambda state: state["layers"].append(state["layers"][0]),
    "layers swapped": lambda state: state["layers"].reverse(),
    "kv dtype": _edit_layer(lambda kv, written: (kv.double(), written)),
    "kv shape": _edit_layer(lambda kv, written: (kv[..., :1], written)),
    "kv one token short": _edit_layer(lambda kv, written: (kv[:, :, :, 1:], written[1:])),
    "written dtype": _edit_layer(lambda kv, written: (kv, written.int())),
    "written shape": _edit_layer(lambda kv, written: (kv, written[None])),
    "kv is a list": _edit_layer(lambda kv, written: (kv.tolist(), written)),
    "half a frame": _edit_layer(_half_a_frame),
    "unaddressed slots written": _edit_layer(_all_written),
    "scratch not written": _edit_layer(_no_scratch),
}


@pytest.mark.parametrize("name", MISFITS)
@pytest.mark.parametrize("holds", [True, False], ids=["into its session", "into a new one"])
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(name: str, holds: bool) -> None:
    """R=3 d=1, and R=2 d=2 of 4 allocated, frames 0..3 committed: the next frame sees frame 2, slot 1, in layer 1."""
    manager = build_manager([ring(3), ring(2, 2, 4)], num_sessions=2)
    run_stream(manager, "a", range(4))
    state = manager.get_state("a")
    MISFITS[name](state)
    if not holds:
        manager.ingest_request("b")
    before, clock, free = bytes_of(manager), manager.get_state("a")["clock"], manager.num_free_sessions
    broken = deep_copy(state)
    with pytest.raises(ValueError) as caught:
        manager.load_state("a" if holds else "b", state)
    assert "\n" not in str(caught.value)
    assert same_bytes(bytes_of(manager), before)
    assert manager.get_state("a")["clock"] == clock
    assert manager.num_free_sessions == free
    assert same_bytes(state, broken)
    drive(manager, [("a", 4)])


@pytest.mark.parametrize(
    "change",
    [
        {"tokens_per_frame": 1},
        {"head_dim": 4},
        {"num_kv_heads": 2, "num_qo_heads": 2},
        {"layers": [ring(3), ring(3, 2)]},
        {"layers": [ring(3), ring(2, 2, 4), ring(1)]},
        {"layers": [ring(4), ring(2, 2, 4)]},
        {"layers": [ring(3), ring(2, 3, 4)]},
        {"layers": [ring(3), ring(2, 2, 5)]},
        {"dtype": torch.bfloat16},
    ],
    ids=str,
)
@both_ways
def test_a_state_of_another_geometry_is_refused_and_changes_nothing(
    change: dict[str, Any], move: Mover, tmp_path: Path
) -> None:
    layers = [ring(3), ring(2, 2, 4)]
    source, target = build_manager(layers), build_manager(**{"layers": layers} | change)
    run_stream(source, "a", range(1))
    target.ingest_request("a")
    before = bytes_of(target)
    with pytest.raises(ValueError):
        move(source, "a", target, "a", tmp_path)
    assert same_bytes(bytes_of(target), before)
    assert target.session_of("a") is None


def test_a_state_fits_any_number_of_sessions_and_query_heads() -> None:
    """The number of sessions is the deployment's, and query heads are not stored: neither is a session's business."""
    source = build_manager([ring(3)])
    target = build_manager([ring(3)], num_sessions=3, padding_session=True, attention="canonical")
    run_stream(source, "a", range(5))
    target.ingest_request("a")
    target.load_state("a", source.get_state("a"))
    assert same_bytes(target.get_state("a"), source.get_state("a"))


def test_a_file_holds_the_state_exactly(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        manager = build_manager([ring(3), ring(2, 2, 3)], dtype=dtype, num_sessions=2)
        run_stream(manager, "a", range(5))
        state = manager.get_state("a")
        manager.save("a", tmp_path / "a.safetensors")
        manager.ingest_request("b")
        manager.load("b", str(tmp_path / "a.safetensors"))
        assert same_bytes(manager.get_state("b"), state)
    assert os.listdir(tmp_path) == ["a.safetensors"]


@pytest.mark.parametrize("content", ["missing", "empty", "text", "truncated", "pickle", "foreign", "no fields"])
def test_a_file_that_is_not_a_saved_state_is_refused_and_changes_nothing(content: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    manager = build_manager([ring(3)])
    run_stream(manager, "a", range(4))
    path = tmp_path / "a.safetensors"
    manager.save("a", path)
    raw = path.read_bytes()
    if content == "missing":
        path.unlink()
    elif content == "foreign":
        save_file({"x": torch.zeros(3)}, path)
    elif content == "no fields":
        kv, written = manager.get_state("a")["layers"][0]
        save_file({"layers.0.kv": kv, "layers.0.written": written}, path, metadata={"ringkv": "{}"})
    else:
        values = {"empty": b"", "text": b"not a state", "truncated": raw[: len(raw) // 2]}
        path.write_bytes(values.get(content) or (pickle.dumps(_Bomb()) if content == "pickle" else b""))
    before = bytes_of(manager)
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        manager.load("a", path)
    if content != "no fields":
        assert str(path) in str(caught.value)
    assert same_bytes(bytes_of(manager), before)
    assert accepts(manager, "a", 4)


class _Bomb:
    """Unpickling this fails the test: no file may be executed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("a file was executed",)


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = build_manager([ring(3)], num_sessions=2)
    run_stream(manager, "a", range(4))
    path = tmp_path / "a.safetensors"
    manager.save("a", path)
    old = path.read_bytes()
    drive(manager, [("a", 4)])

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(os, step, fail)
        with pytest.raises(OSError, match="disk full"):
            manager.save("a", path)
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["a.safetensors"]
    manager.save("a", path)
    assert path.read_bytes() != old


def test_saving_what_holds_no_session_writes_no_file(tmp_path: Path) -> None:
    manager = build_manager([ring(3)])
    manager.ingest_request("a")
    with pytest.raises(ValueError):
        manager.save("a", tmp_path / "a.safetensors")
    assert os.listdir(tmp_path) == []


def test_a_load_after_a_noisy_pass_leaves_no_noise_in_the_session() -> None:
    manager = build_manager([ring(3)])
    run_stream(manager, "a", range(4))
    state = manager.get_state("a")
    begin(manager, [("a", 4)])
    write_pass(manager, [("a", 4)], commit=False)
    manager.load_state("a", state)
    assert same_bytes(session_bytes_of(manager, 0), state["layers"])
