"""A straight run and one that was stopped, saved and gone on with elsewhere are the same, bit for bit.

The model is the reference transformer, so actions, noise and rotary angles count, and its sessions are at different
clocks, local layers beside layers of dilation 3. Both runs have batches of the same shape.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.sampler import FrameSampler
from model.transformer import FrameTransformer
from ringkv import RolloutState, StepRunner
from tests.model_tools import SMALL, random_actions, random_frames, request, ring_for

FRAMES = 16
LATE = 4
"""Steps after which the second request comes: its clock is that many frames behind."""

REQUESTS = {
    rid: request(
        rid,
        FRAMES,
        context=random_frames(2, seed=index),
        actions=random_actions(FRAMES, seed=index),
        seed=5,
        stream=index,
    )
    for index, rid in enumerate(("early", "late"))
}


def runner_of() -> StepRunner:
    """A fresh resource, fresh weights from the seed, nothing shared with any other."""
    torch.manual_seed(3)
    resource = ring_for(SMALL, ring_frames=3, dilation=3, num_sessions=2)
    return StepRunner(resource, FrameSampler(FrameTransformer(SMALL)))


def drive(runner: StepRunner, frames: dict[str, list[Tensor]], until: int | None = None) -> None:
    """Step until ``early`` has made ``until`` frames, or all is done."""
    while runner.pending and (until is None or len(frames["early"]) < until):
        for result in runner.step():
            frames[result.rid].append(result.image)
        assert not runner.failed, runner.failed
        if len(frames["early"]) == LATE and runner._find("late") is None:
            runner.submit(REQUESTS["late"])


def started() -> tuple[StepRunner, dict[str, list[Tensor]]]:
    runner = runner_of()
    runner.submit(REQUESTS["early"])
    return runner, {"early": [], "late": []}


def stopped(at: int, folder: Path) -> dict[str, list[Tensor]]:
    """The frames up to ``at``, and a saved state of both requests in ``folder``."""
    runner, frames = started()
    drive(runner, frames, at)
    for rid in runner.resident:
        runner.state_of(rid).save(folder / rid)
    return frames


def resumed(folder: Path) -> dict[str, list[Tensor]]:
    """The rest of the frames, in fresh objects."""
    runner, frames = runner_of(), {"early": [], "late": []}
    for rid, item in REQUESTS.items():
        runner.submit(item, RolloutState.read(folder / rid))
    while runner.pending:
        for result in runner.step():
            frames[result.rid].append(result.image)
    assert not runner.failed, runner.failed
    return frames


@pytest.fixture(scope="module")
def straight() -> dict[str, list[Tensor]]:
    runner, frames = started()
    drive(runner, frames)
    return frames


@pytest.mark.parametrize("at", [9, 10, 11, 12])
def test_a_run_that_was_stopped_and_resumed_is_the_run_that_was_not(
    at: int, straight: dict[str, list[Tensor]], tmp_path: Path
) -> None:
    """Frames 9 and 12 are on the dilation, 10 and 11 off it; frame 9 is past two wraps of a local layer."""
    before = stopped(at, tmp_path)
    assert len(before["late"]) not in (0, at)
    after = resumed(tmp_path)
    for rid, frames in straight.items():
        assert len(frames) == FRAMES
        assert torch.equal(torch.stack(before[rid] + after[rid]), torch.stack(frames)), rid


def test_a_run_goes_on_in_another_process(straight: dict[str, list[Tensor]], tmp_path: Path) -> None:
    before = stopped(10, tmp_path)
    program = (
        "import sys, torch; from pathlib import Path; from tests.test_sessions_resume import resumed; "
        "torch.set_num_threads(int(sys.argv[2])); "
        "folder = Path(sys.argv[1]); torch.save(resumed(folder), folder / 'rest')"
    )
    root = Path(__file__).resolve().parents[1]
    threads = str(torch.get_num_threads())
    subprocess.run([sys.executable, "-c", program, str(tmp_path), threads], check=True, cwd=root, timeout=240)
    after = torch.load(tmp_path / "rest", weights_only=True)
    for rid, frames in straight.items():
        assert torch.equal(torch.stack(before[rid] + after[rid]), torch.stack(frames)), rid
