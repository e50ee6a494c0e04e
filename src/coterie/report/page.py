"""One self-contained HTML page for one run or several.

The page reads only the files of the run folders. It lists its own scripts by their hashes, so a
browser runs no other script and fetches nothing, whatever a run folder contains. Metrics are not
private: a page with the errors of single clients is for those who may see the data.
`clients=False` leaves out names and numbers of single clients; counts, means and percentiles over
clients remain, which are computed from their rows.
"""

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from coterie import __version__
from coterie.core.files import write_atomically
from coterie.report import charts, sections
from coterie.report.charts import can_draw
from coterie.report.read import one_by_one, read_finished

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
    """Write one page on finished runs; charts need the extra `report`.

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
    runs = read_finished(folders, names)
    made = (
        sections.results(runs, findings),
        sections.gains(runs, clients=clients),
        sections.baselines(runs, clients=clients),
        sections.distribution(runs, clients=clients),
        sections.rounds(runs, clients=clients),
        sections.deployment(runs, clients=clients),
        sections.guarantees(runs, clients=clients),
    )
    shown = [section for section in made if section is not None]
    blocks = [block for section in shown for block in sections.all_blocks(section.blocks)]
    drawn = [figure for block in blocks for figure in block.figures]
    scripts = [FILTER] if any(block.list_id for block in blocks) else []
    scripts += [charts.bundle(), charts.STARTER] if drawn else []
    page = _template().render(
        opening=sections.opening(runs),
        sections=shown,
        plans=one_by_one(runs),
        runs=len(runs),
        made_by=_made_by(),
        charts=bool(drawn),
        config=charts.script_json(charts.CONFIG),
        scripts=scripts,
        hashes=" ".join(map(charts.hash_of, scripts)) or "'none'",
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page.strip().encode(errors="replace") + b"\n")
    if figures is not None:
        for one in drawn:
            for ending in (".png", ".svg"):
                one.save(figures / f"{one.name}{ending}")
    return out


def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2")


def _made_by() -> str:
    drawn = f", altair {version('altair')}" if can_draw() else ""
    return f"Written by coterie {__version__}, Python {platform.python_version()}{drawn}."
