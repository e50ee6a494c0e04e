"""One self-contained HTML page for one run or several.

The page reads only the files of the run folders. It lists its own scripts by their hashes, so a
browser runs no other script and fetches nothing, whatever a run folder contains. Metrics are not
private: a page with the errors of single clients is for those who may see the data.
`clients=False` leaves out names and numbers of single clients; counts, means and percentiles over
clients remain, which are computed from their rows.
"""

import math
import platform
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemBytecodeCache, FileSystemLoader, StrictUndefined

from coterie import __version__
from coterie.core.cache import folder
from coterie.core.files import write_atomically
from coterie.evaluation import baselines, verdict
from coterie.privacy import guarantee, selection
from coterie.report import charts, read, sections, statement, tables
from coterie.report.charts import Figure, can_draw

_SECTIONS = (
    ("results", "results", "Results", "Results"),
    ("gains", "gains", "Gains", "Does joining help a client?"),
    ("baselines", "baselines", "Baselines", "Baselines"),
    ("distribution", "clients", "Clients", "Distribution over clients"),
    ("rounds", "rounds", "Rounds", "Round by round"),
    ("deployment", "deployment", "Deployment", "Deployment"),
    ("guarantee", "guarantee", "Guarantee", "Guarantee"),
    ("reviewer", "reviewer", "Reviewer", "For a privacy reviewer"),
    ("data_used", "data", "Data", "Data used"),
    ("plans", "plan", "Plan", "Plan and versions"),
    ("glossary", "glossary", "Glossary", "Glossary"),
)
"""Macros of the template, in order, with the id of their sections, its menu entry and title."""
_CALLED = (
    (read, "are_grouped named one_by_one"),
    (guarantee, "COMPARED describe_noise is_local reasons round_up show_delta"),
    (selection, "CHOSEN_ONLY FOR_OTHERS THEOREM"),
    (baselines, "PROMISE"),
    (tables, "SIMULATION percent"),
    (sections, "decimal short"),
    (verdict, "over_epsilons"),
)
"""What the template calls besides `facts`, by module."""

Section = tuple[str, str, str, str]
"""The id of a section, its menu entry, its title and its content."""

FILTER = """
(() => {
  for (const box of document.querySelectorAll("input.filter")) {
    const rows = Array.from(document.getElementById(box.dataset.of).querySelectorAll("tbody tr"));
    const count = document.getElementById(box.dataset.of + "-count");
    const names = rows.map((row) => row.cells[0].textContent.toLowerCase());
    box.addEventListener("input", () => {
      const wanted = box.value.trim().toLowerCase();
      let shown = 0;
      rows.forEach((row, number) => {
        row.hidden = !names[number].includes(wanted);
        shown += row.hidden ? 0 : 1;
      });
      count.textContent = wanted ? shown + " of " + rows.length + " shown" : "";
    });
  }
})();
"""
"""The script of the search boxes."""


def write_report(
    folders: Sequence[Path],
    out: Path,
    figures: Path | None = None,
    names: Mapping[Path, str] | None = None,
    *,
    clients: bool = True,
    findings: Sequence[str] = (),
    headlines: Sequence[verdict.Headline] = (),
) -> Path:
    """Write one page on the finished runs in `folders`; charts need the extra `report`.

    Args:
        folders: Of finished runs.
        out: The page.
        figures: A folder for every chart of the page as SVG, PNG and PDF, if any.
        names: Labels of the runs of a comparison; else runs are named by their method.
        clients: Whether to name, list and draw single clients.
        findings: Sentences of a comparison on which differences exceed the noise.
        headlines: The best method at each epsilon of a comparison.

    Raises:
        ValueError: If no folder is given, one has no finished run or cannot be read, or figures
            are asked for and cannot be drawn.
    """
    if not folders:
        raise ValueError("no run folders: give at least one folder that `coterie run` has written")
    if figures is not None and not can_draw():
        raise ValueError(
            f"{figures}: figures need altair, which is not installed; "
            "`pip install coterie[report]` installs it"
        )
    runs = read.read_finished(folders, names)
    given = {"clients": clients, "findings": findings, "headlines": headlines}
    page, drawn = _render(runs, given)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page.strip().encode(errors="replace") + b"\n")
    if figures is not None:
        for one in drawn:
            for ending in charts.FORMATS:
                one.save(figures / f"{one.name}{ending}")
    return out


def _render(runs: Sequence[read.FinishedRun], given: Mapping[str, Any]) -> tuple[str, list[Figure]]:
    """Return the page and its charts."""
    drawn = list[Figure]()
    written: Any = (
        environment()
        .get_template("sections.html.j2")
        .make_module({**given, "runs": runs, "drawn": drawn, "can_draw": can_draw()})
    )
    made = [(key, menu, title, getattr(written, macro)()) for macro, key, menu, title in _SECTIONS]
    shown = [section for section in made if section[-1].strip()]
    return render_page(sections.title_of(runs), written.opening(), shown, bool(drawn)), drawn


def render_page(title: str, opening: str, shown: Sequence[Section], with_charts: bool) -> str:
    """Return a page of this package: its opening, its sections, and the scripts of its charts."""
    scripts = [FILTER] if any('class="filter"' in text for *_, text in shown) else []
    scripts += [charts.bundle(), charts.STARTER] if with_charts else []
    return (
        environment()
        .get_template("page.html.j2")
        .render(
            title=title,
            opening=opening,
            sections=shown,
            made_by=_made_by(),
            charts=with_charts,
            config=charts.script_json(charts.CONFIG),
            scripts=scripts,
            hashes=" ".join(map(charts.hash_of, scripts)) or "'none'",
        )
    )


@lru_cache(maxsize=1)
def environment() -> Environment:
    """Return the templates, compiled once, with what they call."""
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        bytecode_cache=_compiled_templates(),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    made.filters |= {"entry": sections.entry, "short": sections.short, "tied": _tied}
    made.tests["known"] = lambda value: not math.isnan(value)
    for module, names in _CALLED:
        made.globals |= {name: getattr(module, name) for name in names.split()}
    made.globals |= {"facts": sections, "statements": statement, "tables": tables}
    made.globals |= {"infinity": math.inf}
    made.globals |= {"exp": math.exp, "float": float, "zip": zip}
    return made


def _compiled_templates() -> FileSystemBytecodeCache | None:
    """Return where templates are kept compiled: to compile them takes longer than to fill them."""
    place = folder()
    if place is None:
        return None
    templates = place / f"templates-{__version__}-jinja-{version('jinja2')}"
    try:
        templates.mkdir(exist_ok=True)
    except OSError:
        return None
    return FileSystemBytecodeCache(str(templates))


def _tied(text: str) -> str:
    """Return text whose numbers are not parted from their signs by a line break."""
    for sign in (" %", " \u00b1 "):
        text = text.replace(sign, sign.replace(" ", "\u00a0"))
    return text


def _made_by() -> str:
    drawn = f", altair {version('altair')}" if can_draw() else ""
    return f"Written by coterie {__version__}, Python {platform.python_version()}{drawn}."
