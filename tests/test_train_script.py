"""scripts/train.py: what a run leaves behind, how it goes on, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from model.checkpoint import load_checkpoint, read_metadata
from model.config import preset
from ringkv.harness.records import read_summary
from scripts.app import schema
from scripts.app.build import Weights, differences_from_training
from scripts.app.compose import CONF_DIR, compose_all
from scripts.app.geometry import model_config
from scripts.app.train_check import checked
from scripts.app.train_eval import psnr
from scripts.train import main
from tests.cli_tools import WandbStub

schema.register()

RECIPES = sorted(file.stem for file in (CONF_DIR / "recipe").glob("*.yaml"))
SMALL_RECALL = (
    "recipe=recall", "model.d_model=16", "model.num_heads=2", "model.num_kv_heads=1", "model.head_dim=8",
    "model.num_layers=2", "global_period=2", "clips=2", "steps=6", "batch=2", "frames=9", "warmup_steps=2", "threads=1",
    "evaluate_every=0", "save_every=2",
)  # fmt: skip


def compose(*overrides: str) -> Any:
    (config,) = compose_all("train", overrides, multirun=False).points
    return config


def rows_of(run: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    rows = [json.loads(line, parse_constant=refuse) for line in (run / "curve.jsonl").read_text().splitlines()]
    for row in rows:
        assert row.pop("seconds") > 0
    return rows


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps without a break."""
    run = tmp_path_factory.mktemp("straight") / "run"
    assert main([*SMALL_RECALL, "tracking=disabled", f"hydra.run.dir={run}", f"out={run.parent}/kept.safetensors"]) == 0
    return run


def test_a_run_leaves_weights_state_curve_and_record(straight: Path):
    names = {path.name for path in straight.iterdir()}
    assert names >= {"config.json", "curve.jsonl", "curve.png", "state.safetensors", "checkpoint.safetensors"}
    rows = rows_of(straight)
    assert [row["step"] for row in rows] == list(range(6))
    assert "psnr/ring4/frame1" in rows[-1]
    assert not any("psnr/ring4/frame1" in row for row in rows[:-1])
    assert (straight / "curve.png").read_bytes().startswith(b"\x89PNG")
    summary = read_summary(straight)
    assert summary["status"] == "ok"
    assert summary["train/steps"] == 6
    assert summary["train/loss"] == pytest.approx(sum(row["loss"] for row in rows) / 6)
    assert summary["psnr/ring4/frame1"] == rows[-1]["psnr/ring4/frame1"]


def test_the_weights_say_what_they_were_trained_on_and_how(straight: Path):
    path = straight / "checkpoint.safetensors"
    assert (straight.parent / "kept.safetensors").read_bytes() == path.read_bytes()
    extra = read_metadata(path)["extra"]
    assert (extra["data"], extra["steps"], extra["ring_frames"], extra["dilation"]) == ("loops", 6, [3, 12], [1, 4])
    assert extra["context_frames"] == [1, 9]
    assert extra["recipe"]["name"] == "recall"
    assert extra["recipe"]["steps"] == 6
    assert len(extra["data_hash"]) == 64
    command = extra["command"].split()
    assert command[:3] == ["python", "scripts/train.py", "recipe=recall"]
    assert "steps=6" in command
    assert not any(word.startswith(("out=", "hydra.", "tracking", "evaluate_every", "save_every")) for word in command)
    config = model_config(checked(compose(*SMALL_RECALL)))
    assert {weight.dtype for weight in load_checkpoint(path, config, torch.bfloat16).parameters()} == {torch.bfloat16}
    assert path.stat().st_size < 2.5 * config.num_parameters + 10_000


def test_a_run_goes_on_from_the_folder_of_one_that_stopped_as_if_it_had_not(straight: Path, tmp_path: Path):
    stopped, resumed = tmp_path / "stopped", tmp_path / "resumed"
    assert main([*SMALL_RECALL, "tracking=disabled", "stop=3", f"hydra.run.dir={stopped}"]) == 0
    assert len(rows_of(stopped)) == 3
    assert main([*SMALL_RECALL, "tracking=disabled", f"resume={stopped}", f"hydra.run.dir={resumed}"]) == 0
    assert read_summary(resumed)["train/resumed_at"] == 3
    expected, found = rows_of(straight), rows_of(resumed)
    assert [row["loss"] for row in found] == [row["loss"] for row in expected]
    assert found[-1] == expected[-1]
    for name in ("checkpoint.safetensors", "state.safetensors"):
        assert (resumed / name).read_bytes() == (straight / name).read_bytes(), name


