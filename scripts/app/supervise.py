"""The parent's side of a sweep: one child process per point, watched, and always a row at the end.

A child starts with nothing that an earlier point left behind: no peak of memory, compile cache, random state or open
W&B run. The config goes to its standard input, which then stays open as a lifeline: it closes when this process ends,
however it ends, and the child ends with it.

Memory is watched, not capped: RLIMIT_AS counts address space, of which torch reserves far more than it touches (on CUDA
hundreds of GiB), so the resident size of the child and its descendants is read several times a second.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from ringkv.harness.records import (
    FRAMES_FILE,
    SUMMARY_FILE,
    RunDir,
    dumps_strict,
    error_line,
    read_frames,
    read_summary,
    replace_text,
    to_plain,
)
from scripts.app.check import effective
from scripts.app.compose import typed
from scripts.app.schema import RolloutConfig

LOG_FILE = "output.log"
CHILD_COMMAND = (sys.executable, "-P", "-m", "scripts.app.child")
"""-P: the launch folder may hold a ``scripts`` of its own."""

ROW_COLUMNS: Mapping[str, str] = {
    "job": "number of the point, from 0, and name of its folder",
    "overrides": "what the point was asked for, as on the command line",
    "run_dir": "its folder",
    "status": "ok or failed",
    "error": "why it failed, one line; null when ok",
    "traceback": "where it failed; null when ok or when the process was ended from outside",
    "exit_code": "of its process, negative for a signal; null when none was started",
    "wall_s": "seconds from start to end of its process",
    "peak_rss_bytes": "highest resident bytes of its process and descendants, as far as it was watched",
    "steps": "rows in its frames.jsonl",
}
"""Columns of a row of sweep.json; ``ROW_METRICS`` of the point's summary follow, null where there is none."""

ROW_METRICS = (
    "throughput/frames_per_s",
    "latency/frame_ms_p50",
    "latency/frame_ms_p95",
    "memory/kv_bytes_predicted",
    "memory/kv_bytes",
    "memory/peak_rss_bytes",
)
_MEMORY_SHARE = 0.8


@dataclass(frozen=True)
class ChildEnd:
    """How a child ended. killed_for: why it was ended from here, None if it ended by itself."""

    exit_code: int
    killed_for: str | None
    wall_s: float
    peak_rss_bytes: int


def run_point(node: DictConfig) -> dict[str, Any]:
    """Hydra's task function in a sweep: run one point in a child process. Returns its row, whatever happens."""
    hydra_config = HydraConfig.get()
    path = Path(hydra_config.runtime.output_dir)
    job, overrides = int(hydra_config.job.num), list(hydra_config.overrides.task)
    row: dict[str, Any] = dict.fromkeys((*ROW_COLUMNS, *ROW_METRICS))
    row |= {"job": job, "overrides": overrides, "run_dir": str(path), "status": "failed", "steps": 0}
    try:
        config = effective(typed(node))
        config.tracking.group = config.tracking.group or path.parent.name
        row |= _run_child(config, path, name=" ".join([str(job), *overrides]))
    except Exception as error:
        row |= {"error": error_line(error), "traceback": traceback.format_exc()}
        _record_refusal(path, node, error)
    return row


def supervise(
    command: Sequence[str],
    request: str,
    log: Path,
    *,
    timeout_s: float,
    memory_bytes: float,
    grace_s: float = 5.0,
    poll_s: float = 0.1,
) -> ChildEnd:
    """Run ``command`` with the line ``request`` on its standard input and its output in ``log``, until it ends.

    After ``timeout_s`` seconds it is interrupted, as by Ctrl-C, and ``grace_s`` seconds later killed; above
    ``memory_bytes`` resident it is killed at once. Its descendants go with it, also if this call is interrupted.
    """
    started = time.monotonic()
    peak, killed_for = 0, None
    with (
        open(log, "ab") as output,
        # A session of its own: Ctrl-C reaches the child through here only, and its descendants can be killed with it.
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        ) as child,
    ):
        assert child.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it died at once: its exit code and log say why
                child.stdin.write(request.encode() + b"\n")
                child.stdin.flush()
            while child.poll() is None:
                rss = _tree_rss_bytes(child.pid)
                peak = max(peak, rss)
                if rss > memory_bytes:
                    killed_for = f"memory: {rss} resident bytes, above sweep.memory_gib ({memory_bytes:.0f} bytes)"
                    break
                if time.monotonic() - started > timeout_s:
                    killed_for = f"timeout: longer than sweep.timeout_s={timeout_s:g}"
                    _end(child, grace_s)
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(poll_s)
        except BaseException:
            _end(child, grace_s)
            raise
        finally:
            _kill_group(child)
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
            child.wait()
    return ChildEnd(child.returncode, killed_for, time.monotonic() - started, peak)


def _run_child(config: RolloutConfig, path: Path, *, name: str) -> dict[str, Any]:
    """The part of the row that a child process decides."""
    request = dumps_strict({"config": to_plain(config), "run_dir": str(path), "name": name})
    memory_gib = config.sweep.memory_gib
    memory_bytes = _MEMORY_SHARE * psutil.virtual_memory().total if memory_gib is None else memory_gib * 1024**3
    path.mkdir(parents=True, exist_ok=True)
    end = supervise(
        CHILD_COMMAND, request, path / LOG_FILE, timeout_s=config.sweep.timeout_s, memory_bytes=memory_bytes
    )
    summary = _summary_of(path)
    error = end.killed_for or summary.get("error")
    if error is None and (end.exit_code != 0 or summary.get("status") != "ok"):
        error = f"the process ended with {_exit_text(end.exit_code)}; see {LOG_FILE}"
    if error is not None and summary.get("status") != "failed":
        summary_text = dumps_strict({"status": "failed", "error": error, "traceback": None}, indent=2)
        replace_text(path / SUMMARY_FILE, summary_text + "\n")
    return {
        "status": "ok" if error is None else "failed",
        "error": error,
        "traceback": summary.get("traceback"),
        "exit_code": end.exit_code,
        "wall_s": end.wall_s,
        "peak_rss_bytes": end.peak_rss_bytes,
        "steps": len(read_frames(path).rows) if (path / FRAMES_FILE).exists() else 0,
        **{key: summary.get(key) for key in ROW_METRICS},
    }


def _record_refusal(path: Path, node: DictConfig, error: Exception) -> None:
    """A failed run in the folder of a point that never started; a folder that cannot be written to stays as it is."""
    with contextlib.suppress(OSError, ValueError), RunDir.create(path) as run_dir:
        run_dir.write_config(node)
        run_dir.write_summary({}, error=error)


def _summary_of(path: Path) -> dict[str, Any]:
    try:
        return read_summary(path)
    except (OSError, ValueError):
        return {}


def _end(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """Interrupt the child and give it ``grace_s`` seconds to record that."""
    child.send_signal(signal.SIGINT)  # not to its descendants: its W&B service has to note the failure
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(grace_s)


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def _tree_rss_bytes(pid: int) -> int:
    """Resident bytes of a process and its descendants; pages that they share count once for each."""
    total = 0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += int(member.memory_info().rss)
    return total


def _exit_text(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"signal {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"signal {-exit_code}"
