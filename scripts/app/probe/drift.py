"""Drift: how far another cache leads away from the reference rollout, against what one last bit of the input does."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from model.data import frames_to_model
from ringkv.runner import RolloutRequest
from scripts.app.probe.drive import Setup, TeacherForced
from scripts.app.probe.fidelity import held_out
from scripts.app.probe.result import Found, Series, Sheet, number, numbers
from scripts.app.probe.stats import Values
from scripts.app.schema import RolloutConfig

Y_LABEL = "RMS difference, frames in [-1, 1]"


def measure(setup: Setup) -> Found:
    """All of it; see ``conf/probe/drift.yaml``."""
    config, knobs = setup.probe.config, setup.probe.config.probe
    assert knobs.clips is not None
    assert knobs.replays is not None
    assert knobs.segment_frames is not None
    reference, candidate = setup.probe.points["reference",], setup.probe.points["candidate",]
    requests = _requests(setup, knobs.clips)
    base = _rolled(setup, reference, requests)
    identical = distance(_rolled(setup, reference, requests), base)
    replays = []
    for replay in range(knobs.replays):
        perturbed = [_perturbed(request, replay) for request in requests]
        replays.append(distance(_rolled(setup, reference, perturbed), base))
    envelope = np.stack(replays)
    free = distance(_rolled(setup, candidate, requests), base)
    forced = distance(_forced(setup, candidate, requests, base), base)

    first, last = config.context_frames, config.context_frames + base.shape[1]
    clocks = list(range(first, last))
    differs = _difference(reference, candidate)
    outside = first_outside(free, envelope)
    found = Found(
        settings={
            "data": config.data.name,
            "clips": knobs.clips,
            "frames": f"{len(clocks)} generated after {first} of context",
            "reference": f"kv={reference.kv.strategy} attention={reference.attention} kv_dtype={reference.kv_dtype}",
            "candidate": differs,
            "replays": f"{knobs.replays}, each element of the context moved by one ulp up or down",
            "weights": setup.weights_name,
        },
        summary={
            "drift/identical_replay": float(identical.max()),
            "drift/first_frame_outside": None if outside is None else clocks[outside],
            "drift/candidate_rms_last": float(free[-1]),
            "drift/cache_error_rms_mean": float(forced.mean()),
            "drift/total_rms_mean": float(free.mean()),
        },
    )
    low, high = numbers(envelope.min(axis=0)), numbers(envelope.max(axis=0))
    for name, values, *edges in (
        ("identical replay", identical, None, None),
        (f"{knobs.replays} replays, one ulp off", np.median(envelope, axis=0), low, high),
        (f"candidate, free running: {differs}", free, None, None),
        ("candidate, on the reference's frames: cache error", forced, None, None),
    ):
        found.series.append(
            Series(
                "drift from the reference rollout",
                name,
                clocks,
                numbers(values),
                "frame",
                Y_LABEL,
                low=edges[0],
                high=edges[1],
                logarithmic=True,
            )
        )
    found.tables.append(_segments(clocks, knobs.segment_frames, identical, envelope, free, forced))
    if not free.any():
        verdict = "The candidate is equal to the reference to the last bit."
    elif outside is None:
        verdict = "The candidate never leaves the envelope: it cannot be told from one last bit of the input."
    else:
        verdict = f"The candidate first leaves the envelope at frame {clocks[outside]}."
    found.notes.append(
        f"{verdict} A frame of a candidate like the replays lies above all {knobs.replays} by chance in 1 of "
        f"{knobs.replays + 1}. Least and most: of the replays' means. Cache: what the candidate makes of the "
        "reference's own past. Compounding: the rest of its drift."
    )
    return found


def first_outside(candidate: Values, envelope: Values) -> int | None:
    """Index of the first frame at which ``candidate`` ``[F]`` is above all of ``envelope`` ``[k, F]``, or None."""
    above = np.nonzero(candidate > envelope.max(axis=0))[0]
    return int(above[0]) if len(above) else None


def distance(frames: torch.Tensor, reference: torch.Tensor) -> Values:
    """Root mean squared difference per frame, over all clips: ``[clips, F, C, H, W]`` both, to ``[F]``."""
    return (frames.double() - reference.double()).square().mean(dim=(0, 2, 3, 4)).sqrt().numpy()


def _requests(setup: Setup, clips: int) -> list[RolloutRequest]:
    config = setup.probe.config
    assert config.num_frames is not None
    return [
        RolloutRequest(
            rid=f"clip-{stream}",
            seed=config.seed,
            stream=stream,
            num_frames=config.num_frames,
            context=frames_to_model(clip.frames[: config.context_frames]),
            actions=torch.from_numpy(clip.actions),
        )
        for stream, clip in enumerate(held_out(setup, clips))
    ]


def _rolled(setup: Setup, point: RolloutConfig, requests: list[RolloutRequest]) -> torch.Tensor:
    """``[clips, F, C, H, W]``."""
    made = setup.roll(point, requests)
    return torch.stack([made[request.rid] for request in requests])


def _forced(
    setup: Setup, point: RolloutConfig, requests: list[RolloutRequest], reference: torch.Tensor
) -> torch.Tensor:
    """What the candidate makes of each frame when all frames before it are the reference's: ``[clips, F, C, H, W]``."""
    truth = {r.stream: torch.cat([r.context, made]) for r, made in zip(requests, reference, strict=True)}
    forced = TeacherForced(setup.sampler, truth)
    setup.roll(point, requests, model=forced)
    clocks = range(len(requests[0].context), requests[0].num_frames)
    return torch.stack([torch.stack([forced.made[r.stream, clock] for clock in clocks]) for r in requests])


