"""The comparison through its command line, in process: turns, records, pictures, verdicts, and how strategies end."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ringkv.attention import paths
from ringkv.config import KVConfig
from ringkv.harness.records import FRAME_COLUMNS, read_config, read_frames, read_summary
from ringkv.shift.cat import CatLayer
from ringkv.shift.layer import ShiftLayer
from scripts.app.compare_lane import Lane
from scripts.app.compare_stats import block_sums, paired_ratio
from scripts.compare import main
from tests.cli_tools import TINY, WandbStub

FRAMES, BLOCK = 11, 2
SMALL = [*TINY, f"num_frames={FRAMES}", f"block_frames={BLOCK}"]
KV_FRAME = 16 * 2 * 2 * 8 * 4
"""Bytes of a frame of one layer: 16 tokens, K and V, 2 heads of 8, fp32."""


def compare(folder: Path, *overrides: str) -> tuple[int, Path, dict[str, Any]]:
    """Run a small comparison; exit code, folder, and compare.json, which must be strict JSON."""
    run = folder / "run"
    code = main([*SMALL, f"hydra.run.dir={run}", *overrides])

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in compare.json")

    return code, run, json.loads((run / "compare.json").read_text(), parse_constant=refuse)


def rows_of(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["strategy"]: row for row in result["strategies"]}


def pairs_of(result: dict[str, Any]) -> dict[frozenset[str], dict[str, Any]]:
    return {frozenset((pair["a"], pair["b"])): pair for pair in result["equality"]["pairs"]}


# -- one run of everything ----------------------------------------------------------------------------------------

EVERYTHING = (
    "ring",
    "ring_uncompacted",
    "paged_windowed",
    "shift",
    "cat",
    "full_windowed",
    "full",
    "full_static",
    "paged",
    "recompute_all",
    "recompute_window",
)
MAX_FRAMES = 9
"""Frames that full_static has room for."""


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path, dict[str, Any]]:
    """A comparison of all strategies, of which full_static runs out of frames."""
    strategies = f"strategies=[{','.join(EVERYTHING)}]"
    knobs = [strategies, f"kv.max_frames={MAX_FRAMES}", "num_sessions=2", "equality_frames=8"]
    return compare(tmp_path_factory.mktemp("compare"), *knobs)


def test_every_strategy_is_a_row_with_its_curves_and_a_folder_with_its_records(
    everything: tuple[int, Path, dict[str, Any]],
):
    code, run, result = everything
    assert code == 0
    assert result["status"] == "ok"
    rows = rows_of(result)
    assert tuple(rows) == EVERYTHING
    for name, row in rows.items():
        made = MAX_FRAMES if name == "full_static" else FRAMES
        assert row["frames"] == made
        curves = row["curves"]
        assert curves["frame"] == list(range(made))
        assert curves["phase"] == ["context"] * 2 + ["generated"] * (made - 2)
        records = read_frames(run / name)
        assert [record["clocks"] for record in records.rows] == [[frame, frame] for frame in range(made)]
        assert all(record.keys() == FRAME_COLUMNS.keys() for record in records.rows)
        for key in ("latency_ms", "kv_bytes", "kv_in_use_bytes"):
            assert curves[key] == [record[key] for record in records.rows]
        assert row["frames/measured"] == 2 * (made - 2)
        assert read_config(run / name)["num_frames"] == FRAMES
        assert (read_summary(run / name)["status"] == "ok") == (row["status"] == "ok") == (name != "full_static")
    assert read_config(run)["strategies"] == list(EVERYTHING)
    assert read_summary(run)["machine"]["threads"] == 1


def test_memory_is_flat_for_a_ring_and_grows_with_full_context(everything: tuple[int, Path, dict[str, Any]]):
    rows = rows_of(everything[2])

    def frames(name: str, key: str = "kv_bytes") -> list[float]:
        return [size / (2 * KV_FRAME) for size in rows[name]["curves"][key]]  # two sessions

    assert frames("ring") == [2 * 3] * FRAMES
    assert frames("ring_uncompacted") == [3 + 5] * FRAMES
    assert frames("shift") == [2 + 3] * FRAMES
    assert frames("full") == [2 * doubled for doubled in (1, 2, 4, 4, 8, 8, 8, 8, 16, 16, 16)]
    assert frames("full", "kv_in_use_bytes")[-1] == 2 * (FRAMES + 1)
    assert frames("full_static") == [2 * MAX_FRAMES] * MAX_FRAMES


def test_a_strategy_that_runs_out_says_at_which_frame_and_why_and_the_others_go_on(
    everything: tuple[int, Path, dict[str, Any]],
):
    rows = rows_of(everything[2])
    ended = rows["full_static"]["ended"]
    assert rows["full_static"]["status"] == ended["status"] == "out of budget"
    assert ended["frame"] == MAX_FRAMES
    assert f"max_frames={MAX_FRAMES}" in ended["reason"]
    assert all(row["ended"] is None for name, row in rows.items() if name != "full_static")


def test_the_ledger_stands_beside_the_speeds(everything: tuple[int, Path, dict[str, Any]]):
    """Window 2: 2 + 1 passes, layer 0 keeps every frame, layer 1 every other; the mean of one on and one off stride."""
    rows = rows_of(everything[2])

    def writes(name: str) -> list[float]:
        return rows[name]["ledger"]["frame_writes_by_layer"]

    assert writes("ring") == [3 + 1, 3 + 1 / 2]
    assert writes("shift") == [1 + 1 + 3, (1 + 1) / 2 + 3]
    assert writes("cat") == [3 * 2, 3 * (2 + 3) / 2]
    assert writes("full") == [3, 3]
    assert rows["ring"]["ledger"]["frames"] == [FRAMES - 2, FRAMES - 1]
    assert rows["full"]["ledger"]["frames"] == [FRAMES - 1, FRAMES - 1]
    assert rows["full_static"]["ledger"]["frames"] == [MAX_FRAMES - 1, MAX_FRAMES - 1]
    for row in rows.values():
        if row["ledger"] is not None:
            total = sum(row["ledger"]["frame_writes_by_layer"]) * KV_FRAME
            assert row["ledger"]["bytes_written_per_frame"] == pytest.approx(total)
    # full context reads all 11 frames in each of its passes and layers
    assert rows["full"]["ledger"]["bytes_read_per_frame"] == 2 * 3 * FRAMES * KV_FRAME
    assert rows["recompute_all"]["ledger"] is None


def test_the_matrix_says_which_pairs_are_bit_equal_and_which_differ_by_design(
    everything: tuple[int, Path, dict[str, Any]],
):
    result = everything[2]
    pairs = pairs_of(result)
    assert len(pairs) == len(EVERYTHING) * (len(EVERYTHING) - 1) // 2
    unbounded = {"full", "full_static", "paged"}
    for names, pair in pairs.items():
        # The two given frames are the same for all. Frame 2 is the first that a window hides frame 0 from; frame 3 the
        # first that sees a frame (2, in the layer that keeps every other one) which saw what is hidden from itself.
        if len(names & unbounded) == 1:
            first = 2
        else:
            first = 3 if "recompute_window" in names else None
        assert pair["verdict"] == ("bit-equal" if first is None else "differs by design"), names
        assert pair["frames"] == 8
        assert pair["first_difference"] == first, names
        assert (pair["max_gap"] > 0) == (first is not None), names
    assert "whole past" in pairs[frozenset(("ring", "full"))]["reason"]
    assert "recomputed" in pairs[frozenset(("ring", "recompute_window"))]["reason"]


def test_fast_reads_are_held_to_canonical_call_by_call(everything: tuple[int, Path, dict[str, Any]]):
    reads = {row["strategy"]: row for row in everything[2]["equality"]["fast_reads"]}
    assert reads.keys() == {name for name in EVERYTHING if not name.startswith("recompute")}
    for row in reads.values():
        assert row["calls"] == 2 * (2 + 6 * 3)  # layers x (given frames + generated ones x passes)
        assert row["bound"] == 1e-6
        assert row["max_abs_v"] > 0
        assert row["relative_gap"] <= row["bound"]


def test_ratios_are_to_the_ring_over_common_whole_blocks(everything: tuple[int, Path, dict[str, Any]]):
    rows = rows_of(everything[2])
    assert rows["ring"]["ratio"] == {"ratio": 1.0, "low": 1.0, "high": 1.0, "detectable": 0.0, "blocks": 4}
    generated = {name: row["curves"]["latency_ms"][2:] for name, row in rows.items()}
    for name, row in rows.items():
        blocks = (MAX_FRAMES - 2) // BLOCK if name == "full_static" else (FRAMES - 2) // BLOCK
        assert row["ratio"]["blocks"] == blocks
        sums = {each: np.reshape(generated[each][: blocks * BLOCK], (blocks, BLOCK)).sum(1) for each in (name, "ring")}
        assert row["ratio"]["ratio"] == pytest.approx(np.median(sums[name] / sums["ring"]))
        assert row["ratio"]["low"] <= row["ratio"]["ratio"] <= row["ratio"]["high"]
        assert row["ratio"]["detectable"] >= 0
    assert "80 %" in everything[2]["definitions"]["ratio"]


def test_the_page_needs_nothing_from_outside_and_takes_the_readers_colours(
    everything: tuple[int, Path, dict[str, Any]],
):
    page = (everything[1] / "compare.html").read_text()
    assert re.findall(r"(?:src|href)\s*=\s*[\"'](?!#)[^\"']*", page) == []
    assert re.findall(r"url\((?!#)", page) == []
    assert "@import" not in page
    assert "<script" not in page
    assert "color-scheme: light dark" in page
    svg = page[page.index("<svg") : page.index("</svg>")]
    assert "currentColor" in svg
    assert "#010203" not in svg
    for name in EVERYTHING:
        assert f"<td>{name}</td>" in page
    assert f'<td class="bad">{MAX_FRAMES} ×</td>' in page
    assert f"full_static out of budget at frame {MAX_FRAMES}" in page


def test_the_picture_is_a_png(everything: tuple[int, Path, dict[str, Any]]):
    import matplotlib.image

    picture = matplotlib.image.imread(everything[1] / "compare.png")
    assert picture.shape[0] > 400
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 20, "next to nothing is drawn"


# -- turns --------------------------------------------------------------------------------------------------------


def test_strategies_take_turns_forward_and_backward_after_the_given_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    turns: list[tuple[str, int, int]] = []
    advance = Lane.advance

    def noted(self: Lane, frames: int) -> None:
        before = self.made
        advance(self, frames)
        turns.append((self.name, before, self.made))

    monkeypatch.setattr(Lane, "advance", noted)
    code, *_ = compare(
        tmp_path, "strategies=[ring,shift,cat]", "num_frames=7", "equality_frames=0", "ledger=false", "warmup=0"
    )
    assert code == 0
    given = [(name, 0, 2) for name in ("ring", "shift", "cat")]
    first = [(name, 2, 4) for name in ("ring", "shift", "cat")]
    second = [(name, 4, 6) for name in ("cat", "shift", "ring")]
    third = [(name, 6, 7) for name in ("ring", "shift", "cat")]
    assert turns == given + first + second + third


def test_warm_up_is_a_rollout_of_its_own_and_is_not_among_the_frames(tmp_path: Path):
    code, run, result = compare(
        tmp_path, "strategies=[ring,full]", "warmup=3", "equality_frames=0", "ledger=false", "context_frames=0"
    )
    assert code == 0
    for row in result["strategies"]:
        assert row["warmup/ms_total"] > 0
        assert row["frames/measured"] == FRAMES
        assert row["ledger"] is None
    assert not any(record["warmup"] for record in read_frames(run / "ring").rows)
    assert result["equality"] is None


# -- budgets ------------------------------------------------------------------------------------------------------


def test_a_memory_budget_ends_what_grows_before_it_is_passed_and_what_reserves_before_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Two layers of 4 frames are within 10 frames' bytes, of 8 they are not: full context ends at frame 4."""
    budget = 10 * KV_FRAME / 2**20
    code, run, result = compare(
        tmp_path, "strategies=[full,ring,full_static,cat]", f"budget_mib={budget}", "equality_frames=5"
    )
    assert code == 0
    rows = rows_of(result)
    assert {name: (row["frames"], row["status"]) for name, row in rows.items()} == {
        "full": (4, "out of budget"),
        "ring": (FRAMES, "ok"),
        "full_static": (0, "out of budget"),
        "cat": (FRAMES, "ok"),
    }
    assert max(rows["full"]["curves"]["kv_bytes"]) <= budget * 2**20
    assert f"above budget_mib={budget:g}" in rows["full"]["ended"]["reason"]
    assert rows["full_static"]["ratio"] is None
    assert rows["full_static"]["throughput/frames_per_s"] is None
    assert read_summary(run / "full_static")["error"].startswith("OverBudget: frame 0 takes ")
    assert not any("full_static" in names for names in pairs_of(result)), "it never ran"
    out = capsys.readouterr().out
    assert re.search(r"full\s+4 ×", out)
    assert re.search(r"full_static\s+0 ×\s+n/a", out)
    assert "full out of budget at frame 4: frame 4 takes" in out


