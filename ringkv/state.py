"""What every strategy's state has in common, and whether one may be loaded. Checks only; nothing is changed."""

from __future__ import annotations

from typing import Any

import torch

STATE_VERSION = 1


def check_state(state: object, geometry: dict[str, Any], dtype: str, num_layers: int) -> None:
    """Raise ``ValueError`` with one line unless ``state`` has the given geometry, dtype and number of layers.

    What a layer's tensors must look like is the strategy's to check.
    """
    if not isinstance(state, dict):
        raise ValueError(f"state is a {type(state).__name__}: expected the dict that get_state returns")
    absent = [key for key in ("version", "clock", "geometry", "dtype", "layers") if key not in state]
    if absent:
        raise ValueError(f"state lacks {', '.join(absent)}: expected the dict that get_state returns")
    if state["version"] != STATE_VERSION:
        raise ValueError(f"state version={state['version']!r}: this release reads version {STATE_VERSION}")
    clock = state["clock"]
    if clock is not None and (not isinstance(clock, int) or isinstance(clock, bool) or clock < 0):
        raise ValueError(f"state clock={clock!r}: expected None or an integer >= 0")
    _check_geometry(state["geometry"], geometry)
    if state["dtype"] != dtype:
        raise ValueError(f"state dtype={state['dtype']!r}: this cache stores {dtype!r}")
    layers = state["layers"]
    if not isinstance(layers, list | tuple) or len(layers) != num_layers:
        raise ValueError(f"state layers: expected a list of {num_layers} (kv, written) pairs")
    for index, entry in enumerate(layers):
        if not isinstance(entry, list | tuple) or len(entry) != 2 or not all(torch.is_tensor(t) for t in entry):
            raise ValueError(f"state layers[{index}]: expected a (kv, written) pair of tensors")


def check_tensor(what: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ``ValueError`` unless ``tensor`` has this shape and dtype."""
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(f"{what} is {tensor.dtype} {list(tensor.shape)}: this cache holds {dtype} {list(shape)}")


def _check_geometry(found: object, expected: dict[str, Any]) -> None:
    if not isinstance(found, dict):
        raise ValueError(f"state geometry={found!r}: expected {expected}")
    for key in sorted(expected.keys() | found.keys()):
        if found.get(key) != expected.get(key):
            raise ValueError(f"state geometry {key}={found.get(key)!r}: this cache has {key}={expected.get(key)!r}")
