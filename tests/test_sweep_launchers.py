"""Sweeps through each of Hydra's launchers, and what is left when one is killed. Real children: slow."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet
import pytest
from omegaconf import OmegaConf

from ringkv.harness.records import read_config, read_frames, read_summary
from scripts import collect, report
from scripts.rollout import main
from tests.sweep_tools import SWEEP_TINY, gone, rows_of, sweep_json, wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
ROLLOUT = (*SWEEP_TINY, "snapshot_every=2", "tracking=disabled")
TWELVE = ("num_frames=range(2,14)", "ring_frames=2", "kv=paged", "kv.num_pages=12", *ROLLOUT)
"""Two frames are refused, as both are context; the thirteenth finds no page in a pool of twelve."""

_VARIES = re.compile(r"latency|/ms|_per_s$|wall_s|rss|started_at|run_dir|traceback|machine|group$")


def what_is_the_same(value: Any) -> Any:
    """The value without what depends on time, on place and on the memory of the process."""
    if isinstance(value, dict):
        return {key: what_is_the_same(item) for key, item in value.items() if not _VARIES.search(key)}
    return [what_is_the_same(item) for item in value] if isinstance(value, list) else value


def records_of(folder: Path) -> list[Any]:
    """Of each point its row, its config, its frames and its summary."""
    return [
        what_is_the_same([row, read_config(run), read_frames(run).rows, read_summary(run)])
        for row in rows_of(folder)
        for run in [folder / str(row["job"])]
    ]


@pytest.fixture(scope="module")
def basic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The twelve points through Hydra's own launcher."""
    folder = tmp_path_factory.mktemp("basic") / "s"
    assert main(["-m", *TWELVE, f"hydra.sweep.dir={folder}"]) == 1
    return folder


# -- on this machine ------------------------------------------------------------------------------------------------


def test_of_twelve_points_one_is_infeasible_one_crashes_and_the_others_are_whole(basic: Path):
    rows = rows_of(basic)
    assert [row["reason"] for row in rows] == ["refused", *[None] * 10, "crashed"]
    assert [row["steps"] for row in rows] == [0, *range(3, 13), 12]
    assert "context_frames=2: expected fewer than num_frames=2" in rows[0]["error"]
    assert "needs 13 pages" in rows[11]["error"]
    assert (sweep_json(basic)["counts"], sweep_json(basic)["note"]) == ({"ok": 10, "failed": 2}, None)


def test_points_side_by_side_leave_the_same_records_and_their_times_are_said_not_to_compare(
    basic: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    assert main(["-m", "hydra/launcher=joblib", *TWELVE, f"hydra.sweep.dir={tmp_path / 's'}"]) == 1
    assert records_of(tmp_path / "s") == records_of(basic)
    assert "hydra/launcher=joblib: points run side by side" in sweep_json(tmp_path / "s")["note"]
    assert "10 ok, 2 failed" in capfd.readouterr().out


def test_a_sweep_that_was_killed_half_way_is_resumed_collected_and_reported(basic: Path, tmp_path: Path):
    """SIGKILL, which nobody can handle: neither children nor workers outlive the sweep's process for long.

    The launcher may be another one afterwards.
    """
    folder = tmp_path / "s"
    command = [sys.executable, str(ROOT / "scripts" / "rollout.py"), "-m", "hydra/launcher=joblib", *TWELVE]
    parent = subprocess.Popen([*command, f"hydra.sweep.dir={folder}"], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: (folder / "sweep.json").exists() and len(rows_of(folder)) >= 5, seconds=300)
        family = psutil.Process(parent.pid).children(recursive=True)
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: all(gone(process.pid) for process in family))
    assert sweep_json(folder)["finished"] is False
    done = {row["job"]: row for row in rows_of(folder) if row["status"] == "ok"}
    assert 3 <= len(done) < 10

    assert main(["-m", *TWELVE, f"sweep.resume={folder}"]) == 1
    rows = rows_of(folder)
    assert {job: rows[job] for job in done} == done, "what was done is as it was, times included"
    assert records_of(folder) == records_of(basic)
    assert sweep_json(folder)["finished"] is True

    table = tmp_path / "runs.parquet"
    assert collect.main([str(folder), "--out", str(table)]) == 0
    collected = pyarrow.parquet.read_table(table).to_pylist()
    assert [row["status"] for row in collected] == [row["status"] for row in rows]
    assert [row["failure"] for row in collected] == [row["reason"] for row in rows]
    assert report.main([str(folder), f"out={tmp_path / 'report'}", "tracking=disabled"]) == 0
    assert "refused" in (tmp_path / "report" / "report.html").read_text()