def test_a_page_pool_that_is_too_small_ends_its_strategies_with_the_shortfall(tmp_path: Path):
    code, _, result = compare(
        tmp_path, "strategies=[ring,paged,paged_windowed]", "kv.num_pages=5", "kv.page_tokens=16", "equality_frames=8"
    )
    assert code == 0
    rows = rows_of(result)
    assert (rows["paged"]["frames"], rows["paged"]["status"]) == (5, "out of budget")
    assert "5: 1 short" in rows["paged"]["ended"]["reason"]
    assert rows["paged_windowed"]["frames"] == FRAMES
    assert "1 short" in result["equality"]["stopped"]["paged"]
    assert pairs_of(result)[frozenset(("ring", "paged"))]["frames"] == 5


# -- what is planted is found -------------------------------------------------------------------------------------


def test_a_strategy_that_should_be_equal_and_is_not_is_close_at_its_measured_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def forgetful(self: ShiftLayer, session: int) -> None:
        self.held[session] -= 1  # drops the newest frame in place of the oldest

    monkeypatch.setattr(ShiftLayer, "_shift_left", forgetful)
    code, _, result = compare(tmp_path, "strategies=[ring,shift,cat]", "ledger=false", "context_frames=1")
    assert code == 0
    pairs = pairs_of(result)
    assert pairs[frozenset(("ring", "cat"))]["verdict"] == "bit-equal"
    wrong = pairs[frozenset(("ring", "shift"))]
    assert (wrong["verdict"], wrong["expected_equal"], wrong["reason"]) == ("close", True, None)
    assert wrong["first_difference"] >= 2
    assert wrong["max_gap"] > 0
    assert re.search(r'<td class="close">~\d', (tmp_path / "run" / "compare.html").read_text())


