"""What every storage strategy says about its memory: measured, predicted, reported, and where buffers live."""

from __future__ import annotations

import random

import pytest
import torch

from ringkv import RingKVConfig, memory
from ringkv.config import CatKVConfig, FullKVConfig, ShiftKVConfig
from tests.ring_tools import ring
from tests.strategies import MAX_FRAMES, STRATEGIES, Rollout, build, held_kv_bytes, held_tensors, kv_tensors

every_strategy = pytest.mark.parametrize("name", STRATEGIES)
predicted = pytest.mark.parametrize("name", [name for name in STRATEGIES if not name.startswith("paged")])


@every_strategy
def test_the_report_is_what_is_really_held_at_any_moment(name: str) -> None:
    rollout = Rollout(name, [ring(3), ring(2, 2), ring(1, 3)], sessions=2, padding=True, head_dim=8)
    resource = rollout.resource

    def check() -> None:
        report = resource.memory_report()
        assert resource.memory_bytes() == report["resident"] == held_kv_bytes(resource)
        assert 0 <= report["in_use"] <= report["resident"]
        assert 0 <= report["padding"] <= report["resident"]
        resource.check_integrity()
        assert 0 <= report["flags"] <= sum(t.nbytes for t in held_tensors(resource) if not t.is_floating_point())

    check()
    for frame in range(9):
        rows = [("a", frame), ("b", frame)]
        rollout.begin(rows, pads=1)
        check()
        for commit in (False, False, True, False):
            rollout.full_pass(rows, commit=commit, pads=1)
            check()
        rollout.finish(rows, pads=1)
        check()
    resource.reset_request("a")
    check()


@predicted
def test_a_session_takes_the_bytes_that_were_predicted(name: str) -> None:
    rng = random.Random(11)
    for _ in range(6):
        windows = [ring(rng.randint(1, 5), rng.randint(1, 3)) for _ in range(rng.randint(1, 3))]
        sessions = rng.randint(1, 3)
        rollout = Rollout(name, windows, tokens=rng.randint(1, 3), head_dim=4, sessions=sessions, dtype=torch.bfloat16)
        config = rollout.resource.config
        assert isinstance(config, RingKVConfig | ShiftKVConfig | CatKVConfig | FullKVConfig)
        idle = memory.session_bytes_at(config, torch.bfloat16, 0)
        assert rollout.resource.memory_bytes() == sessions * idle
        for frame in range(20):
            rollout.drive([("a", frame)], noisy=0)
            expected = memory.session_bytes_at(config, "bfloat16", frame + 1) + (sessions - 1) * idle
            assert rollout.resource.memory_bytes() == expected, (windows, frame)


@pytest.mark.parametrize(
    ("name", "frames"),
    [("ring", 4), ("ring_uncompacted", 4), ("shift", 3), ("full_static", MAX_FRAMES), ("full_static_windowed", 48)],
)
def test_preallocated_bytes_of_a_small_geometry(name: str, frames: int) -> None:
    """An estimator assumed less than is allocated. H=2, D=4, T=2, two sessions, bf16."""
    for padding in (False, True):
        resource = build(name, [ring(3)], heads=2, head_dim=4, sessions=2, padding=padding, dtype=torch.bfloat16)
        assert resource.memory_bytes() == 2 * (2 + padding) * (2 * frames) * 2 * 4 * 2


@pytest.mark.parametrize(
    ("name", "frames"),
    [("cat", [0, 1, 2, 3, 3, 3]), ("full", [0, 1, 2, 4, 4, 8]), ("full_windowed", [0, 1, 2, 4, 4, 8])],
)
def test_what_grows_grows_by_these_frames(name: str, frames: list[int]) -> None:
    rollout = Rollout(name, [ring(3)], heads=2, head_dim=4, dtype=torch.bfloat16)
    found = [rollout.resource.memory_bytes()]
    for _ in rollout.stream("a", range(5)):
        found.append(rollout.resource.memory_bytes())
    assert found == [2 * 2 * count * 2 * 4 * 2 for count in frames]


@pytest.mark.parametrize("name", [n for n, s in STRATEGIES.items() if s.windowed and not n.startswith("full")])
def test_a_window_stops_growing(name: str) -> None:
    """A lifetime counter inflated the figure after the wrap; a cache concatenated for ever."""
    rollout = Rollout(name, [ring(3), ring(2, 2)], heads=2, head_dim=4, sessions=2, dtype=torch.bfloat16)
    figures = {}
    for frame, _ in enumerate(rollout.stream("a", range(201), noisy=0)):
        if frame in (10, 20, 200):
            report = rollout.resource.memory_report()
            figures[frame] = (report, len(kv_tensors(rollout.resource)), held_kv_bytes(rollout.resource))
    assert figures[10] == figures[20] == figures[200]


@every_strategy
def test_buffers_that_are_said_to_stay_do_stay(name: str) -> None:
    rollout = Rollout(name, [ring(3), ring(2, 2)], head_dim=8, sessions=2, padding=True)
    resource = rollout.resource

    def addresses() -> set[int]:  # of storages: a view made anew for a read moves nothing
        return {t.untyped_storage().data_ptr() for t in kv_tensors(resource)}

    before = addresses()
    rollout.run("a", range(6))
    state = resource.get_state("a")
    resource.reset_request("a")
    resource.load_state("a", state)
    rollout.drive([("a", 6)], pads=2)
    same = addresses() == before
    assert same == resource.fixed_addresses
    assert resource.fixed_addresses == (name not in ("cat", "full", "full_windowed"))


@every_strategy
def test_a_resource_that_was_cleaned_up_holds_nothing(name: str) -> None:
    rollout = Rollout(name, [ring(3)], head_dim=8)
    rollout.run("a", range(3))
    rollout.resource.cleanup()
    assert held_kv_bytes(rollout.resource) == rollout.resource.memory_bytes() == 0


IN_ORDER = ("shift", "cat", "full", "full_windowed", "full_static", "full_static_windowed")


@pytest.mark.parametrize("name", IN_ORDER)
def test_integrity_fails_on_a_count_that_contradicts_the_clock(name: str) -> None:
    rollout = Rollout(name, [ring(3), ring(2, 2)], head_dim=8)
    rollout.run("a", range(5))
    rollout.resource.check_integrity()
    for wrong in (-1, 1):
        rollout.resource.layers[1].held[0] += 2 * wrong
        with pytest.raises(RuntimeError, match="layer 1: session 0 at clock 4 holds"):
            rollout.resource.check_integrity()
        rollout.resource.layers[1].held[0] -= 2 * wrong


@pytest.mark.parametrize("name", IN_ORDER)
def test_integrity_fails_on_a_free_session_that_is_not_empty(name: str) -> None:
    rollout = Rollout(name, [ring(3)], head_dim=8, sessions=2)
    rollout.run("a", range(2))
    layer = rollout.resource.layers[0]
    layer.restore(1, torch.ones(2, 1, 1, 2, 8))
    layer.held[1] = 0
    with pytest.raises(RuntimeError, match="session 1 is free and not empty"):
        rollout.resource.check_integrity()


@pytest.mark.parametrize("name", ["shift", "full_static"])
def test_integrity_fails_on_a_buffer_that_moved(name: str) -> None:
    resource = build(name, [ring(3)], head_dim=8)
    resource.layers[0].kv = resource.layers[0].kv.clone()
    with pytest.raises(RuntimeError, match="moved"):
        resource.check_integrity()
