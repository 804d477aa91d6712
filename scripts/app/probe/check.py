"""What a probe must satisfy before anything runs, and the rollouts that it consists of. No torch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from model.config import ModelConfig
from model.data.names import GAMES
from scripts.app.check import effective, job_knobs, take_over
from scripts.app.compose import CONF_DIR
from scripts.app.errors import BadInput
from scripts.app.geometry import model_config
from scripts.app.schema import JobKnobs, KVKnobs, ProbeConfig, RolloutConfig
from scripts.app.strategies import POOL_KNOBS, STRATEGIES

GEOMETRY_KNOBS = ("ring_frames", "ring_buckets", "dilation", "num_frames", "context_frames")
TIMING_KNOBS = ("warmup", "target_fps")
PHOTO_SHAPE = (3, 16, 16)
RELAY_RING = 3
"""Slots of each layer where it is measured how far depth relays: few, so that the reach of all layers stays short."""

ORACLE_PLACES = 260
"""Places of the photo that the oracle reader's camera sweeps."""


@dataclass(frozen=True)
class Kind:
    """knobs: of conf/probe that the probe has, each with its lowest value (of an item, in a list; None: no number).

    owns: knobs of every job that it sets itself. data: what it can be asked about; () for any. wants: frames it needs.
    """

    knobs: Mapping[str, int | None]
    owns: tuple[str, ...] = ()
    data: tuple[str, ...] = ()


KINDS = {
    "recall": Kind({"clips": 1, "loop_frames": 2, "rings": 1}, GEOMETRY_KNOBS, ("loops",)),
    "return": Kind({"clips": 1, "rings": 1, "dilations": 1, "max_gap": 1, "gaps": 2}, GEOMETRY_KNOBS, ("loops",)),
    "fidelity": Kind({"clips": 1, "samples": 1, "sampled_clips": 1}, data=GAMES),
    "drift": Kind(
        {
            "clips": 1,
            "replays": 1,
            "segment_frames": 1,
            "candidate_kv": None,
            "candidate_attention": None,
            "candidate_kv_dtype": None,
        }
    ),
}
"""Values of ``probe.name``."""

OPTIONAL = ("candidate_kv", "candidate_attention", "candidate_kv_dtype")


@dataclass(frozen=True)
class Probe:
    """A checked probe. config: with its nulls filled in. points: the rollouts that it makes, by what is asked in them.

    left_out: parts that this strategy or model cannot be asked, a line each.
    """

    config: ProbeConfig
    points: dict[tuple[Any, ...], RolloutConfig]
    left_out: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """recall, return, fidelity or drift."""
        return self.config.probe.name


def checked(config: ProbeConfig) -> Probe:
    """The probe that ``config`` means. ``BadInput`` for the first value that cannot work; changes nothing."""
    config = copy.deepcopy(config)
    knobs = config.probe
    if knobs.name not in KINDS:
        raise BadInput(f"probe.name={knobs.name}: expected one of {', '.join(KINDS)}")
    kind = KINDS[knobs.name]
    _check_knobs(config, kind)
    if kind.data and config.data.name not in kind.data:
        raise BadInput(f"data={config.data.name}: probe={knobs.name} asks about {' or '.join(kind.data)}")
    points, left_out = {
        "recall": _recall_points,
        "return": _return_points,
        "fidelity": _fidelity_points,
        "drift": _drift_points,
    }[knobs.name](config)
    first = next(iter(points.values()))
    take_over(config, first, but=(*kind.owns, "num_sessions"))
    return Probe(config, points, left_out)


def point(config: ProbeConfig, **changes: Any) -> RolloutConfig:
    """The rollouts of one point, checked: the probe's knobs with ``changes``."""
    return effective(raw_point(config, **changes))


def raw_point(config: ProbeConfig, **changes: Any) -> RolloutConfig:
    """The same, as it stands: nulls not filled in."""
    return copy.deepcopy(RolloutConfig(kv=changes.pop("kv", config.kv), **job_knobs(config) | changes))


def oracle_dilations(model: ModelConfig, dilation: int) -> tuple[int, ...]:
    """The different dilations among the model's layers: a layer of the oracle reader for each."""
    return tuple(sorted(set(model.layer_dilations(dilation))))


