"""One HTML page for one run or several: the answer, the guarantee, and what each client gains.

The page is self-contained and reads the run folders' files only. It names its own scripts by their
hashes, and a browser that opens it runs no other and fetches nothing, whatever a file of a run
folder says. Metrics are not private: a page with every client's errors is for whoever may see the
data. `clients=False` leaves out what is one client's own, names first of all; what is left are
counts, means and percentiles over clients, still made of their rows.
"""

import html
import platform
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from coterie import __version__
from coterie.core.files import write_atomically
from coterie.report import charts
from coterie.report.clients import show_spread
from coterie.report.deployed import show_deployed
from coterie.report.elements import Html, can_draw, element, join
from coterie.report.finished import FinishedRun, read_finished
from coterie.report.glossary import show_glossary
from coterie.report.groups import one_by_one
from coterie.report.guarantees import show_guarantees
from coterie.report.history import show_history
from coterie.report.joining import show_joining
from coterie.report.opening import show_opening, title_of
from coterie.report.references import show_references
from coterie.report.results import show_results
from coterie.report.style import FILTER, STYLE

_META = """
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
"""
_OF_CLIENTS = (
    show_joining,
    show_references,
    show_spread,
    show_history,
    show_deployed,
    show_guarantees,
)
"""Sections that say less where a page is to leave clients out."""
_UNSEEN = "Charts need JavaScript; the numbers behind them are under them."


def write_report(
    folders: Sequence[Path],
    out: Path,
    figures: Path | None = None,
    names: Mapping[Path, str] | None = None,
    *,
    clients: bool = True,
    findings: Sequence[str] = (),
) -> Path:
    """Write one page about finished runs; charts need the extra `report`.

    Args:
        folders: Of finished runs.
        out: The page.
        figures: A folder to write every chart of the page to as PNG and SVG, if any.
        names: What the folders of a comparison are called; else they go by their method.
        clients: Whether clients are named, listed and drawn one by one.
        findings: What a comparison says of differences, sentence by sentence.

    Raises:
        ValueError: If no folder is given, one has no finished run or cannot be read, or figures
            are asked for and cannot be drawn.
    """
    if not folders:
        raise ValueError("no run folders: give at least one folder that `coterie run` has written")
    if figures is not None and not can_draw():
        raise ValueError(
            f"{figures}: figures were asked for, but altair is not installed; "
            "`pip install coterie[report]` draws them"
        )
    runs = read_finished(folders, names)
    shown = (section(runs, clients=clients) for section in _OF_CLIENTS)
    below = join(show_results(runs, findings), *shown, _appendix(runs), show_glossary())
    body = join(show_opening(runs, _places(below)), below)
    scripts = _scripts(body)
    head = join(_meta(scripts), element("title", f"coterie: {title_of(runs)}"))
    head = join(head, element("style", Html(STYLE)))
    parts = (body, *_behind(body), *(element("script", Html(text)) for text in scripts))
    page = element("html", element("head", head), element("body", *parts), lang="en")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, f"<!DOCTYPE html>\n{page}\n".encode(errors="replace"))
    if figures is not None:
        charts.save_all(body, figures)
    return out


def _places(body: Html) -> dict[str, str]:
    """Find the sections of a page: their titles, and where they are."""
    found = re.findall(r'<h2 id="([\w-]+)">([^<]*)</h2>', body)
    return {html.unescape(title): place for place, title in found}


def _scripts(body: Html) -> list[str]:
    """Choose the scripts that a page needs."""
    found = [FILTER] if 'class="filter"' in body else []
    return [*found, *charts.scripts()] if body.figures else found


def _behind(body: Html) -> list[Html]:
    """Return what the scripts read."""
    if not body.figures:
        return []
    return [element("noscript", element("p", _UNSEEN)), charts.config_element()]


def _meta(scripts: Sequence[str]) -> Html:
    """Say that nothing may be fetched, and nothing run but the page's own scripts."""
    allowed = " ".join(charts.hash_of(script) for script in scripts) or "'none'"
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}"
    told = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    return Html(_META + told)


def _appendix(runs: Sequence[FinishedRun]) -> Html:
    parts: list[str] = [element("h2", "Plan and versions", id="plan")]
    shown = one_by_one(runs)
    for run in shown:
        title = element("summary", f"{run.label}: {run.folder.resolve().name}/plan.toml")
        opened = {"open": ""} if len(runs) == 1 else {}
        used = ", ".join(f"{name} {told}" for name, told in run.versions.items())
        inside = (title, element("pre", run.plan), element("p", f"Run with {used}."))
        parts.append(element("details", *inside, class_="plan", **opened))
    if len(shown) < len(runs):
        told = f"Plans of {len(shown)} of {len(runs)} runs; every run folder has its own plan.toml."
        parts.append(element("p", told, class_="note"))
    drawn = f", altair {version('altair')}" if can_draw() else ""
    made = f"Page by coterie {__version__}, Python {platform.python_version()}{drawn}."
    parts.append(element("p", made, class_="note"))
    return element("section", *parts)
