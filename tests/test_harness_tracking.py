"""W&B as the run sees it (a recording stub), and as it lies on disk (a real offline run, read back from its bytes)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from ringkv.harness.tracking import start_tracker
from tests.wandb_reader import read_offline_run


class RecordingRun:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.dir = os.path.join(options["dir"], "wandb", f"offline-run-x-{options['id']}", "files")
        self.logs: list[tuple[int, dict[str, Any]]] = []
        self.summary: dict[str, Any] = {}
        self.exit_codes: list[int] = []

    def log(self, values: dict[str, Any], *, step: int) -> None:
        self.logs.append((step, values))

    def finish(self, *, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


class RecordingWandb:
    """The part of the ``wandb`` module that a tracker may use; ``log`` without a step is a TypeError."""

    def __init__(self) -> None:
        self.runs: list[RecordingRun] = []
        self.environment: dict[str, str | None] = {}

    def init(self, **options: Any) -> RecordingRun:
        self.environment = {name: os.environ.get(name) for name in ("WANDB_ERROR_REPORTING", "WANDB_CACHE_DIR")}
        self.runs.append(RecordingRun(options))
        return self.runs[-1]

    def Video(self, path: str, *, format: str) -> tuple[str, str, str]:
        return ("video", path, format)

    def Image(self, path: str) -> tuple[str, str]:
        return ("image", path)


def start(stub: Any, directory: Path, mode: str = "offline", config: Any = None) -> Any:
    return start_tracker(
        mode, project="ringkv", group="g", name="n", config=config or {}, directory=directory, wandb_module=stub
    )


def frame_row(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "phase": "generated",
        "clocks": [step, step + 10],
        "frames": [["a", step], ["b", step + 10]],
        "sessions": 2,
        "latency_ms": 2.5,
        "warmup": False,
        "kv_bytes": 512,
        "kv_in_use_bytes": 256,
        "rss_bytes": None,
    }


def test_every_frame_is_one_row_at_its_own_step_and_nothing_goes_back(tmp_path: Path):
    """Calls without a step advance a hidden counter, after which rows with smaller explicit steps are discarded."""
    stub = RecordingWandb()
    with start(stub, tmp_path) as tracker:
        for step in range(6):
            tracker.log_frame(frame_row(step))
        tracker.summary({"memory/kv_bytes": 512})
        tracker.media(video=tmp_path / "rollout.mp4", image=tmp_path / "strip.png")
    (run,) = stub.runs
    steps = [step for step, _ in run.logs]
    assert steps == [0, 1, 2, 3, 4, 5, 5]
    assert run.logs[-1][1] == {
        "rollout": ("video", str(tmp_path / "rollout.mp4"), "mp4"),
        "strip": ("image", str(tmp_path / "strip.png")),
    }
    assert run.summary == {"memory/kv_bytes": 512}


def test_two_sessions_in_one_run_have_keys_of_their_own(tmp_path: Path):
    stub = RecordingWandb()
    start(stub, tmp_path).log_frame(frame_row(3))
    ((step, values),) = stub.runs[0].logs
    assert step == 3
    assert (values["clock/a"], values["clock/b"]) == (3, 13)
    assert values["kv_bytes"] == 512
    assert "rss_bytes" not in values


@pytest.mark.parametrize("second", [4, 3])
def test_a_step_that_does_not_go_forward_is_refused_in_every_mode(tmp_path: Path, second: int):
    for mode in ("offline", "disabled"):
        tracker = start(RecordingWandb(), tmp_path, mode)
        tracker.log(4, {"x": 1})
        with pytest.raises(ValueError, match=f"step {second}: expected a step above 4"):
            tracker.log(second, {"x": 1})


def test_values_that_are_missing_or_not_finite_are_left_out(tmp_path: Path):
    stub = RecordingWandb()
    tracker = start(stub, tmp_path)
    metrics = {"a": None, "b": float("nan"), "c": np.float32(0.5), "d": np.int64(2), "NaN-guard": "NaN"}
    tracker.log(0, metrics)
    tracker.summary(metrics)
    expected = {"c": 0.5, "d": 2, "NaN-guard": "NaN"}
    assert stub.runs[0].logs == [(0, expected)]
    assert stub.runs[0].summary == expected


def test_media_without_any_logged_step_goes_to_step_0_and_nothing_is_logged_without_media(tmp_path: Path):
    stub = RecordingWandb()
    tracker = start(stub, tmp_path)
    tracker.media()
    tracker.media(image="strip.png")
    assert stub.runs[0].logs == [(0, {"strip": ("image", "strip.png")})]


def test_a_later_segment_logs_only_steps_above_those_of_the_earlier_one_and_its_media_at_the_last(tmp_path: Path):
    stub = RecordingWandb()
    tracker = start_tracker(
        "offline", project="p", group="g", name="n", config={}, directory=tmp_path, last_step=6, wandb_module=stub
    )
    with pytest.raises(ValueError, match="step 6: expected a step above 6"):
        tracker.log_frame(frame_row(6))
    tracker.media(image="strip.png")
    tracker.log_frame(frame_row(7))
    assert [step for step, _ in stub.runs[0].logs] == [6, 7]
    assert tracker.run_id == stub.runs[0].options["id"]
    assert start(stub, tmp_path, "disabled").run_id is None


def test_the_config_arrives_as_plain_containers(tmp_path: Path):
    stub = RecordingWandb()
    config = OmegaConf.create(
        {"ring_frames": 32, "kv": {"slots": "${ring_frames}", "dtype": torch.bfloat16}, "path": Path("a")},
        flags={"allow_objects": True},
    )
    start(stub, tmp_path, config=config)
    plain = stub.runs[0].options["config"]
    assert json.loads(json.dumps(plain)) == {
        "ring_frames": 32,
        "kv": {"slots": 32, "dtype": "bfloat16"},
        "path": "a",
    }


def test_a_config_with_a_missing_value_is_refused_before_a_run_is_opened(tmp_path: Path):
    stub = RecordingWandb()
    with pytest.raises(ValueError, match=r"data\.path"):
        start(stub, tmp_path, config=OmegaConf.create({"data": {"path": "???"}}))
    assert stub.runs == []


def test_three_points_of_a_sweep_are_three_runs_each_finished_once_and_the_failed_one_as_failed(tmp_path: Path):
    """Without an explicit finish the second job logs into the first run, and a failed job is marked finished."""
    stub = RecordingWandb()
    for point in range(3):
        try:
            with start(stub, tmp_path / str(point)) as tracker:
                for step in range(5):
                    tracker.log(step, {"x": step})
                    if (point, step) == (1, 3):
                        raise RuntimeError("frame 3")
                tracker.finish()
        except RuntimeError:
            assert point == 1
    assert len({run.options["id"] for run in stub.runs}) == 3
    assert [run.exit_codes for run in stub.runs] == [[0], [1], [0]]
    assert {run.options["group"] for run in stub.runs} == {"g"}
    assert {run.options["reinit"] for run in stub.runs} == {"create_new"}


def test_a_finished_run_takes_nothing_more(tmp_path: Path):
    stub = RecordingWandb()
    tracker = start(stub, tmp_path)
    tracker.finish(2)
    tracker.log(0, {"x": 1})
    tracker.summary({"x": 1})
    tracker.media(image="strip.png")
    (run,) = stub.runs
    assert (run.logs, run.summary, run.exit_codes) == ([], {}, [2])


def test_online_opens_an_online_run_and_offers_no_sync_line(tmp_path: Path):
    stub = RecordingWandb()
    tracker = start(stub, tmp_path, "online")
    assert stub.runs[0].options["mode"] == "online"
    assert tracker.finish() is None


def test_offline_is_asked_for_explicitly_below_the_run_directory_and_names_the_sync_command(tmp_path: Path):
    stub = RecordingWandb()
    tracker = start(stub, tmp_path)
    options = stub.runs[0].options
    assert (options["mode"], options["dir"], options["project"]) == ("offline", str(tmp_path), "ringkv")
    expected = f"wandb sync {tmp_path}/wandb/offline-run-x-{options['id']}"
    assert tracker.sync_line == tracker.finish() == tracker.finish() == expected


def test_the_environment_is_as_before_once_the_run_is_open(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("WANDB_CACHE_DIR", raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")
    stub = RecordingWandb()
    before = dict(os.environ)
    start(stub, tmp_path)
    assert stub.environment == {
        "WANDB_ERROR_REPORTING": "true",  # the user's own choice stands
        "WANDB_CACHE_DIR": str(tmp_path / "wandb" / "cache"),
    }
    assert dict(os.environ) == before


def test_disabled_opens_no_run_and_imports_nothing(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with start(None, tmp_path, "disabled") as tracker:
        tracker.log_frame(frame_row(0))
        tracker.summary({"x": 1})
        tracker.media(video="rollout.mp4")
    assert tracker.finish() is None


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_without_the_wandb_package_one_warning_is_given_and_the_run_goes_on(tmp_path: Path, monkeypatch, caplog, mode):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with start(None, tmp_path, mode) as tracker:
        tracker.log_frame(frame_row(0))
    (record,) = caplog.records
    assert "wandb cannot start" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_a_wandb_that_cannot_start_stops_an_online_run_only(tmp_path: Path, caplog):
    def refuse(**_: Any) -> None:
        raise RuntimeError("no\nservice")

    stub = SimpleNamespace(init=refuse)
    with start(stub, tmp_path, "offline") as tracker:
        tracker.log(0, {"x": 1})
    assert [record.getMessage().count("\n") for record in caplog.records] == [0]
    with pytest.raises(RuntimeError, match="service"):
        start(stub, tmp_path, "online")


def test_an_unknown_mode_is_refused_with_the_allowed_ones(tmp_path: Path):
    with pytest.raises(ValueError, match=r"tracking mode 'of': expected one of offline, online, disabled"):
        start(RecordingWandb(), tmp_path, "of")


OFFLINE_RUN = """
import socket, sys
import numpy as np

