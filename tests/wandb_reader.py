"""Reads what W&B wrote offline, from the bytes alone: the record log and the few protobuf fields the tests look at.

A ``.wandb`` file is ":W&B", a 2-byte magic and a version byte, then LevelDB log blocks of 32 KiB: chunks of crc32 (4
bytes, over type and payload), length (2), type (1: whole, 2: first, 3: middle, 4: last). A record's payload is one
protobuf ``Record``; field numbers below are those of W&B's public ``wandb_internal.proto``.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK = 32768
HISTORY, SUMMARY, CONFIG, RUN, EXIT = 2, 3, 5, 17, 18


@dataclass
class OfflineRun:
    """history: (step, values) rows as logged. exits: exit codes, one per finish. runs: run records, by distinct id."""

    runs: dict[str, dict[str, str]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    history: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    exits: list[int] = field(default_factory=list)


def read_offline_run(path: Path) -> OfflineRun:
    run = OfflineRun()
    for payload in _records(path.read_bytes()):
        record = _fields(payload)
        for message in record.get(RUN, []):
            fields = _fields(message)
            run_id = fields[1][0].decode()
            run.runs[run_id] = {
                "project": fields[3][0].decode(),
                "group": fields.get(6, [b""])[0].decode(),
                "name": fields.get(8, [b""])[0].decode(),
            }
            for config in fields.get(4, []):
                run.config |= _items(config, 1)
        for message in record.get(CONFIG, []):
            run.config |= _items(message, 1)
        for message in record.get(SUMMARY, []):
            run.summary |= _items(message, 1)
        for message in record.get(HISTORY, []):
            (step,) = _fields(message)[2]
            run.history.append((_fields(step).get(1, [0])[0], _items(message, 1)))
        for message in record.get(EXIT, []):
            run.exits.append(_fields(message).get(1, [0])[0])
    return run


def _records(data: bytes) -> Iterator[bytes]:
    assert data[:4] == b":W&B", data[:7]
    position, parts = 7, []
    while position < len(data):
        left = BLOCK - position % BLOCK
        if left < 7:
            position += left
            continue
        crc, length, kind = struct.unpack_from("<IHB", data, position)
        payload = data[position + 7 : position + 7 + length]
        assert len(payload) == length, "the file ends inside a record"
        assert zlib.crc32(bytes([kind]) + payload) == crc, f"checksum at byte {position}"
        assert (kind in (1, 2)) == (not parts), f"chunk type {kind} at byte {position}"
        parts.append(payload)
        position += 7 + length
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []
    assert not parts, "the file ends inside a record"


def _items(message: bytes, number: int) -> dict[str, Any]:
    """Key-value items: key (1) or the parts of a nested key (2), and the value as JSON (16)."""
    values = {}
    for item in _fields(message).get(number, []):
        fields = _fields(item)
        key = b".".join(fields.get(1, []) + fields.get(2, [])).decode()
        values[key] = json.loads(fields[16][0])
    return values


def _fields(message: bytes) -> dict[int, list[Any]]:
    """Protobuf wire format: field number -> its values, ints for varints, bytes for anything else."""
    fields: dict[int, list[Any]] = {}
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        value: Any
        if tag & 7 == 0:
            value, position = _varint(message, position)
        else:
            if tag & 7 == 2:
                size, position = _varint(message, position)
            else:
                size = {1: 8, 5: 4}[tag & 7]
            value, position = message[position : position + size], position + size
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position
