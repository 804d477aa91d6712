"""The report, section by section. A section without data is left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ringkv.harness.columns import SUMMARY_COLUMNS
from ringkv.harness.records import STRIP_FILE
from scripts.app.errors import BadInput
from scripts.app.html import charts, curves, horizons, tables
from scripts.app.html.comparisons import comparison_section
from scripts.app.html.probes import probe_section
from scripts.app.html.runs import Points
from scripts.app.html.sources import Found, Sources
from scripts.app.html.spec import Column, Figure, Gallery, Row, Section, Strip, Table
from scripts.app.html.stats import DEFINITION

STRIPS_AT_EACH_END = 2

T = TypeVar("T")


def sections_of(sources: Sources) -> list[Section]:
    """Every section that has something to show, in reading order."""
    points = sources.points
    found = [
        Section("strategies", "Strategies side by side", charts.side_by_side(points)),
        Section("fronts", "What trades off against what", charts.fronts(points)),
        Section("knobs", "What each knob does", charts.against_knobs(points)),
        _grids(points),
        Section("frames", "Over the frames of a rollout", curves.frame_figures(points)),
        *_each(comparison_section, sources.comparisons),
        *_each(probe_section, sources.probes),
        _horizons(sources),
        _strips(points),
        Section("points", "Configurations", _present(tables.point_table(points))),
        Section("failed-points", "Failed and infeasible", _present(tables.failed_table(points))),
        _conditions(points),
        _meanings(points),
    ]
    return [section for section in found if section.items]


def figures_of(sections: Sequence[Section]) -> list[Figure]:
    """All figures, in order."""
    return [item for section in sections for item in section.items if isinstance(item, Figure)]


def tables_of(sections: Sequence[Section]) -> list[Table]:
    """All tables, in order."""
    return [item for section in sections for item in section.items if isinstance(item, Table)]


def _each(make: Callable[[int, str, Mapping[str, Any]], T], found: Found) -> list[T]:
    """What ``make`` makes of each file, numbered from 1. ``BadInput`` names one that has not the keys it should."""
    made = []
    for number, (where, result) in enumerate(found, 1):
        try:
            made.append(make(number, where, result))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise BadInput(f"{where}: not as this release writes it ({type(error).__name__}: {error})") from error
    return made


def _present(table: Table | None) -> list[Table]:
    return [table] if table is not None and table.rows else []


def _grids(points: Points) -> Section:
    found = charts.grids(points)
    total = charts.number_of_settings(points)
    intro = f"The first {len(found)} of {total} settings of the other knobs." if total > len(found) else ""
    return Section("grid", "What ran, and what did not", found, intro)


def _horizons(sources: Sources) -> Section:
    found = horizons.maps_of_runs(sources.points)
    found += _each(horizons.map_of_file, sources.horizons)
    return Section("horizons", "What a frame sees of its past", found)


def _strips(points: Points) -> Section:
    strips = [
        Strip(point.label, path, point.tags)
        for point in points.measured
        if (path := point.runs[0].folder / STRIP_FILE).is_file()
    ]
    total = len(strips)
    if total > 2 * STRIPS_AT_EACH_END:
        strips = strips[:STRIPS_AT_EACH_END] + strips[-STRIPS_AT_EACH_END:]
    some = f"The first and last {STRIPS_AT_EACH_END} of {total} configurations. " if total > len(strips) else ""
    caption = (
        "First session of the first repeat. Above the recording, below the rollout; the frames of context are given, "
        f"the others generated. {some}{points.conditions(points.measured)}"
    )
    return Section("strips", "Rollouts to look at", [Gallery(caption, strips)] if strips else [])


def _conditions(points: Points) -> Section:
    found = [] if not points.machines else [tables.machine_table(points)]
    found += _present(tables.common_table(points))
    found += _present(tables.run_table(points))
    return Section("conditions", "Machine, conditions, single runs", found)


def _meanings(points: Points) -> Section:
    if not points.all:
        return Section("meanings", "", [])
    rows = [Row(["median, interval, n", DEFINITION])]
    rows += [Row([name, column.meaning]) for name, column in SUMMARY_COLUMNS.items() if "/" in name]
    caption = "Names as they stand in summary.json."
    table = Table("meanings_table", "Terms", caption, [Column("name"), Column("what it is")], rows, folded=True)
    return Section("meanings", "What the numbers are", [table])