def _check_knobs(config: ProbeConfig, kind: Kind) -> None:
    knobs, name = config.probe, config.probe.name
    for field in dataclasses.fields(knobs):
        value = getattr(knobs, field.name)
        if field.name == "name":
            continue
        if field.name not in kind.knobs:
            if value is not None:
                raise BadInput(
                    f"probe.{field.name}={_text(value)}: probe={name} has no such knob; it has {', '.join(kind.knobs)}"
                )
            continue
        if value is None and field.name not in OPTIONAL:
            raise BadInput(f"probe.{field.name}=null: expected a value")
        lowest = kind.knobs[field.name]
        if lowest is not None:
            items = value if isinstance(value, list) else [value]
            if not items or min(items) < lowest or len(set(items)) < len(items):
                wanted = "one or more different integers" if isinstance(value, list) else "an integer"
                raise BadInput(f"probe.{field.name}={_text(value)}: expected {wanted} >= {lowest}")
    defaults = JobKnobs()
    for key in (*kind.owns, *TIMING_KNOBS):
        value = getattr(config, key)
        if value != getattr(defaults, key):
            why = "a probe measures no time" if key in TIMING_KNOBS else f"probe={name} sets it itself"
            raise BadInput(f"{key}={_text(value)}: {why}; expected none")
    for key in POOL_KNOBS[1:]:
        value = getattr(config.kv, key)
        if value is not None:
            raise BadInput(f"kv.{key}={value}: a probe sizes the pool itself; expected none")


