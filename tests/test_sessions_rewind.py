"""Going back: a session that was taken back is, bit for bit, the session that it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ringkv import RingKVConfig, memory
from tests.ring_tools import ring, same_bytes
from tests.strategies import STRATEGIES, Rollout, accepts, build, held_kv_bytes, kv_tensors, random_content

WINDOWS = (ring(3), ring(2, 3, 4), ring(1, 2), ring(1))
BACK = 4
"""Frames that the rings' logs go back."""

RINGS = ("ring", "ring_uncompacted")
FULL = ("full", "full_windowed", "full_static", "full_static_windowed", "paged")
EITHER = pytest.mark.parametrize("name", [*RINGS, *FULL])


def rollout_of(name: str, **changes: Any) -> Rollout:
    more = {"undo_frames": BACK} if name in RINGS else {}
    return Rollout(name, WINDOWS, head_dim=8, **{"sessions": 3, **more, **changes})


def storages(rollout: Rollout) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in kv_tensors(rollout.resource)}


def without_log(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key != "undo"}


@EITHER
@pytest.mark.parametrize("frames", [2, 12])
def test_a_session_that_was_taken_back_is_the_one_it_was(name: str, frames: int) -> None:
    for back in {1, min(BACK, frames)}:
        rollout, straight = rollout_of(name), rollout_of(name)
        rollout.run("b", range(3), noisy=0)
        rollout.run("a", range(frames), noisy=0)
        straight.run("a", range(frames - back), noisy=0)
        if frames == back:  # nothing is left of it but its claim
            straight.resource.ingest_request("a")
            assert accepts(straight.resource, "a", 0)
        other = rollout.resource.get_state("b")
        rollout.resource.rewind("a", back)
        rollout.resource.check_integrity()
        assert same_bytes(without_log(rollout.resource.get_state("a")), without_log(straight.resource.get_state("a")))
        assert not accepts(rollout.resource, "a", frames)
        rollout.content = straight.content = random_content(rollout.resource, "another future")
        for frame in range(frames - back, frames + 6):
            assert same_bytes(rollout.drive([("a", frame)]), straight.drive([("a", frame)]))
        assert same_bytes(without_log(rollout.resource.get_state("a")), without_log(straight.resource.get_state("a")))
        rollout.resource.check_integrity()
        assert same_bytes(rollout.resource.get_state("b"), other)


@EITHER
@pytest.mark.parametrize(("layers", "replanned"), [(1, 0), (3, 1), (2, 2)])
def test_going_back_also_undoes_a_commit_that_was_not_finished(name: str, layers: int, replanned: int) -> None:
    """The slot that it killed comes back, whatever was planned since."""
    for frames in (10, 12):
        for back in (1, BACK):
            rollout, straight = rollout_of(name), rollout_of(name)
            rollout.run("a", range(frames), noisy=0)
            straight.run("a", range(frames - back), noisy=0)
            rollout.begin([("a", frames)])
            for layer in range(layers):
                rollout.layer_pass([("a", frames)], layer, variant=2, commit=True)
            for _ in range(replanned):
                rollout.begin([("a", frames)])
            rollout.resource.rewind("a", back)
            with pytest.raises(RuntimeError, match=r"rewound|planned"):
                rollout.finish([("a", frames)])
            rollout.resource.check_integrity()
            assert same_bytes(
                without_log(rollout.resource.get_state("a")), without_log(straight.resource.get_state("a"))
            )
            for frame in range(frames - back, frames + 3):
                assert same_bytes(rollout.drive([("a", frame)], noisy=0), straight.drive([("a", frame)], noisy=0))


@EITHER
def test_going_back_step_by_step_is_going_back_at_once(name: str) -> None:
    rollout, twin = rollout_of(name), rollout_of(name)
    for r in (rollout, twin):
        r.run("a", range(11), noisy=0)
    for _ in range(BACK):
        rollout.resource.rewind("a", 1)
    twin.resource.rewind("a", BACK)
    assert same_bytes(rollout.resource.get_state("a"), twin.resource.get_state("a"))
    if name in RINGS:
        with pytest.raises(ValueError, match="can go back 0 frames"):
            rollout.resource.rewind("a", 1)
        rollout.run("a", range(7, 9), noisy=0)
        rollout.resource.rewind("a", 2)
        twin.drive([("a", 7)])
        twin.resource.rewind("a", 1)
        assert same_bytes(without_log(rollout.resource.get_state("a")), without_log(twin.resource.get_state("a")))


