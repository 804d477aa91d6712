"""Sweeps: a process per point, a row per point whatever happens, and nothing that leaks from point to point."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from ringkv.harness.records import read_config, read_frames, read_summary
from scripts.app import supervise
from scripts.app.compose import compose_all
from scripts.app.supervise import ChildEnd
from scripts.app.sweep_record import REASONS, ROW_COLUMNS, ROW_METRICS, held
from scripts.app.sweep_resume import reason_of
from scripts.rollout import main
from tests.cli_tools import WandbStub, refusal
from tests.sweep_tools import SWEEP_TINY, Children, gone, rows_of, sweep_json, wait_until

ROOT = Path(__file__).parents[1]


def supervised(program: str, folder: Path, **limits: Any) -> ChildEnd:
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
    assert [row["reason"] for row in rows] == [None, "refused", None, "crashed"]
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
        assert (summary["status"], summary["reason"], summary["error"]) == ("failed", row["reason"], row["error"])
    assert [step["clocks"] for step in read_frames(rows[3]["run_dir"]).rows] == [[0], [1], [2], [3]]

    inits, finishes = stub.calls("init"), stub.calls("finish")
    assert len({init["id"] for init in inits}) == len(inits) == 3
    assert [init["config"]["ring_frames"] for init in inits] == [4, 8, 5]
    assert {init["group"] for init in inits} == {"sweep"}
    assert [(finish["id"], finish["exit_code"]) for finish in finishes] == [
        (init["id"], exit_code) for init, exit_code in zip(inits, (0, 0, 1), strict=True)
    ]
    assert "2 ok, 2 failed" in capsys.readouterr().out


def test_a_sweep_that_is_interrupted_keeps_the_rows_it_has_and_says_of_the_last_one_that_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    Children(monkeypatch, {3: KeyboardInterrupt()})
    assert main(["-m", "ring_frames=2,3,4", *SWEEP_TINY, f"hydra.sweep.dir={tmp_path / 's'}"]) == 1
    assert sweep_json(tmp_path / "s")["finished"] is False
    assert [(row["status"], row["reason"]) for row in rows_of(tmp_path / "s")] == [
        ("ok", None),
        ("failed", "interrupted"),
    ]


def test_a_sweep_without_failures_exits_0_and_gives_each_child_its_config_limits_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    children = Children(monkeypatch)
    folder = tmp_path / "s"
    limits = ["sweep.timeout_s=30", "sweep.memory_gib=0.5"]
    assert main(["-m", "ring_frames=2,3", *SWEEP_TINY, *limits, f"hydra.sweep.dir={folder}"]) == 0
    assert [request["config"]["num_frames"] for request in children.requests] == [6, 9]
    assert children.ran() == [2, 3]
    assert children.logs == [folder / "0" / "output.log", folder / "1" / "output.log"]
    for limit in children.limits:
        assert (limit["timeout_s"], limit["memory_bytes"]) == (30.0, 0.5 * 1024**3)
        assert limit["wanted"]()
    assert sweep_json(folder)["counts"] == {"ok": 2, "failed": 0}
    assert (sweep_json(folder)["launcher"], sweep_json(folder)["note"]) == ("basic", None)


def test_a_second_sweep_in_the_same_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "s"
    folder.mkdir()
    with held(folder):
        assert "a sweep is running there" in refusal(capsys, ["-m", "ring_frames=2,3", f"hydra.sweep.dir={folder}"])
    (folder / "sweep.json").write_text("{}")
    assert main(["-m", "ring_frames=2,3", f"hydra.sweep.dir={folder}"]) == 2
    assert capsys.readouterr().err.startswith(f"error: hydra.sweep.dir={folder}: already holds something")
    assert (folder / "sweep.json").read_text() == "{}"


def test_every_kind_of_failure_is_a_row_with_its_reason_and_a_failed_summary_that_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What is drawn as infeasible must not be mistaken for what went wrong."""
    Children(
        monkeypatch,
        {
            2: ChildEnd(-9, None, 1.0, 1),
            3: ChildEnd(-9, ("out_of_memory", "memory: 5 resident bytes"), 1.0, 5),
            4: ChildEnd(0, None, 1.0, 1),
            5: ChildEnd(1, ("timeout", "timeout: longer"), 1.0, 1),
            6: MemoryError("no room"),
        },
    )
    folder = tmp_path / "s"
    assert main(["-m", "ring_frames=2,3,4,5,6", *SWEEP_TINY, f"hydra.sweep.dir={folder}"]) == 1
    rows = rows_of(folder)
    assert [(row["reason"], row["error"]) for row in rows] == [
        ("crashed", "the process ended with signal SIGKILL; see output.log"),
        ("out_of_memory", "memory: 5 resident bytes"),
        ("crashed", "the process ended with exit code 0; see output.log"),
        ("timeout", "timeout: longer"),
        ("out_of_memory", "MemoryError: no room"),
    ]
    for row in rows:
        assert row["reason"] in REASONS
        summary = read_summary(row["run_dir"])
        assert (summary["status"], summary["reason"], summary["error"]) == ("failed", row["reason"], row["error"])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("OutOfMemoryError: CUDA out of memory", "out_of_memory"),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory", "out_of_memory"),
        ("KeyboardInterrupt: ", "interrupted"),
        ("RuntimeError: step refused: 1 page needed, 0 free", "crashed"),
    ],
)
def test_what_a_child_recorded_tells_the_kind_of_its_failure(error: str, reason: str):
    assert reason_of({"error": error}) == reason
    assert reason_of({"error": error, "reason": "timeout"}) == "timeout", "what its sweep noted goes before"


