"""The one contract that every way of keeping the past satisfies.

Shapes: B rows of the step batch (padding rows included), H_q query heads, H_kv KV heads, T tokens per frame,
D head dim. Clocks are frame numbers.

A request lives through

    ingest_request -> { admit -> plan -> attend in every layer, several passes -> commit } ... -> remove_request

and ``reset_request`` sends it back to its start. A *pass* runs the model once over the step's rows. A frame takes any
number of non-committing passes (denoising), which change nothing that a later frame can see, then one committing pass,
which makes the frame history once ``commit`` has been called.

What an abort leaves behind: a committing pass that ran in any layer without the ``commit`` that follows it may have
overwritten the slot hidden at this clock. Until the frame is committed, a state of that request reports that slot
unwritten and zero, and the next ``plan`` of the request zeroes it in place. Nothing else is lost, and the frame can be
driven again at the same clock.

A resource belongs to the thread that made the first changing call or took the first state: any other thread that does
either is refused with ``RuntimeError``, since a plan, the passes that follow it and their commit are one thing, and a
state taken between two of them would be neither the old nor the new one.

Errors: ``ValueError`` for a value that the caller can correct (a wrong shape, an unknown request, a state that does not
fit), ``RuntimeError`` for a call out of order or a plan that is no longer valid. Both are raised before anything
changes. ``admit`` answers instead of raising.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from ringkv.config import EngineResourceInfo, KVConfig, KVSpec
    from ringkv.step import AdmitOutcome, FrameStep, StepContext

State = dict[str, Any]
"""``{"version", "clock", "geometry", "dtype", "layers"}``; see ``AttentionResource.get_state``."""

FEATURES = frozenset({"restore", "fork", "rewind", "park"})
"""What can be done with a session beyond its life and its state; ``wake`` comes with ``park``."""


class NoRoom(RuntimeError):
    """The pool has no session, or no pages, for a state to go into. Nothing was changed; worth asking again."""


class MemoryReport(TypedDict):
    """Bytes. ``resident`` is ``memory_bytes()``."""

    resident: int
    """KV storage of all sessions, the padding session and undo logs included."""
    in_use: int
    """The part of ``resident`` that holds committed frames and the scratch frames of claimed sessions."""
    padding: int
    """The part of ``resident`` that belongs to the padding session."""
    undo: int
    """The part of ``resident`` that undo logs take."""
    flags: int
    """Written flags, staged indices and other bookkeeping, not part of ``resident``."""
    parked: int
    """Parked sessions (K, V and flags) in host memory or on disk, not part of ``resident``."""


@dataclass(frozen=True)
class RestoreReport:
    """Frame numbers by layer, ascending, of a state that was put into another geometry.

    kept: held before and now. dropped: held before, without a place now. missing: has a place now and was not held; a
    hole that every read skips until the frame leaves the window.
    """

    kept: tuple[tuple[int, ...], ...]
    dropped: tuple[tuple[int, ...], ...]
    missing: tuple[tuple[int, ...], ...]


class AttentionResource(ABC):
    """KV storage of one model for many requests, and the attention that reads it."""

    fixed_addresses: ClassVar[bool]
    """True when no buffer moves after build, so that a captured graph stays valid over reset, load and reuse."""

    reads_in_graph: bool = False
    """Whether ``attend`` makes no decision on the host, so that a graph captured at one clock serves every clock."""

    config: KVConfig
    name: str
    device: torch.device
    dtype: torch.dtype
    layers: Sequence[Any]
    """One cache object per attention layer."""

    @classmethod
    @abstractmethod
    def build(cls, spec: KVSpec, info: EngineResourceInfo) -> Self:
        """Allocate everything. A read path that the strategy lacks raises ``ValueError`` naming those it has."""

    # -- a request's life ------------------------------------------------------------------------------------

    @abstractmethod
    def ingest_request(self, rid: str, overrides: Mapping[str, Any] | None = None) -> None:
        """Register ``rid`` without claiming a session. A registered rid is a no-op; any override raises by name."""

    @abstractmethod
    def admit(self, step: FrameStep, ctx: StepContext) -> AdmitOutcome:
        """Claim a session for each request of the step that holds none; all or nothing.

        Everything is checked before anything changes. Retryable: the pool is full, or a request is parked. Never:
        unknown or duplicate rid, a row without a clock, a wrong clock (a fresh session starts at 0, then exactly one
        frame after the last committed one), a malformed step; these are told even while the pool is full. Never raises
        for a bad step.
        """

    @abstractmethod
    def plan(self, step: FrameStep, ctx: StepContext) -> Any:
        """Stage the rows of an admitted step and return the host copy of what was staged.

        Replaces the pending plan. Padding rows come last, at clock 0, in the padding session; padding without one
        raises ``ValueError``. A step that ``admit`` would refuse for good, or did not admit at this clock, raises
        ``RuntimeError``.
        """

    @abstractmethod
    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer_idx: int,
        frame_pos: torch.Tensor,
        *,
        commit: bool,
    ) -> torch.Tensor:
        """Write the frame's K and V, then attend to what it may see: history and the frame itself.

        q: ``[B, H_q, T, D]``; k, v: ``[B, H_kv, T, D]``, k after RoPE and norm, v after the value-residual lerp, any
        strides, rounded to the cache's dtype on write (an fp16 overflow becomes inf). frame_pos: ``[B]`` int64 clocks;
        where the host can read them for free, a disagreement with the plan raises. Returns ``[B, H_q, T, D]`` in q's
        dtype. ``commit=False`` leaves history byte-identical; calling twice with the same input changes nothing more.
        Softmax scale is ``D ** -0.5``.
        """

    @abstractmethod
    def commit(self, step: FrameStep, ctx: StepContext) -> None:
        """Advance the clocks of the planned step. Metadata only.

        Eagerly raises ``RuntimeError`` unless every layer saw a committing pass for these rows since ``plan``.
        """

    @abstractmethod
    def reset_request(self, rid: str, free: bool = False) -> None:
        """Zero the session in place and release it; ``rid`` stays registered and may start again at frame 0."""

    @abstractmethod
    def remove_request(self, rid: str) -> None:
        """Reset, then unregister. An unknown rid is a no-op."""

    # -- who holds what --------------------------------------------------------------------------------------

    @abstractmethod
    def session_of(self, rid: str) -> int | None:
        """Session index that ``rid`` holds, or None."""

    @property
    @abstractmethod
    def num_sessions(self) -> int:
        """How many requests can hold a session at once."""

    @property
    @abstractmethod
    def num_free_sessions(self) -> int:
        """Sessions nobody holds."""

    # -- state -----------------------------------------------------------------------------------------------

    @abstractmethod
    def get_state(self, rid: str) -> State:
        """A copy of what ``rid``'s session needs to go on; ``ValueError`` when it holds none.

        ``clock`` is the last committed frame or None, ``geometry`` plain data, ``dtype`` its name, ``layers`` a list of
        ``(kv [2, 1, H_kv, capacity, D], written bool [capacity])`` with scratch zero in kv and True in written. A ring
        with an undo log adds ``undo``, how many frames it can be taken back and what they overwrote:
        ``{"depth", "layers": [(frames int64 [n], kv [2, 1, H_kv, n * T, D])]}``. A parked state is on the host.
        """

    @abstractmethod
    def load_state(self, rid: str, state: State) -> None:
        """Put ``state`` into the session of ``rid``, claiming one if it holds none.

        Everything is checked first: an unregistered rid, another geometry, dtype or version, flags that mark a slot
        which holds nothing at that clock raise ``ValueError``; a full pool raises ``NoRoom``. ``state`` is not
        changed and not kept. A frame that the clock says is held may be unmarked: reads skip the hole until the frame
        leaves the window. A parked request raises ``ValueError``: wake or reset it first. Running out of memory on the
        way leaves a session that was claimed for it free, and one that was held empty at frame 0.
        """

    @abstractmethod
    def save(self, rid: str, path: str | Path) -> None:
        """``get_state`` into one safetensors file, written atomically: the old file or the new one, never a part."""

    @abstractmethod
    def load(self, rid: str, path: str | Path) -> None:
        """``load_state`` from a file that ``save`` wrote.

        A file that is truncated, damaged (by a checksum over all of it), foreign or of a later version raises
        ``ValueError`` with the reason. Nothing in it is executed.
        """

    # -- what can be done with a session -----------------------------------------------------------------------

    @property
    @abstractmethod
    def features(self) -> frozenset[str]:
        """Those of ``FEATURES`` that this resource has. A call that needs another raises ``ValueError`` naming it."""

    @abstractmethod
    def restore(self, rid: str, state: State) -> RestoreReport:
        """``load_state`` of a state of another geometry, frame by frame: other windows, or another strategy.

        Per layer the session then holds exactly those frames that it would hold at that clock and that the state
        holds; the rest are holes. The model must be the same: layers, KV heads, head dim, tokens per frame and dtype,
        else ``ValueError``. Any undo log is left behind.
        """

    @abstractmethod
    def fork(self, rid: str, new_rids: Sequence[str]) -> None:
        """Give each of ``new_rids``, registered requests without a session, a copy of the session of ``rid``.

        All or nothing. A copy is at the same clock, with the same undo log, and goes on bit for bit as the original
        does, also where an aborted commit has cost it a slot. It is not admitted. ``ValueError`` for a request that is
        unknown, parked, named twice or holds a session; ``NoRoom`` with the counts when the pool has too few.
        """

    @abstractmethod
    def rewind(self, rid: str, frames: int) -> None:
        """Take the session of ``rid`` back by ``frames >= 1`` committed frames, bit for bit.

        What an aborted commit has cost it comes back too. ``ValueError`` beyond what the strategy still has: all of it
        with full context; in a ring the last ``undo_frames`` frames that this session committed, which neither
        ``load_state`` of a state without a log nor ``restore`` adds to.
        """

    @abstractmethod
    def park(self, rid: str) -> None:
        """Move the session of ``rid`` to host memory, or to a file in ``parking_dir``, and free it.

        Until it is woken the request stays registered, keeps its clock and is refused by ``admit``. From a CUDA device
        the copy goes to pinned memory beside whatever runs next. If it cannot be taken (no memory, no disk) the error
        is raised and the session is where it was. ``reset_request`` and ``remove_request`` drop the copy.
        """

    @abstractmethod
    def is_parked(self, rid: str) -> bool:
        """Whether the session of ``rid`` is parked."""

    @abstractmethod
    def wake(self, rid: str) -> None:
        """Bring a parked session back bit for bit, into any free session.

        ``NoRoom`` when the pool is full. On that and on any other error the request stays parked.
        """

    # -- size and health -------------------------------------------------------------------------------------

    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes of KV storage, all sessions, padding included; flags and indices are not."""

    @abstractmethod
    def memory_report(self) -> MemoryReport:
        """``memory_bytes`` and its parts."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` with the counts if flags, clocks, claims and storage disagree. Changes nothing."""

    # -- captured steps --------------------------------------------------------------------------------------

    @abstractmethod
    def build_accelerator_graph_buffers(self, slots: int, max_bs: int, max_seq_len: int) -> None:
        """Allocate what a captured replay touches, if ``build`` has not."""

    @abstractmethod
    def begin_replay(self, clocks: Sequence[int]) -> None:
        """Say that a captured step, its committing pass included, is about to be replayed for the pending plan.

        A replay runs no host code: this makes ``attend``'s checks for it and counts its committing pass, so that an
        abort is noticed. clocks: of all rows. ``RuntimeError`` without a valid plan or ``reads_in_graph``,
        ``ValueError`` for other clocks than the plan's.
        """

    @abstractmethod
    def post_warmup_validate(self) -> None:
        """Raise ``RuntimeError`` unless warm-up and capture left every session as build made it."""

    @abstractmethod
    def cleanup(self) -> None:
        """Drop every request and release the storage. The resource cannot be used afterwards."""
