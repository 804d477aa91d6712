"""A report from a command line: read, write, track, and say where everything is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ringkv.harness.tracking import TRACKING_MODES, start_tracker
from scripts.app.errors import BadInput
from scripts.app.html.export import FILES_FOLDER, track, write_files
from scripts.app.html.sections import figures_of, sections_of, tables_of
from scripts.app.html.sources import read_sources

KNOBS = {"out": None, "tracking": "offline", "tracking.project": "ringkv"}
"""Options and their defaults. out: folder of the report; by default ``report`` in the first folder."""


@dataclass(frozen=True)
class Request:
    """What a command line asks for."""

    folders: Sequence[str]
    out: Path
    tracking: str
    project: str


def read_request(argv: Sequence[str]) -> Request:
    """Folders and options. ``BadInput`` for an unknown option, a bad value, or no folder."""
    folders = [text for text in argv if "=" not in text or Path(text).is_dir()]
    given = dict(KNOBS)
    for text in argv:
        if text in folders:
            continue
        key, _, value = text.partition("=")
        if key not in KNOBS:
            raise BadInput(f"{text}: unknown option; expected folders and {', '.join(f'{knob}=' for knob in KNOBS)}")
        given[key] = value
    tracking, project = str(given["tracking"]), str(given["tracking.project"])
    if not folders:
        raise BadInput("no folder; expected python scripts/report.py DIR [DIR ...] [out=DIR]")
    for folder in folders:
        if folder.startswith("-"):
            raise BadInput(f"{folder}: unknown option; expected folders and {', '.join(f'{knob}=' for knob in KNOBS)}")
    if tracking not in TRACKING_MODES:
        raise BadInput(f"tracking={tracking}: expected one of {', '.join(TRACKING_MODES)}")
    if given["out"] == "":
        raise BadInput("out=: expected a folder")
    out = Path(folders[0]) / "report" if given["out"] is None else Path(given["out"])
    if out.exists() and not out.is_dir():
        raise BadInput(f"out={out}: is a file; expected a folder")
    return Request(folders, out, tracking, project)


def make_report(request: Request) -> Path:
    """Write the report and its files, copy it to W&B and print where it is; the page."""
    sources = read_sources(request.folders)
    sections = sections_of(sources)
    try:
        page = write_files(sources, sections, request.out)[0]
    except OSError as error:
        raise BadInput(f"out={request.out}: cannot be written ({error.strerror}); expected a folder") from error
    tracker = start_tracker(
        request.tracking,
        project=request.project,
        group=None,
        name=f"report of {', '.join(Path(folder).name for folder in request.folders)}",
        config={"folders": list(request.folders)},
        directory=request.out,
    )
    with tracker:
        track(tracker, sections, request.out)
    console = Console(soft_wrap=True, highlight=False)
    points = sources.points
    runs = sum(len(point.runs) + len(point.failed) for point in points.all)
    lines = [
        (
            "read",
            f"{_count(runs, 'run')}, {_count(len(sources.comparisons), 'comparison')}, "
            f"{_count(len(sources.probes), 'probe')}, {_count(len(sources.horizons), 'horizon map')}",
        ),
        ("report", str(page)),
        (
            "files",
            f"{request.out / FILES_FOLDER}: {_count(len(figures_of(sections)), 'figure')} (PNG, CSV), "
            f"{_count(len(tables_of(sections)), 'table')} (CSV)",
        ),
    ]
    if tracker.sync_line is not None:
        lines.append(("upload", tracker.sync_line))
    for label, text in lines:
        console.print(f"{label:<8}{text}", markup=False)
    return page


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