# -- repeats --------------------------------------------------------------------------------------------------------


def test_repeats_of_one_command_are_points_of_a_sweep_with_seeds_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    children = Children(monkeypatch)
    folder = tmp_path / "s"
    assert main(["ring_frames=2", "repeats=3", "seed=5", *SWEEP_TINY, f"hydra.sweep.dir={folder}"]) == 0
    rows = rows_of(folder)
    assert [row["repeat"] for row in rows] == [0, 1, 2]
    asked = [request["config"] for request in children.requests]
    assert [(config["repeat"], config["seed"], config["repeats"]) for config in asked] == [
        (0, 5, 1),
        (1, 6, 1),
        (2, 7, 1),
    ]
    assert [read_config(row["run_dir"])["repeat"] for row in rows] == [0, 1, 2]
    assert len({row["config_hash"] for row in rows}) == 3

    alone = tmp_path / "alone"  # what a row was asked for gives that point again, by itself
    assert main(["-m", *rows[2]["overrides"], f"hydra.sweep.dir={alone}"]) == 0
    assert rows_of(alone)[0]["config_hash"] == rows[2]["config_hash"]


def test_repeats_that_a_file_asks_for_are_told_in_the_rows_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    Children(monkeypatch)
    folder = tmp_path / "s"
    assert main(["experiment=strategies", "kv=ring", "data=synthetic", f"hydra.sweep.dir={folder}"]) == 0
    assert [row["overrides"][-2:] for row in rows_of(folder)] == [["repeats=1", f"seed={seed}"] for seed in range(3)]


def test_a_sweep_with_repeats_goes_through_its_grid_once_and_then_again():
    composed = compose_all("rollout", ["ring_frames=2,3", "repeats=2"], multirun=True)
    points = [(point.repeat, point.ring_frames) for point in composed.points]
    assert points == [(0, 2), (0, 3), (1, 2), (1, 3)]
    assert composed.added == ("repeat=range(2)",)


# -- nothing but a list ---------------------------------------------------------------------------------------------


def test_a_dry_run_lists_every_point_with_its_memory_and_its_arithmetic_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    children = Children(monkeypatch)
    assert main(["-m", "ring_frames=2,0,3", *SWEEP_TINY, "num_frames=6", "sweep.dry_run=true"]) == 0
    out = capsys.readouterr().out.splitlines()
    # 2 layers x (2 slots + scratch) x 16 tokens x K and V x 2 heads x 8 x 4 bytes = 12 KiB
    assert [line.split()[:4] for line in out if "KiB" in line] == [
        ["0", "ring_frames=2", "12.00", "KiB"],
        ["2", "ring_frames=3", "16.00", "KiB"],
    ]
    assert [line.split()[-1] for line in out if "ring_frames=" in line and "KiB" in line] == ["yes", "yes"]
    assert "1: ring_frames=0: expected an integer >= 1" in out
    assert (children.ran(), list(tmp_path.iterdir())) == ([], [])


def test_a_dry_run_says_what_the_memory_of_a_point_does_not_allow(capsys: pytest.CaptureFixture[str]):
    big = ["kv=full", "num_frames=20000", "sweep.memory_gib=0.001"]
    assert main(["ring_frames=2", *SWEEP_TINY, *big, "sweep.dry_run=true"]) == 0
    assert "sweep.memory_gib=0.001: KV and weights take" in capsys.readouterr().out


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
    assert end.killed_for == ("timeout", "timeout: longer than sweep.timeout_s=1.5")
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
    assert end.killed_for is not None
    assert end.killed_for[0] == "out_of_memory"
    assert "above sweep.memory_gib" in end.killed_for[1]
    assert end.peak_rss_bytes > 150e6
    assert gone(int((tmp_path / "log").read_text()))


def test_a_child_that_nobody_wants_any_more_is_ended(tmp_path: Path):
    end = supervised("import time; time.sleep(600)", tmp_path, wanted=lambda: False)
    assert end.killed_for == ("interrupted", "interrupted: the sweep's process is gone")


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


# -- launchers that are extras ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", ["ray", "submitit", "optuna"])
def test_the_constraints_of_an_extra_differ_from_the_others_only_where_its_packages_ask_for_that(extra: str):
    shared, own = (pins(ROOT / name) for name in ("constraints.txt", f"constraints-{extra}.txt"))
    differing = {name for name in shared.keys() & own.keys() if shared[name] != own[name]}
    assert differing == ({"cloudpickle", "python-dateutil"} if extra == "ray" else set())


def pins(file: Path) -> dict[str, str]:
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in lines)}
