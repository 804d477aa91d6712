"""PSNR and SSIM per frame against their formulas, positions on frames whose answer is known, and the probe itself."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.data import load_clip
from model.data.clip import Pixels
from model.metrics import PSNR_CEILING_DB, frame_psnr, frame_ssim
from scripts.app.probe.positions import MEASURES, last_places
from scripts.app.probe.result import Found
from scripts.app.probe.stats import Bootstrap
from scripts.probe import main
from tests.probe_tools import SMALL


def frames(seed: int, count: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size=(count, 16, 24, 3), dtype=np.uint8)


def test_psnr_is_that_of_each_frame_by_its_formula():
    made, truth = frames(0), frames(1)
    for value, one, other in zip(frame_psnr(made, truth), made.astype(float), truth, strict=True):
        assert float(value) == pytest.approx(10 * math.log10(255**2 / np.mean((one - other) ** 2)), abs=1e-5)


def test_frames_that_are_equal_or_nearly_have_the_psnr_of_rounding():
    truth = frames(1)
    nearly = truth.copy()
    nearly[:, 0, 0, 0] ^= 1
    assert frame_psnr(truth, truth).tolist() == frame_psnr(nearly, truth).tolist() == [PSNR_CEILING_DB] * 3
    assert pytest.approx(10 * math.log10(12 * 255**2), abs=0.005) == PSNR_CEILING_DB


def gaussian(size: int = 11, sigma: float = 1.5) -> np.ndarray:
    line = np.exp(-((np.arange(size) - size // 2) ** 2) / (2 * sigma**2))
    window = np.outer(line, line)
    return window / window.sum()


def test_ssim_is_that_of_each_frame_by_its_formula_with_reflected_borders():
    truth = frames(2, count=2)
    made = np.clip(truth + np.random.default_rng(3).normal(0, 30, truth.shape), 0, 255).astype(np.uint8)
    window, c1, c2 = gaussian(), 0.01**2, 0.03**2
    for value, one, other in zip(frame_ssim(made, truth), made / 255, truth / 255, strict=True):
        scores = []
        for channel in range(3):
            whole = [np.pad(x[..., channel], 5, mode="reflect") for x in (one, other)]
            for row in range(16):
                for column in range(24):
                    a, b = (x[row : row + 11, column : column + 11] for x in whole)
                    mean_a, mean_b = (window * a).sum(), (window * b).sum()
                    var_a, var_b = (window * a * a).sum() - mean_a**2, (window * b * b).sum() - mean_b**2
                    cov = (window * a * b).sum() - mean_a * mean_b
                    scores.append(
                        (2 * mean_a * mean_b + c1)
                        * (2 * cov + c2)
                        / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
                    )
        assert float(value) == pytest.approx(np.mean(scores), abs=1e-6)
    assert frame_ssim(truth, truth).tolist() == pytest.approx([1.0, 1.0])


# -- positions ------------------------------------------------------------------------------------------------------


@cache
def recorded(game: str, side: int = 64) -> Pixels:
    """uint8 [3 clips, 24, side, side, 3], not written to disk twice in one process."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        shape = {"num_frames": 24, "channels": 3, "height": side, "width": side}
        clips = [load_clip(game, seed=4, index=index, folder=folder, **shape).frames for index in range(3)]
    return np.stack(clips)


def judged(game: str, made: Pixels) -> Found:
    truth = recorded(game, made.shape[2])
    found = Found(settings={}, summary={})
    MEASURES[game](truth[:, :1], truth, made, Bootstrap(3, seed=0), found)  # a context that ends at the first place
    return found


def moved(frames: Pixels, rows: int, columns: int) -> Pixels:
    """The sprites elsewhere, the field as it is."""
    field = np.median(frames.reshape(-1, *frames.shape[2:]), axis=0).round().astype(np.uint8)
    shifted = np.roll(frames, (rows, columns), axis=(2, 3))
    return np.where((shifted != np.roll(field, (rows, columns), axis=(0, 1))), shifted, field).astype(np.uint8)


def test_a_perfect_prediction_keeps_every_car_and_follows_the_chicken():
    summary = judged("freeway", recorded("freeway")).summary
    assert summary["fidelity/chicken_correlation"] == pytest.approx(1.0)
    assert summary["fidelity/chicken_correlation_all"] == pytest.approx(1.0)
    assert summary["fidelity/chicken_found"] == summary["fidelity/cars_kept_worst_lane"] == 1.0
    assert summary["fidelity/chicken_within_2px"] == 1.0


