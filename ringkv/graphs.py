"""Steps of few fixed batch sizes: compiled or captured once, then the same at every clock.

A step is padded to a bucket, a power of two, so that a model meets a handful of shapes in its life. ``warm_up`` meets
them all before the first request: it drives dummy requests through the whole lifecycle in every bucket, and the cache
must come out of that as it was built. On the CPU this is where the compiled regions of a model compile. On CUDA each
bucket's two calls, a context frame's and a generated one's with all its passes, are captured as CUDA graphs: what the
host decides is staged by ``plan`` in buffers that never move, and a replay costs one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from ringkv.buckets import batch_buckets, bucket_for, needs_padding
from ringkv.config import require_int
from ringkv.runner import FrameModel, RolloutRequest, StepRunner

if TYPE_CHECKING:
    from ringkv.resource import AttentionResource

_SPECIALISATIONS = 1024
"""Shapes that the compiler may specialise a function for during warm-up; its default of 8 counts all models alive."""

_EAGER_RUNS = 2
"""Runs before a capture: they compile kernels and fill lazy tables, which a capture may not do."""

Call = Literal["observe", "denoise"]


class CapturableModel(FrameModel, Protocol):
    """A ``FrameModel`` that says where its work on the host ends: ``generate`` is ``denoise`` of ``noise``.

    ``observe`` and ``denoise`` must not read a tensor's value nor make a tensor from host data, once they have run with
    the same shapes before.
    """

    @property
    def frame_shape(self) -> tuple[int, int, int]:
        """C, H, W of a frame."""

    @property
    def weights_version(self) -> object:
        """Compares unequal once the weights have changed, in place or by new storage. Cheap."""

    def noise(self, seeds: Sequence[int], streams: Sequence[int], clocks: Sequence[int]) -> torch.Tensor:
        """Noise of one frame for each row, ``[B, C, H, W]`` on the CPU."""

    def denoise(
        self, resource: AttentionResource, noise: torch.Tensor, actions: torch.Tensor, frame_pos: torch.Tensor
    ) -> torch.Tensor:
        """What ``generate`` returns, from its noise ``[B, C, H, W]`` on the device."""


class CapturedSteps:
    """The steps of a model over one resource, in batch buckets. Itself a ``FrameModel``, for ``StepRunner`` to drive.

    Inputs have a bucket's rows, padding rows last. Clocks are a host tensor, for they are compared with the plan's. A
    capture holds addresses: of the cache, which never moves, and of the weights, so a replay after the weights have
    changed raises.
    """

    def __init__(self, resource: AttentionResource, model: CapturableModel, max_rows: int) -> None:
        """max_rows: real rows of the largest step, at most the resource's sessions.

        ``ValueError`` if a step of up to ``max_rows`` rows must be padded and the config has no ``padding_session``, or
        if the read path of a resource on CUDA decides on the host.
        """
        require_int("CapturedSteps", "max_rows", max_rows, 1)
        if max_rows > resource.num_sessions:
            raise ValueError(
                f"CapturedSteps.max_rows={max_rows}: expected at most num_sessions={resource.num_sessions}"
            )
        if needs_padding(max_rows) and not resource.config.padding_session:
            raise ValueError(
                f"CapturedSteps.max_rows={max_rows}: steps are padded to {bucket_for(max_rows)} rows, which needs a "
                "config with padding_session=True"
            )
        self._captures = resource.device.type == "cuda"
        if self._captures and not resource.reads_in_graph:
            raise ValueError(
                f"CapturedSteps of {resource.name!r}: its reads decide on the host, which a CUDA graph cannot hold; "
                "expected a ring built with attention='flex'"
            )
        self.resource = resource
        self.model = model
        self.max_rows = max_rows
        self.buckets = batch_buckets(max_rows)
        self._graphs: dict[tuple[Call, int], _CudaGraph] = {}
        self._weights: object = None
        self._warming = False

    @property
    def fingerprint(self) -> str:
        """The model's."""
        return self.model.fingerprint

    def padded(self, rids: Sequence[str]) -> tuple[str, ...]:
        """``rids`` and as many dummy rids as fill their bucket. ``ValueError`` for more rows than ``max_rows``."""
        if not 1 <= len(rids) <= self.max_rows:
            raise ValueError(f"a step of {len(rids)} rows: expected 1 to max_rows={self.max_rows}")
        dummies = (f"padding {index}" for index in range(bucket_for(len(rids)) - len(rids)))
        return (*rids, *dummies)

    def warm_up(self) -> None:
        """Meet every bucket once: compile, and on CUDA capture. ``RuntimeError`` while a request holds a session.

        Raises what the model raises. Afterwards every session is as ``build`` made it.
        """
        resource = self.resource
        if resource.num_free_sessions != resource.num_sessions:
            raise RuntimeError("warm_up with requests resident: warm up before the first one, or remove them")
        import torch._dynamo.config  # loads the compiler, which a process that never warms up has no use for

        self._graphs.clear()
        self._weights = self.model.weights_version
        self._warming = True
        try:
            with torch._dynamo.config.patch(recompile_limit=_SPECIALISATIONS):
                for bucket in reversed(self.buckets):  # the largest first: smaller captures fit into its memory
                    self._drive_dummies(min(bucket, self.max_rows))
        finally:
            self._warming = False
        resource.post_warmup_validate()

    def observe(
        self, resource: AttentionResource, frames: torch.Tensor, actions: torch.Tensor, frame_pos: torch.Tensor
    ) -> None:
        """``FrameModel.observe`` with ``frame_pos`` on the host."""
        self._run("observe", resource, frames, actions, frame_pos)

    def generate(
        self,
        resource: AttentionResource,
        seeds: Sequence[int],
        streams: Sequence[int],
        actions: torch.Tensor,
        frame_pos: torch.Tensor,
    ) -> torch.Tensor:
        """``FrameModel.generate`` with ``frame_pos`` on the host; the frames are a tensor of their own."""
        noise = self.model.noise(seeds, streams, frame_pos.tolist())
        frames = self._run("denoise", resource, noise, actions, frame_pos)
        assert frames is not None
        return frames

    def _drive_dummies(self, rows: int) -> None:
        """One context frame and one generated frame of ``rows`` requests, as ``StepRunner`` drives any."""
        runner = StepRunner(self.resource, self.model, captured=self)
        rids = [f"warm-up {index}" for index in range(rows)]
        for rid in rids:
            context = torch.zeros(1, *self.model.frame_shape)
            actions = torch.zeros(2, dtype=torch.int64)
            runner.submit(RolloutRequest(rid=rid, seed=0, stream=0, num_frames=2, context=context, actions=actions))
        try:
            while runner.pending:
                runner.step()
            if runner.failed:
                raise next(iter(runner.failed.values()))
        finally:
            for rid in rids:
                runner.cancel(rid)

    def _run(
        self, call: Call, resource: AttentionResource, frames: torch.Tensor, actions: torch.Tensor, clocks: torch.Tensor
    ) -> torch.Tensor | None:
        assert resource is self.resource, "captured for another resource"
        step: Callable[..., torch.Tensor | None] = getattr(self.model, call)
        inputs = (frames, actions, clocks)
        if not self._captures:
            return step(resource, *(each.to(resource.device) for each in inputs))
        key = (call, len(clocks))
        if self._warming and key not in self._graphs:
            self._graphs[key] = _CudaGraph(step, resource, inputs, self._pool())
        if key not in self._graphs:
            raise RuntimeError(f"nothing is captured for {len(clocks)} rows: call warm_up before the first step")
        if self._weights != self.model.weights_version:
            raise RuntimeError("the weights have changed since they were captured: warm_up again")
        resource.begin_replay(clocks.tolist())
        return self._graphs[key].replay(inputs)

    def _pool(self) -> Any:
        """Memory that all graphs share, since no two run at once and outputs are copied out."""
        return next((graph.pool for graph in self._graphs.values()), None)


class _CudaGraph:
    """One call at one batch size. Runs it, captures it, and replays it over inputs copied into fixed buffers."""

    def __init__(
        self,
        step: Callable[..., torch.Tensor | None],
        resource: AttentionResource,
        inputs: tuple[torch.Tensor, ...],
        pool: Any,
    ) -> None:
        """pool: id of memory that another graph allocates from, None for memory of its own."""
        self._inputs = tuple(each.to(resource.device, copy=True) for each in inputs)
        side, current = torch.cuda.Stream(resource.device), torch.cuda.current_stream(resource.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_EAGER_RUNS):  # a pass may run again under one plan: it changes nothing more
                step(resource, *self._inputs)
        current.wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._output = step(resource, *self._inputs)

    @property
    def pool(self) -> Any:
        """Id of the memory that the graph allocates from, opaque."""
        return self._graph.pool()

    def replay(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        """The call over ``inputs``; the output is a copy, as the next replay overwrites the graph's own."""
        for fixed, given in zip(self._inputs, inputs, strict=True):
            fixed.copy_(given)
        self._graph.replay()
        return None if self._output is None else self._output.clone()
