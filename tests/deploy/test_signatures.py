"""Who signed what: verify names coordinator and sites, and no statement can be made up."""

import json
import shutil

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.deploy.deployed import deploy

from coterie.cli.main import main
from coterie.deploy.signatures import FILE, is_statement, make_statement
from coterie.privacy.sampling import Everyone
from coterie.verification import verify
from coterie.verification.certificate import seal

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    made = deploy(tmp_path_factory.mktemp("done"), sampler=Everyone())
    made.coordinate()
    return made


def check_of(folder):
    return next(check for check in verify(folder).checks if check.name == "signed by")


def test_verify_names_who_signed(done, capsys):
    check = check_of(done.run)
    assert check.status == "ok"
    assert "the coordinator (guarantee.json); 3 of 3 sites (site0, site1, site2" in check.found
    assert main(["verify", str(done.run)]) == 0
    shown = capsys.readouterr().out
    assert "signed by" in shown and "is not signed" not in shown


def altered(done, tmp_path, change):
    folder = shutil.copytree(done.run, tmp_path / "run")
    path = folder / FILE
    found = json.loads(path.read_text())
    change(found, folder)
    path.write_text(json.dumps(found))
    return folder


def test_a_site_that_was_away_is_not_named_and_a_certificate_without_any_is_none(done, tmp_path):
    folder = altered(done, tmp_path, lambda found, _: found["sites"].pop("site1"))
    assert "2 of 3 sites (site0, site2" in check_of(folder).found
    assert verify(folder).verified
    (folder / FILE).unlink()
    assert "signed by" not in [check.name for check in verify(folder).checks]


def swap(found, _):
    found["sites"]["site0"] = found["sites"]["site1"]


def make_up(found, _):
    text = found["sites"]["site0"]["text"]
    key = Ed25519PrivateKey.generate()
    signature = key.sign(b"coterie site statement v1\n" + text.encode()).hex()
    found["sites"]["site0"]["signature"] = signature


def restate(found, _):
    one = found["sites"]["site0"]
    one["text"] = one["text"].replace('"delta": 1e-05', '"delta": 0.1')


def reseal(_, folder):
    path = folder / "guarantee.json"
    stated = {**json.loads(path.read_text()), "started": "2001-01-01T00:00"}
    path.write_text(json.dumps({**stated, "sha256": seal(stated)}))


@pytest.mark.parametrize(
    "change, text",
    [
        (swap, "site0 is not signed by it"),
        (make_up, "site0 is not signed by it"),
        (restate, "site0 is not signed by it"),
        (reseal, "guarantee.json is not what the coordinator signed"),
    ],
)
def test_what_nobody_signed_fails(done, tmp_path, change, text):
    check = check_of(altered(done, tmp_path, change))
    assert check.status == "FAILED" and text in check.found


def test_a_site_signs_its_own_plan(done, tmp_path):
    """A coordinator that shows another plan than the one that sites ran is found out."""
    other = deploy(tmp_path / "other", sampler=Everyone(), rounds=2)
    key = done.keys.sites["site0"]
    statement = make_statement(other.agreement, "0" * 16, "site0", key)
    assert not is_statement(statement, done.agreement, "0" * 16, "site0")
    mine = make_statement(done.agreement, "0" * 16, "site0", key)
    assert is_statement(mine, done.agreement, "0" * 16, "site0")
    assert not is_statement(mine, done.agreement, "1" * 16, "site0")
    assert not is_statement(mine, done.agreement, "0" * 16, "site1")
    assert not is_statement({"text": 1}, done.agreement, "0" * 16, "site0")

    def show(found, _):
        found["sites"]["site0"] = statement

    check = check_of(altered(done, tmp_path, show))
    assert check.status == "FAILED" and "site0 signed another plan.toml" in check.found
