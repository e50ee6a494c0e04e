"""The coordinator's side of secure aggregation: from masked inputs to their sum.

It learns the sum over the survivors, and no part of it (see docs/deploy/secure-aggregation.md).

Every recovered secret is checked against what its owner signed: a session key against its public
key, a seed against its commitment, a gate by whether the answer decrypts. Correct shares are found
by leaving sites out, one, then two and so on; sites whose shares do not fit are reported. The sum
is correct while `threshold` sites sent correct shares. If no choice fits, there is no sum, and
never a wrong one.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations, islice
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.deploy.messages import RefusedError
from coterie.deploy.secagg.member import Roster, decode, read_roster, read_table
from coterie.deploy.secagg.primitives import (
    KEY,
    TAG,
    WIDTH,
    add_pair,
    agree,
    combine_shares,
    commitment,
    decrypt,
    encode_info,
    gate_key,
    keystream,
    pair_key,
    public_key,
    self_key,
    shares_from_bytes,
    survivors_digest,
)

MAX_TRIES = 2000
"""Choices of sites that are tried for a secret: enough to leave out any 3 of 20."""

T = TypeVar("T")


class UnmaskError(RefusedError):
    """Raised when a sum cannot be unmasked; states which shares are missing or do not fit."""


@dataclass(frozen=True)
class Unmasked:
    """The sum of the survivors' inputs, in the ring, and what did not fit, by site, for the log.

    The latter is no proof: a share that does not fit may be the fault of the site that revealed it,
    or of the site that dealt it.
    """

    total: NDArray[np.uint64]
    wrong: Mapping[str, str]


@dataclass
class _Answers:
    """What sites revealed, by name, and which sites to doubt."""

    gates: dict[str, list[int]] = field(default_factory=dict)
    encrypted: dict[str, bytes] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)


def unmask_sum(
    session: int,
    masked: Mapping[str, NDArray[np.uint64]],
    revealed: Mapping[str, Any],
    advertisements: Mapping[str, Any],
    threshold: int,
    context: str = "",
) -> Unmasked:
    """Return the sum of masked inputs, without masks.

    `masked` has the inputs of exactly the survivors that were listed to the sites, `revealed`
    answers of at least `threshold` of them. For the context of the masks see `Member.mask`.
    """
    roster = read_roster(advertisements)
    size = _check(roster, session, masked, threshold)
    survivors = tuple(sorted(masked))
    answers = _read_answers(roster, session, survivors, revealed)
    _check_enough(answers.encrypted, threshold, answers)
    shares = _decrypt_answers(roster, session, survivors, answers, threshold)
    _check_enough(shares, threshold, answers)
    total = np.zeros(size, np.uint64)
    for vector in masked.values():
        np.add(total, vector, out=total)
    for name in roster.names:
        points = {holder: row[name] for holder, row in shares.items()}
        fits = _fits(roster, session, name, survived=name in masked)
        secret = _recover(roster, name, points, threshold, answers, fits)
        if secret is None:
            what = "seed" if name in masked else "session key"
            raise UnmaskError(
                f"the shares that {name} dealt do not give the {what} that it committed to: either "
                f"it dealt wrong shares, or too many sites revealed wrong ones; begin a setup "
                f"without {name}"
            )
        if name in masked:
            np.subtract(
                total, keystream(self_key(secret, roster.scope, session, name), size), out=total
            )
            continue
        for other in survivors:
            # The mask of the site that dropped out: its sign cancels the survivor's.
            shared = agree(secret, roster.masking[other][session])
            key = pair_key(shared, roster.scope, session, name, other, context)
            add_pair(total, key, name, other)
    return Unmasked(total, dict(answers.wrong))


def _check(
    roster: Roster, session: int, masked: Mapping[str, NDArray[np.uint64]], threshold: int
) -> int:
    if not 0 <= session < roster.sessions:
        raise RefusedError(f"session {session}: expected 0 to {roster.sessions - 1}")
    if not set(masked) <= set(roster.names):
        raise RefusedError(f"masked inputs of {sorted(masked)[:8]}: not all are in this setup")
    if len(masked) < max(2, threshold):
        raise UnmaskError(f"{len(masked)} masked inputs: expected at least {max(2, threshold)}")
    shapes = {(str(vector.dtype), vector.shape) for vector in masked.values()}
    (kind, shape), *others = shapes
    if others or kind != "uint64" or len(shape) != 1:
        raise RefusedError("masked inputs are not vectors of uint64 of one length")
    return int(shape[0])


def _check_enough(answered: Collection[str], threshold: int, answers: _Answers) -> None:
    if len(answered) < threshold:
        why = "; ".join(f"{name}: {reason}" for name, reason in sorted(answers.wrong.items()))
        raise UnmaskError(
            f"{len(answered)} usable answers, expected at least {threshold}"
            + (f" ({why})" if why else "")
            + ": ask the same survivors again, or ask for the round again in a new session"
        )


def _read_answers(
    roster: Roster, session: int, survivors: tuple[str, ...], revealed: Mapping[str, Any]
) -> _Answers:
    answers, sites = _Answers(), len(roster.names)
    for name, body in sorted(revealed.items()):
        try:
            if name not in survivors:
                raise RefusedError("the site is not among the survivors")
            table = read_table(body, ("session", "list", "gates", "sealed"), "an answer")
            if table["session"] != str(session) or table["list"] != survivors_digest(survivors):
                raise RefusedError("the answer is about another session, or other survivors")
            gates = shares_from_bytes(decode(table["gates"], "gates"))
            encrypted = decode(table["sealed"], "an encrypted answer")
            if len(gates) != sites or len(encrypted) != sites * WIDTH + TAG:
                raise RefusedError(f"the answer does not have shares of {sites} sites")
        except RefusedError as error:
            answers.wrong[name] = str(error)
        else:
            answers.gates[name], answers.encrypted[name] = gates, encrypted
    return answers


def _decrypt_answers(
    roster: Roster,
    session: int,
    survivors: tuple[str, ...],
    answers: _Answers,
    threshold: int,
) -> dict[str, dict[str, int]]:
    """Return the shares that each site revealed, by holder and owner, after opening the gates."""
    about, found = encode_info("answer", survivors_digest(survivors)), {}
    for name, encrypted in answers.encrypted.items():
        column = roster.points[name] - 1
        points = {holder: gates[column] for holder, gates in answers.gates.items()}

        def fits(value: int, name: str = name, box: bytes = encrypted) -> list[int] | None:
            key = gate_key(value, roster.scope, session, name)
            try:
                return shares_from_bytes(decrypt(key, box, about))
            except RefusedError:
                return None

        row = _recover(roster, name, points, threshold, answers, fits)
        if row is None:
            answers.wrong.setdefault(name, "the shares of others do not decrypt its answer")
        else:
            found[name] = dict(zip(roster.names, row, strict=True))
    return found


def _fits(
    roster: Roster, session: int, name: str, *, survived: bool
) -> Callable[[int], bytes | None]:
    """Return a check of a site's secret: the seed of a survivor, the session key of another."""

    def fits(value: int) -> bytes | None:
        if value >= 1 << (8 * KEY):
            return None
        secret = value.to_bytes(KEY, "little")
        if survived:
            valid = commitment(secret, roster.scope, session, name) == roster.seeds[name][session]
        else:
            valid = public_key(secret) == roster.masking[name][session]
        return secret if valid else None

    return fits


