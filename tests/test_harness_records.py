"""The files of a run: plain values, strict JSON, one run per directory, rows that are whole or absent."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import MISSING, OmegaConf

from ringkv.harness import columns, records
from ringkv.harness.frames import frame_checksum, psnr_db
from ringkv.harness.records import FRAME_COLUMNS, RunDir, dumps_strict, read_frames, read_summary, to_plain


def frame_row(step: int, **changes: Any) -> dict[str, Any]:
    row = {
        "step": step,
        "phase": "generated",
        "clocks": [step, step],
        "frames": [("a", step), ("b", step)],
        "sessions": 2,
        "latency_ms": 1.5,
        "warmup": False,
        "kv_bytes": 512,
        "kv_in_use_bytes": 256,
        "rss_bytes": 1000,
        "checksums": ["00" * 8, "ff" * 8],
        "psnr_db": [20.5, None],
    }
    return row | changes


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in JSON")

    return json.loads(text, parse_constant=refuse)


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 3


@dataclasses.dataclass
class Inner:
    path: Path
    dtype: torch.dtype


@dataclasses.dataclass
class Outer:
    inner: Inner
    sizes: tuple[int, ...]


def test_a_nested_config_becomes_json_with_interpolations_resolved_and_ints_kept():
    config = OmegaConf.create(
        {
            "ring_frames": 32,
            "kv": {"slots": "${ring_frames}", "name": "ring-${ring_frames}"},
            "sigmas": [1.0, 0.5, "${ring_frames}"],
            "folder": Path("data") / "clips",
            "kv_dtype": torch.bfloat16,
            "none": None,
        },
        flags={"allow_objects": True},
    )
    plain = strict(json.dumps(to_plain(config)))
    assert plain == {
        "ring_frames": 32,
        "kv": {"slots": 32, "name": "ring-32"},
        "sigmas": [1.0, 0.5, 32],
        "folder": "data/clips",
        "kv_dtype": "bfloat16",
        "none": None,
    }
    assert type(plain["ring_frames"]) is int


def test_config_nodes_inside_plain_containers_are_converted_too():
    """``dict(config)`` keeps its groups as config nodes, which JSON refuses."""
    config = OmegaConf.create({"a": 1, "group": {"x": "${a}", "items": [1, 2]}})
    assert to_plain({"outer": dict(config), "list": [config.group]}) == {
        "outer": {"a": 1, "group": {"x": 1, "items": [1, 2]}},
        "list": [{"x": 1, "items": [1, 2]}],
    }


@pytest.mark.parametrize(
    "config",
    [
        OmegaConf.create({"data": {"path": "???"}}),
        OmegaConf.create({"data": {"path": "${other}"}, "other": "???"}),
        {"data": OmegaConf.create({"path": MISSING})},
        {"data": {"path": "???"}},
    ],
    ids=["nested", "by-interpolation", "inside-a-dict", "plain"],
)
def test_a_missing_mandatory_value_is_refused_by_name(config):
    with pytest.raises(ValueError, match=r"path|other") as caught:
        to_plain(config)
    assert "\n" not in str(caught.value)


def test_an_interpolation_to_nowhere_is_refused_by_name():
    with pytest.raises(ValueError, match="slots") as caught:
        to_plain(OmegaConf.create({"kv": {"slots": "${nowhere}"}}))
    assert "\n" not in str(caught.value)


def test_dataclasses_enums_dtypes_devices_and_numpy_become_plain():
    plain = to_plain(
        {
            "outer": Outer(Inner(Path("/a/b"), torch.float16), (1, 2)),
            "color": Color.RED,
            "level": Level.LOW,
            "device": torch.device("cuda:1"),
            "int": np.int64(7),
            "float": np.float32(0.5),
            "bool": np.bool_(True),
            "array": np.arange(4).reshape(2, 2),
            3: "number key",
        }
    )
    assert plain == {
        "outer": {"inner": {"path": "/a/b", "dtype": "float16"}, "sizes": [1, 2]},
        "color": "red",
        "level": 3,
        "device": "cuda:1",
        "int": 7,
        "float": 0.5,
        "bool": True,
        "array": [[0, 1], [2, 3]],
        "3": "number key",
    }
    assert [type(plain[key]) for key in ("level", "int", "float", "bool")] == [int, int, float, bool]


def test_a_value_without_a_plain_form_is_refused_by_key():
    with pytest.raises(ValueError, match=r"a\.b\[1\]: object has no plain form"):
        to_plain({"a": {"b": [1, object()]}})


def test_numbers_that_are_not_finite_become_null_and_text_that_says_nan_stays():
    value = {"a": float("nan"), "b": [np.float64("inf"), -float("inf"), 1.0], "NaN-guard": "NaN", "c": {"d": np.nan}}
    assert strict(dumps_strict(value)) == {
        "a": None,
        "b": [None, None, 1.0],
        "NaN-guard": "NaN",
        "c": {"d": None},
    }


def test_records_import_neither_torch_nor_omegaconf_nor_wandb():
    code = "import sys, ringkv.harness.records; print([m for m in ('torch', 'omegaconf', 'wandb') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_run_writes_its_config_rows_and_summary_and_they_read_back(tmp_path: Path):
    with RunDir.create(tmp_path / "deep" / "run") as run:
        run.write_config({"ring_frames": 32})
        for step in range(3):
            run.write_frame(frame_row(step, latency_ms=float("nan") if step == 0 else 2.0))
        run.write_summary({"throughput/frames_per_s": float("nan"), "machine": {"cpu": "NaN-guard"}})
    assert records.read_config(run.path) == {"ring_frames": 32}
    rows, incomplete = read_frames(run.path)
    assert not incomplete
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["latency_ms"] for row in rows] == [None, 2.0, 2.0]
    assert rows[1]["frames"] == [["a", 1], ["b", 1]]
    assert list(rows[0]) == list(FRAME_COLUMNS)
    summary = read_summary(run.path)
    assert summary["status"] == "ok"
    assert summary["error"] is None
    assert summary["throughput/frames_per_s"] is None
    assert summary["machine"] == {"cpu": "NaN-guard"}
    assert sorted(path.name for path in run.path.iterdir()) == ["config.json", "frames.jsonl", "summary.json"]


@pytest.mark.parametrize("name", [records.CONFIG_FILE, records.FRAMES_FILE, records.SUMMARY_FILE])
def test_a_directory_that_holds_any_part_of_a_run_is_refused_and_left_alone(tmp_path: Path, name: str):
    (tmp_path / name).write_text("kept")
    with pytest.raises(ValueError, match="already holds a run") as caught:
        RunDir.create(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "kept"


def test_a_directory_with_other_files_is_taken(tmp_path: Path):
    (tmp_path / ".hydra").mkdir()
    RunDir.create(tmp_path).close()
    assert (tmp_path / records.FRAMES_FILE).exists()


def test_a_file_in_the_way_is_refused_in_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match="a file is in the way"):
            RunDir.create(path)


def test_a_claim_made_between_the_check_and_the_creation_is_still_refused(tmp_path: Path, monkeypatch):
    RunDir.create(tmp_path).close()
    monkeypatch.setattr(Path, "exists", lambda path: False)
    with pytest.raises(ValueError, match="already holds a run"):
        RunDir.create(tmp_path)


def test_of_many_claims_of_one_path_at_the_same_time_exactly_one_wins(tmp_path: Path):
    for attempt in range(20):
        barrier = threading.Barrier(4)
        outcomes: list[str] = []

        def claim(path: Path, barrier: threading.Barrier, outcomes: list[str]) -> None:
            barrier.wait()
            try:
                RunDir.create(path).close()
                outcomes.append("won")
            except ValueError:
                outcomes.append("refused")

        path = tmp_path / str(attempt) / "run"
        threads = [threading.Thread(target=claim, args=(path, barrier, outcomes)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == ["refused"] * 3 + ["won"]


def test_two_processes_that_start_together_never_share_a_directory(tmp_path: Path):
    code = f"""
