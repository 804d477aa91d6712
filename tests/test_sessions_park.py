"""Sessions off the device and back: bit for bit, nothing lost on any error, counted to the byte."""

from __future__ import annotations

import errno
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from ringkv import AttentionResource, memory, statefile
from tests.ring_tools import ring, same_bytes, step_of
from tests.strategies import EVERY_READ, STRATEGIES, Rollout, accepts, build, held_kv_bytes

WINDOWS = (ring(3), ring(2, 3))
every_strategy = pytest.mark.parametrize("name", STRATEGIES)
places = pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])


def rollout_of(name: str, folder: Path | None, sessions: int = 2, **changes: Any) -> Rollout:
    return Rollout(name, WINDOWS, head_dim=8, sessions=sessions, parking_dir=folder, **changes)


def folder_of(tmp_path: Path, on_disk: bool) -> Path | None:
    return tmp_path / "parked" / "here" if on_disk else None


def files(tmp_path: Path) -> int:
    return sum(path.is_file() for path in tmp_path.rglob("*"))


@pytest.mark.parametrize(
    ("name", "read", "on_disk"), [(*each, on_disk) for each, on_disk in zip(EVERY_READ, cycle([False, True]))]
)
def test_a_woken_session_goes_on_as_if_nothing_had_happened(
    name: str, read: str, on_disk: bool, tmp_path: Path
) -> None:
    rollout = rollout_of(name, folder_of(tmp_path, on_disk), attention=read)
    twin = rollout_of(name, None, attention=read)
    resource = rollout.resource
    for r in (rollout, twin):
        r.run("a", range(7))
        r.run("b", range(2))
    state = resource.get_state("a")
    resource.park("a")
    assert (resource.session_of("a"), resource.num_free_sessions, resource.is_parked("a")) == (None, 1, True)
    assert same_bytes(resource.get_state("a"), state)
    resource.check_integrity()
    rollout.run("c", range(5))  # in the session that it had
    rollout.drive([("b", 2)])
    resource.remove_request("b")
    resource.wake("a")
    assert (resource.session_of("a"), resource.is_parked("a"), files(tmp_path)) == (1, False, 0)
    assert same_bytes(resource.get_state("a"), state)
    for frame in range(7, 13):
        assert same_bytes(rollout.drive([("a", frame)]), twin.drive([("a", frame)]))
    resource.check_integrity()


@every_strategy
def test_a_parked_request_is_refused_until_it_is_woken(name: str) -> None:
    rollout = rollout_of(name, None)
    rollout.run("a", range(5))
    rollout.run("b", range(2))
    resource = rollout.resource
    resource.park("a")
    for step in (step_of([("a", 5)]), step_of([("b", 2), ("a", 5)])):
        outcome = resource.admit(*step)
        assert (outcome.ok, outcome.retryable, outcome.rid) == (False, True, "a")
        assert "parked" in outcome.reason
        with pytest.raises(RuntimeError, match="was not admitted"):
            resource.plan(*step)
    for frame in (0, 4, 6):  # its clock is where it was
        outcome = resource.admit(*step_of([("a", frame)]))
        assert (outcome.ok, outcome.retryable) == (False, False)
    state = resource.get_state("a")
    resource.ingest_request("a")
    resource.ingest_request("c")
    for call in (
        lambda: resource.park("a"),
        lambda: resource.load_state("a", state),
        lambda: resource.restore("a", state),
        lambda: resource.fork("a", ["c"]),
        lambda: resource.fork("b", ["a"]),
    ):
        with pytest.raises(ValueError, match="'a' is parked"):
            call()
    for rid, message in (("b", "not parked"), ("nobody", "not registered")):
        with pytest.raises(ValueError, match=message):
            resource.wake(rid)
    with pytest.raises(ValueError, match="holds no session"):
        resource.park("c")
    resource.remove_request("b")
    with pytest.raises(RuntimeError, match="parked: a"):
        resource.post_warmup_validate()
    assert same_bytes(resource.get_state("a"), state)
    resource.wake("a")
    assert accepts(resource, "a", 5)


@every_strategy
@places
def test_waking_into_a_full_pool_is_refused_and_the_request_stays_parked(
    name: str, on_disk: bool, tmp_path: Path
) -> None:
    rollout = rollout_of(name, folder_of(tmp_path, on_disk))
    resource = rollout.resource
    rollout.run("a", range(5))
    state = resource.get_state("a")
    resource.park("a")
    for rid in "bc":
        rollout.run(rid, range(2))
    others = [resource.get_state(rid) for rid in "bc"]
    with pytest.raises(RuntimeError, match="pool is full, none of 2 sessions is free"):
        resource.wake("a")
    assert same_bytes(resource.get_state("a"), state)
    assert resource.is_parked("a")
    resource.check_integrity()
    assert same_bytes([resource.get_state(rid) for rid in "bc"], others)
    resource.reset_request("b")
    resource.wake("a")
    assert same_bytes(resource.get_state("a"), state)


