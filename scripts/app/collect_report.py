"""Collected rows as one Parquet file and as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ringkv.files import replaced_atomically
from ringkv.harness.columns import Column, Kind
from ringkv.harness.tables import NOT_AVAILABLE, format_value
from scripts.app.columns import collected_columns, knob_columns

_SHOWN = (
    ("throughput/frames_per_s", "frames/s"),
    ("latency/frame_ms_p50", "p50"),
    ("memory/kv_bytes", "KV"),
)
_NOT_SHOWN = ("seed", "repeat", "repeats", "snapshot_every", "data.folder", "tracking.group")
_ITEMS: Mapping[Kind, type | tuple[type, ...]] = {
    "ints": int,
    "floats": (int, float),
    "texts": str,
    "int": int,
    "float": (int, float),
    "bool": bool,
    "text": str,
}


def write_parquet(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write ``rows`` into one Parquet file, atomically, a column for each of ``collected_columns`` and any other key.

    Unit and meaning are in the metadata of each field. A value that is not of its column's type is null; the type of a
    column that is not declared is that of its values, text (JSON) where they differ.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {
        "int": pa.int64(),
        "float": pa.float64(),
        "bool": pa.bool_(),
        "text": pa.string(),
        "ints": pa.list_(pa.int64()),
        "floats": pa.list_(pa.float64()),
        "texts": pa.list_(pa.string()),
    }
    columns = collected_columns()
    columns |= {name: _guess(rows, name) for name in sorted({key for row in rows for key in row} - columns.keys())}
    fields, arrays = [], []
    for name, column in columns.items():
        values = [_fitted(column.kind, row.get(name)) for row in rows]
        metadata = {"unit": column.unit, "meaning": column.meaning}
        fields.append(pa.field(name, types[column.kind], metadata=metadata))
        arrays.append(pa.array(values, types[column.kind]))
    with replaced_atomically(path) as temporary:
        pq.write_table(pa.Table.from_arrays(arrays, schema=pa.schema(fields)), temporary)


def print_rows(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print a table of the rows, by what tells them apart, and below it why those failed that did."""
    knobs = [name for name, _ in knob_columns() if name not in _NOT_SHOWN]
    varied = [name for name in knobs if len({json.dumps(row.get(name)) for row in rows}) > 1]
    table = Table(title=f"{len(rows)} {'run' if len(rows) == 1 else 'runs'}", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("run", "differs in", "status"):
        table.add_column(heading, overflow="fold")
    for heading in (*(heading for _, heading in _SHOWN), "PSNR"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        own = " ".join(f"{name}={_text(row[name])}" for name in varied if row.get(name) is not None)
        values = [" ".join(format_value(key, row.get(key))).removesuffix(heading).strip() for key, heading in _SHOWN]
        psnr = row.get("quality/psnr_db")
        shown = NOT_AVAILABLE if psnr is None else f"{psnr:.2f} dB"
        style = None if row["status"] == "ok" else "red"
        table.add_row(_name(row), own, row["status"], *values, shown, style=style)
    console.print(table)
    for row in rows:
        if row["status"] != "ok":
            console.print(f"{_name(row)}: {row['status']}: {row['reason']}", markup=False)
    old = sum(bool(row["missing"]) for row in rows)
    if old:
        console.print(
            f"{old} of {len(rows)} records lack something that this release writes: column missing", markup=False
        )


def _name(row: Mapping[str, Any]) -> str:
    path = Path(row["run_dir"])
    return path.name if row.get("sweep") is None else f"{path.parent.name}/{path.name}"


def _guess(rows: Sequence[Mapping[str, Any]], name: str) -> Column:
    values = [row[name] for row in rows if row.get(name) is not None]
    kinds: tuple[Kind, ...] = ("bool", "int", "float", "text", "ints", "floats", "texts")
    for kind in kinds:
        if all(_fits(kind, value) for value in values):
            return Column(kind, "", "not a column of this release")
    return Column("text", "", "not a column of this release; JSON")


def _fits(kind: Kind, value: Any) -> bool:
    if kind in ("ints", "floats", "texts"):
        return isinstance(value, list) and all(_is(kind, item) for item in value)
    return _is(kind, value)


def _is(kind: Kind, value: Any) -> bool:
    return isinstance(value, _ITEMS[kind]) and (kind == "bool" or not isinstance(value, bool))


def _fitted(kind: Kind, value: Any) -> Any:
    if value is None or _fits(kind, value):
        return value
    return json.dumps(value) if kind == "text" else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
