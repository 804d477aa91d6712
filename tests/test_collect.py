"""Any number of runs joined: what is a row, what an older record lacks, and the command that makes a row again."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from ringkv.harness.columns import SUMMARY_COLUMNS, VERSION_KEY
from ringkv.harness.records import FRAME_COLUMNS, RunDir, dumps_strict, read_config, read_summary
from scripts import collect as script
from scripts.app import records_page, schema
from scripts.app.check import effective
from scripts.app.collect import collect
from scripts.app.columns import FACT_COLUMNS, MACHINE_COLUMNS, RUN_COLUMNS, collected_columns, knob_columns
from scripts.app.command import as_value, command_of
from scripts.app.compose import compose_all
from scripts.app.errors import BadInput
from tests.cli_tools import run_tiny

schema.register()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    code, run = run_tiny(tmp_path_factory.mktemp("finished"), "num_sessions=2")
    assert code == 0
    return run


def copied(finished: Path, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copytree(finished, path))


def change(path: Path, **changes: Any) -> None:
    path.write_text(dumps_strict(json.loads(path.read_text()) | changes))


def as_version_0(run: Path) -> None:
    """What a run of the release before this record's version left."""
    for name, without in (
        ("config.json", [VERSION_KEY, "snapshot_every", "rollout"]),
        ("summary.json", [VERSION_KEY, "quality/psnr_db"]),
    ):
        content = json.loads((run / name).read_text())
        (run / name).write_text(json.dumps({key: value for key, value in content.items() if key not in without}))
    rows = [json.loads(line) for line in (run / "frames.jsonl").read_text().splitlines()]
    older = [{key: value for key, value in row.items() if key not in ("checksums", "psnr_db")} for row in rows]
    (run / "frames.jsonl").write_text("".join(json.dumps(row) + "\n" for row in older))
    (run / "segments.json").unlink()


