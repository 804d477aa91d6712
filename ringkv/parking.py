"""Where parked sessions are: host memory, or a folder with a file each.

A parked session is a state. In host memory a state of a CPU resource is kept as it is, one of a CUDA device is copied
into pinned memory on a stream of its own, beside whatever the device does next, and waited for when it is read.
"""

from __future__ import annotations

import contextlib
import uuid
from dataclasses import dataclass
from pathlib import Path

import torch

from ringkv import statefile
from ringkv.resource import State
from ringkv.state import mapped, state_bytes


@dataclass(frozen=True)
class _Parked:
    """One parked session: in host memory, or in a file. ready: when its copy has arrived there."""

    nbytes: int
    state: State | None = None
    path: Path | None = None
    ready: torch.cuda.Event | None = None


class ParkingLot:
    """Parked sessions by request. folder: None for host memory; it is made when the first session comes."""

    def __init__(self, folder: str | Path | None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._parked: dict[str, _Parked] = {}

    def __len__(self) -> int:
        return len(self._parked)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of all parked sessions."""
        return sum(parked.nbytes for parked in self._parked.values())

    def put(self, rid: str, state: State) -> None:
        """Take ``state``, which nobody else may hold. ``OSError``, or no memory, leaves everything as it was."""
        assert rid not in self._parked, f"request {rid!r} is parked already"
        size = state_bytes(state)
        if self._folder is None:
            host, ready = _to_host(state)
            self._parked[rid] = _Parked(size, state=host, ready=ready)
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{uuid.uuid4().hex}.safetensors"  # a rid need not be a file name
        try:
            statefile.write_state(path, mapped(state, lambda tensor: tensor.cpu()), {"rid": rid})
        except BaseException:
            path.unlink(missing_ok=True)  # it is there when only its folder could not be synced
            raise
        self._parked[rid] = _Parked(size, path=path)

    def read(self, rid: str) -> State:
        """The parked state of ``rid``, on the host and not to be changed; it stays parked.

        ``ValueError`` with the reason if its file is damaged or another's, ``FileNotFoundError`` if it is gone.
        """
        parked = self._parked[rid]
        if parked.path is not None:
            state, extra = statefile.read_state(parked.path)
            if extra.get("rid") != rid:
                raise ValueError(f"{parked.path}: parked for request {extra.get('rid')!r}, not {rid!r}")
            return state
        assert parked.state is not None
        if parked.ready is not None:
            parked.ready.synchronize()
        return parked.state

    def drop(self, rid: str) -> None:
        """Forget ``rid`` and delete its file, if it is parked."""
        parked = self._parked.pop(rid, None)
        if parked is not None and parked.path is not None:
            with contextlib.suppress(OSError):  # what cannot be deleted is litter, not a loss
                parked.path.unlink()


def _to_host(state: State) -> tuple[State, torch.cuda.Event | None]:
    """``state`` in host memory, and when it is there."""
    device = state["layers"][0][0].device
    if device.type != "cuda":
        return mapped(state, lambda tensor: tensor.cpu()), None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory is given out again only once the copy is done
        return host

    with torch.cuda.stream(stream):
        host = mapped(state, copy)
        ready = stream.record_event()
    return host, ready
