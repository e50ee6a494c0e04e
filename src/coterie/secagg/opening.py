"""The coordinator's side of secure aggregation: from masked inputs to their sum.

It learns the sum over the survivors, and no part of it (see docs/deploy/secure-aggregation.md).

Every secret that is put together again is checked against what its owner signed: a session key
against its public key, a seed against its commitment, a gate by whether the answer opens. Right
shares are found by leaving sites out, one, then two and so on; those that do not fit are named. The
sum is right all the same while `threshold` sites sent right ones. If no choice fits, no sum comes
out, never a wrong one.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations, islice
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.secagg import gate, shamir
from coterie.secagg.masks import (
    KEY,
    TAG,
    add_pair,
    agree,
    commitment,
    keystream,
    pair_key,
    public_key,
    self_key,
    told,
    unseal,
)
from coterie.secagg.roster import Roster, decode, read_roster, read_table
from coterie.wire import RefusedError

MOST_TRIES = 2000
"""Choices of sites that are tried for a secret: all ways to leave out 3 of 20, for one."""


T = TypeVar("T")


class UnopenedError(RefusedError):
    """Raised when a sum cannot be opened; says which shares are missing or do not fit."""


@dataclass(frozen=True)
class Opened:
    """A sum.

    Attributes:
        total: Of the survivors' inputs, in the ring.
        wrong: What did not fit, by site, for the log. No proof: a share that does not fit may be
            the fault of the site that revealed it, or of the one that dealt it.
    """

    total: NDArray[np.uint64]
    wrong: Mapping[str, str]


@dataclass
class _Answers:
    """What sites revealed, by name, and whom to doubt."""

    gates: dict[str, list[int]] = field(default_factory=dict)
    sealed: dict[str, bytes] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)


def open_sum(
    session: int,
    masked: Mapping[str, NDArray[np.uint64]],
    revealed: Mapping[str, Any],
    advertisements: Mapping[str, Any],
    threshold: int,
    context: str = "",
) -> Opened:
    """Take the masks off the sum of masked inputs.

    Args:
        session: Its number.
        masked: Masked inputs of the survivors, by name: of exactly those that sites were told.
        revealed: Answers to that, by name; of at least `threshold` of the survivors.
        advertisements: Of the setup.
        threshold: Of the setup.
        context: What all sites were told: see `Member.mask`.

    Raises:
        UnopenedError: If too few answers came, or too few that fit together.
        RefusedError: If the advertisements or the masked inputs are not those of one setup.
    """
    roster = read_roster(advertisements)
    words = _check(roster, session, masked, threshold)
    survivors = tuple(sorted(masked))
    answers = _read_answers(roster, session, survivors, revealed)
    _check_enough(answers.sealed, threshold, answers)
    shares = _open_answers(roster, session, survivors, answers, threshold)
    _check_enough(shares, threshold, answers)
    total = np.zeros(words, np.uint64)
    for vector in masked.values():
        np.add(total, vector, out=total)
    for name in roster.names:
        points = {holder: row[name] for holder, row in shares.items()}
        fits = _fits(roster, session, name, survived=name in masked)
        secret = _recover(roster, name, points, threshold, answers, fits)
        if secret is None:
            raise _unfit(name, "seed" if name in masked else "session key")
        if name in masked:
            np.subtract(
                total, keystream(self_key(secret, roster.scope, session, name), words), out=total
            )
        else:
            for other in survivors:
                # As the site that fell out would have worn it: its sign undoes the survivor's.
                key = _pair(roster, session, secret, (name, other), context)
                add_pair(total, key, name, other)
    return Opened(total, dict(answers.wrong))


def _check(
    roster: Roster, session: int, masked: Mapping[str, NDArray[np.uint64]], threshold: int
) -> int:
    if not 0 <= session < roster.sessions:
        raise RefusedError(f"session {session}: expected 0 to {roster.sessions - 1}")
    if not set(masked) <= set(roster.names):
        raise RefusedError(f"masked inputs of {sorted(masked)[:8]}, who are not all in this setup")
    if len(masked) < max(2, threshold):
        raise UnopenedError(f"{len(masked)} masked inputs: expected at least {max(2, threshold)}")
    shapes = {(str(vector.dtype), vector.shape) for vector in masked.values()}
    (kind, shape), *others = shapes
    if others or kind != "uint64" or len(shape) != 1:
        raise RefusedError("masked inputs that are not rows of uint64 of one length")
    return int(shape[0])


def _check_enough(answered: Collection[str], threshold: int, answers: _Answers) -> None:
    if len(answered) < threshold:
        why = "; ".join(f"{name}: {reason}" for name, reason in sorted(answers.wrong.items()))
        raise UnopenedError(
            f"{len(answered)} answers that can be used, expected at least {threshold}"
            + (f" ({why})" if why else "")
            + ": ask the same survivors again, or for the round again in a new session"
        )


def _read_answers(
    roster: Roster, session: int, survivors: tuple[str, ...], revealed: Mapping[str, Any]
) -> _Answers:
    answers, sites = _Answers(), len(roster.names)
    for name, body in sorted(revealed.items()):
        try:
            if name not in survivors:
                raise RefusedError("an answer of a site that is not among the survivors")
            table = read_table(body, ("session", "list", "gates", "sealed"), "an answer")
            if table["session"] != str(session) or table["list"] != gate.list_digest(survivors):
                raise RefusedError("an answer about another session, or other survivors")
            gates = shamir.from_bytes(decode(table["gates"], "gates"))
            sealed = decode(table["sealed"], "a sealed answer")
            if len(gates) != sites or len(sealed) != sites * shamir.WIDTH + TAG:
                raise RefusedError(f"an answer with shares of another number of sites than {sites}")
        except RefusedError as error:
            answers.wrong[name] = str(error)
        else:
            answers.gates[name], answers.sealed[name] = gates, sealed
    return answers


def _open_answers(
    roster: Roster,
    session: int,
    survivors: tuple[str, ...],
    answers: _Answers,
    threshold: int,
) -> dict[str, dict[str, int]]:
    """Open the gates: the shares that each site revealed, by holder and owner."""
    about, opened = told("answer", gate.list_digest(survivors)), {}
    for name, sealed in answers.sealed.items():
        column = roster.places[name] - 1
        points = {holder: gates[column] for holder, gates in answers.gates.items()}

        def fits(value: int, name: str = name, sealed: bytes = sealed) -> list[int] | None:
            key = gate.key_of(value, roster.scope, session, name)
            try:
                return shamir.from_bytes(unseal(key, sealed, about))
            except RefusedError:
                return None

        row = _recover(roster, name, points, threshold, answers, fits)
        if row is None:
            answers.wrong.setdefault(name, "an answer that the others' shares do not open")
        else:
            opened[name] = dict(zip(roster.names, row, strict=True))
    return opened


def _fits(
    roster: Roster, session: int, name: str, *, survived: bool
) -> Callable[[int], bytes | None]:
    """Return what tells a site's secret: the seed of a survivor, the session key of another."""

    def fits(value: int) -> bytes | None:
        secret = _secret(value)
        if secret is None:
            return None
        if survived:
            right = commitment(secret, roster.scope, session, name) == roster.seeds[name][session]
        else:
            right = public_key(secret) == roster.masking[name][session]
        return secret if right else None

    return fits


