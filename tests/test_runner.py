"""The step runner: queueing, phases, isolation of failures, snapshots. Its model is a toy whose frames tell history."""

from __future__ import annotations

import pytest
import torch

from ringkv import FrameStep, RolloutRequest, RolloutState, StepContext, StepRunner
from tests.runner_tools import CHANNELS, HEIGHT, WIDTH, ToyModel, build, request, run_all_frames, run_all_of, solo


def test_requests_beyond_the_pool_wait_in_order_and_all_finish():
    runner = StepRunner(build(2), ToyModel())
    for i, name in enumerate("abcde"):
        runner.submit(request(name, stream=i, num_frames=3 + i))
    order: list[str] = []
    while runner.pending:
        runner.step()
        order += [rid for rid in runner.resident if rid not in order]
        assert len(runner.resident) <= 2
    assert order == list("abcde")
    runner.step()
    assert runner.resource.num_free_sessions == 2
    runner.resource.check_integrity()


def test_a_rollout_among_others_equals_the_same_rollout_alone():
    frames = run_all_of(StepRunner(build(3), ToyModel()), *(request(f"r{i}", stream=i) for i in range(3)))
    for i in range(3):
        torch.testing.assert_close(torch.stack(frames[f"r{i}"]), solo(i), rtol=1e-6, atol=1e-6)


def test_context_and_generated_rows_never_share_a_batch_and_neither_starves():
    model = ToyModel()
    runner = StepRunner(build(2), model)
    frames = run_all_of(runner, request("long", num_frames=6, context=0), request("read", num_frames=6, context=5))
    assert {rid: len(images) for rid, images in frames.items()} == {"long": 6, "read": 6}
    assert model.batches[:4] == [("generated", 1), ("context", 1)] * 2


def test_a_failing_request_is_set_aside_and_its_neighbours_are_untouched():
    model = ToyModel()
    model.fail_on = {(4, 1)}
    runner = StepRunner(build(3), model)
    frames = run_all_of(runner, *(request(f"r{i}", stream=i) for i in range(3)))
    assert isinstance(runner.failed["r1"], FloatingPointError)
    assert len(frames["r1"]) == 4
    for i in (0, 2):
        torch.testing.assert_close(torch.stack(frames[f"r{i}"]), solo(i), rtol=1e-6, atol=1e-6)
    runner.resource.check_integrity()


@pytest.mark.parametrize("layers_that_committed", [0, 1, 2])
def test_a_frame_that_failed_is_driven_again_and_the_rollout_ends_as_if_it_had_not(layers_that_committed):
    model = ToyModel()
    model.fail_on = {(5, 0)}
    model.fail_after_layer = layers_that_committed
    runner = StepRunner(build(1), model)
    frames = run_all_of(runner, request("r"))
    assert len(frames["r"]) == 5
    model.fail_on = set()
    runner.retry("r")
    assert torch.equal(torch.stack(frames["r"] + run_all_frames(runner)), solo(0))


def test_cancelling_gives_the_session_to_the_next_in_the_queue():
    runner = StepRunner(build(1), ToyModel())
    runner.submit(request("first"))
    runner.submit(request("dropped"))
    runner.submit(request("second"))
    runner.step()
    runner.cancel("dropped")
    runner.cancel("first")
    runner.cancel("nobody")
    runner.step()
    assert runner.resident == ("second",)
    assert len(run_all_frames(runner)) == 7  # its first frame went by above
    runner.step()
    assert runner.resource.num_free_sessions == 1
    runner.resource.check_integrity()


def test_a_state_saved_between_frames_goes_on_in_another_pool_as_if_nothing_happened(tmp_path):
    runner = StepRunner(build(2), ToyModel())
    runner.submit(request("other", stream=7))
    runner.submit(request("r"))
    frames = []
    for _ in range(5):
        frames += [result.image for result in runner.step() if result.rid == "r"]
    runner.state_of("r").save(tmp_path / "r.rollout")
    state = RolloutState.read(tmp_path / "r.rollout")
    assert (state.next_frame, state.action_cursor, state.seed, state.stream) == (5, 5, 1, 0)
    resumed = StepRunner(build(1), ToyModel())
    resumed.submit(request("r"), state)
    frames += run_all_frames(resumed)
    torch.testing.assert_close(torch.stack(frames), solo(0), rtol=1e-6, atol=1e-6)


