"""The site is built as `make docs` builds it: no warning, nothing from the network, no dead link.

The build's own checks (links, anchors, pages that are in no menu) are errors here, and the pages as
built are read again: whatever a browser would load by itself has to lie in the folder, and every
link and anchor has to lead somewhere.
"""

import importlib
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from tests.report import browser

from coterie.cli.main import build_parser
from coterie.methods.base import choices

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.full
pytest.importorskip("mkdocs", reason="the site needs coterie[docs]")
# What a browser fetches without being asked.
_LOADS = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href")}


class Page(HTMLParser):
    """Collects what a page loads, where it leads, and the places that can be led to."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.links, self.places = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name == "id":
                self.places.add(value)
            if (tag, name) in _LOADS and value:
                self.loads.append(value)
            if (tag, name) == ("a", "href") and value:
                self.links.append(value)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout + done.stderr


@pytest.fixture(scope="module")
def pages(built):
    found = {path: Page(path.read_text(encoding="utf-8")) for path in built[0].rglob("*.html")}
    assert len(found) > 70
    return found


def test_builds_without_a_warning(built):
    assert not re.search("warning|error|deprecat", built[1], re.IGNORECASE), built[1]


def test_loads_nothing_from_elsewhere(built, pages):
    for path, page in pages.items():
        outside = [one for one in page.loads if urlsplit(one).scheme not in ("", "data")]
        assert not outside, f"{path.name}: {outside}"
        for one in page.loads:
            if not urlsplit(one).scheme:
                where = (path.parent / unquote(urlsplit(one).path)).resolve()
                assert where.exists() or path.name == "404.html", f"{path}: {one}"
    for path in built[0].rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", path.read_text())


def test_links_and_anchors_lead_somewhere(built, pages):
    for path, page in pages.items():
        if path.name == "404.html":  # served from anywhere, so its links are from the root
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.exists(), f"{path}: {link}"
            if parts.fragment and not parts.fragment.startswith("__") and target in pages:
                assert unquote(parts.fragment) in pages[target].places, f"{path}: {link}"


def test_the_menu_is_short():
    class Loader(yaml.SafeLoader):
        """Reads mkdocs.yml, whose tags name Python objects."""

    Loader.add_multi_constructor("", lambda loader, suffix, node: suffix)
    menu = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]

    def entries(items):
        for item in items:
            ((title, below),) = item.items()
            yield title
            if isinstance(below, list):
                yield from entries(below)

    found = list(entries(menu))
    assert len(found) <= 25 and len(found) == len(set(found)), found


def test_every_page_is_reached_by_links_and_leads_back(built, pages):
    start = built[0] / "index.html"
    reached, ahead = {start}, [start]
    while ahead:
        path = ahead.pop()
        for link in pages[path].links:
            parts = urlsplit(link)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not parts.scheme and target in pages and target not in reached:
                reached.add(target)
                ahead.append(target)
    missing = set(pages) - reached - {built[0] / "404.html"}
    assert not missing, sorted(str(path.relative_to(built[0])) for path in missing)
    listed = (built[0] / "methods" / "index.html").read_text(encoding="utf-8")
    for name in choices():
        assert f'href="{name}.html"' in listed
        assert 'class="back"' in (built[0] / "methods" / f"{name}.html").read_text("utf-8"), name


def test_formulas_are_typeset_and_pictures_take_the_pages_colours(built, pages):
    count = 0
    for path in pages:
        text = path.read_text(encoding="utf-8")
        assert "arithmatex" not in text, path
        count += text.count("<math")
        assert not re.search(r'<img[^>]*src="[^"]*pictures/', text), path
        for picture in re.findall(r'<span class="picture">.*?</svg>', text, re.DOTALL):
            assert "var(--ink)" in picture and not re.search(r"#[0-9a-f]{3,6}\b", picture), path
            names = re.findall(r'\bid="([^"]+)"', picture)
            assert all(text.count(f'id="{name}"') == 1 for name in names), path
    assert count > 60


def test_every_command_is_in_the_reference(built):
    text = (built[0] / "cli.html").read_text(encoding="utf-8")
    (commands,) = (a for a in build_parser()._actions if a.dest == "command")
    for name in commands.choices:
        assert f"coterie {name}" in text and f'id="coterie-{name}"' in text


def test_reference_has_words(built):
    # A name that is found but not shown would leave an empty page, without a warning.
    for page in (ROOT / "docs" / "api").glob("*.md"):
        text = (built[0] / "api" / f"{page.stem}.html").read_text(encoding="utf-8")
        for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE):
            assert f'id="{name}"' in text, f"{page.name}: {name}"


def test_search_knows_the_pages(built):
    index = json.loads((built[0] / "search" / "search_index.json").read_text(encoding="utf-8"))
    places = {one["location"].partition("#")[0] for one in index["docs"]}
    assert {"sharp-edges.html", "methods/pfeb.html", "cli.html", "api/run.html"} <= places


@pytest.fixture(scope="module")
def window():
    program = browser.find_browser()
    if program is None:
        pytest.skip("no chromium on this machine")
    with browser.Browser(program) as opened:
        yield opened


def test_search_works_from_disk(built, window):
    # ?q= asks the search as a reader would; results are drawn by the page's own script.
    page = (built[0] / "index.html").as_uri()
    window.call("Page.navigate", url=f"{page}?q=billboard")
    window.wait_for("document.querySelectorAll('.md-search-result__link').length > 0")


@pytest.mark.parametrize(("scheme", "name"), [("light", "default"), ("dark", "slate")])
def test_pages_fit_a_phone_in_both_schemes(built, window, scheme, name):
    window.prefer(scheme)
    window.resize(390, 800)
    for page in ("index", "concepts/accounting", "coming-from"):
        window.open(built[0] / f"{page}.html")
        window.evaluate("localStorage.clear()")  # the scheme of an earlier page
        window.open(built[0] / f"{page}.html")
        assert window.evaluate("document.body.dataset.mdColorScheme") == name
        assert window.evaluate("document.documentElement.scrollWidth") <= 390, page
        cut = window.evaluate(
            "[...document.querySelectorAll('.language-console code, .language-sh code')]"
            ".filter((one) => one.scrollWidth > one.clientWidth).length"
        )
        assert cut == 0, page
    window.open(built[0] / "index.html")
    ink = window.evaluate("getComputedStyle(document.querySelector('.picture text')).fill")
    assert (sum(map(int, re.findall(r"\d+", ink)[:3])) > 382) == (scheme == "dark"), ink


@pytest.mark.parametrize("page", ["docs", "docs-accounting", "docs-notebook", "docs-plan"])
def test_pictures_show_the_pages_in_both_schemes(built, window, monkeypatch, page):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    screenshot = importlib.import_module("screenshot")
    for scheme, name in (("light", "default"), ("dark", "slate")):
        screenshot.show(window, built[0] / screenshot.DOCS[page], scheme)
        assert window.evaluate("document.body.dataset.mdColorScheme") == name
        assert "coterie" in window.evaluate("document.title")


def test_frames_of_notebooks_fit_a_phone(built, window):
    window.resize(390, 800)
    for path in (built[0] / "notebooks").glob("*.html"):
        window.open(path)
        assert window.evaluate("document.documentElement.scrollWidth") <= 390, path.name
