"""From a command line to composed configs, or one line that says what is wrong with it. No torch.

Hydra accepts an unknown key behind a ``+``, and explains the rest over several lines; here every override is held
against the schema first, and what Hydra still finds is put into one line.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException

from scripts.app.errors import BadInput
from scripts.app.schema import SCHEMAS, JobKnobs, RolloutConfig

CONF_DIR = Path(__file__).resolve().parents[2] / "conf"
VERSION_BASE = "1.3"
ONE_FOR_ALL = ("repeats", "sweep.resume", "sweep.dry_run")
"""Knobs of a whole sweep, which its points cannot differ in."""
PLUGIN_EXTRAS = ("joblib", "ray", "submitit", "optuna")
"""Extras that bring launchers and sweepers, by the first word of what those are chosen by."""
EXPECTED_TYPES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    list[float]: "a list of numbers",
    list[int]: "a list of integers",
    list[str]: "a list of names",
    types.NoneType: "null",
}

_BASIC_SWEEPER = f"{BasicSweeper.__module__}.{BasicSweeper.__qualname__}"


@dataclass(frozen=True)
class Composed:
    """A command line that is well-formed and well-typed.

    multirun: whether it is a sweep. master: the config with its hydra node, sweeps left out. points: for each run
    the job config, typed; exactly one unless ``multirun``. searched: whether Hydra's sweeper chooses the points as it
    goes, so that none is known here. added: overrides that Hydra needs besides the given ones.
    """

    multirun: bool
    master: DictConfig
    points: list[Any]
    searched: bool = False
    added: tuple[str, ...] = ()


def compose_all(config_name: str, overrides: Sequence[str], *, multirun: bool) -> Composed:
    """Compose every run that ``overrides`` ask for. ``BadInput`` if any of them is not well-formed and well-typed.

    config_name: key of ``SCHEMAS``; a point is of that type.
    """
    schema = SCHEMAS[config_name]
    with initialize_config_dir(str(CONF_DIR), version_base=VERSION_BASE, job_name=config_name):
        groups = _Groups(config_name)
        parsed = [_parse(text) for text in overrides]
        for override in parsed:
            _check_key(override, schema, groups)
            _check_choice(override, schema, groups)
        fixed = [override for override in parsed if not override.is_sweep_override()]
        swept = [override for override in parsed if override.is_sweep_override()]
        master = _compose(config_name, fixed, schema)
        repeated = _repeats(master, parsed)
        multirun = multirun or bool(repeated) or master.hydra.mode == RunMode.MULTIRUN
        if swept and not multirun:
            text = swept[0].input_line
            raise BadInput(f"{text}: a list of values is a sweep, which needs -m; expected one value")
        if not multirun:
            return Composed(False, master, [typed(_job_node(master), fixed)])
        if master.hydra.sweeper._target_ != _BASIC_SWEEPER:
            _check_search(master, repeated, schema, groups)
            return Composed(True, master, [], searched=True)
        points = []
        for point in _sweep_points(master, [*map(_parse, repeated), *parsed], schema, groups):
            for override in point:
                _check_choice(override, schema, groups)
            points.append(typed(_job_node(_compose(config_name, point, schema)), point))
        return Composed(True, master, points, added=repeated)


def typed(node: DictConfig, overrides: Sequence[Override] = ()) -> Any:
    """The job config as the dataclass it was declared as. ``BadInput`` for a missing value or a bad interpolation."""
    try:
        return OmegaConf.to_object(node)
    except OmegaConfBaseException as error:
        raise explain(error, overrides, OmegaConf.get_type(node)) from error


def explain(error: Exception, overrides: Sequence[Override] = (), schema: Any = RolloutConfig) -> BadInput:
    """What Hydra or OmegaConf found, as one line that names key, value and what is allowed."""
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, MissingMandatoryValue):
        return BadInput(f"{cause.full_key}=???: a mandatory value is missing; give it one")
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        key = cause.full_key.split("[")[0]
        expected = _expected(key, schema)
        given = next((o.get_value_string() for o in reversed(overrides) if o.key_or_group == key), None)
        if given is None or expected is None or isinstance(cause, InterpolationResolutionError):
            where = key if given is None else f"{key}={given}"
            return BadInput(f"{where}: {_first_line(cause)}" + (f"; expected {expected}" if expected else ""))
        return BadInput(f"{key}={given}: expected {expected}")
    return BadInput(_first_line(error))


def _parse(text: str) -> Override:
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    try:
        (override,) = parser.parse_overrides([text])
    except HydraException as error:
        raise BadInput(f"{text}: not an override; expected key=value") from error
    if not override.key_or_group:
        raise BadInput(f"{text}: not an override; expected key=value")
    if override.package is not None:
        raise BadInput(f"{text}: a group goes to its own place; expected {override.key_or_group}=...")
    return override


def _compose(config_name: str, overrides: Sequence[Override], schema: type[JobKnobs]) -> DictConfig:
    try:
        config = compose(config_name, [str(override.input_line) for override in overrides], return_hydra_config=True)
    except MissingConfigException as error:
        missing = str(error.missing_cfg_file)
        if missing.startswith("hydra/"):
            raise _no_plugin(*missing.rsplit("/", 1)) from error
        raise explain(error, overrides, schema) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, overrides, schema) from error
    return config


def _job_node(config: DictConfig) -> DictConfig:
    """The config without its hydra node, which ``${hydra:...}`` still resolves in."""
    HydraConfig.instance().set_config(config)
    node = copy.deepcopy(config)
    with open_dict(node):
        del node["hydra"]
    return node


def _sweep_points(
    master: DictConfig, parsed: Sequence[Override], schema: type[JobKnobs], groups: _Groups
) -> list[list[Override]]:
    """The overrides of each point, in the order in which Hydra's sweeper will run them."""
    params = [_parse(f"{key}={value}") for key, value in (master.hydra.sweeper.params or {}).items()]
    for override in params:
        _check_key(override, schema, groups)
    for override in (*parsed, *params):
        if override.is_sweep_override() and override.key_or_group in ONE_FOR_ALL:
            raise BadInput(f"{override.input_line}: is one for the whole sweep; expected one value")
    own = [override for override in parsed if not override.is_hydra_override()]
    hydra = [override for override in parsed if override.is_hydra_override()]
    for override in [*own, *params]:
        if override.is_sweep_override() and not override.is_discrete_sweep():
            raise BadInput(f"{override.input_line}: expected a list of values, choice(...), range(...) or glob(...)")
    (points,) = BasicSweeper.split_arguments([*params, *own], None)
    return [hydra + [_parse(text) for text in point] for point in points]


