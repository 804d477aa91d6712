"""A run that stopped goes on in its own folder, and ends as if it had never stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringkv.harness.columns import TIMED_COLUMNS, VERSION_KEY
from ringkv.harness.records import RunDir, read_config, read_frames, read_segments, read_summary
from ringkv.runner import FrameResult, StepRunner
from scripts.app import job, resume
from scripts.app.rollout import Rollout
from scripts.app.supervise import ChildEnd
from scripts.rollout import main
from tests.cli_tools import TINY, WandbStub, refusal, run_tiny
from tests.wandb_reader import read_offline_run

TEN = ("num_frames=10", "snapshot_every=5")
TIMED_KEYS = ("latency/", "throughput/", "warmup/ms", "context/ms", "compile/", "memory/peak_rss_bytes", "machine")


def save_pixels(rollout: Rollout, folder: Path) -> None:
    """In the place of video and pictures, which take a second a run."""
    np.save(folder / "pixels.npy", np.stack([np.stack(shown) for shown in rollout.frames.values()]))
    for name in ("rollout.mp4", "strip.png"):
        (folder / name).write_bytes(b"")


@pytest.fixture
def real_media() -> None:
    """Asks for video and pictures as users get them."""


@pytest.fixture(autouse=True)
def media(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "real_media" not in request.fixturenames:
        monkeypatch.setattr(job.report, "write_media", save_pixels)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of ``TEN`` that never stopped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job.report, "write_media", save_pixels)
        code, run = run_tiny(tmp_path_factory.mktemp("whole"), *TEN)
    assert code == 0
    return run


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of ``TEN`` that stopped after frame 6; to be copied."""
    with pytest.MonkeyPatch.context() as patch:
        return stopped(tmp_path_factory.mktemp("stopped"), patch, 7)


@pytest.fixture
def run(stopped_once: Path, tmp_path: Path) -> Path:
    """A copy of ``stopped_once``."""
    return Path(shutil.copytree(stopped_once, tmp_path / "run"))


def stop_before(monkeypatch: pytest.MonkeyPatch, runner: type, step: int) -> None:
    """Make step number ``step`` of one run, from 0, raise; later steps do not."""
    original, done = runner.step, iter(range(1000))

    def failing(self: Any, *arguments: Any) -> list[FrameResult]:
        if next(done) == step:
            raise RuntimeError("stopped")
        return original(self, *arguments)

    monkeypatch.setattr(runner, "step", failing)


def stopped(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: int, *overrides: str, runner: type = StepRunner
) -> Path:
    """A run of ``TEN`` that failed at step ``step``."""
    with monkeypatch.context() as patch:
        stop_before(patch, runner, step)
        code, run = run_tiny(folder, *TEN, *overrides)
    assert code == 1
    assert len(read_frames(run).rows) == step
    return run


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_same_result(resumed: Path, whole: Path) -> None:
    """Everything but times."""
    rows = [read_frames(run) for run in (resumed, whole)]
    assert not any(incomplete for _, incomplete in rows)
    untimed = [[{k: v for k, v in row.items() if k not in TIMED_COLUMNS} for row in found.rows] for found in rows]
    assert untimed[0] == untimed[1]
    summaries = [
        {k: v for k, v in read_summary(run).items() if not k.startswith(TIMED_KEYS)} for run in (resumed, whole)
    ]
    assert summaries[0] == summaries[1]
    assert summaries[0]["status"] == "ok"
    assert read_summary(resumed).keys() == read_summary(whole).keys()
    for name in ("rollout.mp4", "strip.png", "pixels.npy"):
        if (whole / name).exists():
            assert (resumed / name).read_bytes() == (whole / name).read_bytes(), name
    files = [sorted(path.name for path in run.iterdir() if path.is_file()) for run in (resumed, whole)]
    assert files[0] == files[1]
    assert not (resumed / "snapshots").exists()


