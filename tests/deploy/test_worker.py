"""A site's worker: what its owner can mend is one line with a time; sockets of the dead go."""

import os
import re
import socket
import tempfile
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from tests.deploy.deployed import deploy

from coterie.core.config import to_table, to_toml
from coterie.data.federated import DataError
from coterie.deploy import worker

pytestmark = pytest.mark.full
LINE = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ "
HOOK = """\
import numpy as np

def rows(config):
    coins = np.random.default_rng(0)
    return {name: (size * coins.normal(size=(6, 3)), coins.normal(size=6)) for name in names}
"""


@pytest.fixture
def task(tmp_path):
    """What a worker of site0 is started with; its hook is still to be written."""
    made = deploy(tmp_path)
    app = tmp_path / "app"
    app.mkdir()
    (app / "plan.toml").write_text(to_toml(to_table(made.agreement.plan)))
    (app / "federation.toml").write_text(to_toml(to_table(made.agreement.federation)))
    key = tmp_path / "signing.key"
    key.write_bytes(
        made.keys.sites["site0"].private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    key.chmod(0o600)
    names = made.agreement.federation.sites["site0"].clients
    width = made.agreement.federation.shape[0]
    hook = HOOK.replace("in names", f"in {names!r}").replace("(6, 3)", f"(6, {width})")
    config = {"site": "site0", "key": str(key), "folder": str(tmp_path / "own")}
    config["simulation"] = True

    def write(size):
        (app / "rows.py").write_text(hook.replace("size * coins", f"{size} * coins"))
        return {"app": str(app), "config": config}

    return write


def test_what_the_owner_can_mend_is_one_line_and_no_traceback(task, capsys):
    given = task(1.0)
    (Path(given["app"]) / "rows.py").write_text("def rows(config):\n    return {}\n")
    with pytest.raises(SystemExit) as ended:
        worker._open(given)
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert re.fullmatch(LINE + r"DataError: .*no rows of client .* of site site0: .*\n", said), said


def test_a_site_that_is_ready_says_so(task, capsys):
    site = worker._open(task(1.0))
    said = capsys.readouterr().err
    assert re.fullmatch(LINE + r"ready: site site0, agreement [0-9a-f]{64}\n", said), said
    assert said.strip().endswith(site.agreement.digest)


def test_hints_on_rows_are_said_where_the_rows_are(task, capsys):
    worker._open(task(60.9))
    hint, ready = capsys.readouterr().err.splitlines()
    assert re.fullmatch(LINE + r"site site0: some features have size .*scale .*", hint), hint
    assert "ready" in ready


def test_a_fault_of_ours_is_not_taken_for_the_owners(task, monkeypatch):
    def fail(*given):
        raise ZeroDivisionError

    monkeypatch.setattr("coterie.deploy.site.open_site", fail)
    with pytest.raises(ZeroDivisionError):
        worker._open(task(1.0))
    assert issubclass(DataError, ValueError)


def test_sockets_that_nobody_listens_at_are_removed():
    with tempfile.TemporaryDirectory(prefix="c") as short:
        place = Path(short)
        old = os.stat(place).st_mtime - 10 * worker._START
        lines = []
        for name, listens in (("live", True), ("dead", False), ("young", False)):
            line = socket.socket(socket.AF_UNIX)
            line.bind(str(place / f"{name}.sock"))
            if listens:
                line.listen(1)
                lines.append(line)
            else:
                line.close()
            if name != "young":
                os.utime(place / f"{name}.sock", (old, old))
        (place / "plain.sock").write_text("no socket")
        worker._remove_stale(place)
        left = {path.name for path in place.iterdir()}
        for line in lines:
            line.close()
    assert left >= {"live.sock", "young.sock"} and "dead.sock" not in left