def refusal_of(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    assert script.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


# -- rows -----------------------------------------------------------------------------------------------------------


def test_a_finished_run_is_a_row_with_its_knobs_its_metrics_and_its_machine(finished: Path):
    (row,) = collect([finished])
    summary = read_summary(finished)
    assert (row["run_dir"], row["status"], row["reason"]) == (str(finished), "ok", None)
    assert (row["record_version"], row["missing"], row["segments"], row["steps"]) == (1, [], 1, 6)
    assert (row["ring_frames"], row["kv.strategy"], row["data.name"], row["sigmas"]) == (
        2,
        "ring",
        "synthetic",
        [1, 0.5, 0],
    )
    assert row["throughput/frames_per_s"] == summary["throughput/frames_per_s"] > 0
    assert row["machine/threads"] == 1
    assert row["ring/wraps"] == [2, 1]
    assert set(row) == set(collected_columns())
    assert len(collected_columns()) == len(RUN_COLUMNS) + len([*knob_columns()]) + len(SUMMARY_COLUMNS) - 5 + len(
        FACT_COLUMNS
    ) + len(MACHINE_COLUMNS), "no two of them have one name"


def test_folders_are_walked_and_each_run_is_a_row_once(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("b/10", "b/9", "a", "b/9/wandb/x", "b/replaced/9-0"):
        copied(finished, tmp_path / name)
    with RunDir.create(tmp_path / "plan") as other:  # a record of something that is no rollout
        other.write_config({"kv": {"page_tokens": None}, "strategies": ["ring"]})
        other.write_summary({})
    monkeypatch.chdir(tmp_path)
    rows = collect([tmp_path, "b", tmp_path / "a"])
    assert [row["run_dir"] for row in rows] == [str(tmp_path / name) for name in ("a", "b/9", "b/10")]
    assert collect([tmp_path / "plan"]) == []


def test_what_went_wrong_is_a_row_with_its_reason(finished: Path, tmp_path: Path):
    failed, killed, torn, later = (copied(finished, tmp_path / name) for name in ("a", "b", "c", "d"))
    change(failed / "summary.json", status="failed", error="RuntimeError: on fire", reason="crashed")
    (killed / "summary.json").unlink()
    (torn / "config.json").write_text('{"ring_frames": ')
    change(later / "config.json", **{VERSION_KEY: 2})
    refused = tmp_path / "e"
    with RunDir.create(refused) as run:
        run.write_config(read_config(finished) | {"ring_frames": 0})
        run.write_summary({"reason": "refused"}, error=BadInput("ring_frames=0: expected an integer >= 1"))
    rows = collect([tmp_path])
    assert [(row["status"], row["failure"]) for row in rows] == [
        ("failed", "crashed"),
        ("unfinished", None),
        ("unreadable", None),
        ("unreadable", None),
        ("failed", "refused"),
    ]
    assert rows[0]["reason"] == "RuntimeError: on fire"
    assert rows[1]["reason"] == "no summary: it was killed, or is still running"
    assert rows[2]["reason"].startswith(f"{torn / 'config.json'}: Expecting value")
    assert rows[3]["reason"] == "its record is of version 2; this release reads up to 1"
    assert rows[4]["reason"] == "BadInput: ring_frames=0: expected an integer >= 1"
    assert "ring_frames=0" in rows[4]["command"]
    assert rows[4]["steps"] == 0


def test_the_points_of_a_sweep_are_rows_also_where_there_is_no_folder(finished: Path, tmp_path: Path):
    sweep = tmp_path / "sweep"
    ok, resumed = copied(finished, sweep / "0"), copied(finished, sweep / "1")
    point = {
        "overrides": ["ring_frames=2"],
        "status": "ok",
        "reason": None,
        "error": None,
        "wall_s": 2.5,
        "exit_code": 0,
    }
    lost = {
        "overrides": ["data.path=a b"],
        "status": "failed",
        "reason": "refused",
        "error": "no such file",
    }
    rows = [
        point | {"job": 0, "run_dir": "/elsewhere/0"},
        point | {"job": 1, "run_dir": "/elsewhere/1", "status": "failed", "reason": "interrupted", "wall_s": 1.0},
        point | lost | {"job": 2, "run_dir": "/elsewhere/2"},
    ]
    (sweep / "sweep.json").write_text(json.dumps({"rows": rows}))
    found = collect([tmp_path])
    assert [row["run_dir"] for row in found] == [str(ok), str(resumed), str(sweep / "2")]
    assert [row["job"] for row in found] == [0, 1, 2]
    assert {row["sweep"] for row in found} == {str(sweep)}
    assert [row["status"] for row in found] == ["ok", "ok", "failed"]  # 1 went on by itself afterwards
    assert [row["failure"] for row in found] == [None, None, "refused"]
    assert [row["wall_s"] for row in found] == [2.5, None, 2.5]
    assert found[2]["reason"] == "no such file"
    assert found[2]["command"] == "python scripts/rollout.py 'data.path=a b'"
    assert found[2]["missing"] == ["config.json"]
    assert [row["job"] for row in collect([ok])] == [None], "a point by itself is read without its sweep"


def test_a_record_of_version_0_loads_and_says_what_it_lacks(finished: Path, tmp_path: Path):
    run = copied(finished, tmp_path / "old")
    as_version_0(run)
    (row,) = collect([run])
    assert (row["status"], row["record_version"], row["steps"]) == ("ok", 0, 6)
    assert row["missing"] == [
        "frames.jsonl checksums",
        "frames.jsonl psnr_db",
        "segments.json",
        VERSION_KEY,
        "quality/psnr_db",
        "snapshot_every",
        "rollout.resume",
    ]
    assert row["throughput/frames_per_s"] > 0
    assert row["command"] == collect([finished])[0]["command"]


# -- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("ring_frames=8", "num_sessions=4", "data=pong", "dilation=4", "num_frames=24"),
        ("kv=paged_windowed", "kv.page_tokens=8", "ring_frames=3"),
        ("model=waypoint_360p", "num_frames=20", "sigmas=[1.0,0.5,0.0]"),
        ("model=small", "data.channels=1", "tracking=disabled", "seed=7", "dtype=bfloat16", "kv_dtype=float32"),
        ("data=synthetic", "ring_buckets=4", "target_fps=30.0", "checkpoint=null", "compile=true", "snapshot_every=0"),
    ],
    ids=lambda overrides: " ".join(overrides) or "defaults",
)
def test_the_command_makes_the_same_config_and_is_no_longer_than_it_has_to_be(overrides: tuple[str, ...]):
    (asked,) = compose_all("rollout", ["threads=1", *overrides], multirun=False).points
    config = effective(asked, on_this_machine=False)
    command = command_of(json.loads(dumps_strict(config)))
    assert command is not None
    program, path, *parts = shlex.split(command)
    assert (program, path) == ("python", "scripts/rollout.py")
    (again,) = compose_all("rollout", parts, multirun=False).points
    assert effective(again, on_this_machine=False) == config
    derived = {"num_frames=24"}  # which is what the default stands for
    assert sorted(part for part in parts if part != "threads=1") == sorted({*overrides} - derived)


def test_text_reaches_the_knob_as_it_was_whatever_is_in_it():
    parser = OverridesParser.create()
    for text in (
        "a b",
        "it's",
        "x,y",
        "[1]",
        "null",
        "TRUE",
        "3",
        "a=b",
        "back\\slash",
        "q\\'",
        "end\\",
        "",
        "a/b-c.d",
    ):
        (override,) = parser.parse_overrides([f"data.path={as_value(text)}"])
        assert override.value() == text


