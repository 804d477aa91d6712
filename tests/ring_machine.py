"""Random programs against the specification, and every session against a solo run of its own.

The machine keeps a model of every request in plain Python: which contents it committed, frame by frame, whether it
holds a session, what it was admitted at, and whether an aborted commit killed the slot hidden at its clock. From that
model alone follow the bytes of every session, what every pass sees, what attention returns and which calls are
refused. What a session can do beyond its life is in ``ring_machine_sessions.py``. Both count what their programs went
through: a run in which something never happened proves nothing, and fails (in ``test_ring_machine.py``).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
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

from ringkv import FrameStep, RingKVLayerConfig, RingKVManager, StepContext
from tests.ring_spec import Request, Spec, layer_geometry, slots_of, taken_slot
from tests.ring_tools import (
    PAD_TAG,
    build_manager,
    bytes_of,
    clocks,
    dense_attention,
    same_bytes,
    step_of,
)

RIDS = ("r0", "r1", "r2", "r3")
HAPPENED: Counter[str] = Counter()
"""Programs of the run in which each thing happened."""


@dataclasses.dataclass
class Pending:
    rids: list[str]
    pads: int
    committed_layers: set[int] = dataclasses.field(default_factory=set)


class RingMachine(RuleBasedStateMachine):
    @initialize(
        layers=st.lists(layer_geometry(), min_size=1, max_size=3),
        tokens=st.integers(1, 3),
        sessions=st.integers(1, 3),
        heads=st.integers(1, 2),
        group=st.integers(1, 2),
        padding=st.booleans(),
        undo=st.integers(0, 4),
    )
    def build(
        self,
        layers: list[RingKVLayerConfig],
        tokens: int,
        sessions: int,
        heads: int,
        group: int,
        padding: bool,
        undo: int,
    ) -> None:
        self.geometry: dict[str, Any] = {
            "layers": layers,
            "tokens_per_frame": tokens,
            "num_kv_heads": heads,
            "num_qo_heads": heads * group,
            "attention": "canonical",
            "undo_frames": undo,
        }
        self.spec, self.undo = Spec(layers, tokens, heads), undo
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

    # -- what a step does ------------------------------------------------------------------------------------

    @property
    def runnable(self) -> bool:
        """Whether a request could make a frame."""
        return any(r.holds or (self.free and not r.parked) for r in self.model.values())

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
        own = [self.spec.frame_of(r.frame, r.content if noise is None else noise) for r in requests]
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
                want_k, want_v = self.spec.visible(requests[row], index, own[row])
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
            request.undo = min(request.undo + 1, self.undo)
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
        newcomers = [rid for rid, request in self.model.items() if not request.holds and not request.parked][
            : self.free
        ]
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
        parked = any(self.model[rid].parked for rid in rids)
        assert not parked or "parked" in outcome.reason  # type: ignore[attr-defined]
        if parked or len(newcomers) > self.free:
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

    @precondition(lambda self: self.runnable)
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

    @precondition(lambda self: self.runnable)
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
        if self.pending is not None and rid in self.pending.rids:
            self.happened.add("cancelled in the middle of a frame")
        for _ in range(times):
            self.manager.remove_request(rid)
        self.moved(rid)
        del self.model[rid]

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
            self.check_storage(session, request)
        for rid, request in self.model.items():
            assert manager.is_parked(rid) == request.parked
            if request.holds or request.parked:
                state = manager.get_state(rid)
                assert state["clock"] == request.clock
                assert same_bytes(state["layers"], self.spec.state_of(request))
        self.check_padding()

    def check_storage(self, session: int, request: Request) -> None:
        """The session in place: as in a state, but for its scratch and a slot that an unfinished commit may have
        overwritten.
        """
        for config, layer, (kv, written) in zip(
            self.layers, self.manager.layers, self.spec.state_of(request), strict=True
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
                if request.holds or request.parked:
                    self.check_against_a_solo_run(rid, request)
            self.manager.cleanup()
            HAPPENED.update([*self.happened, "programs"])

    def check_against_a_solo_run(self, rid: str, request: Request) -> None:
        """Its state is that of a single-session manager that was only ever given its frames, but for what is lost."""
        solo: RingKVManager = build_manager(num_sessions=1, **self.geometry)
        self.spec.play(solo, "solo", request.contents)
        if not request.contents:
            return
        states = [manager.get_state(name)["layers"] for manager, name in ((self.manager, rid), (solo, "solo"))]
        for index, (layer, (kv, written), (solo_kv, solo_written)) in enumerate(zip(self.layers, *states, strict=True)):
            gone = torch.zeros_like(written)
            for slot, frame in slots_of(layer, request.frame).items():
                killed = request.killed and slot == taken_slot(layer, request.frame)
                if killed or frame in request.lost.get(index, ()):
                    gone[slot * self.tokens : (slot + 1) * self.tokens] = True
            assert same_bytes(kv[:, :, :, ~gone], solo_kv[:, :, :, ~gone])
            assert torch.equal(written[~gone], solo_written[~gone])
            assert not kv[:, :, :, gone].any()
            assert not written[gone].any()
