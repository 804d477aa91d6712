"""What a rollout can do on a runner: fork, go back, be parked and woken, be restored into another geometry."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ringkv import StepRunner
from tests.runner_tools import ToyModel, build, request, run_all, run_all_frames, solo


def stepped(runner, *requests, steps):
    """Submit and step; the frames made, by rid."""
    for item in requests:
        runner.submit(item)
    frames: dict[str, list] = {}
    for _ in range(steps):
        for result in runner.step():
            frames.setdefault(result.rid, []).append(result.image)
    return frames


def solo_with(actions, stream=0):
    runner = StepRunner(build(1), ToyModel())
    runner.submit(dataclasses.replace(request("solo", stream), actions=actions))
    return run_all_frames(runner)


# -- forks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2, 5])
def test_forks_share_the_stream_and_part_where_their_actions_do(at):
    """Alone, each future is what its own rollout from frame 0 would have been."""
    runner = StepRunner(build(3), ToyModel())
    item = request("r")
    frames = stepped(runner, item, steps=at)
    up, down = item.actions.clone(), item.actions.clone()
    up[at + 1 :] += 5
    down[at:] -= 5
    runner.fork("r", ["up", "down"], [up, down])
    assert runner.resident == ("r", "up", "down")
    futures: dict[str, list] = {rid: list(frames["r"]) for rid in runner.resident}
    while runner.pending:
        for result in runner.step():
            assert result.frame == len(futures[result.rid])
            futures[result.rid].append(result.image)
    for rid, actions in (("r", item.actions), ("up", up), ("down", down)):
        torch.testing.assert_close(torch.stack(futures[rid]), torch.stack(solo_with(actions)), rtol=1e-6, atol=1e-6)
    assert torch.equal(futures["up"][at], futures["r"][at])
    assert at < 2 or not torch.equal(futures["down"][at], futures["r"][at])  # a context frame is given
    assert not torch.equal(futures["up"][-1], futures["r"][-1])


def test_a_fork_of_a_failed_frame_makes_it():
    model = ToyModel()
    model.fail_on, model.fail_after_layer = {(5, 0)}, 2
    runner = StepRunner(build(2), model)
    frames = stepped(runner, request("r"), steps=6)
    assert "r" in runner.failed
    model.fail_on = set()
    runner.fork("r", ["again"])
    assert torch.equal(torch.stack(frames["r"] + run_all_frames(runner)), solo(0))
    assert tuple(runner.failed) == ("r",)


def test_a_fork_that_cannot_be_made_changes_nothing():
    runner = StepRunner(build(3), ToyModel())
    item = request("r")
    frames = stepped(runner, item, steps=4)
    runner.submit(request("other", stream=1))
    past, short = item.actions.clone(), item.actions[:-1]
    past[3] += 1
    for new_rids, actions, error, message in (
        (["a", "b", "c"], None, RuntimeError, "into 3: 2 seats are free"),
        (["a", "other"], None, ValueError, "'other' is already queued"),
        (["a"], [past], ValueError, "'a': its actions differ from those of 'r' before frame 4"),
        (["a"], [short], ValueError, "'a' actions is"),
        (["a"], [item.actions] * 2, ValueError, "2 lists of actions for 1 forks"),
        (["a", "a"], None, ValueError, "'a' stands twice"),
    ):
        with pytest.raises(error, match=message):
            runner.fork("r", new_rids, actions)
    for rid, message in (("nobody", "is not known"), ("other", "is parked or in line")):
        with pytest.raises(ValueError, match=message):
            runner.fork(rid, ["a"])
    assert (runner.resident, runner.waiting) == (("r",), ("other",))
    runner.cancel("other")
    assert torch.equal(torch.stack(frames["r"] + run_all_frames(runner)), solo(0))
    with pytest.raises(ValueError, match="at frame 8 of 8: nothing to fork"):
        runner.fork("r", ["a"])
    runner.step()
    assert runner.resource.num_free_sessions == 3


def test_a_request_without_a_frame_has_nothing_to_fork():
    runner = StepRunner(build(2), ToyModel())
    runner.submit(request("r"))
    runner.step(ready=[])
    assert runner.resident == ("r",)
    with pytest.raises(ValueError, match="at frame 0 of 8: nothing to fork"):
        runner.fork("r", ["a"])


# -- back in time --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("back", [1, 3, 4])
@pytest.mark.parametrize("fails", [False, True])
def test_a_rollout_that_was_taken_back_makes_the_same_frames_again(back, fails):
    model = ToyModel()
    model.fail_on, model.fail_after_layer = ({(6, 0)} if fails else set()), 2
    runner = StepRunner(build(1, undo_frames=4), model)
    frames = stepped(runner, request("r"), steps=7 if fails else 6)["r"]
    model.fail_on = set()
    runner.rewind("r", back)
    assert ("r" in runner.failed) == fails
    if fails:
        runner.retry("r")
    again = run_all_frames(runner)
    assert len(again) == 2 + back
    assert torch.equal(torch.stack(frames[: 6 - back] + again), solo(0))


def test_a_finished_rollout_can_be_taken_back_until_the_next_step():
    runner = StepRunner(build(1, undo_frames=2), ToyModel())
    runner.submit(request("r"))
    frames = run_all_frames(runner)
    runner.rewind("r", 2)
    assert runner.pending == 1
    assert torch.equal(torch.stack(frames[:6] + run_all_frames(runner)), solo(0))


def test_what_cannot_be_taken_back_is_refused_and_goes_on():
    runner = StepRunner(build(1, undo_frames=4), ToyModel())
    frames = stepped(runner, request("r"), steps=3)["r"]
    for frames_back in (0, 4, 5):
        with pytest.raises(ValueError, match=rf"rewind\(frames={frames_back}\)|frames={frames_back}"):
            runner.rewind("r", frames_back)
    with pytest.raises(ValueError, match="is not known"):
        runner.rewind("nobody", 1)
    assert torch.equal(torch.stack(frames + run_all_frames(runner)), solo(0))
    without = StepRunner(build(1), ToyModel())
    stepped(without, request("r"), steps=3)
    with pytest.raises(ValueError, match="has no rewind: its config has undo_frames=0"):
        without.rewind("r", 1)


# -- parked by hand ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_rollout_parked_by_hand_stays_away_until_it_is_woken(on_disk, tmp_path):
    runner = StepRunner(build(1, parking_dir=tmp_path if on_disk else None), ToyModel())
    frames = stepped(runner, request("r"), steps=4)["r"]
    runner.park("r")
    assert (runner.pending, runner.resident, runner.resource.num_free_sessions) == (0, (), 1)
    assert runner.step() == []
    assert runner.state_of("r").next_frame == 4
    runner.submit(request("other", stream=1))
    other = run_all_frames(runner)
    assert torch.equal(torch.stack(other), solo(1))
    runner.wake("r")
    assert runner.waiting == ("r",)
    assert torch.equal(torch.stack(frames + run_all_frames(runner)), solo(0))
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_names_a_parked_rollout_wakes_it():
    runner = StepRunner(build(1), ToyModel())
    frames = stepped(runner, request("r"), steps=4)["r"]
    runner.park("r")
    frames += [result.image for result in runner.step(ready=["r"])]
    assert torch.equal(torch.stack(frames + run_all_frames(runner)), solo(0))


def test_parking_and_waking_what_is_not_there_is_refused():
    runner = StepRunner(build(1), ToyModel())
    stepped(runner, request("r"), steps=1)
    runner.submit(request("queued"))
    for call, rid, message in (
        (runner.park, "nobody", "is not known"),
        (runner.park, "queued", "has no frame yet"),
        (runner.wake, "nobody", "is not known"),
        (runner.wake, "r", "not parked"),
        (runner.wake, "queued", "not parked"),
    ):
        with pytest.raises(ValueError, match=message):
            call(rid)
    runner.park("r")
    runner.park("r")  # it stays parked
    runner.cancel("r")
    assert runner.resource.num_free_sessions == 1
    assert runner.pending == 1
    assert runner.resource.memory_report()["parked"] == 0


def test_the_state_of_a_parked_rollout_resumes_elsewhere(tmp_path):
    runner = StepRunner(build(1, parking_dir=tmp_path), ToyModel())
    frames = stepped(runner, request("r"), steps=5)["r"]
    runner.park("r")
    resumed = StepRunner(build(2), ToyModel())
    resumed.submit(request("r"), runner.state_of("r"))
    assert torch.equal(torch.stack(frames + run_all_frames(resumed)), solo(0))


# -- another geometry ----------------------------------------------------------------------------------------


def test_a_rollout_goes_on_in_another_geometry_with_what_fits():
    runner = StepRunner(build(1), ToyModel())
    frames = stepped(runner, request("r"), steps=5)["r"]
    wider = StepRunner(build(1, buckets=(5, 3)), ToyModel())
    state = runner.state_of("r")
    wider.submit(request("strict"), state)
    wider.step()
    assert "geometry" in str(wider.failed["strict"])
    wider.cancel("strict")
    wider.restore(request("r"), state)
    assert wider.restore_report("r") is None
    later = run_all_frames(wider, steps=2)
    report = wider.restore_report("r")
    assert report.kept == ((2, 3, 4), (2, 4))
    assert report.missing == ((0, 1), (0,))
    assert report.dropped == ((), ())
    # The last layer shows frames 2 and 4 to frame 5 in both; from frame 6 the narrower one hides frame 2.
    narrow = run_all_frames(runner)
    assert torch.equal(later[0], narrow[0])
    assert not torch.equal(later[1], narrow[1])
    assert len(frames + later + run_all_frames(wider)) == 8


def test_a_rollout_that_does_not_fit_at_all_fails_alone():
    runner = StepRunner(build(1), ToyModel())
    stepped(runner, request("r"), steps=5)
    state = runner.state_of("r")
    state.cache["geometry"]["head_dim"] = 64
    other = StepRunner(build(1), ToyModel())
    other.restore(request("bad"), state)
    other.submit(request("good"))
    assert torch.equal(torch.stack(run_all(other)["good"]), solo(0))  # the only seat was not lost to it
    assert "head_dim=64" in str(other.failed["bad"])
