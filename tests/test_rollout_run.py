"""One rollout through the command line, in process: what it leaves behind, what it prints, and how it fails."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from model.checkpoint import save_checkpoint
from model.transformer import FrameTransformer
from ringkv.harness.records import FRAME_COLUMNS, SUMMARY_COLUMNS, read_config, read_frames, read_summary
from ringkv.runner import FrameResult, StepRunner
from scripts.app.check import effective
from scripts.app.compose import compose_all
from scripts.app.geometry import model_config
from scripts.app.report import strip_columns
from scripts.rollout import main
from tests.cli_tools import TINY, WandbStub, run_tiny


def decoded(path: Path) -> np.ndarray:
    """All frames of a video, uint8 [N, H, W, 3]."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def raise_at_step(monkeypatch: pytest.MonkeyPatch, step: int, error: BaseException) -> None:
    """Make the runner's step number ``step``, from 0, raise."""
    original, done = StepRunner.step, iter(range(1000))

    def failing(self: StepRunner) -> list[FrameResult]:
        if next(done) == step:
            raise error
        return original(self)

    monkeypatch.setattr(StepRunner, "step", failing)


# -- what a run leaves behind ---------------------------------------------------------------------------------------


def test_a_run_leaves_its_config_its_frames_its_summary_a_video_and_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    code, run = run_tiny(tmp_path, "num_sessions=2")
    assert code == 0
    assert sorted(path.name for path in run.iterdir()) == [
        "config.json",
        "frames.jsonl",
        "frames.png",
        "rollout.mp4",
        "segments.json",
        "strip.png",
        "summary.json",
    ]
    rows = read_frames(run).rows
    assert [row["step"] for row in rows] == list(range(6))
    assert [row["phase"] for row in rows] == ["context"] * 2 + ["generated"] * 4
    assert [row["clocks"] for row in rows] == [[frame, frame] for frame in range(6)]
    assert [row["warmup"] for row in rows] == [False, False, True, False, False, False]
    assert all(row.keys() == FRAME_COLUMNS.keys() and row["sessions"] == 2 for row in rows)

    summary = read_summary(run)
    assert summary.keys() >= SUMMARY_COLUMNS.keys()
    assert summary["status"] == "ok"
    assert summary["frames/measured"] == 6
    assert summary["machine"]["threads"] == 1
    # 2 sessions x 2 layers x (2 slots + scratch) x 16 tokens x K and V x 2 heads x 8 x 4 bytes
    assert summary["memory/kv_bytes"] == summary["memory/kv_bytes_predicted"] == 2 * 2 * 3 * 16 * 2 * 2 * 8 * 4
    assert {row["kv_bytes"] for row in rows} == {summary["memory/kv_bytes"]}
    # layer 0 keeps frames 0..5: slots 0 1 0 1 0 1; layer 1 keeps 0, 2 and 4: slots 0 1 0
    assert summary["ring/wraps"] == [2, 1]

    config = read_config(run)
    assert config["ring_buckets"] == 2
    assert config["data"]["name"] == "synthetic"
    with av.open(str(run / "rollout.mp4")) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.pix_fmt == "yuv420p"
        assert sum(1 for _ in container.decode(video=0)) == 6

    out = capsys.readouterr().out
    assert "the generated frames are noise" in out
    assert "ring wrapped, by layer: 2, 1" in out
    assert re.search(r"KV held\s+│\s+24.00 │ KiB", out)
    for name in ("rollout.mp4", "strip.png", "summary.json"):
        assert str(run / name) in out


def test_the_same_seed_gives_the_same_frames_and_another_seed_gives_others(tmp_path: Path):
    videos = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert main([*TINY, f"hydra.run.dir={tmp_path / name}", f"seed={seed}"]) == 0
        videos.append(decoded(tmp_path / name / "rollout.mp4"))
    assert np.array_equal(videos[0], videos[1])
    assert not np.array_equal(videos[0], videos[2])