@EITHER
@pytest.mark.parametrize("frames", [0, -1, 1.0, True, BACK + 1, 7, 8])
def test_what_cannot_be_taken_back_is_refused_and_changes_nothing(name: str, frames: Any) -> None:
    rollout = rollout_of(name)
    rollout.run("a", range(7), noisy=0)
    if type(frames) is int and 0 < frames <= 7 and name in FULL:
        return  # all of it is there
    rollout.begin([("a", 7)])
    held = [t.clone() for t in kv_tensors(rollout.resource)]
    with pytest.raises(ValueError, match="frames=") as refusal:
        rollout.resource.rewind("a", frames)
    assert "\n" not in str(refusal.value)
    assert same_bytes(held, kv_tensors(rollout.resource))
    for rid, message in (("nobody", "not registered"), ("b", "holds no session")):
        if rid == "b":
            rollout.resource.ingest_request("b")
        with pytest.raises(ValueError, match=message):
            rollout.resource.rewind(rid, 1)
    rollout.full_pass([("a", 7)], commit=True)
    rollout.finish([("a", 7)])


@pytest.mark.parametrize("name", ["ring", "paged_windowed", "shift", "cat"])
def test_a_strategy_that_cannot_go_back_says_why(name: str) -> None:
    rollout = Rollout(name, WINDOWS, head_dim=8)
    rollout.run("a", range(7), noisy=0)
    assert "rewind" not in rollout.resource.features
    with pytest.raises(ValueError, match=r"KVManager has no rewind: .+"):
        rollout.resource.rewind("a", 1)


@pytest.mark.parametrize("how", ["state", "file", "fork", "parked"])
@pytest.mark.parametrize("aborted", [False, True])
@pytest.mark.parametrize("back", range(1, BACK + 1))
def test_a_copy_can_be_taken_back_as_far_as_its_original(how: str, aborted: bool, back: int, tmp_path: Path) -> None:
    """By any number of frames, in a ring of one bucket too, which overwrites each of them with the next."""
    rollout = rollout_of("ring", parking_dir=tmp_path)
    rollout.run("a", range(11), noisy=0)
    straight = rollout_of("ring")
    straight.run("a", range(11 - back), noisy=0)
    if aborted:
        rollout.begin([("a", 11)])
        rollout.full_pass([("a", 11)], variant=2, commit=True)
    resource, rid = rollout.resource, "copy"
    resource.ingest_request(rid)
    state = resource.get_state("a")
    if how == "state":
        resource.load_state(rid, state)
    elif how == "file":
        resource.save("a", tmp_path / "a.state")
        resource.load(rid, tmp_path / "a.state")
    elif how == "fork":
        resource.fork("a", [rid])
    else:
        rid = "a"
        resource.park(rid)
        resource.wake(rid)
    assert same_bytes(resource.get_state(rid), state)
    resource.rewind(rid, back)
    assert same_bytes(without_log(resource.get_state(rid)), without_log(straight.resource.get_state("a")))
    resource.check_integrity()


@pytest.mark.parametrize(("own", "found"), [(1, 1), (9, BACK), (0, None)])
def test_a_log_is_taken_over_as_far_as_it_goes(own: int, found: int | None) -> None:
    source = rollout_of("ring")
    source.run("a", range(12), noisy=0)
    target = rollout_of("ring", undo_frames=own)
    target.resource.ingest_request("a")
    target.resource.load_state("a", source.resource.get_state("a"))
    assert same_bytes(without_log(target.resource.get_state("a")), without_log(source.resource.get_state("a")))
    if found is None:
        assert "undo" not in target.resource.get_state("a")
        return
    with pytest.raises(ValueError, match=f"can go back {found} frames"):
        target.resource.rewind("a", found + 1)
    target.run("a", range(12, 14), noisy=0)
    straight = rollout_of("ring")
    straight.run("a", range(14 - min(own, found + 2)), noisy=0)
    target.resource.rewind("a", min(own, found + 2))
    assert same_bytes(without_log(target.resource.get_state("a")), without_log(straight.resource.get_state("a")))


def test_a_state_without_a_log_and_a_restored_one_begin_theirs_anew() -> None:
    source = Rollout("ring", WINDOWS, head_dim=8)
    source.run("a", range(9), noisy=0)
    for how in ("load_state", "restore"):
        target = rollout_of("ring")
        target.resource.ingest_request("a")
        getattr(target.resource, how)("a", source.resource.get_state("a"))
        with pytest.raises(ValueError, match="can go back 0 frames"):
            target.resource.rewind("a", 1)
        target.run("a", range(9, 11), noisy=0)
        target.resource.rewind("a", 2)
        assert same_bytes(without_log(target.resource.get_state("a")), source.resource.get_state("a"))


