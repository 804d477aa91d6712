"""A state put into another geometry, or another strategy, frame by frame: what is kept, and that no read sees a hole.

What a state holds and what may be seen is worked out here from a stream played into dicts; attention is plain softmax
over the frames that are left. None of it is taken from the package.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ringkv import RingKVLayerConfig
from tests.ring_tools import dense_attention, reference_history, ring, same_bytes
from tests.strategies import (
    EVERY_READ,
    STRATEGIES,
    Rollout,
    accepts,
    assert_close,
    held_kv_bytes,
    history,
    kv_tensors,
)

SOURCE = (ring(3), ring(2, 3), ring(4, 3))
TARGET = (ring(5), ring(4, 2, 5), ring(4, 2))
"""Wider, denser, and shifted against the source's stride: holes at the old end, and in the middle."""

every_strategy = pytest.mark.parametrize("name", STRATEGIES)


def held(name: str, layer: RingKVLayerConfig, frames: int) -> set[int]:
    """Frames that a session holds once ``frames`` are committed."""
    if name.startswith("full") or not STRATEGIES[name].windowed:
        return set(range(frames))
    if not name.startswith("ring"):
        return set(reference_history(layer.ring_buckets, layer.pinned_dilation, frames))
    slots = {}
    for frame in range(0, frames, layer.pinned_dilation):
        slots[frame // layer.pinned_dilation % layer.ring_buckets] = frame
    return set(slots.values())


def expected(rollout: Rollout, frame: int, layer: int, variant: int, lost: set[int]) -> Tensor:
    """Dense attention of a pass over what the frame may see, without what is lost."""
    q, k, v = rollout.content("a", frame, layer, variant)
    past = [old for old in history(rollout.name, rollout.windows[layer], frame) if old not in lost]
    pairs = [rollout.content("a", old, layer, 0)[1:] for old in past] + [(k, v)]
    return dense_attention(q, torch.cat([k for k, _ in pairs], dim=1), torch.cat([v for _, v in pairs], dim=1))


def restored(
    source: Rollout, name: str, read: str = "auto", windows: tuple[RingKVLayerConfig, ...] = TARGET
) -> Rollout:
    target = Rollout(name, windows, head_dim=8, sessions=3, padding=True, attention=read, seed=0)
    target.run("other", range(2))
    target.resource.ingest_request("a")
    return target


@pytest.mark.parametrize(
    ("name", "read", "frames"),
    # Flex is slow on a CPU: it is given the state that has holes.
    [*((*each, frames) for each in EVERY_READ for frames in (1, 13)), ("ring", "flex", 13)],
)
def test_a_restored_session_holds_the_intersection_and_no_read_sees_a_hole(name: str, read: str, frames: int) -> None:
    source = Rollout("ring", SOURCE, head_dim=8)
    source.run("a", range(frames))
    state = source.resource.get_state("a")
    target = restored(source, name, read)
    other = target.resource.get_state("other")
    report = target.resource.restore("a", state)
    lost = []
    for index, (old, new) in enumerate(zip(SOURCE, TARGET, strict=True)):
        before, wanted = held("ring", old, frames), held(name, new, frames)
        assert report.kept[index] == tuple(sorted(before & wanted))
        assert report.dropped[index] == tuple(sorted(before - wanted))
        assert report.missing[index] == tuple(sorted(wanted - before))
        lost.append(wanted - before)
    target.resource.check_integrity()
    assert same_bytes(state, source.resource.get_state("a"))
    assert [accepts(target.resource, "a", frame) for frame in (0, frames - 1, frames + 1)] == [False] * 3

    holed = target.resource.get_state("a")
    for kv, written in holed["layers"]:
        tokens = written.view(-1, 2)
        assert torch.equal(tokens[:, 0], tokens[:, 1])
        assert not kv[:, :, :, ~written].any()
    for frame in range(frames, frames + 10):
        passes = target.drive([("a", frame)])
        for variant, outputs in zip((1, 0), passes, strict=True):
            for layer, out in enumerate(outputs):
                v = target.content("a", frame, layer, variant)[2]
                assert_close(out[0], expected(target, frame, layer, variant, lost[layer]), v)
        target.resource.check_integrity()
    assert same_bytes(target.resource.get_state("other"), other)


@every_strategy
def test_a_state_with_holes_travels_through_states_files_and_forks(name: str, tmp_path: Path) -> None:
    source = Rollout("ring", SOURCE, head_dim=8)
    source.run("a", range(8))
    target = restored(source, name)
    target.resource.restore("a", source.resource.get_state("a"))
    state = target.resource.get_state("a")
    target.resource.save("a", tmp_path / "a")
    copies = [Rollout(name, TARGET, head_dim=8, seed=0) for _ in range(2)]
    for copy in copies:
        copy.resource.ingest_request("a")
    copies[0].resource.load_state("a", state)
    copies[1].resource.load("a", tmp_path / "a")
    target.resource.ingest_request("fork")
    target.resource.fork("a", ["fork"])
    assert same_bytes(target.resource.get_state("fork"), state)
    for frame in range(8, 16):
        outputs = target.drive([("a", frame)])
        for copy in copies:
            assert same_bytes(copy.drive([("a", frame)]), outputs)
            assert same_bytes(copy.resource.get_state("a"), target.resource.get_state("a"))
            copy.resource.check_integrity()


@every_strategy
def test_a_restore_into_the_same_geometry_is_a_load(name: str) -> None:
    source = Rollout(name, SOURCE, head_dim=8)
    source.run("a", range(9))
    state = source.resource.get_state("a")
    target = Rollout(name, SOURCE, head_dim=8)
    target.resource.ingest_request("a")
    report = target.resource.restore("a", state)
    assert not any(report.dropped)
    assert not any(report.missing)
    assert same_bytes(target.resource.get_state("a"), state)
    for frame in range(9, 14):
        assert same_bytes(target.drive([("a", frame)]), source.drive([("a", frame)]))


@pytest.mark.parametrize("origin", STRATEGIES)
@pytest.mark.parametrize("name", ["ring", "shift", "full", "paged"])
def test_a_state_of_any_strategy_can_be_restored_into_any_other(origin: str, name: str) -> None:
    windows = (ring(3), ring(2, 2))
    source = Rollout(origin, windows, head_dim=8)
    source.run("a", range(7))
    target = restored(source, name, windows=windows)
    report = target.resource.restore("a", source.resource.get_state("a"))
    for index, window in enumerate(windows):
        before, wanted = held(origin, window, 7), held(name, window, 7)
        assert set(report.kept[index]) == before & wanted
        assert set(report.missing[index]) == wanted - before
    lost = [set(missing) for missing in report.missing]
    for frame in range(7, 12):
        for layer, out in enumerate(target.drive([("a", frame)])[-1]):
            v = target.content("a", frame, layer, 0)[2]
            assert_close(out[0], expected(target, frame, layer, 0, lost[layer]), v)
    target.resource.check_integrity()


def test_a_ring_wrapped_at_another_number_of_buckets_keeps_these_frames() -> None:
    """R=3 after frame 6 has 4, 5, 6; R=5 would have 2 to 6; R=2 has 5, 6. At d=2, R=4 would have 0, 2, 4, 6."""
    source = Rollout("ring", [ring(3)], head_dim=8)
    source.run("a", range(7))
    state = source.resource.get_state("a")
    found = {}
    for window in (ring(5), ring(2), ring(4, 2)):
        target = Rollout("ring", [window], head_dim=8)
        target.resource.ingest_request("a")
        found[window.ring_buckets] = target.resource.restore("a", state)
    assert (found[5].kept, found[5].dropped, found[5].missing) == (((4, 5, 6),), ((),), ((2, 3),))
    assert (found[2].kept, found[2].dropped, found[2].missing) == (((5, 6),), ((4,),), ((),))
    assert (found[4].kept, found[4].dropped, found[4].missing) == (((4, 6),), ((5,),), ((0, 2),))


@every_strategy
@pytest.mark.parametrize("holds", [False, True])
def test_a_state_of_another_model_is_refused_and_changes_nothing(name: str, holds: bool) -> None:
    target = Rollout(name, TARGET, head_dim=8, sessions=2)
    target.run("b", range(3))
    target.resource.ingest_request("a")
    if holds:
        target.run("a", range(5))
    held_before = [t.clone() for t in kv_tensors(target.resource)]
    others = [
        Rollout("ring", SOURCE[:2], head_dim=8),
        Rollout("ring", SOURCE, head_dim=16),
        Rollout("ring", SOURCE, head_dim=8, heads=2),
        Rollout("ring", SOURCE, head_dim=8, tokens=1),
        Rollout("ring", SOURCE, head_dim=8, dtype=torch.bfloat16),
    ]
    for other in others:
        other.run("a", range(4))
        with pytest.raises(ValueError) as refusal:
            target.resource.restore("a", other.resource.get_state("a"))
        assert "\n" not in str(refusal.value)
    good = Rollout("ring", SOURCE, head_dim=8)
    good.run("a", range(4))
    state = good.resource.get_state("a")
    spoilt = [
        {**state, "version": 2},
        {**state, "clock": 2},
        {**state, "geometry": {**state["geometry"], "strategy": "heap"}},
        {**state, "geometry": {**state["geometry"], "layers": [[3, 3], [2, 2, 3], [4, 4, 3]]}},
        {**state, "geometry": {**state["geometry"], "layers": [[3, 3, 0], [2, 2, 3], [4, 4, 3]]}},
        {**state, "geometry": {**state["geometry"], "layers": None}},
        {**state, "geometry": {**state["geometry"], "num_layers": 10**9, "layers": None, "strategy": "full"}},
        {**state, "clock": 10**15, "geometry": {**state["geometry"], "layers": None, "strategy": "full"}},
        {**state, "layers": [(kv[:, :, :, 2:], written[2:]) for kv, written in state["layers"]]},
    ]
    for broken in spoilt:
        with pytest.raises(ValueError) as refusal:
            target.resource.restore("a", broken)
        assert "\n" not in str(refusal.value)
    with pytest.raises(ValueError, match="not registered"):
        target.resource.restore("nobody", state)
    assert same_bytes(held_before, kv_tensors(target.resource))
    target.resource.check_integrity()
    target.drive([("b", 3)])


@every_strategy
def test_a_restore_needs_a_session_and_claims_none_when_there_is_none(name: str) -> None:
    source = Rollout("ring", SOURCE, head_dim=8)
    source.run("a", range(4))
    target = Rollout(name, TARGET, head_dim=8)
    target.run("b", range(3))
    target.resource.ingest_request("a")
    before = held_kv_bytes(target.resource)
    with pytest.raises(RuntimeError, match="pool is full"):
        target.resource.restore("a", source.resource.get_state("a"))
    assert (target.resource.session_of("a"), held_kv_bytes(target.resource)) == (None, before)
    target.drive([("b", 3)])
