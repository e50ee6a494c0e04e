"""The live page: what it shows, to whom, and in a browser."""

import json
import shutil
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
from tests.deploy.deployed import deploy
from tests.report.browser import Browser, find_browser

from coterie.cli.deploy import rendered
from coterie.cli.main import main
from coterie.deploy.live import make_server
from coterie.deploy.status import status_of
from coterie.privacy.sampling import Everyone

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    made = deploy(tmp_path_factory.mktemp("done"), sampler=Everyone())
    made.coordinate()
    return made


@contextmanager
def served(folder):
    with make_server(folder, rendered) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join(10)


def get(url, **headers):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return answer.status, answer.read().decode(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), dict(error.headers)


def test_the_page_has_rounds_sites_and_epsilon_and_no_client(done):
    with served(done.run) as at:
        status, text, headers = get(f"{at}/")
        assert status == 200 and headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert "3 of 3 rounds released" in text and "the coordinator" in text
        assert all(site in text for site in done.agreement.federation.sites)
        assert not [name for name in done.agreement.federation.clients if name in text]
        status, text, _ = get(f"{at}/status.json")
        assert json.loads(text) == json.loads(json.dumps(status_of(done.run)))
        assert get(f"{at}/health")[:2] == (200, "ok\n")
        assert get(f"{at}/ready")[:2] == (200, "finished\n")
        assert get(f"{at}/../ledger.jsonl")[0] == 404


def test_only_this_machine_is_answered(done):
    with served(done.run) as at:
        assert get(f"{at}/", Host="evil.example")[0] == 403
        assert get(f"{at}/status.json", Host="evil.example:80")[0] == 403
        port = at.rsplit(":", 1)[1]
        assert get(f"{at}/", Host=f"localhost:{port}")[0] == 200


def test_a_run_that_failed_is_not_ready(done, tmp_path):
    folder = shutil.copytree(done.run, tmp_path / "run")
    (folder / "result.json").unlink()
    with (folder / "log.jsonl").open("a") as log:
        log.write('{"time": "2026", "event": "failed", "kind": "X", "reason": "<b>why</b>"}\n')
    with served(folder) as at:
        assert get(f"{at}/ready")[:2] == (503, "failed\n")
        assert "<b>why" not in get(f"{at}/")[1]


def test_flags_that_exclude_each_other(done, capsys):
    assert main(["deploy", "status", str(done.run), "--serve", "--json"]) == 2
    assert main(["deploy", "status", str(done.run), "--serve", "70000"]) == 2
    assert main(["deploy", "status", str(done.root), "--serve", "1"]) == 2


@pytest.mark.skipif(find_browser() is None, reason="no browser on this machine")
def test_a_browser_shows_it(done):
    with served(done.run) as at, Browser(find_browser()) as browser:
        browser.call("Page.navigate", url=f"{at}/")
        browser.wait_for("document.title != '' && document.readyState == 'complete'")
        assert "3 of 3 rounds released" in browser.evaluate("document.body.innerText")
        assert browser.evaluate("document.title").startswith("finished")
