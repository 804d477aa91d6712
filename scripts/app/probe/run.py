"""One probe from its config to its files: measure, write, draw, print, track.

config.json   every knob                 probe.png      the figure
probe.json    curves, grids and tables   summary.json   how it ended, and its headline numbers
probe.txt     the tables
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ringkv.harness.machine import machine_card
from ringkv.harness.records import RunDir, dumps_strict, replace_text
from scripts.app import build
from scripts.app.geometry import model_config
from scripts.app.probe import drift, fidelity, recall, returning
from scripts.app.probe.check import Probe
from scripts.app.probe.draw import probe_png
from scripts.app.probe.drive import Setup, make_setup
from scripts.app.probe.result import (
    PLOT_FILE,
    RESULT_FILE,
    TABLES_FILE,
    VERSION,
    Found,
    print_found,
    tables_text,
    tracked_rows,
)
from scripts.app.probe.stats import DEFINITION
from scripts.app.track import open_tracker

OK, FAILED, REFUSED = 0, 1, 2

MEASURES: dict[str, Callable[[Setup], Found]] = {
    "recall": recall.measure,
    "return": returning.measure,
    "fidelity": fidelity.measure,
    "drift": drift.measure,
}


def run_probe(probe: Probe, run_dir: RunDir) -> int:
    """Run a checked probe in a claimed folder; the exit code. Whatever ends it is recorded, Ctrl-C too."""
    console = Console(soft_wrap=True, highlight=False)
    facts: dict[str, Any] = {}
    found: Found | None = None
    error: BaseException | None = None
    code = OK
    with run_dir:
        try:
            run_dir.write_config(probe.config)
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f} frames"))
            with Progress(
                *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
            ) as progress:
                task = progress.add_task(probe.name, total=None)
                try:
                    setup = make_setup(probe, lambda frames: progress.advance(task, frames))
                    facts |= _facts(setup)
                    _print_header(console, setup)
                    found = MEASURES[probe.name](setup)
                except ValueError:
                    code = REFUSED
                    raise
            _write(probe, run_dir, found, facts)
        except BaseException as raised:  # Ctrl-C too: whatever ends it is on record
            error, code = raised, code or FAILED
        run_dir.write_summary(facts | (found.summary if found is not None else {}), error=error)
    if error is not None or found is None:
        assert error is not None
        if code == REFUSED:
            print(f"error: {error}", file=sys.stderr)
        else:
            traceback.print_exception(error)
            print(f"failed: {run_dir.path}", file=sys.stderr)
        return code
    sync_line = _track(probe, run_dir, found)
    print_found(console, found)
    for line in probe.left_out:
        console.print(f"left out: {line}", style="yellow", markup=False)
    for label, place in (("result", run_dir.path / RESULT_FILE), ("plot", run_dir.path / PLOT_FILE)):
        console.print(f"{label:<8}{place}", markup=False)
    if sync_line is not None:
        console.print(f"upload  {sync_line}", markup=False)
    return OK


def _facts(setup: Setup) -> dict[str, Any]:
    config, weights = setup.probe.config, setup.weights
    return {
        "machine": machine_card(config.device, packages=("ringkv", "model", "scripts")),
        "model/parameters": weights.model.config.num_parameters,
        "model/weights": "random" if weights.path is None else str(weights.path),
        "model/trained_with": weights.trained_with,
        "model/differs_from_training": build.differences_from_training(config, weights),
    }


def _write(probe: Probe, run_dir: RunDir, found: Found, facts: dict[str, Any]) -> None:
    result = {
        "probe": probe.name,
        "version": VERSION,
        "settings": found.settings,
        "summary": found.summary,
        "series": found.series,
        "grids": found.grids,
        "tables": found.tables,
        "notes": found.notes,
        "left_out": probe.left_out,
        "intervals": DEFINITION,
        "config": probe.config,
        **facts,
    }
    replace_text(run_dir.path / RESULT_FILE, dumps_strict(result, indent=2) + "\n")
    replace_text(run_dir.path / TABLES_FILE, tables_text(found))
    title = "; ".join(f"{key}: {value}" for key, value in found.settings.items() if key in ("kv", "weights", "loops"))
    probe_png(run_dir.path / PLOT_FILE, found, f"probe={probe.name}  {title}")


def _track(probe: Probe, run_dir: RunDir, found: Found) -> str | None:
    """The copy in W&B: curves by their x, the summary and the picture; the line that uploads an offline run."""
    tracker = open_tracker(probe.config, run_dir)
    with tracker:
        for step, row in tracked_rows(found.series):
            tracker.log(step, row)
        tracker.summary(found.summary)
        tracker.media(image=run_dir.path / PLOT_FILE)
        return tracker.finish()


def _print_header(console: Console, setup: Setup) -> None:
    config, model = setup.probe.config, model_config(setup.probe.config)
    console.print(
        f"probe   {config.probe.name}: model={model.name}, {model.num_parameters / 1e6:.2f} M parameters, "
        f"kv={config.kv.strategy}, {config.device}, {config.dtype}",
        markup=False,
    )
    if not setup.trained:
        console.print(
            "weights random: what a model recalls or predicts here says nothing", style="yellow", markup=False
        )
    else:
        console.print(f"weights {setup.weights.path}", markup=False)