def test_a_fast_read_that_is_off_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    masked = paths.masked

    def off(*args: Any) -> torch.Tensor:
        return masked(*args) + 1e-3

    monkeypatch.setattr(paths, "masked", off)
    code, _, result = compare(tmp_path, "strategies=[ring,cat]", "ledger=false")
    assert code == 0
    gaps = {row["strategy"]: row["max_gap"] for row in result["equality"]["fast_reads"]}
    assert gaps["cat"] == pytest.approx(1e-3, rel=1e-2)
    page = (tmp_path / "run" / "compare.html").read_text()
    assert '<td class="bad">no</td>' in page


# -- failures -----------------------------------------------------------------------------------------------------


def raise_in_cat(monkeypatch: pytest.MonkeyPatch, clock: int, error: BaseException) -> None:
    """Make every write of ``cat`` at ``clock`` raise."""
    write: Callable[..., Any] = CatLayer.write

    def failing(self: CatLayer, session: int, at: int, *args: Any, **kwargs: Any) -> Any:
        if at == clock:
            raise error
        return write(self, session, at, *args, **kwargs)

    monkeypatch.setattr(CatLayer, "write", failing)


def test_a_strategy_that_fails_does_not_stop_the_others_and_the_comparison_is_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    raise_in_cat(monkeypatch, 5, RuntimeError("the cat is on fire"))
    code, run, result = compare(tmp_path, "strategies=[cat,ring]", "equality_frames=0", "ledger=false")
    assert code == 1
    rows = rows_of(result)
    assert (rows["cat"]["status"], rows["cat"]["frames"]) == ("failed", 5)
    assert rows["cat"]["ended"]["reason"] == "RuntimeError: the cat is on fire"
    assert "raise error" in rows["cat"]["ended"]["traceback"]
    assert (rows["ring"]["status"], rows["ring"]["frames"]) == ("ok", FRAMES)
    assert result["status"] == "failed"
    assert "cat" in result["error"]
    assert read_summary(run)["status"] == read_summary(run / "cat")["status"] == "failed"
    assert read_summary(run / "ring")["status"] == "ok"
    assert "the cat is on fire" in capsys.readouterr().err


