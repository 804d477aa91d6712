"""What the tests of sweeps share: stand-ins for the children of a sweep, and what it leaves behind."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from ringkv.harness.records import RunDir
from scripts.app import sweep_dry, sweep_point
from scripts.app.supervise import ChildEnd
from scripts.app.sweep_record import SWEEP_FILE
from tests.cli_tools import TINY

SWEEP_TINY = [override for override in TINY if not override.startswith(("ring_frames", "tracking", "num_frames"))]


class Children:
    """Takes the place of ``supervise``: leaves the record that a child would, and remembers what was asked for.

    ends: by the ring_frames of a point, what happens in place of success: an error that the child records, a
    ``ChildEnd`` without a record, or an exception raised here. source: stands for the hash of the source files.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ends: Mapping[int, Any] | None = None) -> None:
        self.ends = dict(ends or {})
        self.source = "source"
        self.requests: list[dict[str, Any]] = []
        self.limits: list[dict[str, Any]] = []
        self.logs: list[Path] = []
        monkeypatch.setattr(sweep_point, "supervise", self)
        for module in (sweep_point, sweep_dry):
            monkeypatch.setattr(module, "package_hash", lambda _: self.source)

    def __call__(self, command: Sequence[str], request: str, log: Path, **limits: Any) -> ChildEnd:
        asked = json.loads(request)
        self.requests.append(asked)
        self.limits.append(limits)
        self.logs.append(log)
        end = self.ends.get(asked["config"]["ring_frames"])
        if isinstance(end, ChildEnd):
            return end
        claim = RunDir.reopen if asked["continues"] else RunDir.create
        with claim(asked["run_dir"]) as run_dir:
            if asked["continues"]:
                run_dir.continue_run()
            run_dir.write_config(asked["config"])
            run_dir.write_segments([{"segment": 0, "source_hash": self.source}])
            log.write_text(f"{len(self.requests)}\n")
            if isinstance(end, KeyboardInterrupt):
                raise end
            metrics = {"machine": {"source_hash": self.source}, "throughput/frames_per_s": float(len(self.requests))}
            run_dir.write_summary(metrics, error=end)
        return ChildEnd(0 if end is None else 1, None, 1.0, 1)

    def ran(self) -> list[int]:
        """The ring_frames of the points that were started since the last call, in order."""
        ring_frames = [request["config"]["ring_frames"] for request in self.requests]
        self.requests.clear()
        return ring_frames


def sweep_json(folder: Path) -> dict[str, Any]:
    """sweep.json, strictly read."""
    return json.loads((folder / SWEEP_FILE).read_text(), parse_constant=lambda c: pytest.fail(f"{c} in sweep.json"))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of a sweep."""
    return sweep_json(folder)["rows"]


def wait_until(condition: Any, seconds: float = 60) -> None:
    """Look again and again until ``condition()`` holds; fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited for {seconds} seconds"
        time.sleep(0.05)


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet counts as ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
