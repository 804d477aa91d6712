"""One point of a sweep: Hydra's task function. Whatever happens to the point, its row is in sweep.json afterwards.

A point runs in a child process of its own, which starts with nothing that an earlier point left behind: no peak of
memory, compile cache, random state or open W&B run. This module runs in whatever process Hydra's launcher chose, and
imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from ringkv.harness.machine import package_hash
from ringkv.harness.records import (
    FRAMES_FILE,
    SUMMARY_FILE,
    RunDir,
    dumps_strict,
    error_line,
    read_frames,
    replace_text,
    to_plain,
)
from scripts.app.check import effective
from scripts.app.compose import typed
from scripts.app.errors import BadInput
from scripts.app.schema import RolloutConfig
from scripts.app.supervise import exit_text, supervise
from scripts.app.sweep_record import PACKAGES, ROW_COLUMNS, ROW_METRICS, hash_config, read_rows, store
from scripts.app.sweep_resume import can_go_on, is_done, make_room, reason_of, summary_of

LOG_FILE = "output.log"
CHILD_COMMAND = (sys.executable, "-P", "-m", "scripts.app.child")
"""-P: the launch folder may hold a ``scripts`` of its own."""

_MEMORY_SHARE = 0.8
_REFUSED_CODE = 2


class PointFailed(Exception):
    """What an optimiser is told of a point that has no objectives."""


@dataclass(frozen=True)
class Sweep:
    """What each point knows of its sweep, in whatever process it runs.

    folder: of the sweep; absolute. launch_folder: where the command was given, from which paths of the config count.
    resumes: whether the folder holds an earlier attempt. seeks: whether the sweeper wants the objectives of a point.
    host, pid, started: the sweep's process.
    """

    folder: Path
    launch_folder: Path
    resumes: bool
    seeks: bool
    host: str
    pid: int
    started: float

    @classmethod
    def here(cls, folder: Path, *, resumes: bool, seeks: bool) -> Self:
        """A sweep that this process runs."""
        this = psutil.Process()
        return cls(folder, Path.cwd(), resumes, seeks, socket.gethostname(), this.pid, this.create_time())

    def wanted(self) -> bool:
        """Whether the sweep's process is there. On another machine the scheduler answers for it."""
        if self.host != socket.gethostname() or self.pid == os.getpid():
            return True
        try:
            return psutil.Process(self.pid).create_time() == self.started
        except psutil.Error:
            return False


def own_config(config: RolloutConfig) -> RolloutConfig:
    """The config of one point, as one of its own: a repeat's seed is the given one plus the number of the repeat."""
    seed = config.seed + config.repeat if config.repeats > 1 else config.seed
    return dataclasses.replace(config, seed=seed, repeats=1, sweep=dataclasses.replace(config.sweep, resume=None))


def memory_limit(config: RolloutConfig) -> float:
    """Resident bytes that the processes of a point may hold together."""
    memory_gib = config.sweep.memory_gib
    return _MEMORY_SHARE * psutil.virtual_memory().total if memory_gib is None else memory_gib * 1024**3


def run_point(node: DictConfig, sweep: Sweep) -> tuple[float, float] | None:
    """Run one point, or keep what an earlier attempt has of it; its row is in sweep.json and on the console.

    Returns frames per second and MiB of KV where the sweep seeks them (``PointFailed`` where there are none).
    """
    _end_unless_wanted(sweep)
    os.chdir(sweep.launch_folder)
    row = _row_of(node, sweep)
    _end_unless_wanted(sweep)
    if not sweep.seeks:
        return None
    if row["status"] != "ok":
        raise PointFailed(row["error"])
    return row["throughput/frames_per_s"], row["memory/kv_bytes"] / 1024**2


def _end_unless_wanted(sweep: Sweep) -> None:
    """End a worker whose sweep was killed: nobody reads what it returns, and it would wait for more, for minutes."""
    if not sweep.wanted():
        os._exit(1)


