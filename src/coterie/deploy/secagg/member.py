"""A site's side of secure aggregation, and the advertisements of public keys.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth, "Practical Secure
Aggregation for Privacy-Preserving Machine Learning", CCS 2017. In a session, site u sends

    y_u = x_u + PRG(b_u) + sum over v > u of PRG(s_uv) - sum over v < u of PRG(s_uv)    mod 2^64,

b_u a seed of its own, s_uv agreed between its and v's session keys. Both b_u and u's session key
are shared among all sites. The others then reveal shares of b for each survivor, and shares of the
session key for each site that dropped out, so that all masks of the survivors' sum can be removed.

Keys and shares of many sessions are exchanged at once, in a *setup* of two messages; a session then
takes two: masked input, and unmask. Differences from the paper are in
docs/deploy/secure-aggregation.md; the paper's check that all sites saw the same survivors is the
gate of `primitives`, without a message of its own.

An *advertisement* is a table of strings: run, setup, site, the X25519 key under which shares for
the site are encrypted, for each session an X25519 key for masks and a commitment to the seed of the
site's own mask, and the site's Ed25519 signature over all of that. No intermediary can alter it:
sites verify it against the keys of the federation. With s sessions it takes about 86 s + 400 bytes.
A `Roster` is a parsed set of advertisements. Its digest is bound into all encrypted shares, so that
sites can complete a setup only with others that received the same set.

A member has secrets, in memory only: it cannot be shown, copied or pickled. The memory of a session
is released when it has been revealed; Python cannot promise that nothing of it remains.
"""

import base64
import binascii
import hashlib
import json
import secrets
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from numpy.typing import NDArray

from coterie.deploy.messages import RefusedError
from coterie.deploy.secagg.primitives import (
    KEY,
    Scope,
    add_pair,
    agree,
    commitment,
    decrypt,
    encode_info,
    encrypt,
    gate_key,
    gate_value,
    hkdf,
    keystream,
    new_gate,
    pair_key,
    public_key,
    self_key,
    shares_from_bytes,
    shares_to_bytes,
    split_secret,
    survivors_digest,
)

MAX_SESSIONS = 4096
_DOMAIN = b"coterie secure aggregation advertisement v1\n"
_FIELDS = ("run", "setup", "site", "sealing", "masking", "seeds")
_SEED, _MASKING, _GATE = 0, 1, 2
"""The index of each secret in a row of shares; the gate is the rest of the row."""


@dataclass(frozen=True)
class Roster:
    """The sites of a setup, and what they advertised, by name.

    Names are sorted; the point of a site's shares is its place among them, from 1. `masking` has a
    key and `seeds` a commitment for each session; `digest` is a hash of all advertisements.
    """

    scope: Scope
    names: tuple[str, ...]
    sealing: Mapping[str, bytes]
    masking: Mapping[str, tuple[bytes, ...]]
    seeds: Mapping[str, tuple[bytes, ...]]
    digest: str

    @property
    def sessions(self) -> int:
        """The number of sessions."""
        return len(self.masking[self.names[0]])

    @cached_property
    def points(self) -> Mapping[str, int]:
        """The point of the polynomials at which each site has its shares."""
        return {name: number for number, name in enumerate(self.names, start=1)}