NONE = math.nan


def test_a_missing_sprite_counts_where_it_was_last_found_in_its_own_rollout_or_its_context():
    before = np.array([[3.0, 9.0], [5.0, NONE], [NONE, NONE]])
    ours = np.array([[NONE, 7.0, NONE, NONE], [NONE, NONE, 1.0, 2.0], [NONE, 4.0, NONE, 6.0]])
    expected = [[9.0, 7.0, 7.0, 7.0], [5.0, 5.0, 1.0, 2.0], [NONE, 4.0, 4.0, 6.0]]
    np.testing.assert_array_equal(last_places(before, ours), expected)


def test_the_correlation_of_all_frames_does_not_profit_from_missing_ones():
    real = np.array([[1.0, 2.0, 3.0, 4.0, 5.0, NONE], [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]])
    ours = np.array([[1.0, NONE, NONE, NONE, 5.0, 9.0], [NONE, 5.0, NONE, NONE, NONE, NONE]])
    carried = last_places(np.array([[1.0], [6.0]]), ours)
    bootstrap = Bootstrap(2, seed=0)
    assert bootstrap.correlation(real, ours).middle == pytest.approx(1.0)
    tested = [1, 2, 3, 4, 5, 6, 5, 4, 3, 2, 1], [1, 1, 1, 1, 5, 6, 5, 5, 5, 5, 5]  # the truth's hidden frame is no test
    assert bootstrap.correlation(real, carried).middle == pytest.approx(np.corrcoef(*tested)[0, 1])


def test_a_chicken_that_is_never_found_again_is_told_by_the_correlation_of_all_frames():
    made = recorded("freeway").copy()
    made[:, 8:] = np.median(made.reshape(-1, *made.shape[2:]), axis=0).round()  # the road alone
    found = judged("freeway", made)
    assert found.summary["fidelity/chicken_correlation"] == pytest.approx(1.0)
    assert found.summary["fidelity/chicken_correlation_all"] < 0.9
    (table,) = (each for each in found.tables if each.title.startswith("The chicken's height"))
    assert table.columns[:2] == ["correlation where found", "correlation, all frames"]
    assert any(note.startswith("Correlation, all frames") for note in found.notes)


@pytest.mark.parametrize(("columns", "kept"), [(1, 1.0), (-1, 1.0), (4, 0.0)])
def test_cars_are_kept_within_two_pixels_and_no_farther(columns: int, kept: float):
    found = judged("freeway", moved(recorded("freeway"), 0, columns))
    assert found.summary["fidelity/cars_kept_mean"] == pytest.approx(kept, abs=0.1)
    (curve,) = [series for series in found.series if series.name == "cars, all lanes"]
    assert np.median([value for value in curve.y if value is not None]) == pytest.approx(abs(columns), abs=0.2)


def test_a_chicken_that_stands_still_follows_no_action():
    frames = recorded("freeway")
    still = np.repeat(frames[:, :1], frames.shape[1], axis=1)
    assert (judged("freeway", still).summary["fidelity/chicken_correlation"] or 0) < 0.9


def test_noise_has_no_sprites_and_so_fails():
    noise = np.random.default_rng(0).integers(0, 256, size=recorded("freeway").shape, dtype=np.uint8)
    freeway = judged("freeway", noise).summary
    assert freeway["fidelity/chicken_correlation"] is None
    assert freeway["fidelity/chicken_found"] == freeway["fidelity/cars_kept_mean"] == 0.0
    assert freeway["fidelity/chicken_within_2px"] == 0.0
    pong = judged("pong", noise).summary
    assert pong["fidelity/paddle_correlation"] is pong["fidelity/ball_error_px_worst_frame"] is None
    assert pong["fidelity/paddle_found"] == pong["fidelity/ball_found"] == 0.0


@pytest.mark.parametrize(("side", "pixels_of_64"), [(64, 3), (48, 4)])
def test_a_perfect_rally_has_no_error_and_a_moved_one_the_distance_it_was_moved(side: int, pixels_of_64: int):
    perfect = judged("pong", recorded("pong", side)).summary
    assert perfect["fidelity/paddle_correlation"] == pytest.approx(1.0)
    assert perfect["fidelity/ball_error_px_worst_frame"] == 0.0
    assert perfect["fidelity/ball_found"] == 1.0
    shifted = judged("pong", moved(recorded("pong", side), 3, 0)).summary
    assert shifted["fidelity/ball_error_px_worst_frame"] == pytest.approx(pixels_of_64, abs=0.2)


