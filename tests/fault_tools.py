"""Faults at the boundaries of what can be done with a session, and a census that tells whether any was lost.

A ``World`` has a few sessions at different clocks. A ``Fault`` breaks one place of one operation; what the sessions are
afterwards is compared with what they were, and what they go on to do with a world in which nothing happened.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from ringkv import movable, parking, statefile
from ringkv.resource import State
from tests.ring_tools import ring, same_bytes, step_of
from tests.strategies import Content, Rollout, build, random_content

WINDOWS = (ring(3), ring(2, 3), ring(2))
ARRIVALS = {"a": 0, "v": 2, "b": 3, "c": 1}
"""Steps after which a session begins: they are at different clocks."""
IN_STEP = ("a", "v", "n", "b")
"""Rows of the step that is disturbed: ``v`` the victim, ``n`` at its first frame. ``c`` stands by."""
SESSIONS = 7
NOISY = 2
"""Denoise passes of the disturbed step."""
GOES_ON = 2
"""Frames that are compared after it."""


@cache
def shared_content() -> Content:
    """Content of a session's frames, the same in every world."""
    return random_content(build("ring", WINDOWS, head_dim=8))


@cache
def states_at(name: str, clock: int) -> dict[str, State]:
    """The sessions when the victim's next frame is ``clock``, driven from their first frame."""
    world = World(name, clock, fresh=True)
    for step in range(clock + ARRIVALS["v"]):
        world.drive([rid for rid, arrival in ARRIVALS.items() if arrival <= step])
    return {rid: world.resource.get_state(rid) for rid in ARRIVALS if world.next[rid]}


class World:
    """Sessions of one strategy and what is done to them. clock: of the victim's next frame. fresh: none yet."""

    def __init__(self, name: str, clock: int, folder: Path | None = None, fresh: bool = False) -> None:
        more = {"undo_frames": 2} if name.startswith("ring") else {}
        self.name, self.clock = name, clock
        self.folder = folder
        self.rollout = Rollout(name, WINDOWS, head_dim=8, sessions=SESSIONS, parking_dir=folder, **more)
        self.rollout.content = shared_content()
        self.resource: Any = self.rollout.resource
        self.next = dict.fromkeys((*ARRIVALS, "n"), 0)
        self.passes = -1  # begun in the disturbed step
        if not fresh:
            for rid, state in states_at(name, clock).items():
                self.resource.ingest_request(rid)
                self.resource.load_state(rid, state)
                self.next[rid] = state["clock"] + 1

    def rows(self, rids: Any) -> list[tuple[str, int]]:
        return [(rid, self.next[rid]) for rid in rids]

    def drive(self, rids: Any, noisy: int = 1) -> list[list[Tensor]]:
        """One frame of each, in one batch: outputs by pass, then layer."""
        rows = self.rows(rids)
        self.rollout.begin(rows)
        self.passes = -1
        out = []
        for index in range(noisy + 1):
            self.passes += 1
            commit = index == noisy
            out.append(self.rollout.full_pass(rows, variant=0 if commit else 1 + index, commit=commit))
        self.rollout.finish(rows)
        for rid in rids:
            self.next[rid] += 1
        return out

    def cancel(self) -> None:
        """End the victim and the newcomer."""
        for rid in ("v", "n"):
            self.resource.remove_request(rid)

    def go_on(self, rids: Any) -> dict[str, list[Tensor]]:
        """The outputs of the next frames of each session, ``rids`` in one batch and the bystander alone."""
        out: dict[str, list[Tensor]] = {rid: [] for rid in (*rids, "c")}
        for index in range(1 + GOES_ON):
            for batch in (rids, ("c",)):
                for layers in self.drive(batch, noisy=NOISY if index == 0 else 1):
                    for row, rid in enumerate(batch):
                        out[rid] += [layer[row] for layer in layers]
        self.resource.check_integrity()
        return out

    def files(self) -> dict[str, bytes]:
        """Everything in the folder."""
        paths = sorted(self.folder.rglob("*")) if self.folder is not None else []
        return {path.name: path.read_bytes() for path in paths if path.is_file()}