def advertise(
    scope: Scope,
    name: str,
    sealing: bytes,
    masking: list[bytes],
    seeds: list[bytes],
    key: Ed25519PrivateKey,
) -> dict[str, str]:
    """Return a signed advertisement."""
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
    """Return the roster of advertisements by site, verified where keys are given."""
    if not isinstance(advertisements, Mapping) or not advertisements:
        raise RefusedError("no advertisements: expected one for each site")
    names, tables, parts = [], {}, []
    for name, body in sorted(advertisements.items()):
        names.append(name)
        tables[name], keys_of = _read(name, body, keys)
        parts.append(keys_of)
    scopes = {Scope(table["run"], table["setup"]) for table in tables.values()}
    if len(scopes) > 1:
        raise RefusedError("advertisements of different runs or setups")
    if len({len(masking) for _, masking, _ in parts}) > 1:
        raise RefusedError("advertisements for different numbers of sessions")
    public = [key for sealing, masking, _ in parts for key in (sealing, *masking)]
    if len(set(public)) < len(public):
        raise RefusedError("a public key is advertised twice")
    digest = hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()
    sealing, masking, seeds = (
        dict(zip(names, column, strict=True)) for column in zip(*parts, strict=True)
    )
    return Roster(scopes.pop(), tuple(names), sealing, masking, seeds, digest)


def _read(
    name: Any, body: Any, keys: Mapping[str, Ed25519PublicKey] | None
) -> tuple[dict[str, str], tuple[bytes, tuple[bytes, ...], tuple[bytes, ...]]]:
    """Return the table of an advertisement, without its signature, and the keys in it."""
    what = f"the advertisement of {str(name)[:70]}"
    table = read_table(body, (*_FIELDS, "signature"), what)
    if table["site"] != name:
        raise RefusedError(f"{what} is from {table['site'][:70]}")
    signature = table.pop("signature")
    if keys is not None:
        if name not in keys:
            raise RefusedError(f"{what}, which is not in the federation")
        try:
            keys[name].verify(decode(signature, f"the signature of {name[:70]}"), _signed(table))
        except InvalidSignature as error:
            raise RefusedError(f"{what} is not signed by it") from error
    sealing = decode(table["sealing"], what)
    masking, seeds = (_pieces(decode(table[field], what)) for field in ("masking", "seeds"))
    if len(sealing) != KEY or not 1 <= len(masking) <= MAX_SESSIONS:
        raise RefusedError(
            f"{what} has a key of {len(sealing)} bytes and {len(masking)} sessions, expected "
            f"{KEY} and 1 to {MAX_SESSIONS}"
        )
    if len(seeds) != len(masking) or any(len(piece) != KEY for piece in (*masking, *seeds)):
        raise RefusedError(f"{what} has truncated keys or commitments")
    return table, (sealing, masking, seeds)


def _pieces(content: bytes) -> tuple[bytes, ...]:
    return tuple(content[at : at + KEY] for at in range(0, len(content), KEY))


def _signed(table: Mapping[str, str]) -> bytes:
    return _DOMAIN + json.dumps(table, sort_keys=True).encode()