# -- the probe ------------------------------------------------------------------------------------------------------

TINY = (
    *SMALL,
    "probe=fidelity",
    "tokens_per_frame=16",
    "num_frames=7",
    "context_frames=3",
    "ring_frames=3",
    "probe.clips=2",
    "probe.samples=2",
    "probe.sampled_clips=1",
)


def fidelity(folder: Path, *overrides: str) -> tuple[int, dict[str, Any]]:
    run = folder / "run"
    code = main([*TINY, f"data.folder={folder / 'data'}", f"hydra.run.dir={run}", *overrides])
    return code, json.loads((run / "probe.json").read_text()) if (run / "probe.json").exists() else {}


def test_fidelity_reports_every_predicted_frame_beside_both_baselines(tmp_path: Path):
    code, result = fidelity(tmp_path)
    assert code == 0
    settings = result["settings"]
    assert (settings["clip length"], settings["context frames"], settings["predicted frames"]) == (7, 3, 4)
    assert settings["clips"].startswith("2 recordings")
    series = {(each["panel"], each["name"]): each for each in result["series"]}
    clips = [
        load_clip("freeway", num_frames=7, channels=3, height=64, width=64, seed=0, index=i, folder=tmp_path / "data")
        for i in range(2)
    ]
    for (panel, name), each in series.items():
        assert each["x"] == [1, 2, 3, 4], (panel, name)
    for frame in range(4):
        repeat = np.mean([float(frame_psnr(c.frames[[2]], c.frames[[3 + frame]])[0]) for c in clips])
        assert series["PSNR", "repeat last"]["y"][frame] == pytest.approx(repeat)
        mean = np.concatenate([c.frames for c in clips]).mean(axis=0).round().astype(np.uint8)[None]
        expected = np.mean([float(frame_psnr(mean, c.frames[[3 + frame]])[0]) for c in clips])
        assert series["PSNR", "mean frame"]["y"][frame] == pytest.approx(expected)
        lead = series["PSNR", "one sample"]["y"][frame] - repeat
        assert series["PSNR: leads, paired", "one sample over repeat last"]["y"][frame] == pytest.approx(lead)
    of_mean = "PSNR: leads of the mean of samples, paired"
    for frame in range(4):  # the mean is of clip 0 alone: so are the baselines that it is paired with
        true = clips[0].frames[[3 + frame]]
        for baseline, shown in (("repeat last", clips[0].frames[[2]]), ("mean frame", mean)):
            lead = series["PSNR", "mean of samples"]["y"][frame] - float(frame_psnr(shown, true)[0])
            assert series[of_mean, f"mean of samples over {baseline}"]["y"][frame] == pytest.approx(lead)
    (table,) = (each for each in result["tables"] if each["title"].startswith("Paired leads"))
    assert [row[1] for row in table["rows"]] == [2, 2, 1, 1, 1] * 2
    gain = series[of_mean, "mean of samples over one sample"]
    assert gain["low"] is None  # one clip has no spread
    assert min(gain["y"]) > 0  # of two noises the mean is the nearer one
    assert result["summary"]["fidelity/first_frame_touching_zero"] == 1
    assert result["summary"]["fidelity/chicken_found"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("kv", sorted({path.stem for path in Path("conf/kv").glob("*.yaml")} - {"ring"}))
def test_every_strategy_s_rollouts_are_judged(kv: str, tmp_path: Path):
    """At ring_frames=7 nothing is forgotten within these 7 frames, so all strategies make what the ring makes."""
    if kv == "hf_sliding":
        pytest.importorskip("transformers")
    whole = ("ring_frames=7", "probe.samples=1", "dilation=1")
    results = [fidelity(tmp_path / each, f"kv={each}", *whole) for each in ("ring", kv)]
    assert [code for code, _ in results] == [0, 0]
    curves = [
        next(each["y"] for each in result["series"] if (each["panel"], each["name"]) == ("PSNR", "one sample"))
        for _, result in results
    ]
    assert curves[0] == pytest.approx(curves[1], abs=1e-3)


@pytest.mark.slow
def test_grey_frames_are_judged_by_quality_alone_and_that_is_told(tmp_path: Path):
    code, result = fidelity(tmp_path, "data.channels=1", "probe.samples=1")
    assert code == 0
    assert any("RGB of 48 x 48" in note for note in result["notes"])
    assert not any("chicken" in key for key in result["summary"])
    assert {each["name"] for each in result["series"] if each["panel"] == "PSNR"} == {
        "one sample",
        "repeat last",
        "mean frame",
    }
