"""Figures of the points of a sweep: fronts, a metric against a knob, and the grid of what ran and what did not."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.app.html.runs import MIB, STRATEGY, Point, Points
from scripts.app.html.spec import Axis, Curve, CurveFigure, Dot, DotFigure, GridFigure, PointFigure
from scripts.app.html.spec import Point as Mark
from scripts.app.html.stats import Interval, median_interval

SPEED, QUALITY, KV = "throughput/frames_per_s", "quality/psnr_db", "memory/kv_bytes"
KV_PREDICTED = "memory/kv_bytes_predicted"
SPEED_AXIS = Axis("frames/s, all sessions", zero=True)
KV_AXIS = Axis("KV memory held (MiB)", zero=True)
QUALITY_AXIS = Axis("PSNR of generated frames (dB)")
MAX_GRIDS = 12
_WIDE = 20
"""From this ratio of the largest to the smallest on, an axis is logarithmic."""
_NOTHING = Interval(None, None, None, 0)


def fronts(points: Points) -> list[PointFigure]:
    """What trades off against what: speed and memory, and quality with each of them where there is some."""
    out = []
    wanted = [
        ("pareto_speed_kv", "Speed against KV memory", (KV_AXIS, SPEED_AXIS), ("low", "high")),
        ("pareto_quality_kv", "Quality against KV memory", (KV_AXIS, QUALITY_AXIS), ("low", "high")),
        ("pareto_quality_speed", "Quality against speed", (SPEED_AXIS, QUALITY_AXIS), ("high", "high")),
    ]
    for name, title, (x, y), better in wanted:
        marks = [_mark(point, x, y) for point in points.all]
        sizes = [mark.x.median for mark in marks if mark.x.median is not None]
        wide = bool(sizes) and 0 < _WIDE * min(sizes) < max(sizes)
        if not any(mark.x.median is not None and mark.y.median is not None for mark in marks):
            continue
        hidden = sum(mark.reason is not None and mark.x.median is None for mark in marks)
        ways = " and ".join(
            f"{'less' if way == 'low' else 'more'} {axis.title.split(' (')[0]}"
            for way, axis in zip(better, (x, y), strict=True)
        )
        caption = (
            f"A mark is a configuration: the median over its repeats, with 95 % intervals. The line joins those that "
            f"no other one beats: {ways}. "
        )
        if x is KV_AXIS:
            if any(mark.reason is not None and mark.x.median is not None for mark in marks):
                caption += "Shaded: configurations without a result, at the KV memory that was predicted for them. "
            if hidden:
                caption += f"Not drawn: {hidden} without a result, whose record has no prediction. "
        else:
            marks = [mark for mark in marks if mark.reason is None]
        caption += "Configurations that differ in sessions or frames do different work. "
        caption += points.conditions(points.all)
        drawn = Axis(f"{x.title}, logarithmic", log=True) if wide else x
        out.append(PointFigure(name, title, caption.strip(), drawn, y, marks, better))
    return out


def against_knobs(points: Points) -> list[CurveFigure]:
    """Speed, and quality, against each knob that takes several numbers, a line for what agrees in all other knobs."""
    out = []
    for knob in points.numeric_knobs():
        for key, axis, what in ((SPEED, SPEED_AXIS, "speed"), (QUALITY, QUALITY_AXIS, "quality")):
            lines = _lines(points, knob, key)
            if not any(len(line.x) > 1 for line in lines):
                continue
            caption = (
                f"Medians over repeats with 95 % intervals; a line for configurations that agree in everything but "
                f"{knob}. {points.conditions(points.measured)}"
            )
            name = f"{what}_by_{knob.replace('.', '_')}"
            title = f"{what.capitalize()} against {knob}"
            out.append(CurveFigure(name, title, caption, Axis(knob, whole=True), axis, lines, marks=True))
    return out


def side_by_side(points: Points) -> list[DotFigure]:
    """Speed and memory of each strategy, a row each, where strategies vary."""
    if STRATEGY not in points.varying:
        return []
    out = []
    for name, title, key, scale, axis in (
        ("strategies_speed", "Speed of each strategy", SPEED, 1.0, SPEED_AXIS),
        ("strategies_kv", "KV memory of each strategy", KV, MIB, KV_AXIS),
    ):
        dots = [
            Dot(point.strategy, point.strategy, point.tags, _others(point), point.interval(key, scale))
            for point in points.measured
            if point.interval(key, scale).median is not None
        ]
        if dots:
            caption = (
                "A mark is a configuration: the median over its repeats, with its 95 % interval. Use the filters to "
                f"compare strategies at one setting of the other knobs. {points.conditions(points.measured)}"
            )
            out.append(DotFigure(name, title, caption, axis, Axis("strategy"), dots))
    return out


def grids(points: Points) -> list[GridFigure]:
    """Speed over two knobs, one grid for each setting of the others; what has no result is a region of it."""
    numeric = points.numeric_knobs()
    knobs = [*numeric, *([STRATEGY] if STRATEGY in points.varying else [])][:2]
    if len(knobs) < 2:
        return []
    x_knob, y_knob = knobs
    settings = _settings(points, knobs)
    speeds = [speed for point in points.measured if (speed := point.interval(SPEED).median) is not None]
    if not speeds:
        return []
    out = []
    for index, members in enumerate(settings[:MAX_GRIDS]):
        label = next((point for point in members if point.runs), members[0]).label_without(*knobs)
        xs, ys = (
            [value for value in points.varying[knob] if any(p.tags[knob] == value for p in members)] for knob in knobs
        )
        at = {(point.tags[x_knob], point.tags[y_knob]): point for point in members}
        cells = [[point.interval(SPEED).median if (point := at.get((x, y))) else None for x in xs] for y in ys]
        notes = [[point.reason() if (point := at.get((x, y))) and not point.runs else "" for x in xs] for y in ys]
        caption = (
            "Median frames/s over repeats. Crossed out: no result, for the reason that hovering shows. Empty: not run. "
        )
        out.append(
            GridFigure(
                f"grid_{index + 1}",
                label if len(settings) > 1 else f"Speed over {x_knob} and {y_knob}",
                caption + points.conditions(members),
                Axis(x_knob),
                Axis(y_knob),
                xs,
                ys,
                cells,
                notes,
                "frames/s",
                (x_knob, y_knob),
                _without(members[0], *knobs),
                (min(speeds), max(speeds)),
            )
        )
    return out


def number_of_settings(points: Points) -> int:
    """How many grids there would be without a limit."""
    knobs = [*points.numeric_knobs(), *([STRATEGY] if STRATEGY in points.varying else [])][:2]
    return len(_settings(points, knobs))


def _settings(points: Points, knobs: Sequence[str]) -> list[list[Point]]:
    """Points by all their other knobs; those whose record does not say one of ``knobs`` have no place."""
    settings: dict[tuple[tuple[str, str], ...], list[Point]] = {}
    for point in points.all:
        if all(knob in point.tags for knob in knobs):
            settings.setdefault(tuple(_without(point, *knobs).items()), []).append(point)
    return list(settings.values())


def _mark(point: Point, x: Axis, y: Axis) -> Mark:
    reason = point.reason() if not point.runs else None
    horizontal, vertical = _on(point, x), _on(point, y)
    if reason is not None and x is KV_AXIS:
        horizontal = median_interval([run.metric(KV_PREDICTED, MIB) for run in point.failed])
    return Mark(
        point.label, point.strategy, point.tags, horizontal, _NOTHING if reason is not None else vertical, reason
    )


def _on(point: Point, axis: Axis) -> Interval:
    key, scale = {KV_AXIS: (KV, MIB), SPEED_AXIS: (SPEED, 1.0), QUALITY_AXIS: (QUALITY, 1.0)}[axis]
    return point.interval(key, scale)


def _lines(points: Points, knob: str, key: str) -> list[Curve]:
    settings: dict[str, list[Point]] = {}
    for point in points.measured:
        if knob in point.tags and point.interval(key).median is not None:
            settings.setdefault(point.label_without(knob), []).append(point)
    seen: dict[str, int] = {}
    lines = []
    for label, members in settings.items():
        members = sorted(members, key=lambda point: float(point.tags[knob]))
        strategy = members[0].strategy
        variant = seen[strategy] = seen.get(strategy, -1) + 1
        xs = [float(point.tags[knob]) for point in members]
        lines.append(
            Curve(label, strategy, _without(members[0], knob), xs, [point.interval(key) for point in members], variant)
        )
    return lines


def _without(point: Point, *knobs: str) -> dict[str, str]:
    return {knob: value for knob, value in point.tags.items() if knob not in knobs}


def _others(point: Point) -> str:
    return point.label_without(STRATEGY) if point.named.keys() - {STRATEGY} else ""
