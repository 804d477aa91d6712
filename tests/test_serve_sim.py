"""Serving under a virtual clock: crowds small enough to be worked out by hand, and the command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ringkv.policies import Fifo, LruPark, Policy, Refuse
from scripts.app import schema
from scripts.app.compose import compose_all
from scripts.app.serve.check import checked
from scripts.app.serve.load import Visit, draw_visits
from scripts.app.serve.simulate import Tally, simulate
from scripts.serve_sim import main
from tests.cli_tools import WandbStub

schema.register()


def serve(visits: Sequence[Visit], policy: Policy, pool: int = 1, **changes: Any) -> Tally:
    """Frames due every second that take a quarter of one, unless changed."""
    return simulate(visits, policy=policy, pool=pool, **({"period_s": 1.0, "frame_s": 0.25, "move_s": 0.0} | changes))


def visit(rid: str, arrival_s: float, num_frames: int, **pauses: float) -> Visit:
    return Visit(rid, arrival_s, num_frames, {int(frame.removeprefix("f")): pause for frame, pause in pauses.items()})


def test_one_visitor_on_a_fast_device_never_waits_and_every_frame_is_on_time() -> None:
    tally = serve([visit("a", 2.0, 5)], Fifo())
    assert (tally.finished, tally.refused, tally.waits_s) == (1, 0, [0.0])
    assert tally.late_s == [0.25] * 4
    assert tally.end_s == 2.0 + 4 + 0.25


def test_in_a_queue_the_second_waits_for_the_last_frame_of_the_first() -> None:
    tally = serve([visit("a", 0.0, 4), visit("b", 1.0, 2)], Fifo())
    assert tally.waits_s == [0.0, 3.25 - 1.0]
    assert tally.finished == 2


def test_without_a_queue_the_second_is_refused_and_a_third_who_comes_later_is_not() -> None:
    tally = serve([visit("a", 0.0, 4), visit("b", 1.0, 2), visit("c", 9.0, 2)], Refuse())
    assert (tally.refused, tally.finished, tally.waits_s) == (1, 2, [0.0, 0.0])


def test_a_visitor_who_pauses_gives_the_session_up_and_gets_it_back() -> None:
    visits = [visit("a", 0.0, 4, f1=10.0), visit("b", 2.0, 3)]
    kept, lent = serve(visits, Fifo()), serve(visits, LruPark(quantum_frames=100))
    assert kept.waits_s == [0.0, pytest.approx(13.25 - 2.0)]  # a: frames at 0, 1, then 12 and 13
    assert lent.waits_s == [0.0, 0.0]
    assert (kept.moves, lent.moves) == (0, 2)
    assert max(count for _, count in lent.parked) == 1
    assert kept.finished == lent.finished == 2


def test_two_who_never_pause_take_turns_of_a_quantum_and_both_end() -> None:
    visits = [visit("a", 0.0, 8), visit("b", 0.0, 8)]
    tally = serve(visits, LruPark(quantum_frames=2), period_s=0.25)
    assert tally.finished == 2
    assert tally.waits_s == [0.0, 0.5]
    assert tally.moves >= 6


def test_moving_a_session_takes_its_time() -> None:
    visits = [visit("a", 0.0, 4, f1=10.0), visit("b", 2.0, 3)]
    free, dear = (serve(visits, LruPark(quantum_frames=100), move_s=cost) for cost in (0.0, 0.5))
    assert max(free.late_s) == 0.25
    assert max(dear.late_s) == 0.75  # of the frame that a came back for


def test_a_device_that_is_too_slow_is_late_and_does_not_owe_the_frames_it_missed() -> None:
    tally = serve([visit("a", 0.0, 3), visit("b", 0.0, 3)], Fifo(), pool=2, frame_s=0.75)
    assert tally.late_s == [pytest.approx(1.5)] * 4
    assert tally.row(period_s=1.0, session_bytes=7)["on_time_fraction"] == 0.0
    assert tally.end_s == pytest.approx(4.5)


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    tally = serve([visit("a", 0.0, 10), visit("b", 0.0, 10)], Fifo(), deadline_s=3.5)
    assert (tally.missed_deadline, tally.finished, tally.waits_s) == (2, 0, [0.0])


def test_the_crowd_is_drawn_once_from_the_seed_with_the_rate_that_was_asked_for() -> None:
    (point,) = compose_all("serve_sim", ["minutes=60"], multirun=False).points
    visits = draw_visits(point, 8.0)
    assert visits == draw_visits(point, 8.0)
    assert len(visits) == pytest.approx(480, rel=0.15)
    assert all(75 <= each.num_frames <= 225 for each in visits)
    assert [each.arrival_s for each in visits] == sorted(each.arrival_s for each in visits)


def test_bytes_and_seconds_are_those_of_the_geometry_that_was_asked_for() -> None:
    (point,) = compose_all("serve_sim", [], multirun=False).points
    serving = checked(point)
    assert serving.session_bytes == 855_638_016
    assert serving.move_s == pytest.approx(855_638_016 / 55e9)
    assert 1 / serving.frame_s / 15 == pytest.approx(2.7, rel=0.05)  # sessions in real time


def test_the_command_writes_a_row_for_each_rate_pool_and_policy_and_a_picture(tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = ["arrivals_per_min=[6]", "pool_sizes=[1,2]", "minutes=0.5", "num_frames=20", "tracking=disabled"]
    assert main([*overrides, f"hydra.run.dir={run}"]) == 0
    rows = json.loads((run / "serve_sim.json").read_text())["rows"]
    assert [(row["pool"], row["policy"]) for row in rows] == [
        (pool, policy) for pool in (1, 2) for policy in ("refuse", "fifo", "lru_park")
    ]
    assert all(row["finished"] + row["refused"] == row["requests"] for row in rows)
    assert (run / "serve_sim.png").stat().st_size > 10_000


def test_every_simulation_is_a_step_of_one_wandb_run_with_the_picture_at_the_last(
    tmp_path: Path, wandb: WandbStub, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    overrides = ["arrivals_per_min=[6]", "pool_sizes=[1]", "minutes=0.5", "num_frames=20", "tracking=offline"]
    assert main([*overrides, f"hydra.run.dir={run}"]) == 0
    rows = json.loads((run / "serve_sim.json").read_text())["rows"]
    (init,) = wandb.calls("init")
    assert (init["mode"], init["config"]["pool_sizes"]) == ("offline", [1])
    *logged, picture = wandb.calls("log")
    assert [call["step"] for call in logged] == [0, 1, 2]
    for call, row in zip(logged, rows, strict=True):
        assert set(call["keys"]) == {f"serve/{key}" for key, value in row.items() if value is not None}
    assert (picture["keys"], picture["step"]) == (["strip"], 2)
    assert [call["exit_code"] for call in wandb.calls("finish")] == [0]
    assert f"wandb sync {run}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("policies=[lifo]", "policies=[lifo]: lifo is none; expected refuse, fifo, lru_park"),
        ("policies=[]", "policies=[]: expected one value or more"),
        ("pool_sizes=[0]", "pool_sizes=0: expected integers >= 1"),
        ("arrivals_per_min=[-1]", "arrivals_per_min=-1.0: expected a number > 0"),
        ("pause_s=-1", "pause_s=-1.0: expected seconds >= 0"),
        ("num_sessions=2", "num_sessions=2: pool_sizes says how many there are; expected 1"),
        ("kv=full", "kv=full: sessions of other strategies change their size; expected ring"),
    ],
)
def test_bad_input_is_told_in_one_line(override: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([override]) == 2
    assert capsys.readouterr().err.startswith(f"error: {line}")
