"""The page: sections as HTML, figures as data for the script, everything inlined, nothing fetched."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from ringkv.harness.records import dumps_strict, to_plain
from ringkv.harness.tables import NOT_AVAILABLE, format_value
from scripts.app.html import charts
from scripts.app.html.comparisons import strategies_of
from scripts.app.html.palette import CYCLE, DASHES, MARKERS
from scripts.app.html.runs import MIB, STRATEGY, Points
from scripts.app.html.sections import figures_of
from scripts.app.html.sources import Sources
from scripts.app.html.spec import Column, Figure, Gallery, Section, Table
from scripts.app.html.stats import Interval
from scripts.app.styles import COLORS

SIGNIFICANT_DIGITS = 6
"""Of numbers in the page's figures. The CSV files have them whole."""


def render(sources: Sources, sections: Sequence[Section], files: str) -> str:
    """The whole page. files: folder of the figures' files, relative to the page."""
    from plotly.offline import get_plotlyjs

    parts = {
        "TITLE": escape("ringkv report: " + ", ".join(sources.folders)),
        "FOLDERS": ", ".join(f"<code>{escape(folder)}</code>" for folder in sources.folders),
        "STYLE": _resource("style.css"),
        "NAVIGATION": "".join(f'<a href="#{escape(s.name)}">{escape(s.title)}</a>' for s in sections),
        "FILTERS": _filters(filters_of(sources)),
        "SUMMARY": _summary(sources),
        "SECTIONS": "\n".join(_section(section, files) for section in sections),
        "DATA": _script_json(_data(figures_of(sections))),
        "PLOTLY": get_plotlyjs(),
        "SCRIPT": _resource("charts.js") + _resource("page.js"),
    }
    pieces = _resource("template.html").split("@@")  # text, name, text, name ... text
    return "".join(parts[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def filters_of(sources: Sources) -> dict[str, list[str]]:
    """Knob -> values, of everything that varies between marks."""
    filters = {knob: list(values) for knob, values in sources.points.varying.items()}
    compared = strategies_of([result for _, result in sources.comparisons])
    known = filters.get(STRATEGY) or list(dict.fromkeys(point.strategy for point in sources.points.all))
    strategies = list(dict.fromkeys([*known, *compared]))
    return ({STRATEGY: strategies} if len(strategies) > 1 else {}) | {
        knob: values for knob, values in filters.items() if knob != STRATEGY
    }


def _data(figures: Sequence[Figure]) -> dict[str, Any]:
    return {
        "figures": [_short(to_plain(figure)) | {"kind": figure.kind} for figure in figures],
        "looks": {name: {"color": COLORS[name], "symbol": symbol} for name, (symbol, _) in MARKERS.items()},
        "cycle": CYCLE,
        "dashes": [dash for dash, _ in DASHES],
    }


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, list) else value


def _script_json(value: Any) -> str:
    """Strict JSON that no markup can end: ``<`` as an escape."""
    return json.dumps(json.loads(dumps_strict(value)), separators=(",", ":")).replace("<", "\\u003c")


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


# -- the top ------------------------------------------------------------------------------------------------------


def _filters(filters: Mapping[str, Sequence[str]]) -> str:
    groups = []
    for knob, values in filters.items():
        chips = "".join(
            f'<label><input type="checkbox" checked data-knob="{escape(knob)}" value="{escape(value)}">'
            + (f'<i class="swatch" data-strategy="{escape(value)}"></i>' if knob == STRATEGY else "")
            + f"<span>{escape(value)}</span></label>"
            for value in values
        )
        groups.append(f"<fieldset><legend>{escape(knob)}</legend>{chips}</fieldset>")
    return "".join(groups)


def _summary(sources: Sources) -> str:
    points = sources.points
    runs = [run for point in points.all for run in (*point.runs, *point.failed)]
    counts = [len(point.runs) for point in points.measured]
    tiles = []
    if runs:
        ok = sum(run.ok for run in runs)
        tiles.append(
            _tile(str(len(runs)), "runs" if len(runs) > 1 else "run", f"{ok} ok, {len(runs) - ok} without a result")
        )
    if counts:
        repeats = str(min(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
        what = "configurations" if len(counts) > 1 else "configuration"
        tiles.append(_tile(str(len(counts)), what, f"n = {repeats}"))
    tiles += _bests(points)
    if sources.comparisons:
        strategies = strategies_of([result for _, result in sources.comparisons])
        many = len(sources.comparisons) > 1
        tiles.append(
            _tile(str(len(strategies)), "strategies compared", f"in {len(sources.comparisons)} comparison{'s' * many}")
        )
    if sources.probes:
        names = ", ".join(str(result["probe"]) for _, result in sources.probes)
        tiles.append(_tile(str(len(sources.probes)), "probes" if len(sources.probes) > 1 else "probe", names))
    cards = "".join(_machine_card(letter, facts) for letter, facts in points.machines.items())
    return f'<div class="tiles">{"".join(tiles)}</div>' + (f'<div class="cards">{cards}</div>' if cards else "")


def _bests(points: Points) -> list[str]:
    """Fastest, smallest and best configuration, where there is a choice."""
    tiles = []
    for key, what, scale, unit, best in (
        (charts.SPEED, "fastest", 1.0, "frames/s", max),
        (charts.KV, "least KV memory", MIB, "MiB", min),
        (charts.QUALITY, "highest PSNR", 1.0, "dB", max),
    ):
        found = [(point.interval(key, scale), point) for point in points.measured]
        known = [(value.median, value, point) for value, point in found if value.median is not None]
        if len(known) < 2:
            continue
        median, value, point = best(known, key=lambda each: each[0])
        equal = sum(other == median for other, _, _ in known) - 1
        more = f" and {equal} more" if equal else ""
        interval = f" ({text})" if (text := _range(value, 2)) else ""
        detail = f"{point.label}{more}{interval}; n = {value.n}, machine {point.letter}"
        tiles.append(_tile(f"{median:.2f} {unit}", what, detail))
    return tiles


def _tile(number: str, what: str, detail: str) -> str:
    return f"<div><b>{escape(number)}</b><span>{escape(what)}</span><small>{escape(detail)}</small></div>"


def _machine_card(letter: str, facts: Mapping[str, Any]) -> str:
    def fact(name: str) -> str:
        return str(facts.get(name, NOT_AVAILABLE))

    ram = " ".join(format_value("ram_bytes", facts.get("ram_bytes"))).strip()
    lines = [
        f"{fact('device_name')}; {fact('cores_usable')} cores; {ram} RAM; {fact('threads')} threads",
        f"torch {fact('torch')}; Python {fact('python')}; {fact('platform')}",
        f"source {fact('source_hash')[:12]}; commit {fact('git_commit')[:12]}",
    ]
    return f"<div><b>Machine {escape(letter)}</b>{''.join(f'<span>{escape(line)}</span>' for line in lines)}</div>"


# -- sections -----------------------------------------------------------------------------------------------------


def _section(section: Section, files: str) -> str:
    intro = f"<p>{escape(section.intro)}</p>" if section.intro else ""
    body, figures = [], [item for item in section.items if isinstance(item, Figure)]
    if figures:
        small = " small" if all(figure.kind == "grid" for figure in figures) and len(figures) > 1 else ""
        inner = "".join(_figure(figure, files) for figure in figures)
        body.append(f'<div class="figures{small}">{inner}</div>')
    for item in section.items:
        if isinstance(item, Table):
            body.append(_table(item, files))
        elif isinstance(item, Gallery):
            body.append(_gallery(item))
    return f'<section id="{escape(section.name)}"><h2>{escape(section.title)}</h2>{intro}{"".join(body)}</section>'


def _figure(figure: Figure, files: str) -> str:
    name = escape(figure.name)
    title = f"{escape(figure.title)}{_links(figure.name, files, picture=True)}"
    return (
        f'<figure class="chart" id="figure-{name}"><h3>{title}</h3>'
        f'<div class="legend"></div><div class="plot" data-figure="{name}"></div>'
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>"
    )


def _links(name: str, files: str, *, picture: bool) -> str:
    kinds = ("png", "csv") if picture else ("csv",)
    links = "".join(f'<a href="{escape(f"{files}/{name}.{kind}")}">{kind.upper()}</a>' for kind in kinds)
    return f'<span class="files">{links}</span>'


def _gallery(gallery: Gallery) -> str:
    pictures = "".join(
        f'<figure class="strip" data-tags="{_tags(strip.tags)}"><img alt="{escape(strip.label)}" '
        f'src="data:image/png;base64,{base64.b64encode(strip.path.read_bytes()).decode()}">'
        f"<figcaption>{escape(strip.label)}</figcaption></figure>"
        for strip in gallery.strips
    )
    return f'{pictures}<p class="caption">{escape(gallery.caption)}</p>'


def _table(table: Table, files: str) -> str:
    head = "".join(
        f'<th scope="col"{_class(column)}><button type="button">{escape(column.label)}</button></th>'
        for column in table.columns
    )
    rows = "\n".join(
        f'<tr data-tags="{_tags(row.tags)}">'
        + "".join(_cell(column, cell) for column, cell in zip(table.columns, row.cells, strict=True))
        + "</tr>"
        for row in table.rows
    )
    inner = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        f'<p class="caption">{escape(table.caption)}</p>'
    )
    title = f"{escape(table.title)}{_links(table.name, files, picture=False)}"
    anchor = f'id="table-{escape(table.name)}"'
    if table.folded:
        return f"<details {anchor}><summary><h3>{title}</h3></summary>{inner}</details>"
    return f"<div {anchor}><h3>{title}</h3>{inner}</div>"


def _class(column: Column) -> str:
    return ' class="number"' if column.kind in ("number", "interval") else ""


def _cell(column: Column, cell: Any) -> str:
    if cell is None:
        return f'<td class="{"number " if _class(column) else ""}none">{NOT_AVAILABLE}</td>'
    if column.kind == "interval":
        if cell.median is None:
            return f'<td class="number none">{NOT_AVAILABLE}</td>'
        text = _range(cell, column.digits)
        small = f"<small>{escape(text)}</small>" if text else ""
        return f'<td class="number" data-sort="{cell.median}">{cell.median:.{column.digits}f}{small}</td>'
    if column.kind == "number":
        return f'<td class="number" data-sort="{cell}">{cell:.{column.digits}f}</td>'
    text = escape(str(cell))
    if column.kind == "command":
        return f'<td class="command"><button type="button" data-copy="{text}">copy</button><code>{text}</code></td>'
    if column.kind == "verdict":
        verdict = {"=": "equal", "~": "close", "≠": "apart"}.get(str(cell)[:1], "")
        kind = "close" if cell == "no" else verdict
        return f'<td class="verdict {kind}">{text}</td>'
    return f'<td class="long">{text}</td>' if column.kind == "long" else f"<td>{text}</td>"


def _range(value: Interval, digits: int) -> str:
    """The interval, "" for none and for one without a width at these digits."""
    if value.low is None:
        return ""
    middle, low, high = (f"{number:.{digits}f}" for number in (value.median, value.low, value.high))
    return "" if low == middle == high else f"{low} to {high}"


def _tags(tags: Mapping[str, str]) -> str:
    return escape(json.dumps(dict(tags)))
