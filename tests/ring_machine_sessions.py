"""The machine of ``ring_machine.py`` with what a session can do: states, forks, rewinds, parking, other geometries."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from ringkv import RingKVLayerConfig, RingKVManager
from tests.ring_machine import RIDS, RingMachine
from tests.ring_spec import Request, Spec, layer_geometry, slots_of
from tests.ring_tools import build_manager, same_bytes, step_of

MUST_HAPPEN = (
    "wrapped",
    "padded",
    "aborted mid-commit",
    "cancelled in the middle of a frame",
    "loaded",
    "loaded from a file",
    "reset",
    "filled the pool",
    "forked",
    "forked after an abort",
    "taken back",
    "taken back after a wrap",
    "taken back after an abort",
    "parked",
    "woken",
    "refused to wake, for the pool was full",
    "restored with holes",
    "restored without",
)


class SessionMachine(RingMachine):
    def new_content(self) -> int:
        self.lives += 1
        return self.lives

    def holding(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(rid for rid, r in self.model.items() if r.holds)))

    def arrive(self, rid: str, request: Request) -> None:
        """``rid`` now stands where ``request`` says, in a session."""
        self.moved(rid)
        self.model[rid] = request
        if not self.free:
            self.happened.add("filled the pool")

    @precondition(lambda self: any(r.holds or r.parked for r in self.model.values()))
    @rule(data=st.data(), by_file=st.booleans())
    def move_a_state(self, data: st.DataObject, by_file: bool) -> None:
        source = data.draw(st.sampled_from(sorted(rid for rid, r in self.model.items() if r.holds or r.parked)))
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

            if self.model[target].parked:
                self.raises(ValueError, load)
                return
            if not self.model[target].holds and not self.free:
                self.raises(RuntimeError, load)
                return
            load()
        self.happened |= {"loaded", "loaded from a file"} if by_file else {"loaded"}
        origin = self.model[source]
        self.arrive(target, origin.copy(origin.content if target == source else self.new_content()))

    @precondition(lambda self: self.runnable)
    @rule(
        data=st.data(),
        last=st.integers(0, 2),
        before=st.integers(0, 6),
        then=st.sampled_from(["nothing", "fork", "rewind"]),
    )
    def crash_in_a_committing_pass(self, data: st.DataObject, last: int, before: int, then: str) -> None:
        rids, pads = self.draw_runnable(data)
        for _ in range(before):
            plan = self.begin(rids, pads)
            self.run_pass(plan, range(len(self.layers)), commit=True, noise=None, q_seed=1)
            self.finish_pending()
        plan = self.begin(rids, pads)
        self.run_pass(plan, range(min(last, len(self.layers) - 1) + 1), commit=True, noise=250, q_seed=0)
        if then == "fork":
            self.fork(data, rids[0])
        elif then == "rewind":
            self.rewind(data, rids[0])
        if self.pending is not None:  # or what it wrote could still be committed
            self.begin(rids, pads)

    @precondition(lambda self: any(r.holds for r in self.model.values()))
    @rule(data=st.data())
    def fork_one(self, data: st.DataObject) -> None:
        self.fork(data, self.holding(data))

    def fork(self, data: st.DataObject, source: str) -> None:
        """Into requests that hold nothing, some of them new."""
        others = [rid for rid in RIDS if rid not in self.model or not self.model[rid].holds]
        if not others:
            return
        rids = self.draw_rids(data, others)
        for rid in rids:
            self.manager.ingest_request(rid)
            self.model.setdefault(rid, Request())
        if any(self.model[rid].parked for rid in rids):
            self.raises(ValueError, lambda: self.manager.fork(source, rids))
            return
        if len(rids) > self.free:
            self.raises(RuntimeError, lambda: self.manager.fork(source, rids))
            return
        self.manager.fork(source, rids)
        origin = self.model[source]
        self.happened |= {"forked", "forked after an abort"} if origin.killed else {"forked"}
        for rid in rids:
            self.arrive(rid, origin.copy(self.new_content()))

    @precondition(lambda self: any(r.holds for r in self.model.values()))
    @rule(data=st.data())
    def rewind_one(self, data: st.DataObject) -> None:
        self.rewind(data, self.holding(data))

    def rewind(self, data: st.DataObject, rid: str) -> None:
        request = self.model[rid]
        frames = data.draw(st.integers(1, request.undo + 1))
        if frames > request.undo:
            self.raises(ValueError, lambda: self.manager.rewind(rid, frames))
            return
        if any(request.frame > layer.ring_buckets * layer.pinned_dilation for layer in self.layers):
            self.happened.add("taken back after a wrap")
        self.happened |= {"taken back", "taken back after an abort"} if request.killed else {"taken back"}
        self.manager.rewind(rid, frames)
        self.moved(rid)
        del request.contents[-frames:]
        for frames_lost in request.lost.values():
            frames_lost.intersection_update(range(request.frame))
        request.undo -= frames
        request.admitted = request.killed = False
        request.content = self.new_content()  # another future

    @precondition(lambda self: any(r.holds for r in self.model.values()))
    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        rid = self.holding(data)
        self.saw_abort(rid)
        self.manager.park(rid)
        self.happened.add("parked")
        self.moved(rid)
        request = self.model[rid]
        request.holds, request.parked, request.admitted = False, True, False

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def wake(self, data: st.DataObject) -> None:
        parked = sorted(rid for rid, request in self.model.items() if request.parked)
        rid = data.draw(st.sampled_from(4 * parked + sorted(self.model)))  # mostly one that can
        request = self.model[rid]
        if not request.parked:
            self.raises(ValueError, lambda: self.manager.wake(rid))
            return
        if not self.free:
            self.raises(RuntimeError, lambda: self.manager.wake(rid))
            self.happened.add("refused to wake, for the pool was full")
            return
        self.manager.wake(rid)
        self.happened.add("woken")
        self.arrive(rid, request.copy(request.content))

    @precondition(lambda self: self.model)
    @rule(data=st.data(), frames=st.integers(0, 12))
    def restore(self, data: st.DataObject, frames: int) -> None:
        """From a ring of other windows, in which a stream of its own was committed."""
        rid = data.draw(st.sampled_from(sorted(self.model)))
        layers = [data.draw(layer_geometry()) for _ in self.layers]
        content = self.new_content()
        donor: RingKVManager = build_manager(**{**self.geometry, "num_sessions": 1, "layers": layers})
        Spec(layers, self.tokens, self.heads).play(donor, "donor", [content] * frames)
        if not frames:
            assert donor.admit(*step_of([("donor", 0)])).ok
        state = donor.get_state("donor")
        if self.model[rid].parked:
            self.raises(ValueError, lambda: self.manager.restore(rid, state))
            return
        if not self.model[rid].holds and not self.free:
            self.raises(RuntimeError, lambda: self.manager.restore(rid, state))
            return
        report = self.manager.restore(rid, state)
        held = [self.held(layer, frames) for layer in layers]
        wanted = [self.held(layer, frames) for layer in self.layers]
        pairs = list(zip(held, wanted, strict=True))
        assert report.kept == tuple(tuple(sorted(old & new)) for old, new in pairs)
        assert report.dropped == tuple(tuple(sorted(old - new)) for old, new in pairs)
        assert report.missing == tuple(tuple(sorted(new - old)) for old, new in pairs)
        lost = {index: new - old for index, (old, new) in enumerate(pairs)}
        self.happened.add("restored with holes" if any(lost.values()) else "restored without")
        assert same_bytes(state, donor.get_state("donor"))
        self.arrive(rid, Request(holds=True, contents=[content] * frames, content=self.new_content(), lost=lost))

    @staticmethod
    def held(layer: RingKVLayerConfig, frames: int) -> set[int]:
        return set(slots_of(layer, frames).values())
