"""The first screen of a report as a piece of HTML for a notebook.

It has no script and fetches nothing. Its styles apply to it alone, and take the colours of the page
around it, so that it reads well in light and dark notebooks.
"""

from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import Any

from coterie.evaluation.verdict import Headline
from coterie.report import page
from coterie.report.charts import Figure
from coterie.report.read import FinishedRun

_STYLE = """
.coterie { max-width: 56rem; line-height: 1.5; overflow-x: auto; }
.coterie h1 { font-size: 1rem; font-weight: 600; margin: .2rem 0; padding: 0; border: 0;
  opacity: .8; }
.coterie .answer { font-size: 1.35rem; line-height: 1.3; font-weight: 650; margin: .3rem 0 .7rem; }
.coterie .tiles { display: grid; gap: .6rem; margin: .7rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 9.5rem), 1fr)); }
.coterie .tile { border: 1px solid rgb(127 127 127 / .45); border-radius: .5rem;
  padding: .5rem .8rem; }
.coterie .tile strong { display: block; font-size: 1.45rem; line-height: 1.3; }
.coterie .tile span { display: block; }
.coterie .tile span, .coterie .note, .coterie .label { font-size: .9em; opacity: .8; }
.coterie .label { font-weight: 600; }
.coterie .means { border-left: 3px solid rgb(127 127 127 / .45); padding-left: .8rem; }
.coterie .badge { display: inline-block; border: 1px solid; border-radius: .3rem;
  padding: 0 .4rem; font-weight: 600; }
.coterie .bad { font-weight: 700; color: #d4333b; }
.coterie table { margin: .4rem 0; }
.coterie th, .coterie td { text-align: left; vertical-align: top; padding: .2rem .6rem .2rem 0; }
.coterie tbody th { white-space: nowrap; }
"""


def first_screen(runs: Sequence[FinishedRun], headlines: Sequence[Headline] = ()) -> str:
    """Return the first screen of the report on finished runs, in a `div`.

    `headlines` are those of a comparison.
    """
    drawn: list[Figure] = []
    given = {"runs": runs, "clients": False, "findings": (), "headlines": headlines}
    given |= {"drawn": drawn, "can_draw": False}
    template = page.environment().get_template("sections.html.j2")
    written: Any = template.make_module(given)
    return scoped(str(written.opening()))


def scoped(body: str) -> str:
    """Return HTML in a `div` with the styles of this package around it."""
    return f'<div class="coterie"><style>{_STYLE}</style>{body}</div>'


def as_table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table as HTML."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = ("".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in body)}</table>"


def sentences(lines: Sequence[str]) -> str:
    """Return sentences as HTML; those that are indented are a list below the last one."""
    found = []
    for listed, group in groupby(lines, key=lambda line: line.startswith(" ")):
        tag = "li" if listed else "p"
        text = "".join(f"<{tag}>{escape(line.strip())}</{tag}>" for line in group)
        found.append(f"<ul>{text}</ul>" if listed else text)
    return "".join(found)
