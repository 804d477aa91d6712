"""Processes killed while they save, and files that were made to do harm.

What is torn, flipped, foreign or of a later version is in ``test_state_files`` and ``test_reports_snapshot``.
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ringkv import RolloutState, files, statefile
from ringkv.resource import State
from tests.ring_tools import ring, same_bytes
from tests.strategies import Rollout

# -- kill -9 during save -------------------------------------------------------------------------------------


def two_states() -> list[State]:
    """A session at two clocks; 2 MB each, so that a write takes a while."""
    rollout = Rollout("ring", [ring(8), ring(8, 2)], tokens=64, heads=2, head_dim=128, seed="killed")
    states = []
    for first, end in ((0, 9), (9, 14)):
        rollout.run("a", range(first, end))
        states.append(rollout.resource.get_state("a"))
    return states


def forked(child: Callable[[], None]) -> int:
    """The pid of a process that runs ``child`` and nothing else. It must start no thread: those here are not there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, from Python 3.12 on
        pid = os.fork()
    if pid == 0:
        try:
            child()
        finally:
            os._exit(1)
    return pid


def killed_while_saving(path: Path, states: list[State], seconds: float, moment: str | None = None) -> int:
    """Save the states in turn in another process that gets SIGKILL after ``seconds``; how often it had saved.

    moment: it kills itself in its second save, in place of that function's call.
    """
    read_end, write_end = os.pipe()

    def child() -> None:
        for count in range(2**31):
            if moment is not None and count == 1:
                _kill_self_at(moment)
            statefile.write_state(path, states[count % 2])
            os.write(write_end, b".")

    pid = forked(child)
    os.close(write_end)
    if moment is None:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(read_end, "rb") as pipe:
        saved = len(pipe.read())
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    return saved


def _kill_self_at(moment: str) -> None:
    def kill(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def half_a_file(tensors: Any, path: Path, **kwargs: Any) -> None:
        save_file(tensors, path, **kwargs)
        os.truncate(path, path.stat().st_size // 2)
        kill()

    if moment == "write":
        statefile.save_file = half_a_file
    elif moment == "fsync of the folder":
        usual, calls = os.fsync, []
        files.os.fsync = lambda fd: kill() if calls else (calls.append(fd), usual(fd))
    else:
        setattr(files.os, moment, kill)


def check_what_a_kill_left(path: Path, states: list[State], saved: int) -> int | None:
    """The file is the last state that was saved or the one after it, whole. Which, None for a first one never done."""
    if saved == 0 and not path.exists():
        return None
    found, _ = statefile.read_state(path)
    possible = [count for count in (saved - 1, saved) if count >= 0 and same_bytes(found, states[count % 2])]
    assert len(possible) == 1, f"after {saved} saves the file is none of two states"
    return possible[0]


def kill_many_times(times: int, folder: Path, seed: int) -> list[int]:
    """Saves done before each kill, at random moments of a few saves' length."""
    states, moments, counts = two_states(), random.Random(seed), []
    path = folder / "a.state"
    start = time.perf_counter()
    for state in states:
        statefile.write_state(path, state)
    one_save = (time.perf_counter() - start) / 2
    torn = 0
    for _ in range(times):
        path.unlink(missing_ok=True)
        saved = killed_while_saving(path, states, moments.uniform(0, 6 * one_save))
        check_what_a_kill_left(path, states, saved)
        counts.append(saved)
        left = [each for each in folder.iterdir() if each != path]  # beside the file, where no reader looks
        torn += len(left)
        for each in left:
            each.unlink()
    print(f"\n{times} kills after {min(counts)} to {max(counts)} saves, {torn} in the middle of a write")
    return counts


def test_a_process_killed_at_a_random_moment_leaves_the_old_state_or_the_new_one(tmp_path: Path) -> None:
    assert len(kill_many_times(10, tmp_path, seed=0)) == 10


@pytest.mark.slow
def test_two_hundred_processes_killed_at_random_moments_leave_the_old_state_or_the_new_one(tmp_path: Path) -> None:
    counts = kill_many_times(200, tmp_path, seed=1)
    assert len(counts) == 200
    assert len(set(counts)) > 1


@pytest.mark.parametrize(("moment", "which"), [("write", 0), ("fsync", 0), ("replace", 0), ("fsync of the folder", 1)])
def test_a_process_killed_at_each_step_of_a_save_leaves_the_old_state_or_the_new_one(
    moment: str, which: int, tmp_path: Path
) -> None:
    states, path = two_states(), tmp_path / "a.state"
    saved = killed_while_saving(path, states, 0.0, moment)
    assert (saved, check_what_a_kill_left(path, states, saved)) == (1, which)


# -- files made to do harm -----------------------------------------------------------------------------------


class _Bomb:
    """Unpickling this leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def _pickled(path: Path, bomb: _Bomb) -> None:
    path.write_bytes(pickle.dumps(bomb))


def _torch_saved(path: Path, bomb: _Bomb) -> None:
    torch.save({"version": 1, "layers": bomb}, path)


def _in_the_metadata(path: Path, bomb: _Bomb) -> None:
    tensors = load_file(path)
    save_file(tensors, path, metadata={"ringkv": pickle.dumps(bomb, protocol=0).decode("ascii")})


def _in_a_tensor(path: Path, bomb: _Bomb) -> None:
    raw = bytearray(pickle.dumps(bomb))
    save_file({"layers.0.kv": torch.frombuffer(raw, dtype=torch.uint8)}, path, metadata={"ringkv": '{"version": 1}'})


@pytest.mark.parametrize("wrap", [_pickled, _torch_saved, _in_the_metadata, _in_a_tensor])
def test_no_way_to_read_a_file_executes_what_is_in_it(wrap: Callable[[Path, _Bomb], None], tmp_path: Path) -> None:
    parked, mark = tmp_path / "parked", tmp_path / "went off"
    rollout = Rollout("ring", [ring(3)], head_dim=8, sessions=2, parking_dir=parked)
    resource = rollout.resource
    for rid in "ab":
        rollout.run(rid, range(5))
    path = tmp_path / "a.state"
    resource.save("a", path)
    state, other = resource.get_state("a"), resource.get_state("b")
    resource.park("b")
    (in_the_lot,) = parked.iterdir()
    good = in_the_lot.read_bytes()
    for target in (path, in_the_lot):
        wrap(target, _Bomb(mark))
    for read in (
        lambda: resource.load("a", path),
        lambda: resource.wake("b"),
        lambda: resource.get_state("b"),
        lambda: RolloutState.read(path),
    ):
        with pytest.raises(ValueError, match=r"not a readable|not one that a cache saved|does not match its checksum"):
            read()
    assert not mark.exists()
    assert resource.is_parked("b")
    assert same_bytes(resource.get_state("a"), state)
    resource.check_integrity()
    in_the_lot.write_bytes(good)
    resource.wake("b")
    assert same_bytes(resource.get_state("b"), other)
    os.mkdir(mark)  # it would have gone off
    with pytest.raises(FileExistsError):
        pickle.loads(pickle.dumps(_Bomb(mark)))
