"""Absolute positions survive the wrap, and clocks survive 16-bit storage. The rotation is written here."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.ring_tools import begin, build_manager, clocks, finish, ring, slot_tags


def rotate(x: Tensor, frame: int) -> Tensor:
    """``x`` [..., 2] turned by ``frame`` radians, angle in fp64."""
    cos, sin = math.cos(frame), math.sin(frame)
    return torch.stack([x[..., 0] * cos - x[..., 1] * sin, x[..., 0] * sin + x[..., 1] * cos], dim=-1)


def test_scores_depend_on_how_many_frames_ago_and_not_on_slots_or_counts() -> None:
    """Frames were rotated by their place in the buffer, or the query by the number of rows that were kept."""
    manager = build_manager([ring(3)], tokens_per_frame=1)
    manager.ingest_request("a")
    raw = torch.tensor([[[[1.0, 0.0]]]])
    stored: dict[int, Tensor] = {}
    for p in range(101):
        begin(manager, [("a", p)])
        key = rotate(raw, p)
        k, _, visible = manager.upsert(key, raw, 0, clocks(p), commit=True)
        scores = (k[0, 0, visible] @ rotate(raw, p)[0, 0].T).flatten()
        expected = {0: [1.0], 1: [0.54030, 1.0]}.get(p, [-0.41615, 0.54030, 1.0])
        torch.testing.assert_close(scores.sort().values, torch.tensor(expected), rtol=0, atol=1e-4)
        finish(manager, [("a", p)])
        stored[p] = key[0, 0, 0].clone()
        for frame in range(max(0, p - 2), p + 1):  # never re-rotated while it is held
            assert torch.equal(manager.layers[0].kv[0, 0, 0, frame % 3], stored[frame])


def test_neighbouring_frames_beyond_256_stay_apart_in_bf16() -> None:
    """arange(255..259) in bf16 is 255, 256, 256, 258, 260: positions collapsed."""
    manager = build_manager([ring(3)], tokens_per_frame=1, dtype=torch.bfloat16)
    manager.ingest_request("a")
    raw = torch.tensor([[[[1.0, 0.0]]]])
    histories, first = {}, {}
    for p in range(260):
        begin(manager, [("a", p)])
        key, tag = rotate(raw, p), torch.tensor([[[[float(p - 250), 0.0]]]])
        _, v, visible = manager.upsert(key, tag, 0, clocks(p), commit=True)
        finish(manager, [("a", p)])
        histories[p] = sorted(int(t) + 250 for t in v[0, 0, visible, 0].tolist())[:-1]
        if p >= 255:
            (slot,) = (manager.layers[0].kv[1, 0, 0, :3, 0] == p - 250).nonzero().flatten().tolist()
            first[p] = (slot, manager.layers[0].kv[0, 0, 0, slot, 0].item())
    assert [first[p][0] for p in range(255, 260)] == [0, 1, 2, 0, 1]
    assert histories[257] == [255, 256]
    for p, value in ((256, -0.0398), (257, 0.8203), (258, 0.9258)):
        assert first[p][1] == torch.tensor(math.cos(p)).bfloat16().item()
        assert abs(first[p][1] - value) < 5e-5
    assert manager.get_state("a")["clock"] == 259


def test_a_session_goes_on_at_a_clock_that_only_a_loaded_state_can_reach() -> None:
    """At a clock far beyond 2**24, where fp32 has no odd integers, slots and visibility are still exact."""
    manager = build_manager([ring(3)], num_sessions=2)
    for rid in ("a", "b"):
        manager.ingest_request(rid)
    for p in range(3):
        for rid in ("a", "b"):
            begin(manager, [(rid, p)])
            kv = torch.full((1, 1, 2, 2), float(p))
            manager.upsert(kv, kv, 0, clocks(p), commit=True)
            finish(manager, [(rid, p)])
    state = manager.get_state("a")
    late = 3 * 2**40 + 2  # slot 2 holds the newest frame, as it does at clock 2
    state["clock"] = late
    manager.load_state("a", state)
    for p in range(late + 1, late + 5):
        begin(manager, [("a", p)])
        kv = torch.full((1, 1, 2, 2), float(p - late + 2))
        k, _, visible = manager.upsert(kv, kv, 0, clocks(p), commit=True)
        finish(manager, [("a", p)])
        assert sorted(set(k[0, 0, visible, 0].tolist())) == [p - late, p - late + 1, p - late + 2]
    assert slot_tags(manager.layers[0])[:3] == [6, 4, 5]
    assert manager.get_state("a")["clock"] == late + 4
