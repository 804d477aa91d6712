"""Thousands of frames of rollouts that come, go, fork, go back, fail and are parked: nothing grows, nothing slows down.

What cannot depend on the machine is asserted to the unit: objects and bytes that are left when all have gone, and calls
that a fixed piece of work takes. Resident memory, which also holds what Python does not see, and the processor time of
a step have loose bounds. Seconds are printed.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median

import pytest
import torch
from torch import Tensor

from ringkv import RolloutRequest, StepRunner
from ringkv.harness.meters import PeakRss
from ringkv.policies import LruPark
from tests.runner_tools import ToyModel, build, request, run_all_of

SESSIONS = 8
MOST = 20
"""Rollouts at a time: more than there are sessions."""
STREAMS = 6
FRAMES = 20
UNDO = 4
CHECKS = 5
"""Times that everything is sent home and counted."""
MOST_GROWN_MIB = 4
"""Resident memory after warm-up: 250 bytes a frame kept for ever in the long soak, and ten times what is seen."""
MOST_SLOWER = 1.5
"""The median step at the end over that after warm-up. A short soak is not held to it: its mix of steps varies more."""


@cache
def alone(stream: int) -> list[Tensor]:
    """The frames of a rollout of this stream when nothing happens to it."""
    return run_all_of(StepRunner(build(1), ToyModel()), request("alone", stream, num_frames=FRAMES))["alone"]


class Churn:
    """A runner and what is done to it.

    frames: made so far by each rollout that is under way. step_s: seconds of this thread for each step after warm-up,
    in which the time that others had the processor is not counted.
    """

    def __init__(self, folder: Path | None, seed: int) -> None:
        self.random = random.Random(seed)
        self.model = ToyModel()
        resource = build(SESSIONS, folder, undo_frames=UNDO)
        self.runner = StepRunner(resource, self.model, policy=LruPark(quantum_frames=3), clock=lambda: 0.0)
        self.frames: dict[str, list[Tensor]] = {}
        self.requests: dict[str, RolloutRequest] = {}
        self.done: Counter[str] = Counter()
        self.names = 0
        self.committed = 0
        self.step_s: list[float] = []

    def new_name(self) -> str:
        self.names += 1
        return f"r{self.names}"

    def begin(self, rid: str) -> None:
        self.requests[rid] = request(rid, self.random.randrange(STREAMS), num_frames=FRAMES)
        self.frames[rid] = []
        self.runner.submit(self.requests[rid])

    def forget(self, rid: str) -> None:
        del self.frames[rid], self.requests[rid]

    def any(self, among: list[str]) -> str | None:
        return self.random.choice(among) if among else None

    # -- what can happen between two steps; each says whether it did ---------------------------------------------

    def submit(self) -> bool:
        if len(self.frames) >= MOST:
            return False
        self.begin(self.new_name())
        return True

    def cancel(self) -> bool:
        rid = self.any(list(self.frames))
        if rid is None:
            return False
        self.runner.cancel(rid)
        self.forget(rid)
        return True

    def reset(self) -> bool:
        """From frame 0 again, under the same name."""
        rid = self.any(list(self.frames))
        if rid is None:
            return False
        self.runner.cancel(rid)
        self.begin(rid)
        return True

    def fork(self) -> bool:
        seated = [rid for rid in self.runner.resident if 0 < len(self.frames.get(rid, ())) < FRAMES]
        free = self.runner.resource.num_free_sessions
        unclaimed = sum(self.runner.resource.session_of(rid) is None for rid in self.runner.resident)
        rid = self.any(seated)
        if rid is None or free - unclaimed < 1 or len(self.frames) >= MOST:
            return False
        new = self.new_name()
        self.runner.fork(rid, [new])
        self.requests[new] = dataclasses.replace(self.requests[rid], rid=new)
        self.frames[new] = list(self.frames[rid])
        return True

    def rewind(self) -> bool:
        rid = self.any([rid for rid in self.runner.resident if self.frames.get(rid)])
        if rid is None:
            return False
        frames = self.random.randint(1, UNDO)
        try:
            self.runner.rewind(rid, frames)
        except ValueError:
            self.done["rewind refused"] += 1  # further than it has been, or than the log goes
            return False
        del self.frames[rid][-frames:]
        return True

    def park(self) -> bool:
        seated = [rid for rid in self.runner.resident if self.frames.get(rid) and len(self.frames[rid]) < FRAMES]
        rid = self.any(seated)
        if rid is None:
            return False
        self.runner.park(rid)
        return True

    def wake(self) -> bool:
        waiting = self.runner.waiting
        parked = [rid for rid in self.frames if self.runner.resource.is_parked(rid) and rid not in waiting]
        rid = self.any(parked)
        if rid is None:
            return False
        self.runner.wake(rid)
        return True

    def fail(self) -> bool:
        """The next step breaks for one rollout, in a layer of its committing pass; it is driven again."""
        rid = self.any([rid for rid in self.runner.resident if 2 <= len(self.frames.get(rid, ())) < FRAMES])
        if rid is None:
            return False
        self.model.fail_on = {(len(self.frames[rid]), self.requests[rid].stream)}
        self.model.fail_after_layer = self.random.randint(1, 2)
        self.step()
        self.model.fail_on = set()
        for failed in list(self.runner.failed):
            self.runner.retry(failed)
        return True

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One step; frames come in order, and a rollout that is over was the one that it is alone."""
        start = time.thread_time()
        results = self.runner.step()
        self.step_s.append(time.thread_time() - start)
        for result in results:
            made = self.frames[result.rid]
            assert result.frame == len(made), result.rid
            made.append(result.image)
            self.committed += 1
        for rid in [rid for rid, made in self.frames.items() if len(made) == FRAMES]:
            expected = torch.stack(alone(self.requests[rid].stream))
            torch.testing.assert_close(torch.stack(self.frames[rid]), expected, rtol=1e-5, atol=1e-5)
            self.done["finished"] += 1
            self.runner.cancel(rid)
            self.forget(rid)

    def until(self, frames: int) -> None:
        """Random churn until so many frames are committed in all."""
        what = (
            self.submit,
            self.submit,
            self.cancel,
            self.reset,
            self.fork,
            self.rewind,
            self.park,
            self.wake,
            self.fail,
        )
        while self.committed < frames:
            if self.random.random() < 0.5:
                act = self.random.choice(what)
                self.done[act.__name__] += act()
            if len(self.frames) < SESSIONS:
                self.done["submit"] += self.submit()
            self.step()

    def go_home(self) -> None:
        """End everything."""
        for rid in list(self.frames):
            self.runner.cancel(rid)
            self.forget(rid)
        assert (self.runner.pending, self.runner.resident, self.runner.waiting) == (0, (), ())


