"""The site is built as `make docs` builds it: no warning, nothing from the network, no dead link.

The build's own checks (links, anchors, pages that are in no menu) are errors here, and the pages as
built are read again: whatever a browser would load by itself has to lie in the folder, and every
link and anchor has to lead somewhere.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from coterie.cli.main import build_parser
from coterie.methods.base import choices

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.full
pytest.importorskip("mkdocs", reason="the site needs coterie[docs]")
# What a browser fetches without being asked.
_LOADS = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href")}
_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


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
    assert len(found) > 80
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


def test_every_method_is_in_the_menu(built):
    menu = (built[0] / "index.html").read_text(encoding="utf-8")
    for name in choices():
        assert f'href="methods/{name}.html"' in menu, f"put methods/{name}.md into mkdocs.yml"


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
    assert {"concepts/views.html", "methods/pfeb.html", "cli.html", "api/run.html"} <= places


@pytest.mark.skipif(_CHROMIUM is None, reason="no chromium on this machine")
def test_search_works_from_disk(built, tmp_path):
    # ?q= asks the search as a reader would; results are drawn by the page's own script.
    command = [_CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--virtual-time-budget=8000", f"--user-data-dir={tmp_path}"]
    command.append(f"{(built[0] / 'index.html').as_uri()}?q=billboard")
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    found = re.findall(r'class="md-search-result__link"', done.stdout)
    assert found, done.stderr[-2000:]
