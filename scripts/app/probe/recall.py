"""Recall: N distinct frames are shown twice, and the next one can only be remembered from N frames back.

While the loop is shown for the first time nothing tells how long it is; the second time tells, so two times are given.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from model.data.clip import Pixels
from model.data.photos import photo_loops
from model.data.tensors import frames_to_model
from ringkv import RingKVLayerConfig
from ringkv.config import KVConfig
from ringkv.horizon import visible_frames
from ringkv.runner import RolloutRequest
from scripts.app.geometry import model_config
from scripts.app.probe.check import RELAY_RING, raw_point
from scripts.app.probe.drive import Setup, TeacherForced
from scripts.app.probe.oracle import OracleReader, oracle_model, oracle_requests, to_values
from scripts.app.probe.result import Found, Grid, Series, Sheet, number, numbers, spread_text
from scripts.app.probe.stats import Bootstrap, Values
from scripts.app.schema import RolloutConfig
from scripts.app.strategies import kv_config, ring_layers

ERROR = "mean squared error of the first generated frame"


def measure(setup: Setup) -> Found:
    """All of it; see ``conf/probe/recall.yaml``."""
    config, knobs = setup.probe.config, setup.probe.config.probe
    assert knobs.clips is not None
    assert knobs.loop_frames is not None
    assert knobs.rings is not None
    loops = {length: photo_loops("test", length, knobs.clips, config.seed) for length in knobs.loop_frames}
    found = Found(
        settings={
            "loops": f"{knobs.clips} of each length, crops of held-out photos, seed {config.seed}",
            "context": "each loop shown twice, real frames",
            "measured": "the first generated frame",
            "kv": config.kv.strategy,
            "weights": setup.weights_name,
        },
        summary={},
    )
    bootstrap = Bootstrap(knobs.clips, config.seed)
    _measure_grid(setup, loops, bootstrap, found)
    if ("dilated", knobs.loop_frames[0]) in setup.probe.points:
        _measure_dilated(setup, loops, bootstrap, found)
    if ("relay",) in setup.probe.points:
        _measure_relay(setup, found)
    return found


def loop_requests(loops: Pixels, given: int, num_frames: int, seed: int) -> list[RolloutRequest]:
    """A request for each of uint8 [count, N, 16, 16, 3]: the loop over and over, ``given`` frames of it given."""
    count, length = loops.shape[:2]
    return [
        RolloutRequest(
            rid=f"loop-{stream}",
            seed=seed,
            stream=stream,
            num_frames=num_frames,
            context=frames_to_model(loops[stream][np.arange(given) % length]),
            actions=torch.zeros(num_frames, dtype=torch.int64),
        )
        for stream in range(count)
    ]


def _measure_grid(setup: Setup, loops: dict[int, Pixels], bootstrap: Bootstrap, found: Found) -> None:
    """Error against ring_frames for every loop length, beside what the oracle reader finds in the same rings."""
    config, knobs = setup.probe.config, setup.probe.config.probe
    assert knobs.rings is not None
    rings = sorted(knobs.rings)
    errors: dict[tuple[int, int], Values] = {}
    hits: dict[tuple[int, int], float] = {}
    for length, shown in loops.items():
        requests = loop_requests(shown, 2 * length, 2 * length + 1, config.seed)
        truth = frames_to_model(shown[:, 0])
        for ring in rings:
            made = setup.roll(setup.probe.points["grid", length, ring], requests)
            frames = torch.stack([made[request.rid][0] for request in requests])
            errors[length, ring] = _squared_error(frames, truth)
            hits[length, ring] = float(oracle_hits(setup, shown, ring, 1, 2 * length + 1).mean())
    weights = setup.weights_name
    for length in loops:
        curve = bootstrap.mean(np.stack([errors[length, ring] for ring in rings], axis=1))
        found.series.append(
            Series.of(
                f"error of the model ({weights}), frames in [-1, 1]",
                f"N = {length}",
                rings,
                curve,
                x_label="ring_frames",
                y_label=ERROR,
                logarithmic=True,
            )
        )
        found.series.append(
            Series(
                "what the oracle reader finds",
                f"N = {length}",
                rings,
                [hits[length, ring] for ring in rings],
                "ring_frames",
                "share of frames found (oracle reader)",
            )
        )
    lengths = sorted(loops)
    found.grids.append(
        Grid(
            f"error of the model ({weights}), frames in [-1, 1]",
            rings,
            lengths,
            [[number(errors[length, ring].mean()) for ring in rings] for length in lengths],
            "ring_frames",
            "frames of the loop, N",
            "mean squared error",
            logarithmic=True,
        )
    )
    layers = model_config(setup.probe.points["grid", lengths[0], rings[0]]).num_layers
    rows: list[list[Any]] = []
    for length in lengths:
        guess = frames_to_model(loops[length].reshape(-1, 16, 16, 3)).unflatten(0, (-1, length)).mean(dim=1)
        mean_frame = _squared_error(guess, frames_to_model(loops[length][:, 0]))
        row: list[Any] = [length, spread_text(bootstrap.mean(mean_frame), 2)]
        if length in rings and length + 1 in rings:
            before, after = errors[length, length], errors[length, length + 1]
            ratio = bootstrap.ratio(before, after)
            once = _shown_once(setup, loops[length])
            row += [spread_text(bootstrap.mean(each), 2) for each in (before, after)] + [spread_text(ratio)]
            row.append(spread_text(bootstrap.mean(once), 2))
            found.summary[f"recall/cliff_{length}"] = number(ratio.middle)
            found.summary[f"recall/cliff_{length}_low"] = None if ratio.low is None else number(ratio.low)
            found.summary[f"recall/mse_{length}_seen"] = number(after.mean())
            found.summary[f"recall/mse_{length}_shown_once"] = number(once.mean())
        else:
            row += [None] * 4
        rows.append([*row, layers * (length - 1)])
    found.tables.append(
        Sheet(
            "The cliff: mean squared error of the first generated frame, and 95 % intervals",
            ["N", "mean frame", "ring N", "ring N + 1", "ratio", "shown once", "relay"],
            rows,
        )
    )
    found.notes.append(
        "A ring of N shows N - 1 frames back, one of N + 1 shows the frame itself. Mean frame: of the loop. Shown "
        "once: in a ring of N + 1 after one round, when nothing tells that it is over. Relay: frames back that depth "
        "could bring into a ring of N, so a low error there would be no fault of the cache."
    )


def _shown_once(setup: Setup, loops: Pixels) -> Values:
    """Error of the first frame after a single round, in the smallest ring that shows the whole of it."""
    length = loops.shape[1]
    requests = loop_requests(loops, length, length + 1, setup.probe.config.seed)
    made = setup.roll(setup.probe.points["once", length], requests)
    return _squared_error(torch.stack([made[request.rid][0] for request in requests]), frames_to_model(loops[:, 0]))


def oracle_hits(setup: Setup, loops: Pixels, ring_frames: int, dilation: int, num_frames: int) -> Values:
    """Share of loops whose frame the oracle reader finds in one layer, at each clock after two rounds: ``[clocks]``."""
    count, length = loops.shape[:2]
    order = np.arange(num_frames) % length
    walks = [loops[row][order] for row in range(count)]
    requests = oracle_requests(walks, [order.astype(np.int64)] * count, [2 * length] * count)
    point = raw_point(
        setup.probe.config,
        ring_frames=ring_frames,
        dilation=dilation,
        num_frames=num_frames,
        context_frames=2 * length,
        num_sessions=min(count, setup.probe.config.num_sessions),
    )
    reader = OracleReader(1, {stream: to_values(walk) for stream, walk in enumerate(walks)})
    setup.roll_in(point, kv_config(point, oracle_model((dilation,))), requests, reader)
    clocks = range(2 * length, num_frames)
    return np.array([[reader.hits(row, clock)[0] for clock in clocks] for row in range(count)], float).mean(axis=0)


def _measure_dilated(setup: Setup, loops: dict[int, Pixels], bootstrap: Bootstrap, found: Found) -> None:
    """Which frames of the loop come back where only a dilated layer reaches a whole round back."""
    config = setup.probe.config
    rows: list[list[Any]] = []
    for length, shown in loops.items():
        point = setup.probe.points["dilated", length]
        requests = loop_requests(shown, 2 * length, 3 * length, config.seed)
        rolled = shown[:, np.arange(3 * length) % length]
        truth = {row: frames_to_model(each) for row, each in enumerate(rolled)}
        forced = TeacherForced(setup.sampler, truth)
        setup.roll(point, requests, model=forced)
        errors = np.array(
            [
                [_squared_error(forced.made[row, clock][None], truth[row][clock][None])[0] for clock in _third(length)]
                for row in range(len(shown))
            ]
        )
        oracle = oracle_hits(setup, shown, point.ring_frames, point.dilation, 3 * length)
        reach = [_in_view(point, clock, length) for clock in _third(length)]
        curve = bootstrap.mean(errors)
        positions = list(range(length))
        panel = f"one dilated layer (dilation 2), {setup.weights_name}, teacher-forced"
        found.series.append(
            Series.of(
                panel,
                f"N = {length}, ring_frames {point.ring_frames}",
                positions,
                curve,
                x_label="place in the loop",
                y_label="mean squared error",
                logarithmic=True,
            )
        )
        for place in positions:
            means = numbers(curve.middle)
            rows.append(
                [length, place, "yes" if oracle[place] == 1 else "never", "yes" if reach[place] else "no", means[place]]
            )
    found.tables.append(
        Sheet(
            "A dilated layer (dilation 2): which frames of the loop come back",
            ["N", "place", "oracle finds it", "in view", f"error, {setup.weights_name}"],
            rows,
        )
    )


def _in_view(point: RolloutConfig, clock: int, length: int) -> bool:
    """Whether a frame like the one at ``clock`` is in view in some layer of the model, by the specification."""
    layers = set(ring_layers(point, model_config(point)))
    return any((clock - seen) % length == 0 for layer in layers for seen in visible_frames(layer, clock))


def _measure_relay(setup: Setup, found: Found) -> None:
    """How far back a frame still changes the next one: with one temporal layer, and relayed through all of them."""
    point = setup.probe.points["relay",]
    model = model_config(point)
    kept = kv_config(point, model)
    lags = list(range(1, point.context_frames + 1))
    tables: list[list[Any]] = []
    kinds = {"one temporal layer": _only_first_sees(kept), f"all {model.num_layers} layers: depth relays": kept}
    for name, geometry in kinds.items():
        changes = _influence(setup, point, geometry, lags)
        found.series.append(
            Series(
                f"relay: which earlier frames change the next one, ring_frames {RELAY_RING}",
                name,
                lags,
                changes,
                "frames back",
                "largest change of the next frame",
                logarithmic=True,
            )
        )
        reach = max((lag for lag, change in zip(lags, changes, strict=True) if change), default=0)
        tables.append([name, RELAY_RING - 1, reach])
        found.summary[f"recall/relay_frames_{'one' if name.startswith('one') else 'all'}"] = reach
    found.tables.append(
        Sheet(
            "Relay: influence is not recall; a frame out of every layer's view still changes the next one",
            ["layers", "in view, frames back", "changes it, frames back"],
            tables,
        )
    )


def _only_first_sees(kept: KVConfig) -> KVConfig:
    """The same with every layer but the first seeing nothing of the past."""
    layers: tuple[RingKVLayerConfig, ...] | None = getattr(kept, "layers", None)
    if layers is None:
        return kept
    blind = RingKVLayerConfig(ring_frames=1, ring_buckets=1)
    return dataclasses.replace(kept, layers=(layers[0], *[blind] * (len(layers) - 1)))  # type: ignore[call-arg]


def _influence(setup: Setup, point: RolloutConfig, kept: KVConfig, lags: list[int]) -> list[float]:
    """Largest change of the next frame when the frame so many frames back is another: exactly 0 if it has no influence.

    Two batches of equal shape, row for row, of which only the frames differ: what does not depend on them is equal to
    the last bit.
    """
    shown = len(lags)
    frames = frames_to_model(photo_loops("test", 2, shown, setup.probe.config.seed + 1).reshape(-1, 16, 16, 3))
    context, others = frames[:shown], frames[shown:]

    def rolled(changed: bool) -> torch.Tensor:
        requests = []
        for row, lag in enumerate(lags):
            given = context.clone()
            if changed:
                given[shown - lag] = others[shown - lag]
            requests.append(
                RolloutRequest(
                    rid=f"lag-{lag}",
                    seed=setup.probe.config.seed,
                    stream=row,
                    num_frames=shown + 1,
                    context=given,
                    actions=torch.zeros(shown + 1, dtype=torch.int64),
                )
            )
        made = setup.roll_in(point, kept, requests, setup.sampler)
        return torch.stack([made[request.rid][0] for request in requests])

    return (rolled(True) - rolled(False)).abs().amax(dim=(1, 2, 3)).tolist()


def _third(length: int) -> range:
    """Clocks of the third round."""
    return range(2 * length, 3 * length)


def _squared_error(frames: torch.Tensor, truth: torch.Tensor) -> Values:
    """Per row of ``[B, C, H, W]``."""
    return (frames.double() - truth.double()).square().mean(dim=(1, 2, 3)).numpy()
