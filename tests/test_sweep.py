"""Sweeps: a process per point, a row per point whatever happens, and nothing that leaks from point to point."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ringkv.harness.records import read_frames, read_summary
from scripts.app import supervise
from scripts.app.supervise import ROW_COLUMNS, ROW_METRICS, ChildEnd
from scripts.app.sweep import SWEEP_FILE
from scripts.rollout import main
from tests.cli_tools import TINY, WandbStub

SWEEP_TINY = [override for override in TINY if not override.startswith(("ring_frames", "tracking", "num_frames"))]


def sweep_json(folder: Path) -> dict[str, Any]:
    return json.loads((folder / SWEEP_FILE).read_text(), parse_constant=lambda c: pytest.fail(f"{c} in sweep.json"))


def supervised(program: str, folder: Path, **limits: float) -> ChildEnd:
    """Run a small Python program under supervision; its output goes to ``folder``/log."""
    limits = {"timeout_s": 60.0, "memory_bytes": 1e12, "poll_s": 0.01} | limits
    return supervise.supervise([sys.executable, "-c", program], '{"a": 1}', folder / "log", **limits)


# -- whole sweeps ---------------------------------------------------------------------------------------------------


def test_a_failed_point_is_a_row_with_its_reason_and_the_other_points_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Point 1 is refused before it starts, point 3 raises at its frame 3; 0 and 2 must not notice.

    A run of its own in W&B for every point that started, each finished once, as what it was.
    """
    stub = WandbStub(tmp_path / "stub")
    monkeypatch.setenv("PYTHONPATH", str(stub.folder), prepend=os.pathsep)
    monkeypatch.setenv("WANDB_STUB_CALLS", str(stub.calls_file))
    monkeypatch.setenv("WANDB_STUB_RAISES", "[5, 3]")
    folder = tmp_path / "sweep"
    code = main(
        ["-m", "ring_frames=4,0,8,5", *SWEEP_TINY, "num_frames=6", "tracking=offline", f"hydra.sweep.dir={folder}"]
    )
    assert code == 1
    sweep = sweep_json(folder)
    assert sweep["finished"] is True
    assert sweep["counts"] == {"ok": 2, "failed": 2}
    rows = sweep["rows"]
    assert [row["status"] for row in rows] == ["ok", "failed", "ok", "failed"]
    assert [row["job"] for row in rows] == [0, 1, 2, 3]
    assert [row["steps"] for row in rows] == [6, 0, 6, 4]
    assert [row["overrides"][0] for row in rows] == ["ring_frames=4", "ring_frames=0", "ring_frames=8", "ring_frames=5"]
    assert all(row.keys() == {*ROW_COLUMNS, *ROW_METRICS} for row in rows)

    for row in (rows[0], rows[2]):
        assert read_summary(row["run_dir"])["status"] == "ok"
        assert (Path(row["run_dir"]) / "rollout.mp4").exists()
        assert row["memory/kv_bytes"] == row["memory/kv_bytes_predicted"]
        assert row["peak_rss_bytes"] > 10_000_000
        assert row["exit_code"] == 0
    assert "ring_frames=0: expected an integer >= 1" in rows[1]["error"]
    assert "effective" in rows[1]["traceback"]
    assert rows[1]["exit_code"] is None
    assert "the stub was told to raise here" in rows[3]["error"]
    assert "log_frame" in rows[3]["traceback"]
    for row in (rows[1], rows[3]):
        summary = read_summary(row["run_dir"])
        assert (summary["status"], summary["error"]) == ("failed", row["error"])
    assert [step["clocks"] for step in read_frames(rows[3]["run_dir"]).rows] == [[0], [1], [2], [3]]

    inits, finishes = stub.calls("init"), stub.calls("finish")
    assert len({init["id"] for init in inits}) == len(inits) == 3
    assert [init["config"]["ring_frames"] for init in inits] == [4, 8, 5]
    assert {init["group"] for init in inits} == {"sweep"}
    assert [(finish["id"], finish["exit_code"]) for finish in finishes] == [
        (init["id"], exit_code) for init, exit_code in zip(inits, (0, 0, 1), strict=True)
    ]
    assert "2 ok, 2 failed" in capsys.readouterr().out


def test_a_sweep_that_is_interrupted_keeps_the_rows_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = iter([ChildEnd(0, None, 1.0, 1), KeyboardInterrupt()])

    def fake(command: Any, request: str, log: Path, **limits: float) -> ChildEnd:
        end = next(calls)
        if isinstance(end, BaseException):
            raise end
        (log.parent / "summary.json").write_text('{"status": "ok", "error": null}')
        return end

    monkeypatch.setattr(supervise, "supervise", fake)
    assert main(["-m", "ring_frames=2,3,4", *TINY[:-3], f"hydra.sweep.dir={tmp_path / 's'}"]) == 1
    sweep = sweep_json(tmp_path / "s")
    assert sweep["finished"] is False
    assert [row["status"] for row in sweep["rows"]] == ["ok"]