def test_a_run_that_stopped_after_frame_6_goes_on_from_its_snapshot_at_5_and_logs_each_frame_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wandb: WandbStub,
    real_media: None,
    capsys: pytest.CaptureFixture[str],
):
    _, whole = run_tiny(tmp_path / "whole", *TEN, "tracking=offline", "num_sessions=2")
    wandb.calls_file.unlink()
    run = stopped(tmp_path, monkeypatch, 7, "tracking=offline", "num_sessions=2")
    assert sorted(path.name for path in (run / "snapshots").iterdir()) == ["frames-00000005.npy", "step-00000005"]
    assert [path.name for path in sorted((run / "snapshots" / "step-00000005").iterdir())] == [
        "session-0.safetensors",
        "session-1.safetensors",
        "snapshot.json",
    ]
    made: list[list[tuple[str, int]]] = []
    original = StepRunner.step

    def watched(self: StepRunner, *arguments: Any) -> list[FrameResult]:
        results = original(self, *arguments)
        made.append([(result.rid, result.frame) for result in results])
        return results

    monkeypatch.setattr(StepRunner, "step", watched)
    capsys.readouterr()
    assert main([f"rollout.resume={run}"]) == 0
    assert "resumed from frame 5; 2 logged frames are made again and compared" in capsys.readouterr().out
    own = [frames for frames in made if frames[0][0].startswith("session")]
    assert own == [[("session-0", frame), ("session-1", frame)] for frame in range(5, 10)]
    assert [row["clocks"] for row in read_frames(run).rows] == [[frame, frame] for frame in range(10)]
    assert_same_result(run, whole)

    first, second = wandb.calls("init")
    assert first["id"] != second["id"]
    assert first["group"] == second["group"] == "run"
    assert second["config"].pop("resumed") == {"segment": 1, "first_step": 7, "wandb_ids": [first["id"]]}
    assert first["config"] == second["config"] == read_config(run)
    logged = [(call["id"], call["step"]) for call in wandb.calls("log") if "latency_ms" in call["keys"]]
    assert logged == [(first["id"], step) for step in range(7)] + [(second["id"], step) for step in range(7, 10)]
    assert all(call["step"] == 9 for call in wandb.calls("log")[10:])
    assert [call["exit_code"] for call in wandb.calls("finish")] == [1, 0]
    segments = read_segments(run)
    assert [(s["segment"], s["from_step"], s["first_step"], s["wandb_id"]) for s in segments] == [
        (0, 0, 0, first["id"]),
        (1, 5, 7, second["id"]),
    ]
    assert segments[0]["weights"] == segments[1]["weights"]


def test_times_of_steps_that_an_earlier_segment_logged_stay_as_they_were(run: Path):
    before = (run / "frames.jsonl").read_bytes()
    first_frame_ms = read_summary(run)["latency/first_frame_ms"]
    assert main([f"rollout.resume={run}"]) == 0
    assert (run / "frames.jsonl").read_bytes().startswith(before)
    rows, summary = read_frames(run).rows, read_summary(run)
    measured = [row["latency_ms"] for row in rows if row["phase"] == "generated" and not row["warmup"]]
    assert len(measured) == 7
    assert summary["latency/frame_ms_mean"] == pytest.approx(sum(measured) / 7)
    assert summary["throughput/frames_per_s"] == pytest.approx(7000 / sum(measured))
    assert summary["latency/first_frame_ms"] == first_frame_ms > 0


