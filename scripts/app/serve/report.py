"""Simulations as rows, as a table, as a picture, and in Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ringkv.harness.plots import new_figure, save_png
from ringkv.harness.records import RunDir, dumps_strict, replace_text
from ringkv.harness.tables import NOT_AVAILABLE
from scripts.app.plan_report import size
from scripts.app.serve.check import Serving
from scripts.app.serve.load import draw_visits
from scripts.app.serve.simulate import make_policy, simulate
from scripts.app.track import open_tracker

RESULT_FILE, PLOT_FILE = "serve_sim.json", "serve_sim.png"
OK = 0
_COLORS = {"refuse": "#7d8a1e", "fifo": "#3d7fd6", "lru_park": "#d62728"}
_GIB = 1024.0**3

PANELS = (
    ("wait_s_p95", "wait for a seat, p95 (s)", 1.0),
    ("on_time_fraction", "frames on time", 1.0),
    ("parked_bytes_max", "parked, most at once (GiB)", 1 / _GIB),
)
"""Rows of the picture: key, axis label, and what the value is multiplied by."""


def run_simulations(serving: Serving, run_dir: RunDir) -> int:
    """Simulate every arrival rate with every policy and pool; write, print and track them; the exit code."""
    console = Console(highlight=False, soft_wrap=True)
    with run_dir:
        run_dir.write_config(serving.config)
        rows = measure(serving, console)
        result = {
            "config": serving.config,
            "frame_s": serving.frame_s,
            "session_bytes": serving.session_bytes,
            "move_s": serving.move_s,
            "rows": rows,
        }
        replace_text(run_dir.path / RESULT_FILE, dumps_strict(result, indent=1) + "\n")
        write_png(run_dir.path / PLOT_FILE, serving, rows)
        run_dir.write_summary({"simulations": len(rows), "refused": sum(row["refused"] for row in rows)})
        sync_line = _track(serving, rows, run_dir)
    config = serving.config
    console.print(
        f"session {size(serving.session_bytes)}, parked or woken in {1000 * serving.move_s:.3g} ms; a frame takes "
        f"{1000 * serving.frame_s:.3g} ms and is due every {1000 / config.target_fps:.3g} ms",
        markup=False,
    )
    console.print(_table(rows))
    for label, name in (("rows", RESULT_FILE), ("plot", PLOT_FILE)):
        console.print(f"{label:<8}{run_dir.path / name}", markup=False)
    if sync_line is not None:
        console.print(f"{'upload':<8}{sync_line}", markup=False)
    return OK


def measure(serving: Serving, console: Console) -> list[dict[str, Any]]:
    """A row for each arrival rate, pool and policy; the same visitors for every policy and pool."""
    config, rows = serving.config, []
    cells = [
        (rate, pool, policy)
        for rate in config.arrivals_per_min
        for pool in config.pool_sizes
        for policy in config.policies
    ]
    for rate, pool, policy in track(cells, "simulations", console=console, transient=True):
        tally = simulate(
            draw_visits(config, rate),
            policy=make_policy(policy, config.quantum_frames),
            pool=pool,
            period_s=1 / config.target_fps,
            frame_s=serving.frame_s,
            move_s=serving.move_s,
            deadline_s=config.deadline_s,
        )
        figures = tally.row(period_s=1 / config.target_fps, session_bytes=serving.session_bytes)
        rows.append({"arrivals_per_min": rate, "pool": pool, "policy": policy, **figures})
    return rows


def write_png(path: Path, serving: Serving, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw what visitors feel and what is parked against the arrival rate: a column for each pool."""
    config = serving.config
    figure = new_figure(3.2 * len(config.pool_sizes) + 1.2, 7.4)
    axes = figure.subplots(len(PANELS), len(config.pool_sizes), squeeze=False, sharex=True, sharey="row")
    for axis_row, (key, label, factor) in zip(axes, PANELS, strict=True):
        axis_row[0].set_ylabel(label)
        for axis, pool in zip(axis_row, config.pool_sizes, strict=True):
            for policy in config.policies:
                found = [row for row in rows if (row["pool"], row["policy"]) == (pool, policy) and row[key] is not None]
                rates, values = [row["arrivals_per_min"] for row in found], [factor * row[key] for row in found]
                axis.plot(rates, values, marker="o", markersize=4, color=_COLORS[policy], label=policy)
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.2)
            axis.spines[["top", "right"]].set_visible(False)
    for axis, pool in zip(axes[0], config.pool_sizes, strict=True):
        axis.set_title(f"{pool} session{'s' * (pool > 1)} in the pool", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("requests per minute")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    title = (
        f"{config.model.preset}: {size(serving.session_bytes)} a session, {1000 * serving.frame_s:.3g} ms a frame at "
        f"{config.device_tflops:g} TFLOP/s and {config.utilisation:.0%}"
    )
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    save_png(figure, path)


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    heading = ("/min", "pool", "policy", "served", "refused", "p50 s", "p95 s", "on time", "parked")
    title = "requests per minute, wait for a seat (p50, p95), frames on time, most bytes parked"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in heading:
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for row in rows:
        on_time = row["on_time_fraction"]
        table.add_row(
            f"{row['arrivals_per_min']:g}",
            str(row["pool"]),
            row["policy"],
            str(row["finished"]),
            str(row["refused"]),
            _seconds(row["wait_s_p50"]),
            _seconds(row["wait_s_p95"]),
            NOT_AVAILABLE if on_time is None else f"{on_time:.0%}",
            size(row["parked_bytes_max"]) if row["parked_bytes_max"] else "0",
        )
    return table


def _track(serving: Serving, rows: Sequence[Mapping[str, Any]], run_dir: RunDir) -> str | None:
    with open_tracker(serving.config, run_dir) as tracker:
        for step, row in enumerate(rows):
            tracker.log(step, {f"serve/{key}": value for key, value in row.items()})
        tracker.media(image=run_dir.path / PLOT_FILE)
        return tracker.finish()


def _seconds(value: float | None) -> str:
    return NOT_AVAILABLE if value is None else f"{value:.1f}"
