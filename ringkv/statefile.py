"""States in one safetensors file each: written atomically, read without executing anything.

The file's metadata holds everything that is not a tensor: under ``ringkv`` the state's plain fields as JSON, under
``checksum`` a SHA-256 over all the rest of the file, since safetensors has none, and under any further key what a
caller stores beside it as JSON (a rollout's stream and seed, say). Any strategy's state goes through here; whether it
fits is for ``load_state`` to decide.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ringkv.files import replaced_atomically
from ringkv.resource import State
from ringkv.state import STATE_VERSION

_PLAIN_FIELDS = ("version", "clock", "geometry", "dtype")


def write_state(path: str | Path, state: State, extra: Mapping[str, Any] | None = None) -> None:
    """Write ``state``, and ``extra`` (JSON-ready values by key), to ``path`` atomically."""
    tensors = _tensors("layers", ("kv", "written"), state["layers"])
    plain = {key: state[key] for key in _PLAIN_FIELDS}
    if "undo" in state:
        tensors |= _tensors("undo", ("frames", "kv"), state["undo"]["layers"])
        plain["undo_depth"] = state["undo"]["depth"]
    metadata = {"ringkv": json.dumps(plain)}
    metadata |= {key: json.dumps(value) for key, value in (extra or {}).items()}
    metadata["checksum"] = _checksum(tensors, metadata)
    with replaced_atomically(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)


def read_state(path: str | Path) -> tuple[State, dict[str, Any]]:
    """The state in ``path`` and what was stored beside it, on the CPU.

    ``FileNotFoundError`` if it is not there; ``ValueError`` with one line if it is no state file, a truncated or
    damaged one, or one of a later version.
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
        state = json.loads(metadata["ringkv"])
        version = state["version"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: a safetensors file, but not one that a cache saved ({error!r})") from error
    if version != STATE_VERSION:
        raise ValueError(f"{path}: state version={version!r}, this release reads version {STATE_VERSION}")
    if metadata.pop("checksum", None) != _checksum(tensors, metadata):
        raise ValueError(f"{path}: its content does not match its checksum, the file is damaged")
    extra = {key: json.loads(value) for key, value in metadata.items() if key != "ringkv"}
    state["layers"] = _pairs(tensors, "layers", ("kv", "written"))
    depth = state.pop("undo_depth", None)
    if depth is not None:
        state["undo"] = {"depth": depth, "layers": _pairs(tensors, "undo", ("frames", "kv"))}
    return state, extra


def _tensors(
    what: str, names: tuple[str, str], layers: list[tuple[torch.Tensor, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Each layer's pair under names of their own, in host memory."""
    return {
        f"{what}.{index}.{name}": tensor.cpu().contiguous()
        for index, pair in enumerate(layers)
        for name, tensor in zip(names, pair, strict=True)
    }


def _pairs(
    tensors: Mapping[str, torch.Tensor], what: str, names: tuple[str, str]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What ``_tensors`` was given, from a file whose checksum is right."""
    count = sum(key.startswith(f"{what}.") for key in tensors) // 2
    first, second = names
    return [(tensors[f"{what}.{i}.{first}"], tensors[f"{what}.{i}.{second}"]) for i in range(count)]


def _checksum(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes of the tensors, and of the metadata."""
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