def test_a_state_taken_after_an_aborted_commit_drives_the_frame_again_from_its_first_pass():
    model = ToyModel()
    model.fail_on = {(5, 0)}
    runner = StepRunner(build(1), model)
    frames = run_all_of(runner, request("r"))["r"]
    resumed = StepRunner(build(1), ToyModel())
    resumed.submit(request("r"), runner.state_of("r"))
    frames += run_all_frames(resumed)
    assert torch.equal(torch.stack(frames), solo(0))


def test_a_finished_rollout_can_still_be_snapshotted_until_the_next_step():
    runner = StepRunner(build(1), ToyModel())
    run_all_of(runner, request("r"))
    assert runner.state_of("r").next_frame == 8
    runner.step()
    with pytest.raises(ValueError, match="'r' holds no session"):
        runner.state_of("r")


def test_a_state_of_other_weights_or_another_stream_is_refused_by_name():
    runner = StepRunner(build(1), ToyModel())
    run_all_of(runner, request("r", num_frames=4))
    state = runner.state_of("r")
    other = ToyModel()
    other.fingerprint = "trained"
    with pytest.raises(ValueError, match=r"taken with model toy: this one is trained"):
        StepRunner(build(1), other).submit(request("r"), state)
    with pytest.raises(ValueError, match=r"stream=3: its state has seed=1 stream=0"):
        StepRunner(build(1), ToyModel()).submit(request("r", stream=3), state)
    with pytest.raises(ValueError, match=r"num_frames=4 with 4 actions: its state is at frame 4"):
        StepRunner(build(1), ToyModel()).submit(request("r", num_frames=4), state)
    with pytest.raises(ValueError, match=r"'r' is already queued or running"):
        runner.submit(request("r"))


def test_a_cache_state_alone_is_not_a_rollout(tmp_path):
    runner = StepRunner(build(1), ToyModel())
    runner.submit(request("r"))
    runner.step()
    runner.resource.save("r", tmp_path / "cache.state")
    with pytest.raises(ValueError, match="without the rollout that goes with it"):
        RolloutState.read(tmp_path / "cache.state")


def test_a_state_that_does_not_fit_fails_its_own_request_only():
    donor = StepRunner(build(1), ToyModel())
    run_all_of(donor, request("r", num_frames=4))
    state = donor.state_of("r")
    state.cache["geometry"]["head_dim"] = 64
    runner = StepRunner(build(2), ToyModel())
    runner.submit(request("bad"), state)
    frames = run_all_of(runner, request("good"))
    assert "head_dim=64" in str(runner.failed["bad"])
    assert torch.equal(torch.stack(frames["good"]), solo(0))
    runner.cancel("bad")
    runner.step()
    assert runner.resource.num_free_sessions == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_frames": 0}, "num_frames=0"),
        ({"context": torch.zeros(2, 2)}, r"context has shape \[2, 2\]"),
        ({"actions": torch.zeros(3, dtype=torch.int64)}, r"actions is torch.int64 \[3\]"),
    ],
)
def test_a_malformed_request_is_refused_with_the_field_and_what_is_expected(changes, message):
    good = {
        "rid": "r",
        "seed": 1,
        "stream": 0,
        "num_frames": 4,
        "context": torch.zeros(0, CHANNELS, HEIGHT, WIDTH),
        "actions": torch.zeros(4, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=message):
        RolloutRequest(**(good | changes))


def test_a_compiled_model_breaks_its_graph_at_attend_and_agrees_with_eager():
    """The regions around ``attend`` are compiled, once; the reads are picked anew at every clock."""
    torch._dynamo.reset()
    graphs = []

    def count_graphs(module, inputs):
        graphs.append(module)
        return module.forward

    def layer(resource, x, frame_pos, commit):
        return resource.attend(x * 2, x + 1, x - 1, 0, frame_pos, commit=commit).sin() * 3

    compiled = torch.compile(layer, dynamic=False, backend=count_graphs)
    eager, other = build(1), build(1)
    eager.ingest_request("r")
    other.ingest_request("r")
    for frame in range(9):
        step, ctx = FrameStep(frames=(("r", frame),)), StepContext(request_ids=("r",))
        x, frame_pos = torch.full((1, 1, 2, 2), float(frame)), torch.tensor([frame])
        for resource in (eager, other):
            assert resource.admit(step, ctx).ok
            resource.plan(step, ctx)
            resource.attend(x, x, x, 1, frame_pos, commit=True)
        for commit in (False, True):
            expected = layer(eager, x, frame_pos, commit)
            assert torch.equal(compiled(other, x, frame_pos, commit), expected)
        eager.commit(step, ctx)
        other.commit(step, ctx)
    assert 2 <= len(graphs) <= 4  # before and after attend, for each value of commit