def _perturbed(request: RolloutRequest, replay: int) -> RolloutRequest:
    """The same rollout with every element of its context moved to the next number above or below."""
    generator = torch.Generator().manual_seed(1_000_003 * request.stream + replay)
    up = torch.rand(request.context.shape, generator=generator) < 0.5
    toward = torch.where(up, torch.inf, -torch.inf)
    return RolloutRequest(
        rid=request.rid,
        seed=request.seed,
        stream=request.stream,
        num_frames=request.num_frames,
        context=torch.nextafter(request.context, toward),
        actions=request.actions,
    )


def _difference(reference: RolloutConfig, candidate: RolloutConfig) -> str:
    pairs = {
        "kv": (_kv_name(reference), _kv_name(candidate)),
        "attention": (reference.attention, candidate.attention),
        "kv_dtype": (reference.kv_dtype, candidate.kv_dtype),
    }
    return " ".join(f"{key}={new}" for key, (old, new) in pairs.items() if old != new) or "the reference itself"


def _kv_name(config: RolloutConfig) -> str:
    return config.kv.strategy + ("_windowed" if config.kv.window else "")


def _segments(
    clocks: list[int], segment_frames: int, identical: Values, envelope: Values, free: Values, forced: Values
) -> Sheet:
    """Means over segments: the floor, the envelope, and the candidate's drift in its two parts."""
    rows: list[list[Any]] = []
    for start in range(0, len(clocks), segment_frames):
        part = slice(start, min(start + segment_frames, len(clocks)))
        total, cache = number(free[part].mean()), number(forced[part].mean())
        compounding = None if total is None or cache is None else total - cache
        rows.append(
            [
                f"{clocks[part][0]} to {clocks[part][-1]}",
                number(identical[part].max()),
                number(envelope[:, part].mean(axis=1).min()),
                number(envelope[:, part].mean(axis=1).max()),
                total,
                cache,
                compounding,
            ]
        )
    columns = ["frames", "identical", "least", "most", "candidate", "cache", "compounding"]
    return Sheet("Drift by segment: RMS difference to the reference, mean over frames", columns, rows)