def test_there_is_no_command_for_a_config_of_another_release(finished: Path):
    assert command_of(read_config(finished) | {"window": 3}) is None


# -- the file, the table and the script -----------------------------------------------------------------------------


def test_the_parquet_file_has_typed_columns_with_units_and_a_null_for_what_is_not_there(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    copied(finished, tmp_path / "runs" / "0")
    failed = copied(finished, tmp_path / "runs" / "1")
    change(failed / "summary.json", status="failed", error="RuntimeError: on fire", mine=1.5, **{"data/fps": "fast"})
    change(failed / "config.json", ring_frames=3)
    out = tmp_path / "out.parquet"
    assert script.main([str(tmp_path / "runs"), "--out", str(out)]) == 0
    table = pq.read_table(out)
    assert table.column_names == [*collected_columns(), "mine"]
    types = {field.name: str(field.type) for field in table.schema}
    assert [types[name] for name in ("job", "ring_frames", "throughput/frames_per_s", "compile", "command")] == [
        "int64",
        "int64",
        "double",
        "bool",
        "string",
    ]
    assert [types[name] for name in ("ring/wraps", "sigmas", "missing", "mine")] == [
        "list<element: int64>",
        "list<element: double>",
        "list<element: string>",
        "double",
    ]
    assert table.schema.field("latency/frame_ms_p50").metadata[b"unit"] == b"ms"
    first, second = table.to_pylist()
    assert first["ring/wraps"] == [2, 1]
    assert (first["mine"], second["mine"], second["data/fps"]) == (None, 1.5, None)
    printed = capsys.readouterr().out
    assert "ring_frames=3" in printed
    assert "1: failed: RuntimeError: on fire" in printed


def test_bad_input_is_one_line_and_leaves_no_file(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    for argv, says in (
        ([], "the following arguments are required: DIR"),
        (["nowhere"], "nowhere: no such folder; expected one that holds runs"),
        (["file"], "file: no such folder"),
        ([str(finished), "empty"], "empty: holds no rollout"),
        ([str(finished), "--out", "file"], "--out file: is there already; expected another path, or --overwrite"),
        ([str(finished), "--out", "empty"], "--out empty: expected a file in a folder that exists"),
        ([str(finished), "--out", "no/x"], "--out no/x: expected a file in a folder that exists"),
        ([str(finished), "--fast"], "unrecognized arguments: --fast"),
    ):
        assert refusal_of(capsys, argv).startswith(f"error: {says}"), argv
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]
    assert (tmp_path / "file").read_text() == "kept"
    assert script.main([str(finished), "--out", "file", "--overwrite"]) == 0
    assert pq.read_table("file").num_rows == 1


# -- what is documented ---------------------------------------------------------------------------------------------


def test_every_column_that_a_run_writes_is_documented_with_its_type(finished: Path):
    summary = read_summary(finished)
    assert summary.keys() == {**SUMMARY_COLUMNS, **FACT_COLUMNS}.keys()
    assert summary["machine"].keys() == MACHINE_COLUMNS.keys()
    types = {"int": int, "float": (int, float), "text": str, "bool": bool, "object": dict}
    for name, column in {**SUMMARY_COLUMNS, **FACT_COLUMNS}.items():
        expected = types.get(column.kind, list)
        assert summary[name] is None or isinstance(summary[name], expected), name
    rows = [json.loads(line) for line in (finished / "frames.jsonl").read_text().splitlines()]
    for name, column in FRAME_COLUMNS.items():
        assert all(isinstance(row[name], types.get(column.kind, list)) for row in rows), name
    for name, column in {**SUMMARY_COLUMNS, **FRAME_COLUMNS, **RUN_COLUMNS}.items():
        ending = name.rsplit("/", 1)[-1]
        for mark, unit in (("_bytes", "bytes"), ("_ms", "ms"), ("ms_", "ms"), ("_db", "dB"), ("_per_s", "frames/s")):
            assert not (ending.endswith(mark) or (mark == "ms_" and mark in ending)) or column.unit == unit, name


def test_the_page_of_the_records_is_what_the_code_says():
    path = Path(__file__).parents[1] / "docs" / "records.md"
    assert path.read_text() == records_page.page(), "python -m scripts.app.records_page > docs/records.md"
    assert max(len(line) for line in records_page.page().splitlines() if not line.startswith(("|", "    "))) <= 120
    assert "| `psnr_db` | floats | dB | 1 |" in path.read_text()