@pytest.mark.parametrize(
    "kv",
    [
        "paged_windowed",
        "recompute_window",
        *(pytest.param(kv, marks=pytest.mark.slow) for kv in ("full", "cat", "shift")),
    ],
)
def test_every_way_of_keeping_the_past_resumes_to_the_same_result(
    kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Recomputation keeps no state: it starts at frame 0 again and compares."""
    from ringkv.recompute import RecomputeRunner

    knobs = ["dilation=1"] if kv == "hf_sliding" else []
    runner = RecomputeRunner if kv.startswith("recompute") else StepRunner
    _, whole = run_tiny(tmp_path / "whole", *TEN, f"kv={kv}", *knobs)
    run = stopped(tmp_path, monkeypatch, 8, f"kv={kv}", *knobs, runner=runner)
    assert (run / "snapshots").exists() == (runner is StepRunner)
    assert main([f"rollout.resume={run}"]) == 0
    assert_same_result(run, whole)
    assert read_segments(run)[1]["from_step"] == (5 if runner is StepRunner else 0)


def test_a_run_is_resumed_as_often_as_it_stops_and_keeps_only_its_latest_snapshot(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = stopped(tmp_path, monkeypatch, 5, "snapshot_every=2", "warmup=0")
    names = []
    for step in (1, 3):  # of the new segment, which begins at 4 and then at 4 again
        with monkeypatch.context() as patch:
            stop_before(patch, StepRunner, step)
            assert main([f"rollout.resume={run}"]) == 1
        names.append(sorted(path.name for path in (run / "snapshots").iterdir()))
    chunks = [f"frames-{step:08d}.npy" for step in (2, 4, 6)]
    assert names == [[*chunks[1:2], "step-00000004"], [*chunks[1:], "step-00000006"]]
    assert main([f"rollout.resume={run}"]) == 0
    assert [segment["first_step"] for segment in read_segments(run)] == [0, 5, 5, 7]
    assert (run / "pixels.npy").read_bytes() == (whole / "pixels.npy").read_bytes()


def test_without_snapshots_a_run_starts_at_frame_0_again_and_compares(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run = stopped(tmp_path, monkeypatch, 7, "snapshot_every=0")
    assert not (run / "snapshots").exists()
    capsys.readouterr()
    assert main([f"rollout.resume={run}"]) == 0
    assert "resumed from frame 0, as it has no snapshot; 7 logged frames" in capsys.readouterr().out
    assert read_summary(run)["latency/first_frame_ms"] is None
    assert_same_result(run, whole)


def test_a_line_that_was_cut_off_is_cut_and_its_frame_made_again(run: Path, whole: Path):
    path = run / "frames.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    (run / "summary.json").unlink()  # as after a kill
    assert main([f"rollout.resume={run}"]) == 0
    assert_same_result(run, whole)
    assert read_segments(run)[1]["first_step"] == 6


def test_a_run_that_stopped_after_its_last_frame_gets_its_video_and_logs_nothing_again(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb: WandbStub
):
    with monkeypatch.context() as patch:
        patch.setattr(job.report, "write_media", lambda *_: (_ for _ in ()).throw(OSError("no space")))
        code, run = run_tiny(tmp_path, *TEN, "tracking=offline")
    assert code == 1
    rows = (run / "frames.jsonl").read_bytes()
    assert main([f"rollout.resume={run}"]) == 0
    assert (run / "frames.jsonl").read_bytes() == rows
    assert_same_result(run, whole)
    logs = wandb.calls("log")
    assert [call["step"] for call in logs] == [*range(10), 9]
    assert logs[-1]["keys"] == ["rollout", "strip"]


def test_a_frame_that_comes_out_otherwise_stops_the_run_and_names_it(run: Path, capsys: pytest.CaptureFixture[str]):
    path = run / "frames.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    row = json.loads(lines[6])
    checksum, row["checksums"] = row["checksums"][0], ["0123456789abcdef"]
    lines[6] = json.dumps(row) + "\n"
    path.write_text("".join(lines))
    assert main([f"rollout.resume={run}"]) == 1
    error = f"step 6: frame 6 of session-0 has checksum {checksum}, and had 0123456789abcdef when it was logged"
    assert error in read_summary(run)["error"]
    assert error in capsys.readouterr().err
    assert path.read_text() == "".join(lines)


def test_a_damaged_snapshot_is_refused_and_nothing_changes(run: Path, capsys: pytest.CaptureFixture[str]):
    pixels, state = run / "snapshots" / "frames-00000005.npy", run / "snapshots" / "step-00000005"
    whole = content(run)
    for path, position, says in (
        (pixels, -1, "its frame 4 of session-0 is not the one that frames.jsonl has"),
        (pixels, 0, "not a whole snapshot"),
        (state / "session-0.safetensors", 10, "not a whole snapshot"),
        (state / "snapshot.json", 0, "not a whole snapshot"),
    ):
        damaged = bytearray(path.read_bytes())
        damaged[position] ^= 1
        path.write_bytes(damaged)
        before = content(run)
        line = refusal(capsys, [f"rollout.resume={run}"])
        assert line.startswith(f"error: {state}: ")
        assert says in line
        assert content(run) == before
        path.write_bytes(whole[str(path.relative_to(run))])
    assert main([f"rollout.resume={run}"]) == 0


def test_a_snapshot_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(self: StepRunner, rid: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StepRunner, "state_of", refuse)
    code, run = run_tiny(tmp_path, "num_frames=10", "snapshot_every=2")
    assert code == 0
    (record,) = [record for record in caplog.records if record.name.startswith("scripts")]
    assert record.getMessage().startswith("snapshot_every: no more snapshots are taken (OSError: [Errno 28] No space")
    assert not (run / "snapshots").exists()


def test_snapshots_are_taken_between_the_measured_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The clock stands still but in ``step`` (1 s) and ``state_of`` (100 s)."""
    now = 0.0
    step, state_of = StepRunner.step, StepRunner.state_of

    def slow_step(self: StepRunner, *arguments: Any) -> list[FrameResult]:
        nonlocal now
        now += 1.0
        return step(self, *arguments)

    def slow_state(self: StepRunner, rid: str) -> Any:
        nonlocal now
        now += 100.0
        return state_of(self, rid)

    monkeypatch.setattr(StepRunner, "step", slow_step)
    monkeypatch.setattr(StepRunner, "state_of", slow_state)
    monkeypatch.setattr(job.FrameMeter, "_now", lambda self: now)
    code, run = run_tiny(tmp_path, "num_frames=10", "snapshot_every=2")
    assert code == 0
    assert now == 10 + 3 * 100  # after frames 4, 6 and 8: not while priming, nor after the last
    assert [row["latency_ms"] for row in read_frames(run).rows] == [1000.0] * 10
    assert read_summary(run)["latency/first_frame_ms"] == 3000.0


# -- what is refused ------------------------------------------------------------------------------------------------


def test_a_finished_run_is_refused_and_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _, run = run_tiny(tmp_path)
    before = content(run)
    assert refusal(capsys, [f"rollout.resume={run}"]) == (
        f"error: rollout.resume={run}: this run is finished; there is nothing to resume"
    )
    assert content(run) == before


def test_what_is_no_unfinished_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    empty = tmp_path / "empty"
    empty.mkdir()
    for name, says in (
        (tmp_path / "nowhere", "no such folder; expected one that holds a run"),
        (empty, f"{empty / 'config.json'}: No such file or directory"),
    ):
        assert refusal(capsys, [f"rollout.resume={name}"]) == f"error: rollout.resume={name}: {says}"
    assert sorted(tmp_path.iterdir()) == [empty]


def test_a_run_that_a_living_process_holds_is_refused(run: Path, capsys: pytest.CaptureFixture[str]):
    with RunDir.reopen(run):
        line = refusal(capsys, [f"rollout.resume={run}"])
    assert line == f"error: rollout.resume={run}: a living process is running it"
    assert main([f"rollout.resume={run}"]) == 0


def test_a_record_without_checksums_is_refused_by_its_version(run: Path, capsys: pytest.CaptureFixture[str]):
    for version, says in ((0, "its record is of version 0, without checksums"), (9, "this release reads up to")):
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps(config | {VERSION_KEY: version}))
        assert says in refusal(capsys, [f"rollout.resume={run}"])