def _recover(
    roster: Roster,
    owner: str,
    points: Mapping[str, int],
    threshold: int,
    answers: _Answers,
    fits: Callable[[int], T | None],
) -> T | None:
    """Find shares of an owner's secret that fit, and doubt whose share is not on their curve."""
    places = roster.places
    for chosen in islice(_choices(points, threshold, answers.wrong), MOST_TRIES):
        used = {places[name]: points[name] for name in chosen}
        found = fits(shamir.combine(used))
        if found is not None:
            for name in set(points) - set(chosen):
                if shamir.combine(used, places[name]) != points[name]:
                    answers.wrong.setdefault(
                        name, f"its share of {owner}'s secret does not fit: it or {owner} is wrong"
                    )
            return found
    return None


def _choices(
    points: Mapping[str, int], threshold: int, doubted: Collection[str]
) -> Iterator[tuple[str, ...]]:
    """Choose `threshold` sites, those in doubt last, leaving out ever more of the first."""
    names, seen = sorted(points, key=lambda name: (name in doubted, name)), set()
    for left_out in range(len(names) - threshold + 1):
        for gone in combinations(names[: threshold + left_out], left_out):
            chosen = tuple([name for name in names if name not in gone][:threshold])
            if chosen not in seen:
                seen.add(chosen)
                yield chosen


def _pair(
    roster: Roster, session: int, private: bytes, names: tuple[str, str], context: str
) -> bytes:
    secret = agree(private, roster.masking[names[1]][session])
    return pair_key(secret, roster.scope, session, *names, context)


def _secret(value: int) -> bytes | None:
    return value.to_bytes(KEY, "little") if value < 1 << (8 * KEY) else None


def _unfit(name: str, what: str) -> UnopenedError:
    return UnopenedError(
        f"the shares that {name} dealt do not give the {what} that it committed to: either it "
        f"dealt wrong ones, or too many sites revealed wrong ones; begin a new setup without {name}"
    )
