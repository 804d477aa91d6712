"""A sweep that is resumed: what is done is kept, everything else runs again, and nothing is mixed or lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ringkv.harness.records import FRAMES_FILE, SUMMARY_FILE, RunDir, read_summary
from scripts.app import sweep_resume
from scripts.app.errors import BadInput
from scripts.app.schema import RolloutConfig
from scripts.app.sweep_record import begin, hash_config, store
from scripts.rollout import main
from tests.cli_tools import refusal
from tests.sweep_tools import SWEEP_TINY, Children, rows_of, sweep_json


def sweep(ring_frames: str, *overrides: str) -> int:
    return main(["-m", f"ring_frames={ring_frames}", *SWEEP_TINY, *overrides])


def minimal_config() -> RolloutConfig:
    config = RolloutConfig()
    config.kv.strategy = config.model.preset = config.data.name = config.tracking.mode = "given"
    return config


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_resumed_sweep_runs_only_what_failed_and_keeps_the_rows_and_folders_of_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Point 0 is done, 1 is refused, 2 crashed; a value is added; the folder is named from another launch folder."""
    monkeypatch.chdir(tmp_path)
    children = Children(monkeypatch, {3: RuntimeError("the pool is full")})
    assert sweep("2,0,3", "hydra.sweep.dir=s") == 1
    assert children.ran() == [2, 3]
    before, kept = rows_of(tmp_path / "s"), bytes_of(tmp_path / "s" / "0")
    crashed, refused = bytes_of(tmp_path / "s" / "2"), bytes_of(tmp_path / "s" / "1")

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    children.ends.clear()
    assert sweep("2,0,3,4", "sweep.resume=../s") == 1
    assert children.ran() == [3, 4]
    rows = rows_of(tmp_path / "s")
    assert rows[0] == before[0]
    assert [row["status"] for row in rows] == ["ok", "failed", "ok", "ok"]
    assert not any("sweep.resume" in override for row in rows for override in row["overrides"])
    assert bytes_of(tmp_path / "s" / "0") == kept
    assert bytes_of(tmp_path / "s" / "1") == refused
    assert bytes_of(tmp_path / "s" / "replaced" / "2-0") == crashed
    assert sweep_json(tmp_path / "s")["finished"] is True
    assert list((tmp_path / "elsewhere").iterdir()) == []

    capsys.readouterr()
    assert sweep("2,0,3,4", "sweep.resume=../s", "sweep.dry_run=true") == 0
    verdicts = [
        line.split()[-1] for line in capsys.readouterr().out.splitlines() if "ring_frames=" in line and "iB" in line
    ]
    assert verdicts == ["done", "done", "done"]


def test_points_under_another_config_or_another_source_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "s"
    children = Children(monkeypatch)
    assert sweep("2", f"hydra.sweep.dir={folder}") == 0
    old = bytes_of(folder / "0")
    assert sweep("2", f"sweep.resume={folder}", "seed=1") == 0
    assert children.ran() == [2, 2]
    assert bytes_of(folder / "replaced" / "0-0") == old
    children.source = "other"
    assert sweep("2", f"sweep.resume={folder}", "seed=1") == 0
    assert children.ran() == [2]
    assert (folder / "replaced" / "0-1").is_dir()


def test_a_point_is_done_only_if_its_folder_holds_the_record_that_its_row_speaks_of(tmp_path: Path):
    config = minimal_config()
    with RunDir.create(tmp_path / "0") as run_dir:
        run_dir.write_config(config)
        run_dir.write_summary({})
    row = {"status": "ok", "config_hash": hash_config(config), "source_hash": "s"}
    assert sweep_resume.is_done(row, row["config_hash"], "s", tmp_path / "0")
    assert not sweep_resume.is_done(row, row["config_hash"], "t", tmp_path / "0")
    assert not sweep_resume.is_done(row, "other", "s", tmp_path / "0")
    assert not sweep_resume.is_done(row | {"status": "failed"}, row["config_hash"], "s", tmp_path / "0")
    (tmp_path / "0" / "config.json").write_text('{"ring_frames": 9}')
    assert not sweep_resume.is_done(row, row["config_hash"], "s", tmp_path / "0")
    (tmp_path / "0" / SUMMARY_FILE).unlink()
    assert not sweep_resume.is_done(row, row["config_hash"], "s", tmp_path / "0")


