"""Runs as points: what agrees in everything but the seed is one point, measured as often as it was repeated."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from ringkv.harness.tables import NOT_AVAILABLE
from scripts.app.columns import MACHINE_COLUMNS, knob_columns
from scripts.app.html.spec import Tags
from scripts.app.html.stats import Interval, median_interval

MIB = 1024.0**2
STRATEGY, WEIGHTS, MACHINE = "strategy", "weights", "machine"

_FIRST = (
    STRATEGY,
    "ring_frames",
    "dilation",
    "num_sessions",
    "tokens_per_frame",
    "num_frames",
    "context_frames",
    "model.preset",
    "data.name",
    "attention",
    "dtype",
    "kv_dtype",
    "device",
    "threads",
)
"""Knobs in the order in which they are told; of two that vary together, the later one is left out."""

_NO_CONDITION = (
    "seed",
    "repeat",
    "repeats",
    "profile",
    "checkpoint",
    "snapshot_every",
    "data.folder",
    "kv.strategy",
    "kv.window",
)
_NO_CONDITION_GROUPS = ("tracking.", "sweep.", "rollout.", "hydra.")
"""Knobs that do not change what is measured, or stand under another name: strategy, weights."""

_NO_IDENTITY = ("git_commit",)
"""What may differ on one machine: commits with the same source files."""


@dataclass(frozen=True)
class Run:
    """One row of ``collect``. knobs: its conditions, as text by name. machine: its facts, None if it has none."""

    row: Mapping[str, Any]
    knobs: Mapping[str, str]
    machine: Mapping[str, Any] | None

    @property
    def ok(self) -> bool:
        """Whether it came to its end."""
        return self.row["status"] == "ok"

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return Path(self.row["run_dir"])

    def metric(self, key: str, scale: float = 1.0) -> float | None:
        """A number of its summary over ``scale``; None if it is missing or none."""
        value = self.row.get(key)
        return None if value is None or isinstance(value, str | bool) else value / scale


@dataclass
class Point:
    """Repeats of one thing. letter: of its machine. tags: its knobs that vary over the report; named: those that its
    label needs, which for a point with a result are those that vary over points with results."""

    knobs: Mapping[str, str]
    letter: str
    runs: list[Run] = field(default_factory=list)
    failed: list[Run] = field(default_factory=list)
    tags: Tags = field(default_factory=dict)
    named: Tags = field(default_factory=dict)

    @property
    def strategy(self) -> str:
        """Its choice of conf/kv, "n/a" if its record does not say."""
        return self.knobs.get(STRATEGY, NOT_AVAILABLE)

    @property
    def label(self) -> str:
        """What tells it from the other points."""
        return self.label_without()

    def label_without(self, *knobs: str) -> str:
        """The label, less some knobs."""
        return label_of({knob: value for knob, value in self.named.items() if knob not in knobs})

    @property
    def any_run(self) -> Run:
        """One of its runs, one that is ok if there is any."""
        return (self.runs or self.failed)[0]

    def interval(self, key: str, scale: float = 1.0) -> Interval:
        """A metric over its repeats that are ok, over ``scale``."""
        return median_interval([run.metric(key, scale) for run in self.runs])

    def reason(self) -> str:
        """Why its failed repeats failed, one line."""
        reasons = dict.fromkeys(str(run.row.get("reason") or "no reason on record") for run in self.failed)
        return "; ".join(reasons)


@dataclass(frozen=True)
class Points:
    """All points. machines: facts by letter. varying: knobs that tell points apart, with their values in order."""

    all: Sequence[Point]
    machines: Mapping[str, Mapping[str, Any]]
    varying: Mapping[str, Sequence[str]]

    @cached_property
    def measured(self) -> list[Point]:
        """Those with a repeat that is ok."""
        return [point for point in self.all if point.runs]

    def numeric_knobs(self) -> list[str]:
        """Knobs that vary over numbers."""
        return [knob for knob, values in self.varying.items() if all(map(is_number, values))]

    def same(self, points: Iterable[Point]) -> dict[str, str]:
        """Knobs that have one value over those of ``points`` that say it."""
        points = list(points)
        names = dict.fromkeys(knob for point in points for knob in point.knobs)
        values = {name: {point.knobs[name] for point in points if name in point.knobs} for name in names}
        return {name: next(iter(found)) for name, found in values.items() if len(found) == 1}

    def conditions(self, points: Iterable[Point]) -> str:
        """What ``points`` have in common, as a sentence: the conditions of their numbers."""
        points = list(points)
        same = self.same(points)
        letters = sorted({point.letter for point in points if point.letter != NOT_AVAILABLE})
        parts = []
        if "model.preset" in same:
            parts.append(f"model {same['model.preset']}")
        if WEIGHTS in same:
            parts.append(f"{same[WEIGHTS]} weights" if same[WEIGHTS] == "random" else f"weights {same[WEIGHTS]}")
        parts += [f"data {same['data.name']}"] if "data.name" in same else []
        parts += [same[knob] for knob in ("dtype", "device") if knob in same]
        if "threads" in same:
            parts.append("1 thread" if same["threads"] == "1" else f"{same['threads']} threads")
        if {"num_frames", "context_frames"} <= same.keys():
            parts.append(f"{same['num_frames']} frames, {same['context_frames']} of them context")
        parts += [f"attention {same['attention']}"] if "attention" in same else []
        if letters:
            parts.append(("machine " if len(letters) == 1 else "machines ") + ", ".join(letters))
        return "Conditions: " + "; ".join(parts) + "." if parts else ""


def points_of(rows: Sequence[Mapping[str, Any]]) -> Points:
    """Group the rows of ``collect`` into points, in the order in which they first stand there."""
    runs = [_run(row) for row in rows]
    cards: dict[str, Mapping[str, Any]] = {}
    for run in runs:
        if run.machine is not None:
            cards.setdefault(_identity(run.machine), run.machine)
    letters = {identity: letter_of(index) for index, identity in enumerate(cards)}
    groups: dict[tuple[Any, str], Point] = {}
    strays = []
    for run in runs:
        if run.machine is None:
            strays.append(run)  # it failed before it knew its machine
            continue
        letter = letters[_identity(run.machine)]
        point = groups.setdefault((_frozen(run.knobs), letter), Point(run.knobs, letter))
        (point.runs if run.ok else point.failed).append(run)
    for run in strays:
        same = [point for (knobs, _), point in groups.items() if knobs == _frozen(run.knobs)]
        key = (_frozen(run.knobs), NOT_AVAILABLE)
        point = same[0] if len(same) == 1 else groups.setdefault(key, Point(run.knobs, NOT_AVAILABLE))
        (point.runs if run.ok else point.failed).append(run)
    points = list(groups.values())
    varying = _varying(points)
    for point in points:
        values = _told(point)
        point.tags = {knob: values[knob] for knob in varying if knob in values}
    among_measured = _varying([point for point in points if point.runs])
    for point in points:
        shown = among_measured if point.runs else varying
        point.named = {knob: value for knob, value in point.tags.items() if knob in shown}
    machines = {letter: cards[identity] for identity, letter in letters.items()}
    return Points(sorted(points, key=lambda point: _order(point.tags, varying)), machines, varying)


def label_of(tags: Tags) -> str:
    """``ring, ring_frames=8``: a strategy is told by its name alone."""
    return ", ".join(value if knob == STRATEGY else f"{knob}={value}" for knob, value in tags.items()) or "all runs"


def letter_of(index: int) -> str:
    """A, B ... Z, then AA, AB and so on."""
    rest, last = divmod(index, len(ascii_uppercase))
    return (letter_of(rest - 1) if rest else "") + ascii_uppercase[last]


def is_number(text: str) -> bool:
    """Whether ``text`` is a finite number."""
    try:
        return abs(float(text)) < float("inf")
    except ValueError:
        return False


def _run(row: Mapping[str, Any]) -> Run:
    conditions = [
        name for name, _ in knob_columns() if name not in _NO_CONDITION and not name.startswith(_NO_CONDITION_GROUPS)
    ]
    knobs = {name: _text(row[name]) for name in conditions if row.get(name) is not None}
    strategy, window = row.get("kv.strategy"), row.get("kv.window")
    if strategy is not None:
        knobs[STRATEGY] = f"{strategy}_windowed" if window else str(strategy)
    weights = row.get("model/weights")
    if weights is not None:
        knobs[WEIGHTS] = Path(str(weights)).name
    facts = {name: row[f"machine/{name}"] for name in MACHINE_COLUMNS if row.get(f"machine/{name}") is not None}
    return Run(row, knobs, facts or None)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _identity(machine: Mapping[str, Any]) -> str:
    return _frozen({name: value for name, value in machine.items() if name not in _NO_IDENTITY})


def _told(point: Point) -> dict[str, str]:
    """The knobs that its record says, and its machine."""
    return dict(point.knobs) | ({} if point.letter == NOT_AVAILABLE else {MACHINE: point.letter})


def _varying(points: Sequence[Point]) -> dict[str, list[str]]:
    """Knobs with more than one value, less those that follow from a single earlier one."""
    told = [_told(point) for point in points]
    names = {name for values in told for name in values} - {MACHINE}
    kept: dict[str, list[str]] = {}
    for name in [*(name for name in _FIRST if name in names), *sorted(names - set(_FIRST)), MACHINE]:
        known = {values[name] for values in told if name in values}
        if len(known) > 1 and not any(_follows(told, name, other) for other in kept):
            kept[name] = sorted(known, key=_value_order)
    return kept


def _follows(told: Sequence[Mapping[str, str]], name: str, other: str) -> bool:
    """Whether the value of ``other`` decides that of ``name``."""
    pairs = {(values[other], values[name]) for values in told if other in values and name in values}
    return len(pairs) == len({first for first, _ in pairs})


def _order(tags: Tags, varying: Mapping[str, Sequence[str]]) -> list[int]:
    return [values.index(tags[knob]) if knob in tags else -1 for knob, values in varying.items()]


def _value_order(text: str) -> tuple[bool, float, str]:
    return (False, float(text), "") if is_number(text) else (True, 0.0, text)


def _frozen(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True)
