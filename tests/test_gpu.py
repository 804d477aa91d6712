"""What only a CUDA device can show: captured graphs, fused reads, staging that runs ahead of the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from model.sampler import FrameSampler
from model.transformer import FrameTransformer, compile_regions
from ringkv import StepRunner
from ringkv.graphs import CapturedSteps
from tests.model_tools import SMALL
from tests.ring_tools import begin, build_manager, clocks, finish, ring, slot_tags, tagged
from tests.test_captured_steps import build, rollout, run_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"


def model(dtype: torch.dtype = torch.float32, *, compiled: bool = False) -> FrameSampler:
    network = FrameTransformer(SMALL, seed=1).to(DEVICE, dtype).eval()
    if compiled:
        compile_regions(network)
    return FrameSampler(network, (1.0, 0.5, 0.0))


def captured_runner(num_sessions: int) -> StepRunner:
    resource, sampler = build(num_sessions, attention="flex", device=DEVICE), model(compiled=True)
    captured = CapturedSteps(resource, sampler, num_sessions)
    captured.warm_up()
    return StepRunner(resource, sampler, captured)


def eager_runner(num_sessions: int) -> StepRunner:
    return StepRunner(build(num_sessions, attention="canonical", device=DEVICE), model())


def assert_close(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for rid, frames in left.items():
        torch.testing.assert_close(frames, right[rid], rtol=1e-3, atol=1e-3)


def test_replayed_frames_are_those_of_eager_canonical_reads_over_fill_and_wrap() -> None:
    requests = [rollout("a", 0, 12), rollout("b", 1, 9), rollout("c", 2, 7)]
    assert_close(run_all(captured_runner(3), *requests), run_all(eager_runner(3), *requests))


def test_a_replay_after_another_stream_was_loaded_reads_what_was_loaded() -> None:
    """Captured at clock 1 of a dummy; the pointers must be those of the session that is loaded later."""
    donor = eager_runner(1)
    donor.submit(rollout("r", 5, 12))
    for _ in range(7):
        donor.step()
    state, runner = donor.state_of("r"), captured_runner(2)
    runner.submit(rollout("other", 1, 12))
    for _ in range(3):
        runner.step()
    runner.submit(rollout("r", 5, 12), state)
    frames: dict[str, list[Tensor]] = {}
    while runner.pending:
        for result in runner.step():
            frames.setdefault(result.rid, []).append(result.image)
    expected = []
    while donor.pending:
        expected += [result.image for result in donor.step()]
    torch.testing.assert_close(torch.stack(frames["r"]), torch.stack(expected), rtol=1e-3, atol=1e-3)


def test_frames_kept_from_one_replay_are_not_overwritten_by_the_next() -> None:
    frames = run_all(captured_runner(1), rollout("a", 0, 8))["a"]
    assert len({float(frame.double().sum()) for frame in frames[2:]}) == 6


def test_warm_up_and_capture_leave_every_session_as_it_was_built_and_replays_move_no_buffer() -> None:
    runner = captured_runner(3)
    addresses = runner.resource._buffer_addresses()
    fresh = build(3, attention="flex", device=DEVICE)
    for warmed, new in zip(runner.resource.layers, fresh.layers, strict=True):
        real = 3 * new.capacity
        assert torch.equal(warmed.kv[:, :, :, :real], new.kv[:, :, :, :real])
        assert torch.equal(warmed.written[:real], new.written[:real])
    run_all(runner, rollout("a", 0, 5), rollout("b", 1, 8))
    assert runner.resource._buffer_addresses() == addresses
    runner.resource.check_integrity()


def test_a_replay_with_other_weights_or_without_warm_up_is_refused() -> None:
    runner = captured_runner(1)
    with torch.no_grad():
        runner.model.model.head.bias.add_(1)
    runner.submit(rollout("a", 0))
    runner.step()
    assert "weights have changed" in str(runner.failed["a"])
    resource, sampler = build(1, attention="flex", device=DEVICE), model()
    cold = StepRunner(resource, sampler, CapturedSteps(resource, sampler, 1))
    cold.submit(rollout("a", 0))
    cold.step()
    assert "call warm_up" in str(cold.failed["a"])


def test_a_read_that_decides_on_the_host_is_not_captured() -> None:
    with pytest.raises(ValueError, match="attention='flex'"):
        CapturedSteps(build(1, attention="sdpa", device=DEVICE), model(), 1)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-3), (torch.bfloat16, 2e-2)])
def test_the_fused_read_agrees_with_canonical(dtype: torch.dtype, bound: float) -> None:
    """fp32 products may run on TF32 units, so the bound is that of their 10-bit mantissa."""
    shape = {"num_sessions": 3, "tokens_per_frame": 40, "head_dim": 64, "num_kv_heads": 2, "num_qo_heads": 4}
    managers = {
        path: build_manager([ring(9, 2)], attention=path, device=DEVICE, dtype=dtype, **shape)
        for path in ("canonical", "flex")
    }
    generator = torch.Generator(DEVICE).manual_seed(0)
    for step in range(40):
        rows = [("a", step)] if step < 3 else [("b", step - 3), ("a", step)]
        q, k, v = (
            torch.randn(len(rows), heads, 40, 64, device=DEVICE, dtype=dtype, generator=generator)
            for heads in (4, 2, 2)
        )
        outputs = []
        for manager in managers.values():
            for rid in ("a", "b"):
                manager.ingest_request(rid)
            begin(manager, rows)
            frame_pos = clocks(*(frame for _, frame in rows)).to(DEVICE)
            with torch.no_grad():
                outputs.append(manager.attend(q, k, v, 0, frame_pos, commit=True))
            finish(manager, rows)
        assert (outputs[0] - outputs[1]).abs().max().item() <= bound * v.abs().max().item()


def test_two_hundred_steps_ahead_of_the_device_write_into_their_own_sessions_only() -> None:
    """Staged rows were refilled for the next step while the copy of the last one still read them."""
    manager: Any = build_manager([ring(3)], num_sessions=2, attention="flex", device=DEVICE)
    for rid in ("a", "b"):
        manager.ingest_request(rid)
    frames = {
        (rid, frame): tuple(x[None].to(DEVICE) for x in tagged(frame, tag=100.0 * (1 + "ab".index(rid)) + frame % 100))
        for rid in "ab"
        for frame in range(100)
    }
    positions = [clocks(frame).to(DEVICE) for frame in range(100)]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # cycles: the device is busy while the host goes on
    for step in range(200):
        rid, frame = "ab"[step % 2], step // 2
        k, v = frames[rid, frame]
        begin(manager, [(rid, frame)])
        manager.upsert(k, v, 0, positions[frame], commit=True, build_visibility=False)
        finish(manager, [(rid, frame)])
    torch.cuda.synchronize()
    for index, rid in enumerate("ab"):
        base = 100 * (1 + index)
        assert slot_tags(manager.layers[0], manager.session_of(rid)) == [base + 99, base + 97, base + 98, base + 99]
