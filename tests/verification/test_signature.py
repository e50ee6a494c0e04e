"""Signatures of certificates: what is forged, altered or of another key fails."""

import json
import shutil
import stat
import subprocess
import sys

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import coterie as ct
from coterie.cli.main import main
from coterie.data.config import DataConfig
from coterie.methods.pmtl import PMTL
from coterie.planning.about import About
from coterie.planning.plan import Plan, Privacy
from coterie.runs.run import execute
from coterie.verification import verify
from coterie.verification.certificate import seal

PEM = serialization.Encoding.PEM
PUBLIC = serialization.PublicFormat.SubjectPublicKeyInfo


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a signed run and two key pairs."""
    folder = tmp_path_factory.mktemp("signed")
    options = {"clients": 12, "rows": [4, 8], "features": 3}
    plan = Plan(
        method=PMTL(),
        privacy=Privacy(epsilon=2.0),
        data=DataConfig(name="synthetic", options=options),
        rounds=2,
        about=About(unit="one hospital"),
    )
    execute(plan, folder=folder / "run", budget=None)
    for name in ("owner", "other"):
        assert main(["sign", "--new-key", str(folder / name)]) == 0
    shutil.copytree(folder / "run", folder / "unsigned")
    assert main(["sign", str(folder / "run"), "--key", str(folder / "owner")]) == 0
    return folder


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made / "run", tmp_path / "run")


def status(run, public):
    return main(["verify", str(run), "--key", str(public)])


def forge(run, **changes):
    """Change the certificate and hash it anew, as a skilled forger does."""
    told = json.loads((run / "guarantee.json").read_text()) | changes
    told["sha256"] = seal(told)
    (run / "guarantee.json").write_text(json.dumps(told, indent=2))
    (run / "log.jsonl").unlink(missing_ok=True)


def test_a_signed_run_verifies_with_the_key_and_with_no_other(made, run, capsys):
    assert status(run, made / "owner.pub") == 0
    assert status(run, made / "other.pub") == 1
    assert "FAILED          signature" in capsys.readouterr().out


def test_a_run_that_is_not_signed_fails_with_a_key(made, capsys):
    assert status(made / "unsigned", made / "owner.pub") == 1
    assert "not signed" in capsys.readouterr().out
    assert main(["verify", str(made / "unsigned")]) == 0
    assert "guarantee.json is not signed" in capsys.readouterr().out


def test_without_a_key_a_signature_is_named_and_not_checked(made, run, capsys):
    forge(run, versions={"coterie": "9"})  # no plan has it: only the signature finds this
    assert main(["verify", str(run)]) == 0
    said = capsys.readouterr().out
    key = json.loads((run / "guarantee.sig").read_text())["key"]
    assert "not checked (--key PUBLIC checks it)" in said and key not in said
    assert main(["verify", str(run), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    assert any("signed by key" in text for text in found["not_checked"])
    assert status(run, made / "owner.pub") == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"versions": {"coterie": "9"}},
        {"finished": "2020-01-01T00:00Z"},
        {"assumed_public": ["anything"]},
        {"about": {"unit": "one patient"}},
    ],
    ids=str,
)
def test_what_a_forger_hashes_anew_the_signature_finds(made, run, changes):
    forge(run, **changes)
    assert "signature" in [
        check.name for check in verify(run, key_of(made / "owner.pub")).checks
        if check.status == "FAILED"
    ]  # fmt: skip


def test_python_takes_a_key_as_the_command_does(made, run):
    """The file of a key, its digits and its bytes are one key; a private one is refused."""
    public = made / "owner.pub"
    for key in (public, str(public), key_of(public).hex(), key_of(public)):
        assert ct.verify(run, key=key)
    assert not ct.verify(run, key=made / "other.pub")
    with pytest.raises(ValueError, match="a private key; give the public one"):
        ct.verify(run, key=made / "owner")


def key_of(path):
    return serialization.load_pem_public_key(path.read_bytes()).public_bytes_raw()


def test_one_changed_byte_is_found(made, run):
    path = run / "guarantee.json"
    path.write_text(path.read_text().replace("\n", "\r\n", 1))  # the same JSON, other bytes
    assert status(run, made / "owner.pub") == 1


def test_a_signature_of_a_forger_under_the_owners_name_fails(made, run):
    """The forger signs with another key, and writes the owner's public key beside it."""
    forge(run, versions={"coterie": "9"})
    told = json.loads((run / "guarantee.sig").read_text())
    other = serialization.load_pem_private_key((made / "other").read_bytes(), None)
    told["signature"] = other.sign((run / "guarantee.json").read_bytes()).hex()
    (run / "guarantee.sig").write_text(json.dumps(told))
    assert status(run, made / "owner.pub") == 1


