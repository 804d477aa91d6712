"""Intervals and curves on numbers that were made for it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scripts.app.probe.drift import first_outside
from scripts.app.probe.stats import Bootstrap, Interval, first_touching


def test_the_interval_of_a_mean_is_that_of_theory_for_normal_values():
    values = np.random.default_rng(0).normal(3.0, 2.0, size=400)
    middle, low, high = Bootstrap(400, seed=1).mean(values)
    assert middle == pytest.approx(values.mean())
    half = 1.96 * values.std() / math.sqrt(400)
    assert low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_the_interval_holds_the_mean_about_as_often_as_it_says():
    draws = np.random.default_rng(2).normal(size=(40, 120))
    _, low, high = Bootstrap(40, seed=0).mean(draws)
    inside = (low <= 0) & (high >= 0)
    assert 0.88 <= np.mean(inside) <= 0.99


def test_a_curve_is_resampled_by_whole_clips():
    """Clips differ by a constant: a difference between frames of the same clips has no spread, each frame has."""
    clips = np.arange(10.0)[:, None] + np.array([0.0, 5.0])
    bootstrap = Bootstrap(10, seed=0)
    curve, lead = bootstrap.mean(clips), bootstrap.mean(clips[:, 1] - clips[:, 0])
    assert (curve.high - curve.low > 2).all()
    assert lead.low == lead.high == 5.0
    assert np.allclose(curve.high[1] - curve.high[0], 5.0)


def test_a_ratio_takes_both_sides_from_the_same_resample():
    below = np.random.default_rng(0).uniform(1, 100, size=12)
    assert np.allclose(Bootstrap(12, seed=0).ratio(20 * below, below), 20.0)


def test_missing_values_are_left_out_and_a_mean_of_none_is_missing():
    values = np.array([[1.0, np.nan, np.nan], [3.0, 4.0, np.nan]])
    middle, low, high = Bootstrap(2, seed=0).mean(values)
    assert middle[:2].tolist() == [2.0, 4.0]
    assert math.isnan(middle[2])
    assert (low[0], high[0], low[1], high[1]) == (1.0, 3.0, 4.0, 4.0)


def test_correlation_is_pearson_s_over_all_pairs_that_are_there():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 30))
    y = 0.5 * x + rng.normal(size=(8, 30))
    y[2, 5:20] = np.nan
    there = np.isfinite(y)
    middle, low, high = Bootstrap(8, seed=0).correlation(x, y)
    assert middle == pytest.approx(np.corrcoef(x[there], y[there])[0, 1])
    assert low < middle < high
    assert Bootstrap(8, seed=0).correlation(x, 7 - 3 * x).middle == pytest.approx(-1)
    assert math.isnan(Bootstrap(8, seed=0).correlation(x, np.full_like(x, 4.2)).middle)
    assert math.isnan(Bootstrap(8, seed=0).correlation(x, np.full_like(x, np.nan)).middle)


def test_one_clip_has_no_interval():
    bootstrap = Bootstrap(1, seed=0)
    assert bootstrap.mean(np.array([[1.0, 2.0]])).low is None
    assert bootstrap.ratio(np.array([4.0]), np.array([2.0])) == Interval(2.0, None, None)
    assert bootstrap.correlation(np.array([[1.0, 2.0, 4.0]]), np.array([[1.0, 2.0, 3.0]])).high is None


def test_a_lead_ends_at_the_first_frame_whose_interval_touches_zero():
    middle = np.array([3.0, 2.0, 1.0, 2.0])
    assert first_touching(Interval(middle, np.array([1.0, 0.5, 0.0, 1.0]), middle + 1)) == 2
    assert first_touching(Interval(middle, np.array([1.0, np.nan, 1.0, 1.0]), middle + 1)) == 1
    assert first_touching(Interval(middle, np.full(4, 0.1), middle + 1)) is None
    assert first_touching(Interval(middle - 2, None, None)) == 1


def test_a_candidate_is_outside_where_it_is_above_every_replay():
    envelope = np.array([[0.0, 1.0, 2.0, 2.0], [0.0, 2.0, 1.0, 3.0]])
    assert first_outside(np.array([0.0, 2.0, 2.0, 3.0]), envelope) is None
    assert first_outside(np.array([0.0, 2.0, 2.1, 9.0]), envelope) == 2
    assert first_outside(np.array([1e-9, 0.0, 0.0, 0.0]), envelope) == 0
