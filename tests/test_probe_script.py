"""The probes through their command line, in process: what they write, what they refuse, and what reaches W&B."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.checkpoint import save_checkpoint
from model.transformer import FrameTransformer
from ringkv.harness.records import read_config, read_summary
from scripts.app.errors import BadInput
from scripts.app.geometry import model_config
from scripts.app.probe import drift, fidelity, recall, returning
from scripts.probe import main
from tests.cli_tools import WandbStub
from tests.probe_tools import SMALL, probe_of, setup_of

RECALL = ("probe=recall", "probe.clips=2", "probe.loop_frames=[2,4]", "probe.rings=[2,4,5]")
RETURN = (
    "probe=return",
    "probe.clips=2",
    "probe.rings=[2,3]",
    "probe.dilations=[1,2]",
    "probe.max_gap=6",
    "probe.gaps=[2,4]",
)
DRIFT = (
    "probe=drift",
    "data=synthetic",
    "data.height=16",
    "data.width=16",
    "tokens_per_frame=4",
    "num_frames=8",
    "context_frames=2",
    "ring_frames=3",
    "probe.clips=2",
    "probe.replays=3",
    "probe.segment_frames=4",
)


def probe(folder: Path, *overrides: str) -> tuple[int, Path, dict[str, Any]]:
    """Run a small probe; exit code, folder, and probe.json, which must be strict JSON."""
    run = folder / "run"
    code = main([*SMALL, f"hydra.run.dir={run}", *overrides])

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in probe.json")

    path = run / "probe.json"
    return code, run, json.loads(path.read_text(), parse_constant=refuse) if path.exists() else {}


def series_of(result: dict[str, Any], panel: str) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in result["series"] if each["panel"].startswith(panel)}


def check_files(run: Path, result: dict[str, Any], name: str) -> None:
    assert result["probe"] == name
    assert result["version"] == 1
    assert (run / "probe.png").read_bytes().startswith(b"\x89PNG")
    assert read_config(run)["probe"]["name"] == name
    summary = read_summary(run)
    assert summary["status"] == "ok"
    assert result["summary"].items() <= summary.items()
    assert result["series"]
    assert result["tables"]
    for each in result["series"]:
        assert {"name", "x", "y", "low", "high", "x_label", "y_label"} <= each.keys()
        assert len(each["x"]) == len(each["y"])
        for edge in (each["low"], each["high"]):
            assert edge is None or len(edge) == len(each["x"])
        if each["low"] is not None:
            assert all(low <= high for low, high in zip(each["low"], each["high"], strict=True) if low is not None)
    tables = (run / "probe.txt").read_text()
    for table in result["tables"]:
        assert all(len(row) == len(table["columns"]) for row in table["rows"])
        assert table["title"] in tables
        assert all(str(name) in tables for name in table["columns"])


def test_recall_writes_the_grid_the_variants_and_what_the_oracle_reader_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    code, run, result = probe(tmp_path, *RECALL)
    assert code == 0
    check_files(run, result, "recall")
    out = capsys.readouterr().out
    assert "weights random" in out
    assert "The cliff" in out
    assert {name: each["y"] for name, each in series_of(result, "what the oracle").items()} == {
        "N = 2": [0, 1, 1],
        "N = 4": [0, 0, 1],
    }
    (grid,) = result["grids"]
    assert (grid["x"], grid["y"]) == ([2, 4, 5], [2, 4])
    curves = series_of(result, "error of the model")
    assert grid["z"] == [curves["N = 2"]["y"], curves["N = 4"]["y"]]
    dilated = next(table for table in result["tables"] if table["title"].startswith("A dilated layer"))
    assert [row[:4] for row in dilated["rows"]] == [
        [2, 0, "yes", "yes"],
        [2, 1, "never", "no"],
        [4, 0, "yes", "yes"],
        [4, 1, "never", "no"],
        [4, 2, "yes", "yes"],
        [4, 3, "never", "no"],
    ]
    assert set(result["summary"]) >= {"recall/cliff_4", "recall/mse_4_seen", "recall/mse_4_shown_once"}


def test_recall_asks_once_after_a_single_round_where_the_ring_shows_all_of_it():
    points = setup_of("recall", clips=2, loop_frames=[2, 4], rings=[3, 4]).probe.points
    once = {key[1]: each for key, each in points.items() if key[0] == "once"}
    assert {length: (each.context_frames, each.num_frames, each.ring_frames) for length, each in once.items()} == {
        2: (2, 3, 3)  # no ring of 5 is asked about, so a loop of 4 is not either
    }


def test_depth_relays_as_far_as_its_layers_reach_together_and_one_layer_no_farther():
    setup = setup_of("recall", clips=2, loop_frames=[2], rings=[2], num_layers=3, global_period=4)
    found = recall.measure(setup)
    one, several = (each for each in found.series if each.panel.startswith("relay"))
    assert [bool(change) for change in one.y] == [True] * 2 + [False] * 6
    assert [bool(change) for change in several.y] == [True] * 6 + [False] * 2
    assert setup.probe.left_out == ("a dilated layer: model=recall has no global layer; set global_period",)


@pytest.mark.parametrize("kv", ["ring_uncompacted", "cat", "full_static", "paged", "hf_sliding", "recompute_window"])
def test_recall_takes_any_strategy_and_says_what_it_cannot_ask_it(kv: str):
    if kv == "hf_sliding":
        pytest.importorskip("transformers")
    setup = setup_of("recall", clips=2, loop_frames=[4], rings=[2, 5], kv=kv)
    (found,) = (each for each in recall.measure(setup).series if each.panel == "what the oracle reader finds")
    assert found.y == ([1, 1] if kv in ("paged", "full_static") else [0, 1])
    assert len(setup.probe.left_out) == (2 if kv == "hf_sliding" else 0)


def test_return_writes_what_each_geometry_retains_and_what_it_takes(tmp_path: Path):
    code, run, result = probe(tmp_path, *RETURN)
    assert code == 0
    check_files(run, result, "return")
    kept = {name: each["y"] for name, each in series_of(result, "oracle reader").items()}
    assert kept == {
        "ring 2, dilation 1": [1, 0, 0, 0, 0, 0],
        "ring 2, dilation 2": [1, 0.5, 0.5, 0, 0, 0],
        "ring 3, dilation 1": [1, 1, 0, 0, 0, 0],
        "ring 3, dilation 2": [1, 1, 0.5, 0.5, 0.5, 0],
    }
    (table,) = result["tables"]
    frame_mib = 16 * 2 * 2 * 8 * 4 / 1024**2  # 16 tokens, K and V, 2 heads of 8, fp32
    for ring, _, horizon, mib, area, density, *_ in table["rows"]:
        assert mib == pytest.approx(2 * (ring + 1) * frame_mib)  # two layers, and their scratch frames
        assert density == pytest.approx(area / mib)
        assert str(ring) in horizon
    nearest = series_of(result, "random weights: nearest")
    assert all(0 <= value <= 1 for each in nearest.values() for value in each["y"])


def test_return_leaves_out_the_dilations_that_a_strategy_has_no_layers_for():
    probe = probe_of("return", kv="hf_sliding")
    assert probe.left_out == ("dilation 4: kv=hf_sliding has no dilated layers",)
    assert {key[:3] for key in probe.points if key[0] == "oracle"} == {("oracle", ring, 1) for ring in (4, 8, 32)}
    assert probe_of("return").left_out == ()


def test_return_measures_the_geometries_that_are_left():
    pytest.importorskip("transformers")
    knobs = {"clips": 1, "rings": [3], "dilations": [1, 2], "max_gap": 3, "gaps": [2]}
    found = returning.measure(setup_of("return", kv="hf_sliding", **knobs))
    (kept,) = (each for each in found.series if each.panel.startswith("oracle reader"))
    assert (kept.name, kept.y) == ("ring 3, dilation 1", [1, 1, 0])
    assert not any("dilation d" in note for note in found.notes)


SMALL_DRIFT = {"clips": 2, "replays": 3, "segment_frames": 4, "num_frames": 8, "context_frames": 2, "ring_frames": 3}


def test_drift_of_the_same_cache_is_nothing_at_all():
    found = drift.measure(setup_of("drift", data="synthetic", **SMALL_DRIFT, candidate_kv_dtype=None))
    same, envelope, free, forced = found.series
    assert same.y == free.y == forced.y == [0] * 6
    assert free.name.endswith("the reference itself")
    assert all(value > 0 for value in envelope.y)
    assert found.summary["drift/first_frame_outside"] is None
    assert any("equal to the reference to the last bit" in note for note in found.notes)


@pytest.mark.parametrize(("kv", "equal"), [("shift", True), ("paged", False), ("recompute_all", True)])
def test_under_canonical_reads_a_strategy_of_the_same_window_is_the_reference(kv: str, equal: bool):
    knobs = {"attention": "canonical", "candidate_kv_dtype": None, "candidate_kv": kv}
    found = drift.measure(setup_of("drift", data="synthetic", **SMALL_DRIFT, **knobs))
    assert (found.summary["drift/candidate_rms_last"] == 0) is equal


def test_drift_of_a_coarser_cache_leaves_the_envelope_and_is_split_in_two_and_tracked(
    tmp_path: Path, wandb: WandbStub, capsys: pytest.CaptureFixture[str]
):
    code, run, result = probe(tmp_path, *DRIFT, "tracking=offline")
    assert code == 0
    check_files(run, result, "drift")
    free, forced = (each for name, each in series_of(result, "drift").items() if name.startswith("candidate"))
    assert result["summary"]["drift/first_frame_outside"] == 2
    assert free["y"][0] == forced["y"][0] > 0  # the first frame has no other past
    (table,) = result["tables"]
    assert [row[0] for row in table["rows"]] == ["2 to 5", "6 to 7"]
    for row, part in zip(table["rows"], (slice(0, 4), slice(4, 6)), strict=True):
        assert row[4] == pytest.approx(np.mean(free["y"][part]))
        assert row[5] == pytest.approx(np.mean(forced["y"][part]))
        assert row[5] + row[6] == pytest.approx(row[4])

    assert len(wandb.calls("init")) == 1
    logged = [call for call in wandb.calls("log") if "strip" not in call["keys"]]
    assert [call["step"] for call in logged] == list(range(2, 8))
    assert all(len(call["keys"]) == 4 for call in logged)
    (summary,) = wandb.calls("summary")
    assert summary["values"] == {key: value for key, value in result["summary"].items() if value is not None}
    assert sum("strip" in call["keys"] for call in wandb.calls("log")) == 1
    assert [call["exit_code"] for call in wandb.calls("finish")] == [0]
    assert "upload" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["probe=recal"], "probe=recal: expected one of drift, fidelity, recall, return"),
        (["probe.ring=[4]"], "probe.ring=[4]: unknown key; did you mean probe.rings?"),
        (["probe.rings=[a]"], "probe.rings=[a]: expected a list of integers or null"),
        (["probe.rings=[4,4]"], "probe.rings=[4,4]: expected one or more different integers >= 1"),
        (["-m", "probe.clips=1,2"], "-m: probe has no sweeps; expected a single run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused_in_one_line_and_leaves_nothing_behind(
    overrides: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    flags = [text for text in overrides if text.startswith("-")]
    rest = [text for text in overrides if text not in flags]
    assert main([*flags, *SMALL, f"hydra.run.dir={tmp_path / 'run'}", *rest]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith(f"error: {line}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "knobs", "line"),
    [
        ("recall", {"name": "loops"}, "probe.name=loops: expected one of recall, return, fidelity, drift"),
        ("recall", {"max_gap": 4}, "probe.max_gap=4: probe=recall has no such knob; it has clips, loop_frames, rings"),
        ("recall", {"clips": 0}, "probe.clips=0: expected an integer >= 1"),
        ("recall", {"clips": None}, "probe.clips=null: expected a value"),
        ("recall", {"rings": []}, "probe.rings=[]: expected one or more different integers >= 1"),
        ("recall", {"loop_frames": [1]}, "probe.loop_frames=[1]: expected one or more different integers >= 2"),
        ("recall", {"ring_frames": 8}, "ring_frames=8: probe=recall sets it itself; expected none"),
        ("recall", {"warmup": 3}, "warmup=3: a probe measures no time; expected none"),
        ("recall", {"kv": "paged", "num_pages": 9}, "kv.num_pages=9: a probe sizes the pool itself; expected none"),
        ("recall", {"data": "pong"}, "data=pong: probe=recall asks about loops"),
        ("recall", {"side": 32}, "model=recall: takes 3 x 32 x 32, probe=recall shows crops of 3 x 16 x 16"),
        ("recall", {"kv": "hf_sliding", "rings": [1]}, "ring_frames=1: kv=hf_sliding evicts nothing"),
        ("return", {"gaps": [2, 3]}, "probe.gaps=[2,3]: a camera goes round an even number of places, not 3"),
        ("return", {"max_gap": 600}, "probe.max_gap=600 probe.dilations=[1,4]: a walk through 305 places; expected at"),
        (
            "return",
            {"kv": "hf_sliding", "dilations": [4]},
            "dilation=4: kv=hf_sliding has no dilated layers; expected dilation=1",
        ),
        ("fidelity", {"data": "synthetic"}, "data=synthetic: probe=fidelity asks about freeway or pong or breakout"),
        ("fidelity", {"clips": 2}, "probe.sampled_clips=4: expected at most probe.clips=2"),
        ("fidelity", {"context_frames": 0}, "context_frames=0: probe=fidelity needs a last frame to go on from"),
        ("drift", {"candidate_kv": "rign"}, "probe.candidate_kv=rign: expected one of cat, full,"),
        ("drift", {"candidate_attention": "fast"}, "candidate: attention=fast: kv=ring has auto, canonical,"),
        ("drift", {"candidate_kv_dtype": "int8"}, "candidate: kv_dtype=int8: expected one of"),
    ],
)
def test_what_cannot_work_is_refused_by_key_and_value(name: str, knobs: dict[str, Any], line: str):
    with pytest.raises(BadInput) as refusal:
        probe_of(name, **knobs)
    assert str(refusal.value).startswith(line)


def test_a_recording_that_was_trained_on_is_refused_for_trained_weights(tmp_path: Path):
    path = tmp_path / "some.safetensors"
    geometry = model_config(probe_of("fidelity", clips=1, samples=1, sampled_clips=1).points["rollout",])
    save_checkpoint(path, FrameTransformer(geometry))
    setup = setup_of("fidelity", clips=1, samples=1, sampled_clips=1, checkpoint=str(path), seed=1003)
    with pytest.raises(
        ValueError, match=r"^seed=1003: recordings from seed 1000 on are trained on; expected a lower one"
    ):
        fidelity.measure(setup)