def test_an_interrupted_point_goes_on_in_its_folder_and_any_other_failure_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "s"
    children = Children(monkeypatch, {2: KeyboardInterrupt()})
    assert sweep("2,3", f"hydra.sweep.dir={folder}") == 1
    children.requests.clear()
    children.ends.clear()
    assert sweep("2,3", f"sweep.resume={folder}") == 0
    assert [request["continues"] for request in children.requests] == [True, False]
    assert not (folder / "replaced").exists()
    assert (folder / "0" / FRAMES_FILE).exists()
    assert read_summary(folder / "0")["status"] == "ok"


def test_a_point_that_a_living_process_runs_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The children of a sweep that was killed need a moment to end; one that does not is another machine's."""
    monkeypatch.setattr(sweep_resume, "_END_S", 0.2)
    with RunDir.create(tmp_path / "0"):
        with pytest.raises(BadInput, match="a living process is running it"):
            sweep_resume.make_room(tmp_path / "0", tmp_path)
        with pytest.raises(BadInput, match="a living process is running it"):
            sweep_resume.can_go_on(tmp_path / "0", {})
    sweep_resume.make_room(tmp_path / "0", tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["replaced", "0-0", FRAMES_FILE]


def test_the_hash_of_a_config_covers_what_the_frames_depend_on_and_not_where_they_are_kept():
    config = minimal_config()
    before = hash_config(config)
    config.sweep.timeout_s, config.tracking.group, config.data.folder = 1.0, "other", "elsewhere"
    assert hash_config(config) == before
    config.seed = 1
    assert hash_config(config) != before


def test_rows_that_are_stored_in_any_order_are_sorted_and_replaced(tmp_path: Path):
    begin(tmp_path, launcher="joblib", note="side by side", rows={})
    for job, status in ((2, "ok"), (0, "failed"), (1, "ok"), (0, "ok")):
        store(tmp_path, {"job": job, "status": status})
    content = sweep_json(tmp_path)
    assert [row["job"] for row in content["rows"]] == [0, 1, 2]
    assert (content["finished"], content["counts"]) == (False, {"ok": 3, "failed": 0})
    begin(tmp_path, launcher="basic", note=None, rows={})
    assert sweep_json(tmp_path)["note"] == "side by side", "it is true of the rows that were kept"


@pytest.mark.parametrize(
    ("argv", "begins", "says"),
    [
        (["sweep.resume=s"], "sweep.resume=s: a sweep needs -m", ""),
        (["-m", "ring_frames=2,3", "sweep.resume=s"], "sweep.resume=s: no sweep.json", "a sweep's folder"),
        (["-m", "ring_frames=2,3", "sweep.resume=s", "hydra.sweep.dir=t"], "hydra.sweep.dir=t: ", "one of them"),
        (["-m", "ring_frames=2,3", "sweep.dry_run=true,false"], "sweep.dry_run=true,false: ", "one value"),
        (["-m", "ring_frames=2,3", "repeats=1,2"], "repeats=1,2: ", "one value"),
        (["repeats=0"], "repeats=0: ", "an integer >= 1"),
        (["repeats=2", "repeat=1"], "repeat=1: repeats=2 numbers the points", "one of them"),
        (["-m", "repeats=2", "seed=1,2"], "seed=1,2: repeats=2 gives each point its seed", "the first"),
        (["-m", "ring_frames=2,3", "hydra/launcher=slurm"], "hydra/launcher=slurm: ", "one of basic"),
        (["-m", "experiment=pareto"], "hydra/sweeper=optuna: not installed", "pip install -c constraints-optuna.txt"),
        (["-m", "ring_frames=2,3", "hydra/launcher=ray"], "hydra/launcher=ray: not installed", "-e '.[ray]'"),
    ],
)
def test_what_a_sweep_cannot_be_asked_for_is_refused_in_one_line(
    argv: list[str],
    begins: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[Any],
):
    monkeypatch.chdir(tmp_path)
    line = refusal(capsys, argv)
    assert line.startswith(f"error: {begins}")
    assert says in line
    assert list(tmp_path.iterdir()) == []
