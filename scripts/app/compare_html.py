"""The page of a comparison: one file, nothing fetched, light or dark as the reader's system is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem;
       color: light-dark(#1d1f23, #e4e6ea); background: light-dark(#ffffff, #15171b); }
h1 { font-size: 1.3rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0; } .dim { opacity: .75; }
svg { width: 100%; max-width: 60rem; height: auto; display: block; margin: 1rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; vertical-align: top;
         border-bottom: 1px solid light-dark(#dcdfe4, #33373e); }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
td.equal { color: light-dark(#19733a, #6fce8f); } td.close, td.bad { color: light-dark(#b3261e, #ff8a80); }
dt { font-weight: 600; margin-top: .6rem; } dd { margin: 0; max-width: 60rem; }
"""

Grid = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""Title, heading, cells."""


def render(
    title: str,
    svg: str,
    tables: Sequence[Grid],
    notes: Sequence[str],
    definitions: Mapping[str, str],
    machine: Mapping[str, Any],
    sources: Sequence[str],
) -> str:
    """The whole page. svg goes in as it is, everything else as text."""
    where = f"{machine['device_name']}, {machine['cores_usable']} cores, PyTorch {machine['torch']}; {sources[0]}"
    commit = f"commit {machine['git_commit'] or 'unknown'}, source {machine['source_hash'][:12]}"
    terms = "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in definitions.items())
    body = [
        f"<h1>Ways of keeping the past</h1><p>{escape(title)}</p>",
        f'<p class="dim">{escape(where)}; {escape(commit)}</p>',
        svg,
        *(_section(*table) for table in tables),
        *(f"<p>{escape(note)}</p>" for note in notes),
        f"<h2>What the numbers are</h2><dl>{terms}</dl>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _section(title: str, heading: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heading)
    rows = "\n".join("<tr>" + "".join(_cell(text) for text in row) + "</tr>" for row in cells)
    return (
        f'<h2>{escape(title)}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody>'
        "</table></div>"
    )


def _cell(text: str) -> str:
    kind = "bad" if text == "no" or text.endswith("×") else {"=": "equal", "~": "close"}.get(text[:1], "")
    return f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>"
