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

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from coterie import __version__
from coterie.core.files import write_atomically
from coterie.evaluation import baselines
from coterie.privacy import guarantee, selection
from coterie.report import charts, read, sections, tables
from coterie.report.charts import Figure, can_draw

_SECTIONS = (
    ("results", "results", "Results"),
    ("gains", "gains", "Does joining help a client?"),
    ("baselines", "baselines", "Baselines"),
    ("distribution", "clients", "Distribution over clients"),
    ("rounds", "rounds", "Round by round"),
    ("deployment", "deployment", "Deployment"),
    ("guarantee", "guarantee", "Guarantee"),
    ("reviewer", "reviewer", "For a privacy reviewer"),
    ("data_used", "data", "Data used"),
)
"""Macros of the template, in order, with the id and the title of their sections."""
_CALLED = (
    (read, "are_grouped named one_by_one"),
    (guarantee, "COMPARED describe_noise is_local reasons round_up"),
    (selection, "CHOSEN_ONLY FOR_OTHERS THEOREM"),
    (baselines, "PROMISE"),
    (tables, "SIMULATION percent"),
    (sections, "short"),
)
"""What the template calls besides `facts`, by module."""

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
) -> Path:
    """Write one page on the finished runs in `folders`; charts need the extra `report`.

    Args:
        folders: Of finished runs.
        out: The page.
        figures: A folder for every chart of the page as PNG and SVG, if any.
        names: Labels of the runs of a comparison; else runs are named by their method.
        clients: Whether to name, list and draw single clients.
        findings: Sentences of a comparison on which differences exceed the noise.

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
    page, drawn = _render(runs, clients, findings)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page.strip().encode(errors="replace") + b"\n")
    if figures is not None:
        for one in drawn:
            for ending in (".png", ".svg"):
                one.save(figures / f"{one.name}{ending}")
    return out


def _render(
    runs: Sequence[read.FinishedRun], clients: bool, findings: Sequence[str]
) -> tuple[str, list[Figure]]:
    """Return the page and its charts."""
    environment, drawn = _environment(), list[Figure]()
    given = {"runs": runs, "clients": clients, "findings": findings, "drawn": drawn}
    written: Any = environment.get_template("sections.html.j2").make_module(
        {**given, "can_draw": can_draw()}
    )
    made = [(key, title, getattr(written, macro)()) for macro, key, title in _SECTIONS]
    shown = [section for section in made if section[2].strip()]
    scripts = [FILTER] if any('class="filter"' in text for *_, text in shown) else []
    scripts += [charts.bundle(), charts.STARTER] if drawn else []
    page = environment.get_template("page.html.j2").render(
        title=sections.title_of(runs),
        opening=written.opening(),
        sections=shown,
        plans=read.one_by_one(runs),
        runs=len(runs),
        made_by=_made_by(),
        charts=bool(drawn),
        config=charts.script_json(charts.CONFIG),
        scripts=scripts,
        hashes=" ".join(map(charts.hash_of, scripts)) or "'none'",
    )
    return page, drawn


@lru_cache(maxsize=1)
def _environment() -> Environment:
    """Return the templates, compiled once, with what they call."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    environment.filters |= {"entry": sections.entry, "short": sections.short}
    environment.tests["known"] = lambda value: not math.isnan(value)
    for module, names in _CALLED:
        environment.globals |= {name: getattr(module, name) for name in names.split()}
    environment.globals |= {"facts": sections, "tables": tables, "infinity": math.inf}
    environment.globals |= {"exp": math.exp, "float": float, "zip": zip}
    return environment


def _made_by() -> str:
    drawn = f", altair {version('altair')}" if can_draw() else ""
    return f"Written by coterie {__version__}, Python {platform.python_version()}{drawn}."
