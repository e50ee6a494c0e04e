"""A site's side of secure aggregation.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth, "Practical Secure
Aggregation for Privacy-Preserving Machine Learning", CCS 2017. In a session, site u sends

    y_u = x_u + PRG(b_u) + sum over v > u of PRG(s_uv) - sum over v < u of PRG(s_uv)    mod 2^64,

b_u a seed of its own, s_uv agreed between its and v's session keys. Both b_u and u's session key
are shared among all sites. Of each survivor the others then reveal shares of b, of each site that
fell out shares of its session key, so that all masks of the survivors' sum can be taken off.

Keys and shares of many sessions travel at once, in a *setup* of two messages; a session then takes
two: masked input, and unmask. Differences from the paper are in docs/deploy/secure-aggregation.md;
the paper's check that all sites saw the same survivors is in `gate`, without a message of its own.

A member holds secrets, in memory alone: it is not shown, copied or pickled. Memory of a session is
let go when it has been revealed; Python cannot promise that nothing of it remains.
"""

import hashlib
import secrets
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from numpy.typing import NDArray

from coterie.secagg import gate, shamir
from coterie.secagg.masks import (
    KEY,
    Scope,
    add_pair,
    agree,
    commitment,
    hkdf,
    keystream,
    pair_key,
    public_key,
    seal,
    self_key,
    told,
    unseal,
)
from coterie.secagg.roster import (
    MOST_SESSIONS,
    Roster,
    advertise,
    decode,
    encode,
    read_roster,
)
from coterie.wire import RefusedError

_SEED, _MASKING, _GATE = 0, 1, 2
"""Where in a row of shares each secret stands; the gate is all the rest."""