def test_an_interrupted_comparison_keeps_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    raise_in_cat(monkeypatch, 6, KeyboardInterrupt())
    code, run, result = compare(tmp_path, "strategies=[ring,cat]")
    assert code == 1
    assert (result["status"], result["error"]) == ("failed", "KeyboardInterrupt:")
    rows = rows_of(result)
    # frames 4 and 5 are the second turn, which cat begins; the third is the ring's again
    assert (rows["ring"]["frames"], rows["cat"]["frames"]) == (8, 6)
    assert result["equality"] is None
    for folder in (run, run / "ring", run / "cat"):
        assert read_summary(folder)["error"] == "KeyboardInterrupt:"
    assert (run / "compare.png").stat().st_size > 0


# -- W&B ----------------------------------------------------------------------------------------------------------


def test_each_strategy_is_a_wandb_run_of_one_group_with_every_frame(
    tmp_path: Path, wandb: WandbStub, capsys: pytest.CaptureFixture[str]
):
    code, run, _ = compare(
        tmp_path,
        "strategies=[ring,full_static]",
        "tracking=offline",
        "kv.max_frames=4",
        "equality_frames=0",
        "ledger=false",
    )
    assert code == 0
    inits = wandb.calls("init")
    assert [call["group"] for call in inits] == ["run", "run"]
    assert [call["config"]["kv"]["strategy"] for call in inits] == ["ring", "full_static"]
    assert len({call["id"] for call in inits}) == 2
    steps = {call["id"]: [] for call in inits}
    for call in wandb.calls("log"):
        steps[call["id"]].append(call["step"])
    assert list(steps.values()) == [list(range(FRAMES)), list(range(4))]
    assert [call["exit_code"] for call in wandb.calls("finish")] == [0, 1]
    assert f"wandb sync {run}/*/wandb/offline-run-*" in capsys.readouterr().out