def test_the_video_shows_the_context_as_it_was_given_and_noise_after_it(tmp_path: Path):
    code, run = run_tiny(tmp_path)
    assert code == 0
    frames = decoded(run / "rollout.mp4").astype(float)
    truth, rollout = np.split(frames[:, 40:-20], 2, axis=2)  # without labels; left half and right half
    gap = np.abs(truth[..., 20:-20, :] - rollout[..., 20:-20, :]).mean(axis=(1, 2, 3))
    assert (gap[:2] < 4).all(), gap
    assert (gap[2:] > 30).all(), gap


def test_two_runs_that_start_together_have_a_folder_each(tmp_path: Path):
    """Folder names of one-second resolution made them overwrite each other."""
    script = Path(__file__).parents[1] / "scripts" / "rollout.py"
    together = [subprocess.Popen([sys.executable, str(script), *TINY], cwd=tmp_path) for _ in range(2)]
    assert [process.wait() for process in together] == [0, 0]
    runs = sorted((tmp_path / "outputs").glob("*/*"))
    assert len(runs) == 2
    for run in runs:
        assert read_summary(run)["status"] == "ok"
        assert len(read_frames(run).rows) == 6


def test_a_run_whose_frames_are_all_warm_up_reports_null_and_not_available(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """No measured frame: no division by zero, no NaN in the JSON, pictures all the same."""
    code, run = run_tiny(tmp_path, "warmup=4")
    assert code == 0
    text = (run / "summary.json").read_text()
    summary = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} in summary.json"))
    assert summary["frames/measured"] == 0
    assert summary["throughput/frames_per_s"] is None
    assert summary["latency/frame_ms_p50"] is None
    assert math.isfinite(summary["warmup/ms_total"])
    assert re.search(r"p50\s+│\s+n/a", capsys.readouterr().out)
    assert (run / "frames.png").stat().st_size > 0


def test_a_profiled_run_leaves_a_chrome_trace_of_some_steps(tmp_path: Path):
    code, run = run_tiny(tmp_path, "profile=true")
    assert code == 0
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "aten::mm" or event.get("name") == "aten::linear" for event in events) > 0


def test_one_row_per_step_and_no_context_when_none_is_asked_for(tmp_path: Path):
    code, run = run_tiny(tmp_path, "context_frames=0", "num_frames=3", "profile=false")
    assert code == 0
    assert [row["phase"] for row in read_frames(run).rows] == ["generated"] * 3


def test_a_checkpoint_is_used_and_what_differs_from_its_training_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (config,) = compose_all("rollout", TINY, multirun=False).points
    weights = tmp_path / "weights.safetensors"
    save_checkpoint(weights, FrameTransformer(model_config(effective(config)), seed=5), ring_frames=7, dilation=2)
    code, run = run_tiny(tmp_path, f"checkpoint={weights}")
    assert code == 0
    out = capsys.readouterr().out
    assert "noise" not in out
    assert f"weights {weights}" in out
    assert "ring_frames=2: the weights were trained with 7" in out
    assert "dilation=" not in out
    assert read_summary(run)["model/weights"] == str(weights)
    other, noise = run_tiny(tmp_path / "other")
    assert other == 0
    assert not np.array_equal(decoded(run / "rollout.mp4"), decoded(noise / "rollout.mp4"))


@pytest.mark.slow
def test_a_compiled_run_has_its_compile_time_apart_and_the_frames_of_an_eager_one(tmp_path: Path):
    eager, eager_run = run_tiny(tmp_path / "eager", "num_sessions=2")
    compiled, compiled_run = run_tiny(tmp_path / "compiled", "num_sessions=2", "compile=true")
    assert (eager, compiled) == (0, 0)
    summary = read_summary(compiled_run)
    assert summary["compile/ms_total"] > 10 * summary["warmup/ms_max"]
    gap = np.abs(decoded(eager_run / "rollout.mp4").astype(int) - decoded(compiled_run / "rollout.mp4").astype(int))
    assert gap.mean() < 1


def test_the_strip_shows_the_last_given_and_the_first_generated_frame():
    assert strip_columns(96, 8) == [0, 7, 8, 11, 21, 32, 42, 53, 63, 74, 84, 95]
    assert strip_columns(3, 1) == [0, 1, 2]
    assert strip_columns(1, 0) == [0]