def test_a_sweep_without_failures_exits_0_and_gives_each_child_its_config_limits_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen = []

    def fake(command: Any, request: str, log: Path, **limits: float) -> ChildEnd:
        seen.append((json.loads(request), log, limits))
        (log.parent / "summary.json").write_text('{"status": "ok", "error": null}')
        return ChildEnd(0, None, 1.0, 1)

    monkeypatch.setattr(supervise, "supervise", fake)
    folder = tmp_path / "s"
    limits = ["sweep.timeout_s=30", "sweep.memory_gib=0.5"]
    assert main(["-m", "ring_frames=2,3", *SWEEP_TINY, *limits, f"hydra.sweep.dir={folder}"]) == 0
    assert [request["config"]["ring_frames"] for request, _, _ in seen] == [2, 3]
    assert [request["config"]["num_frames"] for request, _, _ in seen] == [6, 9]
    assert [log for _, log, _ in seen] == [folder / "0" / "output.log", folder / "1" / "output.log"]
    assert all(limit == {"timeout_s": 30.0, "memory_bytes": 0.5 * 1024**3} for _, _, limit in seen)
    assert sweep_json(folder)["counts"] == {"ok": 2, "failed": 0}


def test_a_second_sweep_in_the_same_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "s"
    folder.mkdir()
    (folder / "sweep.json").write_text("{}")
    assert main(["-m", "ring_frames=2,3", f"hydra.sweep.dir={folder}"]) == 2
    assert capsys.readouterr().err.startswith(f"error: hydra.sweep.dir={folder}: already holds something")
    assert (folder / "sweep.json").read_text() == "{}"


def test_a_child_that_dies_without_a_word_is_a_failed_row_and_a_failed_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ends = iter(
        [ChildEnd(-9, None, 1.0, 1), ChildEnd(-9, "memory: 5 resident bytes", 1.0, 5), ChildEnd(0, None, 1.0, 1)]
    )
    monkeypatch.setattr(supervise, "supervise", lambda *_, **__: next(ends))
    assert main(["-m", "ring_frames=2,3,4", *SWEEP_TINY, f"hydra.sweep.dir={tmp_path / 's'}"]) == 1
    rows = sweep_json(tmp_path / "s")["rows"]
    assert [row["error"] for row in rows] == [
        "the process ended with signal SIGKILL; see output.log",
        "memory: 5 resident bytes",
        "the process ended with exit code 0; see output.log",
    ]
    for row in rows:
        assert read_summary(row["run_dir"])["error"] == row["error"]


# -- one child ------------------------------------------------------------------------------------------------------


def test_a_child_gets_its_request_and_its_output_and_exit_code_are_kept(tmp_path: Path):
    end = supervised("import sys; print(sys.stdin.readline()); sys.exit(7)", tmp_path)
    assert (end.exit_code, end.killed_for) == (7, None)
    assert (tmp_path / "log").read_text().strip() == '{"a": 1}'


def test_a_child_over_its_time_is_interrupted_first_so_that_it_can_record_that(tmp_path: Path):
    program = (
        "import time\n"
        "print('up', flush=True)\n"
        "try:\n"
        "    time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        "    print('noted')\n"
    )
    end = supervised(program, tmp_path, timeout_s=1.5)
    assert end.killed_for == "timeout: longer than sweep.timeout_s=1.5"
    assert (tmp_path / "log").read_text() == "up\nnoted\n"


def test_a_child_over_its_memory_is_killed_with_its_descendants(tmp_path: Path):
    program = (
        "import subprocess, sys, time\n"
        "grandchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(grandchild.pid, flush=True)\n"
        "block = bytearray(200_000_000)\n"
        "time.sleep(600)\n"
    )
    end = supervised(program, tmp_path, memory_bytes=150e6)
    assert end.exit_code == -signal.SIGKILL
    assert "above sweep.memory_gib" in (end.killed_for or "")
    assert end.peak_rss_bytes > 150e6
    assert gone(int((tmp_path / "log").read_text()))


def test_when_the_parent_is_killed_its_child_ends_too(tmp_path: Path):
    """The sweep's process gets SIGKILL, which nobody can handle, while a point runs."""
    folder = tmp_path / "s"
    long_run = [*SWEEP_TINY, "num_frames=4000", "ring_frames=2,3", "tracking=disabled", f"hydra.sweep.dir={folder}"]
    parent = subprocess.Popen(
        [sys.executable, "-c", "import sys; from scripts.rollout import main; main(sys.argv[1:])", "-m", *long_run]
    )
    try:
        wait_until(
            lambda: (folder / "0" / "frames.jsonl").exists() and (folder / "0" / "frames.jsonl").stat().st_size > 0
        )
        (child,) = psutil.Process(parent.pid).children()
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: gone(child.pid))
    assert read_summary(folder / "0")["error"].startswith("KeyboardInterrupt")
    assert not (folder / "1").exists()


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited for a minute"
        time.sleep(0.05)


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet counts as ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