def _recover(
    roster: Roster,
    owner: str,
    shares: Mapping[str, int],
    threshold: int,
    answers: _Answers,
    fits: Callable[[int], T | None],
) -> T | None:
    """Return a secret from shares that fit; doubt sites whose shares do not."""
    points_of = roster.points
    for chosen in islice(_choices(shares, threshold, answers.wrong), MAX_TRIES):
        used = {points_of[name]: shares[name] for name in chosen}
        found = fits(combine_shares(used))
        if found is not None:
            for name in set(shares) - set(chosen):
                if combine_shares(used, points_of[name]) != shares[name]:
                    answers.wrong.setdefault(
                        name, f"its share of {owner}'s secret does not fit: it or {owner} is faulty"
                    )
            return found
    return None


def _choices(
    shares: Mapping[str, int], threshold: int, doubted: Collection[str]
) -> Iterator[tuple[str, ...]]:
    """Yield choices of `threshold` sites, doubted ones last, leaving out more and more."""
    names, seen = sorted(shares, key=lambda name: (name in doubted, name)), set()
    for left_out in range(len(names) - threshold + 1):
        for gone in combinations(names[: threshold + left_out], left_out):
            chosen = tuple([name for name in names if name not in gone][:threshold])
            if chosen not in seen:
                seen.add(chosen)
                yield chosen
