"""Who agrees with whom: free-running rollouts under canonical reads, and fast reads held to canonical call by call."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Any, cast

import torch

from model.config import ModelConfig
from model.data import Clip
from model.sampler import FrameSampler
from ringkv import AttentionResource, EngineResourceInfo, FrameStep, StepContext, StepRunner
from ringkv.recompute import RecomputeRunner
from scripts.app import build
from scripts.app.schema import RolloutConfig
from scripts.app.strategies import kv_config, seen_past

if TYPE_CHECKING:
    from ringkv.step import AdmitOutcome

EQUAL, CLOSE, BY_DESIGN = "bit-equal", "close", "differs by design"
FAST_BOUND = {"float32": 1e-6, "bfloat16": 2e-2}
"""How far a fast read may be from canonical in one call, over max |V|, by dtype of the query; others have no bound."""

_DIFFERENCES = {
    frozenset({"window", "everything"}): "one sees the ring's window, the other the whole past",
    frozenset({"window", "recomputed"}): "recomputed frames no longer see what the ring's frames saw",
    frozenset({"everything", "recomputed"}): "one sees the whole past, the other a recomputed window",
}


class SideBySide:
    """Two caches living the same life. The model goes on with what ``canonical`` answers; ``fast`` is compared."""

    def __init__(self, canonical: AttentionResource, fast: AttentionResource) -> None:
        self.canonical, self.fast = canonical, fast
        self.device = canonical.device
        self.calls, self.max_gap, self.max_v, self.max_relative = 0, 0.0, 0.0, 0.0

    def ingest_request(self, rid: str) -> None:
        """In both."""
        for resource in (self.canonical, self.fast):
            resource.ingest_request(rid)

    def remove_request(self, rid: str) -> None:
        """In both."""
        for resource in (self.canonical, self.fast):
            resource.remove_request(rid)

    def admit(self, step: FrameStep, ctx: StepContext) -> AdmitOutcome:
        """Both answer the same: they have the same room."""
        self.canonical.admit(step, ctx)
        return self.fast.admit(step, ctx)

    def plan(self, step: FrameStep, ctx: StepContext) -> None:
        """In both."""
        for resource in (self.canonical, self.fast):
            resource.plan(step, ctx)

    def commit(self, step: FrameStep, ctx: StepContext) -> None:
        """In both."""
        for resource in (self.canonical, self.fast):
            resource.commit(step, ctx)

    def session_of(self, rid: str) -> int | None:
        """Of ``canonical``."""
        return self.canonical.session_of(rid)

    def is_parked(self, rid: str) -> bool:
        """Of ``canonical``; nothing here parks."""
        return self.canonical.is_parked(rid)

    @property
    def num_free_sessions(self) -> int:
        """Of ``canonical``."""
        return self.canonical.num_free_sessions

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
        """``AttentionResource.attend`` of both, and how far apart they are."""
        out = self.canonical.attend(q, k, v, layer_idx, frame_pos, commit=commit)
        fast = self.fast.attend(q, k, v, layer_idx, frame_pos, commit=commit)
        gap = float((out.double() - fast.double()).abs().max())
        self.calls += 1
        self.max_v = max(self.max_v, float(v.abs().max()))
        self.max_gap = max(self.max_gap, gap)
        self.max_relative = max(self.max_relative, gap / self.max_v if self.max_v else gap)
        return out


def measure_equality(
    rollouts: Mapping[str, RolloutConfig], geometry: ModelConfig, model: FrameSampler, clip: Clip, num_frames: int
) -> dict[str, Any]:
    """Run ``num_frames`` frames of ``clip`` under canonical reads in every strategy.

    Returns ``{"frames", "pairs", "fast_reads", "stopped"}``: per pair of strategies a verdict, per strategy with a
    cache how far its fast read was from canonical, and why a rollout ended early.
    """
    frames: dict[str, torch.Tensor] = {}
    fast_reads, stopped = [], {}
    for name, config in rollouts.items():
        alone = dataclasses.replace(config, num_sessions=1)
        fast = config.attention if config.attention != "canonical" else "auto"
        runner, pair = _canonical_runner(alone, geometry, model, fast)
        (request,) = build.rollout_requests(alone, [clip], num_frames)
        runner.submit(request)
        images = []
        while runner.pending:
            images += [result.image for result in runner.step()]
        if runner.failed:
            stopped[name] = str(runner.failed[request.rid])
        if images:
            frames[name] = torch.stack(images)
        if pair is not None:
            fast_reads.append(
                {
                    "strategy": name,
                    "read": fast,
                    "calls": pair.calls,
                    "max_gap": pair.max_gap,
                    "max_abs_v": pair.max_v,
                    "relative_gap": pair.max_relative,
                    "bound": FAST_BOUND.get(config.dtype),
                }
            )
    families = {name: seen_past(config) for name, config in rollouts.items()}
    pairs = [
        {"a": a, "b": b} | _compared(frames[a], frames[b], families[a], families[b]) for a, b in combinations(frames, 2)
    ]
    return {"frames": num_frames, "pairs": pairs, "fast_reads": fast_reads, "stopped": stopped}


def _canonical_runner(
    config: RolloutConfig, geometry: ModelConfig, model: FrameSampler, fast: str
) -> tuple[StepRunner | RecomputeRunner, SideBySide | None]:
    """A runner under canonical reads, with the cache that is read fast beside it; none for recomputation."""
    kept, info = kv_config(config, geometry), build.resource_info(config, "canonical")
    runner = build.build_runner(config.kv.strategy, kept, info, model)
    if isinstance(runner, RecomputeRunner):
        return runner, None
    fast_info: EngineResourceInfo = build.resource_info(config, fast)
    pair = SideBySide(runner.resource, build.build_resource(kept, fast_info))
    runner.resource = cast(AttentionResource, pair)  # a runner that takes no states calls nothing else
    return runner, pair


def _compared(a: torch.Tensor, b: torch.Tensor, family_a: str, family_b: str) -> dict[str, Any]:
    """Verdict on two rollouts ``[n, C, H, W]``, over the frames that both made. Equal means every bit."""
    count = min(len(a), len(b))
    differing = [index for index in range(count) if not _same_bits(a[index], b[index])]
    related = family_a == family_b
    if not differing:
        verdict, reason = EQUAL, None
        if not related:
            reason = f"nothing is forgotten yet in {count} frames"
    elif related:
        verdict, reason = CLOSE, None
    else:
        verdict, reason = BY_DESIGN, _DIFFERENCES[frozenset({family_a, family_b})]
    return {
        "verdict": verdict,
        "expected_equal": related,
        "reason": reason,
        "frames": count,
        "first_difference": differing[0] if differing else None,
        "max_gap": float((a[:count].double() - b[:count].double()).abs().max()),
    }


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