from ringkv.harness.records import RunDir
try:
    RunDir.create({str(tmp_path / "run")!r})
    print("won")
except ValueError as error:
    print("refused")
"""
    children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert sorted(child.communicate()[0].strip() for child in children) == ["refused", "won"]


def test_a_row_with_unknown_or_missing_columns_is_refused_before_it_is_written(tmp_path: Path):
    with RunDir.create(tmp_path / "run") as run:
        with pytest.raises(ValueError, match=r"unknown columns \['latency'\]"):
            run.write_frame(frame_row(0, latency=1.0))
        incomplete = frame_row(0)
        del incomplete["rss_bytes"]
        with pytest.raises(ValueError, match=r"missing columns \['rss_bytes'\]"):
            run.write_frame(incomplete)
        run.write_frame(frame_row(0))
    assert len(read_frames(run.path).rows) == 1


def test_a_row_that_the_disk_took_only_in_part_is_cut_off_again(tmp_path: Path, monkeypatch):
    with RunDir.create(tmp_path / "run") as run:
        run.write_frame(frame_row(0))
        real_write = os.write
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda fd, data: real_write(fd, data[: len(data) // 2]))
            with pytest.raises(OSError, match="disk full"):
                run.write_frame(frame_row(1))
        run.write_frame(frame_row(2))
    rows, incomplete = read_frames(run.path)
    assert [row["step"] for row in rows] == [0, 2]
    assert not incomplete


def test_a_last_line_that_was_cut_off_is_left_out_and_reported(tmp_path: Path):
    with RunDir.create(tmp_path / "run") as run:
        run.write_frame(frame_row(0))
        run.write_frame(frame_row(1))
    path = run.path / records.FRAMES_FILE
    whole = path.read_bytes()
    for cut in (1, 20):
        path.write_bytes(whole[:-cut])
        rows, incomplete = read_frames(run.path)
        assert [row["step"] for row in rows] == [0]
        assert incomplete


def test_a_damaged_line_in_the_middle_is_refused_with_its_number(tmp_path: Path):
    (tmp_path / records.FRAMES_FILE).write_text('{"step": 0}\n{"step": NaN}\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2: NaN is not JSON"):
        read_frames(tmp_path)


def test_no_row_is_taken_after_the_run_was_closed(tmp_path: Path):
    run = RunDir.create(tmp_path / "run")
    run.close()
    run.close()
    with pytest.raises(ValueError, match="closed"):
        run.write_frame(frame_row(0))


def test_a_summary_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch):
    with RunDir.create(tmp_path / "run") as run:
        run.write_summary({"steps/measured": 1})
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space")))
            with pytest.raises(OSError, match="no space"):
                run.write_summary({"steps/measured": 2})
    assert read_summary(run.path)["steps/measured"] == 1
    assert sorted(path.name for path in run.path.iterdir()) == ["frames.jsonl", "summary.json"]


def test_an_exception_inside_a_run_leaves_a_failed_summary_and_passes_through(tmp_path: Path):
    def fail_at_frame_3() -> None:
        with RunDir.create(tmp_path / "run") as run:
            run.write_frame(frame_row(0))
            raise RuntimeError("frame 3\nbroke")

    with pytest.raises(RuntimeError, match="frame 3"):
        fail_at_frame_3()
    summary = read_summary(tmp_path / "run")
    assert summary["status"] == "failed"
    assert summary["error"] == "RuntimeError: frame 3 broke"
    assert "in fail_at_frame_3" in summary["traceback"]
    assert len(read_frames(tmp_path / "run").rows) == 1


def test_a_failed_summary_with_its_metrics_is_not_replaced_on_the_way_out(tmp_path: Path):
    def fail_with_metrics() -> None:
        with RunDir.create(tmp_path / "run") as run:
            error = KeyError("x")
            run.write_summary({"steps/measured": 3}, error=error)
            raise error

    with pytest.raises(KeyError):
        fail_with_metrics()
    summary = read_summary(tmp_path / "run")
    assert (summary["status"], summary["steps/measured"]) == ("failed", 3)


def test_a_run_that_ended_in_the_middle_has_no_summary(tmp_path: Path):
    with RunDir.create(tmp_path / "run") as run:
        run.write_config({})
    assert not (run.path / records.SUMMARY_FILE).exists()


# -- an unfinished run, opened again --------------------------------------------------------------------------------


def unfinished(path: Path, rows: int = 2) -> Path:
    with RunDir.create(path) as run:
        run.write_config({"ring_frames": 32})
        for step in range(rows):
            run.write_frame(frame_row(step))
        run.write_summary({}, error=RuntimeError("stopped"))
    return path


def test_a_reopened_run_is_as_it_was_until_it_is_continued_and_takes_rows_after_its_last_whole_line(tmp_path: Path):
    path = unfinished(tmp_path / "run")
    with open(path / records.FRAMES_FILE, "ab") as file:
        file.write(b'{"step": 2, "ph')
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with RunDir.reopen(path) as run:
        assert run.resumes
        assert not run.begun
        assert {file.name: file.read_bytes() for file in path.iterdir()} == before
        run.continue_run()
        assert not (path / records.SUMMARY_FILE).exists()
        run.write_frame(frame_row(2))
        run.flush_frames()
    rows, incomplete = read_frames(path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert not incomplete
    assert (path / records.FRAMES_FILE).read_bytes().startswith(before[records.FRAMES_FILE][:-15])


def test_a_refusal_after_reopening_leaves_the_old_summary(tmp_path: Path):
    path = unfinished(tmp_path / "run")
    summary = (path / records.SUMMARY_FILE).read_bytes()
    with pytest.raises(ValueError, match="other weights"), RunDir.reopen(path):
        raise ValueError("other weights")
    assert (path / records.SUMMARY_FILE).read_bytes() == summary


def test_only_one_holds_a_run_at_a_time_and_a_closed_one_is_free(tmp_path: Path):
    path = tmp_path / "run"
    with RunDir.create(path) as run:
        run.write_config({})
        for _ in range(2):
            with pytest.raises(ValueError, match="a living process is running it"):
                RunDir.reopen(path)
        assert not records.can_resume(path)
    assert records.can_resume(path)
    with RunDir.reopen(path), pytest.raises(ValueError, match="a living process is running it"):
        RunDir.reopen(path)
    RunDir.reopen(path).close()


def test_the_lock_of_a_killed_process_is_free_and_its_last_line_is_cut(tmp_path: Path):
    code = f"""
