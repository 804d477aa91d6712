"""Random programs against the specification; the machine itself is in ``ring_machine.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    run_state_machine_as_test,
)
from torch import Tensor

from ringkv import RingKVManager
from tests.ring_machine import HAPPENED
from tests.ring_machine_sessions import MUST_HAPPEN, SessionMachine


def run_machine(max_examples: int, phases: Sequence[Phase]) -> None:
    run_state_machine_as_test(
        SessionMachine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=40,
            derandomize=True,
            database=None,
            deadline=None,
            phases=phases,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        ),
    )


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_random_programs_do_what_the_specification_says() -> None:
    HAPPENED.clear()
    run_machine(120, [Phase.generate, Phase.shrink])
    assert all(HAPPENED[name] for name in MUST_HAPPEN), dict(HAPPENED)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_many_more_random_programs_do_what_the_specification_says() -> None:
    HAPPENED.clear()
    run_machine(2000, [Phase.generate, Phase.shrink])
    assert all(HAPPENED[name] > 50 for name in MUST_HAPPEN), dict(HAPPENED)


def _forget_to_zero(manager: RingKVManager, rid: str, free: bool = False) -> None:
    session = manager.session_of(rid)
    if session is None:
        return _reset(manager, rid, free)
    layer = manager.layers[-1]
    low = layer.session_span(session)[0]
    kept = layer.kv[:, :, :, low : low + 1].clone()
    _reset(manager, rid, free)
    layer.kv[:, :, :, low : low + 1] = kept
    return None


_reset = RingKVManager.reset_request
_upsert = RingKVManager.upsert


def _see_one_slot_too_many(manager: RingKVManager, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    k, v, visible = _upsert(manager, *args, **kwargs)
    visible = visible.clone()
    visible[..., :1] = True
    return k, v, visible


def _keep_what_an_abort_wrote(manager: RingKVManager, rid: str) -> dict[str, Any]:
    state = _get_state(manager, rid)
    session = manager.session_of(rid)
    assert session is not None
    for index, layer in enumerate(manager.layers):
        low, high = layer.session_span(session)
        end = high - manager.tokens_per_frame
        state["layers"][index][1].copy_(layer.written[low:high])
        state["layers"][index][0][:, :, :, : end - low] = layer.kv[:, :, :, low:end]
    return state


_get_state = RingKVManager.get_state


def _move_the_clock_alone(manager: RingKVManager, rid: str, frames: int) -> None:
    session = manager.session_of(rid)
    if session is None or not 0 < frames <= manager._rewindable(rid, session):
        return _rewind(manager, rid, frames)
    clock = manager._table.clock_of(rid)
    assert clock is not None
    manager._void_plan_of(rid, "was rewound")
    manager._table.set_clock(rid, clock - frames if clock >= frames else None)
    return None


_rewind = RingKVManager.rewind


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("reset_request", _forget_to_zero),
        ("upsert", _see_one_slot_too_many),
        ("get_state", _keep_what_an_abort_wrote),
        ("rewind", _move_the_clock_alone),
    ],
)
def test_random_programs_find_a_planted_fault(
    name: str, fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RingKVManager, name, fault)
    # A RuntimeError is the integrity check's, the last one that of a call that should have raised.
    with pytest.raises((AssertionError, RuntimeError, pytest.fail.Exception)):
        run_machine(60, [Phase.generate])
