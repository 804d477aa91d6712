"""The report through its command line, in process: what is on the page, whether it is so on record, and its files."""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from ringkv.config import RingKVLayerConfig
from ringkv.horizon import visible_frames
from scripts.app.html.runs import points_of
from scripts.app.html.spec import Axis, Point, PointFigure
from scripts.app.html.stats import Interval, median_band, median_interval
from scripts.app.styles import COLORS
from scripts.compare import main as compare
from scripts.horizon import main as horizon
from scripts.report import main
from tests.chromium import CHROMIUM, Page, take_picture
from tests.cli_tools import TINY
from tests.report_tools import CONTEXT, FRAMES, MACHINE, PageReader, make_run

SPEEDS = {("ring", 4): (10.0, 14.0), ("ring", 8): (8.0, 9.0), ("full", 4): (5.0, 4.0), ("full", 8): (3.0, 2.0)}
KV_BYTES = {("ring", 4): 2**20, ("ring", 8): 2**21, ("full", 4): 2**22, ("full", 8): 2**23}
HOSTILE = "<img src=x onerror=\"document.title='owned'\">&amp;$a_{$b</script>"


def sweep(folder: Path) -> Path:
    """Two strategies by two rings by two seeds, a refused point, and one that fails with a hostile name."""
    number = itertools.count()
    for (strategy, ring_frames), speeds in SPEEDS.items():
        for seed, speed in enumerate(speeds):
            knobs: dict[str, Any] = {"strategy": strategy, "ring_frames": ring_frames, "seed": seed, "speed": speed}
            run = make_run(
                folder / str(next(number)), kv_bytes=KV_BYTES[strategy, ring_frames], psnr=20.0 + seed, **knobs
            )
            if seed == 0:
                write_strip(run / "strip.png")
    make_run(folder / "8", strategy="full", sessions=64, kv_bytes=2**30, error="OutOfMemoryError: no room <b>here</b>")
    make_run(folder / "9", path=HOSTILE, error=f"BadInput: {HOSTILE}", machine=None)
    return folder


def write_strip(path: Path) -> None:
    matplotlib.image.imsave(path, np.zeros((4, 4, 3)))


def report(*argv: str) -> int:
    return main(["tracking=disabled", *argv])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PageReader]:
    """Folder and page of a report of ``sweep``."""
    folder = tmp_path_factory.mktemp("report")
    assert report(str(sweep(folder / "sweep")), f"out={folder / 'out'}") == 0
    return folder / "out", PageReader((folder / "out" / "report.html").read_text(encoding="utf-8"))


# -- medians and intervals ----------------------------------------------------------------------------------------


def test_the_interval_of_two_or_three_repeats_is_their_range():
    """Of three, a resampled median is the least with probability 7/27, of two with 1/4: both far above 2.5 %."""
    assert median_interval([5.0, 3.0]) == Interval(4.0, 3.0, 5.0, 2)
    assert median_interval([7.0, 1.0, 2.0]) == Interval(2.0, 1.0, 7.0, 3)


def test_one_repeat_has_no_interval_and_what_is_no_number_does_not_count():
    assert median_interval([3.0]) == Interval(3.0, None, None, 1)
    assert median_interval([None, math.nan, 3.0, math.inf]) == Interval(3.0, None, None, 1)
    assert median_interval([None]) == Interval(None, None, None, 0)
    assert median_interval([]) == Interval(None, None, None, 0)


def test_many_repeats_have_an_interval_near_that_of_the_order_statistics():
    """The exact interval of a median of 101: the 41st to the 61st value, by the binomial distribution."""
    values = [float(value) for value in range(1, 102)]
    random.Random(0).shuffle(values)
    found = median_interval(values)
    assert found.median == 51
    assert found.low == pytest.approx(41, abs=2)
    assert found.high == pytest.approx(61, abs=2)


def test_each_column_of_a_band_is_over_the_repeats_that_have_it():
    band = median_band([[1.0, None, 5.0], [3.0, 4.0]])
    assert band == [Interval(2.0, 1.0, 3.0, 2), Interval(4.0, None, None, 1), Interval(5.0, None, None, 1)]


