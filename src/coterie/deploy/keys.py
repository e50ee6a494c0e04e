"""Development certificates and keys of a federation.

A folder that `make_certificates` writes has

- `ca.pem`, `ca.key`: a certificate authority for this federation only;
- `server.pem`, `server.key`: the SuperLink's certificate for the given hosts (RFC 5280, 6125);
- `coordinator.key`: the coordinator's Ed25519 key (RFC 8032), which signs requests;
- `public.toml`: all public keys, as federation.toml needs them;
- `sites/NAME/signing.key`: the site's Ed25519 key, which signs its answers;
- `sites/NAME/supernode`, `supernode.pub`: the SuperNode's ECDSA P-384 key pair in OpenSSH's format,
  which identifies it to the SuperLink; and a copy of `ca.pem`, which verifies the SuperLink.

A site needs only its folder under `sites`. The keys are for development: the party that makes all
keys could act for every other. In production every site makes its own, and sends the public ones.
"""

import ipaddress
import os
import re
import tempfile
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coterie.core.config import to_toml
from coterie.core.files import sync_folder
from coterie.deploy.messages import public_hex

HOSTS = ("localhost", "127.0.0.1")
_NONCE = 12
_MOST_DAYS = 825
"""Some systems reject server certificates with a longer validity."""
_AUTHORITY = "coterie development authority"
_NO_USAGE = (
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "encipher_only",
    "decipher_only",
)
_SITE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, repr=False)
class StateCipher:
    """Encrypts a site's private files with a key that is derived from its signing key.

    AES-256-GCM (NIST SP 800-38D) with a random nonce of 96 bits for every file that is written,
    bound to the file's name; HKDF-SHA256 (RFC 5869) derives the key. A file may have 2 GiB.
    """

    key: bytes

    @classmethod
    def of(cls, signing: Ed25519PrivateKey) -> "StateCipher":
        """Return the cipher of a site's signing key."""
        derive = HKDF(hashes.SHA256(), length=32, salt=None, info=b"coterie personal state")
        return cls(derive.derive(signing.private_bytes_raw()))

    def encrypt(self, name: str, content: bytes) -> bytes:
        """Return nonce and encrypted content."""
        nonce = os.urandom(_NONCE)
        return nonce + AESGCM(self.key).encrypt(nonce, content, name.encode())

    def decrypt(self, name: str, content: bytes) -> bytes:
        """Return the plain content; raise ValueError if it was changed, or has another key."""
        try:
            return AESGCM(self.key).decrypt(content[:_NONCE], content[_NONCE:], name.encode())
        except (InvalidTag, ValueError) as error:
            raise ValueError(
                f"{name} was not encrypted with this site's signing key, or is damaged: give the "
                "key, or restore the file"
            ) from error


def check_key(key: str) -> None:
    """Raise `ValueError` for text that is not a public key."""
    if not isinstance(key, str) or not re.fullmatch(r"[0-9a-f]{64}", key):
        raise ValueError(
            f"key = {str(key)[:70]!r}: expected an Ed25519 public key as 64 hexadecimal digits; "
            "`coterie deploy certificates` makes them"
        )


def check_site(name: str) -> None:
    """Raise `ValueError` for a name that a site cannot have."""
    if not _SITE.fullmatch(name):
        raise ValueError(
            f"site {name!r}: expected ASCII letters, digits, '.', '_' and '-', at most 64, "
            "beginning with a letter or a digit"
        )


@dataclass(frozen=True)
class PublicKeys:
    """The public keys of a federation, each as 64 hexadecimal digits."""

    coordinator: str
    sites: dict[str, str]

    def __post_init__(self) -> None:
        for key in (self.coordinator, *self.sites.values()):
            check_key(key)

    def lines(self) -> str:
        """Return the lines for federation.toml, without names of clients."""
        sites = {name: {"key": key, "clients": []} for name, key in self.sites.items()}
        return to_toml({"coordinator": self.coordinator, "sites": sites})


