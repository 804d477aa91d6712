"""More requests than seats: policies, cancelling, deadlines, events. Time is a variable, never a clock."""

from __future__ import annotations

import errno
import gc
import threading

import pytest
import torch

from ringkv import FrameStep, StepContext, StepRunner, statefile
from ringkv.policies import Fifo, LruPark, NoSeat, Refuse
from tests.runner_tools import ToyModel, build, request, run_all, run_all_frames, run_all_of, solo


def serve(runner, *requests):
    """Submit all; the frames by rid, and in which order the requests got their first seat."""
    stream = runner.watch()
    frames = run_all_of(runner, *requests)
    return frames, [event.rid for event in stream.take() if event.kind == "seated"]


def kinds(events, rid=None):
    return [event.kind for event in events if rid in (None, event.rid)]


# -- policies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantum", [1, 2, 16])
@pytest.mark.parametrize("sessions", [1, 2, 3])
@pytest.mark.parametrize("on_disk", [False, True])
def test_five_rollouts_take_turns_on_few_seats_and_equal_their_solo_runs(sessions, quantum, on_disk, tmp_path):
    resource = build(sessions, parking_dir=tmp_path if on_disk else None)
    runner = StepRunner(resource, ToyModel(), policy=LruPark(quantum_frames=quantum))
    frames, order = serve(runner, *(request(f"r{i}", stream=i, num_frames=5 + i) for i in range(5)))
    assert order == [f"r{i}" for i in range(5)]
    for i in range(5):
        expected = solo(i, num_frames=5 + i)
        torch.testing.assert_close(torch.stack(frames[f"r{i}"]), expected, rtol=1e-6, atol=1e-6)
    runner.step()
    assert resource.num_free_sessions == sessions
    assert (resource.memory_report()["parked"], list(tmp_path.iterdir())) == (0, [])
    resource.check_integrity()


def test_nobody_starves_while_a_rollout_never_ends():
    """One seat, a quantum of 3: whoever waits is served after at most 3 frames of each of those before it."""
    runner = StepRunner(build(1), ToyModel(), policy=LruPark(quantum_frames=3))
    for i in range(4):
        runner.submit(request(f"r{i}", stream=i, num_frames=1000, context=0))
    served = [result.rid for _ in range(48) for result in runner.step()]
    assert served == [f"r{i}" for _ in range(4) for i in range(4) for _ in range(3)]


