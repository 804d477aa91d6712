"""What every strategy's state has in common, whether one may be loaded, and how one is refitted to another geometry.

Nothing here changes a resource or a state that it is given.
"""

from __future__ import annotations

from typing import Any

import torch

from ringkv import layout, memory
from ringkv.resource import RestoreReport, State

STATE_VERSION = 1

Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""``(kv, written)`` of each layer."""


def check_fields(state: object, dtype: torch.dtype) -> State:
    """``state`` if its fields are there and version, clock and dtype make sense, else ``ValueError`` with one line."""
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
    if state["dtype"] != memory.dtype_name(dtype):
        raise ValueError(f"state dtype={state['dtype']!r}: this cache stores {memory.dtype_name(dtype)!r}")
    return state


def check_state(state: object, geometry: dict[str, Any], dtype: torch.dtype) -> None:
    """Raise ``ValueError`` with one line unless ``state`` can be put into a session of this geometry as it is."""
    found = check_fields(state, dtype)
    theirs = found["geometry"]
    if not isinstance(theirs, dict):
        raise ValueError(f"state geometry={theirs!r}: expected {geometry}")
    for key in sorted(geometry.keys() | theirs.keys()):
        if theirs.get(key) != geometry.get(key):
            raise ValueError(f"state geometry {key}={theirs.get(key)!r}: this cache has {key}={geometry.get(key)!r}")
    _check_layers(found, dtype)


def check_foreign(state: object, geometry: dict[str, Any], dtype: torch.dtype) -> None:
    """Raise ``ValueError`` with one line unless ``state`` is whole and holds frames of the same model.

    Its windows, and the strategy that wrote it, may be others.
    """
    found = check_fields(state, dtype)
    theirs = found["geometry"]
    layout.check_geometry(theirs)
    for key in layout.SHARED:
        if theirs[key] != geometry[key]:
            raise ValueError(f"state geometry {key}={theirs[key]}: this cache has {key}={geometry[key]}")
    _check_layers(found, dtype)


def unmarked_frames(places: dict[int, int], written: torch.Tensor, tokens_per_frame: int) -> set[int]:
    """Frames that a checked layer should hold and does not: its holes."""
    marks = written.view(-1, tokens_per_frame)[:, 0].tolist()
    return {frame for frame, place in places.items() if not marks[place]}


def refit(state: State, geometry: dict[str, Any]) -> tuple[Layers, RestoreReport]:
    """The layers of a state of ``geometry`` with those frames of a checked foreign ``state`` that have a place in it.

    Frames keep their numbers; what has a place and no content is left unmarked.
    """
    clock, tokens = state["clock"], geometry["tokens_per_frame"]
    layers: Layers = []
    kept, dropped, missing = [], [], []
    for index, (kv, written) in enumerate(state["layers"]):
        source, target = layout.places(state["geometry"], index, clock), layout.places(geometry, index, clock)
        held = source.keys() - unmarked_frames(source, written, tokens)
        room = layout.room(geometry, index, clock)
        new_kv = kv.new_zeros(*kv.shape[:3], room * tokens, kv.shape[4])
        new_written = written.new_zeros(room * tokens)
        new_written[-tokens:] = True
        for frame in held & target.keys():
            start, place = source[frame] * tokens, target[frame] * tokens
            new_kv[:, :, :, place : place + tokens] = kv[:, :, :, start : start + tokens]
            new_written[place : place + tokens] = True
        layers.append((new_kv, new_written))
        kept.append(tuple(sorted(held & target.keys())))
        dropped.append(tuple(sorted(held - target.keys())))
        missing.append(tuple(sorted(target.keys() - held)))
    return layers, RestoreReport(tuple(kept), tuple(dropped), tuple(missing))


def state_bytes(state: State) -> int:
    """Bytes of a state's tensors."""
    undo = state["undo"]["layers"] if "undo" in state else []
    return sum(tensor.nbytes for pair in (*state["layers"], *undo) for tensor in pair)


def mapped(state: State, change: Any) -> State:
    """``state`` with ``change`` applied to each of its tensors."""
    out = {**state, "layers": [(change(kv), change(written)) for kv, written in state["layers"]]}
    if "undo" in state:
        layers = [(change(frames), change(kv)) for frames, kv in state["undo"]["layers"]]
        out["undo"] = {**state["undo"], "layers": layers}
    return out


def check_tensor(what: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ``ValueError`` unless ``tensor`` has this shape and dtype."""
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(f"{what} is {tensor.dtype} {list(tensor.shape)}: expected {dtype} {list(shape)}")


def _check_layers(state: State, dtype: torch.dtype) -> None:
    """Raise unless the tensors are those of a state of its own geometry at its own clock."""
    geometry, clock, layers = state["geometry"], state["clock"], state["layers"]
    tokens, count = geometry["tokens_per_frame"], geometry["num_layers"]
    if not isinstance(layers, list | tuple) or len(layers) != count:
        raise ValueError(f"state layers: expected a list of {count} (kv, written) pairs")
    for index, entry in enumerate(layers):
        what = f"state layers[{index}]"
        if not isinstance(entry, list | tuple) or len(entry) != 2 or not all(torch.is_tensor(t) for t in entry):
            raise ValueError(f"{what}: expected a (kv, written) pair of tensors")
        kv, written = entry
        room = layout.room(geometry, index, clock)
        shape = (2, 1, geometry["num_kv_heads"], room * tokens, geometry["head_dim"])
        check_tensor(f"{what} kv", kv, shape, dtype)
        check_tensor(f"{what} written", written, (room * tokens,), torch.bool)
        by_frame = written.cpu().view(room, tokens)
        marks = by_frame.all(dim=1).tolist()
        if marks != by_frame.any(dim=1).tolist():
            raise ValueError(f"{what} written marks part of a frame: a frame is written whole")
        if not marks[-1]:
            raise ValueError(f"{what} written is False on scratch, its last frame: it must be True there")
        extra = {place for place, mark in enumerate(marks[:-1]) if mark} - set(
            layout.places(geometry, index, clock).values()
        )
        if extra:
            raise ValueError(f"{what} written marks places {sorted(extra)}, which hold nothing at clock {clock}")
