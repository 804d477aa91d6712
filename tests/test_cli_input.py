"""Bad input is refused in one line that names key, value and what is allowed, before anything runs or is written."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model.checkpoint import save_checkpoint
from model.config import preset
from model.transformer import FrameTransformer
from scripts.rollout import main
from tests.cli_tools import TINY, refusal, run_tiny

# argv, what the line has to begin with, what else it has to say
REFUSALS = [
    ("ring_frame=8", "ring_frame=8: unknown key", "did you mean ring_frames?"),
    ("+ring_frame=8", "+ring_frame=8: unknown key", "did you mean ring_frames?"),
    ("++ring_frame=8", "++ring_frame=8: unknown key", "did you mean ring_frames?"),
    ("+model.d_modle=8", "+model.d_modle=8: unknown key", "did you mean model.d_model?"),
    ("tracking.modes=offline", "tracking.modes=offline: unknown key", "did you mean tracking.mode?"),
    ("+hydra.run.dirs=x", "+hydra.run.dirs=x: unknown key", "keys of hydra.run: dir"),
    ("ring_frames.x=1", "ring_frames.x=1: unknown key", "none"),
    ("+ring_frames=8", "+ring_frames=8: ", "expected ring_frames=8"),
    ("~ring_frames", "~ring_frames: ", "cannot be removed"),
    ("~model", "~model: ", "cannot be removed"),
    ("ring_frames=16,32", "ring_frames=16,32: ", "needs -m"),
    ("ring_frames=range(1,4)", "ring_frames=range(1,4): ", "needs -m"),
    ("ring_frames=0", "ring_frames=0: ", "an integer >= 1"),
    ("ring_frames=-1", "ring_frames=-1: ", "an integer >= 1"),
    ("ring_frames=3.5", "ring_frames=3.5: ", "an integer"),
    ("ring_frames=true", "ring_frames=true: ", "an integer"),
    ("ring_frames=many", "ring_frames=many: ", "an integer"),
    ("ring_frames=null", "ring_frames=null: ", "an integer"),
    ("ring_frames=", "ring_frames=: ", "an integer"),
    ("ring_frames=${nowhere}", "ring_frames=${nowhere}: ", "'nowhere' not found"),
    ("ring_frames", "ring_frames: ", "key=value"),
    ("ring_frames=[1", "ring_frames=[1: ", "key=value"),
    ("=3", "=3: ", "key=value"),
    ("ring_frames=8 ring_buckets=9", "ring_buckets=9: ", "at most ring_frames=8"),
    ("ring_frames=100000000", "ring_frames=100000000 ", "GiB of this machine"),
    ("dilation=0", "dilation=0: ", "an integer >= 1"),
    ("num_sessions=0", "num_sessions=0: ", "an integer >= 1"),
    ("num_frames=8 context_frames=8", "context_frames=8: ", "fewer than num_frames=8"),
    ("context_frames=-1", "context_frames=-1: ", "an integer >= 0"),
    ("tokens_per_frame=50", "tokens_per_frame=50: ", "64 x 64 frame give 1, 4, 16, 64"),
    ("model.num_heads=5", "model.num_heads=5: ", "a multiple of num_kv_heads=4"),
    ("model.head_dim=12", "model.head_dim=12: ", "a multiple of 8"),
    ("model.d_model=1.5", "model.d_model=1.5: ", "an integer or null"),
    ("global_period=0", "global_period=0: ", "an integer >= 1"),
    ("sigmas=[1.0,0.5]", "sigmas=[1.0, 0.5]: ", "falling strictly"),
    ("sigmas=[1.0,a]", "sigmas=[1.0,a]: ", "a list of numbers"),
    ("seed=-1", "seed=-1: ", "from 0 to 9223372036854775807"),
    ("threads=0", "threads=0: ", "an integer from 1 to "),
    ("snapshot_every=-1", "snapshot_every=-1: ", "an integer >= 0"),
    ("rollout.resume=nowhere", "rollout.resume=nowhere: no such folder", "expected one that holds a run"),
    ("-m rollout.resume=nowhere,null", "rollout.resume=nowhere,None: ", "a folder for every point"),
    ("target_fps=nan", "target_fps=nan: ", "a number > 0"),
    ("target_fps=0", "target_fps=0.0: ", "a number > 0"),
    ("sweep.timeout_s=-1", "sweep.timeout_s=-1.0: ", "a number > 0"),
    ("kv=rings", "kv=rings: ", "ring_uncompacted"),
    ("kv.page_tokens=4", "kv.page_tokens=4: kv=ring has no such knob", "expected kv=paged"),
    ("kv=shift kv.window=true", "kv.window=true: kv=shift has no such knob", "expected kv=paged, full"),
    ("kv=full kv.max_frames=9", "kv.max_frames=9: kv=full has no such knob", "expected kv=full_static"),
    ("kv=paged kv.num_pages=0", "kv.num_pages=0: ", "an integer >= 1"),
    ("kv=paged kv.page_tokens=many", "kv.page_tokens=many: ", "an integer or null"),
    ("kv=paged kv.num_pages=100000000", "kv.num_pages=100000000 ", "GiB of this machine"),
    ("kv=full num_frames=10000000", "num_frames=10000000 ", "GiB of this machine"),
    ("kv=full_static kv.max_frames=10000000", "kv.max_frames=10000000 ", "GiB of this machine"),
    ("model=tiny kv=hf_sliding", "dilation=8: kv=hf_sliding has no dilated layers", "expected dilation=1"),
    ("kv=hf_sliding dilation=1 ring_frames=1", "ring_frames=1: kv=hf_sliding", "expected 2 or more"),
    ("kv=cat attention=segments", "attention=segments: kv=cat has ", "auto, canonical, sdpa"),
    ("+kv=rings", "+kv=rings: ", "expected kv=rings"),
    ("model=big", "model=big: ", "one of freeway, pong, recall, small, tiny, waypoint_360p, waypoint_720p"),
    ("model=[tiny,small]", "model=[tiny,small]: ", "one of freeway, pong, recall, small, tiny"),
    ("model.preset=big", "model='big': ", "one of tiny, small"),
    ("data=chess", "data=chess: ", "one of breakout, freeway, loops, pong, synthetic, video"),
    ("experiment=fame", "experiment=fame: ", "one of horizon"),
    ("model@data=tiny", "model@data=tiny: ", "expected model="),
    ("kv_dtype=int8", "kv_dtype=int8: ", "bfloat16, null"),
    ("dtype=fp32", "dtype=fp32: ", "float32"),
    ("attention=magic", "attention=magic: ", "auto, canonical"),
    ("tracking.mode=on", "tracking.mode=on: ", "offline, online, disabled"),
    ("device=tpu", "device=tpu: ", "cpu, cuda or cuda:N"),
    ("data.channels=4", "data.channels=4: ", "3 (RGB) or 1 (luma)"),
    ("model=waypoint_360p data=freeway", "data=freeway: ", "data=synthetic"),
    ("data=video", "data.path=None: ", "a video file or a folder of images"),
    ("data=video data.path=nope.mp4", "data.path='nope.mp4': no such file", "a video file or a folder"),
    ("data=video data.path=text.mp4", "data.path='text.mp4': cannot be decoded", ""),
    ("data=pong data.path=text.mp4", "data.path='text.mp4': ", "only data=video reads a path"),
    ("data.folder=text.mp4", "data.folder=text.mp4: ", "a folder to write to"),
    ("checkpoint=nope.safetensors", "checkpoint=", "no such file; expected auto, null or a checkpoint that fits"),
    ("checkpoint=text.mp4", "checkpoint=", "not a whole safetensors file"),
    ("hydra.run.dir=text.mp4", "hydra.run.dir=", "a folder that can be made"),
    ("hydra.run.places=x", "hydra.run.places=x: ", "not in 'RunDir'"),
    ("--fast", "unrecognized arguments: --fast", ""),
    ("--config-name=other", "--config-name=other: not supported", "hydra.searchpath"),
    ("--cfg job ring_frame=8", "ring_frame=8: unknown key", "did you mean ring_frames?"),
    ("-m ring_frames=8,many", "ring_frames=many: ", "an integer"),
    ("-m ring_frames=8,3.5", "ring_frames=3.5: ", "an integer"),
    ("-m +ring_frame=8,9", "+ring_frame=8,9: unknown key", "did you mean ring_frames?"),
    ("-m kv=ring,rings", "kv=rings: ", "ring_uncompacted"),
    ("-m ring_frames=interval(1,4)", "ring_frames=interval(1,4): ", "a list of values"),
    ("-m hydra.sweep.dir=text.mp4", "hydra.sweep.dir=text.mp4: ", "a new or empty path"),
]

DRY_RUN = "-m ring_frames=2,0 kv=ring,full sweep.dry_run=true"


@pytest.fixture
def launch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command is started: it holds a file that is no video, no checkpoint and no folder."""
    (tmp_path / "text.mp4").write_text("not a video")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@dataclasses.dataclass(frozen=True)