@cache
def undisturbed(name: str, clock: int, cancelled: bool) -> tuple[dict[str, list[Tensor]], dict[str, int], int]:
    """What every session goes on to do when nothing happens, the memory report and the free sessions at the end."""
    world = World(name, clock)
    if cancelled:
        world.cancel()
    out = world.go_on(("a", "b") if cancelled else IN_STEP)
    return out, dict(world.resource.memory_report()), world.resource.num_free_sessions


# -- the census ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Census:
    """Who holds or has parked what. states: by request."""

    states: dict[str, State]
    sessions: dict[str, int | None]
    parked: frozenset[str]
    free: int


def census(world: World) -> Census:
    """Every session there is, found through the public calls alone."""
    resource = world.resource
    known = (*ARRIVALS, "n", "f1", "f2", "r")
    parked = frozenset(rid for rid in known if resource.is_parked(rid))
    sessions = {rid: resource.session_of(rid) for rid in known}
    held = [rid for rid in known if sessions[rid] is not None or rid in parked]
    states = {rid: resource.get_state(rid) for rid in held}
    return Census(states, sessions, parked, resource.num_free_sessions)


@dataclass
class Figures:
    """What a fault has done. sessions: there were before it."""

    sessions: int
    lost: int = 0
    duplicated: int = 0
    changed: int = 0
    pool: str = ""
    right: bool = True

    @property
    def clean(self) -> bool:
        """Whether nothing happened to anybody."""
        return self.right and not (self.lost or self.duplicated or self.changed)


def figures(before: Census, after: Census, aborted: bool) -> Figures:
    """Compare two moments. aborted: of those in the step only the clock is compared, a slot may be hidden."""
    out = Figures(len(before.states), pool=f"{after.free}/{SESSIONS} free")
    out.lost = len(before.states.keys() - after.states.keys())
    holders = [session for session in after.sessions.values() if session is not None]
    both = [rid for rid in after.parked if after.sessions[rid] is not None]
    out.duplicated = len(after.states.keys() - before.states.keys()) + len(holders) - len(set(holders)) + len(both)
    for rid in before.states.keys() & after.states.keys():
        old, new = before.states[rid], after.states[rid]
        if aborted and rid in IN_STEP:
            out.changed += old["clock"] != new["clock"]
        else:
            out.changed += not same_bytes(old, new)
    out.changed += sum(
        before.sessions[rid] != after.sessions[rid] or (rid in before.parked) != (rid in after.parked)
        for rid in before.states.keys() & after.states.keys()
    )
    out.right = after.free == before.free == SESSIONS - len(holders)
    return out


# -- operations ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """prepare: what comes before the fault. act: what fails, and works once nothing does. close: check, and undo."""

    name: str
    act: Callable[[World], Any]
    prepare: Callable[[World], None] = lambda world: None
    close: Callable[[World], None] = lambda world: None
    feature: str | None = None
    on_disk: bool = False


def _admit(world: World) -> None:
    world.resource.ingest_request("n")
    assert world.resource.admit(*step_of(world.rows(IN_STEP))).ok  # the newcomer has its session before the fault


def _step(world: World) -> None:
    world.drive(IN_STEP, noisy=NOISY)


def _path(world: World) -> Path:
    assert world.folder is not None
    return world.folder / "v.state"


def _save_another(world: World) -> None:
    world.folder.mkdir(parents=True, exist_ok=True)  # type: ignore[union-attr]
    world.resource.save("c", _path(world))


def _saved(world: World) -> None:
    assert same_bytes(statefile.read_state(_path(world))[0], world.resource.get_state("v"))


def _awake(world: World) -> None:
    world.resource.wake("v")


def _register(*rids: str) -> Callable[[World], None]:
    def prepare(world: World) -> None:
        for rid in rids:
            world.resource.ingest_request(rid)

    return prepare


def _remove_copies(world: World) -> None:
    """Each of the copies is the victim, and goes."""
    state = world.resource.get_state("v")
    for rid in ("f1", "f2", "r"):
        if world.resource.session_of(rid) is not None:
            assert same_bytes(world.resource.get_state(rid), state), rid
            world.resource.remove_request(rid)


