"""The command that makes a recorded rollout again: only what differs from the defaults, and ``threads``. No torch."""

from __future__ import annotations

import copy
import functools
import operator
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ringkv.harness.records import to_plain
from scripts.app.check import effective
from scripts.app.compose import CONF_DIR, compose_all, typed
from scripts.app.errors import BadInput
from scripts.app.flat import flat
from scripts.app.schema import RolloutConfig

PROGRAM = ("python", "scripts/rollout.py")
_LEFT_OUT = ("sweep", "rollout", "repeats", "data.folder", "tracking.group")
"""Knobs, and groups of them, that change nothing of a run by itself."""
_PLAIN_TEXT = re.compile(r"[A-Za-z_./~][\w./:@~-]*")
_WORDS = ("null", "true", "false", "nan", "inf")


def command_of(recorded: Mapping[str, Any]) -> str | None:
    """The shell command of the run with this config.json; None if that is no config of this release."""
    try:
        node = OmegaConf.structured(RolloutConfig)
        node.merge_with(recorded)
        config = typed(node)
    except (OmegaConfBaseException, BadInput):
        return None
    assert isinstance(config, RolloutConfig)
    groups = _groups(config)
    default = dict(flat(to_plain(composed(tuple(groups)))))
    short = dict(flat(to_plain(_with_nulls(config, default))))
    return shell(
        [
            *groups,
            *(
                f"{key}={as_value(value)}"
                for key, value in short.items()
                if value != default[key] and not _left_out(key)
            ),
        ]
    )


@functools.cache
def composed(overrides: tuple[str, ...] = ()) -> RolloutConfig:
    """The config of a rollout with these overrides, its nulls as they are. Shared: not to be changed."""
    (config,) = compose_all("rollout", overrides, multirun=False).points
    assert isinstance(config, RolloutConfig)
    return config


def shell(overrides: Sequence[str]) -> str:
    """The command with these overrides, quoted for a shell."""
    return shlex.join([*PROGRAM, *overrides])


def as_value(value: Any) -> str:
    """A plain value as it stands behind ``key=`` on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(as_value, value))}]"
    if isinstance(value, str) and not (_PLAIN_TEXT.fullmatch(value) and value.lower() not in _WORDS):
        escaped = re.sub(r"(\\*)'", r"\1\1\\'", value)
        escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
        return f"'{escaped}'"
    return str(value)


def _with_nulls(config: RolloutConfig, default: Mapping[str, Any]) -> RolloutConfig:
    """``config`` with null for each knob whose default is null, where that stands for the value that it has.

    ``threads`` stays: what its null stands for is the machine's.
    """
    derived = {key for key, value in default.items() if value is None and key != "threads" and not _left_out(key)}
    kept: set[str] = set()
    while True:
        short = copy.deepcopy(config)
        for key in derived - kept:
            owner, _, name = key.rpartition(".")
            setattr(operator.attrgetter(owner)(short) if owner else short, name, None)
        try:
            found = dict(flat(to_plain(effective(short, on_this_machine=False))))
        except BadInput:
            return config  # one that was refused: its nulls were never replaced
        wanted = dict(flat(to_plain(config)))
        other = {key for key in wanted if found[key] != wanted[key] and not _left_out(key)}
        if not other - kept:
            return short
        kept |= other


def _groups(config: RolloutConfig) -> list[str]:
    """The choices of conf/ that differ from the default ones; a model may bring its data."""
    chosen: list[str] = []
    for group, key in (("model", "preset"), ("data", "name"), ("tracking", "mode"), ("kv", "strategy")):
        wanted, found = getattr(config, group), getattr(composed(tuple(chosen)), group)
        windows = (bool(wanted.window), bool(found.window)) if group == "kv" else (False, False)
        if getattr(wanted, key) == getattr(found, key) and windows[0] == windows[1]:
            continue
        for file in sorted((CONF_DIR / group).glob("*.yaml")):
            content = OmegaConf.to_container(OmegaConf.load(file))
            assert isinstance(content, dict)
            if content.get(key) == getattr(wanted, key) and bool(content.get("window")) == windows[0]:
                chosen.append(f"{group}={file.stem}")
                break
    return chosen


def _left_out(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in _LEFT_OUT)