class Refused:
    """What one command did. left: names of the files in its launch folder afterwards."""

    code: int
    out: str
    err: str
    torch_loaded: bool
    left: list[str]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Refused]:
    """Every command of REFUSALS, and a dry run, one after the other in one fresh process."""
    folder = tmp_path_factory.mktemp("launch")
    (folder / "text.mp4").write_text("not a video")
    program = (
        "import contextlib, io, json, os, sys\n"
        "from scripts.rollout import main\n"
        "results = {}\n"
        "for command in json.load(sys.stdin):\n"
        "    out, err = io.StringIO(), io.StringIO()\n"
        "    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):\n"
        "        code = main(command.split())\n"
        "    results[command] = [code, out.getvalue(), err.getvalue(), 'torch' in sys.modules, os.listdir()]\n"
        "json.dump(results, sys.stdout)\n"
    )
    commands = json.dumps([DRY_RUN, *(command for command, _, _ in REFUSALS)])
    done = subprocess.run(
        [sys.executable, "-c", program], input=commands, text=True, check=True, cwd=folder, stdout=subprocess.PIPE
    )
    return {command: Refused(*result) for command, result in json.loads(done.stdout).items()}


@pytest.mark.parametrize(("command", "begins", "says"), REFUSALS, ids=[command for command, _, _ in REFUSALS])
def test_bad_input_is_refused_in_one_line_before_torch_is_loaded_and_leaves_nothing_behind(
    command: str, begins: str, says: str, refused: dict[str, Refused]
):
    result = refused[command]
    assert (result.code, result.out) == (2, "")
    assert result.err.count("\n") == 1, result.err
    assert result.err.startswith(f"error: {begins}")
    assert says in result.err
    assert not result.torch_loaded
    assert result.left == ["text.mp4"]


