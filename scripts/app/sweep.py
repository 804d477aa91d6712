"""What a sweep leaves behind: sweep.json with a row per point, and a table. A Hydra callback."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ringkv.harness.records import dumps_strict, replace_text
from ringkv.harness.tables import format_value

SWEEP_FILE = "sweep.json"
_SHOWN = (
    ("throughput/frames_per_s", "frames/s"),
    ("latency/frame_ms_p50", "p50"),
    ("memory/kv_bytes", "KV"),
)


class SweepReport(Callback):
    """Collects the rows that ``supervise.run_point`` returns; exits 1 at the end if a point failed.

    sweep.json is ``{"finished", "counts", "rows"}``, rewritten as a whole after every point, so that a sweep that is
    interrupted keeps what it did, with ``finished`` false.
    """

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._console = Console()

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Add the row of a point. A single run has none."""
        row = job_return.return_value
        if not isinstance(row, dict):
            return
        self._rows.append(row)
        outcome = row["status"] if row["error"] is None else f"{row['status']}: {row['error']}"
        self._say(f"[{row['job']}] {' '.join(row['overrides'])}: {outcome}")
        self._write(Path(config.hydra.sweep.dir), finished=False)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the table and the counts."""
        path = self._write(Path(config.hydra.sweep.dir), finished=True)
        self._console.print(self._table())
        counts = self._counts()
        self._say(f"{counts['ok']} ok, {counts['failed']} failed")
        self._say(f"rows    {path}")
        if counts["failed"]:
            sys.exit(1)

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _counts(self) -> dict[str, int]:
        counts = Counter(row["status"] for row in self._rows)
        return {status: counts[status] for status in ("ok", "failed")}

    def _write(self, sweep_dir: Path, *, finished: bool) -> Path:
        path = sweep_dir / SWEEP_FILE
        content = {"finished": finished, "counts": self._counts(), "rows": self._rows}
        replace_text(path, dumps_strict(content, indent=2) + "\n")
        return path

    def _table(self) -> Table:
        common = set.intersection(*(set(row["overrides"]) for row in self._rows)) if len(self._rows) > 1 else set()
        table = Table(title="sweep", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for heading in ("point", "overrides", "status", "steps"):
            # What a point is must stay readable on 80 columns: it folds, and is never cut off.
            table.add_column(heading, overflow="fold", no_wrap=heading != "overrides")
        for _, heading in _SHOWN:
            table.add_column(heading, justify="right", no_wrap=True)
        for row in self._rows:
            values = [" ".join(format_value(key, row[key])).removesuffix(heading).strip() for key, heading in _SHOWN]
            style = None if row["status"] == "ok" else "red"
            own = " ".join(override for override in row["overrides"] if override not in common)
            table.add_row(str(row["job"]), own, row["status"], str(row["steps"]), *values, style=style)
        return table
