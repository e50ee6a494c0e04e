"""The report in a real browser: nothing complains, nothing is fetched, every chart is drawn."""

import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.deploy.deployed import deploy
from tests.report import browser
from tests.report import runs as made

from coterie.cli.main import main
from coterie.evaluation.verdict import Headline, Verdict

ROOT = Path(__file__).resolve().parents[2]
ARTEFACTS = Path(os.environ.get("COTERIE_ARTEFACTS", ROOT / "build" / "artefacts"))

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        browser.find_browser() is None,
        reason="no chromium: install one, or name it by $COTERIE_CHROMIUM",
    ),
]
EVIL = "</script><script>alert(1)</script>\"'><img src=x onerror=y>&amp;${7*7}\u6c34"
SEEN = """[...document.querySelectorAll('.chart')].map((place) => ({
  id: place.id, state: place.dataset.state, svgs: place.querySelectorAll('svg').length,
  marks: place.querySelectorAll('.mark-line path, .mark-symbol path, .mark-rect path').length,
  width: place.querySelector('svg').getBoundingClientRect().width,
  room: place.getBoundingClientRect().width, label: place.getAttribute('aria-label') }))"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def page(folder: Path) -> Path:
    """A page with every kind of chart."""
    names = [EVIL, "__proto__", "constructor", "toString", *(f"district {i}" for i in range(56))]
    bins = made.BINS
    told = {"calibration_error": 0.1, "client_calibration_error": 0.2, "reliability": bins}
    runs = []
    for number, noise in enumerate((made.NOISE, 3 * made.NOISE)):
        events = (made.Gaussian(noise),) * 20
        run = made.make_run(
            folder / str(number), metric="accuracy", events=events, names=names, empty=0, **told
        )
        made.add_losses(run)
        made.add_shared(run)
        runs.append(run)
    evil = made.make_run(folder / "evil", method=EVIL, metric="accuracy", **told)
    (evil / "plan.toml").write_text(f"# {EVIL}\n[data]\nname = 'districts'\nsplit_seed = 0\n")
    runs.append(evil)
    runs.append(made.make_run(folder / "local", method="local", metric="accuracy", events=()))
    return made.write_report(runs, folder / "report.html")


@pytest.fixture(scope="module")
def window(page: Path) -> Iterator[Any]:
    with browser.opened(page) as found:
        yield found


def tooltip(window: Any) -> str:
    script = "document.getElementById('vg-tooltip-element')"
    window.wait_for(f"{script} && {script}.classList.contains('visible')", limit=10)
    told: str = window.evaluate(f"{script}.textContent")
    return told


def point_at(window: Any, chart: str, marks: str, number: int = 0) -> None:
    """Scroll a mark of a chart into view and put the mouse on it."""
    found = f"document.querySelectorAll('#{chart} {marks}')[{number}]"
    window.evaluate(f"{found}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    window.hover(1, 1)
    box = window.evaluate(f"(() => {{ const b = {found}.getBoundingClientRect();"
                          "return [b.x + b.width / 2, b.y + b.height / 2]; })()")  # fmt: skip
    window.hover(*box)


def test_every_chart_is_drawn_and_nothing_complains(window: Any, page: Path) -> None:
    seen = window.evaluate(SEEN)
    assert len(seen) == window.evaluate("document.querySelectorAll('figure').length") >= 17
    for chart in seen:
        assert chart["state"] == "drawn" and chart["svgs"] == 1, chart
        assert chart["marks"] > 0 and chart["label"], chart
        assert 0.7 * chart["room"] < chart["width"] <= chart["room"] + 1, chart
    kinds = {chart["id"].rstrip("0123456789-") for chart in seen}
    assert {"accuracy-by-run", "accuracy-against-epsilon", "reliability"} <= kinds
    assert window.complaints() == []
    assert window.requests() == [page.resolve().as_uri()]
    assert window.evaluate("document.querySelectorAll('img, iframe').length") == 0
    window.screenshot(ARTEFACTS / "report-light.png")


def test_a_hover_names_the_client_and_its_errors(window: Any) -> None:
    table = pq.read_table(Path(window.evaluate("document.URL")[7:]).parent / "0/metrics.parquet")
    columns = table.to_pydict()
    gain = np.array(columns["error_alone"]) - np.array(columns["error"])
    order = np.argsort(gain, kind="stable")
    for place in (0, 30, 59):
        point_at(window, "gain-pmtl-epsilon-1", ".mark-rect.layer_2_marks path", place)
        told, client = tooltip(window), order[place]
        assert columns["client"][client] in told
        for title, column in (("error local", "error_alone"), ("error personal", "error"),
                              ("error of the shared model", "error_shared")):  # fmt: skip
            assert f"{title}{columns[column][client]:.4g}"[:-1] in told
        assert "train rows12" in told and "test rows4" in told
    assert window.complaints() == []


@pytest.mark.parametrize(
    ("chart", "words"),
    [
        ("accuracy-by-run", ["run", "local"]),
        ("accuracy-against-epsilon", ["method", "epsilon", "standard error"]),
        ("trade-off-pmtl-epsilon-1", ["false positives"]),
        ("epsilon-by-round-pmtl-epsilon-1", ["rounds done", "epsilon spent"]),
        ("losses-pmtl-epsilon-1", ["rounds done", "loss"]),
        ("accuracy-by-round", ["run", "rounds done"]),
        ("personal-against-local-pmtl-epsilon-1", ["client", "error personal"]),
        ("errors-by-client-pmtl-epsilon-1", ["client", "error personal"]),
        ("clients-accuracy", ["run", "% of clients"]),
        ("reliability", ["confidence", "accuracy"]),
    ],
)
def test_every_kind_of_chart_answers_to_a_hover(window: Any, chart: str, words: list[str]) -> None:
    # A frontier of two epsilons has few points, and symbols of the legend come after them.
    point_at(window, chart, ".mark-symbol path", 0 if chart.endswith("against-epsilon") else 3)
    told = tooltip(window)
    assert all(word in told for word in words), told
    window.hover(1, 1)


def test_dark_light_and_paper(window: Any) -> None:
    ink = """(() => { const text = document.querySelector('#accuracy-by-run svg text');
      const mark = document.querySelector('#epsilon-by-round-pmtl-epsilon-1 .mark-line path');
      return [getComputedStyle(document.body).backgroundColor, getComputedStyle(text).fill,
        getComputedStyle(mark).stroke]; })()"""
    colours = {}
    for scheme in ("light", "dark"):
        window.prefer(scheme)
        colours[scheme] = window.evaluate(ink)
    window.screenshot(ARTEFACTS / "report-dark.png")
    assert colours["light"] == ["rgb(251, 251, 249)", "rgb(89, 99, 110)", "rgb(22, 104, 168)"]
    assert colours["dark"] == ["rgb(20, 23, 27)", "rgb(163, 173, 184)", "rgb(108, 182, 245)"]
    paper = window.pdf()
    window.prefer("light")
    assert paper[:5] == b"%PDF-" and len(paper) > 20_000
    (ARTEFACTS / "report.pdf").write_bytes(paper)


def test_a_narrow_screen_has_no_sideways_scroll(window: Any) -> None:
    try:
        window.resize(390, 844)
        fits = "[...document.querySelectorAll('.chart svg')].every((s) => "
        fits += "s.getBoundingClientRect().right <= innerWidth + 1)"
        window.wait_for(fits)
        wide = window.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide[0] <= wide[1]
        time.sleep(0.3)
        window.screenshot(ARTEFACTS / "report-narrow.png")
    finally:
        window.call("Emulation.clearDeviceMetricsOverride")


OUTSIDE = """(() => {
  const scrolls = (e) => ['auto', 'scroll', 'hidden'].includes(getComputedStyle(e).overflowX);
  const inside = (e) => { for (let p = e.parentElement; p && p !== document.body;
    p = p.parentElement) if (scrolls(p)) return true; return false; };
  return [...document.querySelectorAll('body *')].filter((e) =>
    e.getBoundingClientRect().right > innerWidth + 1 && !inside(e)).map((e) =>
    [e.tagName, e.id, e.textContent.slice(0, 60)]); })()"""
"""What is wider than the page, and not inside a box that scrolls by itself."""
CUT = """[...document.querySelectorAll('.scroll')].filter((box) =>
  box.scrollWidth > box.clientWidth + 1).map((box) => box.textContent.slice(0, 90))"""
"""Tables that need to be scrolled sideways."""
BESIDE = """[...document.querySelectorAll('figure')].filter((figure) =>
  [...figure.querySelectorAll('svg text')].some((text) => text.getBoundingClientRect().right >
    figure.getBoundingClientRect().right + 1)).map((figure) => figure.textContent.slice(0, 60))"""
"""Charts with text beyond their frame."""


FAINT = """(() => {
  const parsed = (text) => { const part = text.match(/[\\d.]+/g).map(Number);
    return part.length > 3 ? part : [...part, 1]; };
  const light = (rgb) => { const [r, g, b] = rgb.slice(0, 3).map((value) => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = (element) => { for (let e = element; e; e = e.parentElement) {
      const found = parsed(getComputedStyle(e).backgroundColor);
      if (found[3] > 0.99) return found; }
    return parsed(getComputedStyle(document.body).backgroundColor); };
  const faint = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement, text = walk.currentNode.textContent.trim();
    if (!text || element.closest('script, noscript, #vg-tooltip-element')) continue;
    if (!element.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
    const style = getComputedStyle(element), size = parseFloat(style.fontSize);
    const ink = parsed(element.closest('svg') ? style.fill : style.color);
    const one = light(ink), other = light(behind(element));
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5)) faint.push([text.slice(0, 40), ratio.toFixed(2)]);
  }
  return faint; })()"""
"""Texts without the contrast that WCAG 2 asks for (AA), with their ratio."""
OPEN = "document.querySelectorAll('details').forEach((one) => { one.open = true; })"
FITS = "[...document.querySelectorAll('.chart svg')].every((s) => "
FITS += "s.getBoundingClientRect().right <= innerWidth + 1)"
NAMED = {"calibration_error": 0.1, "client_calibration_error": 0.2, "reliability": made.BINS}
BESIDE_RUN = [
    {"name": name, "value": 0.5, "standard_error": 0.0123, "difference": -0.00012345,
     "difference_standard_error": 0.00123, "t": -0.1, "share_worse_off": 0.32,
     "share_better_off": 0.37, "share_worse_than_local_star": 0.2}
    for name in ("local", "local_star", "centralised", "mixed")
]  # fmt: skip
VERDICT = {"verdict": "join", "words": "With 60 clients, it pays.", "numbers": 4, "rounds": 14,
           "most_numbers": 81, "remedies": ["More clients: 600 to join."]}  # fmt: skip
PART = {"leaves": [f"body.{layer}.weight_of_a_long_name" for layer in range(12)], "norm": 2,
        "bound": 0.123456, "noise": 12.3456789}  # fmt: skip
USED = {"clients": 60, "rows": 9120, "training_rows": 6839,
        "columns": [f"column_with_a_long_name_{n}" for n in range(30)],
        "columns_left_out": ["patient"], "notes": ["class readmitted read as 1"]}  # fmt: skip


def crowded_run(folder: Path, **changes: Any) -> Path:
    """Write a run with everything that a page may show."""
    told: dict[str, Any] = {"references": BESIDE_RUN, "verdict": VERDICT, "data_used": USED}
    told |= {"chosen": "pfeb, because the model is linear (4 shared parameters)"}
    told |= {"reviewer": {"releases": [{"rounds": 20, "parts": [PART]}]}}
    run = made.make_run(folder, **{**told, **changes})
    made.add_losses(run)
    made.add_shared(run)
    return run


BINARY: dict[str, Any] = {"metric": "accuracy", "auc": 0.724, "auc_standard_error": 0.0163,
    "balanced_accuracy": 0.648, "balanced_accuracy_standard_error": 0.0151, **NAMED}  # fmt: skip
CLASSES: dict[str, Any] = {"metric": "accuracy", "balanced_accuracy": 0.7, **NAMED}
SCALES = (1.0, 2.34, 0.56)


def at(scale: float) -> tuple[Any, ...]:
    return (made.Gaussian(scale * made.NOISE),) * 20


def regression_page(folder: Path) -> Path:
    held = {"clients": 7, "metric": "nmse", "value": 0.713, "standard_error": 0.0123,
            "local_value": 0.622, "share_better_than_local": 0.86}  # fmt: skip
    run = crowded_run(folder / "run", newcomers=held, r2=0.2, r2_standard_error=0.0123)
    return made.write_report([run], folder / "report.html")


def binary_page(folder: Path) -> Path:
    return made.write_report([crowded_run(folder / "run", **BINARY)], folder / "report.html")


def mixed_page(folder: Path) -> Path:
    """Runs on different data have all metrics side by side, as those of `coterie demo`."""
    scored = ({"r2": -3.0, "r2_median": -0.409, "r2_standard_error": 0.0123}, BINARY, CLASSES)
    runs = [
        crowded_run(folder / data, data=data, method=method, **metrics)
        for data, method, metrics in zip(
            ("districts", "mpmtl:low_rank", "synthetic:mean"), ("pfeb", "mpmtl", "mtlsvm"), scored,
            strict=True)
    ]  # fmt: skip
    return made.write_report(runs, folder / "report.html")


def classes_page(folder: Path) -> Path:
    run = crowded_run(folder / "run", simulation=True, **CLASSES)
    return made.write_report([run], folder / "report.html")


def epsilons_page(folder: Path) -> Path:
    runs = [
        crowded_run(folder / str(scale), events=at(scale), simulation=True, **BINARY)
        for scale in SCALES
    ]
    return made.write_report(runs, folder / "report.html")


def comparison_page(folder: Path) -> Path:
    names = {}
    for label in ("local", "pfeb", "finetune(mpmtl, how=mean)"):
        for scale in (1.0, 2.0):
            events = () if label == "local" else at(scale)
            where = folder / f"{label}-{scale}"
            names[crowded_run(where, events=events, simulation=True, **BINARY)] = label
    helps, unclear = Verdict("better", 0.7, 0.3, 57), Verdict("unclear", 0.5, 0.4, 57)
    found = [Headline(e, "pfeb", 0.3, 0.6, one, ("finetune(mpmtl, how=mean)",))
             for e, one in ((0.5, unclear), (1.0, helps))]  # fmt: skip
    said = ["At epsilon 1:", "  pfeb is better than local (by 0.1 \u00b1 0.02)"]
    out = folder / "report.html"
    return made.write_report(list(names), out, names=names, findings=said, headlines=found)


def deployment_page(folder: Path) -> Path:
    there = deploy(folder / "there", trust="secure_aggregation")
    there.coordinate()
    return made.write_report([there.run], folder / "report.html")


def plan_page(folder: Path) -> Path:
    line = "plan --clients 30 --epsilon 1 --features 9 --classes 3 --plot"
    assert main([*line.split(), str(folder / "plan.html")]) == 0
    return folder / "plan.html"


PAGES = {
    "regression": regression_page,
    "binary": binary_page,
    "mixed": mixed_page,
    "classes": classes_page,
    "epsilons": epsilons_page,
    "comparison": comparison_page,
    "deployment": deployment_page,
    "plan": plan_page,
}


@pytest.fixture(scope="module", params=PAGES)
def shown(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """A browser with a page of each kind: its name, the window, and what is open at first."""
    page = PAGES[request.param](tmp_path_factory.mktemp(request.param))
    with browser.opened(page) as found:
        folds = "[...document.querySelectorAll('.plan, .glossary')].map((one) => one.open)"
        yield request.param, found, found.evaluate(folds)


@pytest.mark.parametrize("width", [1000, 1400, 390])
def test_nothing_is_wider_than_its_page(shown: tuple[str, Any, list[bool]], width: int) -> None:
    name, window, _ = shown
    window.resize(width, 900)
    window.wait_for(FITS)
    window.evaluate(OPEN)
    assert window.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [width, width]
    assert window.evaluate(OUTSIDE) == []
    assert window.evaluate(BESIDE) == []
    assert window.evaluate(CUT) == [], "a table that needs to be scrolled"
    assert window.complaints() == []
    if width == 1000:
        window.screenshot(ARTEFACTS / f"{name}.png")


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_every_text_can_be_read(shown: tuple[str, Any, list[bool]], scheme: str) -> None:
    _, window, _ = shown
    window.prefer(scheme)
    window.resize(1200, 900)
    window.evaluate(OPEN)
    assert window.evaluate(FAINT) == []
    window.prefer("light")


def test_the_first_screen_has_one_answer(shown: tuple[str, Any, list[bool]]) -> None:
    name, window, _ = shown
    window.resize(1200, 900)
    first = "document.body.firstElementChild.firstElementChild"
    marked = name in ("classes", "epsilons", "comparison", "deployment")
    assert (window.evaluate(f"{first}.className") == "badge") == marked
    tops = window.evaluate("['.badge', 'h1', '.answer', '.tiles, .headlines', '.means', 'nav']"
        ".map((one) => document.querySelector(one)).filter((one) => one)"
        ".map((one) => one.getBoundingClientRect().top)")  # fmt: skip
    assert tops == sorted(tops) and tops[-1] < 900, "answer, numbers and menu without scrolling"
    assert window.evaluate("document.querySelectorAll('.answer').length") == 1
    assert "erdict" not in window.evaluate("document.querySelector('header').textContent")


def test_plan_and_glossary_are_folded(shown: tuple[str, Any, list[bool]]) -> None:
    _, _, opened = shown
    assert opened and not any(opened)


@pytest.mark.parametrize("width", [390, 1200])
def test_the_menu_stays_in_reach(shown: tuple[str, Any, list[bool]], width: int) -> None:
    _, window, _ = shown
    window.resize(width, 844)
    window.evaluate("scrollTo({top: 1500, behavior: 'instant'})")
    top, height, inside = window.evaluate(
        "(() => { const nav = document.querySelector('nav'), box = nav.getBoundingClientRect();"
        "return [box.top, box.height, box.right <= innerWidth + 1]; })()"
    )
    assert top == 0 and height < 60 and inside
    last = "document.querySelector('nav a:last-child')"
    window.evaluate(f"{last}.click()")
    window.wait_for("document.querySelector('#glossary').getBoundingClientRect().top < innerHeight")
    below = window.evaluate("document.querySelector('#glossary').getBoundingClientRect().top")
    assert below >= height - 20, "a title under the menu"
    window.evaluate("scrollTo({top: 0, behavior: 'instant'})")


def test_rounds_are_counted_in_whole_numbers(folder: Path) -> None:
    run = made.make_run(folder / "short", events=(made.Gaussian(3.0),) * 3)
    made.add_losses(run, 3)
    labels = "[...document.querySelectorAll('[id^=%s] .role-axis-label text')]"
    labels += ".map((text) => text.textContent)"
    with browser.opened(made.write_report([run], folder / "short.html")) as window:
        for chart in ("nmse-by-round", "losses", "epsilon-by-round"):
            found = window.evaluate(labels % chart)
            assert {"0", "1", "2", "3"} <= set(found), chart
            assert not {"0.5", "1.5", "2.5"} & set(found) or chart != "nmse-by-round"


@pytest.mark.parametrize("width", [1200, 390])
def test_the_list_narrows_to_what_is_typed(window: Any, width: int) -> None:
    window.resize(width, 900)
    rows = "[...document.querySelectorAll('#clients-pmtl-epsilon-1 tbody tr')]"
    rows += ".filter((r) => getComputedStyle(r).display !== 'none')"
    rows += ".map((r) => r.cells[0].textContent)"
    typed = """(() => { const box = document.querySelector('[data-of="clients-pmtl-epsilon-1"]');
      box.value = %r; box.dispatchEvent(new Event('input')); })()"""
    assert len(window.evaluate(rows)) == 60
    window.evaluate(typed % "DISTRICT 4")
    found = window.evaluate(rows)
    assert len(found) == 11 and all("district 4" in name for name in found)
    told = window.evaluate("document.getElementById('clients-pmtl-epsilon-1-count').textContent")
    assert told == "11 of 60 shown"
    window.evaluate(typed % "__proto__")
    assert window.evaluate(rows) == ["__proto__"]
    window.evaluate(typed % "")
    assert len(window.evaluate(rows)) == 60


def test_a_page_without_charts_is_quiet_too(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = page.parent
    monkeypatch.setitem(sys.modules, "altair", None)
    plain = made.write_report([folder / "0"], folder / "plain.html")
    with browser.opened(plain) as window:
        assert window.complaints() == [] and len(window.requests()) == 1
        assert window.evaluate("document.querySelectorAll('.chart').length") == 0


def test_odd_numbers_do_not_break_a_page(folder: Path) -> None:
    run = made.make_run(folder / "odd", empty=0)
    table = pq.read_table(run / "metrics.parquet").to_pydict()
    error = np.array(table["error"])
    error[:3] = math.nan, math.inf, 1e300
    pq.write_table(pa.table({**table, "error": error}), run / "metrics.parquet")
    made.add_history(run, 4, values=pa.array([None, math.nan, math.inf, 0.5], pa.float64()))
    with browser.opened(made.write_report([run], folder / "odd.html")) as window:
        seen = window.evaluate(SEEN)
        assert seen and all(chart["state"] == "drawn" for chart in seen)
        assert window.complaints() == []
