"""scripts/horizon.py: the ages it prints and draws, and the input it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ringkv.harness.horizon_map import COLORS, OWN, SEEN, UNSEEN, UNSEEN_NEWEST, horizon_map, horizon_png
from scripts.horizon import main
from tests.ring_tools import reference_history, ring


@pytest.fixture(autouse=True)
def launch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[int, list[str]]:
    """Layer -> the other cells of its line in the table."""
    assert main(argv) == 0
    lines = [line.strip("│ \n") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    rows = [[cell.strip() for cell in line.split("│")] for line in lines]
    return {int(cells[0]): cells[1:] for cells in rows}


def test_the_map_of_the_published_geometry_shows_that_a_dilated_layer_misses_the_newest_frames(
    capsys: pytest.CaptureFixture[str], launch_folder: Path
) -> None:
    rows = printed(capsys, "model=waypoint_720p", "frame=1000", "ring_frames=16")
    dilated = {3, 7, 11, 15, 19, 23}
    assert list(rows) == list(range(24))
    for layer, cells in rows.items():
        if layer in dilated:
            assert cells == ["1 frame in 8", "15", "8, 16 ... 120", "7"]
        else:
            assert cells == ["every frame", "15", "1 to 15", "0"]
    with Image.open(launch_folder / "outputs" / "horizon.png") as image:
        assert image.format == "PNG"


def test_a_frame_off_the_stride_sees_a_frame_more_and_a_young_stream_what_there_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shape = ("ring_frames=16", "png=map.png", "global_period=2")
    assert printed(capsys, "frame=1001", *shape)[1] == ["1 frame in 8", "16", "1, 9 ... 121", "0"]
    assert printed(capsys, "frame=5", *shape)[1] == ["1 frame in 8", "1", "5", "4"]
    assert printed(capsys, "frame=5", *shape)[0] == ["every frame", "5", "1 to 5", "0"]
    assert printed(capsys, "frame=0", *shape)[0] == ["every frame", "0", "none", "n/a"]
    assert printed(capsys, "frame=100", "ring_buckets=4", *shape)[0] == ["every frame", "3", "1, 2, 3", "0"]


def test_a_default_run_shows_the_geometry_of_a_default_rollout(capsys: pytest.CaptureFixture[str]) -> None:
    rows = printed(capsys)
    assert rows[0] == ["every frame", "31", "1 to 31", "0"]
    assert rows[2] == ["1 frame in 8", "31", "8, 16 ... 248", "7"]


@pytest.mark.parametrize("frame", [0, 1, 7, 8, 63, 64, 65])
def test_the_picture_has_the_colour_of_each_age_in_each_layer(frame: int, launch_folder: Path) -> None:
    layers = [ring(4), ring(4, 3), ring(2, 8)]
    horizon_png(launch_folder / "map.png", horizon_map(layers, frame), "a title")
    with Image.open(launch_folder / "map.png") as image:
        pixels = np.asarray(image.convert("RGB"))
    histories = [reference_history(layer.ring_buckets, layer.pinned_dilation, frame) for layer in layers]
    oldest = max((frame - min(history) for history in histories if history), default=0)
    left, right, top, bottom = _map_box(pixels)
    for row, history in enumerate(histories):
        for age in range(oldest + 1):
            x = left + (right - left) * (oldest - age + 0.5) / (oldest + 1)
            y = top + (bottom - top) * (row + 0.5) / len(layers)
            kind = SEEN if frame - age in history else UNSEEN
            if history and 0 < age < frame - max(history):
                kind = UNSEEN_NEWEST
            if age == 0:
                kind = OWN
            assert tuple(pixels[int(y), int(x)]) == _rgb(COLORS[kind]), (row, age)


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def _map_box(pixels: np.ndarray) -> tuple[int, int, int, int]:
    """Left, right, top and bottom of the coloured cells, found from the column that every layer's own frame fills."""
    own = (pixels == _rgb(COLORS[OWN])).all(-1)
    right = int(np.flatnonzero(own.sum(0) > len(pixels) / 4)[-1])
    rows = np.flatnonzero(own[:, right - 1])
    coloured = np.any([(pixels[rows[0] + 2] == _rgb(colour)).all(-1) for colour in COLORS], axis=0)
    return int(np.flatnonzero(coloured)[0]), right + 1, int(rows[0]), int(rows[-1]) + 1


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("fram=3", "fram=3: unknown key; keys: frame, ring_frames,"),
        ("+frame=3", "+frame=3: unknown key"),
        ("data=pong", "data=pong: unknown key"),
        ("frame", "frame: not an override; expected key=value"),
        ("frame=x", "frame=x: expected an integer >= 0"),
        ("frame=-1", "frame=-1: expected an integer >= 0"),
        ("ring_frames=0", "ring_frames=0: expected an integer >= 1"),
        ("ring_frames=3.5", "ring_frames=3.5: expected an integer >= 1"),
        ("ring_frames=8,16", "ring_frames=8,16: expected an integer >= 1"),
        ("dilation=0", "dilation=0: expected an integer >= 1"),
        ("ring_buckets=99", "ring_buckets=99: expected at most ring_frames=32"),
        ("model=huge", "model=huge: expected one of freeway, pong, recall, small, tiny, waypoint_360p, waypoint_720p"),
        ("png=map.pdf", "png=map.pdf: expected a path that ends in .png"),
        ("png=text/map.png", "png=text/map.png: cannot be written"),
    ],
)
def test_bad_input_is_refused_in_one_line_with_exit_code_2(
    argument: str, says: str, capsys: pytest.CaptureFixture[str], launch_folder: Path
) -> None:
    (launch_folder / "text").write_text("no folder")
    assert main([argument]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {says}")
    assert captured.err.count("\n") == 1
    assert not list(launch_folder.rglob("*.png"))


def test_help_names_the_keys_and_draws_nothing(capsys: pytest.CaptureFixture[str], launch_folder: Path) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "python scripts/horizon.py model=waypoint_720p frame=1000" in out
    assert "ring_buckets" in out
    assert not list(launch_folder.iterdir())


def test_the_map_is_drawn_without_torch() -> None:
    program = "import sys; from scripts.horizon import main; assert main([]) == 0; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