# -- with the extras, in environments of their own --------------------------------------------------------------------


@contextlib.contextmanager
def environment(folder: Path, extra: str) -> Iterator[Path]:
    """The Python of a new environment with this project and one extra, as its constraints file has them.

    It is gone afterwards: pytest keeps the folders of its last runs, and each environment takes more than a gigabyte.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"][extra]]
    program = folder / "bin" / "python"
    constraints = str(ROOT / f"constraints-{extra}.txt")
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([program, "-m", "pip", "install", "--quiet", "--constraint", constraints, *wanted], check=True)
        subprocess.run([program, "-m", "pip", "check"], check=True)
        # In place of pip install --editable, which would rewrite the checkout's metadata while other tests read it.
        (site,) = (folder / "lib").glob("python*/site-packages")
        (site / "ringkv.pth").write_text(f"{ROOT}\n")
        yield program
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_there(program: Path, *overrides: str) -> str:
    """Run a sweep with another Python; what it prints."""
    command = [program, str(ROOT / "scripts" / "rollout.py"), "-m", *overrides]
    done = subprocess.run(command, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("extra", "launcher"), [("ray", "ray"), ("submitit", "submitit_local")])
def test_two_points_run_through_a_launcher_for_more_machines_than_this_one(
    extra: str, launcher: str, basic: Path, tmp_path: Path
):
    two = [f"hydra/launcher={launcher}", *(override.replace("range(2,14)", "3,4") for override in TWELVE)]
    folder = tmp_path / "s"
    with environment(tmp_path / "environment", extra) as program:
        assert "2 ok, 0 failed" in run_there(program, *two, f"hydra.sweep.dir={folder}")
        rows = rows_of(folder)
        assert "2 ok, 0 failed" in run_there(program, *two, f"sweep.resume={folder}")
    assert rows_of(folder) == rows, "nothing ran again"
    expected = [[row | {"job": row["job"] - 1}, *others] for row, *others in records_of(basic)[1:3]]
    assert records_of(folder) == expected
    assert sweep_json(folder)["launcher"] == launcher


def test_an_optimiser_looks_for_points_that_are_fast_and_small_and_takes_failed_ones_for_what_they_are(tmp_path: Path):
    folder = tmp_path / "s"
    search = ["ring_frames=choice(2,4)", "tokens_per_frame=choice(16,50)", "kv=choice(ring,shift)", "num_frames=6"]
    quick = [override for override in ROLLOUT if not override.startswith("tokens_per_frame")]
    command = [str(ROOT / "scripts" / "rollout.py"), "-m", "experiment=pareto", *quick, *search]
    with environment(tmp_path / "environment", "optuna") as program:
        done = subprocess.run([program, *command, "hydra.sweeper.n_trials=6", f"hydra.sweep.dir={folder}"])
    rows = rows_of(folder)
    assert [row["job"] for row in rows] == list(range(6))
    assert {row["reason"] for row in rows} == {None, "refused"}
    assert done.returncode == 1
    front = OmegaConf.load(folder / "optimization_results.yaml").solutions
    measured = [
        (row["throughput/frames_per_s"], row["memory/kv_bytes"] / 2**20) for row in rows if row["status"] == "ok"
    ]
    best = [
        point for point in measured if not any(o != point and o[0] >= point[0] and o[1] <= point[1] for o in measured)
    ]
    assert sorted(tuple(solution["values"]) for solution in front) == sorted(best)