@every_strategy
@places
def test_reset_remove_and_cleanup_drop_the_copy_and_its_file(name: str, on_disk: bool, tmp_path: Path) -> None:
    rollout = rollout_of(name, folder_of(tmp_path, on_disk), sessions=3)
    resource = rollout.resource
    for rid in "abc":
        rollout.run(rid, range(3))
        resource.park(rid)
    assert (files(tmp_path), resource.num_free_sessions) == (3 * on_disk, 3)
    resource.reset_request("a")
    assert (resource.is_parked("a"), accepts(resource, "a", 0)) == (False, True)
    resource.remove_request("b")
    assert files(tmp_path) == on_disk
    resource.check_integrity()
    rollout.run("b", range(2))
    resource.cleanup()
    assert files(tmp_path) == 0
    assert resource.memory_report()["parked"] == 0


@every_strategy
@places
@pytest.mark.parametrize("frames", [0, 1, 9])
def test_parked_bytes_are_those_that_were_predicted(name: str, on_disk: bool, frames: int, tmp_path: Path) -> None:
    changes = {"undo_frames": 4} if name.startswith("ring") else {}
    rollout = rollout_of(name, folder_of(tmp_path, on_disk), **changes)
    resource = rollout.resource
    resident = resource.memory_bytes()
    for rid in "ab":
        rollout.begin([(rid, 0)])
        rollout.run(rid, range(frames))
    size = memory.parked_bytes(
        resource.config, "float32", frames - 1 if frames else None, min(frames, 4) * bool(changes)
    )
    for count, rid in enumerate("ab", 1):
        resource.park(rid)
        report = resource.memory_report()
        assert report["parked"] == count * size
        assert report["resident"] == held_kv_bytes(resource) - (0 if on_disk else _parked_kv(resource))
        assert report["in_use"] == 0 or count == 1
    assert resource.memory_bytes() == resident
    resource.wake("b")
    assert resource.memory_report()["parked"] == size


def _parked_kv(resource: AttentionResource) -> int:
    """Bytes of K and V that are parked in host memory, from their states."""
    states = [resource.get_state(rid) for rid in "ab" if resource.is_parked(rid)]
    pairs = [kv for state in states for kv, _ in state["layers"]]
    return sum(kv.nbytes for kv in [*pairs, *(kv for s in states if "undo" in s for _, kv in s["undo"]["layers"])])


def test_a_parked_session_of_a_small_geometry_takes_these_bytes() -> None:
    """R=3, T=2, H=2, D=4, bf16: four frames of 64 bytes and 8 flags."""
    resource = build("ring", [ring(3)], heads=2, head_dim=4, dtype=torch.bfloat16)
    assert memory.parked_bytes(resource.config, torch.bfloat16, 6) == 4 * 64 + 8


@every_strategy
def test_parking_voids_a_pending_plan_and_keeps_what_an_abort_has_cost(name: str) -> None:
    rollout, twin = rollout_of(name, None), rollout_of(name, None)
    for r in (rollout, twin):
        r.run("a", range(6))
        r.begin([("a", 6)])
        r.layer_pass([("a", 6)], 0, variant=2, commit=True)
    state = rollout.resource.get_state("a")
    rollout.resource.park("a")
    for call in (lambda: rollout.layer_pass([("a", 6)], 0), lambda: rollout.finish([("a", 6)])):
        with pytest.raises(RuntimeError, match="parked"):
            call()
    rollout.resource.wake("a")
    assert same_bytes(rollout.resource.get_state("a"), state)
    for frame in range(6, 11):
        assert same_bytes(rollout.drive([("a", frame)]), twin.drive([("a", frame)]))


