"""transformers' sliding cache behind the contract: what a frame sees, what a pass may change, what an abort leaves.

V of frame f is the f-th unit vector and q is zero, so the output of a pass is the share of attention that each frame
got: what a frame sees can be read off it.
"""

from __future__ import annotations

import ast
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ringkv
from ringkv import EngineResourceInfo, KVSpec, RingKVLayerConfig
from ringkv.config import HFSlidingKVConfig
from tests.ring_tools import (
    accepts,
    begin,
    build_manager,
    clocks,
    finish,
    reference_history,
    ring,
    same_bytes,
)

pytest.importorskip("transformers")

HEADS, QUERY_HEADS, DIM = 2, 4, 32


def build(*buckets: int, tokens: int = 2, attention: str = "auto", **changes: Any) -> Any:
    dtype, device = changes.pop("dtype", torch.float32), changes.pop("device", "cpu")
    config = HFSlidingKVConfig(
        num_layers=len(buckets),
        num_kv_heads=HEADS,
        head_dim=DIM,
        num_qo_heads=QUERY_HEADS,
        tokens_per_frame=tokens,
        layers=tuple(ring(each) for each in buckets),
        **({"num_sessions": 1} | changes),
    )
    spec = KVSpec(resource_key="kv", config=config)
    return spec.resource_class.build(spec, EngineResourceInfo(device=device, kv_dtype=dtype, attention=attention))