def test_a_signature_of_another_file_fails(made, run):
    told = json.loads((run / "guarantee.sig").read_text())
    (run / "guarantee.sig").write_text(json.dumps(told | {"file": "selection.json"}))
    assert status(run, made / "owner.pub") == 1


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "\0", '{"format": "coterie signature", "format_version": 1}', "[" * 9999],
)
def test_a_damaged_signature_fails_with_and_without_a_key(made, run, text):
    (run / "guarantee.sig").write_text(text)
    assert status(run, made / "owner.pub") == 1
    assert main(["verify", str(run)]) == 1


def test_only_the_owner_can_read_a_new_key_and_it_is_never_overwritten(made, capsys):
    assert stat.S_IMODE((made / "owner").stat().st_mode) == 0o600
    before = (made / "owner").read_bytes()
    assert main(["sign", "--new-key", str(made / "owner")]) == 2
    assert (made / "owner").read_bytes() == before
    assert "exists" in capsys.readouterr().err


def test_a_run_that_does_not_verify_is_not_signed(made, run, capsys):
    (run / "guarantee.sig").unlink()
    (run / "shared.npz").write_bytes(b"other")
    assert main(["sign", str(run), "--key", str(made / "owner")]) == 1
    assert "nothing was signed" in capsys.readouterr().out
    assert not (run / "guarantee.sig").exists()


def test_somebody_elses_signature_is_not_overwritten(made, run, capsys):
    assert main(["sign", str(run), "--key", str(made / "other")]) == 2
    assert "is the signature of key" in capsys.readouterr().err
    assert main(["sign", str(run), "--key", str(made / "owner")]) == 0  # one's own may be


def test_keys_of_openssl_and_openssh(tmp_path, made, run):
    """An independent check: OpenSSL verifies what `coterie sign` signs."""
    key = Ed25519PrivateKey.generate()
    shown = key.public_key()
    texts = {
        "pem": key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, plain()),
        "ssh": key.private_bytes(PEM, serialization.PrivateFormat.OpenSSH, plain()),
        "pem.pub": shown.public_bytes(PEM, PUBLIC),
        "ssh.pub": shown.public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        ),
    }
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
        (tmp_path / name).chmod(0o600)
    for kind in ("pem", "ssh"):
        (run / "guarantee.sig").unlink()
        assert main(["sign", str(run), "--key", str(tmp_path / kind)]) == 0
        for public in (tmp_path / "pem.pub", tmp_path / "ssh.pub", shown.public_bytes_raw().hex()):
            assert status(run, public) == 0
    if shutil.which("openssl"):
        told = json.loads((run / "guarantee.sig").read_text())
        (tmp_path / "sig").write_bytes(bytes.fromhex(told["signature"]))
        command = ["openssl", "pkeyutl", "-verify", "-pubin", "-rawin", "-sigfile", "sig"]
        command += ["-inkey", "pem.pub", "-in", str(run / "guarantee.json")]
        assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0


def plain():
    return serialization.NoEncryption()


def test_other_keys_are_refused(tmp_path, made, run, capsys):
    curve = ec.generate_private_key(ec.SECP256R1())
    private = curve.private_bytes(PEM, serialization.PrivateFormat.PKCS8, plain())
    (tmp_path / "ec").write_bytes(private)
    (tmp_path / "ec.pub").write_bytes(curve.public_key().public_bytes(PEM, PUBLIC))
    (tmp_path / "ec").chmod(0o600)
    assert main(["sign", str(run), "--key", str(tmp_path / "ec")]) == 2
    assert status(run, tmp_path / "ec.pub") == 2
    assert status(run, made / "owner") == 2
    assert status(run, tmp_path / "none") == 2
    said = capsys.readouterr().err
    assert said.count("expected an Ed25519") == 2
    assert "a private key; give the public one" in said
    for line in (["sign", str(run)], ["sign", "--key", "x"], ["sign"]):
        assert main(line) == 2


def test_without_cryptography_signatures_are_refused_with_a_remedy(made):
    """The rest of `verify` works: the package is an extra."""
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from coterie.cli.main import main\n"
        f"runs = [{str(made / 'run')!r}]\n"
        f"assert main(['verify', *runs]) == 0\n"
        f"assert main(['verify', *runs, '--key', {str(made / 'owner.pub')!r}]) == 2\n"
        f"assert main(['verify', *runs, '--key', '{'ab' * 32}']) == 2\n"
        f"assert main(['sign', *runs, '--key', {str(made / 'owner')!r}]) == 2\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("pip install coterie[sign]") == 3
