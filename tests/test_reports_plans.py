"""Plans: what they stand for, when they are spent, and what makes one void."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ringkv import RingKVManager
from tests.ring_tools import (
    accepts,
    begin,
    build_manager,
    bytes_of,
    clocks,
    drive,
    finish,
    ring,
    run_stream,
    same_bytes,
    seen,
    step_of,
    tagged_payload,
    write_pass,
)


def test_an_admitted_or_planned_frame_can_be_driven_again_at_the_same_clock() -> None:
    manager = build_manager([ring(3)])
    run_stream(manager, "a", range(2))
    for _ in range(3):
        begin(manager, [("a", 2)])
        write_pass(manager, [("a", 2)], commit=False, payload=tagged_payload(manager, 88.0))
    assert [seen(*out, 2) for out in drive(manager, [("a", 2)])] == [[0, 1]]
    assert not accepts(manager, "a", 2)


def test_a_row_that_was_not_admitted_at_its_clock_is_not_planned() -> None:
    manager = build_manager([ring(3)])
    manager.ingest_request("a")
    with pytest.raises(RuntimeError):
        manager.plan(*step_of([("a", 0)]))
    drive(manager, [("a", 0)])
    with pytest.raises(RuntimeError):
        manager.plan(*step_of([("a", 1)]))
    with pytest.raises((RuntimeError, ValueError)):
        manager.plan(*step_of([("nobody", 0)]))


def test_writes_and_commits_without_a_plan_raise() -> None:
    manager = build_manager([ring(3)])
    manager.ingest_request("a")
    assert accepts(manager, "a", 0)
    with pytest.raises(RuntimeError):
        write_pass(manager, [("a", 0)], commit=False)
    with pytest.raises(RuntimeError):
        finish(manager, [("a", 0)])


def test_a_commit_is_of_the_step_that_was_planned() -> None:
    manager = build_manager([ring(3)], num_sessions=2)
    for rid in ("a", "b"):
        manager.ingest_request(rid)
        assert accepts(manager, rid, 0)
    begin(manager, [("a", 0)])
    write_pass(manager, [("a", 0)], commit=True)
    for rows in ([("b", 0)], [("a", 1)], [("a", 0), ("b", 0)]):
        with pytest.raises((RuntimeError, ValueError)):
            finish(manager, rows)
    finish(manager, [("a", 0)])
    assert manager.get_state("a")["clock"] == 0
    assert manager.get_state("b")["clock"] is None


def _load_from_file(manager: RingKVManager, tmp_path: Path) -> None:
    manager.save("a", tmp_path / "a.safetensors")
    manager.load("a", tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    "void",
    [
        lambda manager, _: manager.load_state("a", manager.get_state("a")),
        _load_from_file,
        lambda manager, _: manager.reset_request("a"),
        lambda manager, _: manager.remove_request("a"),
    ],
    ids=["load_state", "load", "reset", "remove"],
)
@pytest.mark.parametrize("voided", ["a", "both"])
def test_a_plan_whose_request_was_moved_is_void(
    void: Callable[[RingKVManager, Path], None], voided: str, tmp_path: Path
) -> None:
    manager = build_manager([ring(3)], num_sessions=2)
    for rid in ("a", "b"):
        run_stream(manager, rid, range(4))
    rows = [("a", 4)] if voided == "a" else [("b", 4), ("a", 4)]
    begin(manager, rows)
    write_pass(manager, rows, commit=False)
    void(manager, tmp_path)
    before = bytes_of(manager)
    k = torch.full((len(rows), 1, 2, 2), 9.0)
    frame_pos = clocks(*[4] * len(rows))
    for call in (
        lambda: manager.upsert(k, k, 0, frame_pos, commit=True),
        lambda: manager.attend(k, k, k, 0, frame_pos, commit=True),
        lambda: finish(manager, rows),
    ):
        with pytest.raises(RuntimeError):
            call()
    assert same_bytes(bytes_of(manager), before)
    assert manager.get_state("b")["clock"] == 3
    drive(manager, [("b", 4)])
    manager.check_integrity()


@pytest.mark.parametrize("event", ["load_state", "reset", "remove", "ingest", "get_state", "admit"])
def test_a_plan_of_other_requests_stays_valid(event: str) -> None:
    manager = build_manager([ring(3)], num_sessions=3)
    for rid in ("a", "b"):
        run_stream(manager, rid, range(4))
    begin(manager, [("b", 4)])
    write_pass(manager, [("b", 4)], commit=False)
    if event == "load_state":
        manager.load_state("a", manager.get_state("a"))
    elif event == "reset":
        manager.reset_request("a")
    elif event == "remove":
        manager.remove_request("a")
    elif event == "ingest":
        manager.ingest_request("c")
    elif event == "get_state":
        manager.get_state("b")
    else:
        manager.ingest_request("c")
        assert accepts(manager, "c", 0)
    out = write_pass(manager, [("b", 4)], commit=True)
    finish(manager, [("b", 4)])
    assert [seen(*layer, 4) for layer in out] == [[2, 3]]
    assert manager.get_state("b")["clock"] == 4
