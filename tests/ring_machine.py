"""Random programs against the specification, and every session against a solo run of its own.

The machine keeps a model of every request in plain Python: which contents it committed, frame by frame, whether it
holds a session, what it was admitted at, and whether an aborted commit killed the slot hidden at its clock. From that
model alone follow the bytes of every session, what every pass sees, what attention returns and which calls are
refused. It counts what its programs went through: a run that never wrapped, padded, aborted mid-commit, loaded, reset
or filled the pool proves nothing, and fails (in ``test_ring_machine.py``).
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from torch import Tensor

from ringkv import FrameStep, RingKVLayerConfig, RingKVManager, StepContext
from tests.ring_tools import (
    PAD_TAG,
    build_manager,
    bytes_of,
    clocks,
    dense_attention,
    reference_history,
    ring,
    same_bytes,
    step_of,
)

RIDS = ("r0", "r1", "r2", "r3")
MUST_HAPPEN = ("wrapped", "padded", "aborted mid-commit", "loaded", "loaded from a file", "reset", "filled the pool")
HAPPENED: Counter[str] = Counter()
"""Programs of the run in which each thing happened."""


@st.composite
def layer_geometry(draw: st.DrawFn) -> RingKVLayerConfig:
    frames = draw(st.integers(1, 5))
    return ring(draw(st.integers(1, frames)), draw(st.integers(1, 4)), frames)


@dataclasses.dataclass
class Request:
    """What the specification knows of a registered request."""

    holds: bool = False
    contents: list[int] = dataclasses.field(default_factory=list)  # content of every committed frame
    admitted: bool = False  # at the next frame
    killed: bool = False  # the slot hidden at the next frame, by a commit that was not finished
    content: int = 0  # what the next frames will hold

    @property
    def frame(self) -> int:
        return len(self.contents)

    @property
    def clock(self) -> int | None:
        return self.frame - 1 if self.contents else None


@dataclasses.dataclass
class Pending:
    rids: list[str]
    pads: int
    committed_layers: set[int] = dataclasses.field(default_factory=set)


def slots_of(layer: RingKVLayerConfig, frames: int) -> dict[int, int]:
    """Slot -> frame once ``frames`` frames are committed."""
    slots: dict[int, int] = {}
    for count, frame in enumerate(range(0, frames, layer.pinned_dilation)):
        slots[count % layer.ring_buckets] = frame
    return slots


def taken_slot(layer: RingKVLayerConfig, frame: int) -> int | None:
    """Slot that ``frame`` will overwrite, if any."""
    d = layer.pinned_dilation
    return None if frame % d else (frame // d) % layer.ring_buckets


class RingMachine(RuleBasedStateMachine):
    @initialize(
        layers=st.lists(layer_geometry(), min_size=1, max_size=3),
        tokens=st.integers(1, 3),
        sessions=st.integers(1, 3),
        heads=st.integers(1, 2),
        group=st.integers(1, 2),
        padding=st.booleans(),
    )
    def build(
        self, layers: list[RingKVLayerConfig], tokens: int, sessions: int, heads: int, group: int, padding: bool
    ) -> None:
        self.geometry: dict[str, Any] = {
            "layers": layers,
            "tokens_per_frame": tokens,
            "num_kv_heads": heads,
            "num_qo_heads": heads * group,
            "attention": "canonical",
        }
        self.layers, self.tokens, self.heads, self.queries = layers, tokens, heads, heads * group
        self.sessions, self.padding = sessions, padding
        self.manager = build_manager(num_sessions=sessions, padding_session=padding, **self.geometry)
        self.model: dict[str, Request] = {}
        self.pending: Pending | None = None
        self.void: Pending | None = None  # a plan that holds a request which was moved since
        self.lives = 0
        self.happened: set[str] = set()

    # -- the specification -----------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        return self.sessions - sum(request.holds for request in self.model.values())

    def frame_of(self, frame: int, content: float) -> tuple[Tensor, Tensor]:
        """K and V [H, T, 2] of one frame; every (content, frame, head, token) is a different vector."""
        second = torch.arange(self.tokens) + 4.0 * torch.arange(self.heads)[:, None] + 16.0 * content
        k = torch.stack([torch.full_like(second, frame + 1.0), second], dim=-1)
        return k, k * torch.tensor([-1.0, 1.0])

    def expected_state(self, request: Request) -> list[tuple[Tensor, Tensor]]:
        """The layers of a state of ``request``."""
        out = []
        for layer in self.layers:
            capacity = (layer.ring_frames + 1) * self.tokens
            kv, written = torch.zeros(2, 1, self.heads, capacity, 2), torch.zeros(capacity, dtype=torch.bool)
            written[-self.tokens :] = True
            for slot, frame in slots_of(layer, request.frame).items():
                if not (request.killed and slot == taken_slot(layer, request.frame)):
                    span = slice(slot * self.tokens, (slot + 1) * self.tokens)
                    kv[0, 0, :, span], kv[1, 0, :, span] = self.frame_of(frame, request.contents[frame])
                    written[span] = True
            out.append((kv, written))
        return out

    def expected_visible(self, request: Request, layer: RingKVLayerConfig, own: tuple[Tensor, Tensor]) -> Any:
        """K and V [H, N, 2] that the next frame of ``request`` sees, itself included."""
        history = reference_history(layer.ring_buckets, layer.pinned_dilation, request.frame)
        frames = [self.frame_of(frame, request.contents[frame]) for frame in history] + [own]
        return torch.cat([k for k, _ in frames], dim=1), torch.cat([v for _, v in frames], dim=1)

    # -- what a step does ------------------------------------------------------------------------------------

    def rows(self, rids: Sequence[str]) -> list[tuple[str, int]]:
        return [(rid, self.model[rid].frame) for rid in rids]

    def unchanged(self, call: Callable[[], object]) -> object:
        """``call``, which must not change a byte."""
        before = bytes_of(self.manager)
        out = call()
        assert same_bytes(bytes_of(self.manager), before)
        return out

    def raises(self, error: Any, call: Callable[[], object]) -> None:
        """``call`` raises ``error`` and does not change a byte."""

        def run() -> None:
            with pytest.raises(error):
                call()

        self.unchanged(run)

    def run_pass(self, plan: Pending, layers: Sequence[int], *, commit: bool, noise: float | None, q_seed: int) -> None:
        """One pass in ``layers``: every row sees its visible frames and nothing else, and attends to just these."""
        requests = [self.model[rid] for rid in plan.rids]
        own = [self.frame_of(r.frame, r.content if noise is None else noise) for r in requests]
        pad = torch.full_like(own[0][0], PAD_TAG)
        k = torch.stack([k for k, _ in own] + [pad] * plan.pads)
        v = torch.stack([v for _, v in own] + [pad] * plan.pads)
        q = torch.randn(len(k), self.queries, self.tokens, 2, generator=torch.Generator().manual_seed(q_seed)) / 500
        frame_pos = clocks(*(r.frame for r in requests), *[0] * plan.pads)
        spans = [self.manager.session_of(rid) for rid in plan.rids] + [self.sessions] * plan.pads
        for index in layers:
            capacity = self.manager.capacity(index)
            k_all, v_all, visible = self.manager.upsert(k, v, index, frame_pos, commit=commit)
            visible = visible.reshape(len(k), -1)
            out = self.manager.attend(q, k, v, index, frame_pos, commit=commit)
            for row, session in enumerate(spans):
                where = visible[row].nonzero().flatten().tolist()
                assert session is not None
                assert session * capacity <= where[0]
                assert where[-1] < (session + 1) * capacity
                if row >= len(requests):
                    continue
                want_k, want_v = self.expected_visible(requests[row], self.layers[index], own[row])
                for all_tokens, want in ((k_all, want_k), (v_all, want_v)):
                    got = all_tokens[0, :, visible[row]]
                    for head in range(self.heads):
                        assert sorted(got[head].tolist()) == sorted(want[head].tolist())
                dense = dense_attention(q[row], want_k, want_v)
                assert (out[row].double() - dense).abs().max() <= 1e-6 * want_v.abs().max()
        if commit:
            plan.committed_layers |= set(layers)
            for request in requests:
                request.killed = True  # until the commit that follows

    def begin(self, rids: list[str], pads: int) -> Pending:
        """Admit and plan rows that can run."""
        step, ctx = step_of(self.rows(rids), pads)
        outcome = self.manager.admit(step, ctx)
        assert outcome.ok, outcome.reason
        for rid in rids:
            self.claim(rid)
            self.model[rid].admitted = True
        self.plan_admitted(rids, pads)
        assert self.pending is not None
        return self.pending

    def claim(self, rid: str) -> None:
        request = self.model[rid]
        if not request.holds:
            self.lives += 1
            request.holds, request.content = True, self.lives
            if not self.free:
                self.happened.add("filled the pool")

    def plan_admitted(self, rids: list[str], pads: int) -> None:
        plan = self.manager.plan(*step_of(self.rows(rids), pads))
        self.pending, self.void = Pending(list(rids), pads), None
        assert plan.clocks == tuple(self.model[rid].frame for rid in rids) + (0,) * pads
        if pads:
            self.happened.add("padded")
        for rid in rids:
            self.saw_abort(rid)
            session = self.manager.session_of(rid)
            assert session is not None
            for config, layer in zip(self.layers, self.manager.layers, strict=True):
                slot = taken_slot(config, self.model[rid].frame)
                if self.model[rid].killed and slot is not None:  # zeroed in place
                    low = layer.session_span(session)[0] + slot * self.tokens
                    assert not layer.kv[:, :, :, low : low + self.tokens].any()
                    assert not layer.written[low : low + self.tokens].any()

    def finish_pending(self) -> None:
        assert self.pending is not None
        self.manager.commit(*step_of(self.rows(self.pending.rids), self.pending.pads))
        for rid in self.pending.rids:
            request = self.model[rid]
            if any(request.frame // layer.pinned_dilation >= layer.ring_buckets for layer in self.layers):
                self.happened.add("wrapped")
            request.contents.append(request.content)
            request.admitted = request.killed = False
        self.pending = None

    def moved(self, rid: str) -> None:
        """The session of ``rid`` was put elsewhere: a plan that holds it is void."""
        if self.pending is not None and rid in self.pending.rids:
            self.void, self.pending = self.pending, None

    def saw_abort(self, rid: str) -> None:
        if self.model[rid].killed:
            self.happened.add("aborted mid-commit")

    def draw_rids(self, data: st.DataObject, among: Sequence[str]) -> list[str]:
        return data.draw(st.lists(st.sampled_from(sorted(among)), min_size=1, max_size=3, unique=True))

    def draw_runnable(self, data: st.DataObject) -> tuple[list[str], int]:
        """Rows that can be admitted, and padding."""
        held = [rid for rid, request in self.model.items() if request.holds]
        newcomers = [rid for rid, request in self.model.items() if not request.holds][: self.free]
        rids = self.draw_rids(data, held + newcomers)
        return rids, data.draw(st.integers(0, 2)) if self.padding else 0

    # -- rules: registration and admission -------------------------------------------------------------------

    @rule(rid=st.sampled_from(RIDS))
    def ingest(self, rid: str) -> None:
        self.unchanged(lambda: self.manager.ingest_request(rid))
        self.model.setdefault(rid, Request())

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        rids = self.draw_rids(data, list(self.model))
        newcomers = [rid for rid in rids if not self.model[rid].holds]
        outcome = self.unchanged(lambda: self.manager.admit(*step_of(self.rows(rids))))
        if len(newcomers) > self.free:
            assert (outcome.ok, outcome.retryable) == (False, True)  # type: ignore[attr-defined]
            return
        assert outcome.ok  # type: ignore[attr-defined]
        for rid in rids:
            self.claim(rid)
            self.model[rid].admitted = True

    @precondition(lambda self: self.model)
    @rule(data=st.data(), bad=st.sampled_from(["skip", "repeat", "none", "twice", "unknown", "no row", "no clock"]))
    def admit_what_can_never_run(self, data: st.DataObject, bad: str) -> None:
        rid, *others = self.draw_rids(data, list(self.model))
        frame: Any = self.model[rid].frame
        frames, rids = [*self.rows(others), (rid, frame)], [*others, rid]
        if bad in ("skip", "repeat", "none"):
            frames[-1] = (rid, {"skip": frame + 1, "repeat": frame - 1, "none": None}[bad])
        elif bad == "twice":
            frames, rids = [*frames, (rid, frame + 1)], [*rids, rid]
        elif bad == "unknown":
            frames, rids = [*frames, ("nobody", 0)], [*rids, "nobody"]
        elif bad == "no row":
            rids = [*others, "nobody"]
        else:
            frames = frames[:-1]
        step, ctx = FrameStep(frames=frames), StepContext(request_ids=rids)
        outcome = self.unchanged(lambda: self.manager.admit(step, ctx))
        assert (outcome.ok, outcome.retryable) == (False, False)  # type: ignore[attr-defined]

    # -- rules: one step in pieces ---------------------------------------------------------------------------

    @precondition(lambda self: any(r.holds or self.free for r in self.model.values()))
    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        self.begin(*self.draw_runnable(data))

    @precondition(lambda self: any(not r.holds for r in self.model.values()))
    @rule(data=st.data())
    def plan_what_was_not_admitted(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(rid for rid, r in self.model.items() if not r.holds)))
        admitted = [rid for rid, r in self.model.items() if r.admitted][:1]
        rows = self.rows([*admitted, rid])
        error = RuntimeError if len(rows) <= self.sessions else (RuntimeError, ValueError)  # more rows than sessions
        self.raises(error, lambda: self.manager.plan(*step_of(rows)))

    @precondition(lambda self: not self.padding and any(r.admitted for r in self.model.values()))
    @rule()
    def plan_padding_that_is_not_there(self) -> None:
        rids = [rid for rid, r in self.model.items() if r.admitted]
        self.raises(ValueError, lambda: self.manager.plan(*step_of(self.rows(rids), pads=1)))

    @precondition(lambda self: self.pending)
    @rule(seed=st.integers(0, 99), noise=st.integers(100, 199))
    def denoise(self, seed: int, noise: int) -> None:
        assert self.pending is not None
        killed = [self.model[rid].killed for rid in self.pending.rids]
        self.run_pass(self.pending, range(len(self.layers)), commit=False, noise=noise, q_seed=seed)
        assert [self.model[rid].killed for rid in self.pending.rids] == killed

    @precondition(lambda self: self.pending)
    @rule(seed=st.integers(0, 99), last=st.integers(0, 2), dirty=st.booleans())
    def run_the_committing_pass_up_to_a_layer(self, seed: int, last: int, dirty: bool) -> None:
        assert self.pending is not None
        layers = range(min(last, len(self.layers) - 1) + 1)
        if dirty:  # a model that crashed half-way: what it wrote must not survive
            self.run_pass(self.pending, layers, commit=True, noise=250, q_seed=seed)
            self.begin(self.pending.rids, self.pending.pads)
        assert self.pending is not None
        self.run_pass(self.pending, layers, commit=True, noise=None, q_seed=seed)

    @precondition(lambda self: self.pending)
    @rule()
    def commit(self) -> None:
        assert self.pending is not None
        if self.pending.committed_layers == set(range(len(self.layers))):
            self.unchanged(self.finish_pending)
        else:
            step, ctx = step_of(self.rows(self.pending.rids), self.pending.pads)
            self.raises(RuntimeError, lambda: self.manager.commit(step, ctx))

    @precondition(lambda self: self.void)
    @rule(layer=st.integers(0, 2), commit=st.booleans())
    def use_a_void_plan(self, layer: int, commit: bool) -> None:
        assert self.void is not None
        rows = len(self.void.rids) + self.void.pads
        k, q = torch.ones(rows, self.heads, self.tokens, 2), torch.ones(rows, self.queries, self.tokens, 2)
        frame_pos, index = clocks(*[0] * rows), min(layer, len(self.layers) - 1)
        step, ctx = step_of([(rid, 0) for rid in self.void.rids], self.void.pads)
        for call in (
            lambda: self.manager.upsert(k, k, index, frame_pos, commit=commit),
            lambda: self.manager.attend(q, k, k, index, frame_pos, commit=commit),
            lambda: self.manager.commit(step, ctx),
        ):
            self.raises(RuntimeError, call)

    # -- rules: whole frames, and everything else ------------------------------------------------------------

    @precondition(lambda self: any(r.holds or self.free for r in self.model.values()))
    @rule(data=st.data(), frames=st.integers(1, 8))
    def advance(self, data: st.DataObject, frames: int) -> None:
        rids, pads = self.draw_runnable(data)
        for i in range(frames):
            plan = self.begin(rids, pads)
            if i == 0:
                self.run_pass(plan, range(len(self.layers)), commit=False, noise=300, q_seed=i)
            self.run_pass(plan, range(len(self.layers)), commit=True, noise=None, q_seed=i)
            self.finish_pending()

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.model)))
        if self.model[rid].holds:
            self.happened.add("reset")
        self.saw_abort(rid)
        self.manager.reset_request(rid)
        self.moved(rid)
        self.model[rid] = Request()

    @precondition(lambda self: self.model)
    @rule(data=st.data(), times=st.integers(1, 2))
    def remove(self, data: st.DataObject, times: int) -> None:
        rid = data.draw(st.sampled_from(sorted(self.model)))
        for _ in range(times):
            self.manager.remove_request(rid)
        self.moved(rid)
        del self.model[rid]

    @precondition(lambda self: any(r.holds for r in self.model.values()))
    @rule(data=st.data(), by_file=st.booleans())
    def move_a_state(self, data: st.DataObject, by_file: bool) -> None:
        source = data.draw(st.sampled_from(sorted(rid for rid, r in self.model.items() if r.holds)))
        target = data.draw(st.sampled_from(sorted(self.model)))
        self.saw_abort(source)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.safetensors"
            if by_file:
                self.unchanged(lambda: self.manager.save(source, path))
            state = self.manager.get_state(source)

            def load() -> None:
                if by_file:
                    self.manager.load(target, path)
                else:
                    self.manager.load_state(target, state)

            if not self.model[target].holds and not self.free:
                self.raises(RuntimeError, load)
                return
            load()
        self.moved(target)
        self.happened |= {"loaded", "loaded from a file"} if by_file else {"loaded"}
        self.claim(target)
        request, origin = self.model[target], self.model[source]
        if request is not origin:
            self.lives += 1
            request.content = self.lives  # from here on the two differ
        request.contents, request.killed, request.admitted = list(origin.contents), origin.killed, False

    # -- what always holds -----------------------------------------------------------------------------------

    @invariant()
    def every_byte_is_as_specified(self) -> None:
        manager = self.manager
        manager.check_integrity()
        assert manager.num_free_sessions == self.free
        held = {rid: manager.session_of(rid) for rid in RIDS}
        assert {rid for rid, session in held.items() if session is not None} == {
            rid for rid, request in self.model.items() if request.holds
        }
        taken = {session: rid for rid, session in held.items() if session is not None}
        assert len(taken) == self.sessions - self.free
        assert taken.keys() <= set(range(self.sessions))
        for session in range(self.sessions):
            request = self.model[taken[session]] if session in taken else Request()
            if session in taken:
                state = self.manager.get_state(taken[session])
                assert state["clock"] == request.clock
                assert same_bytes(state["layers"], self.expected_state(request))
            self.check_storage(session, request)
        self.check_padding()

    def check_storage(self, session: int, request: Request) -> None:
        """The session in place: as in a state, but for its scratch and a slot that an unfinished commit may have
        overwritten.
        """
        for config, layer, (kv, written) in zip(
            self.layers, self.manager.layers, self.expected_state(request), strict=True
        ):
            low, high = layer.session_span(session)
            certain = torch.ones(high - low, dtype=torch.bool)
            if request.holds:
                certain[-self.tokens :] = False
            slot = taken_slot(config, request.frame)
            if request.killed and slot is not None:
                certain[slot * self.tokens : (slot + 1) * self.tokens] = False
            assert torch.equal(layer.kv[:, :, :, low:high][:, :, :, certain], kv[:, :, :, certain])
            assert torch.equal(layer.written[low:high][certain], written[certain])
            assert bool(layer.written[high - self.tokens : high].all())

    def check_padding(self) -> None:
        for layer in self.manager.layers:
            low = layer.session_span(self.sessions - 1)[1]
            assert layer.kv.shape[3] == low + (layer.session_span(0)[1] if self.padding else 0)
            assert set(layer.kv[:, :, :, low:].unique().tolist()) <= {0.0, PAD_TAG}
            assert PAD_TAG not in layer.kv[:, :, :, :low]

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for rid, request in self.model.items():
                if request.holds:
                    self.check_against_a_solo_run(rid, request)
            HAPPENED.update([*self.happened, "programs"])

    def check_against_a_solo_run(self, rid: str, request: Request) -> None:
        """The session's ring bytes are those of a single-session manager that was only ever given its frames."""
        solo: RingKVManager = build_manager(num_sessions=1, **self.geometry)
        solo.ingest_request("solo")
        for frame, content in enumerate(request.contents):
            step, ctx = step_of([("solo", frame)])
            assert solo.admit(step, ctx).ok
            solo.plan(step, ctx)
            k, v = self.frame_of(frame, content)
            for index in range(len(self.layers)):
                solo.upsert(k[None], v[None], index, clocks(frame), commit=True, build_visibility=False)
            solo.commit(step, ctx)
        session = self.manager.session_of(rid)
        assert session is not None
        for config, shared, alone in zip(self.layers, self.manager.layers, solo.layers, strict=True):
            low, high = shared.session_span(session)
            same = torch.ones(high - low, dtype=torch.bool)
            same[-self.tokens :] = False
            slot = taken_slot(config, request.frame)
            if request.killed and slot is not None:
                same[slot * self.tokens : (slot + 1) * self.tokens] = False
            if request.contents:
                assert same_bytes(shared.kv[:, :, :, low:high][:, :, :, same], alone.kv[:, :, :, same])
                assert torch.equal(shared.written[low:high][same], alone.written[same])
