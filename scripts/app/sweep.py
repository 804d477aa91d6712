"""A sweep as a whole: its folder, what it keeps of an earlier attempt, and what it shows at the end. No torch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ringkv.harness.tables import format_value
from scripts.app.compose import Composed
from scripts.app.errors import BadInput
from scripts.app.sweep_dry import show_points
from scripts.app.sweep_point import Sweep, run_point
from scripts.app.sweep_record import SWEEP_FILE, begin, finish, held, read_rows

OK, FAILED = 0, 1

JOBLIB_DEFAULTS = ("hydra.launcher.n_jobs=2", "hydra.launcher.batch_size=1")
"""In place of a process per core, each with ``threads`` threads, and of points that wait for others of their batch."""

Task = Callable[[DictConfig], Any]

_SHOWN = (
    ("throughput/frames_per_s", "frames/s"),
    ("latency/frame_ms_p50", "p50"),
    ("memory/kv_bytes", "KV"),
)


def run_sweep(composed: Composed, overrides: Sequence[str], launch: Callable[[Sequence[str], Task], int]) -> int:
    """Run the points, or list them where a dry run is asked for; the exit code.

    overrides: those of the command line. launch: hands a command line and a task function to Hydra; an exit code.
    """
    resume, dry_run = composed.master.sweep.resume, composed.master.sweep.dry_run
    if resume is not None and not composed.multirun:
        raise BadInput(f"sweep.resume={resume}: a sweep needs -m; expected the command of that sweep")
    shown, rows = _folder(composed.master, overrides)
    folder = shown.absolute()
    if dry_run:
        return show_points(composed.points, rows, folder)
    rows = {job: row for job, row in rows.items() if job < len(composed.points)}
    note = _note(composed.master)
    with _kept_for_this(folder, f"sweep.resume={resume}" if resume else f"hydra.sweep.dir={shown}"):
        launcher = composed.master.hydra.runtime.choices["hydra/launcher"]
        begin(folder, launcher=launcher, note=note, rows=rows)
        if note is not None:
            print(f"note    {note}")
        sweep = Sweep.here(folder, resumes=resume is not None, seeks=composed.searched)
        defaults = JOBLIB_DEFAULTS if launcher == "joblib" else ()
        own = [*defaults, *composed.added, *overrides, f"hydra.sweep.dir={_quoted(str(folder))}"]
        code = launch(["--multirun", *own], functools.partial(run_point, sweep=sweep))
        if code != OK:
            return code
        return _show(finish(folder), shown / SWEEP_FILE)


def _folder(master: DictConfig, overrides: Sequence[str]) -> tuple[Path, dict[int, dict[str, Any]]]:
    """The folder of the sweep, as it was given, and what an earlier attempt in it has, by job."""
    resume = master.sweep.resume
    if resume is None:
        folder = Path(master.hydra.sweep.dir)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            # The points of two sweeps have the same names.
            raise BadInput(f"hydra.sweep.dir={folder}: already holds something; expected a new or empty path")
        return folder, {}
    if any(override.startswith("hydra.sweep.dir=") for override in overrides):
        raise BadInput(
            f"hydra.sweep.dir={master.hydra.sweep.dir}: sweep.resume={resume} names it; expected one of them"
        )
    folder = Path(resume).expanduser()
    try:
        return folder, read_rows(folder)
    except (OSError, ValueError) as error:
        raise BadInput(f"sweep.resume={resume}: no {SWEEP_FILE} to read there; expected a sweep's folder") from error


@contextlib.contextmanager
def _kept_for_this(folder: Path, given: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(held(folder))
        except BlockingIOError as error:
            raise BadInput(f"{given}: a sweep is running there; expected to wait for its end") from error
        except OSError as error:
            raise BadInput(f"{given}: {error.strerror}; expected a folder that can be made") from error
        yield


def _note(master: DictConfig) -> str | None:
    """What a reader of the times has to know of the launcher."""
    launcher = master.hydra.runtime.choices["hydra/launcher"]
    if launcher == "basic" or master.hydra.launcher.get("n_jobs") == 1:
        return None
    return f"hydra/launcher={launcher}: points run side by side and may share cores, so their times do not compare"


def _quoted(text: str) -> str:
    """As a value on Hydra's command line, whatever stands in it."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _show(content: dict[str, Any], path: Path) -> int:
    """Print the table and the counts; the exit code."""
    console = Console()
    console.print(_table(content["rows"]))
    counts = content["counts"]
    for line in (f"{counts['ok']} ok, {counts['failed']} failed", f"rows    {path}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return FAILED if counts["failed"] else OK


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    common = set.intersection(*(set(row["overrides"]) for row in rows)) if len(rows) > 1 else set()
    table = Table(title="sweep", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("point", "overrides", "status", "steps"):
        # What a point is must stay readable on 80 columns: it folds, and is never cut off.
        table.add_column(heading, overflow="fold", no_wrap=heading != "overrides")
    for _, heading in _SHOWN:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        values = [" ".join(format_value(key, row[key])).removesuffix(heading).strip() for key, heading in _SHOWN]
        style = None if row["status"] == "ok" else "red"
        own = " ".join(override for override in row["overrides"] if override not in common)
        table.add_row(str(row["job"]), own, row["reason"] or row["status"], str(row["steps"]), *values, style=style)
    return table
