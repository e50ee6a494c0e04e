"""Certificates and keys: verified by the standard library's TLS and by Flower's own loaders."""

import os
import ssl
import stat
import subprocess
import sys
import threading
import tomllib
import warnings
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.verification import PolicyBuilder, Store

from coterie.cli.main import main
from coterie.deploy.federation import Federation, SiteEntry
from coterie.deploy.keys import PublicKeys, load_private, make_certificates, read_public
from coterie.deploy.messages import public_hex


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("certificates") / "keys"
    make_certificates(folder, ["north", "south.east"], ["localhost", "127.0.0.1", "::1"])
    return folder


def _handshake(keys: Path, ca: Path, host: str) -> str:
    """Shake hands over a pair of pipes in memory; give the protocol's version."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(keys / "server.pem", keys / "server.key")
    client = ssl.create_default_context(cafile=str(ca))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(back, there, server_hostname=host)
    two = server.wrap_bio(there, back, server_side=True)
    done = set()
    for _ in range(10):
        for side in (one, two):
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                pass
    assert len(done) == 2
    return str(one.version())


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_tls_accepts_the_hosts_that_were_named(keys, host):
    assert _handshake(keys, keys / "ca.pem", host) == "TLSv1.3"


def test_tls_refuses_other_hosts_and_other_authorities(keys, tmp_path):
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        _handshake(keys, keys / "ca.pem", "example.org")
    make_certificates(tmp_path / "other", ["north"])
    with pytest.raises(ssl.SSLCertVerificationError):
        _handshake(keys, tmp_path / "other" / "ca.pem", "localhost")


def test_the_chain_passes_the_rules_of_the_web(keys):
    ca, server = (
        x509.load_pem_x509_certificate((keys / name).read_bytes())
        for name in ("ca.pem", "server.pem")
    )
    verifier = PolicyBuilder().store(Store([ca])).build_server_verifier(x509.DNSName("localhost"))
    assert verifier.verify(server, []) == [server, ca]
    assert 29 <= (server.not_valid_after_utc - server.not_valid_before_utc).days <= 31
    with pytest.raises(x509.verification.VerificationError):
        verifier.verify(ca, [])  # an authority is no server


def test_private_files_are_private_and_public_ones_hold_no_secret(keys):
    secrets = {"ca.key", "server.key", "coordinator.key", "signing.key", "supernode"}
    files = [path for path in keys.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {
        *secrets,
        "ca.pem",
        "server.pem",
        "public.toml",
        "supernode.pub",
    }
    for path in files:
        mode = stat.S_IMODE(path.stat().st_mode)
        if path.name in secrets:
            assert mode == 0o600, path
        else:
            assert b"PRIVATE" not in path.read_bytes(), path
    for folder in (keys, keys / "sites", keys / "sites" / "north"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_wide_umask_changes_nothing(tmp_path):
    before = os.umask(0)
    try:
        make_certificates(tmp_path / "keys", ["north"])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "keys" / "ca.key").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


def test_flower_reads_the_keys_of_a_supernode(keys):
    register = pytest.importorskip("flwr.cli.supernode.register")
    for name in ("north", "south.east"):
        folder = keys / "sites" / name
        private = serialization.load_ssh_private_key((folder / "supernode").read_bytes(), None)
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        assert private.curve.name == "secp384r1"
        public = register.try_load_public_key(folder / "supernode.pub")
        wanted = private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        assert public == wanted


def test_public_keys_verify_what_private_ones_sign(keys):
    public = read_public(keys)
    private = {
        public.coordinator: keys / "coordinator.key",
        public.sites["north"]: keys / "sites" / "north" / "signing.key",
        public.sites["south.east"]: keys / "sites" / "south.east" / "signing.key",
    }
    assert len(private) == 3
    for seen, path in private.items():
        key = load_private(path)
        assert public_hex(key) == public_hex(key.public_key()) == seen
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(seen)).verify(key.sign(b"x"), b"x")


def test_the_lines_are_those_of_a_federation(keys):
    seen = tomllib.loads(read_public(keys).lines())
    sites = {
        name: SiteEntry(clients=(f"{name} 1",), key=entry["key"])
        for name, entry in seen["sites"].items()
    }
    made = Federation(
        task="regression", shape=(3,), outputs=1, sites=sites, coordinator=seen["coordinator"]
    )
    assert list(made.sites) == ["north", "south.east"]


def test_nothing_is_overwritten_and_nothing_is_left_half_done(keys, tmp_path):
    before = (keys / "ca.key").read_bytes()
    with pytest.raises(FileExistsError, match="not overwritten"):
        make_certificates(keys, ["north"])
    assert (keys / "ca.key").read_bytes() == before
    with pytest.raises(ValueError, match="host"):
        make_certificates(tmp_path / "new", ["north"], ["häuser"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sites", "hosts", "days", "said"),
    [
        ([], ["localhost"], 30, "no sites"),
        (["../up"], ["localhost"], 30, "letters, digits"),
        (["north", "North"], ["localhost"], 30, "twice"),
        (["north"], [], 30, "no hosts"),
        (["north"], ["localhost"], 0, "days = 0"),
        (["north"], ["localhost"], 4000, "days = 4000"),
    ],
)
def test_odd_requests_are_refused(tmp_path, sites, hosts, days, said):
    with pytest.raises(ValueError, match=said):
        make_certificates(tmp_path / "keys", sites, hosts, days)
    assert not (tmp_path / "keys").exists()


def test_a_key_that_others_can_read_is_warned_of(keys, tmp_path):
    path = tmp_path / "signing.key"
    path.write_bytes((keys / "coordinator.key").read_bytes())
    path.chmod(0o640)
    with pytest.warns(UserWarning, match=r"0640.*chmod 600"):
        load_private(path)
    path.chmod(0o600)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_private(path)


def test_what_is_no_signing_key_is_refused_without_being_repeated(keys, tmp_path):
    path = tmp_path / "odd.key"
    locked = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"word"),
    )
    for content in (b"", b"secret words", locked, (keys / "ca.pem").read_bytes()):
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(ValueError, match="expected a private key") as caught:
            load_private(path)
        assert "secret words" not in str(caught.value)
    with pytest.raises(ValueError, match="expected Ed25519"):
        load_private(keys / "ca.key")
    with pytest.raises(FileNotFoundError):
        load_private(tmp_path / "absent.key")


def test_public_toml_is_checked(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_public(tmp_path)
    for text in ("= odd", "sites = 3", 'coordinator = "ab"\n[sites]\n', "coordinator = 1\n[sites]"):
        (tmp_path / "public.toml").write_text(text)
        with pytest.raises(ValueError, match=r"expected"):
            read_public(tmp_path)
    with pytest.raises(ValueError, match="hexadecimal"):
        PublicKeys("g" * 64, {})


def test_two_at_once_never_mix(tmp_path):
    results = []

    def make() -> None:
        try:
            results.append(make_certificates(tmp_path / "keys", ["north"]))
        except OSError as error:
            results.append(error)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made = [public for public in results if isinstance(public, PublicKeys)]
    assert made == [read_public(tmp_path / "keys")]


def test_the_command(tmp_path, capsys):
    folder = tmp_path / "keys"
    given = ["deploy", "certificates", str(folder), "--sites", "north", "south"]
    assert main([*given, "--host", "link.example", "10.0.0.7", "--days", "7"]) == 0
    captured = capsys.readouterr()
    assert (
        tomllib.loads(captured.out)["sites"]["south"]["key"] == read_public(folder).sites["south"]
    )
    assert "development" in captured.err
    names = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes()).extensions
    seen = names.get_extension_for_class(x509.SubjectAlternativeName).value
    assert seen.get_values_for_type(x509.DNSName) == ["link.example"]
    assert [str(found) for found in seen.get_values_for_type(x509.IPAddress)] == ["10.0.0.7"]
    assert main(given) == 2
    assert "not overwritten" in capsys.readouterr().err


def test_keys_are_read_without_torch():
    code = (
        "import sys; import coterie.deploy.keys; "
        "sys.exit('torch' in sys.modules or 'flwr' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
