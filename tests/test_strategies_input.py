"""What reaches a cache, in every strategy: frames of another length or dtype, one request twice, rotated keys."""

from __future__ import annotations

import math

import pytest
import torch

from ringkv import FrameStep, StepContext
from tests.ring_tools import clocks, ring, step_of
from tests.strategies import EVERY_READ, STRATEGIES, WINDOWED, Rollout, accepts, build

every_read = pytest.mark.parametrize(("name", "read"), EVERY_READ)


@every_read
@pytest.mark.parametrize("tokens", [0, 1, 3, 4])
def test_an_input_that_is_not_one_frame_is_refused_before_any_write(name: str, read: str, tokens: int) -> None:
    """T=2, frames 0..2 committed: what is longer or shorter than a frame changes nothing, and frame 3 goes on."""
    rollout = Rollout(name, [ring(3)], attention=read)
    rollout.run("a", range(3))
    rollout.begin([("a", 3)])
    before = rollout.resource.get_state("a")
    wrong = torch.ones(1, 1, tokens, 64)
    right = torch.ones(1, 1, 2, 64)
    for q, k, v in ((wrong, wrong, wrong), (right, wrong, right), (right, right, wrong), (wrong, right, right)):
        with pytest.raises(ValueError, match=rf"\[1, 1, {tokens}, 64\]"):
            rollout.resource.attend(q, k, v, 0, clocks(3), commit=True)
    after = rollout.resource.get_state("a")
    for (kv, written), (kv_before, written_before) in zip(after["layers"], before["layers"], strict=True):
        assert torch.equal(kv, kv_before)
        assert torch.equal(written, written_before)
    out = rollout.full_pass([("a", 3)], commit=True)[0][0]
    torch.testing.assert_close(out.double(), rollout.expected("a", 3, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", STRATEGIES)
def test_one_request_twice_in_a_step_is_refused_and_keeps_its_clock(name: str) -> None:
    rollout = Rollout(name, [ring(3)], sessions=2, padding=True)
    rollout.run("a", range(3))
    for frames in ((("a", 3), ("a", 3)), (("a", 3), ("a", 4))):
        step, ctx = FrameStep(frames=frames), StepContext(request_ids=("a", "a"))
        outcome = rollout.resource.admit(step, ctx)
        assert (outcome.ok, outcome.retryable, outcome.rid) == (False, False, "a")
        with pytest.raises(RuntimeError, match="twice"):
            rollout.resource.plan(step, ctx)
    assert accepts(rollout.resource, "a", 3)
    rollout.drive([("a", 3)], pads=3)  # several padding rows together stay allowed


@every_read
def test_values_of_another_dtype_are_rounded_once_to_the_caches(name: str, read: str) -> None:
    """1.01 is 1.0078125 in bf16; q stays fp32, and so does what comes back."""
    resource = build(name, [ring(3)], attention=read, dtype=torch.bfloat16)
    resource.ingest_request("a")
    for frame in range(5):
        assert resource.admit(*step_of([("a", frame)])).ok
        resource.plan(*step_of([("a", frame)]))
        q = torch.zeros(1, 1, 2, 64)
        for commit in (False, True):
            out = resource.attend(q, q + 1.01, q + 1.01, 0, clocks(frame), commit=commit)
            assert out.dtype == torch.float32
            torch.testing.assert_close(out, torch.full_like(out, 1.0078125), rtol=1e-6, atol=0)
        resource.commit(*step_of([("a", frame)]))


@pytest.mark.parametrize("read", ["canonical", "auto"])
@pytest.mark.parametrize("name", WINDOWED)
def test_keys_keep_the_rotation_of_their_own_frame_after_every_wrap(name: str, read: str) -> None:
    """T=1, D=2, angle = clock in radians, R=3: frames p-2, p-1, p score cos 2, cos 1 and 1 at every p.

    V tells frames apart by their number modulo 3, two of them by a coordinate each and the third by what is left of 1.
    """
    resource = build(name, [ring(3)], tokens=1, head_dim=2, attention=read)
    resource.ingest_request("a")
    weights = torch.softmax(torch.tensor([math.cos(2), math.cos(1), 1.0]) / math.sqrt(2), dim=0)
    for frame in range(45):
        assert resource.admit(*step_of([("a", frame)])).ok
        resource.plan(*step_of([("a", frame)]))
        key = torch.tensor([math.cos(frame), math.sin(frame)]).view(1, 1, 1, 2)
        value = torch.tensor([float(frame % 3 == 0), float(frame % 3 == 1)]).view(1, 1, 1, 2)
        out = resource.attend(key, key, value, 0, clocks(frame), commit=True).flatten()
        resource.commit(*step_of([("a", frame)]))
        if frame >= 2:
            found = torch.tensor([out[0], out[1], 1 - out.sum()])
            expected = torch.stack([weights[[f % 3 for f in range(frame - 2, frame + 1)].index(r)] for r in range(3)])
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