# -- how it fails ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("the cache is on fire"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_a_run_that_fails_records_why_and_the_frames_it_did_and_is_failed_in_wandb(
    error: BaseException,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wandb: WandbStub,
    capsys: pytest.CaptureFixture[str],
):
    raise_at_step(monkeypatch, 3, error)
    code, run = run_tiny(tmp_path, "tracking=offline")
    assert code == 1
    summary = read_summary(run)
    assert summary["status"] == "failed"
    assert summary["error"].startswith(type(error).__name__)
    assert "raise error" in summary["traceback"]
    assert [row["clocks"] for row in read_frames(run).rows] == [[0], [1], [2]]
    assert summary["memory/kv_bytes"] == summary["memory/kv_bytes_predicted"] > 0
    assert [call["exit_code"] for call in wandb.calls("finish")] == [1]
    assert type(error).__name__ in capsys.readouterr().err
    assert not (run / "rollout.mp4").exists()


def test_a_request_that_fails_does_not_stop_the_others_and_the_run_is_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    original = StepRunner._drive

    def failing(self: StepRunner, batch: list[Any], phase: str) -> list[FrameResult]:
        if any(run.request.rid == "session-0" and run.next_frame == 4 for run in batch):
            raise RuntimeError("session 0 only")
        return original(self, batch, phase)

    monkeypatch.setattr(StepRunner, "_drive", failing)
    code, run = run_tiny(tmp_path, "num_sessions=2")
    assert code == 1
    frames = [entry for row in read_frames(run).rows for entry in row["frames"]]
    assert [frame for rid, frame in frames if rid == "session-0"] == [0, 1, 2, 3]
    assert [frame for rid, frame in frames if rid == "session-1"] == [0, 1, 2, 3, 4, 5]
    assert "session 0 only" in read_summary(run)["error"]
    assert "1 of 2 requests failed" in read_summary(run)["traceback"]


# -- tracking -------------------------------------------------------------------------------------------------------


def test_every_frame_reaches_wandb_once_at_its_own_step_and_nothing_goes_back(tmp_path: Path, wandb: WandbStub):
    """Calls without a step advance a hidden counter, after which smaller explicit steps are dropped."""
    code, run = run_tiny(tmp_path, "tracking=offline", "num_sessions=2", "tracking.group=trial")
    assert code == 0
    logs = wandb.calls("log")
    steps = [call["step"] for call in logs]
    assert steps == sorted(steps)
    assert None not in steps
    assert [call["step"] for call in logs if "latency_ms" in call["keys"]] == list(range(6))
    assert [call["clocks"] for call in logs[:6]] == [{"clock/session-0": f, "clock/session-1": f} for f in range(6)]
    assert all(step >= 5 for step in steps[6:])
    assert {"rollout", "strip"} <= {key for call in logs[6:] for key in call["keys"]}
    (init,) = wandb.calls("init")
    assert (init["mode"], init["group"]) == ("offline", "trial")
    assert init["config"] == read_config(run)
    assert [call["exit_code"] for call in wandb.calls("finish")] == [0]
    (summary,) = wandb.calls("summary")
    assert summary["values"]["memory/kv_bytes"] == read_summary(run)["memory/kv_bytes"]


def test_without_wandb_or_with_tracking_disabled_a_run_has_the_same_local_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it raises ImportError
    missing, without = run_tiny(tmp_path / "missing", "tracking=offline")
    disabled, off = run_tiny(tmp_path / "disabled", "tracking=disabled")
    assert (missing, disabled) == (0, 0)
    for run in (without, off):
        assert [row["clocks"] for row in read_frames(run).rows] == [[frame] for frame in range(6)]
        assert sorted(path.name for path in run.iterdir() if path.suffix) == sorted(
            ["config.json", "frames.jsonl", "frames.png", "rollout.mp4", "segments.json", "strip.png", "summary.json"]
        )
    assert read_summary(without).keys() == read_summary(off).keys()


def test_by_default_a_run_is_tracked_offline_without_key_or_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no key in a .netrc either
    for name in ("HTTPS_PROXY", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens: whoever connects fails
    code = main([*TINY, "tracking=offline", f"hydra.run.dir={tmp_path / 'run'}"])
    assert code == 0
    (offline,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert list(offline.glob("*.wandb"))
    assert f"wandb sync {offline}" in capsys.readouterr().out
