"""The planner against published figures, what is really allocated, and what a rollout is refused for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from model.sampler import FrameSampler
from model.transformer import FrameTransformer
from scripts.app import schema
from scripts.app.build import build_runner, kv_held, load_clips, resource_info, rollout_requests
from scripts.app.check import effective, weight_bytes
from scripts.app.compose import compose_all
from scripts.app.errors import BadInput
from scripts.app.geometry import model_config
from scripts.app.plan import Planned, calculate, checked, session_bytes
from scripts.app.strategies import kv_config, working_bytes
from scripts.plan import main

schema.register()
MIB = 2**20
SMALL = ["model=tiny", "model.d_model=32", "model.num_layers=3", "tokens_per_frame=16", "ring_frames=3", "dilation=2"]
EVERY = "[ring,ring_uncompacted,shift,cat,paged_windowed,full_windowed,full,full_static,paged,recompute_all]"


def planned(*overrides: str) -> Planned:
    (point,) = compose_all("plan", overrides, multirun=False).points
    return checked(point)


def of_ring(plan: dict[str, Any]) -> dict[str, Any]:
    return next(row for row in plan["strategies"] if row["strategy"] == "ring")


def test_the_published_geometry_gives_the_published_figures() -> None:
    plan = calculate(planned("model=waypoint_720p", "budget_gib=80", "num_frames=512"))
    assert plan["token_bytes"] == 4096
    assert plan["session_bytes"] == 855_638_016
    assert plan["crossover_frame"] == 17
    assert plan["full_context_bytes_per_s"] == 720 * MIB
    assert [(row["layers"], row["visible_frames"], row["bytes_per_layer"]) for row in plan["layers"]] == [
        (18, 15, 34 * MIB),
        (6, 16, 34 * MIB),
    ]
    assert next(row for row in plan["strategies"] if row["strategy"] == "full")["session_bytes"][-1] == 24 * 1024 * MIB
    ring = of_ring(plan)
    assert 80 < ring["sessions_by_memory"][-1] < 100
    assert 1 < ring["sessions_by_compute"][-1] < 3


def test_a_device_has_room_for_sessions_beside_weights_and_workspace() -> None:
    whole = calculate(planned("model=waypoint_720p", "budget_gib=80", "workspace_share=0", "num_frames=64"))
    assert whole["room_bytes"] + whole["weights_bytes"] == 80 * 1024 * MIB
    assert of_ring(whole)["sessions_by_memory"][-1] == whole["room_bytes"] // 855_638_016
    none = calculate(planned("model=waypoint_720p", "budget_gib=2", "num_frames=64"))
    assert none["room_bytes"] == 0
    assert of_ring(none)["sessions_by_memory"] == [0] * len(none["strategies"][0]["num_frames"])


def test_twice_the_rate_serves_twice_the_sessions() -> None:
    slow = of_ring(calculate(planned(*SMALL, "device_tflops=1", "num_frames=20")))
    fast = of_ring(calculate(planned(*SMALL, "device_tflops=2", "num_frames=20")))
    assert fast["sessions_by_compute"] == [2 * count for count in slow["sessions_by_compute"]]
    assert slow["frame_s"][-1] * 1e12 * 0.4 == pytest.approx(slow["frame_flops"][-1])


def test_the_curves_are_what_a_rollout_of_that_length_holds() -> None:
    plan = planned(*SMALL, f"strategies={EVERY}", "num_frames=9", "context_frames=2", "dtype=float32")
    geometry = model_config(plan.config)
    model = FrameTransformer(geometry).eval()
    found = {row["strategy"]: row for row in calculate(plan)["strategies"]}
    for name, rollout in plan.rollouts.items():
        for length in (3, 9):
            config = dataclasses.replace(
                rollout, num_frames=length, kv=dataclasses.replace(rollout.kv, num_pages=None, max_frames=None)
            )
            runner = build_runner(
                rollout.kv.strategy, kv_config(config, geometry), resource_info(config), FrameSampler(model, (1.0, 0.0))
            )
            for request in rollout_requests(config, load_clips(config, geometry), length):
                runner.submit(request)
            while runner.pending:
                runner.step()
            assert not runner.failed
            held, _ = kv_held(runner)
            assert session_bytes(rollout, geometry, length) == held + working_bytes(config, geometry), (name, length)
        assert found[name]["num_frames"][-1] == 9
        assert found[name]["session_bytes"][-1] == session_bytes(rollout, geometry, 9)


def test_a_rollout_is_refused_from_the_session_on_that_the_plan_has_no_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = planned(*SMALL, "dtype=float32", "num_frames=30")
    geometry = model_config(plan.config)
    room = 3.5 * calculate(plan)["session_bytes"]
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(total=room + weight_bytes(plan.config, geometry))
    )
    effective(dataclasses.replace(plan.rollouts["ring"], num_sessions=3))
    with pytest.raises(BadInput, match="num_sessions=4"):
        effective(dataclasses.replace(plan.rollouts["ring"], num_sessions=4))


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("num_sessions=2", "num_sessions=2: a plan counts the sessions that fit; expected 1"),
        ("budget_gib=0", "budget_gib=0.0: expected a number > 0"),
        ("utilisation=1.5", "utilisation=1.5: expected a share of the peak, at most 1"),
        ("workspace_share=1", "workspace_share=1.0: expected a share of the memory, from 0 to below 1"),
        ("kv.num_pages=4", "kv.num_pages=4: follows from the length of the rollout; expected null"),
        ("strategies=[shift]", "strategies=[shift]: expected ring among them, which the others are compared with"),
        ("budget_gb=80", "budget_gb=80: unknown key; did you mean budget_gib?"),
    ],
)
def test_bad_input_is_told_in_one_line(override: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([override]) == 2
    assert capsys.readouterr().err.startswith(f"error: {line}")


def test_the_command_prints_both_walls_and_leaves_json_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "budget_gib=1", "num_frames=100", f"hydra.run.dir={tmp_path / 'plan'}"]) == 0
    shown = capsys.readouterr().out
    for text in ("tiny", "memory", "compute", "paged_windowed", "park to the host"):
        assert text in shown
    plan = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert [row["strategy"] for row in plan["strategies"]] == plan["config"]["strategies"]
    assert (tmp_path / "plan" / "plan.png").stat().st_size > 10_000
