"""Steps in batch buckets: padding that changes nothing, warm-up that leaves nothing, no compilation after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from model.attention import after_attend, before_attend, between
from model.sampler import FrameSampler
from model.transformer import FrameTransformer, compile_regions
from ringkv import EngineResourceInfo, FrameStep, KVSpec, RingKVConfig, StepContext, StepRunner, graphs
from ringkv.buckets import batch_buckets, bucket_for, needs_padding
from ringkv.graphs import CapturedSteps
from ringkv.ring import cache, ops
from ringkv.ring import flex as ring_flex
from ringkv.staging import RowStaging
from tests.model_tools import SMALL, random_actions, random_frames, request, ring_layers
from tests.ring_tools import build_manager, ring, same_bytes, session_bytes_of, step_of

CPU = torch.device("cpu")
FRAMES = 9


def build(
    num_sessions: int, *, padding: bool = True, attention: str = "auto", device: str = "cpu", ring_frames: int = 3
) -> Any:
    config = RingKVConfig(
        num_layers=SMALL.num_layers,
        num_kv_heads=SMALL.num_kv_heads,
        head_dim=SMALL.head_dim,
        num_qo_heads=SMALL.num_heads,
        tokens_per_frame=SMALL.tokens_per_frame,
        num_sessions=num_sessions,
        padding_session=padding,
        layers=ring_layers(SMALL, ring_frames, 2),
    )
    spec = KVSpec(resource_key="kv", config=config)
    return spec.resource_class.build(
        spec, EngineResourceInfo(device=device, kv_dtype=torch.float32, attention=attention)
    )


class CountedSampler(FrameSampler):
    """Says what it was asked for; ``fail_at`` holds (clock, stream) pairs whose noise cannot be drawn."""

    def __init__(self, model: FrameTransformer) -> None:
        super().__init__(model, (1.0, 0.5, 0.0))
        self.batches: list[tuple[str, int]] = []
        self.fail_at: set[tuple[int, int]] = set()

    def observe(self, resource: Any, frames: Tensor, actions: Tensor, frame_pos: Tensor) -> None:
        self.batches.append(("observe", len(frames)))
        super().observe(resource, frames, actions, frame_pos)

    def denoise(self, resource: Any, noise: Tensor, actions: Tensor, frame_pos: Tensor) -> Tensor:
        self.batches.append(("denoise", len(noise)))
        return super().denoise(resource, noise, actions, frame_pos)

    def noise(self, seeds: Any, streams: Any, clocks: Any) -> Tensor:
        if self.fail_at & set(zip(clocks, streams, strict=True)):
            raise FloatingPointError("no noise")
        return super().noise(seeds, streams, clocks)


def sampler() -> CountedSampler:
    return CountedSampler(FrameTransformer(SMALL, seed=1).eval())


def rollout(rid: str, stream: int, num_frames: int = FRAMES) -> Any:
    context = random_frames(2, seed=stream)
    return request(rid, num_frames, context=context, actions=random_actions(num_frames, seed=stream), stream=stream)


def run_all(runner: StepRunner, *requests: Any) -> dict[str, Tensor]:
    for each in requests:
        runner.submit(each)
    frames: dict[str, list[Tensor]] = {}
    while runner.pending:
        for result in runner.step():
            frames.setdefault(result.rid, []).append(result.image)
    return {rid: torch.stack(images) for rid, images in frames.items()}


def captured_runner(num_sessions: int, model: CountedSampler | None = None, **geometry: Any) -> StepRunner:
    resource, model = build(num_sessions, **geometry), model or sampler()
    return StepRunner(resource, model, CapturedSteps(resource, model, num_sessions))


# -- buckets and padding -------------------------------------------------------------------------------------


def test_buckets_are_powers_of_two_up_to_the_one_that_holds_the_rows() -> None:
    assert [batch_buckets(rows) for rows in (1, 2, 3, 4, 5, 8, 9)] == [
        (1,),
        (1, 2),
        (1, 2, 4),
        (1, 2, 4),
        (1, 2, 4, 8),
        (1, 2, 4, 8),
        (1, 2, 4, 8, 16),
    ]
    assert [bucket_for(rows) for rows in range(1, 10)] == [1, 2, 4, 4, 8, 8, 8, 8, 16]
    for most in range(1, 20):
        assert needs_padding(most) == any(bucket_for(rows) != rows for rows in range(1, most + 1))


def test_steps_are_run_in_buckets_and_the_frames_are_those_of_unpadded_steps() -> None:
    runner = captured_runner(3)
    requests = [rollout("a", 0), rollout("b", 1, FRAMES - 2), rollout("c", 2, FRAMES - 4)]
    padded = run_all(runner, *requests)
    plain_model = sampler()
    plain = run_all(StepRunner(build(3), plain_model), *requests)
    assert {rows for _, rows in plain_model.batches} == {1, 2, 3}
    assert {rows for _, rows in runner.model.batches} == {1, 2, 4}
    for rid, frames in plain.items():
        torch.testing.assert_close(padded[rid], frames, rtol=1e-5, atol=1e-5)
    runner.step()
    runner.resource.check_integrity()
    assert runner.resource.num_free_sessions == 3


def test_a_padding_row_in_place_of_a_missing_one_changes_no_bit() -> None:
    """Steps of three and of four rows have one batch shape, and so the rows that both have one result."""
    four = run_all(captured_runner(4), *(rollout(rid, stream) for stream, rid in enumerate("abcd")))
    three = run_all(captured_runner(4), *(rollout(rid, stream) for stream, rid in enumerate("abc")))
    for rid in "abc":
        assert torch.equal(four[rid], three[rid])


def test_a_padded_step_works_while_no_session_is_free() -> None:
    runner = captured_runner(3)
    run_all(runner, *(rollout(rid, stream, 3) for stream, rid in enumerate("abc")))
    assert runner.resource.num_free_sessions == 0
    assert runner.model.batches[-1] == ("denoise", 4)


def test_a_row_that_fails_is_driven_alone_in_its_own_bucket_and_the_others_go_on() -> None:
    runner = captured_runner(3)
    runner.model.fail_at = {(4, 1)}
    frames = run_all(runner, *(rollout(rid, stream) for stream, rid in enumerate("abc")))
    assert isinstance(runner.failed["b"], FloatingPointError)
    assert [len(frames[rid]) for rid in "abc"] == [FRAMES, 4, FRAMES]
    assert ("denoise", 1) in runner.model.batches


def test_only_the_requests_named_as_ready_take_part_in_a_step() -> None:
    runner = captured_runner(3)
    for stream, rid in enumerate("abc"):
        runner.submit(rollout(rid, stream))
    assert {result.rid for result in runner.step(("c", "a"))} == {"a", "c"}
    assert runner.model.batches == [("observe", 2)]
    assert [(result.rid, result.frame) for result in runner.step(("b",))] == [("b", 0)]
    assert runner.step(()) == []
    assert runner.step(("nobody",)) == []
    assert {(result.rid, result.frame) for result in runner.step()} == {("a", 1), ("b", 1), ("c", 1)}


# -- warm-up -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["auto", pytest.param("flex", marks=pytest.mark.slow)])
def test_a_warmed_up_resource_equals_a_fresh_one_bit_for_bit(attention: str) -> None:
    resource, fresh = (build(2 if attention == "flex" else 3, attention=attention) for _ in range(2))
    model, sessions = sampler(), resource.num_sessions
    captured = CapturedSteps(resource, model, sessions)
    addresses = resource._buffer_addresses()
    captured.warm_up()
    assert {rows for _, rows in model.batches} == set(captured.buckets)
    assert {call for call, _ in model.batches} == {"observe", "denoise"}
    for session in range(sessions):
        assert same_bytes(session_bytes_of(resource, session), session_bytes_of(fresh, session))
    assert resource.num_free_sessions == sessions
    assert resource._buffer_addresses() == addresses
    resource.post_warmup_validate()
    outcome = resource.admit(*step_of([("warm-up 0", 0)]))
    assert not outcome.ok
    assert "not registered" in outcome.reason


def test_warm_up_fails_on_a_flag_that_was_set_by_hand() -> None:
    resource, model = build(2), sampler()
    captured = CapturedSteps(resource, model, 2)
    captured.warm_up()
    resource.layers[1].written[0] = True
    with pytest.raises(RuntimeError, match="session 0 is free and not empty"):
        resource.post_warmup_validate()
    resource.layers[1].written[0] = False
    resource.post_warmup_validate()
    resource.layers[1].written[resource.capacity(1)] = True  # of a session that the last dummies did not hold
    with pytest.raises(RuntimeError, match="session 1 is free and not empty"):
        CapturedSteps(resource, model, 1).warm_up()


def test_warm_up_that_fails_raises_what_failed_and_leaves_no_dummy() -> None:
    resource, model = build(2), sampler()
    model.fail_at = {(1, 0)}
    with pytest.raises(FloatingPointError):
        CapturedSteps(resource, model, 2).warm_up()
    resource.post_warmup_validate()


def test_warm_up_among_requests_is_refused_and_touches_none() -> None:
    runner = captured_runner(2)
    runner.submit(rollout("a", 0))
    runner.step()
    before = session_bytes_of(runner.resource, 0)
    with pytest.raises(RuntimeError, match="warm up before the first one"):
        runner.captured.warm_up()
    assert same_bytes(session_bytes_of(runner.resource, 0), before)


def test_what_cannot_work_is_refused_by_name() -> None:
    model = sampler()
    with pytest.raises(ValueError, match=r"max_rows=4: expected at most num_sessions=3"):
        CapturedSteps(build(3), model, 4)
    with pytest.raises(ValueError, match=r"max_rows=0"):
        CapturedSteps(build(3), model, 0)
    with pytest.raises(ValueError, match=r"max_rows=3: steps are padded to 4 rows.*padding_session=True"):
        CapturedSteps(build(3, padding=False), model, 3)
    resource = build(3)
    captured = CapturedSteps(resource, model, 2)
    with pytest.raises(ValueError, match=r"a step of 3 rows: expected 1 to max_rows=2"):
        captured.padded(("a", "b", "c"))
    with pytest.raises(ValueError, match="another resource or model"):
        StepRunner(build(3), model, captured)
    with pytest.raises(ValueError, match="another resource or model"):
        StepRunner(resource, sampler(), captured)
    CapturedSteps(build(2, padding=False), model, 2).warm_up()  # one row and two rows fill their buckets


# -- compiled regions ----------------------------------------------------------------------------------------


def count_regions(model: FrameTransformer, graphs: list[Any]) -> None:
    """Compile the regions as ``compile_regions`` does, with a backend that only counts."""

    def count(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    options: dict[str, Any] = {"fullgraph": True, "dynamic": False, "backend": count}
    model.before_attend = torch.compile(before_attend, **options)
    model.between = torch.compile(between, **options)
    model.after_attend = torch.compile(after_attend, **options)


def play_a_life(runner: StepRunner) -> dict[str, Tensor]:
    """Rollouts that start apart, fill, wrap, lose one of them, and take one up again from a state of another pool."""
    donor = StepRunner(build(1), sampler())
    donor.submit(rollout("d", 3, 12))
    for _ in range(7):
        donor.step()
    state = donor.state_of("d")
    frames: dict[str, list[Tensor]] = {}

    def step(times: int) -> None:
        for _ in range(times):
            for result in runner.step():
                frames.setdefault(result.rid, []).append(result.image)

    runner.submit(rollout("a", 0, 14))
    step(3)
    runner.submit(rollout("b", 1, 9))
    step(4)
    runner.cancel("b")
    runner.submit(rollout("d", 3, 12), state)
    while runner.pending:
        step(1)
    assert not runner.failed
    return {rid: torch.stack(images) for rid, images in frames.items()}


def test_after_warm_up_nothing_compiles_over_fill_wrap_cancel_and_load() -> None:
    torch.compiler.reset()
    graphs: list[Any] = []
    runner = captured_runner(2)
    count_regions(runner.model.model, graphs)
    with torch._dynamo.config.patch(recompile_limit=1):  # buckets must not run into what else is alive in a process
        runner.captured.warm_up()
    assert len(graphs) == 3 * len(runner.captured.buckets)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = play_a_life(runner)
    assert len(graphs) == 3 * len(runner.captured.buckets)
    eager = play_a_life(StepRunner(build(2), sampler()))
    assert eager.keys() == compiled.keys() == {"a", "b", "d"}
    for rid, frames in eager.items():
        torch.testing.assert_close(compiled[rid], frames, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_compiled_for_real_the_frames_are_those_of_an_eager_run_and_nothing_compiles_after_warm_up() -> None:
    torch.compiler.reset()
    runner = captured_runner(2)
    compile_regions(runner.model.model)
    runner.captured.warm_up()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = play_a_life(runner)
    for rid, frames in play_a_life(StepRunner(build(2), sampler())).items():
        torch.testing.assert_close(compiled[rid], frames, rtol=1e-6, atol=1e-5)


# -- what an accelerator needs -------------------------------------------------------------------------------


def test_a_whole_frame_needs_no_value_on_a_device_that_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device takes the accelerators' path and has no values: whatever waits for one raises."""
    calls: list[tuple[int, ...]] = []

    def shape_of(q: Tensor, k: Tensor, v: Tensor, *lists: Tensor) -> Tensor:
        calls.append(tuple(q.shape))
        assert all(each.device.type == "meta" for each in (k, v, *lists))
        return torch.empty_like(q)

    monkeypatch.setattr(cache, "ring_write", ops.write_on_device)
    monkeypatch.setattr(ring_flex, "attend", shape_of)  # the kernel itself has no form for this device
    resource = build(3, attention="flex", device="meta")
    assert resource.reads_in_graph
    model = CountedSampler(FrameTransformer(SMALL).to("meta").eval())
    tables = torch.empty(SMALL.num_layers, SMALL.num_actions, 6, SMALL.d_model, device="meta")
    monkeypatch.setattr(model.model.conditioning, "table", lambda sigma: tables)  # filled before anything is captured
    runner = StepRunner(resource, model, CapturedSteps(resource, model, 3))
    frames = run_all(runner, *(rollout(rid, stream, 4) for stream, rid in enumerate("abc")))
    assert not runner.failed, runner.failed
    assert {rid: len(each) for rid, each in frames.items()} == dict.fromkeys("abc", 4)
    assert set(calls) == {(4, SMALL.num_heads, SMALL.tokens_per_frame, SMALL.head_dim)}
    with pytest.raises(RuntimeError, match="meta"):
        torch.empty(1, device="meta").item()


