"""Weights in one safetensors file, with the config and the weight geometry inside. No torch at module level.

The file's metadata holds one JSON text under ``model``: ``{"config", "weight_geometry", "extra"}``. ``read_metadata``
reads it with the standard library alone, so that a wrong path or a checkpoint that does not fit is refused before torch
is loaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.config import ModelConfig

if TYPE_CHECKING:
    import torch

    from model.transformer import FrameTransformer

SHIPPED = Path(__file__).parent / "checkpoints"
"""Where shipped weights lie."""

_KEY = "model"
_MAX_HEADER_BYTES = 100_000_000  # what the format itself allows


def read_metadata(path: str | Path) -> dict[str, Any]:
    """``{"config", "weight_geometry", "extra"}`` of a checkpoint, plain values, without loading torch or any weights.

    ``FileNotFoundError`` if there is no such file, ``ValueError`` with one line if it is not a checkpoint.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint={path}: no such file")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > min(size - 8, _MAX_HEADER_BYTES):
                raise ValueError(f"a header of {header_bytes} bytes in a file of {size}")
            header = json.loads(file.read(header_bytes))
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        expected = 8 + header_bytes + max((entry["data_offsets"][1] for entry in tensors), default=0)
        if size != expected:
            raise ValueError(f"{size} bytes where the header announces {expected}")
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"checkpoint={path}: not a whole safetensors file ({_one_line(error)})") from error
    try:
        metadata = json.loads(header["__metadata__"][_KEY])
        if not isinstance(metadata["weight_geometry"], dict):
            raise TypeError("weight_geometry is not an object")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"checkpoint={path}: a safetensors file, but not a checkpoint of this model") from error
    return dict(metadata)


def check_geometry(path: str | Path, config: ModelConfig) -> dict[str, Any]:
    """``read_metadata``, after making sure that the weights fit ``config``; ``ValueError`` with key and both values."""
    metadata = read_metadata(path)
    saved, wanted = metadata["weight_geometry"], config.weight_geometry()
    for key in wanted:
        if key not in saved or saved[key] != wanted[key]:
            raise ValueError(
                f"checkpoint={path}: its weights have {key}={saved.get(key)!r}, the model has {key}={wanted[key]!r}"
            )
    return metadata


def save_checkpoint(
    path: str | Path, model: FrameTransformer, *, dtype: torch.dtype | None = None, **extra: Any
) -> None:
    """Write weights, config and ``extra`` (JSON-ready, such as a data hash) atomically: the old file or the new one.

    dtype: what the weights are rounded to in the file; None keeps theirs.
    """
    from safetensors.torch import save_file

    from ringkv.files import replaced_atomically

    config = model.config
    metadata = {
        "config": dataclasses.asdict(config),
        "weight_geometry": config.weight_geometry(),
        "extra": extra,
    }
    text = json.dumps(metadata, allow_nan=False)
    tensors = {name: weight.to(dtype or weight.dtype).contiguous() for name, weight in model.state_dict().items()}
    with replaced_atomically(path) as temporary:
        save_file(tensors, temporary, metadata={_KEY: text})


def load_checkpoint(path: str | Path, config: ModelConfig, dtype: torch.dtype) -> FrameTransformer:
    """A model of ``config`` with the weights in ``path``, on the CPU in ``dtype``.

    What is not weight geometry (``global_period``, ``sigmas``) is taken from ``config``, not from the file.
    ``ValueError`` with one line when the file is not a checkpoint or does not fit.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from model.transformer import FrameTransformer

    check_geometry(path, config)
    with torch.device("meta"):  # nothing is drawn or allocated only to be overwritten
        model = FrameTransformer(config)
    try:
        # Copied, because where a tensor lies in the file depends on the header's length, and a product's last bits on
        # how its operands are aligned.
        tensors = {name: weight.to(dtype, copy=True) for name, weight in load_file(path).items()}
        model.load_state_dict(tensors, assign=True)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ValueError(f"checkpoint={path}: cannot be loaded ({_one_line(error)})") from error
    return model


def fingerprint(model: torch.nn.Module) -> str:
    """sha256, in hex, over names, shapes, dtypes and bytes of all weights."""
    import torch

    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(json.dumps([name, list(weight.shape), str(weight.dtype)]).encode())
        digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def find_shipped(config: ModelConfig, data: str) -> Path | None:
    """The first shipped checkpoint, by file name, that fits ``config`` and was trained on ``data``; None without one.

    data: name of the data that the model is to continue. Weights that fit by shape alone would continue something else.
    """
    for path in sorted(SHIPPED.glob("*.safetensors")):
        metadata = read_metadata(path)
        if metadata["weight_geometry"] == config.weight_geometry() and metadata["extra"].get("data") == data:
            return path
    return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