def test_an_override_that_contradicts_the_run_is_refused_by_name_and_one_that_agrees_is_not(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    before = content(run)
    resume = f"rollout.resume={run}"
    for override, says in (
        ("ring_frames=3", f"ring_frames=3: {resume} goes on with ring_frames=2"),
        ("ring_frames=32", f"ring_frames=32: {resume} goes on with ring_frames=2"),  # the default, and asked for
        ("num_frames=12", f"num_frames=12: {resume} goes on with num_frames=10"),
        ("num_frames=null", f"num_frames=null: {resume} goes on with num_frames=10"),
        ("kv=paged", f'kv=paged: {resume} goes on with kv.strategy="ring"'),
        ("data=freeway", f'data=freeway: {resume} goes on with data.name="synthetic"'),
        ("tracking=offline", f'tracking=offline: {resume} goes on with tracking.mode="disabled"'),
        ("snapshot_every=0", f"snapshot_every=0: {resume} goes on with snapshot_every=5"),
        ("sweep.dry_run=true", f"sweep.dry_run=true: {resume} goes on with sweep.dry_run=false"),
        (f"hydra.run.dir={tmp_path / 'other'}", f"hydra.run.dir={tmp_path / 'other'}: rollout.resume goes on in"),
    ):
        assert refusal(capsys, [resume, override]).startswith(f"error: {says}"), override
    assert content(run) == before
    assert not (tmp_path / "other").exists()
    assert main([resume, "ring_frames=2", "kv=ring", "ring_buckets=null", "data=synthetic", "model=tiny"]) == 0


def test_other_weights_and_other_recordings_are_refused(run: Path, capsys: pytest.CaptureFixture[str]):
    segments = (run / "segments.json").read_text()
    for key, value, says in (("weights", "abc", "other weights (abc, now "), ("data_hashes", ["x"], "other recorded")):
        changed = json.loads(segments)
        changed[0][key] = value
        (run / "segments.json").write_text(json.dumps(changed))
        before = content(run)
        assert says in refusal(capsys, [f"rollout.resume={run}"])
        assert content(run) == before


def test_other_source_files_are_told(run: Path, capsys: pytest.CaptureFixture[str]):
    segments = json.loads((run / "segments.json").read_text())
    segments[0]["source_hash"] = "0"
    (run / "segments.json").write_text(json.dumps(segments))
    capsys.readouterr()
    assert main([f"rollout.resume={run}"]) == 0
    assert "the source files are not those that it ran before" in capsys.readouterr().out


def test_a_run_that_one_request_left_cannot_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    original = StepRunner._drive

    def failing(self: StepRunner, batch: list[Any], phase: str) -> Any:
        if any(run.request.rid == "session-0" and run.next_frame == 6 for run in batch):
            raise RuntimeError("session 0 only")
        return original(self, batch, phase)

    with monkeypatch.context() as patch:
        patch.setattr(StepRunner, "_drive", failing)
        code, run = run_tiny(tmp_path, *TEN, "num_sessions=2")
    assert code == 1
    line = refusal(capsys, [f"rollout.resume={run}"])
    assert "row 6 of frames.jsonl is of step 6 with session-1" in line


# -- from where, and how many ---------------------------------------------------------------------------------------


def test_a_relative_path_counts_from_the_launch_folder_and_no_second_folder_remains(
    run: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """In a sweep too, where a working folder per job made the path mean another place."""
    other = Path(shutil.copytree(run, tmp_path / "other"))
    launch = tmp_path / "launch"
    launch.mkdir()
    monkeypatch.chdir(launch)
    assert main(["rollout.resume=../run"]) == 0
    assert_same_result(run, whole)
    capsys.readouterr()
    assert main(["-m", "rollout.resume=../other"]) == 0
    assert capsys.readouterr().out == f"{Path('../other').absolute()}: ok\n"
    assert [row["checksums"] for row in read_frames(other).rows] == [row["checksums"] for row in read_frames(run).rows]
    assert list(launch.iterdir()) == []


def test_each_of_a_list_goes_on_in_a_process_of_its_own_and_a_failed_one_does_not_stop_the_others(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    other = Path(shutil.copytree(run, tmp_path / "other"))
    seen = []

    def fake(command: Any, request: str, log: Path, **limits: float) -> ChildEnd:
        seen.append((json.loads(request), log))
        if len(seen) == 1:
            return ChildEnd(-9, None, 1.0, 1)
        (log.parent / "summary.json").write_text('{"status": "ok"}')
        return ChildEnd(0, None, 1.0, 1)

    monkeypatch.setattr(resume, "supervise", fake)
    (run / "summary.json").unlink()
    assert main(["-m", f"rollout.resume={run},{other}"]) == 1
    assert [(request["run_dir"], request["continues"]) for request, _ in seen] == [(str(run), True), (str(other), True)]
    assert [log for _, log in seen] == [run / "output.log", other / "output.log"]
    assert all(request["config"]["num_frames"] == 10 for request, _ in seen)
    out, err = capsys.readouterr()
    assert out == f"{other}: ok\n"
    assert err == f"{run}: failed: the process ended with signal SIGKILL; see {run / 'output.log'}\n"


def test_of_a_list_each_has_to_be_an_unfinished_run_before_any_goes_on(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    before = content(run)
    for value, says in (
        (f"{run},{tmp_path / 'nowhere'}", "no such folder"),
        (f"{run},{run}", "expected a folder for every point, each once"),
        (f"{run},null", "expected a folder for every point, each once"),
    ):
        assert says in refusal(capsys, ["-m", f"rollout.resume={value}"])
    assert content(run) == before


def test_the_first_offline_folder_stays_as_it_is_and_the_second_is_a_run_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real_media: None
):
    run = stopped(tmp_path, monkeypatch, 7, "tracking=offline")
    (first,) = (run / "wandb").glob("offline-run-*")

    def kept() -> dict[str, bytes]:  # not the logs of W&B's service, which the two runs share in this one process
        return {name: text for name, text in content(first).items() if not name.startswith("logs/")}

    before = kept()
    assert main([f"rollout.resume={run}"]) == 0
    after = kept()
    assert after.keys() == before.keys()
    # W&B's service may still have been writing the end of the run that was stopped.
    assert all(after[name].startswith(text) for name, text in before.items())
    (second,) = set((run / "wandb").glob("offline-run-*")) - {first}
    records = [read_offline_run(next(folder.glob("*.wandb"))) for folder in (first, second)]
    assert [[about["group"] for about in record.runs.values()] for record in records] == [["run"], ["run"]]
    assert records[0].runs.keys() != records[1].runs.keys()
    steps = [[step for step, row in record.history if "latency_ms" in row] for record in records]
    assert steps == [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9]]
    assert records[1].config["resumed"]["wandb_ids"] == list(records[0].runs)
    assert [record.exits for record in records] == [[1], [0]]


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_to_the_result_of_one_that_was_not(tmp_path: Path):
    """SIGKILL at any moment: in a line, in a snapshot, between the two."""
    long = [*TINY, "num_frames=400", "snapshot_every=3", "num_sessions=2"]
    assert main([*long, f"hydra.run.dir={tmp_path / 'whole'}"]) == 0
    run = tmp_path / "run"
    command = [sys.executable, "-c", "import sys; from scripts.rollout import main; sys.exit(main(sys.argv[1:]))"]
    arguments, kills = [*long, f"hydra.run.dir={run}"], 0
    for rows_more in (5, 40, 77):
        process = subprocess.Popen([*command, *arguments], stdout=subprocess.DEVNULL)
        path, deadline = run / "frames.jsonl", time.monotonic() + 120
        size = path.stat().st_size if path.exists() else 0
        while process.poll() is None and not (path.exists() and path.stat().st_size > size + 400 * rows_more):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
        arguments = [f"rollout.resume={run}"]
    assert kills == 3
    assert not (run / "summary.json").exists()
    assert main(arguments) == 0
    assert_same_result(run, tmp_path / "whole")
    assert len(read_segments(run)) == 4
