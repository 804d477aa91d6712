"""What stands in the records of a rollout beyond what the harness writes, and in what ``collect`` makes of them."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from ringkv.harness.columns import SUMMARY_COLUMNS, VERSION_KEY, Column, Kind
from scripts.app.schema import RolloutConfig

FACT_COLUMNS: Mapping[str, Column] = {
    "ring/frames": Column("ints", "frames", "slots of each layer's window; empty with the whole past"),
    "ring/dilation": Column("ints", "frames", "every how many-th frame each layer keeps; empty with the whole past"),
    "ring/wraps": Column("ints", "", "how often each layer's ring started over at slot 0"),
    "model/parameters": Column("int", "", "weights of the model"),
    "model/weights": Column("text", "", "random, or the checkpoint that they were read from"),
    "model/differs_from_training": Column(
        "texts", "", "a line for each knob that the checkpoint was trained with another value of"
    ),
    "data/sources": Column("texts", "", "where each session's recorded frames come from"),
    "data/hashes": Column("texts", "", "hash of each session's recorded frames"),
    "data/fps": Column("float", "frames/s", "rate at which they were recorded, and at which the video plays"),
}
"""Keys that a rollout adds to summary.json."""

MACHINE_COLUMNS: Mapping[str, Column] = {
    "cpu": Column("text", "", "model of the processor"),
    "cores_physical": Column("int", "", "its cores"),
    "cores_logical": Column("int", "", "its hardware threads"),
    "cores_usable": Column("int", "", "those that the process may run on"),
    "ram_bytes": Column("int", "bytes", "memory of the machine"),
    "platform": Column("text", "", "operating system"),
    "python": Column("text", "", "version"),
    "torch": Column("text", "", "version"),
    "cuda": Column("text", "", "version that torch was built for; null for none"),
    "ringkv": Column("text", "", "version"),
    "threads": Column("int", "", "of torch"),
    "device": Column("text", "", "torch device of the run"),
    "device_name": Column("text", "", "what it is"),
    "git_commit": Column("text", "", "of the checkout; null outside one"),
    "source_hash": Column("text", "", "sha256 of the source files"),
}
"""Entries of the machine card; in a collected row with ``machine/`` before them."""

RUN_COLUMNS: Mapping[str, Column] = {
    "run_dir": Column("text", "", "folder of the run, absolute"),
    "sweep": Column("text", "", "folder of its sweep, absolute; null outside one"),
    "job": Column("int", "", "its number in the sweep"),
    "status": Column(
        "text",
        "",
        "ok; failed; unfinished: it has no summary, being killed or still running; unreadable: its files are damaged",
    ),
    "failure": Column("text", "", "kind of failure, as its sweep noted it, see sweep.json; null otherwise"),
    "reason": Column("text", "", "why the status is not ok, one line"),
    "command": Column(
        "text",
        "",
        "what reproduces it from the root of the repository, quoted for a shell: what differs from the defaults, and "
        "threads; null if its config is not one of this release",
    ),
    "record_version": Column("int", "", "version of the record"),
    "missing": Column("texts", "", "what the record lacks: files, knobs and columns of a later version"),
    "segments": Column("int", "", "times that it was started or resumed"),
    "steps": Column("int", "", "rows in its frames.jsonl"),
    "wall_s": Column("float", "s", "from start to end of its process in a sweep"),
    "exit_code": Column("int", "", "of that process, negative for a signal"),
}
"""What ``collect`` says of every run first."""

_LEFT_OUT = ("status", "error", "traceback", "machine", VERSION_KEY)

_KINDS: Mapping[Any, Kind] = {
    int: "int",
    float: "float",
    bool: "bool",
    str: "text",
    list[float]: "floats",
    list[str]: "texts",
}


def knob_columns(schema: Any = RolloutConfig, prefix: str = "") -> Iterator[tuple[str, Column]]:
    """A column for each knob, under its dotted name."""
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from knob_columns(hint, f"{prefix}{field.name}.")
            continue
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        (kind,) = (_KINDS[option] for option in options if option is not types.NoneType)
        yield prefix + field.name, Column(kind, "", "knob")


def collected_columns() -> dict[str, Column]:
    """All columns of a collected row, in order."""
    summary = {name: column for name, column in SUMMARY_COLUMNS.items() if name not in _LEFT_OUT}
    machine = {f"machine/{name}": column for name, column in MACHINE_COLUMNS.items()}
    return {**RUN_COLUMNS, **dict(knob_columns()), **summary, **FACT_COLUMNS, **machine}