def _recall_points(config: ProbeConfig) -> tuple[dict[tuple[Any, ...], RolloutConfig], tuple[str, ...]]:
    """``("grid", N, ring_frames)``, ``("once", N)``, ``("dilated", N)`` and ``("relay",)``."""
    knobs = config.probe
    assert knobs.clips is not None
    assert knobs.loop_frames is not None
    assert knobs.rings is not None
    model = _photo_model(config)
    rows = min(config.num_sessions, knobs.clips)
    points: dict[tuple[Any, ...], RolloutConfig] = {}
    left_out: list[str] = []
    for loop in knobs.loop_frames:
        for ring in knobs.rings:
            shown = {"context_frames": 2 * loop, "num_frames": 2 * loop + 1, "num_sessions": rows}
            points["grid", loop, ring] = point(config, ring_frames=ring, dilation=1, **shown)
        if loop + 1 in knobs.rings:
            shown = {"context_frames": loop, "num_frames": loop + 1, "num_sessions": rows}
            points["once", loop] = point(config, ring_frames=loop + 1, dilation=1, **shown)
    if not STRATEGIES[config.kv.strategy].dilates:
        left_out.append(f"a dilated layer: kv={config.kv.strategy} has none")
    elif max(model.layer_dilations(2)) == 1:
        left_out.append(f"a dilated layer: model={model.name} has no global layer; set global_period")
    else:
        for loop in knobs.loop_frames:
            # Local layers see half a loop back and never the frame itself; the dilated one sees past a whole loop.
            shown = {"context_frames": 2 * loop, "num_frames": 3 * loop, "num_sessions": rows}
            points["dilated", loop] = point(config, ring_frames=loop // 2 + 1, dilation=2, **shown)
    if config.kv.strategy == "hf_sliding":
        left_out.append("one temporal layer against several: kv=hf_sliding has no layer without a past")
    else:
        lags = model.num_layers * (RELAY_RING - 1) + 2
        shown = {"context_frames": lags, "num_frames": lags + 1, "num_sessions": lags}
        points["relay",] = point(config, ring_frames=RELAY_RING, dilation=1, **shown)
    return points, tuple(left_out)


def _return_points(config: ProbeConfig) -> tuple[dict[tuple[Any, ...], RolloutConfig], tuple[str, ...]]:
    """``("oracle", ring_frames, dilation)`` of one session, and ``("trained", ring_frames, dilation, gap)``."""
    knobs = config.probe
    assert knobs.clips is not None
    assert knobs.rings is not None
    assert knobs.dilations is not None
    assert knobs.max_gap is not None
    assert knobs.gaps is not None
    model = _photo_model(config)
    places = knobs.max_gap // 2 + max(knobs.dilations) + 1
    if places > ORACLE_PLACES:
        raise BadInput(
            f"probe.max_gap={knobs.max_gap} probe.dilations={_text(knobs.dilations)}: a walk through {places} places; "
            f"expected at most the {ORACLE_PLACES} of the photo"
        )
    odd = [gap for gap in knobs.gaps if gap % 2]
    if odd:
        raise BadInput(f"probe.gaps={_text(knobs.gaps)}: a camera goes round an even number of places, not {odd[0]}")
    rows = min(config.num_sessions, knobs.clips)
    dilates = STRATEGIES[config.kv.strategy].dilates
    asked = [dilation for dilation in knobs.dilations if dilates or max(model.layer_dilations(dilation)) == 1]
    left_out = [
        f"dilation {dilation}: kv={config.kv.strategy} has no dilated layers"
        for dilation in knobs.dilations
        if dilation not in asked
    ]
    points: dict[tuple[Any, ...], RolloutConfig] = {}
    for ring in knobs.rings:
        for dilation in asked or knobs.dilations:  # with none left, the first point is refused by key and value
            there = {"ring_frames": ring, "dilation": dilation}
            alone = {"context_frames": 1, "num_frames": knobs.max_gap + 1, "num_sessions": 1}
            points["oracle", ring, dilation] = point(config, **there, **alone)
            for gap in knobs.gaps:
                laps = {"context_frames": 2 * gap, "num_frames": 2 * gap + 1, "num_sessions": rows}
                points["trained", ring, dilation, gap] = point(config, **there, **laps)
    return points, tuple(left_out)


def _fidelity_points(config: ProbeConfig) -> tuple[dict[tuple[Any, ...], RolloutConfig], tuple[str, ...]]:
    """``("rollout",)``: all samples of all clips."""
    knobs = config.probe
    assert knobs.clips is not None
    assert knobs.samples is not None
    assert knobs.sampled_clips is not None
    if knobs.sampled_clips > knobs.clips:
        raise BadInput(f"probe.sampled_clips={knobs.sampled_clips}: expected at most probe.clips={knobs.clips}")
    _require_context(config)
    rows = min(config.num_sessions, knobs.clips + (knobs.samples - 1) * knobs.sampled_clips)
    return {("rollout",): point(config, num_sessions=rows)}, ()


def _drift_points(config: ProbeConfig) -> tuple[dict[tuple[Any, ...], RolloutConfig], tuple[str, ...]]:
    """``("reference",)`` and ``("candidate",)``: one batch of all clips each."""
    knobs = config.probe
    assert knobs.clips is not None
    _require_context(config)
    changes: dict[str, Any] = {}
    if knobs.candidate_kv is not None:
        kinds = {path.stem: path for path in sorted((CONF_DIR / "kv").glob("*.yaml"))}
        if knobs.candidate_kv not in kinds:
            raise BadInput(f"probe.candidate_kv={knobs.candidate_kv}: expected one of {', '.join(kinds)}")
        loaded = OmegaConf.to_container(OmegaConf.load(kinds[knobs.candidate_kv]))
        assert isinstance(loaded, dict)
        changes["kv"] = KVKnobs(**{str(key): value for key, value in loaded.items()})
    if knobs.candidate_attention is not None:
        changes["attention"] = knobs.candidate_attention
    if knobs.candidate_kv_dtype is not None:
        changes["kv_dtype"] = knobs.candidate_kv_dtype
    reference = point(config, num_sessions=knobs.clips)
    try:
        candidate = point(config, num_sessions=knobs.clips, **changes)
    except BadInput as refusal:
        raise BadInput(f"candidate: {refusal}") from refusal
    return {("reference",): reference, ("candidate",): candidate}, ()


def _require_context(config: ProbeConfig) -> None:
    if config.context_frames < 1:
        raise BadInput(
            f"context_frames={config.context_frames}: probe={config.probe.name} needs a last frame to go on from"
        )


def _photo_model(config: ProbeConfig) -> ModelConfig:
    """The model, which must take the photos' crops. ``BadInput`` otherwise."""
    model = model_config(raw_point(config))
    if (model.channels, model.height, model.width) != PHOTO_SHAPE:
        raise BadInput(
            f"model={model.name}: takes {model.channels} x {model.height} x {model.width}, probe={config.probe.name} "
            f"shows crops of {' x '.join(map(str, PHOTO_SHAPE))}; expected model=recall"
        )
    return model


def _text(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value)
