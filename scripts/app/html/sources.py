"""What lies in the folders that a report is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringkv.harness.records import read_object
from scripts.app.collect import collect
from scripts.app.errors import BadInput
from scripts.app.html.runs import Points, points_of

COMPARE_FILE, PROBE_FILE, HORIZON_PATTERN = "compare.json", "probe.json", "*.horizon.json"

Found = Sequence[tuple[str, dict[str, Any]]]
"""Folder or file as it was named, and what it holds."""


@dataclass(frozen=True)
class Sources:
    """rows: of ``collect``, less those that comparisons and probes report themselves. The others: by where they lay."""

    folders: Sequence[str]
    rows: Sequence[dict[str, Any]]
    points: Points
    comparisons: Found
    probes: Found
    horizons: Found


def read_sources(folders: Sequence[str]) -> Sources:
    """Read everything that can be reported. ``BadInput`` for what is no folder, a broken file, and nothing at all."""
    roots = [Path(folder) for folder in dict.fromkeys(folders)]
    rows = collect(folders)
    theirs = [path.parent.resolve() for name in (COMPARE_FILE, PROBE_FILE) for path in _files(roots, name)]
    rows = [row for row in rows if not _inside(Path(row["run_dir"]).resolve(), theirs)]
    found = [
        [(str(path if pattern == HORIZON_PATTERN else path.parent), _read(path)) for path in _files(roots, pattern)]
        for pattern in (COMPARE_FILE, PROBE_FILE, HORIZON_PATTERN)
    ]
    if not rows and not any(found):
        raise BadInput(
            f"{' '.join(folders)}: nothing to report; expected folders of runs, sweeps, comparisons or probes, or "
            f"{HORIZON_PATTERN}"
        )
    return Sources(folders, rows, points_of(rows), *found)


def _files(roots: Sequence[Path], pattern: str) -> Iterator[Path]:
    """Each once, also where one root lies in another."""
    seen = {path.resolve(): path for root in roots for path in sorted(root.rglob(pattern))}
    return iter(seen.values())


def _inside(path: Path, folders: Sequence[Path]) -> bool:
    return any(path == folder or folder in path.parents for folder in folders)


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read ({error})") from error
