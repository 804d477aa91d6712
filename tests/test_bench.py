"""The benchmark: how samples are taken and judged, with a clock that is told what to show. No real time is asserted."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from ringkv import RingKVConfig
from scripts.app.bench import kernels, reads, steady
from scripts.app.bench.check import LEVELS, SHARES, checked
from scripts.app.bench.sampling import Budget, faster, interleave, median_of_ratios, timed
from scripts.app.bench.targets import targets
from scripts.app.compare_stats import Ratio, paired_ratio
from scripts.app.compose import compose_all
from scripts.app.errors import BadInput
from scripts.app.schema import register
from scripts.bench import main
from tests.model_tools import SMALL
from tests.ring_tools import ring

FLAT = Ratio(1.0, 0.9, 1.1, 0.1, 7)


class Hands:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def taking(self, seconds: float) -> Callable[[], None]:
        """A call that takes ``seconds``."""

        def call() -> None:
            self.now += seconds

        return call


# -- samples ---------------------------------------------------------------------------------------------------


def test_a_round_takes_each_sample_once_and_every_other_round_in_reverse() -> None:
    hands, order = Hands(), []

    def sample(name: str) -> Callable[[], float]:
        return lambda: order.append(name) or 1.0

    seconds = interleave({n: sample(n) for n in "abc"}, budget_s=9.0, at_least=3, at_most=3, clock=hands)
    assert "".join(order) == "abccbaabc"
    assert seconds == {name: [1.0, 1.0, 1.0] for name in "abc"}


@pytest.mark.parametrize(("budget_s", "rounds"), [(0.0, 2), (11.9, 3), (12.0, 4), (1000.0, 6)])
def test_rounds_go_on_while_another_one_fits_the_budget_within_their_bounds(budget_s: float, rounds: int) -> None:
    hands = Hands()
    samples = {"short": timed(hands.taking(1.0), hands), "long": timed(hands.taking(2.0), hands)}
    seconds = interleave(samples, budget_s=budget_s, at_least=2, at_most=6, clock=hands)
    assert seconds == {"short": [1.0] * rounds, "long": [2.0] * rounds}
    assert hands.now == 100.0 + 3.0 * rounds


def test_what_a_sample_does_besides_is_not_in_its_seconds_but_in_the_budget() -> None:
    hands = Hands()

    def sample() -> float:
        hands.now += 5.0  # prepares
        return timed(hands.taking(1.0), hands)()

    assert interleave({"a": sample}, budget_s=17.0, at_least=1, at_most=9, clock=hands) == {"a": [1.0, 1.0]}


def test_the_faster_call_is_the_one_whose_best_run_is_best() -> None:
    hands = Hands()
    uneven = iter([9.0, 9.0, 0.5, 9.0])
    calls = [hands.taking(1.0), lambda: hands.taking(next(uneven))()]
    assert faster(calls, rounds=3, clock=hands) == 1


def test_what_one_thing_leaves_of_its_share_goes_to_the_rest() -> None:
    hands = Hands()
    budget = Budget(12.0, hands)
    assert budget.share_s(4) == 3.0
    hands.now += 0.0  # the first took nothing
    assert budget.share_s(3) == 4.0
    hands.now += 13.0
    assert (budget.left_s, budget.share_s(2)) == (0.0, 0.0)


# -- ratios ----------------------------------------------------------------------------------------------------


def test_the_median_of_a_grid_is_over_points_and_not_over_samples() -> None:
    many = ([1.5] * 90, [1.0] * 90)
    ratio = median_of_ratios([many, ([1.1] * 5, [1.0] * 5), ([2.4] * 5, [2.0] * 5)])
    assert ratio is not None
    assert ratio.ratio == pytest.approx(1.2)
    assert (ratio.low, ratio.high) == (pytest.approx(1.2), pytest.approx(1.2))  # nothing varies within a point
    assert ratio.blocks == 3


def test_the_interval_of_a_grid_covers_the_truth_and_narrows_with_more_samples() -> None:
    generator = torch.Generator().manual_seed(0)

    def points(samples: int) -> list[tuple[list[float], list[float]]]:
        noise = 1 + 0.2 * torch.randn(9, samples, generator=generator).clamp(-3, 3)
        return [((1.1 * row).tolist(), [1.0] * samples) for row in noise]

    few, many = median_of_ratios(points(5)), median_of_ratios(points(80))
    assert few is not None
    assert many is not None
    assert many.low <= 1.1 <= many.high
    assert many.high - many.low < few.high - few.low


def test_a_grid_without_points_has_no_median() -> None:
    assert median_of_ratios([]) is None


# -- targets ---------------------------------------------------------------------------------------------------


def read_row(ratio: float, *, held: bool = True, tokens: int = 64) -> dict[str, Any]:
    times, floor = [ratio] * 6, [1.0] * 6
    point = {"tokens_per_frame": tokens, "window": 16, "sessions": 1, "dtype": "float32", "fill": "wrapped"}
    return point | {
        "dilation": 1,
        "threads": 1,
        "held": held,
        "samples_s": {"ring": times, "floor": floor},
        "ratio": paired_ratio(times, floor),
    }


def step_row(sessions: int, mode: str, step: float, floor: float, host: float) -> dict[str, Any]:
    samples = {"step": [step] * 6, "floor": [floor] * 6, "host": [host] * 6}
    return {
        "sessions": sessions,
        "mode": mode,
        "status": "ok",
        "samples_s": samples,
        "fraction": paired_ratio(samples["floor"], samples["step"]),
        "host_share": paired_ratio(samples["host"], samples["step"]),
    }


def verdicts(levels: dict[str, Any]) -> dict[str, tuple[str, float | None]]:
    return {target.name: (target.verdict, target.measured) for target in targets(levels)}


def test_points_below_the_floor_s_limit_are_reported_and_not_held() -> None:
    rows = [read_row(1.04), read_row(1.05), read_row(1.19), read_row(9.0, held=False)]
    found = verdicts({"reads": rows})
    assert found["read path / floor, median of the grid"] == ("held", pytest.approx(1.05))
    assert found["read path / floor, worst point"] == ("held", pytest.approx(1.19))
    found = verdicts({"reads": [*rows, read_row(1.21), read_row(1.22)]})
    assert found["read path / floor, median of the grid"] == ("short", pytest.approx(1.19))
    assert found["read path / floor, worst point"] == ("short", pytest.approx(1.22))


def test_a_target_without_rows_is_not_measured_and_never_held() -> None:
    assert {verdict for verdict, _ in verdicts({}).values()} == {"not measured"}
    assert {verdict for verdict, _ in verdicts({"reads": [read_row(1.0, held=False)]}).values()} == {"not measured"}


def test_steps_are_judged_by_mode_and_by_sessions() -> None:
    rows = [
        step_row(1, "eager", 10.0, 4.0, 0.5),
        step_row(1, "compiled", 8.0, 4.0, 0.5),
        step_row(8, "eager", 40.0, 32.0, 0.8),
        step_row(8, "compiled", 50.0, 36.0, 0.5),
    ]
    found = verdicts({"frame": rows})
    assert found["eager / compiled step, 1 session"] == ("short", pytest.approx(1.25))
    assert found["kernel floor / step, 1 session, compiled"] == ("short", pytest.approx(0.5))
    assert found["kernel floor / step, 1 session, eager"] == ("reported", pytest.approx(0.4))
    assert found["kernel floor / step, 8 sessions, compiled"] == ("held", pytest.approx(0.72))
    assert found["8 steps of 1 / step of 8, eager"] == ("held", pytest.approx(2.0))
    assert found["8 steps of 1 / step of 8, compiled"] == ("short", pytest.approx(1.28))
    assert found["host work / step, 8 sessions, eager"] == ("held", pytest.approx(0.02))
    assert found["host work / step, 8 sessions, compiled"] == ("held", pytest.approx(0.01))


def test_a_machine_without_a_compiler_is_told_and_the_rest_is_judged() -> None:
    failed = {"sessions": 1, "mode": "compiled", "status": "failed", "reason": "no C++ compiler"}
    found = targets({"frame": [step_row(1, "eager", 10.0, 4.0, 0.5), failed]})
    by_name = {target.name: target for target in found}
    assert by_name["eager / compiled step, 1 session"].verdict == "not measured"
    assert by_name["eager / compiled step, 1 session"].note == "no C++ compiler"
    assert by_name["kernel floor / step, 1 session, eager"].verdict == "reported"


@pytest.mark.parametrize(
    ("what", "row", "name", "held"),
    [
        (
            "session memory",
            {"measured_bytes": [8, 64], "predicted_bytes": [8, 64]},
            "session memory - prediction",
            True,
        ),
        (
            "session memory",
            {"measured_bytes": [9, 63], "predicted_bytes": [8, 64]},
            "session memory - prediction",
            False,
        ),
        ("memory growth", {"frames": [1000, 5000], "growth_bytes": 2**20}, "memory growth", True),
        ("memory growth", {"frames": [1000, 5000], "growth_bytes": 2**20 + 1}, "memory growth", False),
        (
            "compilations",
            {"regions": 3, "buckets": 4, "in_warm_up": 12, "later": 0},
            "compilations after warm-up",
            True,
        ),
        (
            "compilations",
            {"regions": 3, "buckets": 4, "in_warm_up": 12, "later": 1},
            "compilations after warm-up",
            False,
        ),
        ("compilations", {"regions": 3, "buckets": 4, "in_warm_up": 13, "later": 0}, "compilations per region", False),
        ("late clock", {"clocks": [130, 5122], "ratio": FLAT}, "frame at clock 5,000", True),
        ("late clock", {"clocks": [130, 5122], "ratio": Ratio(1.04, 1.0, 1.1, 0.1, 7)}, "frame at clock 5,000", False),
    ],
)
def test_what_must_not_change_is_held_exactly(what: str, row: dict[str, Any], name: str, held: bool) -> None:
    found = targets({"steady": [{"what": what, "status": "ok"} | row]})
    (target,) = (target for target in found if target.name.startswith(name))
    assert target.verdict == ("held" if held else "short")


# -- what is measured ------------------------------------------------------------------------------------------


def point(**changes: Any) -> reads.ReadPoint:
    values = {"tokens_per_frame": 3, "window": 4, "sessions": 2, "dtype": "float32", "fill": "wrapped"}
    return reads.ReadPoint(**(values | {"dilation": 2, "threads": 1} | changes))


def test_a_filling_ring_is_measured_while_it_fills_and_a_wrapped_one_after() -> None:
    first, last = point(fill="filling").clocks
    assert last is not None
    assert 0 < first < last < 8  # the horizon: four frames kept of eight
    assert point().clocks == (9, None)


def test_the_floor_attends_to_as_many_keys_as_the_clock_shows() -> None:
    config = RingKVConfig(
        num_layers=2,
        num_kv_heads=1,
        head_dim=8,
        num_qo_heads=1,
        tokens_per_frame=3,
        num_sessions=1,
        layers=(ring(4), ring(2, 3)),
    )
    assert kernels.visible_tokens(config, 0) == [3, 3]
    assert kernels.visible_tokens(config, 2) == [9, 6]
    assert kernels.visible_tokens(config, 12) == [12, 6]  # the dilated layer is about to overwrite one of its two
    assert kernels.visible_tokens(config, 13) == [12, 9]


def test_every_weight_matrix_that_a_pass_multiplies_with_is_among_the_kernels() -> None:
    from model.flops import weight_flops
    from model.transformer import FrameTransformer

    weights = kernels.product_weights(FrameTransformer(SMALL))
    assert 2 * SMALL.tokens_per_frame * sum(weight.numel() for weight in weights) == weight_flops(SMALL)


def test_frames_of_a_point_pass_through_the_cache_like_any_and_skipping_leaves_it_full() -> None:
    config = reads._kv_config(RingKVConfig, 3, point().layer, 2)
    frames = reads.CacheFrames(reads._build(config, "float32", "auto"), 2)
    frames.skip_to(9)
    frames.run(whole=False)
    frames.resource.check_integrity()
    assert frames.frame == 10
    flags = frames.resource.get_state("session-1")["layers"][0][1]
    assert flags.all()
    frames.skip_to(2)  # back: from an empty ring
    frames.resource.check_integrity()
    assert frames.frame == 2


def test_one_denoise_pass_that_stands_for_four_counts_four_times() -> None:
    hands = Hands()
    frames = reads.CacheFrames(
        reads._build(reads._kv_config(RingKVConfig, 3, point().layer, 1), "float32", "auto"), 1, hands
    )
    attend = frames.resource.attend

    def slow(*args: Any, commit: bool) -> torch.Tensor:
        hands.now += 10.0 if commit else 1.0
        return attend(*args, commit=commit)

    frames.resource.attend = slow  # type: ignore[method-assign]
    assert frames.run(whole=False) == 14.0
    frames.denoise = 1
    before = hands.now
    assert frames.run(whole=False) == 14.0
    assert hands.now - before == 11.0


def test_a_session_moved_to_a_late_clock_shows_the_same_rings() -> None:
    bench = checked(composed("quick=true"))
    from model.sampler import FrameSampler
    from scripts.app import build
    from scripts.app.bench.frame import Steps, wrapped_state
    from scripts.app.geometry import model_config

    model = FrameSampler(build.build_weights(bench.job, model_config(bench.job)).model)
    early = wrapped_state(bench.job, model)
    late = steady.moved(early, early.next_frame + 400)
    steps = Steps(bench.job, model)
    steps.submit(late)
    steps.step()
    steps.resource.check_integrity()
    again = steps.state()
    assert again.next_frame == early.next_frame + 401
    for (kv, written), (old_kv, old_written) in zip(again.cache["layers"], early.cache["layers"], strict=True):
        assert torch.equal(written, old_written)
        same = (kv == old_kv).flatten(0, 2).all(dim=0).all(dim=-1)
        assert same.sum() >= kv.shape[3] - bench.job.ring_frames * 64  # all but the slot of the new frame
    assert len(steps.host_s) == 1


# -- command line ----------------------------------------------------------------------------------------------


def composed(*overrides: str) -> Any:
    register()
    return compose_all("bench", list(overrides), multirun=False).points[0]


def test_shares_of_the_budget_cover_every_level_and_go_to_those_that_are_asked_for() -> None:
    assert tuple(SHARES) == LEVELS
    assert sum(SHARES.values()) == pytest.approx(1)
    bench = checked(composed("levels=[reads,frame]", "budget_s=54"))
    assert bench.seconds_of("reads") == pytest.approx(42)
    assert bench.seconds_of("frame") == pytest.approx(12)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("levels=[]", "levels=[]"),
        ("levels=[reads,speed]", "levels=[reads,speed]"),
        ("levels=[reads,reads]", "each once"),
        ("grid.dtypes=[int8]", "grid.dtypes=[int8]"),
        ("grid.tokens=[0]", "grid.tokens=[0]"),
        ("grid.windows=[1]", "grid.windows=[1]"),
        ("grid.threads=[4096]", "grid.threads"),
        ("rollout_sessions=[2,2]", "rollout_sessions=[2, 2]"),
        ("budget_s=0", "budget_s=0"),
        ("compile=true", "compile=true"),
        ("num_sessions=2", "num_sessions=2"),
        ("strategies=[cat]", "expected ring"),
        ("strategies=[ring,tape]", "tape"),
    ],
)
def test_bad_input_is_told_in_one_line(override: str, told: str) -> None:
    with pytest.raises(BadInput) as refusal:
        checked(composed(override))
    assert told in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_the_grid_is_the_product_of_its_lists_with_cheap_points_first() -> None:
    bench = checked(composed("grid.threads=[1]"))
    points = reads.read_points(bench)
    assert len(points) == len(set(points)) == 4 * 2 * 2 * 2 * 2 * 2
    costs = [p.tokens_per_frame**2 * p.window * p.sessions for p in points]
    assert all(a <= b for a, b in pairwise(costs))


def test_a_quick_run_writes_its_rows_its_targets_and_its_picture(tmp_path, capsys) -> None:
    run = tmp_path / "run"
    assert main(["quick=true", "tracking.mode=disabled", "levels=[reads,peers]", f"hydra.run.dir={run}"]) == 0
    result = json.loads((run / "bench.json").read_text())
    assert result["status"] == "ok"
    assert len(result["levels"]["reads"]) == 4
    for row in result["levels"]["reads"]:
        assert len(row["samples_s"]["ring"]) == len(row["samples_s"]["floor"]) == row["ratio"]["blocks"] >= 3
    (peers,) = result["levels"]["peers"]
    assert {"ring", "shift", "cat", "paged_windowed"} <= peers["ratios"].keys()
    assert peers["ratios"]["ring"]["ratio"] == 1
    assert {target["verdict"] for target in result["targets"]} <= {"held", "short", "reported", "not measured"}
    assert (run / "bench.png").stat().st_size > 0
    assert "Targets" in capsys.readouterr().out


@pytest.mark.slow
def test_a_quick_run_of_every_level_holds_what_does_not_depend_on_time(tmp_path) -> None:
    run = tmp_path / "run"
    argv = [
        "quick=true",
        "threads=1",
        "tracking.mode=disabled",
        "strategies=[ring,cat,recompute_window]",
        f"hydra.run.dir={run}",
    ]
    assert main(argv) == 0
    result = json.loads((run / "bench.json").read_text())
    by_name = {target["name"]: target for target in result["targets"]}
    for name in (
        "session memory - prediction, bytes",
        "compilations per region and bucket",
        "compilations after warm-up",
    ):
        assert by_name[name]["verdict"] == "held", name
    rollouts = {(row["strategy"], row["mode"]) for row in result["levels"]["rollout"]}
    quick = {(name, mode) for name in ("ring", "cat") for mode in ("eager", "compiled")}
    assert rollouts == quick | {("recompute_window", "eager")}