import os, signal
from ringkv.harness.records import RunDir
run = RunDir.create({str(tmp_path / "run")!r})
run.write_config({{}})
os.write(run._frames_fd, b'{{"step": 0}}\\n{{"st')
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    with RunDir.reopen(tmp_path / "run") as run:
        run.continue_run()
    assert read_frames(tmp_path / "run") == ([{"step": 0}], False)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({records.SUMMARY_FILE: '{"status": "ok"}'}, "this run is finished"),
        ({records.CONFIG_FILE: "{}"}, "of version 0, without checksums"),
        ({records.CONFIG_FILE: '{"record/version": 2}'}, "of version 2; this release reads up to 1"),
        ({records.CONFIG_FILE: '{"record/version": true}'}, "expected an integer >= 0"),
        ({records.CONFIG_FILE: None}, "config.json missing"),
        ({records.FRAMES_FILE: None}, "frames.jsonl missing"),
    ],
    ids=["finished", "old", "later", "no-version", "no-config", "no-frames"],
)
def test_what_cannot_go_on_is_refused_in_one_line_and_not_held(tmp_path: Path, change: dict[str, Any], says: str):
    path = unfinished(tmp_path / "run")
    for name, text in change.items():
        (path / name).unlink() if text is None else (path / name).write_text(text)
    assert not records.can_resume(path)
    for _ in range(2):
        with pytest.raises(ValueError, match=says) as caught:
            RunDir.reopen(path)
        assert "\n" not in str(caught.value)