@cache
def foreign_state(clock: int) -> State:
    """A state of the same model in other windows."""
    rollout = Rollout("cat", (ring(2), ring(3, 2), ring(4)), head_dim=8)
    rollout.run("other", range(clock))
    return rollout.resource.get_state("other")


def _restored(world: World) -> None:
    assert world.resource.get_state("r")["clock"] == world.clock - 1
    world.resource.remove_request("r")


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("step", _step, prepare=_admit),
        Operation(
            "save",
            lambda world: world.resource.save("v", _path(world)),
            prepare=_save_another,
            close=_saved,
            on_disk=True,
        ),
        Operation("park", lambda world: world.resource.park("v"), close=_awake, feature="park"),
        Operation("park on disk", lambda world: world.resource.park("v"), close=_awake, feature="park", on_disk=True),
        Operation("wake", _awake, prepare=lambda world: world.resource.park("v"), feature="park"),
        Operation(
            "wake from disk", _awake, prepare=lambda world: world.resource.park("v"), feature="park", on_disk=True
        ),
        Operation(
            "fork",
            lambda world: world.resource.fork("v", ["f1", "f2"]),
            prepare=_register("f1", "f2"),
            close=_remove_copies,
            feature="fork",
        ),
        Operation(
            "load",
            lambda world: world.resource.load_state("r", world.resource.get_state("v")),
            prepare=_register("r"),
            close=_remove_copies,
        ),
        Operation(
            "restore",
            lambda world: world.resource.restore("r", foreign_state(world.clock)),
            prepare=_register("r"),
            close=_restored,
            feature="restore",
        ),
    )
}


# -- faults --------------------------------------------------------------------------------------------------

Patch = Callable[[pytest.MonkeyPatch, World], None]


@dataclass(frozen=True)
class Fault:
    """Where ``operation`` breaks and with what.

    aborts: after a committing pass began. new_file: the file was saved, but for that.
    """

    operation: str
    boundary: str
    patch: Patch
    error: type[BaseException]
    aborts: bool = False
    new_file: bool = False

    def __str__(self) -> str:
        return f"{self.operation}: {self.boundary}"


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
NO_MEMORY = MemoryError("no memory")
NO_DEVICE_MEMORY = RuntimeError("CUDA out of memory")


def _raising(error: BaseException, usual: Callable[..., Any] | None = None, after: int = 0) -> Callable[..., Any]:
    """Raise ``error`` in call number ``after``, once what is usual is done if that is given. Others are as usual."""
    calls = []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        out = usual(*args, **kwargs) if usual is not None else None
        if len(calls) > after:
            raise error
        return out

    return call


def _method(name: str, error: BaseException, *, done: bool = False, after: int = 0) -> Patch:
    """A method of the resource fails: at once, or when it is ``done``."""

    def patch(patched: pytest.MonkeyPatch, world: World) -> None:
        usual = getattr(world.resource, name)
        patched.setattr(world.resource, name, _raising(error, usual if done or after else None, after))

    return patch


def _function(owner: Any, name: str, error: BaseException, *, done: bool = False, after: int = 0) -> Patch:
    """The same of a function of a module."""

    def patch(patched: pytest.MonkeyPatch, world: World) -> None:
        patched.setattr(owner, name, _raising(error, getattr(owner, name) if done or after else None, after))

    return patch