@pytest.mark.parametrize("better", [("low", "high"), ("high", "high"), ("low", "low")])
def test_the_front_is_what_no_point_beats(better: tuple[str, str]):
    rng = random.Random(1)
    values = [(float(rng.randrange(6)), float(rng.randrange(6))) for _ in range(25)]
    marks = [
        Point(str(i), "ring", {}, Interval(x, None, None, 1), Interval(y, None, None, 1))
        for i, (x, y) in enumerate(values)
    ]
    marks.append(Point("failed", "ring", {}, Interval(0.0, None, None, 1), Interval(None, None, None, 0), "why"))
    figure = PointFigure("f", "", "", Axis("x"), Axis("y"), marks, better)

    def at_least(a: float, b: float, way: str) -> bool:
        return a <= b if way == "low" else a >= b

    def beats(a: tuple[float, float], b: tuple[float, float]) -> bool:
        return a != b and all(map(at_least, a, b, better))

    best = {value for value in values if not any(beats(other, value) for other in values)}
    front = [values[index] for index in figure.front()]
    assert set(front) == best
    assert len(front) == len(best), "equal points stand once"
    assert front == sorted(front, key=lambda value: value[0])


# -- points -------------------------------------------------------------------------------------------------------


def row(**changes: Any) -> dict[str, Any]:
    values = {"status": "ok", "run_dir": "/r", "kv.strategy": "ring", "ring_frames": 4, "num_frames": 8, "seed": 0}
    return values | {f"machine/{name}": fact for name, fact in MACHINE.items()} | changes


def test_runs_that_differ_in_nothing_but_the_seed_are_one_point():
    """A sweep's repeats differ in their number too."""
    points = points_of([row(seed=0, repeat=0), row(seed=1, repeat=1), row(ring_frames=8, num_frames=16, repeat=0)])
    assert [len(point.runs) for point in points.all] == [2, 1]
    assert points.varying == {"ring_frames": ["4", "8"]}, "the number of frames follows from the ring"


def test_runs_of_other_sources_or_machines_are_never_in_one_median():
    points = points_of([row(), row(**{"machine/source_hash": "6" * 64}), row(**{"machine/git_commit": "d" * 40})])
    assert [(point.letter, len(point.runs)) for point in points.all] == [("A", 2), ("B", 1)]
    assert points.varying == {"machine": ["A", "B"]}


def test_a_window_is_told_in_the_name_of_the_strategy():
    windowed = row(**{"kv.strategy": "paged", "kv.window": True})
    assert [point.strategy for point in points_of([windowed, row()]).all] == ["paged_windowed", "ring"]


def test_a_repeat_that_failed_early_belongs_to_its_point_and_enters_no_median():
    failed = {key: value for key, value in row(status="failed", reason="why").items() if not key.startswith("machine/")}
    (point,) = points_of([row(**{"throughput/frames_per_s": 3.0}), failed]).all
    assert (len(point.runs), len(point.failed)) == (1, 1)
    assert point.interval("throughput/frames_per_s") == Interval(3.0, None, None, 1)
    assert point.reason() == "why"


# -- the page -----------------------------------------------------------------------------------------------------


def test_sections_are_those_that_have_data(made: tuple[Path, PageReader], tmp_path: Path):
    assert made[1].sections == [
        *("strategies", "fronts", "knobs", "grid", "frames", "horizons", "strips", "points", "failed-points"),
        *("conditions", "meanings"),
    ]
    (tmp_path / "probe").mkdir()
    series = {"name": "ring", "x": [1, 2], "y": [0.5, None], "low": [0.4, None], "high": [0.6, None]}
    probe = {"probe": "recall", "version": 1, "settings": {"loops": 2}, "tables": []}
    probe |= {"series": [series | {"panel": "p", "x_label": "loops", "y_label": "error"}]}
    (tmp_path / "probe" / "probe.json").write_text(json.dumps(probe))
    assert report(str(tmp_path)) == 0
    page = PageReader((tmp_path / "report" / "report.html").read_text())
    assert page.sections == ["probe_1"]
    curve = page.figures["probe_1_1"]["curves"][0]
    assert [value["median"] for value in curve["y"]] == [0.5, None]