def test_newcomers_and_those_that_were_parked_stand_in_one_line():
    runner = StepRunner(build(1), ToyModel(), policy=LruPark(quantum_frames=2))
    runner.submit(request("a", num_frames=6, context=0))
    served = []
    for step in range(12):
        if step in (1, 4):
            runner.submit(request("bc"[step // 4], num_frames=4, context=0))
        served += [result.rid for result in runner.step()]
    assert "".join(served) == "aabbaaccbbaacc"[:12]


def test_an_idle_rollout_gives_up_its_seat_before_a_busy_one_does():
    runner = StepRunner(build(2), ToyModel(), policy="lru_park")
    runner.submit(request("idle", num_frames=20))
    runner.submit(request("busy", stream=1, num_frames=20))
    for _ in range(3):
        runner.step()
    runner.submit(request("new", stream=2, num_frames=20))
    served = [{result.rid for result in runner.step(ready=["busy", "new"])} for _ in range(6)]
    assert set().union(*served) == {"busy", "new"}
    assert (runner.resident, runner.resource.is_parked("idle")) == (("busy", "new"), True)
    assert runner.pending == 3
    runner.step(ready=["idle"])  # wants a frame again, and takes the seat of one that does not
    assert "idle" in runner.resident
    assert len(runner.resident) == 2


def test_a_request_that_wants_no_frame_keeps_its_place_and_takes_no_seat_from_others():
    runner = StepRunner(build(1), ToyModel(), policy="lru_park")
    runner.submit(request("a", num_frames=20))
    runner.step()
    for rid in ("b", "c"):
        runner.submit(request(rid, num_frames=20))
    runner.step(ready=["a"])
    assert (runner.resident, runner.waiting) == (("a",), ("b", "c"))
    runner.step(ready=["c"])
    assert (runner.resident, runner.waiting) == (("c",), ("b",))
    runner.step(ready=["b", "c"])
    assert runner.resident == ("c",)  # within its quantum


def test_a_failed_rollout_gives_up_its_seat_and_is_driven_again_when_it_is_retried():
    model = ToyModel()
    model.fail_on, model.fail_after_layer = {(4, 0)}, 2
    runner = StepRunner(build(1), model, policy="lru_park")
    frames = run_all_of(runner, request("bad"), request("good", stream=1))
    assert torch.equal(torch.stack(frames["good"]), solo(1))
    assert isinstance(runner.failed["bad"], FloatingPointError)
    assert runner.resource.is_parked("bad")
    model.fail_on = set()
    runner.retry("bad")
    assert torch.equal(torch.stack(frames["bad"] + run_all_frames(runner)), solo(0))


def test_refusing_means_that_nobody_waits():
    runner = StepRunner(build(2), ToyModel(), policy="refuse")
    runner.submit(request("a"))
    runner.submit(request("b", stream=1))
    for _ in range(2):
        with pytest.raises(NoSeat, match="'c': no seat is free"):
            runner.submit(request("c"))
    frames = run_all(runner)
    assert sorted(frames) == ["a", "b"]
    for rid in "cd":  # finished ones leave before the next step
        runner.submit(request(rid))
    assert sorted(run_all(runner)) == ["c", "d"]


def test_a_policy_is_named_or_given_and_needs_what_it_uses():
    assert [StepRunner(build(1), ToyModel(), policy=name).policy for name in ("refuse", "fifo", "lru_park")] == [
        Refuse(),
        Fifo(),
        LruPark(),
    ]
    with pytest.raises(ValueError, match="policy='random': expected one of refuse, fifo, lru_park"):
        StepRunner(build(1), ToyModel(), policy="random")
    with pytest.raises(ValueError, match="quantum_frames=0"):
        LruPark(quantum_frames=0)


# -- faults of the parking place -----------------------------------------------------------------------------


def _full_disk(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_is_full_makes_others_wait_and_loses_nothing(tmp_path, monkeypatch):
    runner = StepRunner(build(1, parking_dir=tmp_path), ToyModel(), policy=LruPark(quantum_frames=2))
    stream = runner.watch()
    monkeypatch.setattr(statefile, "save_file", _full_disk)
    frames, order = serve(runner, *(request(f"r{i}", stream=i) for i in range(3)))
    assert order == ["r0", "r1", "r2"]
    for i in range(3):
        assert torch.equal(torch.stack(frames[f"r{i}"]), solo(i))
    reasons = {event.reason for event in stream.take() if event.kind == "not parked"}
    assert reasons == {"OSError: [Errno 28] No space left on device"}
    assert not runner.failed


def test_a_rollout_that_cannot_be_woken_is_set_aside_parked_and_woken_by_a_retry(monkeypatch):
    runner = StepRunner(build(1), ToyModel())
    runner.submit(request("r"))
    frames = [runner.step()[0].image for _ in range(4)]
    runner.park("r")
    usual = runner.resource._import

    def failing(*args):
        usual(*args)
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(runner.resource, "_import", failing)
        runner.wake("r")
        runner.submit(request("other", stream=1))
        other = run_all_frames(runner)
    assert torch.equal(torch.stack(other), solo(1))
    assert isinstance(runner.failed["r"], torch.OutOfMemoryError)
    assert runner.resource.is_parked("r")
    runner.retry("r")
    assert torch.equal(torch.stack(frames + run_all_frames(runner)), solo(0))


# -- cancelling ----------------------------------------------------------------------------------------------


def test_cancelling_works_wherever_a_request_is():
    runner = StepRunner(build(1), ToyModel(), policy=LruPark(quantum_frames=1))
    for i, rid in enumerate(("seated", "parked", "queued", "held", "left")):
        runner.submit(request(rid, stream=i))
        if rid == "held":
            while not runner.resource.is_parked("held"):
                runner.step()
            runner.park("held")
    while not (runner.resource.is_parked("parked") and runner.resident != ("left",)):
        runner.step()
    for rid in ("held", "parked", *runner.resident, "queued", "seated", "nobody", "held"):
        runner.cancel(rid)
    assert (runner.pending, runner.resource.num_free_sessions) == (1, 1)
    assert runner.ended == dict.fromkeys(("held", "parked", "queued", "seated"), "cancelled")
    while runner.pending:
        assert {result.rid for result in runner.step()} <= {"left"}
    runner.resource.check_integrity()


@pytest.mark.parametrize("phase", ["observe", "generate"])
def test_cancelling_in_the_middle_of_a_step_takes_effect_after_it(phase):
    class Leaving(ToyModel):
        def observe(self, *args):
            if phase == "observe":
                runner.cancel("leaves")
            super().observe(*args)

        def generate(self, *args):
            runner.cancel("leaves")
            return super().generate(*args)

    runner = StepRunner(build(2), Leaving())
    frames = run_all_of(runner, request("leaves"), request("stays", stream=1))
    assert len(frames.get("leaves", [])) == (0 if phase == "observe" else 2)
    torch.testing.assert_close(torch.stack(frames["stays"]), solo(1), rtol=1e-6, atol=1e-6)
    assert runner.ended["leaves"] == "cancelled"
    runner.step()
    assert runner.resource.num_free_sessions == 2


def test_a_step_inside_a_step_is_refused():
    class Nested(ToyModel):
        def observe(self, *args):
            for call in (runner.step, lambda: runner.park("r"), lambda: runner.rewind("r", 1)):
                with pytest.raises(RuntimeError, match="inside a step"):
                    call()
            with pytest.raises(RuntimeError, match="inside a step"):
                runner.fork("r", ["s"])
            super().observe(*args)

    runner = StepRunner(build(1), Nested())
    runner.submit(request("r"))
    assert len(runner.step()) == 1


# -- deadlines -----------------------------------------------------------------------------------------------


class Time:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_request_past_its_deadline_ends_with_a_reason_wherever_it_is():
    time = Time()
    runner = StepRunner(build(1), ToyModel(), policy=LruPark(quantum_frames=1), clock=time)
    stream = runner.watch()
    runner.submit(request("seated", num_frames=50), deadline=110.0)
    runner.submit(request("parked", stream=1, num_frames=50), deadline=110.5)
    runner.submit(request("late", stream=2, num_frames=50), deadline=100.0)
    runner.submit(request("patient", stream=3, num_frames=4))
    for _ in range(3):
        runner.step()
    assert runner.ended == {"late": "deadline passed 0.000 s ago, at frame 0"}
    time.now = 110.25
    runner.step()
    assert "seated" in runner.ended
    time.now = 111.0
    served = {result.rid for _ in range(4) for result in runner.step()}
    assert served == {"patient"}
    assert {rid for rid, reason in runner.ended.items() if reason.startswith("deadline")} == {
        "late",
        "seated",
        "parked",
    }
    assert runner.resource.memory_report()["parked"] == 0
    late = [event for event in stream.take() if event.kind == "deadline"]
    assert [(event.rid, event.time) for event in late] == [("late", 100.0), ("seated", 110.25), ("parked", 111.0)]
    runner.resource.check_integrity()


def test_a_deadline_does_not_end_what_is_done():
    time = Time()
    runner = StepRunner(build(1), ToyModel(), clock=time)
    runner.submit(request("r", num_frames=3), deadline=101.0)
    run_all(runner)
    time.now = 200.0
    runner.step()
    assert runner.ended == {"r": "finished"}


def test_only_the_last_ends_are_remembered(monkeypatch):
    monkeypatch.setattr("ringkv.frame_runner.ENDED_KEPT", 3)
    runner = StepRunner(build(1), ToyModel())
    for i in range(5):
        runner.submit(request(f"r{i}", num_frames=1))
        runner.cancel(f"r{i}")
    assert list(runner.ended) == ["r2", "r3", "r4"]
    runner.submit(request("r3", num_frames=1))
    assert list(runner.ended) == ["r2", "r4"]


# -- events --------------------------------------------------------------------------------------------------


def test_events_tell_the_life_of_a_request_in_order():
    time = Time()
    runner = StepRunner(build(1, undo_frames=1), ToyModel(), policy=LruPark(quantum_frames=2), clock=time)
    stream = runner.watch()
    runner.submit(request("a", num_frames=3, context=0))
    runner.submit(request("b", stream=1, num_frames=3, context=0))
    run_all(runner)
    runner.rewind("b", 1)
    run_all_frames(runner)
    runner.step()
    events = stream.take()
    assert kinds(events, "a") == ["queued", "seated", "frame", "frame", "parked", "woken", "frame", "finished"]
    life = [
        "queued",
        "seated",
        "frame",
        "frame",
        "parked",
        "woken",
        "frame",
        "finished",
        "rewound",
        "frame",
        "finished",
    ]
    assert kinds(events, "b") == life
    assert [event.frame for event in events if event.rid == "b" and event.kind == "frame"] == [0, 1, 2, 2]
    assert {event.time for event in events} == {100.0}
    assert stream.take() == []


def test_events_tell_why_something_failed_or_was_forked():
    model = ToyModel()
    model.fail_on = {(2, 0)}
    runner = StepRunner(build(2), model)
    runner.submit(request("r"))
    first = runner.watch()
    for _ in range(3):
        runner.step()
    second = runner.watch()
    runner.fork("r", ["s"])
    runner.cancel("r")
    assert kinds(first.take()) == ["seated", "frame", "frame", "failed", "seated", "cancelled"]
    told = second.take()
    assert [(event.kind, event.rid, event.reason) for event in told] == [
        ("seated", "s", "fork of 'r'"),
        ("cancelled", "r", ""),
    ]


def test_a_stream_that_nobody_holds_is_forgotten():
    runner = StepRunner(build(1), ToyModel())
    stream = runner.watch()
    assert len(runner._events._streams) == 1
    del stream
    gc.collect()
    assert len(runner._events._streams) == 0


# -- one thread ----------------------------------------------------------------------------------------------


def in_a_thread(call):
    """What ``call`` raises in another thread."""
    raised = []

    def run():
        try:
            call()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised


def test_a_second_thread_is_refused_by_the_runner_and_by_its_resource(tmp_path):
    runner = StepRunner(build(1, undo_frames=2), ToyModel())
    runner.submit(request("r"))
    frames = [runner.step()[0].image for _ in range(4)]
    resource = runner.resource
    state = resource.get_state("r")
    frame, ctx, kv = FrameStep((("r", 4),)), StepContext(request_ids=("r",)), torch.zeros(1, 1, 2, 2)
    assert resource.admit(frame, ctx).ok
    resource.plan(frame, ctx)
    for call in (
        runner.step,
        lambda: runner.submit(request("s")),
        lambda: runner.cancel("r"),
        lambda: runner.retry("r"),
        lambda: runner.fork("r", ["s"]),
        lambda: runner.rewind("r", 1),
        lambda: runner.park("r"),
        lambda: runner.wake("r"),
        lambda: runner.state_of("r"),
        lambda: resource.ingest_request("s"),
        lambda: resource.admit(frame, ctx),
        lambda: resource.plan(frame, ctx),
        lambda: resource.begin_replay([4]),
        lambda: resource.attend(kv, kv, kv, 0, torch.tensor([4]), commit=False),
        lambda: resource.attend(kv, kv, kv, 0, torch.tensor([4]), commit=True),
        lambda: resource.commit(frame, ctx),
        lambda: resource.reset_request("r"),
        lambda: resource.remove_request("r"),
        lambda: resource.remove_request("nobody"),
        lambda: resource.get_state("r"),
        lambda: resource.save("r", tmp_path / "r"),
        lambda: resource.load_state("r", state),
        lambda: resource.load("r", tmp_path / "r"),
        lambda: resource.restore("r", state),
        lambda: resource.fork("r", []),
        lambda: resource.rewind("r", 1),
        lambda: resource.park("r"),
        lambda: resource.wake("r"),
        resource.cleanup,
    ):
        (error,) = in_a_thread(call)
        assert isinstance(error, RuntimeError)
        assert "belongs to thread" in str(error)
    assert list(tmp_path.iterdir()) == []
    for read in (
        lambda: (resource.session_of("r"), resource.num_free_sessions, resource.is_parked("r")),
        resource.memory_report,
        resource.check_integrity,
    ):
        assert in_a_thread(read) == []
    assert torch.equal(torch.stack(frames + run_all_frames(runner)), solo(0))


def test_the_thread_that_comes_first_need_not_be_the_one_that_built():
    resource = build(1)
    assert in_a_thread(lambda: StepRunner(resource, ToyModel()).submit(request("r"))) == []
    assert in_a_thread(lambda: resource.ingest_request("r")) == []
    with pytest.raises(RuntimeError, match="belongs to thread"):
        resource.ingest_request("r")
