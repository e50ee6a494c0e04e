"""Signing a run: an Ed25519 signature of its certificate, `guarantee.sig`.

The signature is of the exact bytes of the certificate, which holds the hashes of all public files.
`coterie verify --key` checks it with code of its own; `openssl pkeyutl -verify -rawin` can too.
"""

import json
import os
import stat
import warnings
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.core.files import write_atomically
from coterie.verification.signature import (
    FORMAT,
    FORMAT_VERSION,
    name_key,
    read_signature,
    signature_of,
)


def new_key(path: Path) -> str:
    """Write a private key that only its owner can read, and `PATH.pub`; return the key's name.

    Raises:
        FileExistsError: If one of the files exists.
    """
    public = path.with_name(f"{path.name}.pub")
    for one in (path, public):
        if one.exists():
            raise FileExistsError(f"{one} exists: keys are not overwritten; name another file")
    key = Ed25519PrivateKey.generate()
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    _write(path, key.private_bytes(pem, form, serialization.NoEncryption()), 0o600)
    shown = serialization.PublicFormat.SubjectPublicKeyInfo
    _write(public, key.public_key().public_bytes(pem, shown), 0o644)
    return name_key(key.public_key().public_bytes_raw())


def read_private(path: Path) -> Ed25519PrivateKey:
    """Return a private key in PEM or of OpenSSH; warn if other users can read its file.

    Raises:
        ValueError: If it is no Ed25519 private key without a password.
    """
    content = path.read_bytes()
    ssh = b"OPENSSH PRIVATE KEY" in content
    load = serialization.load_ssh_private_key if ssh else serialization.load_pem_private_key
    try:
        key = load(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None  # no error quotes a private key
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(
            f"{path}: expected an Ed25519 private key in PEM, without a password; "
            "`coterie sign --new-key FILE` makes one, or `openssl genpkey -algorithm ed25519`"
        )
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        text = f"{path} can be read by other users (mode {mode:04o}): chmod 600 {path}"
        warnings.warn(text, stacklevel=2)
    return key


def sign_file(path: Path, key: Ed25519PrivateKey) -> Path:
    """Write the signature of a file beside it, and return its path.

    Raises:
        FileExistsError: If somebody else has signed it.
    """
    public, place = key.public_key().public_bytes_raw(), signature_of(path)
    held = read_signature(path)
    if held is not None and held.key != public:
        raise FileExistsError(
            f"{place} is the signature of key {held.key_id}; move it away to sign with another key"
        )
    found = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "file": path.name,
        "key": public.hex(),
        "signature": key.sign(path.read_bytes()).hex(),
    }
    write_atomically(place, json.dumps(found, indent=2).encode() + b"\n")
    return place


def _write(path: Path, content: bytes, mode: int) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "wb") as file:
        os.fchmod(file.fileno(), mode)  # whatever the umask
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