def test_config_and_summary_carry_the_version_and_the_config_reads_back_without_it(tmp_path: Path):
    path = unfinished(tmp_path / "run")
    assert strict((path / records.CONFIG_FILE).read_text())["record/version"] == records.RECORD_VERSION == 1
    assert records.read_config(path) == {"ring_frames": 32}
    assert records.read_version(path) == read_summary(path)["record/version"] == 1
    (path / records.CONFIG_FILE).write_text('{"ring_frames": 32}')
    assert records.read_version(path) == 0


def test_rows_of_an_older_version_load_and_what_they_lack_is_known_by_name(tmp_path: Path):
    old = {key: value for key, value in frame_row(0).items() if key not in ("checksums", "psnr_db")}
    (tmp_path / records.FRAMES_FILE).write_text(json.dumps(old) + "\n")
    (row,) = read_frames(tmp_path).rows
    assert row["step"] == 0
    assert columns.missing_columns(FRAME_COLUMNS, 0) == ["checksums", "psnr_db"]
    assert FRAME_COLUMNS.keys() - row.keys() == {"checksums", "psnr_db"}
    assert columns.missing_columns(FRAME_COLUMNS, 1) == []


def test_segments_are_a_strict_list_and_none_where_there_is_no_file(tmp_path: Path):
    with RunDir.create(tmp_path) as run:
        assert records.read_segments(tmp_path) == []
        run.write_segments([{"segment": 0}, {"segment": 1}])
    assert records.read_segments(tmp_path) == [{"segment": 0}, {"segment": 1}]
    (tmp_path / records.SEGMENTS_FILE).write_text("{}")
    with pytest.raises(ValueError, match="expected a JSON list"):
        records.read_segments(tmp_path)


# -- pixels ---------------------------------------------------------------------------------------------------------


def test_the_checksum_of_a_frame_is_the_blake2b_of_its_bytes_row_by_row_whatever_its_strides():
    frame = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    expected = hashlib.blake2b(bytes(range(24)), digest_size=8).hexdigest()
    assert frame_checksum(frame) == frame_checksum(np.asfortranarray(frame)) == expected
    frame[1, 3, 2] ^= 1
    assert frame_checksum(frame) != expected


def test_psnr_is_in_decibels_of_eight_bits_and_null_between_equal_frames():
    black, grey, white = (np.full((2, 2, 3), value, np.uint8) for value in (0, 51, 255))
    assert psnr_db(white, black) == 0.0
    assert psnr_db(black, grey) == pytest.approx(10 * math.log10(25))  # an error of a fifth of the peak
    assert psnr_db(grey, black) == psnr_db(black, grey)
    assert psnr_db(grey, grey) is None
    off_by_one = grey.copy()
    off_by_one[0, 0, 0] += 1
    assert psnr_db(off_by_one, grey) == pytest.approx(10 * math.log10(255**2 * 12))