def test_holes_come_back_with_what_overwrote_them() -> None:
    narrow = Rollout("ring", [ring(2), *WINDOWS[1:]], head_dim=8)
    narrow.run("a", range(9), noisy=0)
    target = rollout_of("ring")
    target.resource.ingest_request("a")
    report = target.resource.restore("a", narrow.resource.get_state("a"))
    assert report.missing[0] == (6,)
    state = without_log(target.resource.get_state("a"))
    target.run("a", range(9, 12), noisy=0)
    target.resource.rewind("a", 3)
    assert same_bytes(without_log(target.resource.get_state("a")), state)
    target.resource.check_integrity()


def _spoilt(undo: dict[str, Any]) -> dict[str, Any]:
    (frames, kv), *rest = undo["layers"]
    return {
        "no layers": {"depth": undo["depth"]},
        "a depth beyond the clock": {**undo, "depth": 11},
        "a depth that is no number": {**undo, "depth": "4"},
        "a layer too few": {**undo, "layers": rest},
        "another shape": {**undo, "layers": [(frames, kv[..., :-1]), *rest]},
        "another dtype": {**undo, "layers": [(frames, kv.double()), *rest]},
        "numbers that are none": {**undo, "layers": [(frames.float(), kv), *rest]},
        "frames of another time": {**undo, "layers": [(frames + 3, kv), *rest]},
        "frames out of order": {**undo, "layers": [(frames.flip(0), kv), *rest]},
        "no tensors": {**undo, "layers": [(frames.tolist(), kv), *rest]},
        "no dict": [undo],
    }


def test_a_log_that_contradicts_its_state_is_refused_and_changes_nothing() -> None:
    rollout = rollout_of("ring")
    rollout.run("a", range(10), noisy=0)
    state = rollout.resource.get_state("a")
    held = [t.clone() for t in kv_tensors(rollout.resource)]
    for fault, undo in _spoilt(state["undo"]).items():
        with pytest.raises(ValueError, match="state undo") as refusal:
            rollout.resource.load_state("a", {**state, "undo": undo})
        assert "\n" not in str(refusal.value), fault
        assert same_bytes(held, kv_tensors(rollout.resource)), fault
    rollout.drive([("a", 10)])


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("undo_frames", [0, 1, 3, 7, 8])
def test_a_log_takes_the_bytes_that_were_predicted_and_never_moves(undo_frames: int, padding: bool) -> None:
    resource = build(
        "ring", WINDOWS, tokens=3, heads=2, head_dim=4, sessions=2, padding=padding, undo_frames=undo_frames
    )
    config = resource.config
    assert isinstance(config, RingKVConfig)
    assert resource.memory_bytes() == held_kv_bytes(resource) == memory.storage_bytes(config, torch.float32)
    log = 2 * memory.undo_bytes(config, torch.float32)
    assert resource.memory_report()["undo"] == log
    # k frames back and one under way: k + 1 entries at d=1, and every d-th of them at dilation d.
    entries = {0: 0, 1: 2 + 1 + 1 + 2, 3: 4 + 2 + 2 + 4, 7: 8 + 3 + 4 + 8, 8: 9 + 3 + 5 + 9}[undo_frames]
    assert log == 2 * entries * 2 * (3 * 2 * 4) * 4
    rollout = Rollout("ring", WINDOWS, head_dim=8, sessions=2, undo_frames=undo_frames)
    addresses = storages(rollout)
    rollout.run("a", range(9), noisy=0)
    if undo_frames:
        rollout.resource.rewind("a", 1)
    rollout.resource.reset_request("a")
    assert storages(rollout) == addresses
    assert not any(t.any() for t in kv_tensors(rollout.resource))
    rollout.resource.cleanup()
    assert held_kv_bytes(rollout.resource) == rollout.resource.memory_bytes() == 0


def test_a_log_that_outlives_its_request_is_found() -> None:
    rollout = rollout_of("ring")
    rollout.run("a", range(9), noisy=0)
    rollout.resource._undo.clear = lambda session: None  # type: ignore[attr-defined]
    rollout.resource.reset_request("a")
    with pytest.raises(RuntimeError, match="undo log of session 0 is not empty"):
        rollout.resource.check_integrity()


def test_every_strategy_says_what_it_can_do() -> None:
    always = {"restore", "fork", "park"}
    for name in STRATEGIES:
        assert build(name, WINDOWS).features == always | ({"rewind"} if name in FULL else set()), name
    assert build("ring", WINDOWS, undo_frames=1).features == always | {"rewind"}