def _repeats(master: DictConfig, parsed: Sequence[Override]) -> tuple[str, ...]:
    """The override that numbers the repeats, if there is more than one. ``BadInput`` for what it would clash with."""
    repeats = master.get("repeats", 1)
    if repeats <= 1:
        return ()
    for override in parsed:
        text = override.input_line
        if override.key_or_group == "repeat":
            raise BadInput(f"{text}: repeats={repeats} numbers the points; expected one of them")
        if override.key_or_group == "seed" and override.is_sweep_override():
            raise BadInput(f"{text}: repeats={repeats} gives each point its seed; expected one seed, the first")
    return (f"repeat=range({repeats})",)


def _check_search(master: DictConfig, repeated: Sequence[str], schema: type[JobKnobs], groups: _Groups) -> None:
    """Refuse what needs to know the points of a sweep where the sweeper chooses them as it goes."""
    for key, value in (master.hydra.sweeper.params or {}).items():
        _check_key(_parse(f"{key}={value}"), schema, groups)
    sweeper = master.hydra.runtime.choices["hydra/sweeper"]
    asked = {f"repeats={master.repeats}": bool(repeated)}
    asked |= {f"sweep.{key}={master.sweep[key]}": bool(master.sweep[key]) for key in ("resume", "dry_run")}
    for text, given in asked.items():
        if given:
            raise BadInput(f"{text}: hydra/sweeper={sweeper} chooses its points as it goes; expected none")


# -- held against the schema ------------------------------------------------------------------------------------


