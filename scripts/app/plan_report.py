"""The plan as a person sees it: lines and tables on the console, plan.json and plan.png."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ringkv.harness.plots import new_figure, save_png
from ringkv.harness.records import RunDir, dumps_strict, replace_text, to_plain
from ringkv.harness.tables import NOT_AVAILABLE
from scripts.app.check import GIB
from scripts.app.geometry import model_config
from scripts.app.plan import REFERENCE, Planned, calculate
from scripts.app.styles import COLORS

PLAN_FILE, PLOT_FILE = "plan.json", "plan.png"
MIB = 1024.0**2
OK = 0


def run_plan(planned: Planned, run_dir: RunDir) -> int:
    """Calculate, write and print; the exit code."""
    console = Console(highlight=False, soft_wrap=True)
    with run_dir:
        run_dir.write_config(planned.config)
        plan = calculate(planned)
        replace_text(run_dir.path / PLAN_FILE, dumps_strict(plan, indent=1) + "\n")
        write_png(run_dir.path / PLOT_FILE, plan, title=_title(planned))
        run_dir.write_summary({key: value for key, value in to_plain(plan).items() if isinstance(value, int | float)})
    for line in lines(planned, plan):
        console.print(line, markup=False)
    for table in (layer_table(plan), strategy_table(plan)):
        console.print(table)
    for label, name in (("plan", PLAN_FILE), ("plot", PLOT_FILE)):
        console.print(f"{label:<8}{run_dir.path / name}", markup=False)
    return OK


def lines(planned: Planned, plan: Mapping[str, Any]) -> list[str]:
    """What was planned for, and what follows for one session."""
    config, model = planned.config, model_config(planned.config)
    ring = next(row for row in plan["strategies"] if row["strategy"] == REFERENCE)
    growth = plan["full_context_bytes_per_s"]
    return [
        f"model   {model.name}: {model.num_parameters / 1e6:.2f} M parameters, {size(plan['weights_bytes'])} in "
        f"{config.dtype}; {model.num_layers} layers, {model.tokens_per_frame} tokens per frame, "
        f"{len(model.sigmas)} passes",
        f"device  {config.budget_gib:g} GiB, of which {config.workspace_share:.0%} for activations; "
        f"{config.device_tflops:g} TFLOP/s, of which {config.utilisation:.0%} are reached",
        f"KV      {size(plan['token_bytes'])} a token and layer; a ring session takes {size(plan['session_bytes'])} "
        f"in {config.kv_dtype}, at any length",
        f"        full context grows by {size(growth)} per second of video at {config.target_fps:g} frames/s, and "
        f"passes the ring at frame {plan['crossover_frame']}",
        f"frame   {flop(ring['frame_flops'][-1])} on the ring, {_ms(ring['frame_s'][-1])} at that rate",
        f"move    a session: snapshot {_ms(plan['snapshot_s'])}, park to the host {_ms(plan['park_to_host_s'])}, to "
        f"disk {_ms(plan['park_to_disk_s'])}",
    ]


def layer_table(plan: Mapping[str, Any]) -> Table:
    """A row for each kind of layer of the ring."""
    table = _table(
        "layers of a ring session: frames, and bytes of a session",
        ("layers", "slots", "keeps", "horizon", "sees", "oldest", "each", "together"),
    )
    for row in plan["layers"]:
        keeps = "every frame" if row["dilation"] == 1 else f"1 in {row['dilation']}"
        table.add_row(
            str(row["layers"]),
            str(row["ring_frames"]),
            keeps,
            str(row["horizon_frames"]),
            str(row["visible_frames"]),
            NOT_AVAILABLE if row["oldest_age"] is None else str(row["oldest_age"]),
            size(row["bytes_per_layer"]),
            size(row["layers"] * row["bytes_per_layer"]),
        )
    return table


def strategy_table(plan: Mapping[str, Any]) -> Table:
    """A row for each strategy: bytes and arithmetic of one session at the end, and the sessions that fit."""
    last = plan["strategies"][0]["num_frames"][-1]
    heading = ("strategy", "session", "frame", "memory", "compute", "fit", "wall")
    table = _table(f"a session of {last} frames, its last frame, and how many sessions fit", heading)
    for row in plan["strategies"]:
        memory, compute = row["sessions_by_memory"][-1], row["sessions_by_compute"][-1]
        table.add_row(
            row["strategy"],
            size(row["session_bytes"][-1]),
            flop(row["frame_flops"][-1]),
            str(memory),
            f"{compute:.2f}",
            str(min(memory, int(compute))),
            "memory" if memory < int(compute) else "compute",
        )
    return table


def write_png(path: Path, plan: Mapping[str, Any], *, title: str) -> None:
    """Draw bytes of a session, and both walls, against the length of the rollout."""
    figure = new_figure(9.5, 7.0)
    bytes_axis, wall_axis = figure.subplots(2, 1, sharex=True)
    for row in plan["strategies"]:
        name = row["strategy"]
        width = 2.6 if name == REFERENCE else 1.5
        style: dict[str, Any] = {"color": COLORS[name], "linewidth": width, "zorder": 3 if name == REFERENCE else 2}
        bytes_axis.plot(row["num_frames"], [held / GIB for held in row["session_bytes"]], label=name, **style)
        wall_axis.plot(row["num_frames"], row["sessions_by_memory"], **style)
        wall_axis.plot(row["num_frames"], row["sessions_by_compute"], **style | {"linestyle": (0, (2, 2))})
    for axis, label in ((bytes_axis, "a session (GiB)"), (wall_axis, "sessions that fit")):
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_ylabel(label)
        axis.grid(alpha=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    bytes_axis.axhline(plan["room_bytes"] / GIB, color="0.3", linewidth=1.0, linestyle=(0, (6, 3)))
    bytes_axis.annotate("room beside the weights", (1, plan["room_bytes"] / GIB), (0, 3), textcoords="offset points")
    wall_axis.axhline(1, color="0.3", linewidth=0.8)
    wall_axis.set_ylim(bottom=0.05)
    wall_axis.set_title("solid: by memory; dotted: by compute, in real time", fontsize=9, loc="right")
    wall_axis.set_xlabel("frames of the rollout")
    handles, labels = bytes_axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    save_png(figure, path)


def size(count: float) -> str:
    """Bytes in the unit that suits them."""
    for unit, bound in (("GiB", GIB), ("MiB", MIB), ("KiB", 1024.0)):
        if count >= bound:
            return f"{count / bound:.3g} {unit}"
    return f"{count:g} B"


def flop(count: float) -> str:
    """Arithmetic in the unit that suits it."""
    for unit, bound in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
        if count >= bound:
            return f"{count / bound:.3g} {unit}"
    return f"{count / 1e6:.3g} MFLOP"


def _title(planned: Planned) -> str:
    config = planned.config
    return (
        f"{config.model.preset}, {config.ring_frames} frames in a ring, dilation {config.dilation}, {config.kv_dtype}; "
        f"{config.budget_gib:g} GiB, {config.device_tflops:g} TFLOP/s at {config.utilisation:.0%}"
    )


def _table(title: str, heading: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(heading):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
