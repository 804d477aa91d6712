"""From ``argv`` to an exit code: 0 done, 1 a run failed, 2 bad input, told in one line on stderr.

Hydra composes, names the output folders and drives sweeps; everything a person can get wrong is checked before it
starts, because Hydra itself answers with several lines and exit code 1. This module imports no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from ringkv.harness.records import RunDir
from scripts.app import resume, schema
from scripts.app.compose import CONF_DIR, VERSION_BASE, compose_all, explain
from scripts.app.errors import BadInput
from scripts.app.sweep import run_sweep

OK, FAILED, REFUSED = 0, 1, 2


@dataclass(frozen=True)
class Job:
    """What one of the scripts does.

    config_name: of its file in conf/. check: the composed config as it is meant, or ``BadInput``; imports no torch.
    run: carry out a checked config in a claimed folder; the exit code. sweeps: whether ``-m`` is allowed. resumes:
    whether ``rollout.resume`` is.
    """

    config_name: str
    check: Callable[[Any], Any]
    run: Callable[[Any, RunDir], int]
    sweeps: bool = False
    resumes: bool = False


def run(job: Job, argv: Sequence[str]) -> int:
    """Do the job, or the sweep of it, that ``argv`` asks for; the exit code."""
    schema.register()
    config_name = job.config_name
    try:
        arguments = _parse(argv)
        composed = compose_all(config_name, arguments.overrides, multirun=arguments.multirun)
        if _only_shows(arguments):
            return _through_hydra(config_name, argv, _no_job)
        if composed.multirun and not job.sweeps:
            raise BadInput(f"-m: {config_name} has no sweeps; expected a single run")
        if job.resumes and resume.wanted(composed):
            return resume.resume(composed, arguments.overrides, job.run)
        if job.sweeps and (composed.multirun or composed.master.sweep.dry_run or composed.master.sweep.resume):
            launch = functools.partial(_through_hydra, config_name, folder="hydra.sweep.dir")
            return run_sweep(composed, arguments.overrides, launch)
        config = job.check(composed.points[0])
        codes: list[int] = []
        left_with = _through_hydra(config_name, argv, lambda _: codes.append(_run_here(job, config)))
        return codes[0] if codes else left_with  # none when a closed pipe ended the printing
    except BadInput as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return FAILED


def _run_here(job: Job, config: Any) -> int:
    """The single run, in this process, in the folder that Hydra named."""
    path = Path(HydraConfig.get().runtime.output_dir)
    try:
        run_dir = RunDir.create(path)
    except ValueError as error:
        print(f"error: hydra.run.dir={str(error).removeprefix('run directory ')}", file=sys.stderr)
        return REFUSED
    return job.run(config, run_dir)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInput(message)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = get_args_parser()
    parser.__class__ = _Parser
    arguments = parser.parse_args(list(argv))
    for name in ("config_path", "config_name", "config_dir", "experimental_rerun"):
        if getattr(arguments, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise BadInput(f"{flag}={getattr(arguments, name)}: not supported; expected hydra.searchpath=[file://DIR]")
    return arguments


def _only_shows(arguments: argparse.Namespace) -> bool:
    shows = ("help", "hydra_help", "cfg", "info", "shell_completion")
    return any(getattr(arguments, name) not in (None, False) for name in shows)


def _through_hydra(
    config_name: str, argv: Sequence[str], job: Callable[[DictConfig], Any], *, folder: str = "hydra.run.dir"
) -> int:
    """Hand ``argv`` to Hydra's own entry, with ``job`` as its task function; the code it exits with.

    folder: the key of the folder that Hydra makes first. A job answers for its own errors, so an OSError is of that.
    """
    entry = hydra.main(config_path=str(CONF_DIR), config_name=config_name, version_base=VERSION_BASE)(job)
    with _command_line(argv):
        try:
            entry()
        except SystemExit as exit_:
            return exit_.code if isinstance(exit_.code, int) else OK
        except (HydraException, OmegaConfBaseException) as error:
            raise explain(error) from error
        except BrokenPipeError:  # what Hydra was asked to show is read no further, as by ``| head``
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except OSError as error:
            raise BadInput(
                f"{folder}={error.filename}: {error.strerror}; expected a folder that can be made"
            ) from error
    return OK


@contextlib.contextmanager
def _command_line(argv: Sequence[str]) -> Iterator[None]:
    """``sys.argv``, which Hydra reads, for a while; and its errors raised instead of printed and turned into exits."""
    before, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [before[0], *argv]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = before
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


def _no_job(_: DictConfig) -> NoReturn:
    raise AssertionError("Hydra was asked to show something, not to run")
