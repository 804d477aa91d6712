"""What the tests of the command line share: a tiny rollout, and a stand-in for wandb that writes down its calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.rollout import main

TINY = (
    "model=tiny",
    "data=synthetic",
    "tracking=disabled",
    "threads=1",
    "model.d_model=16",
    "model.num_layers=2",
    "model.head_dim=8",
    "global_period=2",
    "dilation=2",
    "tokens_per_frame=16",
    "sigmas=[1.0,0.5,0.0]",
    "ring_frames=2",
    "num_frames=6",
    "context_frames=2",
)
"""Overrides for a rollout of a few milliseconds a frame that wraps its ring twice."""

WANDB_STUB = '''
"""Stands in for wandb: appends every call to the file that WANDB_STUB_CALLS names."""
import json, os


def _note(call, **fields):
    with open(os.environ["WANDB_STUB_CALLS"], "a") as file:
        file.write(json.dumps({"call": call, **fields}, allow_nan=False) + "\\n")


class _Summary(dict):
    def update(self, values):
        _note("summary", values=values)


class _Run:
    def __init__(self, id, config, dir):
        self.id, self.config, self.summary = id, config, _Summary()
        self.dir = os.path.join(dir, "wandb", "offline-run-x", "files")

    def log(self, values, step=None):
        clocks = {key: value for key, value in values.items() if key.startswith("clock/")}
        _note("log", id=self.id, step=step, keys=sorted(values), clocks=clocks)
        if [self.config.get("ring_frames"), step] == json.loads(os.environ.get("WANDB_STUB_RAISES", "null")):
            raise RuntimeError("the stub was told to raise here")

    def finish(self, exit_code=0):
        _note("finish", id=self.id, exit_code=exit_code)


def init(**arguments):
    _note("init", id=arguments["id"], config=arguments["config"], group=arguments["group"], mode=arguments["mode"])
    return _Run(arguments["id"], arguments["config"], arguments["dir"])


def Video(path, format):
    return {"video": os.path.basename(path)}


def Image(path):
    return {"image": os.path.basename(path)}
'''


class WandbStub:
    """A folder with a ``wandb`` module that records calls, for this process and for its children."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls_file = folder / "calls.jsonl"
        folder.mkdir()
        (folder / "wandb.py").write_text(WANDB_STUB)

    def calls(self, kind: str) -> list[dict[str, Any]]:
        """Recorded calls of one kind, in order."""
        if not self.calls_file.exists():
            return []
        calls = [json.loads(line) for line in self.calls_file.read_text().splitlines()]
        return [call for call in calls if call["call"] == kind]


def run_tiny(folder: Path, *overrides: str) -> tuple[int, Path]:
    """Run the tiny rollout in process into ``folder``/run; exit code and run folder."""
    run = folder / "run"
    return main([*TINY, f"hydra.run.dir={run}", *overrides]), run


def refusal(capsys: pytest.CaptureFixture[str], argv: Sequence[str]) -> str:
    """The one line on stderr with which ``argv`` is refused."""
    capsys.readouterr()
    code = main(list(argv))
    captured = capsys.readouterr()
    assert code == 2, f"{argv} exited with {code}: {captured.err}"
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]