def test_the_page_fetches_nothing(made: tuple[Path, PageReader]):
    _, page = made
    for tag, values in page.tags:
        for name in ("src", "href", "action", "poster", "srcset"):
            target = values.get(name) or "#"
            assert target.startswith(("#", "data:", "figures/")), (tag, target[:80])
            assert tag == "a" or not target.startswith("figures/"), "the page itself needs no file beside it"
    tags = [tag for tag, _ in page.tags]
    assert not {"link", "iframe", "object", "embed", "base"} & set(tags)
    (policy,) = [
        values["content"] for tag, values in page.tags if values.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    styles = (made[0] / "report.html").read_text().split("<style>")[1].split("</style>")[0]
    assert "url(" not in styles
    assert "@import" not in styles


def test_names_with_markup_are_text(made: tuple[Path, PageReader]):
    _, page = made
    assert sum(HOSTILE in words for words in page.words) >= 2, "in the filter and as a reason"
    assert all("onerror" not in values for _, values in page.tags)
    assert [values.get("src", "")[:5] for tag, values in page.tags if tag == "img"] == ["data:"] * 4
    assert sum(tag == "script" for tag, _ in page.tags) == 3


def test_figures_are_what_the_records_say(made: tuple[Path, PageReader]):
    figures = made[1].figures
    marks = {
        (p["tags"]["strategy"], p["tags"]["ring_frames"]): p
        for p in figures["pareto_speed_kv"]["points"]
        if not p["reason"]
    }
    for (strategy, ring_frames), speeds in SPEEDS.items():
        mark = marks[strategy, str(ring_frames)]
        assert mark["y"] == {"median": sum(speeds) / 2, "low": min(speeds), "high": max(speeds), "n": 2}
        assert mark["x"]["median"] == KV_BYTES[strategy, ring_frames] / 2**20
    quality = [p for p in figures["pareto_quality_kv"]["points"] if not p["reason"]]
    assert sorted(p["x"]["median"] for p in quality) == sorted(size / 2**20 for size in KV_BYTES.values())
    assert all(p["y"] == {"median": 20.5, "low": 20.0, "high": 21.0, "n": 2} for p in quality)
    curves = {(c["tags"]["strategy"], c["tags"]["ring_frames"]): c for c in figures["frame_latency"]["curves"]}
    for (strategy, ring_frames), speeds in SPEEDS.items():
        curve = curves[strategy, str(ring_frames)]
        assert curve["x"] == list(range(CONTEXT + 1, FRAMES)), "context and warm-up are left out"
        for frame, value in zip(curve["x"], curve["y"], strict=True):
            assert value["median"] == pytest.approx(np.mean([1000 / speed + frame for speed in speeds]), rel=1e-5)
            assert value["low"] == pytest.approx(min(1000 / speed + frame for speed in speeds), rel=1e-5)
    quality = figures["frame_quality"]["curves"][0]
    assert quality["x"] == list(range(CONTEXT, FRAMES))
    assert [value["median"] for value in quality["y"]] == [20.5 - frame for frame in quality["x"]]


def test_a_point_without_a_result_is_a_cell_a_mark_and_a_row_with_its_reason(made: tuple[Path, PageReader]):
    out, page = made
    (mark,) = [p for p in page.figures["pareto_speed_kv"]["points"] if p["reason"] and p["x"]["median"] == 1024]
    assert mark["y"]["median"] is None
    grids = [figure for name, figure in page.figures.items() if name.startswith("grid_")]
    notes = [note for grid in grids for notes in grid["notes"] for note in notes if note]
    assert any("no room <b>here</b>" in note for note in notes)
    assert all(cell is None for grid in grids for cells, notes in zip(grid["cells"], grid["notes"], strict=True)
               for cell, note in zip(cells, notes, strict=True) if note)  # fmt: skip
    failed = list(csv.DictReader((out / "figures" / "failed.csv").open()))
    assert [each["reason"] for each in failed if each["num_sessions"] == "64"] == [
        "OutOfMemoryError: no room <b>here</b>"
    ]


def test_every_row_of_a_run_has_the_command_that_reproduces_it(made: tuple[Path, PageReader]):
    commands = [values["data-copy"] for tag, values in made[1].tags if "data-copy" in values]
    assert len(commands) == 4 + 2 + 10, "configurations, failed runs, all runs"
    assert all(command is not None and command.startswith("python scripts/rollout.py ") for command in commands)
    assert any(command is not None and "kv=full" in command and "ring_frames=8" in command for command in commands)


def test_every_figure_says_its_conditions_and_every_number_its_repeats(made: tuple[Path, PageReader]):
    _, page = made
    for name, figure in page.figures.items():
        if not name.startswith("horizon"):
            assert "Conditions: " in figure["caption"], name
    assert "machine A" in page.figures["frame_latency"]["caption"]
    assert "random weights" in page.figures["frame_latency"]["caption"]
    assert any("source 555555555555" in words for words in page.words)
    assert any("n = 2" in words for words in page.words)


def test_filters_are_made_of_what_varies(made: tuple[Path, PageReader]):
    boxes = [(values["data-knob"], values["value"]) for tag, values in made[1].tags if tag == "input"]
    assert ("strategy", "ring") in boxes
    assert ("num_sessions", "64") in boxes
    assert {value for knob, value in boxes if knob == "ring_frames"} == {"4", "8"}
    assert not any(knob in ("seed", "num_frames", "threads") for knob, _ in boxes)


# -- files --------------------------------------------------------------------------------------------------------


def test_each_figure_has_a_picture_and_a_table_with_all_its_numbers(made: tuple[Path, PageReader]):
    out, page = made
    for name, figure in page.figures.items():
        assert matplotlib.image.imread(out / "figures" / f"{name}.png").shape[1] > 500
        rows = list(csv.reader((out / "figures" / f"{name}.csv").open(newline="")))
        assert len({len(row) for row in rows}) == 1, name
        if figure["kind"] == "curves":
            assert len(rows) - 1 == sum(len(curve["x"]) for curve in figure["curves"])
    table = list(csv.DictReader((out / "figures" / "frame_latency.csv").open(newline="")))
    for each in table:
        speeds = SPEEDS[each["strategy"], int(each["ring_frames"])]
        expected = float(np.median([1000 / speed + float(each["frame index"]) for speed in speeds]))
        assert float(each["step latency (ms)"]) == expected, "a CSV has every digit"
        assert each["step latency (ms), n"] == "2"


def test_a_report_in_the_same_folder_replaces_the_one_before(tmp_path: Path):
    make_run(tmp_path / "a" / "0")
    make_run(tmp_path / "a" / "1", strategy="full", error="no")
    make_run(tmp_path / "b")
    out = f"out={tmp_path / 'out'}"
    front = tmp_path / "out" / "figures" / "pareto_speed_kv.csv"
    assert report(str(tmp_path / "a"), out) == 0
    assert front.read_text().count("\n") == 1 + 2
    assert (front.parent / "strategies_speed.png").exists()
    kept = front.parent / "notes.txt"
    kept.write_text("not the report's")
    assert report(str(tmp_path / "b"), out) == 0
    files = {path.name for path in front.parent.iterdir()}
    assert not {"failed.csv", "strategies_speed.csv", "strategies_speed.png"} & files
    assert front.read_text().count("\n") == 1 + 1
    assert kept.exists()


def test_what_is_not_a_number_is_not_available_and_names_like_it_are_kept(tmp_path: Path):
    make_run(tmp_path / "0", speed=None, kv_bytes=None, weights="/w/NaN-guard.safetensors")
    make_run(tmp_path / "1", ring_frames=8, weights="/w/NaN-guard.safetensors")
    assert report(str(tmp_path)) == 0
    page = PageReader((tmp_path / "report" / "report.html").read_text())  # parses strictly
    assert "n/a" in page.words
    assert "weights NaN-guard.safetensors" in page.figures["pareto_speed_kv"]["caption"]
    marks = {p["tags"]["ring_frames"]: p for p in page.figures["pareto_speed_kv"]["points"]}
    assert marks["4"]["y"] == {"median": None, "low": None, "high": None, "n": 0}
    assert not {"nan", "NaN", "inf", "Infinity"} & set(page.words)


def test_the_colours_of_strategies_differ_for_the_colour_blind_too():
    """CIE76 between any two, with Machado's 2009 matrices of full deuteranopia and protanopia."""
    deutan = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    protan = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    to_xyz = np.array(
        [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
    )
    srgb = np.array([[int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)] for color in COLORS.values()])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    for seen in (np.eye(3), np.array(deutan), np.array(protan)):
        xyz = np.clip(linear @ seen.T, 0, 1) @ to_xyz.T / [0.95047, 1.0, 1.08883]
        f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
        lab = np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], 1)
        for a, b in itertools.combinations(range(len(lab)), 2):
            assert np.linalg.norm(lab[a] - lab[b]) > 20, (list(COLORS)[a], list(COLORS)[b])


