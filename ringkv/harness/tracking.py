"""A run's mirror in Weights & Biases: one init, one finish, every call with an explicit step.

Offline is the default: no key, no network, no waiting; ``wandb sync DIR`` uploads it later. The files of the run
directory are the record; W&B gets a copy, so a run never stops because W&B is absent.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ringkv.harness.records import error_line, to_plain

TRACKING_MODES = ("offline", "online", "disabled")

_FRAME_METRICS = ("phase", "sessions", "latency_ms", "warmup", "kv_bytes", "kv_in_use_bytes", "rss_bytes")

# W&B looks at the process, its git checkout, its packages and its console by default. The run directory says all of
# that itself (machine card, config), and each costs start-up time or a child process.
_QUIET_SETTINGS: Mapping[str, Any] = {
    "console": "off",
    "silent": True,
    "symlink": False,
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
}

_log = logging.getLogger(__name__)


def start_tracker(
    mode: str,
    *,
    project: str,
    group: str | None,
    name: str | None,
    config: Any,
    directory: str | os.PathLike[str],
    last_step: int | None = None,
    wandb_module: Any = None,
) -> Tracker:
    """Open the one W&B run of this run, or of the segment in which it is resumed; the caller finishes it.

    mode: ``offline``, ``online`` or ``disabled`` (then nothing is imported and every method does nothing).
    project, group, name: where W&B files it; a sweep's points share a ``group``, each with a run and id of its own.
    config: any nested containers that ``to_plain`` takes. directory: the run directory; all files go below its
    ``wandb`` folder. last_step: the last step that an earlier segment logged; None without one. wandb_module: what to
    call instead of the ``wandb`` package.

    ``ValueError`` for any other mode, and as ``to_plain``. Where the ``wandb`` package is missing, or cannot start
    an offline run, one warning says so and the tracker is a disabled one; an online run that cannot start raises.
    """
    if mode not in TRACKING_MODES:
        raise ValueError(f"tracking mode {mode!r}: expected one of {', '.join(TRACKING_MODES)}")
    plain_config = to_plain(config)
    if mode == "disabled":
        return Tracker(None, None, offline=False, last_step=last_step)
    # Not left to W&B: a sweep's points are told apart by their ids, whatever seeds they share.
    run_id = uuid.uuid4().hex[:12]
    with _environment_defaults(WANDB_ERROR_REPORTING="false", WANDB_CACHE_DIR=str(Path(directory) / "wandb" / "cache")):
        try:
            wandb = importlib.import_module("wandb") if wandb_module is None else wandb_module
            run = wandb.init(
                mode=mode,
                project=project,
                group=group,
                name=name,
                id=run_id,
                config=plain_config,
                dir=os.fspath(directory),
                # By default a second init in one process returns the first run while that is open.
                reinit="create_new",
                settings=dict(_QUIET_SETTINGS),
            )
        except Exception as error:
            if mode == "online" and not isinstance(error, ImportError):
                raise
            reason = error_line(error)
            _log.warning("tracking.mode=%s: wandb cannot start (%s); the run goes on without it", mode, reason)
            return Tracker(None, None, offline=False, last_step=last_step)
    return Tracker(run, wandb, offline=mode == "offline", run_id=run_id, last_step=last_step)


class Tracker:
    """One W&B run, or none (disabled): then every method does nothing. A context manager that finishes it.

    Leaving the ``with`` block normally finishes with exit code 0, on an exception with 1, which W&B shows as failed.
    """

    def __init__(
        self, run: Any, wandb_module: Any, *, offline: bool, run_id: str | None = None, last_step: int | None = None
    ) -> None:
        """Wrap an open W&B run; use ``start_tracker``. run_id: its id, None without a run."""
        self._run = run
        self._wandb = wandb_module
        self.run_id = run_id
        self._step = last_step
        self._sync_line = f"wandb sync {Path(run.dir).parent}" if run is not None and offline else None

    @property
    def sync_line(self) -> str | None:
        """The command that uploads an offline run; None for any other."""
        return self._sync_line

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log ``metrics`` as the one row of ``step``; a value that is None or not finite is left out.

        ``ValueError`` unless ``step`` is above every earlier one: W&B drops such rows with a warning only.
        """
        if self._step is not None and step <= self._step:
            raise ValueError(f"tracking step {step}: expected a step above {self._step}, which was logged")
        self._step = step
        if self._run is not None:
            plain = {key: value for key, value in to_plain(metrics).items() if not _is_missing(value)}
            self._run.log(plain, step=step)

    def log_frame(self, row: Mapping[str, Any]) -> None:
        """Log one row of frames.jsonl at its ``step``: its metrics, and each session's frame as ``clock/<rid>``."""
        clocks = {f"clock/{rid}": frame for rid, frame in row["frames"]}
        self.log(row["step"], {name: row[name] for name in _FRAME_METRICS} | clocks)

    def summary(self, metrics: Mapping[str, Any]) -> None:
        """Set the run's summary values; one that is None or not finite is left out."""
        if self._run is not None:
            plain = to_plain(metrics)
            self._run.summary.update({key: value for key, value in plain.items() if not _is_missing(value)})

    def media(
        self, *, video: str | os.PathLike[str] | None = None, image: str | os.PathLike[str] | None = None
    ) -> None:
        """Log an mp4 file as ``rollout`` and a PNG file as ``strip``, at the last step that was logged (0 if none)."""
        if self._run is None:
            return
        entries = {}
        if video is not None:
            entries["rollout"] = self._wandb.Video(os.fspath(video), format="mp4")
        if image is not None:
            entries["strip"] = self._wandb.Image(os.fspath(image))
        if entries:
            self._run.log(entries, step=self._step or 0)

    def tables(
        self,
        tables: Mapping[str, tuple[Sequence[str], Sequence[Sequence[Any]]]],
        images: Mapping[str, str | os.PathLike[str]],
    ) -> None:
        """Log tables (column names and rows) and PNG files under their names, at the last step (0 if none)."""
        if self._run is None:
            return
        entries = {
            f"table/{name}": self._wandb.Table(columns=list(columns), data=to_plain(rows), allow_mixed_types=True)
            for name, (columns, rows) in tables.items()
        }
        entries |= {f"figure/{name}": self._wandb.Image(os.fspath(path)) for name, path in images.items()}
        if entries:
            self._run.log(entries, step=self._step or 0)

    def finish(self, exit_code: int = 0) -> str | None:
        """Close the run; any other ``exit_code`` than 0 marks it failed. Later calls do nothing.

        Returns ``sync_line``.
        """
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=exit_code)
        return self._sync_line

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(exit_code=0 if error is None else 1)


@contextlib.contextmanager
def _environment_defaults(**defaults: str) -> Iterator[None]:
    """Set environment variables that the user did not set, for as long as W&B starts its own process.

    It sends crash reports of its own over the network, offline too, and logs below the user's home; neither has a
    setting.
    """
    added = [name for name in defaults if name not in os.environ]
    os.environ.update({name: defaults[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))