def guard(name):
    real = getattr(socket.socket, name)
    def connect(self, address):
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            print("CONNECT", address, flush=True)
            raise OSError("no network")
        return real(self, address)
    setattr(socket.socket, name, connect)

guard("connect")
guard("connect_ex")
from PIL import Image
from ringkv.harness.tracking import start_tracker

directory, image, video = sys.argv[1:]
open(video, "wb").write(b"stands for an mp4 file")
Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(image)
config = {"ring_frames": 32, "kv": {"dtype": "bfloat16", "sigmas": [1.0, 0.5]}}
for exit_code in (0, 1):
    tracker = start_tracker(
        "offline", project="ringkv", group="g", name=f"exit-{exit_code}", config=config, directory=directory
    )
    for step in range(6):
        # The long text takes the log across the 32 KiB blocks of its file.
        tracker.log(step, {"latency_ms": 0.5 + step, "clock/a": step, "text": "x" * 9000})
    tracker.summary({"throughput/frames_per_s": 12.5, "memory/peak_rss_bytes": None})
    tracker.media(image=image, video=video)
    print(tracker.finish(exit_code))
"""


def test_a_real_offline_run_needs_no_key_no_network_and_no_home_and_reads_back_whole(tmp_path: Path):
    home, directory = tmp_path / "home", tmp_path / "run"
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "XDG_"))}
    # A proxy that cannot be reached makes W&B's own process, which the guard does not see, fail instead of connect.
    environment |= {"HOME": str(home), "HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE_RUN, str(directory), str(tmp_path / "strip.png"), str(tmp_path / "rollout.mp4")],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stdout
    assert done.stderr == ""
    assert list(home.rglob("*")) == []
    for exit_code, line in enumerate(lines):
        folder = Path(line.removeprefix("wandb sync "))
        assert folder.parent == directory / "wandb"
        (path,) = folder.glob("run-*.wandb")
        run = read_offline_run(path)
        ((run_id, about),) = run.runs.items()
        assert folder.name.endswith(run_id)
        assert about == {"project": "ringkv", "group": "g", "name": f"exit-{exit_code}"}
        assert run.config["ring_frames"] == 32
        assert run.config["kv"] == {"dtype": "bfloat16", "sigmas": [1.0, 0.5]}
        assert [step for step, _ in run.history] == [0, 1, 2, 3, 4, 5]
        assert [row["latency_ms"] for _, row in run.history] == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]
        assert [row["clock/a"] for _, row in run.history] == [0, 1, 2, 3, 4, 5]
        assert run.summary["throughput/frames_per_s"] == 12.5
        assert "memory/peak_rss_bytes" not in run.summary
        assert run.exits == [exit_code]
        for kind, suffix in (("image", "png"), ("video", "mp4")):
            (file,) = folder.rglob(f"*.{suffix}")
            key = "strip" if kind == "image" else "rollout"
            assert run.history[-1][1][f"{key}._type"] == f"{kind}-file"
            assert folder / "files" / run.history[-1][1][f"{key}.path"] == file