def test_a_dry_run_loads_no_torch_and_leaves_nothing_behind(refused: dict[str, Refused]):
    result = refused[DRY_RUN]
    assert (result.code, result.err, result.torch_loaded, result.left) == (0, "", False, ["text.mp4"])
    assert "arithmetic" in result.out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("device", ["cuda", "cuda:7"])
def test_a_device_that_is_not_there_is_refused(device: str, launch_folder: Path, capsys: pytest.CaptureFixture[str]):
    assert (
        refusal(capsys, [f"device={device}"])
        == f"error: device={device}: expected cpu, as there is no CUDA device here"
    )


def test_a_checkpoint_that_does_not_fit_is_refused_with_both_values(
    launch_folder: Path, capsys: pytest.CaptureFixture[str]
):
    save_checkpoint("other.safetensors", FrameTransformer(preset("tiny")))
    line = refusal(capsys, ["model.d_model=64", "checkpoint=other.safetensors"])
    assert line.startswith(f"error: checkpoint={launch_folder / 'other.safetensors'}: ")
    assert "d_model=160" in line
    assert "d_model=64" in line


def test_a_folder_that_holds_a_run_is_refused_and_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, run = run_tiny(tmp_path)
    assert code == 0
    before = {path: path.read_bytes() for path in run.iterdir()}
    line = refusal(capsys, [*TINY, f"hydra.run.dir={run}", "seed=1"])
    assert line.startswith(f"error: hydra.run.dir={run}: already holds a run")
    assert {path: path.read_bytes() for path in run.iterdir()} == before


def test_a_video_that_turns_out_too_short_is_refused_in_one_line_and_its_folder_says_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert run_tiny(tmp_path)[0] == 0
    monkeypatch.chdir(tmp_path)
    video = ["data=video", "data.path=run/rollout.mp4", "num_frames=7", "hydra.run.dir=again"]
    line = refusal(capsys, [*TINY, *video])
    assert "6 frames found, 7 needed" in line
    summary = json.loads((tmp_path / "again" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "6 frames found" in summary["error"]


def test_the_config_can_be_shown_and_help_names_the_knobs(launch_folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--cfg", "job", "ring_frames=7"]) == 0
    assert "ring_frames: 7\n" in capsys.readouterr().out
    assert main(["--help"]) == 0
    assert "context_frames: 8\n" in capsys.readouterr().out
    assert [path.name for path in launch_folder.iterdir()] == ["text.mp4"]
