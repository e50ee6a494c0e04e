"""Advertisements: the public keys of a setup, each signed by the site that they belong to.

An advertisement is a small table of strings: run, setup, site, the X25519 key that shares are
sealed for, for each session an X25519 key for masks and a commitment to the seed of the site's own
mask, and the site's Ed25519 signature over all of that. Whoever hands it on cannot alter it: sites
verify it against the keys of the federation. With s sessions it takes about 86 s + 400 bytes.

A `Roster` is a whole set of advertisements, understood. Its digest is bound into all sealed shares,
so that sites can only complete a setup with others that were shown the same set.
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from coterie.secagg.masks import KEY, Scope
from coterie.wire import RefusedError

MOST_SESSIONS = 4096
_DOMAIN = b"coterie secure aggregation advertisement v1\n"
_FIELDS = ("run", "setup", "site", "sealing", "masking", "seeds")


@dataclass(frozen=True)
class Roster:
    """The sites of a setup, and their public keys.

    Attributes:
        scope: Run and setup.
        names: Of the sites, sorted. The place of a site's shares is its number here, from 1.
        sealing: Key that shares for a site are sealed for, by name.
        masking: Keys for masks, by name, one for each session.
        seeds: Commitments to the seeds of own masks, by name, one for each session.
        digest: Of everything that was advertised.
    """

    scope: Scope
    names: tuple[str, ...]
    sealing: Mapping[str, bytes]
    masking: Mapping[str, tuple[bytes, ...]]
    seeds: Mapping[str, tuple[bytes, ...]]
    digest: str

    @property
    def sessions(self) -> int:
        """How many there are."""
        return len(self.masking[self.names[0]])

    @cached_property
    def places(self) -> Mapping[str, int]:
        """Where on a polynomial the shares of each site lie."""
        return {name: number for number, name in enumerate(self.names, start=1)}


def advertise(
    scope: Scope,
    name: str,
    sealing: bytes,
    masking: list[bytes],
    seeds: list[bytes],
    key: Ed25519PrivateKey,
) -> dict[str, str]:
    """Write and sign an advertisement."""
    table = {
        "run": scope.run,
        "setup": scope.setup,
        "site": name,
        "sealing": encode(sealing),
        "masking": encode(b"".join(masking)),
        "seeds": encode(b"".join(seeds)),
    }
    return {**table, "signature": encode(key.sign(_signed(table)))}


def read_roster(
    advertisements: Mapping[str, Any], keys: Mapping[str, Ed25519PublicKey] | None = None
) -> Roster:
    """Understand a set of advertisements, by site, and verify them where keys are given.

    Raises:
        RefusedError: If one is malformed, of another setup, or not signed by its site.
    """
    if not isinstance(advertisements, Mapping) or not advertisements:
        raise RefusedError("no advertisements: expected one for each site")
    tables = {name: _table(name, body) for name, body in sorted(advertisements.items())}
    if keys is not None:
        for name, table in tables.items():
            _verify(name, table, keys)
    scopes = {Scope(table["run"], table["setup"]) for table in tables.values()}
    if len(scopes) > 1:
        raise RefusedError("advertisements of different runs or setups")
    split = {name: _split(name, table) for name, table in tables.items()}
    if len({len(masking) for _, masking, _ in split.values()}) > 1:
        raise RefusedError("advertisements for different numbers of sessions")
    public = [key for sealing, masking, _ in split.values() for key in (sealing, *masking)]
    if len(set(public)) < len(public):
        raise RefusedError("a public key that is advertised twice")
    plain = {name: {field: table[field] for field in _FIELDS} for name, table in tables.items()}
    return Roster(
        scope=scopes.pop(),
        names=tuple(tables),
        sealing={name: sealing for name, (sealing, _, _) in split.items()},
        masking={name: masking for name, (_, masking, _) in split.items()},
        seeds={name: seeds for name, (_, _, seeds) in split.items()},
        digest=hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest(),
    )


def sessions_within(content: int, sites: int) -> int:
    """Return how many sessions a setup can have whose letters are to stay within some bytes.

    The largest letter holds the shares for, or from, all other sites: see docs for its size.
    """
    others = max(sites - 1, 1)
    for_each = 44 * (sites + 3) * others  # 33 bytes a share are 44 of text
    return max(0, min(MOST_SESSIONS, (content - 200 * others) // for_each))


def encode(content: bytes) -> str:
    """Write bytes as text."""
    return base64.b64encode(content).decode()


def decode(text: Any, what: str) -> bytes:
    """Read bytes from text.

    Raises:
        RefusedError: If it is something else.
    """
    if not isinstance(text, str):
        raise RefusedError(f"{what} is {type(text).__name__}, expected base64 text")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RefusedError(f"{what} is not base64") from error


def read_table(body: Any, fields: tuple[str, ...], what: str) -> dict[str, str]:
    """Check that a body is a table of exactly these strings.

    Raises:
        RefusedError: If it is something else.
    """
    if not isinstance(body, Mapping) or set(body) != set(fields):
        raise RefusedError(f"{what} without the fields {', '.join(fields)}")
    if not all(isinstance(text, str) for text in body.values()):
        raise RefusedError(f"{what} with a field that is not text")
    return {field: body[field] for field in fields}


def _table(name: Any, body: Any) -> dict[str, str]:
    what = f"the advertisement of {str(name)[:70]}"
    table = read_table(body, (*_FIELDS, "signature"), what)
    if table["site"] != name:
        raise RefusedError(f"{what} is of {table['site'][:70]}")
    return table


def _split(
    name: str, table: Mapping[str, str]
) -> tuple[bytes, tuple[bytes, ...], tuple[bytes, ...]]:
    what = f"the advertisement of {name[:70]}"
    sealing = decode(table["sealing"], what)
    masking, seeds = (_pieces(decode(table[field], what)) for field in ("masking", "seeds"))
    if len(sealing) != KEY or not 1 <= len(masking) <= MOST_SESSIONS:
        raise RefusedError(
            f"{what} has a key of {len(sealing)} bytes and {len(masking)} sessions, expected "
            f"{KEY} and 1 to {MOST_SESSIONS}"
        )
    if len(seeds) != len(masking) or any(len(piece) != KEY for piece in (*masking, *seeds)):
        raise RefusedError(f"{what} has keys or commitments that are cut short")
    return sealing, masking, seeds


def _pieces(content: bytes) -> tuple[bytes, ...]:
    return tuple(content[at : at + KEY] for at in range(0, len(content), KEY))


def _verify(name: str, table: Mapping[str, str], keys: Mapping[str, Ed25519PublicKey]) -> None:
    if name not in keys:
        raise RefusedError(f"an advertisement of {name[:70]}, which is no site of the federation")
    signature = decode(table["signature"], f"the signature of {name[:70]}")
    try:
        keys[name].verify(signature, _signed(table))
    except InvalidSignature as error:
        raise RefusedError(f"an advertisement of {name[:70]} that it did not sign") from error


def _signed(table: Mapping[str, str]) -> bytes:
    plain = {field: table[field] for field in _FIELDS}
    return _DOMAIN + json.dumps(plain, sort_keys=True).encode()
