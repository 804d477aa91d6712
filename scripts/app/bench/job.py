"""Run the levels that were asked for, write what they gave, print the targets."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console

from ringkv.harness.machine import machine_card
from ringkv.harness.records import RunDir, dumps_strict, error_line, replace_text, to_plain
from scripts.app.bench import plot, report
from scripts.app.bench.check import Bench
from scripts.app.bench.frame import measure_frames
from scripts.app.bench.reads import measure_peers, measure_reads
from scripts.app.bench.rollout import measure_rollouts
from scripts.app.bench.sampling import Budget
from scripts.app.bench.steady import measure_steady
from scripts.app.bench.targets import Target, targets
from scripts.app.track import open_tracker

OK, FAILED = 0, 1

MEASURES: dict[str, Callable[[Bench, Budget], Iterator[dict[str, Any]]]] = {
    "reads": measure_reads,
    "peers": measure_peers,
    "frame": measure_frames,
    "rollout": measure_rollouts,
    "steady": measure_steady,
}


def run_bench(bench: Bench, run_dir: RunDir) -> int:
    """Run a checked benchmark in a claimed folder; the exit code. Whatever ends it is recorded, Ctrl-C too.

    W&B gets its copy when all is measured, so that its process takes no time from a sample.
    """
    config = bench.config
    console = Console(soft_wrap=True, highlight=False)
    levels: dict[str, list[dict[str, Any]]] = {}
    facts: dict[str, Any] = {"machine": machine_card(config.device, packages=("ringkv", "model", "scripts"))}
    error: BaseException | None = None
    threads = torch.get_num_threads()
    with run_dir:
        try:
            run_dir.write_config(config)
            torch.manual_seed(config.seed)
            report.print_header(console, bench, facts["machine"])
            for level in config.levels:
                _measure(level, bench, levels, console)
        except BaseException as raised:
            error = raised
        finally:
            torch.set_num_threads(threads)
        found = targets(levels, seed=config.seed)
        failed = [row for rows in levels.values() for row in rows if row.get("status") == "failed"]
        if error is None and failed:
            error = RuntimeError(f"{len(failed)} of the measurements failed, the first with: {failed[0]['reason']}")
        result = to_plain(
            {
                "status": "ok" if error is None else "failed",
                "error": None if error is None else error_line(error),
                "definitions": report.DEFINITIONS,
                "config": config,
                **facts,
                "targets": found,
                "levels": levels,
            }
        )
        replace_text(run_dir.path / report.BENCH_FILE, dumps_strict(result, indent=1) + "\n")
        run_dir.write_summary(facts | _summary(found), error=error)
        title = f"{config.model.preset}, {config.dtype}, ring_frames={config.ring_frames}, threads={config.threads}"
        plot.write_png(run_dir.path / report.PLOT_FILE, levels, title)
    report.print_levels(console, levels)
    report.print_targets(console, found)
    report.print_end(console, run_dir.path, _track(bench, run_dir, found, failed=error is not None))
    if error is None:
        return OK
    traceback.print_exception(error)
    print(f"failed: {run_dir.path}", file=sys.stderr)
    return FAILED


def _measure(level: str, bench: Bench, levels: dict[str, list[dict[str, Any]]], console: Console) -> None:
    budget, start = Budget(bench.seconds_of(level)), time.perf_counter()
    rows = levels[level] = []
    with console.status(level):
        for row in MEASURES[level](bench, budget):
            rows.append(row)
    console.print(f"{level:<8} {len(rows)} rows in {time.perf_counter() - start:.0f} s", markup=False)


def _summary(found: list[Target]) -> dict[str, Any]:
    """The targets that were measured, as summary values."""
    return {f"target/{target.name}": target.measured for target in found if target.measured is not None}


def _track(bench: Bench, run_dir: RunDir, found: list[Target], *, failed: bool) -> str | None:
    tracker = open_tracker(bench.config, run_dir)
    with tracker:
        tracker.summary(_summary(found) | {f"verdict/{target.name}": target.verdict for target in found})
        if (run_dir.path / report.PLOT_FILE).exists():
            tracker.media(image=run_dir.path / report.PLOT_FILE)
        return tracker.finish(int(failed))