def unit_rows(manager: Any, frames: list[int], tag: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """q zero, K random, V of each row the unit vector of its frame, times ``tag``."""
    tokens = manager.config.tokens_per_frame
    q = torch.zeros(len(frames), QUERY_HEADS, tokens, DIM)
    k = torch.randn(len(frames), HEADS, tokens, DIM)
    v = torch.zeros_like(k)
    for row, frame in enumerate(frames):
        v[row, ..., frame] = tag
    return q, k, v


def shares(out: Tensor) -> dict[int, float]:
    """Frame -> share of the attention, of one row; every query of it must agree."""
    flat = out.reshape(-1, DIM)
    assert torch.equal(flat, flat[:1].expand_as(flat))
    return {frame: share for frame, share in enumerate(flat[0].tolist()) if share}


def random_rows(manager: Any, rows: list[tuple[str, int]], salt: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v that depend on request, frame and ``salt`` alone."""
    parts = []
    for rid, frame in rows:
        generator = torch.Generator().manual_seed(1_000_000 * sum(map(ord, rid)) + 1_000 * frame + salt)
        shape = (QUERY_HEADS + 2 * HEADS, manager.config.tokens_per_frame, DIM)
        parts.append(torch.randn(shape, generator=generator).split([QUERY_HEADS, HEADS, HEADS]))
    q, k, v = (torch.stack([part[i] for part in parts]) for i in range(3))
    return q, k, v


def drive(manager: Any, rows: list[tuple[str, int]], passes: int = 2, pads: int = 0) -> list[Tensor]:
    """A frame's whole life with random contents; the output of every pass in every layer."""
    for rid, _ in rows:
        manager.ingest_request(rid)
    begin(manager, rows, pads)
    padded = rows + [("pad", 0)] * pads
    frame_pos, outputs = clocks(*(frame for _, frame in padded)), []
    for index in range(passes + 1):
        for layer in range(len(manager.layers)):
            q, k, v = random_rows(manager, padded, salt=100 * layer + index)
            outputs.append(manager.attend(q, k, v, layer, frame_pos, commit=index == passes))
    finish(manager, rows, pads)
    return outputs


@pytest.mark.parametrize("attention", ["auto", "canonical"])
@pytest.mark.parametrize(("buckets", "tokens"), [(2, 1), (2, 3), (3, 2), (7, 1), (5, 4)])
def test_every_pass_of_a_frame_sees_exactly_the_frames_that_a_ring_would_show(
    buckets: int, tokens: int, attention: str
) -> None:
    manager = build(buckets, tokens=tokens, attention=attention)
    manager.ingest_request("a")
    for frame in range(3 * buckets + 1):
        begin(manager, [("a", frame)])
        for commit in (False, False, True, True, False):  # a pass may be repeated, and nothing forbids one after it
            q, k, v = unit_rows(manager, [frame])
            seen = shares(manager.attend(q, k, v, 0, clocks(frame), commit=commit))
            expected = [*reference_history(buckets, 1, frame), frame]
            assert seen == pytest.approx(dict.fromkeys(expected, 1 / len(expected)))
        finish(manager, [("a", frame)])
        manager.check_integrity()


def test_sessions_at_different_clocks_are_bit_equal_to_the_ring_under_the_canonical_read() -> None:
    layers = (3, 5)
    peer = build(*layers, attention="canonical", num_sessions=2, padding_session=True)
    own = build_manager(
        [ring(each) for each in layers],
        attention="canonical",
        num_sessions=2,
        padding_session=True,
        num_kv_heads=HEADS,
        num_qo_heads=QUERY_HEADS,
        head_dim=DIM,
    )
    for frame in range(4):
        assert same_bytes(drive(peer, [("a", frame)]), drive(own, [("a", frame)]))
    for frame in range(12):
        rows = [("b", frame), ("a", frame + 4)]
        assert same_bytes(drive(peer, rows, pads=2), drive(own, rows, pads=2))


def test_the_fast_read_is_the_canonical_one_but_for_rounding() -> None:
    fast, slow = build(4), build(4, attention="canonical")
    for frame in range(12):
        for left, right in zip(drive(fast, [("a", frame)]), drive(slow, [("a", frame)]), strict=True):
            assert (left - right).abs().max() < 1e-6 * 4  # |V| stays below 4 or so
    with pytest.raises(ValueError, match="'segments': HFSlidingKVManager has auto, canonical, sdpa"):
        build(4, attention="segments")


def test_a_pass_that_does_not_commit_leaves_the_cache_object_as_it_was() -> None:
    manager = build(3)
    for frame in range(5):
        drive(manager, [("a", frame)])
    before = manager.get_state("a")
    storages = [(layer.keys.data_ptr(), layer.keys.clone()) for layer in manager._caches[0].layers]
    begin(manager, [("a", 5)])
    q, k, v = unit_rows(manager, [5], tag=9.0)
    for _ in range(3):
        manager.attend(q, k, v, 0, clocks(5), commit=False)
    assert [(layer.keys.data_ptr()) for layer in manager._caches[0].layers] == [address for address, _ in storages]
    assert same_bytes([layer.keys for layer in manager._caches[0].layers], [keys for _, keys in storages])
    assert same_bytes(manager.get_state("a"), before)


@pytest.mark.parametrize("last", [0, 1, 5])
@pytest.mark.parametrize("layers_that_committed", [1, 2])
def test_an_aborted_commit_loses_nothing_and_leaves_nothing(last: int, layers_that_committed: int) -> None:
    manager, undisturbed = build(3, 4), build(3, 4)
    for frame in range(last):
        assert same_bytes(drive(manager, [("a", frame)]), drive(undisturbed, [("a", frame)]))
    manager.ingest_request("a")
    begin(manager, [("a", last)])
    before = manager.get_state("a")
    q, k, v = unit_rows(manager, [last], tag=float("nan"))
    for layer in range(layers_that_committed):
        manager.attend(q, k, v, layer, clocks(last), commit=True)
    if layers_that_committed < 2:
        with pytest.raises(RuntimeError, match=r"layers \[1\] saw no committing pass"):
            finish(manager, [("a", last)])
    manager.check_integrity()
    assert same_bytes(manager.get_state("a"), before)
    for frame in range(last, last + 6):
        assert same_bytes(drive(manager, [("a", frame)]), drive(undisturbed, [("a", frame)]))
    assert same_bytes(manager.get_state("a"), undisturbed.get_state("a"))


@pytest.mark.parametrize("frames", [0, 1, 2, 3, 9])
def test_a_state_goes_on_in_another_pool_and_session_as_if_nothing_happened(frames: int, tmp_path: Path) -> None:
    donor, other = build(3, 4), build(3, 4, num_sessions=2)
    drive(other, [("neighbour", 0)])
    donor.ingest_request("a")
    assert accepts(donor, "a", 0)
    for frame in range(frames):
        drive(donor, [("a", frame)])
    state = donor.get_state("a")
    assert [tuple(kv.shape) for kv, _ in state["layers"]] == [(2, 1, HEADS, 6, DIM), (2, 1, HEADS, 8, DIM)]
    donor.save("a", tmp_path / "a.state")
    other.ingest_request("b")
    other.load("b", tmp_path / "a.state")
    other.check_integrity()
    assert same_bytes(other.get_state("b"), state)
    kept = [kv.clone() for kv, _ in state["layers"]]
    for frame in range(frames, frames + 6):
        rows = random_rows(donor, [("a", frame)])
        outputs = []
        for manager, rid in ((donor, "a"), (other, "b")):
            begin(manager, [(rid, frame)])
            outputs.append([manager.attend(*rows, layer, clocks(frame), commit=True) for layer in range(2)])
            finish(manager, [(rid, frame)])
        assert same_bytes(*outputs)
    assert same_bytes([kv for kv, _ in state["layers"]], kept)


def test_a_state_with_a_hole_or_of_another_window_is_refused_and_changes_nothing() -> None:
    manager = build(3)
    for frame in range(5):
        drive(manager, [("a", frame)])
    state = manager.get_state("a")
    state["layers"][0][1][:2] = False
    with pytest.raises(ValueError, match=r"layers\[0\] written does not mark frames \[3\], held at clock 4"):
        manager.load_state("a", state)
    state = manager.get_state("a")
    state["geometry"]["layers"] = [[4, 1]]
    with pytest.raises(ValueError, match=r"geometry layers=\[\[4, 1\]\]"):
        manager.load_state("a", state)
    assert accepts(manager, "a", 5)


def held_bytes() -> int:
    """Bytes of all float storages alive in this process."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) is Tensor and item.is_floating_point()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_the_memory_report_is_what_the_process_really_holds_and_stays_flat() -> None:
    elsewhere = held_bytes()
    manager, token = build(3, 5, num_sessions=2), 2 * HEADS * DIM * 4
    assert manager.memory_bytes() == 0
    reports = {}
    for frame in range(40):
        drive(manager, [("a", frame)])
        reports[frame] = manager.memory_report()
        assert reports[frame]["resident"] == manager.memory_bytes()
        if frame in (0, 1, 20):
            assert manager.memory_bytes() == held_bytes() - elsewhere
        assert reports[frame]["in_use"] == (min(frame + 1, 2) + min(frame + 1, 4)) * 2 * token
    assert reports[20] == reports[39]
    manager.remove_request("a")
    assert manager.memory_report() == {
        "resident": 0,
        "in_use": 0,
        "padding": 0,
        "undo": 0,
        "flags": 0,
        "parked": 0,
    }
    assert held_bytes() == elsewhere


def test_a_new_request_sees_nothing_of_the_one_before_it() -> None:
    manager = build(3)
    for frame in range(5):
        drive(manager, [("a", frame)])
    manager.reset_request("a")
    manager.check_integrity()
    begin(manager, [("a", 0)])
    q, k, v = unit_rows(manager, [0])
    assert shares(manager.attend(q, k, v, 0, clocks(0), commit=True)) == {0: 1.0}
    finish(manager, [("a", 0)])
    manager.cleanup()
    assert manager.memory_bytes() == 0


def test_lower_precision_is_stored_as_such_and_the_output_keeps_the_precision_of_q() -> None:
    manager = build(3, dtype=torch.bfloat16)
    for frame in range(4):
        outputs = drive(manager, [("a", frame)])
    assert {out.dtype for out in outputs} == {torch.float32}
    assert {kv.dtype for kv, _ in manager.get_state("a")["layers"]} == {torch.bfloat16}


def test_helper_tensors_are_made_on_the_device_of_the_cache_not_on_the_default_one() -> None:
    torch.set_default_device("meta")
    try:
        manager = build(3)
        rows = [torch.randn(1, heads, 2, DIM, device="cpu") for heads in (QUERY_HEADS, HEADS, HEADS)]
        manager.ingest_request("a")
        for frame in range(5):
            begin(manager, [("a", frame)])
            frame_pos = torch.tensor([frame], device="cpu")
            assert manager.attend(*rows, 0, frame_pos, commit=True).is_cpu
            finish(manager, [("a", frame)])
        state = manager.get_state("a")
        manager.reset_request("a")
        manager.load_state("a", state)
    finally:
        torch.set_default_device(None)
    assert all(kv.is_cpu and written.is_cpu for kv, written in state["layers"])


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (ring(4, 8), r"layers\[1\]\.pinned_dilation=8: expected 1"),
        (ring(1), r"layers\[1\] ring_frames=1 ring_buckets=1: expected a window of 2 frames or more"),
        (ring(1, frames=4), r"layers\[1\] ring_frames=4 ring_buckets=1: expected a window of 2 frames or more"),
    ],
)
def test_what_a_sliding_cache_cannot_do_is_refused_by_name(layer: RingKVLayerConfig, message: str) -> None:
    geometry: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 2, "num_qo_heads": 1, "tokens_per_frame": 2}
    with pytest.raises(ValueError, match=message):
        HFSlidingKVConfig(num_layers=2, num_sessions=1, layers=(ring(4), layer), **geometry)


def test_transformers_itself_evicts_nothing_at_a_window_of_one_token() -> None:
    """Why a window of one frame is refused: it would be a window of ``(1 - 1) * T + 1`` tokens."""
    from transformers.cache_utils import DynamicSlidingWindowLayer

    layer = DynamicSlidingWindowLayer(sliding_window=1)
    for length in (1, 2, 3):
        keys, _ = layer.update(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
        assert keys.shape[2] == length


def test_only_the_peers_import_transformers() -> None:
    root = Path(ringkv.__file__).parent
    importers = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "transformers" for name in names):
                importers.add(path.relative_to(root).as_posix())
    assert importers == {"peers/hf.py"}


@pytest.mark.parametrize("aborted", [False, True])
def test_a_transformers_cache_can_be_forked_and_parked_and_says_why_nothing_else(aborted: bool) -> None:
    manager, twin = build(3, num_sessions=2), build(3, num_sessions=2)
    for each in (manager, twin):
        for frame in range(5):
            drive(each, [("a", frame)])
        if aborted:
            begin(each, [("a", 5)])
            each.attend(*random_rows(each, [("a", 5)], salt=7), 0, clocks(5), commit=True)
    state = manager.get_state("a")
    assert manager.features == {"fork", "park"}
    manager.ingest_request("b")
    manager.fork("a", ["b"])
    assert same_bytes(manager.get_state("b"), state)
    manager.park("a")
    assert same_bytes(manager.get_state("a"), state)
    manager.wake("a")
    manager.check_integrity()
    for frame in range(5, 9):
        assert same_bytes(drive(manager, [("a", frame)]), drive(twin, [("a", frame)]))
    for call, message in (
        (lambda: manager.restore("a", state), "has no restore: a transformers cache"),
        (lambda: manager.rewind("a", 1), "has no rewind: a transformers cache"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