# -- other inputs -------------------------------------------------------------------------------------------------


def test_a_comparison_has_its_ratios_its_ledger_and_its_matrix(tmp_path: Path):
    knobs = ["strategies=[ring,full]", "num_frames=8", "block_frames=2", "equality_frames=4"]
    assert compare([*TINY, *knobs, f"hydra.run.dir={tmp_path / 'compare'}"]) == 0
    assert report(str(tmp_path)) == 0
    page = PageReader((tmp_path / "report" / "report.html").read_text())
    assert page.sections == ["compare_1"], "its strategies are not runs of their own"
    result = json.loads((tmp_path / "compare" / "compare.json").read_text())
    by_name = {each["strategy"]: each for each in result["strategies"]}
    for dot in page.figures["compare_1_ratio"]["dots"]:
        assert dot["value"]["median"] == pytest.approx(by_name[dot["label"]]["ratio"]["ratio"], rel=1e-5)
    moved = {(dot["label"], dot["series"]): dot["value"]["median"] for dot in page.figures["compare_1_ledger"]["dots"]}
    assert moved["ring", "written"] == pytest.approx(
        by_name["ring"]["ledger"]["bytes_written_per_frame"] / 2**20, rel=1e-5
    )
    assert any(words.startswith("≠") for words in page.words)
    held = {curve["label"]: [y["median"] for y in curve["y"]] for curve in page.figures["compare_1_memory"]["curves"]}
    assert held["full"] == pytest.approx([size / 2**20 for size in by_name["full"]["curves"]["kv_bytes"]], rel=1e-5)