def make_certificates(
    folder: Path, sites: Sequence[str], hosts: Sequence[str] = HOSTS, days: int = 30
) -> PublicKeys:
    """Write all certificates and keys for development, or none; keys are never overwritten.

    `hosts` are names and addresses of the SuperLink.
    """
    if not sites:
        raise ValueError("no sites: give at least one name")
    for name in sites:
        check_site(name)
    # On some file systems names that differ only in case are one folder.
    if len({name.lower() for name in sites}) < len(sites):
        raise ValueError(f"sites {', '.join(sites)}: a name is given twice")
    if not hosts:
        raise ValueError("no hosts: give at least one name or address of the SuperLink")
    if not 1 <= days <= _MOST_DAYS:
        raise ValueError(f"days = {days}: expected 1 to {_MOST_DAYS}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(
            f"{folder} exists: keys are not overwritten; choose another folder, or "
            "remove this one if nothing uses its keys"
        )
    with new_folder(folder, 0o700) as made:
        return _write_all(made, sites, hosts, days)


@contextmanager
def new_folder(folder: Path, mode: int = 0o777) -> Iterator[Path]:
    """Yield a temporary folder that is renamed at the end: a folder is complete or absent."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        made = Path(temporary, "made")
        made.mkdir(mode=mode)
        yield made
        made.rename(folder)
    sync_folder(folder.parent)


def load_private(path: Path) -> Ed25519PrivateKey:
    """Return a signing key; warn if other users can read its file. No error quotes its content."""
    content = path.read_bytes()
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path}: expected a private key in PEM without a password; `coterie deploy "
            "certificates` makes them (coordinator.key, sites/NAME/signing.key)"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(
            f"{path}: the key is {type(key).__name__.lstrip('_')}; expected Ed25519, "
            "such as coordinator.key or sites/NAME/signing.key"
        )
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        warnings.warn(
            f"{path} can be read by other users (mode {mode:04o}): chmod 600 {path}",
            stacklevel=2,
        )
    return key


def read_public(folder: Path) -> PublicKeys:
    """Return the public keys that `make_certificates` wrote."""
    path = folder / "public.toml"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        return PublicKeys(table["coordinator"], dict(table["sites"]))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: expected coordinator = KEY and a table [sites] of NAME = KEY"
        ) from error


def _write_all(folder: Path, sites: Sequence[str], hosts: Sequence[str], days: int) -> PublicKeys:
    signer, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    signs = _certify(
        _AUTHORITY,
        signer,
        signer,
        days,
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (_usage(signs_certificates=True), True),
    )
    # Clients have ca.pem, so the server sends only its own certificate.
    serves = _certify(
        "coterie SuperLink",
        server,
        signer,
        days,
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(signs_certificates=False), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName([_host(host) for host in hosts]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False),
    )
    _write(folder / "ca.pem", signs, private=False)
    _write(folder / "ca.key", _pem(signer))
    _write(folder / "server.pem", serves, private=False)
    _write(folder / "server.key", _pem(server))
    coordinator = Ed25519PrivateKey.generate()
    _write(folder / "coordinator.key", _pem(coordinator))
    (folder / "sites").mkdir(mode=0o700)
    keys = {name: _write_site(folder / "sites" / name, signs) for name in sites}
    public = PublicKeys(public_hex(coordinator), keys)
    _write(folder / "public.toml", to_toml(vars(public)).encode(), private=False)
    return public


def _write_site(folder: Path, ca: bytes) -> str:
    """Write the keys of one site; return its public signing key."""
    folder.mkdir(mode=0o700)
    signing, node = Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP384R1())
    _write(folder / "ca.pem", ca, private=False)
    _write(folder / "signing.key", _pem(signing))
    _write(folder / "supernode", _pem(node, serialization.PrivateFormat.OpenSSH))
    public = node.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    _write(folder / "supernode.pub", public + b"\n", private=False)
    return public_hex(signing)


def _certify(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    days: int,
    *extensions: tuple[x509.ExtensionType, bool],
) -> bytes:
    """Return a certificate that the authority signs; extensions are critical where said."""
    now, public = datetime.now(UTC), key.public_key()
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(_AUTHORITY))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks of sites may be late
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    others = dict.fromkeys(_NO_USAGE, False)
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        **others,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise ValueError(
            f"host {host!r}: expected a name such as link.example, in ASCII"
        ) from error


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _pem(
    key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey,
    form: serialization.PrivateFormat = serialization.PrivateFormat.PKCS8,
) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _write(path: Path, content: bytes, *, private: bool = True) -> None:
    """Write a new file; a private one is never readable by others, not even while it is written."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
