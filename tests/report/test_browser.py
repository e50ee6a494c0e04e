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
from tests.report import browser
from tests.report import runs as made

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
    assert {"scores", "frontier", "reliability", "clients-accuracy"} <= kinds
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
        point_at(window, "gains-1-gain", ".mark-rect.layer_2_marks path", place)
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
        ("scores", ["run", "local"]),
        ("frontier-1", ["method", "epsilon", "standard error"]),
        ("guarantee-1-trade-off", ["false positives"]),
        ("guarantee-1-spent", ["rounds done", "epsilon spent"]),
        ("losses-1", ["rounds done", "loss"]),
        ("history-1-round", ["run", "rounds done"]),
        ("gains-1-local", ["client", "error personal"]),
        ("gains-1-models", ["client", "error personal"]),
        ("clients-accuracy", ["run", "% of clients"]),
        ("reliability", ["confidence", "accuracy"]),
    ],
)
def test_every_kind_of_chart_answers_to_a_hover(window: Any, chart: str, words: list[str]) -> None:
    # A frontier of two epsilons has few points, and symbols of the legend come after them.
    point_at(window, chart, ".mark-symbol path", 0 if chart.startswith("frontier") else 3)
    told = tooltip(window)
    assert all(word in told for word in words), told
    window.hover(1, 1)


def test_dark_light_and_paper(window: Any) -> None:
    ink = """(() => { const text = document.querySelector('#scores svg text');
      const mark = document.querySelector('#guarantee-1-spent .mark-line path');
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


@pytest.fixture(scope="module")
def crowded(folder: Path) -> Path:
    """A page of runs with long names: wide tables and wide legends."""
    told = {"calibration_error": 0.1, "client_calibration_error": 0.2, "reliability": made.BINS}
    leaves = [f"body.{layer}.weight_of_a_long_name" for layer in range(12)]
    part = {"leaves": leaves, "norm": 2, "bound": 0.123456, "noise": 12.3456789}
    told |= {"reviewer": {"releases": [{"rounds": 20, "parts": [part]}]}, "balanced_accuracy": 0.7}
    runs = []
    for number, scale in enumerate((1.0, 1.23, 2.34, 3.45, 0.56, 0.67)):
        events = (made.Gaussian(scale * made.NOISE),) * 20
        where = folder / f"crowded-{number}"
        run = made.make_run(where, metric="accuracy", events=events, simulation=True, **told)
        made.add_losses(run)
        runs.append(run)
    return made.write_report(runs, folder / "crowded.html")


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


def test_nothing_is_wider_than_a_page_of_1000_pixels(crowded: Path) -> None:
    with browser.opened(crowded, width=1000) as window:
        window.resize(1000, 900)
        fits = "[...document.querySelectorAll('.chart svg')].every((s) => "
        fits += "s.getBoundingClientRect().right <= innerWidth + 1)"
        window.wait_for(fits)
        window.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
        wide = window.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide == [1000, 1000]
        assert window.evaluate(OUTSIDE) == []
        assert window.evaluate(CUT) == []
        assert window.evaluate(BESIDE) == []
        window.screenshot(ARTEFACTS / "report-1000.png")


def test_the_page_opens_with_the_badge_and_folds_plan_and_glossary(crowded: Path) -> None:
    with browser.opened(crowded) as window:
        tops = window.evaluate(
            "['.badge', '.answer', '.tiles'].map((one) => document.querySelector(one)"
            ".getBoundingClientRect().top)"
        )
        assert tops == sorted(tops) and tops[0] < tops[1], "the badge comes first"
        for place in (".plan", ".glossary"):
            folds = f"[...document.querySelectorAll('{place}')].map((one) => one.open)"
            assert set(window.evaluate(folds)) == {False}


def test_the_list_narrows_to_what_is_typed(window: Any) -> None:
    rows = "[...document.querySelectorAll('#gains-1-list tbody tr')].filter((r) => !r.hidden)"
    rows += ".map((r) => r.cells[0].textContent)"
    typed = """(() => { const box = document.querySelector('[data-of="gains-1-list"]');
      box.value = %r; box.dispatchEvent(new Event('input')); })()"""
    assert len(window.evaluate(rows)) == 60
    window.evaluate(typed % "DISTRICT 4")
    found = window.evaluate(rows)
    assert len(found) == 11 and all("district 4" in name for name in found)
    told = window.evaluate("document.getElementById('gains-1-list-count').textContent")
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
