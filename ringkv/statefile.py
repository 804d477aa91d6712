"""States in one safetensors file each: written atomically, read without executing anything.

The file's metadata holds everything that is not a tensor, as JSON: under ``ringkv`` the state's plain fields, and under
any further key what a caller stores beside it (a rollout's stream and seed, say). Any strategy's state goes through
here; whether it fits is for ``load_state`` to decide.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ringkv.files import replaced_atomically
from ringkv.resource import State

_PLAIN_FIELDS = ("version", "clock", "geometry", "dtype")


def write_state(path: str | Path, state: State, extra: Mapping[str, Any] | None = None) -> None:
    """Write ``state``, and ``extra`` (JSON-ready values by key), to ``path`` atomically."""
    tensors = {}
    for index, (kv, written) in enumerate(state["layers"]):
        tensors[f"layers.{index}.kv"] = kv.contiguous()
        tensors[f"layers.{index}.written"] = written.contiguous()
    metadata = {"ringkv": json.dumps({key: state[key] for key in _PLAIN_FIELDS})}
    metadata |= {key: json.dumps(value) for key, value in (extra or {}).items()}
    with replaced_atomically(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)


def read_state(path: str | Path) -> tuple[State, dict[str, Any]]:
    """The state in ``path`` and what was stored beside it, on the CPU.

    ``FileNotFoundError`` if it is not there, ``ValueError`` with one line if it is not a state file.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such state file")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = dict(file.metadata() or {})
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (a file, not a dict)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a readable safetensors file ({error})") from error
    try:
        state = json.loads(metadata.pop("ringkv"))
        extra = {key: json.loads(value) for key, value in metadata.items()}
        count = len(tensors) // 2
        state["layers"] = [(tensors[f"layers.{i}.kv"], tensors[f"layers.{i}.written"]) for i in range(count)]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: a safetensors file, but not one that a cache saved ({error!r})") from error
    return state, extra


def to_device(state: State, device: torch.device) -> State:
    """``state`` with its tensors on ``device``; shares what is there already."""
    return {**state, "layers": [(kv.to(device), written.to(device)) for kv, written in state["layers"]]}