class _Groups:
    """What can be chosen from, asked of Hydra once: it copies all that it knows for each question.

    chosen: groups that the config chooses from.
    """

    def __init__(self, config_name: str) -> None:
        self.config_name = config_name
        self.chosen = _groups(config_name)
        self._loader = GlobalHydra.instance().config_loader()
        self.names = [group for group in self._loader.list_groups("") if group != "hydra"]
        self._options: dict[str, list[str]] = {}

    def options(self, key: str) -> list[str]:
        """The options of a group; none for what is no group."""
        if key.split("/")[0] not in self.names:
            return []
        if key not in self._options:
            self._options[key] = self._loader.get_group_options(key)
        return self._options[key]


def _check_key(override: Override, schema: type[JobKnobs], groups: _Groups) -> None:
    """Refuse a key that no knob and no group has, whatever stands before it, and the removal of one."""
    key, text = override.key_or_group, str(override.input_line)
    if override.is_hydra_override():
        if override.is_add() or override.is_force_add():  # without a + Hydra refuses what it does not know
            _walk(HydraConf, key.split(".")[1:], f"{text}: unknown key", "hydra", ())
        return
    if not groups.options(key):
        _walk(schema, key.split("."), f"{text}: unknown key", "", groups.names)
    if override.is_delete():
        raise BadInput(f"{text}: a knob cannot be removed; expected {key}=value")
    if override.is_add():
        raise BadInput(f"{text}: every knob exists, none can be added; expected {text.removeprefix('+')}")


def _walk(node: Any, parts: Sequence[str], refusal: str, owner: str, also: Sequence[str]) -> None:
    """Follow ``parts`` down from dataclass ``node``; ``BadInput`` where one of them names no field."""
    for part in parts:
        if node in (Any, dict) or typing.get_origin(node) is dict:
            return  # an open place: any key may stand there
        fields = typing.get_type_hints(node) if dataclasses.is_dataclass(node) else {}
        if part not in fields:
            known = sorted({*fields, *also}) if not owner else sorted(fields)
            close = difflib.get_close_matches(part, known, n=1)
            hint = f"did you mean {owner}{'.' if owner else ''}{close[0]}? " if close else ""
            place = f"keys of {owner}" if owner else "keys"
            raise BadInput(f"{refusal}; {hint}{place}: {', '.join(known) or 'none'}")
        node, owner = fields[part], f"{owner}.{part}" if owner else part


def _groups(config_name: str) -> list[str]:
    """Groups that the config chooses from."""
    entries = [
        entry for entry in OmegaConf.load(CONF_DIR / f"{config_name}.yaml").defaults if not isinstance(entry, str)
    ]
    return sorted(str(key) for entry in entries for key in entry if not str(key).startswith("override "))


def _check_choice(override: Override, schema: type[JobKnobs], groups: _Groups) -> None:
    """Refuse a group that the config does not choose from, and an option that a group does not have."""
    group = override.key_or_group
    options = groups.options(group)
    if not options or override.is_delete() or override.is_hydra_override():
        return
    if group not in groups.chosen:
        chosen = ", ".join(groups.chosen)
        raise BadInput(f"{override.input_line}: {groups.config_name} has no such choice; it chooses {chosen}")
    if override.is_sweep_override():
        return
    choice = override.value()
    optional = group not in typing.get_type_hints(schema)
    if choice not in options and not (choice is None and optional):
        raise BadInput(f"{group}={override.get_value_string()}: expected one of {', '.join(options)}")


def _no_plugin(group: str, choice: str) -> BadInput:
    """``choice`` of a Hydra group is not there: it is an extra that is not installed, or does not exist."""
    loader = GlobalHydra.instance().config_loader()
    extra = choice.split("_")[0]
    if extra not in PLUGIN_EXTRAS:
        return BadInput(f"{group}={choice}: expected one of {', '.join(loader.get_group_options(group))}")
    constraints = "constraints.txt" if extra == "joblib" else f"constraints-{extra}.txt"
    return BadInput(f"{group}={choice}: not installed; expected pip install -c {constraints} -e '.[{extra}]'")


def _expected(key: str, schema: type[JobKnobs]) -> str | None:
    """The type of the knob at ``key``, in words; None for what is no knob."""
    hint: Any = schema
    for part in key.split("."):
        fields = typing.get_type_hints(hint) if dataclasses.is_dataclass(hint) else {}
        if part not in fields:
            return None
        hint = fields[part]
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return " or ".join(EXPECTED_TYPES.get(option, "key=value below it") for option in options)


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