def test_a_horizon_map_shows_what_the_specification_says(made: tuple[Path, PageReader], tmp_path: Path):
    figure = made[1].figures["horizon_1"]
    assert figure["title"].startswith("Rings of 4 frames")
    for cells, dilation in zip(figure["cells"], (1, 2), strict=True):
        layer = RingKVLayerConfig(ring_frames=4, ring_buckets=4, pinned_dilation=dilation)
        seen = [FRAMES - 1 - age for age, cell in zip(figure["x_values"], cells, strict=True) if cell == 2]
        assert seen == visible_frames(layer, FRAMES - 1)
    assert horizon(["model=tiny", "frame=20", "ring_frames=4", f"png={tmp_path / 'map.png'}"]) == 0
    assert report(str(tmp_path)) == 0
    page = PageReader((tmp_path / "report" / "report.html").read_text())
    assert page.sections == ["horizons"]
    assert "frame 20" in page.figures["horizon_map_1"]["title"]


def test_tables_and_figures_go_to_wandb_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    logged: list[dict[str, Any]] = []
    run = SimpleNamespace(
        dir=str(tmp_path / "wandb" / "run" / "files"),
        summary={},
        log=lambda entries, step: logged.append(entries),
        finish=lambda exit_code: logged.append({"exit_code": exit_code}),
    )
    stub = SimpleNamespace(
        init=lambda **arguments: logged.append({"mode": arguments["mode"]}) or run,
        Table=lambda columns, data, allow_mixed_types: (columns, data),
        Image=lambda path: Path(path).read_bytes()[:4],
    )
    monkeypatch.setitem(sys.modules, "wandb", stub)
    make_run(tmp_path / "0")
    make_run(tmp_path / "1", strategy="full", speed=3.0)
    assert main([str(tmp_path)]) == 0
    (begin, entries, end) = logged
    assert begin == {"mode": "offline"}
    assert end == {"exit_code": 0}
    files = {path.name for path in (tmp_path / "report" / "figures").iterdir()}
    assert {name.removeprefix("table/") + ".csv" for name in entries if name.startswith("table/")} == {
        name for name in files if name.endswith(".csv")
    }
    assert {name.removeprefix("figure/") + ".png" for name in entries if name.startswith("figure/")} == {
        name for name in files if name.endswith(".png")
    }
    columns, rows = entries["table/strategies_speed"]
    assert [row[columns.index("frames/s, all sessions")] for row in rows] == [3.0, 10.0]
    assert all(picture == b"\x89PNG" for name, picture in entries.items() if name.startswith("figure/"))