def _half_a_file(patched: pytest.MonkeyPatch, world: World) -> None:
    usual = statefile.save_file

    def write(tensors: Any, path: Path, **kwargs: Any) -> None:
        usual(tensors, path, **kwargs)
        os.truncate(path, path.stat().st_size // 2)
        raise NO_SPACE

    patched.setattr(statefile, "save_file", write)


@dataclass
class _Exhausted:
    """Layers of a state whose second one there is no memory for."""

    layers: list[Any]
    error: BaseException

    def __iter__(self) -> Iterator[Any]:
        yield self.layers[0]
        raise self.error


def _half_an_import(error: BaseException, after: int = 0) -> Patch:
    def patch(patched: pytest.MonkeyPatch, world: World) -> None:
        usual, calls = world.resource._import, []

        def put(session: int, layers: Any, *rest: Any) -> None:
            calls.append(session)
            usual(session, _Exhausted(layers, error) if len(calls) > after else layers, *rest)

        patched.setattr(world.resource, "_import", put)

    return patch


def _layer(index: int, number: int, error: BaseException, *, done: bool) -> Patch:
    """The write of pass ``number`` in a layer fails, before it or when the first row (ring: every row) is written."""

    def patch(patched: pytest.MonkeyPatch, world: World) -> None:
        layer = world.resource.layers[index]
        name = "put" if hasattr(layer, "put") else "write"
        usual = getattr(layer, name)

        def write(*args: Any, **kwargs: Any) -> Any:
            if world.passes != number:
                return usual(*args, **kwargs)
            if done:
                usual(*args, **kwargs)
            raise error

        patched.setattr(layer, name, write)

    return patch


def _step_faults() -> Iterator[Fault]:
    broken = FloatingPointError("the model broke")
    yield Fault("step", "admit | plan", _method("plan", broken), FloatingPointError)
    yield Fault("step", "plan half done", _method("_stage", broken, done=True), FloatingPointError)
    for number in range(NOISY + 1):
        committing = number == NOISY
        for layer in range(len(WINDOWS)):
            for done in (False, True):
                what = "committing pass" if committing else f"denoise pass {number}"
                yield Fault(
                    "step",
                    f"{what}, layer {layer}, {'written' if done else 'not written'}",
                    _layer(layer, number, NO_MEMORY if done else broken, done=done),
                    MemoryError if done else FloatingPointError,
                    aborts=committing and (layer > 0 or done),
                )
    yield Fault("step", "forward | commit", _method("commit", broken), FloatingPointError, aborts=True)


def _file_faults(operation: str) -> Iterator[Fault]:
    error = OSError
    yield Fault(operation, "state out of memory", _method("_export", NO_MEMORY, after=1), MemoryError)
    yield Fault(operation, "disk full", _half_a_file, error)
    yield Fault(operation, "fsync", _function(os, "fsync", NO_SPACE), error)
    yield Fault(operation, "rename", _function(os, "replace", NO_SPACE), error)
    yield Fault(
        operation, "fsync of the folder", _function(os, "fsync", NO_SPACE, after=1), error, new_file=operation == "save"
    )


def _put_faults(operation: str) -> Iterator[Fault]:
    """What goes wrong where a state is put into a session."""
    yield Fault(operation, "device full", _function(movable, "mapped", NO_DEVICE_MEMORY), RuntimeError)
    yield Fault(operation, "layer 0 | layer 1", _half_an_import(NO_MEMORY), MemoryError)
    yield Fault(operation, "last layer done", _method("_import", NO_DEVICE_MEMORY, done=True), RuntimeError)


FAULTS = (
    *_step_faults(),
    *_file_faults("save"),
    *_file_faults("park on disk"),
    Fault("park", "state out of memory", _method("_export", NO_MEMORY, after=1), MemoryError),
    Fault("park", "host memory full", _function(parking, "_to_host", NO_MEMORY), MemoryError),
    *_put_faults("wake"),
    Fault(
        "wake from disk", "read error", _function(statefile, "safe_open", OSError(errno.EIO, "I/O error")), ValueError
    ),
    Fault("wake from disk", "host memory full", _function(statefile, "read_state", NO_MEMORY), MemoryError),
    *_put_faults("wake from disk"),
    Fault("fork", "state out of memory", _method("_export", NO_MEMORY, after=1), MemoryError),
    *_put_faults("fork"),
    Fault("fork", "second copy, layer 0 | layer 1", _half_an_import(NO_MEMORY, after=1), MemoryError),
    *_put_faults("load"),
    Fault("restore", "refit out of memory", _function(movable, "refit", NO_MEMORY), MemoryError),
    *_put_faults("restore"),
)