def sessions_within(content: int, sites: int) -> int:
    """Return how many sessions a setup can have if its messages have a maximal size in bytes.

    The largest message has the shares for, or from, all other sites: see docs for its size.
    """
    others = max(sites - 1, 1)
    for_each = 44 * (sites + 3) * others  # 33 bytes per share are 44 of text
    return max(0, min(MAX_SESSIONS, (content - 200 * others) // for_each))


def encode(content: bytes) -> str:
    """Return bytes as text."""
    return base64.b64encode(content).decode()


def decode(text: Any, what: str) -> bytes:
    """Return the bytes in a text; refuse what is not base64."""
    if not isinstance(text, str):
        raise RefusedError(f"{what} is {type(text).__name__}, expected base64 text")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RefusedError(f"{what} is not base64") from error


def read_table(body: Any, fields: tuple[str, ...], what: str) -> dict[str, str]:
    """Return a table of exactly these strings; refuse anything else."""
    if not isinstance(body, Mapping) or set(body) != set(fields):
        raise RefusedError(f"{what} without the fields {', '.join(fields)}")
    if not all(isinstance(text, str) for text in body.values()):
        raise RefusedError(f"{what} with a field that is not text")
    return {field: body[field] for field in fields}


@dataclass
class _Session:
    """Secrets of one session, and its progress."""

    masking: bytes = field(repr=False)
    seed: bytes = field(repr=False)
    gate: list[int] = field(default_factory=list, repr=False)
    held: dict[str, list[int]] = field(default_factory=dict, repr=False)
    about: Hashable = None
    given: str = ""
    survivors: tuple[str, ...] = ()
    answer: dict[str, str] = field(default_factory=dict, repr=False)

    def forget(self) -> None:
        self.masking, self.seed, self.gate, self.held = b"", b"", [], {}


class Member:
    """A site in one setup: `begin`, `share`, `receive`, then `mask` and `reveal` a session each.

    Every method raises `RefusedError` where a request, or what came with it, breaks a rule on which
    this site's or another site's protection rests. The same request again gets the same answer;
    only masking ends when a session has been revealed.
    """

    def __init__(self, scope: Scope, name: str, sealing: bytes, sessions: list[_Session]) -> None:
        self._scope = scope
        self._name = name
        self._sealing = sealing
        self._sessions = sessions
        self._advertisement: dict[str, str] = {}
        self._roster: Roster | None = None
        self._threshold = 0
        self._dealt: dict[str, str] = {}
        self._received: dict[str, str] | None = None
        self._lists: dict[Hashable, tuple[str, ...]] = {}

    def __repr__(self) -> str:
        return f"Member({self._name!r}, setup={self._scope.setup!r})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a Member has secrets: it cannot be copied or pickled")

    @property
    def ready(self) -> bool:
        """Whether shares of all sites arrived, so that sessions can be used."""
        return self._received is not None

    @property
    def lists(self) -> Mapping[Hashable, tuple[str, ...]]:
        """The survivors that each input was revealed for: not secret, to be stored for `begin`."""
        return dict(self._lists)

    @classmethod
    def begin(
        cls,
        run: str,
        setup: str,
        name: str,
        sessions: int,
        key: Ed25519PrivateKey,
        lists: Mapping[Hashable, Sequence[str]] | None = None,
    ) -> tuple["Member", dict[str, str]]:
        """Draw all keys of a setup; return the member, and its advertisement for all other sites.

        No other setup of the run may have had its name; `sessions` is how many attempts at rounds
        it is for; `lists` is what earlier members of this site in this run revealed (see `mask`).
        """
        if type(sessions) is not int or not 1 <= sessions <= MAX_SESSIONS:
            raise RefusedError(f"{sessions!r} sessions: expected 1 to {MAX_SESSIONS}")
        scope = Scope(run, setup)
        drawn = [
            _Session(secrets.token_bytes(KEY), secrets.token_bytes(KEY)) for _ in range(sessions)
        ]
        member = cls(scope, name, secrets.token_bytes(KEY), drawn)
        for about, listed in (lists or {}).items():
            member._lists[about] = tuple(sorted(listed))
        masking = [public_key(one.masking) for one in drawn]
        seeds = [commitment(one.seed, scope, at, name) for at, one in enumerate(drawn)]
        table = advertise(scope, name, public_key(member._sealing), masking, seeds, key)
        member._advertisement = table
        return member, dict(table)

    def share(
        self,
        advertisements: Mapping[str, Any],
        keys: Mapping[str, Ed25519PublicKey],
        threshold: int,
    ) -> dict[str, str]:
        """Return shares of this site's secrets for each other site that advertised, encrypted.

        `advertisements` are of all sites that take part, this one included; `keys` are those of the
        federation. It takes `threshold` sites to unmask a sum: above half of those that advertised.
        """
        roster = read_roster(advertisements, keys)
        if self._roster is not None:
            if (roster.digest, threshold) != (self._roster.digest, self._threshold):
                raise RefusedError("other advertisements than before: begin a new setup")
            return dict(self._dealt)
        if dict(advertisements.get(self._name, {})) != self._advertisement:
            raise RefusedError(f"the advertisement of {self._name} is not the one that it made")
        sites = len(roster.names)
        if not 2 <= threshold <= sites < 2 * threshold:
            raise RefusedError(
                f"threshold = {threshold} with {sites} sites: expected more than half of them, "
                "and at least 2"
            )
        boxes = {name: self._box(roster, self._name, name) for name in self._others(roster)}
        rows = self._deal(roster, threshold)
        self._roster, self._threshold = roster, threshold
        for name, (key, about) in boxes.items():
            content = b"".join(shares_to_bytes(row[name]) for row in rows)
            self._dealt[name] = encode(encrypt(key, content, about + str(threshold).encode()))
        for session, row in zip(self._sessions, rows, strict=True):
            session.held[self._name] = row[self._name]
        return dict(self._dealt)

    def receive(self, shares: Mapping[str, str]) -> None:
        """Store the shares that all other sites dealt to this one."""
        roster = self._known()
        others = self._others(roster)
        if not isinstance(shares, Mapping) or set(shares) != set(others):
            raise RefusedError(
                f"shares are not of the {len(others)} other sites of this setup: begin a new one "
                "without the sites that are lost"
            )
        if self._received is not None:
            if dict(shares) != self._received:
                raise RefusedError("other shares than before: begin a new setup")
            return
        rows = {name: self._open(roster, name, shares[name]) for name in others}
        for name, content in rows.items():
            for session, row in zip(self._sessions, content, strict=True):
                session.held[name] = row
        self._received = dict(shares)

    def mask(
        self,
        session: int,
        vector: NDArray[np.uint64],
        about: Hashable = None,
        context: str = "",
    ) -> NDArray[np.uint64]:
        """Return this site's input, elements of the ring, masked; the session is then used.

        `about` is what the input contributes to, such as a round. Sessions about the same are
        revealed for one list of survivors only: the difference of two sums could be the part of a
        single site. `context` is what all sites must have received alike; with different contexts
        masks do not cancel, and no sum can be unmasked.
        """
        roster, one = self._known(), self._session(session)
        if vector.dtype != np.uint64 or vector.ndim != 1:
            raise ValueError(f"{vector.dtype} {vector.shape}: expected one row of uint64")
        given = hashlib.sha256(np.ascontiguousarray(vector).tobytes()).hexdigest()
        given = f"{given} {context}"
        if one.answer or (one.given and (one.given, one.about) != (given, about)):
            raise RefusedError(f"session {session} is used: every input needs its own session")
        keys = {
            other: pair_key(
                self._agree(one.masking, roster.masking[other][session], other),
                self._scope,
                session,
                self._name,
                other,
                context,
            )
            for other in self._others(roster)
        }
        one.given, one.about = given, about
        total = vector + keystream(
            self_key(one.seed, self._scope, session, self._name), vector.size
        )
        for other, key in keys.items():
            add_pair(total, key, self._name, other)
        return total

    def reveal(self, session: int, survivors: Sequence[str]) -> dict[str, str]:
        """Return the shares that unmask the survivors' sum, and nothing else.

        For each survivor it is a share of the seed of its own mask, for each other site a share of
        its session key: never both of one site. The answer can be decrypted only together with
        those of `threshold` sites about the same survivors (see gates in `primitives`).
        """
        roster, one = self._known(), self._session(session)
        listed = self._listed(roster, session, survivors)
        if one.answer:
            if listed != one.survivors:
                raise RefusedError(f"session {session} was revealed for other survivors")
            return dict(one.answer)
        if not one.given:
            raise RefusedError(f"session {session} has masked nothing at this site")
        if one.about is not None and self._lists.setdefault(one.about, listed) != listed:
            raise RefusedError(
                f"{one.about!r} was revealed for other survivors: the difference of two sums "
                "could be the part of a single site"
            )
        one.answer, one.survivors = self._answer(roster, session, listed), listed
        one.forget()
        return dict(one.answer)

    def _answer(self, roster: Roster, session: int, listed: tuple[str, ...]) -> dict[str, str]:
        one = self._sessions[session]
        gates = [gate_value(one.held[name][_GATE:], roster.names, listed) for name in roster.names]
        shares = [one.held[name][_SEED if name in listed else _MASKING] for name in roster.names]
        digest = survivors_digest(listed)
        gate = gate_value(one.gate, roster.names, listed)
        key = gate_key(gate, self._scope, session, self._name)
        return {
            "session": str(session),
            "list": digest,
            "gates": encode(shares_to_bytes(gates)),
            "sealed": encode(encrypt(key, shares_to_bytes(shares), encode_info("answer", digest))),
        }

    def _listed(self, roster: Roster, session: int, survivors: Any) -> tuple[str, ...]:
        listable = isinstance(survivors, Sequence) and not isinstance(survivors, str)
        if not listable or not all(isinstance(name, str) for name in survivors):
            raise RefusedError("survivors are not a list of names")
        listed = tuple(sorted(set(survivors)))
        if len(listed) < len(survivors) or not set(listed) <= set(roster.names):
            raise RefusedError("survivors are listed twice, or not of this setup")
        if len(listed) < self._threshold:
            raise RefusedError(
                f"{len(listed)} survivors of session {session}: expected at least the threshold, "
                f"{self._threshold}"
            )
        if self._name not in listed:
            raise RefusedError(f"survivors of session {session} do not include {self._name}")
        return listed

    def _deal(self, roster: Roster, threshold: int) -> list[dict[str, list[int]]]:
        """Return shares of the secrets of each session: one row for each site."""
        points, rows = [roster.points[name] for name in roster.names], []
        for session in self._sessions:
            session.gate = new_gate(roster.names)
            hidden = [int.from_bytes(one, "little") for one in (session.seed, session.masking)]
            split = [split_secret(one, threshold, points) for one in (*hidden, *session.gate)]
            columns = zip(roster.names, zip(*split, strict=True), strict=True)
            rows.append({name: list(column) for name, column in columns})
        return rows

    def _open(self, roster: Roster, dealer: str, text: Any) -> list[list[int]]:
        """Return the shares of a dealer, one row for each session."""
        what = f"shares of {dealer}"
        key, about = self._box(roster, dealer, self._name)
        encrypted = decode(text, what)
        try:
            content = decrypt(key, encrypted, about + str(self._threshold).encode())
        except RefusedError as error:
            raise RefusedError(f"{what} are not for {self._name} in this setup") from error
        values, width = shares_from_bytes(content), _GATE + 1 + len(roster.names)
        if len(values) != width * roster.sessions:
            raise RefusedError(f"{what} are {len(values)}, expected {width * roster.sessions}")
        return [values[at : at + width] for at in range(0, len(values), width)]

    def _box(self, roster: Roster, sender: str, receiver: str) -> tuple[bytes, bytes]:
        """Return the key and the associated data of shares between this site and another."""
        other = receiver if sender == self._name else sender
        about = encode_info(
            "shares", self._scope.run, self._scope.setup, sender, receiver, roster.digest
        )
        return hkdf(self._agree(self._sealing, roster.sealing[other], other), about), about

    def _agree(self, private: bytes, public: bytes, other: str) -> bytes:
        try:
            return agree(private, public)
        except RefusedError as error:
            raise RefusedError(f"{other} advertised {error}") from error

    def _others(self, roster: Roster) -> list[str]:
        return [name for name in roster.names if name != self._name]

    def _known(self) -> Roster:
        if self._roster is None:
            raise RefusedError("this setup has no shares yet")
        return self._roster

    def _session(self, session: int) -> _Session:
        if not self.ready:
            raise RefusedError("shares of the other sites have not arrived yet")
        if type(session) is not int or not 0 <= session < len(self._sessions):
            raise RefusedError(f"session {session!r}: expected 0 to {len(self._sessions) - 1}")
        return self._sessions[session]
