"""Return: a camera leaves a place and comes back after g frames. What is still there, and what a model makes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from model.data.camera import Camera, Walk, circuits, out_and_back
from model.data.photos import load_photo
from model.data.tensors import frames_to_model
from ringkv.config import RingKVLayerConfig
from ringkv.horizon import horizon_frames
from ringkv.runner import RolloutRequest
from scripts.app.geometry import model_config
from scripts.app.probe.check import oracle_dilations, raw_point
from scripts.app.probe.drive import Setup
from scripts.app.probe.oracle import OracleReader, oracle_model, oracle_requests, to_values
from scripts.app.probe.result import Found, Series, Sheet, numbers
from scripts.app.probe.stats import Bootstrap, Values
from scripts.app.strategies import kv_bytes, kv_config, ring_layers, seen_past

ORACLE_PHOTO, ORACLE_PITCH = "flower", 2
"""A grid of 13 x 20 places, no two of which look the same."""

GAP_LABEL = "frames since the place was left, g"

_MIB = 1024.0**2


def measure(setup: Setup) -> Found:
    """All of it; see ``conf/probe/return.yaml``."""
    config, knobs = setup.probe.config, setup.probe.config.probe
    assert knobs.clips is not None
    assert knobs.max_gap is not None
    assert knobs.gaps is not None
    found = Found(
        settings={
            "oracle reader": f"camera over one photo, returns after 1 to {knobs.max_gap} frames, at every phase of the "
            "dilation",
            "trained": f"{knobs.clips} circuits of held-out photos for each gap, two laps given, seed {config.seed}",
            "kv": config.kv.strategy,
            "weights": setup.weights_name,
        },
        summary={},
    )
    bootstrap = Bootstrap(knobs.clips, config.seed)
    walks = {gap: circuits("test", gap, 3, knobs.clips, config.seed) for gap in sorted(knobs.gaps)}
    geometries = [key[1:] for key in setup.probe.points if key[0] == "oracle"]
    rows: list[list[Any]] = []
    for ring, dilation in geometries:
        name = f"ring {ring}, dilation {dilation}"
        kept = oracle_curve(setup, ring, dilation, knobs.max_gap)
        found.series.append(
            Series(
                "oracle reader: what the geometry retains",
                name,
                list(range(1, knobs.max_gap + 1)),
                numbers(kept),
                GAP_LABEL,
                "share of returns found (oracle reader)",
            )
        )
        trained = _trained_curves(setup, ring, dilation, walks, bootstrap, name, found)
        point = setup.probe.points["oracle", ring, dilation]
        mib = kv_bytes(point, model_config(point)) / _MIB
        area = float(kept.sum())
        rows.append([ring, dilation, _horizon(setup, ring, dilation), mib, area, area / mib, trained, trained / mib])
        found.summary[f"return/oracle_frames_ring{ring}_dilation{dilation}"] = area
        found.summary[f"return/trained_frames_ring{ring}_dilation{dilation}"] = trained
    found.tables.append(
        Sheet(
            "Return accuracy summed over gaps (frames), and KV of a session",
            ["ring", "dilation", "horizon", "MiB", "oracle", "oracle/MiB", "model", "model/MiB"],
            rows,
        )
    )
    low, high = min(knobs.gaps), max(knobs.gaps)
    found.notes.append(
        f"The oracle's sum is over g = 1 to {knobs.max_gap}; the model's ({setup.weights_name}) is the area under its "
        f"curve from {low} to {high}."
    )
    if any(dilation > 1 for _, dilation in geometries):
        found.notes.append(
            "The model is asked at clock 2 g: a layer of dilation d holds what was seen g frames ago if d divides g."
        )
    if setup.weights.model.config.num_actions < 5:
        found.notes.append("The model has no actions of a camera: every step is told as NOOP.")
    return found


def oracle_curve(setup: Setup, ring_frames: int, dilation: int, max_gap: int) -> Values:
    """Share of returns after 1 to ``max_gap`` frames that the oracle reader finds in any layer: ``[max_gap]``.

    The camera turns at every phase of the dilation, so a share is over clocks of all remainders.
    """
    config = setup.probe.config
    dilations = oracle_dilations(model_config(setup.probe.points["oracle", ring_frames, dilation]), dilation)
    phases = range(max(dilations))
    camera = Camera(load_photo(ORACLE_PHOTO), ORACLE_PITCH)
    turns: list[tuple[int, int, Walk]] = []  # clock of the last frame of the way out, pause
    for pause in (0, 1):
        reach = (max_gap - pause) // 2
        if reach + pause:
            turns += [(lead + reach, pause, out_and_back(camera, lead, reach, pause)) for lead in phases]
    walks = [walk.frames for _, _, walk in turns]
    point = raw_point(
        config,
        ring_frames=ring_frames,
        dilation=dilation,
        num_frames=max(map(len, walks)),
        num_sessions=min(len(walks), config.num_sessions),
    )
    requests = oracle_requests(walks, [walk.places for _, _, walk in turns], [turn + 1 for turn, _, _ in turns])
    reader = OracleReader(len(dilations), {stream: to_values(walk) for stream, walk in enumerate(walks)})
    setup.roll_in(point, kv_config(point, oracle_model(dilations)), requests, reader)
    found = np.zeros(max_gap)
    for stream, (turn, pause, walk) in enumerate(turns):
        for clock in range(turn + 1, len(walk.frames)):
            gap = 2 * (clock - turn) - pause
            found[gap - 1] += any(reader.hits(stream, clock)) / len(phases)
    return found


def _trained_curves(
    setup: Setup,
    ring: int,
    dilation: int,
    walks: dict[int, list[Walk]],
    bootstrap: Bootstrap,
    name: str,
    found: Found,
) -> float:
    """Add the model's curves of one geometry; the area under its accuracy, in frames."""
    gaps = list(walks)
    psnr, accuracy = [], []
    for gap, circuit in walks.items():
        point = setup.probe.points["trained", ring, dilation, gap]
        knows_moves = setup.weights.model.config.num_actions >= 5
        requests = [
            RolloutRequest(
                rid=f"circuit-{stream}",
                seed=setup.probe.config.seed,
                stream=stream,
                num_frames=2 * gap + 1,
                context=frames_to_model(walk.frames[: 2 * gap]),
                actions=torch.from_numpy(walk.actions[: 2 * gap + 1] * knows_moves),
            )
            for stream, walk in enumerate(circuit)
        ]
        made = setup.roll(point, requests)
        pairs = [(made[r.rid][0], frames_to_model(w.frames[:gap])) for r, w in zip(requests, circuit, strict=True)]
        # Distance of the first generated frame to every place of its circuit; the camera is back at the first.
        squared = np.array([(f.double() - p.double()).square().mean(dim=(1, 2, 3)).numpy() for f, p in pairs])
        accuracy.append((squared.argmin(axis=1) == 0).astype(float))
        psnr.append(10 * np.log10(4.0 / np.maximum(squared[:, 0], 1e-6)))
    weights = setup.weights_name
    for panel, values, y_label in (
        (f"{weights}: nearest place", accuracy, f"share nearest to the right place ({weights})"),
        (f"{weights}: PSNR of the returned place", psnr, "PSNR (dB)"),
    ):
        curve = bootstrap.mean(np.stack(values, axis=1))
        found.series.append(Series.of(panel, name, gaps, curve, x_label=GAP_LABEL, y_label=y_label))
    hit = np.mean(accuracy, axis=1)
    return float(np.trapezoid(hit, gaps)) if len(gaps) > 1 else float(hit[0])


def _horizon(setup: Setup, ring: int, dilation: int) -> str:
    """Of each kind of layer, or that nothing is forgotten."""
    point = setup.probe.points["oracle", ring, dilation]
    if seen_past(point) == "everything":
        return "none"
    layers: set[RingKVLayerConfig] = set(ring_layers(point, model_config(point)))
    return " and ".join(map(str, sorted(map(horizon_frames, layers))))
