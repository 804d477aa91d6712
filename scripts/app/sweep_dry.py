"""sweep.dry_run: what each point would take, calculated; nothing is run and nothing is written. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ringkv.harness.machine import package_hash
from ringkv.harness.records import to_plain
from ringkv.harness.tables import NOT_AVAILABLE, format_value
from scripts.app.check import effective, weight_bytes
from scripts.app.errors import BadInput
from scripts.app.flat import flat
from scripts.app.geometry import model_config
from scripts.app.plan_report import flop
from scripts.app.schema import RolloutConfig
from scripts.app.strategies import kv_bytes, working_bytes
from scripts.app.sweep_point import memory_limit, own_config
from scripts.app.sweep_record import PACKAGES, hash_config
from scripts.app.sweep_resume import is_done
from scripts.app.work import rollout_flops


def show_points(points: Sequence[RolloutConfig], rows: Mapping[int, dict[str, Any]], folder: Path) -> int:
    """Print a table of the points and why the infeasible ones are; the exit code.

    rows: of an earlier attempt in ``folder``, whose finished points would be kept.
    """
    table = Table(title="points, not run", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("point", no_wrap=True)
    table.add_column("knobs", overflow="fold")
    for heading in ("KV", "weights", "arithmetic"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    source_hash = package_hash(PACKAGES)
    refused: dict[str, list[int]] = {}
    for job, (config, knobs) in enumerate(zip(points, differing(points), strict=True)):
        own = own_config(config)
        sizes, refusal = predict(own)
        verdict = "yes" if refusal is None else "no"
        if refusal is not None:
            refused.setdefault(refusal, []).append(job)
        elif job in rows and is_done(rows[job], hash_config(effective(own)), source_hash, folder / str(job)):
            verdict = "done"
        table.add_row(str(job), knobs, *sizes, verdict, style=None if refusal is None else "red")
    console = Console()
    console.print(table)
    reasons = [f"{', '.join(map(str, jobs))}: {refusal}" for refusal, jobs in refused.items()]
    for line in (*reasons, "KV at the end of the rollout; arithmetic of all frames and passes, matrix products alone"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def predict(config: RolloutConfig) -> tuple[tuple[str, str, str], str | None]:
    """KV memory, weights and FLOP of a rollout as text, "n/a" where its config cannot work; why it cannot run here."""
    try:
        anywhere = effective(config, on_this_machine=False)
    except BadInput as refusal:
        return (NOT_AVAILABLE, NOT_AVAILABLE, NOT_AVAILABLE), str(refusal)
    model = model_config(anywhere)
    kv, weights = kv_bytes(anywhere, model), weight_bytes(anywhere, model)
    sizes = (_bytes(kv), _bytes(weights), flop(rollout_flops(anywhere, model)))
    try:
        effective(config)
    except BadInput as refusal:
        return sizes, str(refusal)
    needed, limit = kv + working_bytes(anywhere, model) + weights, memory_limit(config)
    if config.device == "cpu" and needed > limit:
        return (
            sizes,
            f"sweep.memory_gib={config.sweep.memory_gib}: KV and weights take {_bytes(needed)}, more than that",
        )
    return sizes, None


def differing(points: Sequence[RolloutConfig]) -> list[str]:
    """For each point the knobs in which they differ, as ``key=value``."""
    knobs = [dict(flat(to_plain(point))) for point in points]
    keys = [key for key in knobs[0] if any(each[key] != knobs[0][key] for each in knobs)]
    return [" ".join(f"{key}={each[key]}" for key in keys) for each in knobs]


def _bytes(size: int) -> str:
    return " ".join(format_value("kv_bytes", size))