def _full_disk(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@every_strategy
def test_a_disk_that_is_full_leaves_the_session_where_it_was(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = rollout_of(name, tmp_path / "parked")
    rollout.run("a", range(5))
    rollout.begin([("a", 5)])
    state = rollout.resource.get_state("a")
    with monkeypatch.context() as patched:
        patched.setattr(statefile, "save_file", _full_disk)
        with pytest.raises(OSError, match="No space left"):
            rollout.resource.park("a")
    assert (rollout.resource.session_of("a"), rollout.resource.is_parked("a"), files(tmp_path)) == (0, False, 0)
    assert same_bytes(rollout.resource.get_state("a"), state)
    rollout.full_pass([("a", 5)], commit=True)  # the plan still stands
    rollout.finish([("a", 5)])
    rollout.resource.check_integrity()


@every_strategy
@places
def test_running_out_of_memory_at_wake_leaves_it_parked_and_nothing_lost(
    name: str, on_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout, twin = rollout_of(name, folder_of(tmp_path, on_disk)), rollout_of(name, None)
    for r in (rollout, twin):
        r.run("a", range(7))
    resource = rollout.resource
    state = resource.get_state("a")
    resource.park("a")
    usual = resource._import  # type: ignore[attr-defined]

    def failing(*args: object) -> None:
        usual(*args)
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(resource, "_import", failing)
        with pytest.raises(torch.OutOfMemoryError):
            resource.wake("a")
    assert (resource.is_parked("a"), resource.num_free_sessions, resource.session_of("a")) == (True, 2, None)
    resource.check_integrity()
    assert same_bytes(resource.get_state("a"), state)
    resource.wake("a")
    assert same_bytes(rollout.drive([("a", 7)]), twin.drive([("a", 7)]))


@pytest.mark.parametrize("fault", ["gone", "truncated", "another's", "other bits"])
def test_a_parked_file_that_is_not_what_was_written_is_refused_and_changes_nothing(fault: str, tmp_path: Path) -> None:
    rollout = rollout_of("ring", tmp_path)
    for rid in "ab":
        rollout.run(rid, range(5))
    state = rollout.resource.get_state("b")
    rollout.resource.park("a")
    (path,) = tmp_path.iterdir()
    raw = path.read_bytes()
    if fault == "gone":
        path.unlink()
    elif fault == "another's":
        statefile.write_state(path, state, {"rid": "b"})
    else:
        path.write_bytes(raw[:-10] if fault == "truncated" else raw[:-10] + bytes([raw[-10] ^ 1]) + raw[-9:])
    with pytest.raises((ValueError, FileNotFoundError), match=path.name):
        rollout.resource.wake("a")
    assert (rollout.resource.is_parked("a"), rollout.resource.num_free_sessions) == (True, 1)
    path.write_bytes(raw)
    rollout.resource.wake("a")
    rollout.drive([("a", 5), ("b", 5)])


def test_rids_need_not_be_file_names(tmp_path: Path) -> None:
    rollout = rollout_of("ring", tmp_path)
    rid = "../../etc/" + "x" * 300
    rollout.run(rid, range(3))
    state = rollout.resource.get_state(rid)
    rollout.resource.park(rid)
    assert [path.parent for path in tmp_path.rglob("*.safetensors")] == [tmp_path]
    rollout.resource.wake(rid)
    assert same_bytes(rollout.resource.get_state(rid), state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_parking_from_a_device_is_pinned_and_comes_back_bit_for_bit_while_others_run() -> None:
    from ringkv import EngineResourceInfo, KVSpec, RingKVConfig

    config = RingKVConfig(
        num_layers=2, num_kv_heads=4, head_dim=64, num_qo_heads=4, tokens_per_frame=256, num_sessions=2, layers=WINDOWS
    )
    spec = KVSpec(resource_key="kv", config=config)
    resource = spec.resource_class.build(spec, EngineResourceInfo(device="cuda", kv_dtype=torch.bfloat16))

    def drive(rid: str, frame: int) -> None:
        step, ctx = step_of([(rid, frame)])
        assert resource.admit(step, ctx).ok
        resource.plan(step, ctx)
        generator = torch.Generator("cuda").manual_seed(frame)
        for layer in range(2):
            q, k, v = torch.randn(3, 1, 4, 256, 64, device="cuda", dtype=torch.bfloat16, generator=generator)
            resource.attend(q, k, v, layer, torch.tensor([frame], device="cuda"), commit=True)
        resource.commit(step, ctx)

    for rid in "ab":
        resource.ingest_request(rid)
        for frame in range(5):
            drive(rid, frame)
    state = resource.get_state("a")
    for _ in range(20):
        resource.park("a")
        resource.ingest_request("c")
        drive("c", 0)  # writes the session that "a" had while its copy may still be on its way
        parked = resource.get_state("a")
        assert all(kv.device.type == "cpu" for kv, _ in parked["layers"])
        resource.remove_request("c")
        resource.wake("a")
        assert same_bytes(resource.get_state("a"), state)
    resource.check_integrity()
