"""What was wanted, and what came out: one line for each target, from the rows of the levels. No torch, no clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import ge, le
from typing import Any, Literal

from scripts.app.bench.sampling import median_of_ratios
from scripts.app.compare_stats import Ratio, paired_ratio

Verdict = Literal["held", "short", "reported", "not measured"]
Rows = Sequence[Mapping[str, Any]]
Levels = Mapping[str, Rows]
"""Rows by level. Ratios in them are ``Ratio``."""

MIB = 1024.0**2
FEW_TOKENS = 16


@dataclass(frozen=True)
class Target:
    """One line of the table.

    wanted: in words. verdict: by the measured figure alone; the interval beside it says how sure that is. n: blocks,
    rounds or points behind it. note: where it was measured, or why it was not.
    """

    name: str
    wanted: str
    verdict: Verdict
    measured: float | None = None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    note: str = ""


def targets(levels: Levels, *, seed: int = 0) -> list[Target]:
    """Every target, measured or not."""
    return [
        *_reads(levels.get("reads", ()), seed),
        *_peers(levels.get("peers", ()), seed),
        *_frames(levels.get("frame", ()), seed),
        *_steady(levels.get("steady", ())),
    ]


def judged(
    name: str, wanted: str, ratio: Ratio | None, holds: Callable[[float], bool] | None, note: str = ""
) -> Target:
    """A target about a ratio; ``holds`` None for one that is reported only."""
    if ratio is None:
        return Target(name, wanted, "not measured", note=note)
    verdict: Verdict = "reported" if holds is None else "held" if holds(ratio.ratio) else "short"
    return Target(name, wanted, verdict, ratio.ratio, ratio.low, ratio.high, ratio.blocks, note)


def _reads(rows: Rows, seed: int) -> list[Target]:
    held = [row for row in rows if row["held"]]
    worst = max(held, key=lambda row: row["ratio"].ratio, default=None)
    counted = f"{len(held)} of {len(rows)} points have a floor of 200 us or more"
    grid = median_of_ratios([_pair(row, "ring", "floor") for row in held], seed=seed)
    dearest = None if worst is None else worst["ratio"]
    return [
        judged("read path / floor, median of the grid", "<= 1.05", grid, partial(ge, 1.05), counted),
        judged(
            "read path / floor, worst point", "<= 1.20", dearest, partial(ge, 1.2), point_name(worst) if worst else ""
        ),
    ]


def _pair(row: Mapping[str, Any], over: str, under: str) -> tuple[Sequence[float], Sequence[float]]:
    return row["samples_s"][over], row["samples_s"][under]


def point_name(row: Mapping[str, Any]) -> str:
    """A point of the grid in words."""
    layer = "local" if row["dilation"] == 1 else f"dilation {row['dilation']}"
    return (
        f"{row['tokens_per_frame']} tokens, window {row['window']}, {row['sessions']} sessions, {row['dtype']}, "
        f"{row['fill']}, {layer}, {row['threads']} threads"
    )


def _peers(rows: Rows, seed: int) -> list[Target]:
    found = []
    for name in ("shift", "cat", "paged_windowed", "hf_sliding"):
        having = [row for row in rows if name in row["ratios"]]
        ratio = median_of_ratios([_pair(row, name, "ring") for row in having], seed=seed)
        found.append(judged(f"{name} / ring, median of the grid", "reported", ratio, None))
        if name in ("shift", "cat"):
            few = [_pair(row, name, "ring") for row in having if row["tokens_per_frame"] == FEW_TOKENS]
            ratio = median_of_ratios(few, seed=seed)
            found.append(judged(f"{name} / ring, {FEW_TOKENS} tokens per frame", ">= 1.2", ratio, partial(le, 1.2)))
    return found


def _frames(rows: Rows, seed: int) -> list[Target]:
    done = {(row["sessions"], row["mode"]): row for row in rows if row["status"] == "ok"}
    reasons = {(row["sessions"], row["mode"]): row["reason"] for row in rows if row["status"] != "ok"}

    def step_times(sessions: int, mode: str, times: int = 1) -> list[float]:
        row = done.get((sessions, mode))
        return [] if row is None else [times * each for each in row["samples_s"]["step"]]

    def figure(sessions: int, key: str, mode: str) -> Ratio | None:
        row = done.get((sessions, mode))
        return None if row is None else row[key]

    why = reasons.get((1, "compiled"), "")
    speedup = paired_ratio(step_times(1, "eager"), step_times(1, "compiled"), seed=seed)
    found = [judged("eager / compiled step, 1 session", ">= 1.3", speedup, partial(le, 1.3), why)]
    for sessions, wanted in ((1, 0.6), (8, 0.7)):
        of = partial(figure, sessions, "fraction")
        name = f"kernel floor / step, {sessions} session{'s' * (sessions > 1)}"
        found += [
            judged(f"{name}, compiled", f">= {wanted}", of("compiled"), partial(le, wanted), why),
            judged(f"{name}, eager", "reported", of("eager"), None),
        ]
    for mode, wanted in (("compiled", 1.4), ("eager", 1.6)):
        ratio = paired_ratio(step_times(1, mode, times=8), step_times(8, mode), seed=seed)
        note = why if mode == "compiled" else ""
        found.append(judged(f"8 steps of 1 / step of 8, {mode}", f">= {wanted}", ratio, partial(le, wanted), note))
    for mode in ("eager", "compiled"):
        share, note = figure(8, "host_share", mode), why if mode == "compiled" else ""
        found.append(judged(f"host work / step, 8 sessions, {mode}", "<= 0.02", share, partial(ge, 0.02), note))
    return found


def _steady(rows: Rows) -> list[Target]:
    by_name = {row["what"]: row for row in rows}

    def row_of(name: str) -> Mapping[str, Any]:
        return by_name.get(name, {"status": "", "reason": ""})

    def exact(
        name: str, what: str, wanted: str, value: Callable[[Mapping[str, Any]], tuple[float, bool, str]]
    ) -> Target:
        row = row_of(what)
        if row["status"] != "ok":
            return Target(name, wanted, "not measured", note=row["reason"])
        measured, held, note = value(row)
        return Target(name, wanted, "held" if held else "short", measured, note=note)

    late = row_of("late clock")
    return [
        judged(
            "frame at clock 5,000 / just wrapped",
            "0.97 to 1.03",
            late.get("ratio"),
            lambda ratio: 0.97 <= ratio <= 1.03,
            late["reason"] if late["status"] != "ok" else f"clocks {late['clocks'][0]} and {late['clocks'][1]}",
        ),
        exact(
            "memory growth of a long rollout, MiB",
            "memory growth",
            "<= 1",
            lambda row: (
                row["growth_bytes"] / MIB,
                row["growth_bytes"] <= MIB,
                f"frame {row['frames'][0]} to {row['frames'][1]}",
            ),
        ),
        exact(
            "session memory - prediction, bytes",
            "session memory",
            "0",
            lambda row: (
                sum(row["measured_bytes"]) - sum(row["predicted_bytes"]),
                row["measured_bytes"] == row["predicted_bytes"],
                f"{row['measured_bytes'][0]} and {row['measured_bytes'][1]} bytes for 1 and 8 sessions",
            ),
        ),
        exact(
            "compilations per region and bucket",
            "compilations",
            "1",
            lambda row: (
                row["in_warm_up"] / (row["regions"] * row["buckets"]),
                row["in_warm_up"] == row["regions"] * row["buckets"],
                f"{row['regions']} regions; the commit flag is an argument of none",
            ),
        ),
        exact(
            "compilations after warm-up",
            "compilations",
            "0",
            lambda row: (row["later"], row["later"] == 0, "while rings fill and wrap, over reset and load"),
        ),
    ]
