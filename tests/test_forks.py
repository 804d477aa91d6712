"""scripts/forks.py: one rollout, forked, with actions of their own for each fork."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from ringkv.harness.records import read_config, read_summary
from scripts.forks import main

SMALL = [
    "model=tiny",
    "model.d_model=32",
    "model.num_layers=2",
    "tokens_per_frame=16",
    "ring_frames=3",
    "data=synthetic",
    "num_frames=9",
    "context_frames=2",
    "threads=1",
]


@pytest.mark.parametrize("kv", ["ring", "paged_windowed"])
def test_forks_share_every_bit_until_their_actions_differ_and_not_after(kv: str, tmp_path: Path) -> None:
    run, gif = tmp_path / "run", tmp_path / "kept.gif"
    assert main([*SMALL, f"kv={kv}", "fork_frame=5", "actions=[UP,DOWN]", f"out={gif}", f"hydra.run.dir={run}"]) == 0
    apart = read_summary(run)["fork/mean_difference"]
    assert list(apart) == ["UP", "DOWN"]
    assert all(curve[:5] == [0.0] * 5 for curve in apart.values())
    assert all(min(curve[6:]) > 0 for curve in apart.values())  # frame 5 may have been reached by this very action
    assert apart["UP"] != apart["DOWN"]
    with Image.open(gif) as image:
        assert (image.n_frames, image.format) == (9, "GIF")
    assert gif.read_bytes() == (run / "forks.gif").read_bytes()
    assert read_config(run)["fork_frame"] == 5


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("fork_frame=1", "fork_frame=1: expected a generated frame, from 2 to 8"),
        ("fork_frame=9", "fork_frame=9: expected a generated frame, from 2 to 8"),
        ("actions=[UP,SIDEWAYS]", "actions=[UP,SIDEWAYS]: data=synthetic has NOOP, UP, RIGHT, DOWN, LEFT"),
        ("actions=[UP,UP]", "actions=[UP,UP]: expected one or more names of actions, each once"),
        ("num_sessions=2", "num_sessions=2: there is one for each of actions; expected 1"),
        ("kv=recompute_all", "kv=recompute_all: keeps no sessions that could be forked; expected another"),
        ("out=forks.png", "out="),
    ],
)
def test_bad_input_is_told_in_one_line(override: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, override]) == 2
    assert capsys.readouterr().err.startswith(f"error: {line}")
