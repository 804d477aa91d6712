"""Every choice of conf/kv composes, builds and rolls out, and those that must agree do, over whole rollouts.

Free-running rollouts under canonical reads are equal bit for bit between strategies that show a frame the same past: a
single wrong frame, slot or bit at any clock would change every frame after it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model.sampler import FrameSampler
from model.transformer import FrameTransformer
from ringkv import RolloutRequest
from ringkv.harness.records import read_frames, read_summary
from scripts.app import build, report, schema
from scripts.app.build import build_runner, resource_info
from scripts.app.check import effective
from scripts.app.compose import CONF_DIR, compose_all
from scripts.app.geometry import model_config
from scripts.app.strategies import STRATEGIES, kv_config
from tests.cli_tools import run_tiny

schema.register()

CHOICES = sorted(file.stem for file in (CONF_DIR / "kv").glob("*.yaml"))
WINDOWED = ("ring", "ring_uncompacted", "paged_windowed", "shift", "cat", "full_windowed", "recompute_all")
UNBOUNDED = ("full", "full_static", "paged")

MODELS = {
    "tiny": (["model=tiny", "ring_frames=2", "dilation=2"], 8),
    "waypoint": (
        [
            "model=waypoint_360p",
            "model.num_layers=2",
            "model.d_model=32",
            "model.num_heads=4",
            "model.num_kv_heads=2",
            "global_period=2",
            "tokens_per_frame=8",
            "ring_frames=2",
            "dilation=8",
        ],
        18,
    ),
}
"""Overrides and frames: every layer's window wraps, the waypoint-shaped one's of 2 x 8 frames too."""


@pytest.fixture(autouse=True)
def no_media(monkeypatch: pytest.MonkeyPatch) -> None:
    """Video and pictures take most of a small run's time, and do not depend on how the past is kept."""
    monkeypatch.setattr(report, "write_media", lambda rollout, folder: None)


def undilated(choice: str) -> list[str]:
    return ["dilation=1"] if choice == "hf_sliding" else []


def rollout(overrides: list[str], num_frames: int) -> torch.Tensor:
    """Frames ``[num_frames, C, H, W]`` of one rollout under canonical reads, from two given random frames."""
    knobs = [*overrides, f"num_frames={num_frames}", "context_frames=2", "attention=canonical", "threads=1"]
    (composed,) = compose_all("rollout", knobs, multirun=False).points
    config = effective(composed)
    geometry = model_config(config)
    model = FrameSampler(FrameTransformer(geometry, seed=3))
    runner = build_runner(config.kv.strategy, kv_config(config, geometry), resource_info(config), model)
    generator = torch.Generator().manual_seed(0)
    shape = (geometry.channels, geometry.height, geometry.width)
    runner.submit(
        RolloutRequest(
            rid="r",
            seed=7,
            stream=1,
            num_frames=num_frames,
            context=torch.rand(2, *shape, generator=generator) * 2 - 1,
            actions=torch.randint(geometry.num_actions, (num_frames,), generator=generator),
        )
    )
    images = []
    while runner.pending:
        images += [result.image for result in runner.step()]
    assert not runner.failed, runner.failed
    assert len(images) == num_frames
    return torch.stack(images)


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_rolls_out_and_holds_the_bytes_that_were_predicted(choice: str, tmp_path: Path):
    code, run = run_tiny(tmp_path, f"kv={choice}", "num_sessions=2", *undilated(choice))
    assert code == 0
    rows, summary = read_frames(run).rows, read_summary(run)
    assert [row["clocks"] for row in rows] == [[frame, frame] for frame in range(6)]
    assert [row["sessions"] for row in rows] == [2] * 6
    assert all(0 < row["kv_in_use_bytes"] <= row["kv_bytes"] for row in rows)
    assert summary["memory/kv_bytes"] == summary["memory/kv_bytes_predicted"] == rows[-1]["kv_bytes"]
    assert all(row["kv_bytes"] <= summary["memory/kv_bytes_predicted"] for row in rows)
    # layers of the window: two that wrap as the ring does; none without a window
    sees_all = choice in UNBOUNDED
    assert summary["ring/wraps"] == ([] if sees_all else [2, 2] if undilated(choice) else [2, 1])


