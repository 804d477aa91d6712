"""No KV is kept between frames: what stays of a rollout is its frames, and the past is computed again for each new one.

A policy of the runner, not an ``AttentionResource``. It keeps the committed frames (latents) and their actions. For
every generated frame p it empties an inner ``full`` resource, replays committing passes in frame order, generates, and
empties it again.

``recompute_all`` replays frames 0 to p - 1, each seeing its ``visible_frames``: what a ring computed once is computed
again the same way, so the outputs are equal, at a cost that grows with p.

``recompute_window`` replays only what p sees: the union of the frames visible to it in any layer. A layer holds only
those that are visible to p in that layer. So p sees its ``visible_frames`` exactly, and a replayed frame f sees what f
and p may both see. Depth relays history, and what f no longer sees is lost: this differs from a ring by design, from
the first p on that no longer sees everything that the frames visible to it saw.

Every frame keeps its own clock in the model (rotary angles), while an inner resource counts the frames that it holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from ringkv.config import EngineResourceInfo, FullKVConfig, KVConfig, KVSpec, RingKVLayerConfig, WindowedKVConfig
from ringkv.frame_runner import FrameModel, FrameRunner
from ringkv.horizon import visible_frames
from ringkv.rollout import Phase, RolloutRequest, Run
from ringkv.step import FrameStep, StepContext

if TYPE_CHECKING:
    from ringkv.resource import AttentionResource


class RecomputeRunner(FrameRunner):
    """``recompute_all``, or ``recompute_window`` with ``window=True``.

    config: the geometry of the ring to stand in for, of which ``num_sessions`` requests run at once. Rows at the same
    clock are replayed as one batch. A context frame is kept as it is: no pass is needed until a frame is generated.
    Without a cache there is no state to take.
    """

    def __init__(
        self, config: WindowedKVConfig, info: EngineResourceInfo, model: FrameModel, *, window: bool = False
    ) -> None:
        super().__init__(model)
        self.config = config
        self.device = torch.device(info.device)
        self._replay = _Replay(config, info, window=window)
        self._kept: dict[str, list[torch.Tensor]] = {}

    def submit(self, request: RolloutRequest) -> None:
        """Queue a rollout from frame 0."""
        self._enqueue(Run(request))

    def memory_bytes(self) -> int:
        """Bytes kept between frames: the committed frames of all requests."""
        return sum(frame.nbytes for frames in self._kept.values() for frame in frames)

    # -- how the past is kept ----------------------------------------------------------------------------------

    def _free_seats(self) -> int:
        return self.config.num_sessions - len(self._runs)

    def _seat(self, run: Run) -> None:
        self._kept[run.request.rid] = []

    def _release(self, rid: str) -> None:
        self._kept.pop(rid, None)

    def _drive(self, batch: list[Run], phase: Phase) -> torch.Tensor:
        if phase == "context":
            frames = torch.stack([run.request.context[run.next_frame] for run in batch]).to(self.device)
        else:
            by_clock: dict[int, list[int]] = {}
            for row, run in enumerate(batch):
                by_clock.setdefault(run.next_frame, []).append(row)
            images: dict[int, torch.Tensor] = {}
            for clock, rows in by_clock.items():
                images |= zip(rows, self._generate([batch[row] for row in rows], clock), strict=True)
            frames = torch.stack([images[row] for row in range(len(batch))])
        for run, frame in zip(batch, frames, strict=True):
            self._kept[run.request.rid].append(frame.clone())
        return frames

    def _generate(self, runs: Sequence[Run], clock: int) -> torch.Tensor:
        """The frames ``[B, C, H, W]`` at ``clock`` of these runs, after a replay of their past."""
        requests, replay = [run.request for run in runs], self._replay
        resource = cast("AttentionResource", replay)  # a model calls nothing but ``attend``

        def inputs(frame: int) -> tuple[torch.Tensor, torch.Tensor]:
            actions = torch.stack([request.actions[frame] for request in requests]).to(self.device)
            return actions, torch.full_like(actions, frame)

        with replay.requests([request.rid for request in requests], clock):
            for frame in replay.needed():
                with replay.frame(frame):
                    frames = torch.stack([self._kept[request.rid][frame] for request in requests])
                    self.model.observe(resource, frames, *inputs(frame))
            with replay.frame(clock):
                seeds, streams = [request.seed for request in requests], [request.stream for request in requests]
                return self.model.generate(resource, seeds, streams, *inputs(clock))


@dataclass(eq=False)
class _Part:
    """An inner resource, and the window of the layers that it serves; None when it applies their windows itself.

    shown: frames that its layers hold for the frame being generated. held: how many of them are replayed, which is its
    clock. keeps: whether the frame being replayed is one.
    """

    resource: AttentionResource
    window: RingKVLayerConfig | None
    shown: Collection[int] = ()
    held: int = 0
    keeps: bool = False


class _Replay:
    """What the model attends to while frames are computed again.

    To see all, the layers share one windowed ``full`` resource that counts every frame. To see a window, layers of one
    geometry share an unwindowed one: a frame that p does not see in these layers passes through without committing, so
    what the resource holds is just what p sees there, contiguous, and its clock counts just those frames.
    """

    def __init__(self, config: WindowedKVConfig, info: EngineResourceInfo, *, window: bool) -> None:
        shared = {field.name: getattr(config, field.name) for field in dataclasses.fields(KVConfig)}
        shared |= {"padding_session": False}
        groups: dict[RingKVLayerConfig | None, list[int]] = {}
        for index, layer in enumerate(config.layers):
            groups.setdefault(layer if window else None, []).append(index)
        self._parts: list[_Part] = []
        self._routes: dict[int, tuple[_Part, int]] = {}
        for geometry, indices in groups.items():
            layers = None if window else config.layers
            spec = KVSpec(
                resource_key="replay", config=FullKVConfig(**shared | {"num_layers": len(indices), "layers": layers})
            )
            part = _Part(spec.resource_class.build(spec, info), geometry)
            self._parts.append(part)
            self._routes |= {layer: (part, inner) for inner, layer in enumerate(indices)}
        self._rids: tuple[str, ...] = ()

    @contextlib.contextmanager
    def requests(self, rids: Sequence[str], clock: int) -> Iterator[None]:
        """Around the replay for frame ``clock`` of ``rids``; the inner resources are empty before and after."""
        self._rids = tuple(rids)
        for part in self._parts:
            part.shown = range(clock) if part.window is None else visible_frames(part.window, clock)
            part.held = 0
            for rid in rids:
                part.resource.ingest_request(rid)
        try:
            yield
        finally:
            for part in self._parts:
                for rid in rids:
                    part.resource.remove_request(rid)

    def needed(self) -> list[int]:
        """Frames to replay, ascending."""
        return sorted({frame for part in self._parts for frame in part.shown})

    @contextlib.contextmanager
    def frame(self, frame: int) -> Iterator[None]:
        """Around the passes of ``frame``: a replayed one, or the one being generated, which nothing keeps."""
        plans = []
        for part in self._parts:
            step = FrameStep(frames=tuple((rid, part.held) for rid in self._rids))
            ctx = StepContext(request_ids=self._rids)
            outcome = part.resource.admit(step, ctx)
            if not outcome.ok:
                raise RuntimeError(f"replay of frame {frame} refused: {outcome.reason}")
            part.resource.plan(step, ctx)
            part.keeps = frame in part.shown
            plans.append((part, step, ctx))
        yield
        for part, step, ctx in plans:
            if part.keeps:
                part.resource.commit(step, ctx)
                part.held += 1

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
        """``AttentionResource.attend``, at the clock of the part that holds the layer's past."""
        part, inner = self._routes[layer_idx]
        clocks = torch.full_like(frame_pos, part.held)
        return part.resource.attend(q, k, v, inner, clocks, commit=commit and part.keeps)
