"""The files of a report: the page, a PNG and a CSV of each figure, a CSV of each table; and their copy in W&B."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from ringkv.harness.records import replace_text
from ringkv.harness.tracking import Tracker
from scripts.app.html.draw import write_png
from scripts.app.html.page import render
from scripts.app.html.sections import figures_of, tables_of
from scripts.app.html.sources import Sources
from scripts.app.html.spec import Figure, Section, Sheet, Table

PAGE_FILE, FILES_FOLDER = "report.html", "figures"


def write_files(sources: Sources, sections: Sequence[Section], folder: Path) -> list[Path]:
    """Write the page and, below ``figures``, the files of its figures and tables; all paths, the page first.

    Files of figures that an earlier report left there and this one does not have are removed.
    """
    files = folder / FILES_FOLDER
    files.mkdir(parents=True, exist_ok=True)
    written = [folder / PAGE_FILE]
    for figure in figures_of(sections):
        write_png(figure, files / f"{figure.name}.png")
        written.append(files / f"{figure.name}.png")
    for item in _sheets(sections):
        replace_text(files / f"{item.name}.csv", sheet_text(item.sheet()))
        written.append(files / f"{item.name}.csv")
    replace_text(folder / PAGE_FILE, render(sources, sections, FILES_FOLDER))
    for stale in {*files.glob("*.png"), *files.glob("*.csv")} - set(written):
        stale.unlink()
    return written


def _sheets(sections: Sequence[Section]) -> list[Figure | Table]:
    return [*figures_of(sections), *tables_of(sections)]


def sheet_text(sheet: Sheet) -> str:
    """Rows as CSV, numbers with all their digits, an empty field for None."""
    columns, rows = sheet
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([["" if cell is None else cell for cell in row] for row in rows])
    return text.getvalue()


def track(tracker: Tracker, sections: Sequence[Section], folder: Path) -> None:
    """Log every table and every figure, the latter as picture and as table."""
    pictures = {figure.name: folder / FILES_FOLDER / f"{figure.name}.png" for figure in figures_of(sections)}
    tracker.tables({item.name: item.sheet() for item in _sheets(sections)}, pictures)