def _row_of(node: DictConfig, sweep: Sweep) -> dict[str, Any]:
    hydra_config = HydraConfig.get()
    path, job = Path(hydra_config.runtime.output_dir), int(hydra_config.job.num)
    row: dict[str, Any] = dict.fromkeys((*ROW_COLUMNS, *ROW_METRICS))
    row |= {"job": job, "overrides": list(hydra_config.overrides.task), "run_dir": str(path), "steps": 0}
    row |= {"status": "failed", "source_hash": package_hash(PACKAGES)}
    asked: Any = node
    try:
        asked = config = own_config(typed(node))
        row["repeat"] = config.repeat
        row["overrides"] = _own_overrides(row["overrides"], config, repeated=node.repeats > 1)
        config = effective(config)
        config.tracking.group = config.tracking.group or sweep.folder.name
        row["config_hash"] = hash_config(config)
        old = read_rows(sweep.folder).get(job) if sweep.resumes else None
        if old is not None and is_done(old, row["config_hash"], row["source_hash"], path):
            row |= old | {"run_dir": str(path)}
        else:
            continues = sweep.resumes and can_go_on(path, row)
            if not continues:
                make_room(path, sweep.folder)
            name = " ".join([str(job), *row["overrides"]])
            row |= _run_child(config, path, sweep, name=name, continues=continues)
    except Exception as error:
        reason = "refused" if isinstance(error, BadInput) else "crashed"
        row |= {"reason": reason, "error": error_line(error), "traceback": traceback.format_exc()}
        _record_refusal(path, sweep.folder, asked, error, reason)
    except BaseException as error:  # Ctrl-C, or whatever else ends the sweep
        row |= {"reason": "interrupted", "error": error_line(error), "steps": _steps(path)}
        raise
    finally:
        store(sweep.folder, row)
        outcome = row["status"] if row["error"] is None else f"{row['status']}: {row['error']}"
        print(f"[{job}] {' '.join(row['overrides'])}: {outcome}", flush=True)
    return row


def _own_overrides(overrides: list[str], config: RolloutConfig, *, repeated: bool) -> list[str]:
    """The overrides that give this point in a run of its own. repeated: whether it is one of several repeats."""
    replaced = ("sweep.resume=", "repeats=", "seed=") if repeated else ("sweep.resume=",)
    own = [override for override in overrides if not override.startswith(replaced)]
    return [*own, "repeats=1", f"seed={config.seed}"] if repeated else own


# -- the child ----------------------------------------------------------------------------------------------------


def _run_child(config: RolloutConfig, path: Path, sweep: Sweep, *, name: str, continues: bool) -> dict[str, Any]:
    """The part of the row that a child process decides."""
    request = {"config": to_plain(config), "run_dir": str(path), "name": name, "continues": continues}
    path.mkdir(parents=True, exist_ok=True)
    (path / SUMMARY_FILE).unlink(missing_ok=True)  # of the attempt that it continues: what is there later is its own
    end = supervise(
        CHILD_COMMAND,
        dumps_strict(request),
        path / LOG_FILE,
        timeout_s=config.sweep.timeout_s,
        memory_bytes=memory_limit(config),
        wanted=sweep.wanted,
    )
    summary = summary_of(path)
    reason, error = end.killed_for or (None, summary.get("error"))
    if error is None and (end.exit_code != 0 or summary.get("status") != "ok"):
        error = f"the process ended with {exit_text(end.exit_code)}; see {LOG_FILE}"
    if error is not None:
        reason = reason or ("refused" if end.exit_code == _REFUSED_CODE else reason_of({"error": error}))
        summary = {"traceback": None} | summary | {"status": "failed", "reason": reason, "error": error}
        replace_text(path / SUMMARY_FILE, dumps_strict(summary, indent=2) + "\n")
    machine = summary.get("machine") or {}
    return {
        "status": "ok" if error is None else "failed",
        "reason": reason,
        "error": error,
        "traceback": summary.get("traceback"),
        "exit_code": end.exit_code,
        "wall_s": end.wall_s,
        "peak_rss_bytes": end.peak_rss_bytes,
        "steps": _steps(path),
        **({"source_hash": machine["source_hash"]} if "source_hash" in machine else {}),
        **{key: summary.get(key) for key in ROW_METRICS},
    }


def _record_refusal(path: Path, sweep_folder: Path, asked: Any, error: Exception, reason: str) -> None:
    """A failed run in the folder of a point that never started; a folder that cannot be written to stays as it is.

    So does one that says the same already.
    """
    if summary_of(path).get("error") == error_line(error):
        return
    with contextlib.suppress(OSError, ValueError):
        make_room(path, sweep_folder)
        with RunDir.create(path) as run_dir:
            run_dir.write_config(asked)
            run_dir.write_summary({"reason": reason}, error=error)


def _steps(path: Path) -> int:
    return len(read_frames(path).rows) if (path / FRAMES_FILE).exists() else 0