# -- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "no folder"),
        (["{}/nowhere"], "nowhere: no such folder"),
        (["{}/empty"], "empty: nothing to report"),
        (["{}/broken"], "broken/probe.json: cannot be read"),
        (["{}/other"], "other: not as this release writes it"),
        (["{}/empty", "colour=red"], "colour=red: unknown option"),
        (["{}/empty", "--fast"], "--fast: unknown option"),
        (["{}/empty", "tracking=perhaps"], "tracking=perhaps: expected one of"),
        (["{}/run", "out={}/file"], "file: is a file"),
        (["{}/run", "out={}/file/below"], "below: cannot be written"),
    ],
)
def test_bad_input_is_told_in_one_line(argv: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("empty", "broken", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "broken" / "probe.json").write_text('{"probe": NaN}')
    (tmp_path / "other" / "compare.json").write_text('{"status": "ok"}')
    (tmp_path / "file").write_text("")
    make_run(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    assert main(["tracking=disabled", *(text.format(tmp_path) for text in argv)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    assert told in line
    assert sorted(tmp_path.rglob("*")) == before


# -- in a browser ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_without_a_network_opens_hovers_and_filters_it(made: tuple[Path, PageReader], tmp_path: Path):
    drawn = "[...chartOf.values()].every(chart => !chart.stale)"
    plot = "document.querySelector('[data-figure=pareto_speed_kv]')"
    with Page(tmp_path / "profile") as page:
        page.resize(1280, 900)
        page.open(made[0] / "report.html")
        page.evaluate("drawAll()")
        page.wait_for(drawn)
        assert page.evaluate("document.querySelectorAll('.main-svg').length") > 0

        hover = f"{plot}.scrollIntoView({{block: 'center', behavior: 'instant'}})"
        page.evaluate(hover)
        middle = f"""(() => {{
            const box = [...{plot}.querySelectorAll('.scatterlayer .point')].at(-1).getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }})()"""
        page.wait_for(f"{plot}.querySelectorAll('.scatterlayer .point').length > 0")
        page.move_to(*page.evaluate(middle))
        page.wait_for(f"{plot}.querySelector('.hoverlayer .hovertext') !== null")
        label = page.evaluate(f"{plot}.querySelector('.hoverlayer').textContent")
        assert "no result" in label or "frames/s" in label

        fronts = [point["label"] for point in front_of(made[1])]
        script = """(({points, better}) => frontOf(points.filter(p => p.x.median != null && p.y.median != null), better)
            .map(p => p.label))(byName.get('pareto_speed_kv'))"""
        assert page.evaluate(script) == fronts

        marks = f"Number({plot}.dataset.marks)"
        rows = "[...document.querySelectorAll('#table-configurations tbody tr')].filter(row => !row.hidden).length"
        before, all_rows = page.evaluate(marks), page.evaluate(rows)
        box = "document.querySelector('input[data-knob=strategy][value=full]')"
        page.evaluate(f"{box}.click()")
        page.wait_for(f"{marks} < {before}")
        page.wait_for(f"{rows} === {all_rows // 2}")
        assert page.evaluate("document.querySelector('#off').textContent") == "1 off"
        page.evaluate("document.querySelector('#reset').click()")
        page.wait_for(f"{marks} === {before}")

        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.prefer("dark")
        page.wait_for(f"getComputedStyle(document.body).backgroundColor !== '{light}'")
        page.evaluate("document.querySelector('#theme').click()")
        page.wait_for(f"getComputedStyle(document.body).backgroundColor === '{light}'")

        page.resize(390, 844, phone=True)
        page.open(made[0] / "report.html")
        page.evaluate("drawAll()")
        page.wait_for(drawn)
        page.wait_for(
            "[...document.querySelectorAll('.plot svg')].every(svg => svg.getBoundingClientRect().width <= 390)"
        )
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        outside = """[...document.querySelectorAll('button, a, h1, h2, h3')].filter(node =>
            node.getBoundingClientRect().right > 391 && !node.closest('.scroll')).length"""
        assert page.evaluate(outside) == 0

        assert page.evaluate("document.title").startswith("ringkv report: "), "a name was executed"
        take_picture(page, made[0] / "report.html", tmp_path / "report.png")
        assert page.problems == []
    picture = matplotlib.image.imread(tmp_path / "report.png")
    assert picture.shape[:2] == (1500, 1360)
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 200, "next to nothing is drawn"


def front_of(page: PageReader) -> list[dict[str, Any]]:
    """The points that no other one has both less memory and more speed than, by memory."""
    done = [p for p in page.figures["pareto_speed_kv"]["points"] if None not in (p["x"]["median"], p["y"]["median"])]
    return sorted(
        (
            p
            for p in done
            if not any(
                q is not p and q["x"]["median"] <= p["x"]["median"] and q["y"]["median"] >= p["y"]["median"]
                for q in done
            )
        ),
        key=lambda p: p["x"]["median"],
    )