def test_a_run_of_another_recipe_is_not_gone_on_with(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = tmp_path / "run"
    code = main([*SMALL_RECALL, "lr=0.5", "tracking=disabled", f"resume={straight}", f"hydra.run.dir={run}"])
    line = capsys.readouterr().err
    assert code == 2
    assert line.startswith(f"error: {straight / 'state.safetensors'}: saved with recipe=")
    assert line.count("\n") == 1
    assert read_summary(run)["status"] == "failed"


def test_every_step_reaches_the_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stub = WandbStub(tmp_path / "stub")
    monkeypatch.syspath_prepend(str(stub.folder))
    monkeypatch.delitem(__import__("sys").modules, "wandb", raising=False)
    monkeypatch.setenv("WANDB_STUB_CALLS", str(stub.calls_file))
    run = tmp_path / "run"
    assert main([*SMALL_RECALL, "stop=2", f"hydra.run.dir={run}"]) == 0
    monkeypatch.delitem(__import__("sys").modules, "wandb", raising=False)
    *logs, media = stub.calls("log")
    assert (media["keys"], media["step"]) == (["strip"], 1), "the picture of the curve, once and last"
    assert [call["step"] for call in logs] == [0, 1]
    assert {"train/loss", "train/gradient_norm", "train/seconds"} <= set(logs[0]["keys"])
    assert [call["exit_code"] for call in stub.calls("finish")] == [0]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_trains_the_preset_of_its_name_and_sees_the_rings_that_it_is_served_with(name: str):
    config = checked(compose(f"recipe={name}"))
    assert model_config(config).weight_geometry() == preset(name).weight_geometry()
    assert config.recipe == config.model.preset == name
    if name != "recall":
        assert (config.min_ring_frames, config.max_ring_frames) == (4, 32)
        assert config.long_frames >= 36


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["steps=0"], "steps=0: expected an integer >= 1"),
        (["recipe=chess"], "recipe=chess: expected one of freeway, pong, recall"),
        (["lr=-1"], "lr=-1.0: expected a finite number >= 0"),
        (["stop=9999"], "stop=9999: expected an integer from 1 to "),
        (["threads=0"], "threads=0: expected an integer from 1 to "),
        (["clip_frames=20"], "clip_frames=20: expected at least 37, a whole sequence"),
        (["data.name=video"], "data.name=video: expected one of freeway, pong, breakout, loops"),
        (["data.name=loops"], "data.name=loops: its frames are 3 x 16 x 16, model=freeway takes 3 x 64 x 64"),
        (["resume=nowhere"], "no state.safetensors there; expected the folder of a training run"),
        (["out=nowhere/x.safetensors"], "expected NAME.safetensors in a folder that can be written to"),
        (["-m", "seed=1,2"], "-m: train has no sweeps; expected a single run"),
        (["step=3"], "step=3: unknown key; did you mean steps?"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    overrides: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    code = main(overrides)
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert line in captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_psnr_is_that_of_8_bit_frames():
    import numpy as np

    truth = np.zeros((2, 3, 4, 4, 1), np.uint8)
    frames = truth.copy()
    frames[:, 1] = 255
    frames[0, 2], frames[1, 2] = 16, 32
    expected = [48.130803608679344, 0.0, 10 * (np.log10(255**2 / 256) + np.log10(255**2 / 1024)) / 2]
    assert psnr(frames, truth) == pytest.approx(expected)


def test_serving_within_the_trained_range_is_no_difference_and_outside_is(straight: Path):
    (config,) = compose_all("rollout", ["model=freeway", "ring_frames=32"], multirun=False).points
    path = straight / "checkpoint.safetensors"

    class Model:
        config = preset("freeway")

    trained = {"ring_frames": [4, 32], "dilation": [1, 1], "context_frames": [1, 36]}
    weights = Weights(Model(), path, trained)  # type: ignore[arg-type]
    assert differences_from_training(config, weights) == []
    config.ring_frames = 33
    assert differences_from_training(config, weights) == ["ring_frames=33: the weights were trained with 4 to 32"]