class RecordedGraph:
    """In place of a CUDA graph: holds the inputs it was made with, and runs the call over what is copied into them."""

    made: list[tuple[str, int]]
    pool = None

    def __init__(self, step: Any, resource: Any, inputs: tuple[Tensor, ...], pool: Any) -> None:
        self.step, self.resource, self.inputs = step, resource, tuple(each.clone() for each in inputs)
        self.made.append((step.__name__, len(inputs[2])))

    def replay(self, inputs: tuple[Tensor, ...]) -> Tensor | None:
        for fixed, given in zip(self.inputs, inputs, strict=True):
            fixed.copy_(given)
        return self.step(self.resource, *self.inputs)


def replaying_runner(num_sessions: int, monkeypatch: pytest.MonkeyPatch) -> StepRunner:
    """A runner that goes the way of a captured one, with graphs that a CPU can replay."""
    monkeypatch.setattr(graphs, "_CudaGraph", RecordedGraph)
    monkeypatch.setattr(RecordedGraph, "made", [], raising=False)
    runner = captured_runner(num_sessions)
    runner.resource.reads_in_graph = True
    runner.captured._captures = True
    return runner


def test_every_bucket_is_captured_in_warm_up_and_steps_replay_that(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = replaying_runner(3, monkeypatch)
    runner.captured.warm_up()
    assert sorted(RecordedGraph.made) == [(call, rows) for call in ("denoise", "observe") for rows in (1, 2, 4)]
    requests = [rollout("a", 0), rollout("b", 1, FRAMES - 2), rollout("c", 2, FRAMES - 4)]
    replayed = run_all(runner, *requests)
    assert not runner.failed
    assert len(RecordedGraph.made) == 6
    for rid, frames in run_all(captured_runner(3), *requests).items():
        assert torch.equal(replayed[rid], frames)


def test_a_step_is_not_replayed_without_warm_up_nor_after_the_weights_have_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = replaying_runner(2, monkeypatch)
    runner.submit(rollout("a", 0))
    runner.step()
    assert "call warm_up before the first step" in str(runner.failed["a"])
    runner.cancel("a")
    runner.captured.warm_up()
    runner.submit(rollout("b", 0))
    assert len(runner.step()) == 1
    with torch.no_grad():
        runner.model.model.head.bias.add_(1)
    runner.step()
    assert "the weights have changed since they were captured: warm_up again" in str(runner.failed["b"])


def test_a_replay_is_checked_against_the_plan_and_counts_as_a_committing_pass() -> None:
    resource = build(2, attention="flex", device="meta")
    resource.ingest_request("a")
    step, ctx = FrameStep(frames=(("a", 0),)), StepContext(request_ids=("a",), padded_request_ids=("a", "padding 0"))
    with pytest.raises(RuntimeError, match="nothing is planned"):
        resource.begin_replay([0, 0])
    assert resource.admit(step, ctx).ok
    resource.plan(step, ctx)
    with pytest.raises(ValueError, match=r"replay at clocks \[1, 0\]: the plan has clocks \[0, 0\]"):
        resource.begin_replay([1, 0])
    with pytest.raises(RuntimeError, match="saw no committing pass"):
        resource.commit(step, ctx)
    resource.begin_replay([0, 0])
    resource.commit(step, ctx)
    with pytest.raises(RuntimeError, match="not one that a graph can hold"):
        build(2).begin_replay([0])


def test_staged_rows_do_not_follow_the_callers_lists() -> None:
    manager = build_manager([ring(3)], num_sessions=2, attention="flex")
    for rid in ("a", "b"):
        manager.ingest_request(rid)
    frames, rids = [("b", 0), ("a", 0)], ["b", "a"]
    step, ctx = FrameStep(frames=frames), StepContext(request_ids=rids)
    assert manager.admit(step, ctx).ok
    plan = manager.plan(step, ctx)
    staged = [buffer.clone() for buffer in (manager._staging.values, *manager._flex.buffers)]
    frames.clear()
    rids[:] = ["a", "b"]
    assert plan.request_ids == ("b", "a")
    assert same_bytes(staged, [manager._staging.values, *manager._flex.buffers])


class LoggedEvent:
    """An event of a device that is always behind: it says what the host waits for."""

    def __init__(self, log: list[tuple[str, int]], number: int) -> None:
        self.log, self.number = log, number

    def record(self) -> None:
        self.log.append(("copy", self.number))

    def synchronize(self) -> None:
        self.log.append(("wait", self.number))


def test_a_pinned_buffer_is_filled_again_only_after_its_last_copy_was_waited_for() -> None:
    log: list[tuple[str, int]] = []
    numbers = iter(range(2))
    staging = RowStaging(2, 4, CPU, depth=2, new_event=lambda: LoggedEvent(log, next(numbers)))
    address = staging.values.data_ptr()
    for step in range(5):
        staging.put([step, step + 1, step + 2][: 1 + step % 3], [10 * step] * (1 + step % 3))
        assert staging.values[:, : 1 + step % 3].tolist() == [
            [step, step + 1, step + 2][: 1 + step % 3],
            [10 * step] * (1 + step % 3),
        ]
    assert log == [(what, step % 2) for step in range(5) for what in ("wait", "copy")]
    assert staging.values.data_ptr() == address