# -- ratios -------------------------------------------------------------------------------------------------------


def test_times_are_summed_over_whole_blocks():
    assert block_sums([1, 2, 3, 4, 5], 2) == [3, 7]
    assert block_sums([1, 2, 3, 4], 4) == [10]
    assert block_sums([1, 2, 3], 4) == []


def test_one_block_that_was_held_up_does_not_move_a_ratio():
    steady = paired_ratio([100.0] * 8 + [5000.0], [100.0] * 9)
    assert steady is not None
    assert (steady.ratio, steady.low, steady.high) == (1.0, 1.0, 1.0)


def test_a_ratio_is_paired_so_that_what_slows_both_down_does_not_widen_it():
    drifting = [100.0 * (1 + i) for i in range(20)]
    twice = paired_ratio([2 * ms for ms in drifting], drifting)
    assert twice is not None
    assert (twice.ratio, twice.blocks) == (2.0, 20)
    assert twice.low == pytest.approx(2.0)
    assert twice.high == pytest.approx(2.0)
    assert twice.detectable == pytest.approx(0.0, abs=1e-9)


def test_a_ratio_needs_a_common_block_and_its_interval_two():
    assert paired_ratio([], [1.0]) is None
    single = paired_ratio([3.0], [2.0, 2.0])
    assert single is not None
    assert (single.ratio, single.low, single.high, single.detectable, single.blocks) == (1.5, None, None, None, 1)


def test_the_smallest_detectable_difference_is_what_the_noise_of_the_blocks_allows():
    """n blocks with independent relative errors s in both times: a block's ratio has deviation s * sqrt(2), and the
    median of n of them sqrt(pi / 2n) times that."""
    rng, blocks, spread = np.random.default_rng(5), 64, 0.05
    times, reference = (100 * (1 + spread * rng.standard_normal(blocks)) for _ in range(2))
    found = paired_ratio(times.tolist(), reference.tolist())
    assert found is not None
    assert found.detectable == pytest.approx(2.8 * spread * math.sqrt(math.pi / blocks), rel=0.35)
    assert found.low is not None
    assert found.high is not None
    assert found.low < 1 < found.high
    assert found == paired_ratio(times.tolist(), reference.tolist()), "seeded"
    assert found != paired_ratio(times.tolist(), reference.tolist(), seed=1)


# -- bad input ----------------------------------------------------------------------------------------------------