@dataclass
class _Session:
    """Secrets of one session, and how far it has come."""

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

    Every method raises `RefusedError` where a question, or what came with it, breaks a rule that
    the others' or the own protection rests on. The same question again gets the same answer; only
    masking ends when a session has been revealed.
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
        raise TypeError("a Member holds secrets: it is neither copied nor pickled")

    @property
    def ready(self) -> bool:
        """Whether shares of all sites came, so that sessions can be used."""
        return self._received is not None

    @property
    def lists(self) -> Mapping[Hashable, tuple[str, ...]]:
        """For which survivors each thing was revealed: nothing secret, to be kept for `begin`."""
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
        """Draw all keys of a setup.

        Args:
            run: The run.
            setup: A name that no other setup of the run has had.
            name: Of this site.
            sessions: How many attempts at rounds this setup is for.
            key: That the site signs with.
            lists: What earlier members of this site in this run revealed (see `mask`).

        Returns:
            The member, and its advertisement for all other sites.

        Raises:
            RefusedError: If there are no sessions, or too many.
        """
        if type(sessions) is not int or not 1 <= sessions <= MOST_SESSIONS:
            raise RefusedError(f"{sessions!r} sessions: expected 1 to {MOST_SESSIONS}")
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
        """Share this site's secrets among all sites that advertised.

        Args:
            advertisements: Of all sites that take part, this one included, by name.
            keys: The federation's: what each site signs with.
            threshold: How many sites open a sum; above half of those that advertised.

        Returns:
            For each other site, what only it can read.

        Raises:
            RefusedError: If an advertisement is not its site's, or the set is too small.
        """
        roster = read_roster(advertisements, keys)
        if self._roster is not None:
            if (roster.digest, threshold) != (self._roster.digest, self._threshold):
                raise RefusedError("other advertisements than those shared with: begin a new setup")
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
            content = b"".join(shamir.to_bytes(row[name]) for row in rows)
            self._dealt[name] = encode(seal(key, content, about + str(threshold).encode()))
        for session, row in zip(self._sessions, rows, strict=True):
            session.held[self._name] = row[self._name]
        return dict(self._dealt)

    def receive(self, shares: Mapping[str, str]) -> None:
        """Take the shares that all other sites dealt to this one.

        Raises:
            RefusedError: If some are missing, or were not made for this site and setup, or others
                came before.
        """
        roster = self._known()
        others = self._others(roster)
        if not isinstance(shares, Mapping) or set(shares) != set(others):
            raise RefusedError(
                f"shares that are not of the {len(others)} other sites of this setup: begin a new "
                "one without who is gone"
            )
        if self._received is not None:
            if dict(shares) != self._received:
                raise RefusedError("other shares than those received: begin a new setup")
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
        """Mask this site's input; the session is then used up.

        Args:
            session: Its number, from 0.
            vector: The input: elements of the ring.
            about: What the input is a contribution to, such as a round. Sessions that are about
                the same are only ever revealed for one list of survivors: the difference of two
                sums would be the part of a single site.
            context: What all sites must have been told alike; the masks of sites that were told
                otherwise do not cancel, and no sum opens.

        Raises:
            RefusedError: If this session has masked another input, or is closed.
        """
        roster, one = self._known(), self._session(session)
        if vector.dtype != np.uint64 or vector.ndim != 1:
            raise ValueError(f"{vector.dtype} {vector.shape}: expected one row of uint64")
        given = hashlib.sha256(np.ascontiguousarray(vector).tobytes()).hexdigest()
        given = f"{given} {context}"
        if one.answer or (one.given and (one.given, one.about) != (given, about)):
            raise RefusedError(f"session {session} is used up: every input takes one of its own")
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
        """Reveal what takes the masks off the survivors' sum, and off nothing else.

        Of each survivor it is a share of the seed of its own mask, of each other site a share of
        its session key: never both of one site. The answer opens only together with those of
        `threshold` sites about the same survivors (see `gate`).

        Args:
            session: Its number.
            survivors: Names of all sites whose masked inputs are in the sum.

        Raises:
            RefusedError: If survivors are too few, unknown, without this site, or others than
                before in this session or about the same.
        """
        roster, one = self._known(), self._session(session)
        listed = self._listed(roster, session, survivors)
        if one.answer:
            if listed != one.survivors:
                raise RefusedError(f"session {session} was revealed for other survivors")
            return dict(one.answer)
        if not one.given:
            raise RefusedError(f"session {session} has masked nothing here: there is no such sum")
        if one.about is not None and self._lists.setdefault(one.about, listed) != listed:
            raise RefusedError(
                f"{one.about!r} was revealed for other survivors: the difference of two sums "
                "would be the part of a single site"
            )
        one.answer, one.survivors = self._answer(roster, session, listed), listed
        one.forget()
        return dict(one.answer)

    def _answer(self, roster: Roster, session: int, listed: tuple[str, ...]) -> dict[str, str]:
        one = self._sessions[session]
        gates = [gate.part(one.held[name][_GATE:], roster.names, listed) for name in roster.names]
        shares = [one.held[name][_SEED if name in listed else _MASKING] for name in roster.names]
        digest = gate.list_digest(listed)
        key = gate.key_of(
            gate.part(one.gate, roster.names, listed), self._scope, session, self._name
        )
        return {
            "session": str(session),
            "list": digest,
            "gates": encode(shamir.to_bytes(gates)),
            "sealed": encode(seal(key, shamir.to_bytes(shares), told("answer", digest))),
        }

    def _listed(self, roster: Roster, session: int, survivors: Any) -> tuple[str, ...]:
        if isinstance(survivors, str) or not isinstance(survivors, Sequence):
            raise RefusedError("survivors that are not a list of names")
        if not all(isinstance(name, str) for name in survivors):
            raise RefusedError("survivors that are not a list of names")
        listed = tuple(sorted(set(survivors)))
        if len(listed) < len(survivors) or not set(listed) <= set(roster.names):
            raise RefusedError("survivors that are listed twice, or not of this setup")
        if len(listed) < self._threshold:
            raise RefusedError(
                f"{len(listed)} survivors of session {session}: expected at least the threshold, "
                f"{self._threshold}"
            )
        if self._name not in listed:
            raise RefusedError(f"survivors of session {session} without {self._name}, who is asked")
        return listed

    def _deal(self, roster: Roster, threshold: int) -> list[dict[str, list[int]]]:
        """Split the secrets of each session: a row of shares for each site."""
        places, rows = [roster.places[name] for name in roster.names], []
        for session in self._sessions:
            session.gate = gate.fresh(roster.names)
            hidden = [int.from_bytes(one, "little") for one in (session.seed, session.masking)]
            split = [shamir.split(one, threshold, places) for one in (*hidden, *session.gate)]
            columns = zip(roster.names, zip(*split, strict=True), strict=True)
            rows.append({name: list(column) for name, column in columns})
        return rows

    def _open(self, roster: Roster, dealer: str, text: Any) -> list[list[int]]:
        """Read the shares of a dealer, a row for each session."""
        what = f"shares of {dealer}"
        key, about = self._box(roster, dealer, self._name)
        sealed = decode(text, what)
        try:
            content = unseal(key, sealed, about + str(self._threshold).encode())
        except RefusedError as error:
            raise RefusedError(f"{what} that were not made for {self._name} in this setup") from (
                error
            )
        values, width = shamir.from_bytes(content), _GATE + 1 + len(roster.names)
        if len(values) != width * roster.sessions:
            raise RefusedError(f"{what} are {len(values)}, expected {width * roster.sessions}")
        return [values[at : at + width] for at in range(0, len(values), width)]

    def _box(self, roster: Roster, sender: str, receiver: str) -> tuple[bytes, bytes]:
        """Return the key and the routing of shares between this site and another."""
        other = receiver if sender == self._name else sender
        about = told("shares", self._scope.run, self._scope.setup, sender, receiver, roster.digest)
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
            raise RefusedError("nothing was shared in this setup yet")
        return self._roster

    def _session(self, session: int) -> _Session:
        if not self.ready:
            raise RefusedError("shares of the other sites did not come yet")
        if type(session) is not int or not 0 <= session < len(self._sessions):
            raise RefusedError(f"session {session!r}: expected 0 to {len(self._sessions) - 1}")
        return self._sessions[session]
