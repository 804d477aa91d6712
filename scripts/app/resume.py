"""``rollout.resume=<run dir>``: which run is meant, and what else may stand on the command line. No torch.

A resumed run writes where it wrote before, so Hydra, which would make a folder, has no part in it. Relative paths
count from where the command is given. Its knobs are those of its config.json; an override that says the same is
allowed, any other is refused by name.
"""

from __future__ import annotations

import copy
import operator
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ringkv.harness.records import RunDir, dumps_strict, read_config, read_summary, to_plain
from scripts.app.check import effective
from scripts.app.command import composed
from scripts.app.compose import CONF_DIR, Composed, explain, typed
from scripts.app.errors import BadInput
from scripts.app.flat import flat
from scripts.app.schema import RolloutConfig
from scripts.app.supervise import exit_text, supervise
from scripts.app.sweep_point import CHILD_COMMAND, LOG_FILE

KEY = "rollout.resume"


def wanted(asked: Composed) -> bool:
    """Whether a run that is asked for is to be resumed."""
    return any(point.rollout.resume is not None for point in asked.points)


def resume(asked: Composed, overrides: Sequence[str], job: Callable[[RolloutConfig, RunDir], int]) -> int:
    """Go on with the run that is named, or with each of a list of them; the exit code. ``BadInput`` before anything.

    overrides: of the command line. job: carries a single run out. Those of a list have a process each, one after the
    other, and a line each at the end.
    """
    hydra = [text for text in overrides if text.lstrip("+").startswith(("hydra.", "hydra/"))]
    if hydra:
        raise BadInput(f"{hydra[0]}: {KEY} goes on in the run's own folder; expected no such override")
    named = [point.rollout.resume for point in asked.points]
    for name in named:
        if name is None or named.count(name) > 1:
            raise BadInput(f"{KEY}={','.join(map(str, named))}: expected a folder for every point, each once")
    configs = [_recorded(point, overrides) for point in asked.points]
    paths = [_path(name) for name in named]
    if not asked.multirun:
        return job(configs[0], _reopened(paths[0], named[0]))
    for path, name in zip(paths, named, strict=True):
        _reopened(path, name).close()
    failures = [_outcome(path, config) for path, config in zip(paths, configs, strict=True)]
    return 1 if any(failures) else 0


def recorded_config(path: Path) -> RolloutConfig:
    """The config of the run in ``path``, typed. ``BadInput`` for what is not one of this release."""
    try:
        node = OmegaConf.structured(RolloutConfig)
        node.merge_with(read_config(path))
        config = typed(node)
    except OSError as error:
        raise BadInput(f"{error.filename}: {error.strerror}") from error
    except OmegaConfBaseException as error:
        raise explain(error) from error
    except ValueError as error:
        raise BadInput(str(error)) from error
    assert isinstance(config, RolloutConfig)
    return config


def _recorded(point: RolloutConfig, overrides: Sequence[str]) -> RolloutConfig:
    """The config of the run that ``point`` resumes. ``BadInput`` if it is none, or ``overrides`` say otherwise."""
    name = point.rollout.resume
    assert name is not None
    path = _path(name)
    if not path.is_dir():
        raise BadInput(f"{KEY}={name}: no such folder; expected one that holds a run")
    try:
        config = effective(recorded_config(path))
    except BadInput as error:
        raise BadInput(f"{KEY}={name}: {error}") from error
    default = dict(flat(to_plain(composed())))
    asked = dict(flat(to_plain(point)))
    said = {key: text for text in overrides for key in _named_keys(text)}
    said |= {key: f"{key}={_text(value)}" for key, value in asked.items() if key not in said and value != default[key]}
    for key, text in said.items():
        if key in asked and key != KEY and not _agrees(config, key, asked[key]):
            there = dumps_strict(operator.attrgetter(key)(config))
            raise BadInput(f"{text}: {KEY}={name} goes on with {key}={there}; expected no such override")
    return config


def _named_keys(override: str) -> list[str]:
    """Knobs that an override sets: the one that it names, or those of the files of a group that it chooses."""
    key, _, value = override.partition("=")
    key = key.lstrip("+")
    files = [CONF_DIR / key / f"{choice.strip()}.yaml" for choice in value.split(",")]
    keys = [key]
    for file in files:
        if file.is_file():
            everywhere = "@package _global_" in file.read_text().splitlines()[0]
            content = OmegaConf.to_container(OmegaConf.load(file))
            assert isinstance(content, dict)
            own = {str(name): entry for name, entry in content.items() if name not in ("defaults", "hydra")}
            keys += [name if everywhere else f"{key}.{name}" for name, _ in flat(own)]
    return keys


def _agrees(config: RolloutConfig, key: str, value: Any) -> bool:
    """Whether ``key=value`` beside the other knobs of ``config``, which are all derived, means what it has."""
    changed = copy.deepcopy(config)
    owner, _, name = key.rpartition(".")
    setattr(operator.attrgetter(owner)(changed) if owner else changed, name, value)
    try:
        return effective(changed) == config
    except BadInput:
        return False


def _reopened(path: Path, name: str) -> RunDir:
    try:
        return RunDir.reopen(path)
    except ValueError as error:
        raise BadInput(f"{KEY}={name}: {str(error).removeprefix(f'run directory {path}: ')}") from error


def _outcome(path: Path, config: RolloutConfig) -> bool:
    """Go on with one of a list, in a process of its own; whether it failed."""
    request = {"config": to_plain(config), "run_dir": str(path), "name": path.name, "continues": True}
    limit_gib = config.sweep.memory_gib
    end = supervise(
        CHILD_COMMAND,
        dumps_strict(request),
        path / LOG_FILE,
        timeout_s=config.sweep.timeout_s,
        memory_bytes=psutil.virtual_memory().total if limit_gib is None else limit_gib * 1024**3,
    )
    try:
        summary = read_summary(path)
    except (OSError, ValueError):
        summary = {}
    ok = end.exit_code == 0 and summary.get("status") == "ok"
    error = end.killed_for[1] if end.killed_for else summary.get("error")
    why = error or f"the process ended with {exit_text(end.exit_code)}; see {path / LOG_FILE}"
    print(f"{path}: {'ok' if ok else f'failed: {why}'}", file=sys.stdout if ok else sys.stderr, flush=True)
    return not ok


def _path(name: str) -> Path:
    return Path(name).expanduser().absolute()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else dumps_strict(value)