def leftovers() -> Counter[str]:
    """Live tensors, and live objects of the package's classes, by class."""
    gc.collect()
    kinds = (type(value) for value in gc.get_objects())
    return Counter(
        kind.__name__ for kind in kinds if issubclass(kind, Tensor) or str(kind.__module__).startswith("ringkv")
    )


def calls_of(work: Callable[[], object]) -> int:
    """Python and C functions that ``work`` calls: its cost on a machine without a clock."""
    counted = [0]

    def count(frame: object, event: str, arg: object) -> None:
        counted[0] += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return counted[0]


def fixed_work(churn: Churn) -> Callable[[], None]:
    """A full house for six frames, two of them parked and woken, and home again."""

    def work() -> None:
        rids = [f"fixed {index}" for index in range(SESSIONS)]
        for index, rid in enumerate(rids):
            churn.runner.submit(request(rid, index, num_frames=FRAMES))
        for index in range(6):
            if index == 3:
                churn.runner.park(rids[0])
                churn.runner.wake(rids[0])
            assert len(churn.runner.step()) == SESSIONS
        for rid in rids:
            churn.runner.cancel(rid)

    return work


def soak(frames: int, folder: Path | None, seed: int) -> Churn:
    """Churn in ``CHECKS`` parts and one more to warm up; after each all is counted."""
    for stream in range(STREAMS):
        alone(stream)
    churn = Churn(folder, seed)
    resource = churn.runner.resource
    empty = resource.memory_report()
    work, rss = fixed_work(churn), PeakRss()
    history, objects, resident = [], [], []
    for part in range(CHECKS + 1):
        start, before = time.perf_counter(), churn.committed
        churn.until(frames * (part + 1) // (CHECKS + 1))
        resource.check_integrity()
        seconds = (time.perf_counter() - start) / (churn.committed - before)
        churn.go_home()
        resource.check_integrity()
        resource.post_warmup_validate()
        assert (resource.memory_report(), resource.num_free_sessions) == (empty, SESSIONS)
        assert folder is None or not any(folder.rglob("*.*"))
        churn.model.batches.clear()
        history.append((calls_of(work), leftovers()))
        objects.append(len(gc.get_objects()))
        resident.append(rss.current_bytes())
        if part == 0:
            churn.step_s.clear()
        print(
            f"\n{churn.committed} frames: {1e6 * seconds:.0f} us a frame, {history[-1][0]} calls of fixed work", end=""
        )
    print(f"\n{dict(churn.done)}")
    warm = history[1:]
    assert len({calls for calls, _ in warm}) == 1, [calls for calls, _ in warm]
    assert all(left == warm[0][1] for _, left in warm), [left - warm[0][1] for _, left in warm]
    assert max(objects[1:]) - min(objects[1:]) < 100, objects  # of any class; this list and the history are among them
    grown = (resident[-1] - resident[0]) / 2**20
    assert grown < MOST_GROWN_MIB, f"{grown:.1f} MiB more after warm-up: {[each >> 10 for each in resident]} KiB"
    return churn


ACTS = ("submit", "cancel", "reset", "fork", "rewind", "park", "wake", "fail", "finished")


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_random_churn_leaves_nothing_behind_and_costs_the_same_in_the_end_as_in_the_beginning(
    on_disk: bool, tmp_path: Path
) -> None:
    churn = soak(2000, tmp_path / "parked" if on_disk else None, seed=on_disk)
    assert [act for act in ACTS if not churn.done[act]] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_thousand_frames_of_random_churn(tmp_path: Path) -> None:
    churn = soak(20_000, None, seed=7)
    assert churn.committed >= 20_000
    quarter = len(churn.step_s) // 4
    first, last = median(churn.step_s[:quarter]), median(churn.step_s[-quarter:])
    assert last < MOST_SLOWER * first, (
        f"median step of {quarter}: {1e6 * first:.0f} us after warm-up, {1e6 * last:.0f} us in the end"
    )
    assert [act for act in ACTS if churn.done[act] < 20] == []