REFUSALS = [
    ("strategies=[ring,rings]", "strategies=[ring,rings]: rings is none", "expected some of cat, full"),
    ("strategies=[ring,cat,cat]", "strategies=[ring,cat,cat]: cat stands there twice", ""),
    ("strategies=[cat]", "strategies=[cat]: expected ring among them", ""),
    ("strategies=[]", "strategies=[]: expected ring among them", ""),
    ("strategies=ring", "strategies=ring: ", "a list of names"),
    ("strategies=[ring,hf_sliding]", "dilation=8: kv=hf_sliding has no dilated layers", "expected dilation=1"),
    ("strategies=[ring,hf_sliding] ring_frames=1 dilation=1", "ring_frames=1: kv=hf_sliding", "2 or more"),
    ("strategies=[ring,shift] attention=segments", "attention=segments: kv=shift has auto, canonical, sdpa", ""),
    ("strategies=[ring] kv.num_pages=4", "kv.num_pages=4: none of strategies=[ring] has such a knob", ""),
    ("kv.page_tokens=0", "kv.page_tokens=0: ", "an integer >= 1"),
    ("kv.strategy=ring", "kv.strategy=ring: unknown key", "max_frames, num_pages, page_tokens"),
    ("kv=ring", "kv=ring: compare has no such choice", "data, model, runtime, tracking"),
    ("experiment=horizon", "experiment=horizon: compare has no such choice", ""),
    ("block_frames=0", "block_frames=0: ", "an integer >= 1"),
    ("equality_frames=-1", "equality_frames=-1: ", "an integer >= 0"),
    ("budget_mib=0", "budget_mib=0.0: ", "a number > 0"),
    ("budget_mib=nan", "budget_mib=nan: ", "a number > 0"),
    ("budget_mb=3", "budget_mb=3: unknown key", "did you mean budget_mib?"),
    ("profile=true", "profile=true: unknown key", ""),
    ("ring_frames=0", "ring_frames=0: ", "an integer >= 1"),
    ("num_frames=100000000", "num_frames=100000000 ", "GiB of this machine"),
    ("-m ring_frames=8,9", "-m: compare has no sweeps", "a single run"),
]


def test_bad_input_is_refused_in_one_line_before_torch_is_loaded_and_leaves_nothing_behind(tmp_path: Path):
    program = (
        "import contextlib, io, json, os, sys\n"
        "from scripts.compare import main\n"
        "results = []\n"
        "for command in json.load(sys.stdin):\n"
        "    out, err = io.StringIO(), io.StringIO()\n"
        "    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):\n"
        "        code = main(command.split())\n"
        "    results.append([code, out.getvalue(), err.getvalue(), 'torch' in sys.modules, os.listdir()])\n"
        "json.dump(results, sys.stdout)\n"
    )
    commands = json.dumps([command for command, _, _ in REFUSALS])
    done = subprocess.run(
        [sys.executable, "-c", program], input=commands, text=True, check=True, cwd=tmp_path, stdout=subprocess.PIPE
    )
    for (command, begins, says), (code, out, err, torch_loaded, left) in zip(
        REFUSALS, json.loads(done.stdout), strict=True
    ):
        assert (code, out, torch_loaded, left) == (2, "", False, []), (command, err)
        assert err.count("\n") == 1, (command, err)
        assert err.startswith(f"error: {begins}"), (command, err)
        assert says in err, (command, err)


def test_the_default_strategies_are_checked_and_their_nulls_filled_in():
    from scripts.app import schema
    from scripts.app.compare_check import checked
    from scripts.app.compose import compose_all
    from scripts.app.geometry import model_config
    from scripts.app.strategies import kv_config

    schema.register()
    (config,) = compose_all("compare", ["ring_frames=16", "num_frames=256", "threads=1"], multirun=False).points
    comparison = checked(config)
    assert list(comparison.rollouts) == comparison.config.strategies
    assert comparison.config.equality_frames == 20
    assert comparison.config.tokens_per_frame == 64
    assert comparison.rollouts["full_static"].kv.max_frames == 256
    assert comparison.rollouts["paged"].kv.num_pages == 256 * 64 // 16
    assert config.equality_frames is None, "what was asked for is left as it was"
    for rollout in comparison.rollouts.values():
        assert isinstance(kv_config(rollout, model_config(rollout)), KVConfig)
