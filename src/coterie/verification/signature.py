"""Ed25519 signatures (RFC 8032) of certificates: who stands for a run.

`NAME.sig` beside a file holds the signer's public key and the signature of the exact bytes of the
file, in JSON. A certificate contains the hashes of the public files, so its signature covers them.
Whoever checks it has the public key from elsewhere: the key inside is only a claim. Nothing but
`check_signature` and `read_public` needs the package cryptography.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = "coterie signature"
FORMAT_VERSION = 1
ENDING = ".sig"
_KEY, _SIGNATURE = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{128}")
_MISSING = (
    "signatures need the package cryptography, which is not installed; "
    "`pip install coterie[sign]` installs it"
)


@dataclass(frozen=True)
class Signature:
    """A signature, and the public key that it claims; neither is checked."""

    key: bytes
    signature: bytes

    @property
    def key_id(self) -> str:
        """The short name of the key."""
        return name_key(self.key)


def name_key(key: bytes) -> str:
    """Return the short name of a public key: the first 16 digits of its SHA-256."""
    return hashlib.sha256(key).hexdigest()[:16]


def signature_of(path: Path) -> Path:
    """Return the path of the signature of a file."""
    return path.with_suffix(ENDING)


def read_signature(path: Path) -> Signature | None:
    """Return the signature of a file; None if it has none.

    Raises:
        ValueError: If the signature's file is damaged, or of another format.
    """
    place = signature_of(path)
    try:
        found = json.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{place.name} cannot be read ({type(error).__name__})") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{place.name} is no signature: expected format = {FORMAT!r}")
    if found.get("format_version") != FORMAT_VERSION or found.get("file") != path.name:
        raise ValueError(f"{place.name} is of another format version, or of another file")
    key, signature = (str(found.get(name)) for name in ("key", "signature"))
    if not (_KEY.fullmatch(key) and _SIGNATURE.fullmatch(signature)):
        raise ValueError(f"{place.name}: expected key and signature as hexadecimal digits")
    return Signature(bytes.fromhex(key), bytes.fromhex(signature))


def read_public(text: str) -> bytes:
    """Return a public key: from 64 hexadecimal digits, or a file in PEM or of OpenSSH.

    Raises:
        ValueError: If it is no Ed25519 public key, or cryptography is not installed.
    """
    if _KEY.fullmatch(text):
        return bytes.fromhex(text)
    try:
        content = Path(text).read_bytes()
    except OSError as error:
        raise ValueError(
            f"{text}: cannot be read ({error.strerror}); give the file of a public key, or 64 "
            "hexadecimal digits"
        ) from error
    if b"PRIVATE KEY" in content:
        raise ValueError(f"{text}: a private key; give the public one, such as {text}.pub")
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError as error:
        raise ValueError(_MISSING) from error
    ssh = content.startswith(b"ssh-")
    load = serialization.load_ssh_public_key if ssh else serialization.load_pem_public_key
    try:
        key = load(content)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError(
            f"{text}: expected an Ed25519 public key in PEM or of OpenSSH, or 64 hexadecimal "
            "digits; `coterie sign --new-key FILE` makes a pair"
        )
    return key.public_bytes_raw()


def check_signature(path: Path, key: bytes) -> str:
    """Return why a file is not signed by a key; empty if it is.

    Raises:
        ValueError: If cryptography is not installed.
    """
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError as error:
        raise ValueError(_MISSING) from error
    try:
        found = read_signature(path)
    except ValueError as error:
        return str(error)
    if found is None:
        return "not signed"
    if found.key != key:
        return f"signed by key {found.key_id}"
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(found.signature, path.read_bytes())
    except (InvalidSignature, ValueError, OSError):
        return f"{path.name} is not what key {found.key_id} signed"
    return ""


# Deployments: signatures of the coordinator and of sites, under the keys of federation.toml.

PARTIES = "signatures.json"
_SITE, _COORDINATOR = b"coterie site statement v1\n", b"coterie certificate v1\n"


def signed_by(
    folder: Path, federation: Mapping[str, Any], certificate: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Return who signed a deployed run, and what is wrong with signatures.

    The coordinator signs the bytes of guarantee.json. A site signs a statement about the run: the
    hashes of plan.toml and federation.toml, epsilon and delta.

    Raises:
        ValueError: If cryptography is not installed, or the file cannot be read.
    """
    found = json.loads((folder / PARTIES).read_text(encoding="utf-8"))
    if found.get("format") != "coterie signatures" or found.get("format_version") != 1:
        raise ValueError(f"{PARTIES} is of another format")
    content = _COORDINATOR + (folder / "guarantee.json").read_bytes()
    signers, wrong = [], []
    signature = found["coordinator"]["signature"]
    if _is_signed(federation["coordinator"], signature, content):
        signers.append("the coordinator (guarantee.json)")
    else:
        wrong.append("guarantee.json is not what the coordinator signed")
    files = ("plan.toml", "federation.toml")
    expected = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files}
    expected |= {key: certificate[key] for key in ("epsilon", "delta")}
    runs, sites = set(), []
    for site, one in sorted(found["sites"].items()):
        known = federation["sites"].get(site)
        if known is None or not _is_signed(
            known["key"], one["signature"], _SITE + one["text"].encode()
        ):
            wrong.append(f"the statement of {site} is not signed by it")
            continue
        stated = json.loads(one["text"])
        runs.add(stated["run"])
        differs = [key for key, value in expected.items() if stated[key] != value]
        if stated["site"] != site or differs:
            wrong.append(f"{site} signed another {', '.join(differs) or 'site'}")
            continue
        sites.append(site)
    if len(runs) > 1:
        wrong.append("sites signed different runs")
    signers.append(
        f"{len(sites)} of {len(federation['sites'])} sites ({', '.join(sites) or 'none'}: plan, "
        "federation and epsilon)"
    )
    return signers, wrong


def _is_signed(key: str, signature: str, content: bytes) -> bool:
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError as error:
        raise ValueError(_MISSING) from error
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        public.verify(bytes.fromhex(signature), content)
    except (InvalidSignature, ValueError):
        return False
    return True