@pytest.mark.parametrize(
    "choice", [name if name == "ring" else pytest.param(name, marks=pytest.mark.slow) for name in CHOICES]
)
def test_a_compiled_run_of_three_sessions_pads_its_steps_and_holds_the_bytes_that_were_predicted(
    choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    batches: list[int] = []

    def count_rows(model: FrameTransformer, args: tuple[torch.Tensor, ...]) -> None:
        batches.append(len(args[0]))

    def as_if_compiled(model: FrameTransformer) -> None:
        model.register_forward_pre_hook(count_rows)

    monkeypatch.setattr(build, "compile_regions", as_if_compiled)
    code, run = run_tiny(tmp_path, f"kv={choice}", "num_sessions=3", "compile=true", *undilated(choice))
    assert code == 0
    rows, summary = read_frames(run).rows, read_summary(run)
    assert [row["clocks"] for row in rows] == [[frame] * 3 for frame in range(6)]
    assert all(0 < row["kv_in_use_bytes"] <= row["kv_bytes"] for row in rows)
    assert summary["memory/kv_bytes"] == summary["memory/kv_bytes_predicted"] == rows[-1]["kv_bytes"]
    if not choice.startswith("recompute"):  # which keeps no cache to pad for
        assert set(batches) == {1, 2, 4}, "every bucket is met before the first frame"
        steps = [len(batches) - last for last, rows in enumerate(reversed(batches)) if rows != 4][:1]
        assert steps[0] <= len(batches) - 6, "and the rollout's own steps are all of the largest"


def test_a_step_that_is_to_be_captured_reads_by_what_a_graph_can_hold():
    for choice, attention, expected in (("ring", "auto", "flex"), ("ring", "sdpa", "sdpa"), ("shift", "auto", "auto")):
        (config,) = compose_all(
            "rollout", [f"kv={choice}", "compile=true", f"attention={attention}"], multirun=False
        ).points
        config.kv_dtype = "bfloat16"
        assert resource_info(config).attention == attention
        config.device = "cuda:0"
        assert resource_info(config).attention == expected
        config.compile = False
        assert resource_info(config).attention == attention


def test_there_is_a_file_for_every_strategy_and_it_says_which():
    strategies = {compose_all("rollout", [f"kv={name}"], multirun=False).points[0].kv.strategy for name in CHOICES}
    assert strategies == set(STRATEGIES)


def test_the_sizes_follow_the_knobs():
    def bytes_of(*overrides: str) -> tuple[int, object]:
        (composed,) = compose_all("rollout", ["model=tiny", "threads=1", *overrides], multirun=False).points
        config = effective(composed)
        geometry = model_config(config)
        return STRATEGIES[config.kv.strategy].holds(config, geometry), config.kv

    # tiny: 6 layers, 2 of them dilated; a frame of 64 tokens x K and V x 2 heads x 32 x 4 bytes is 32 KiB a layer
    frame = 64 * 2 * 2 * 32 * 4
    window = ["ring_frames=4", "dilation=3", "num_frames=20"]
    assert bytes_of("kv=ring", *window)[0] == 6 * 5 * frame
    assert bytes_of("kv=ring_uncompacted", *window)[0] == (4 * 5 + 2 * 13) * frame
    assert bytes_of("kv=shift", *window)[0] == (4 * 4 + 2 * 5) * frame
    assert bytes_of("kv=full", *window)[0] == 6 * 32 * frame
    assert bytes_of("kv=full_static", *window)[0] == 6 * 20 * frame
    assert bytes_of("kv=full_static", "kv.max_frames=24", *window)[0] == 6 * 24 * frame
    # 16 tokens a page: 80 pages hold 20 frames of 64; staging holds them once more, and the own frame
    size, knobs = bytes_of("kv=paged", *window)
    assert (size, knobs.page_tokens, knobs.num_pages) == (6 * (20 + 20 + 1) * frame, 16, 80)
    size, knobs = bytes_of("kv=paged", "kv.page_tokens=48", "num_sessions=2", *window)
    assert (knobs.page_tokens, knobs.num_pages) == (48, 2 * 27)
    # 4 frames of 64 tokens span 7 pages of 48 at most; staging: 3 frames, dilated 4, and the own one
    size, knobs = bytes_of("kv=paged_windowed", "kv.page_tokens=48", *window)
    assert knobs.num_pages == 7
    assert size == 6 * 7 * 48 * frame // 64 + (4 * 4 + 2 * 5) * frame
    frames = 20 * 3 * 64 * 64 * 4
    assert bytes_of("kv=recompute_all", *window)[0] == bytes_of("kv=recompute_window", *window)[0] == frames


@pytest.mark.parametrize(
    ("knobs", "short", "clocks"),
    [
        ("kv=full_static kv.max_frames=4", "'session-0' is at frame 4: max_frames=4", [[0], [1], [2], [3]]),
        (
            "kv=paged kv.num_pages=4",
            "needs 5 pages of layer 0 at frame 4, the pool has 4: 1 short",
            [[0], [1], [2], [3]],
        ),
        # a page a frame: the ninth is for frame 4 of one session, and the other is refused
        ("kv=paged kv.num_pages=9 num_sessions=2", "0 of 9 free, 1 short", [[0, 0], [1, 1], [2, 2], [3, 3], [4]]),
    ],
)
def test_a_rollout_that_runs_out_of_room_fails_with_what_was_short(
    knobs: str, short: str, clocks: list[list[int]], tmp_path: Path
):
    code, run = run_tiny(tmp_path, *knobs.split())
    assert code == 1
    summary = read_summary(run)
    assert summary["status"] == "failed"
    assert summary["error"].startswith("StepRefused: step refused: ")
    assert short in summary["error"]
    assert [row["clocks"] for row in read_frames(run).rows] == clocks


@pytest.mark.parametrize("name", MODELS)
def test_strategies_that_show_the_same_past_make_the_same_frames_bit_for_bit(name: str):
    overrides, num_frames = MODELS[name]
    made = {choice: rollout([f"kv={choice}", *overrides], num_frames) for choice in (*WINDOWED, *UNBOUNDED)}
    for family in (WINDOWED, UNBOUNDED):
        for choice in family[1:]:
            unlike = [f for f in range(num_frames) if not torch.equal(made[choice][f], made[family[0]][f])]
            assert unlike == [], (choice, family[0])
    assert torch.isfinite(made["ring"]).all()
    gaps = (made["ring"] - made["full"]).abs().amax(dim=(1, 2, 3))
    assert (gaps[:2] == 0).all()  # frame 1 sees frame 0 in every layer
    assert (gaps[2:] > 0).all(), "from frame 2 on the ring has forgotten frame 0 where it keeps every frame"


def test_the_sliding_cache_of_transformers_makes_the_frames_of_an_undilated_ring():
    pytest.importorskip("transformers")
    overrides = [*MODELS["waypoint"][0], "dilation=1"]
    assert torch.equal(rollout(["kv=hf_sliding", *overrides], 9), rollout(["kv=ring", *overrides], 9))


def test_recomputing_only_the_window_makes_other_frames_and_starts_out_the_same():
    overrides, _ = MODELS["tiny"]
    ring, window = (rollout([f"kv={choice}", *overrides], 7) for choice in ("ring", "recompute_window"))
    assert torch.equal(ring[:2], window[:2])
    assert not torch.equal(ring[4:], window[4:])
