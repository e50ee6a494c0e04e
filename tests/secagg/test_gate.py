"""The gate: answers open if enough sites were told the same survivors, and only then.

That a gate is hidden otherwise is checked exactly: everything that is seen is linear in the secret
coefficients, so that the gate is known if and only if it lies in the row space of what is seen.
"""

from itertools import combinations, product

import numpy as np
import pytest

from coterie.secagg import gate
from coterie.secagg.masks import Scope
from coterie.secagg.opening import UnopenedError, open_sum
from coterie.secagg.shamir import PRIME, combine, split

FIELD = 10007
"""A small prime: ranks of such matrices are those over the large field, but for bad luck, which
could only fail the test: choices are fixed."""


def reduced(rows, row):
    """Take from a row all that rows in echelon form have in common with it."""
    row = [value % FIELD for value in row]
    for pivot, other in rows:
        if row[pivot]:
            factor = row[pivot]
            row = [(a - factor * b) % FIELD for a, b in zip(row, other, strict=True)]
    return row


def spanned(rows, target):
    """Return whether a target is a combination of rows."""
    echelon = []
    for row in rows:
        left = reduced(echelon, row)
        pivot = next((at for at, value in enumerate(left) if value), None)
        if pivot is not None:
            inverse = pow(left[pivot], -1, FIELD)
            echelon.append((pivot, [value * inverse % FIELD for value in left]))
    return not any(reduced(echelon, target))


def share_row(sites, threshold, place, listed):
    """Write a share of a list's gate in terms of coefficients of the base and of each E_v."""
    powers = [pow(place, k, FIELD) for k in range(threshold)]
    row = list(powers)
    for site in range(sites):
        row += powers if site in listed else [0] * threshold
    return row


def seen_by_all_others(sites, threshold, dishonest, told):
    """All rows that a coordinator sees, with all polynomials at the dishonest sites' places."""
    rows = [
        share_row(sites, threshold, place + 1, listed)
        for place, listed in told.items()
        if place not in dishonest
    ]
    for place in dishonest:
        powers = [pow(place + 1, k, FIELD) for k in range(threshold)]
        for at in range(sites + 1):
            row = [0] * (threshold * (sites + 1))
            row[at * threshold : (at + 1) * threshold] = powers
            rows.append(row)
    return rows


def lists(sites, threshold):
    return [
        frozenset(chosen)
        for size in range(threshold, sites + 1)
        for chosen in combinations(range(sites), size)
    ]


def cases():
    """Everything for three sites and for four with one colluder; a fixed choice of the rest."""
    rng = np.random.default_rng(8)
    for sites, threshold, colluders in ((3, 2, 0), (3, 3, 1), (4, 3, 1)):
        assert 2 * threshold > sites + colluders
        honest = range(colluders, sites)
        for told in product(lists(sites, threshold), repeat=len(honest)):
            yield sites, threshold, colluders, dict(zip(honest, told, strict=True))
    for sites, threshold, colluders in ((4, 3, 0), (5, 4, 2), (6, 4, 1), (7, 5, 2)):
        honest, several = range(colluders, sites), lists(sites, threshold)
        for number in range(60):
            # Few different lists: many agree, so that both outcomes are common.
            few = rng.choice(len(several), size=2 + number % 3, replace=False)
            picks = rng.choice(few, size=len(honest))
            yield (
                sites,
                threshold,
                colluders,
                {site: several[at] for site, at in zip(honest, picks, strict=True)},
            )


def test_a_gate_is_known_if_and_only_if_enough_honest_sites_agree():
    outcomes = set()
    for sites, threshold, colluders, told in cases():
        rows = seen_by_all_others(sites, threshold, range(colluders), told)
        opened = set()
        for listed in set(told.values()):
            agree = sum(other == listed for other in told.values())
            target = [1 if at % threshold == 0 else 0 for at in range(threshold)]
            for site in range(sites):
                target += [int(site in listed and at == 0) for at in range(threshold)]
            known = spanned(rows, target)
            assert known == (agree + colluders >= threshold), (sites, threshold, told, listed)
            outcomes.add(known)
            opened |= {listed} if known else set()
        assert len(opened) <= 1
    assert outcomes == {True, False}


def test_the_condition_on_colluders_is_needed():
    """Four sites, a threshold of 3 and two colluders: 2 x 3 = 4 + 2, and two lists open."""
    told = {2: frozenset({0, 1, 2}), 3: frozenset({0, 1, 3})}
    rows = seen_by_all_others(4, 3, range(2), told)
    for listed in told.values():
        target = [1, 0, 0]
        for site in range(4):
            target += [int(site in listed), 0, 0]
        assert spanned(rows, target)


def test_parts_are_shares_of_the_gate():
    names, places = ["a", "b", "c", "d"], [1, 2, 3, 4]
    constants = gate.fresh(names)
    assert len(set(constants)) == 5
    shares = [split(constant, 3, places) for constant in constants]
    for listed in (["a", "b", "c"], ["b", "c", "d"], names):
        points = {
            place: gate.part([column[at] for column in shares], names, listed)
            for at, place in enumerate(places)
        }
        chosen = {place: points[place] for place in (4, 1, 3)}
        by_hand = constants[0] + sum(
            c for name, c in zip(names, constants[1:], strict=True) if name in listed
        )
        assert combine(chosen) == gate.part(constants, names, listed) == by_hand % PRIME


def test_keys_and_lists_are_told_apart():
    scope = Scope("run", "setup")
    keys = {
        gate.key_of(value, scope, session, name)
        for value in (1, 2)
        for session in (0, 1)
        for name in "ab"
    }
    assert len(keys) == 8
    assert gate.list_digest(["b", "a"]) == gate.list_digest(("a", "b"))
    assert gate.list_digest(["a", "b"]) != gate.list_digest(["ab"])


def test_a_coordinator_that_tells_different_lists_opens_nothing(ready):
    """Four sites, threshold 3: two are told that all are left, two that site-00 fell out.

    Without a gate the seeds of the other three would be open, told by all four.
    """
    group = ready(4, 3)
    names = sorted(group.members)
    masked = {name: m.mask(0, np.ones(2, np.uint64)) for name, m in group.members.items()}
    told = {name: names if name < "site-02" else names[1:] for name in names}
    revealed = {name: group.members[name].reveal(0, told[name]) for name in names}
    for survivors in (names, names[1:]):
        digest = gate.list_digest(survivors)
        # As if all had answered about this list.
        forged = {name: {**one, "list": digest} for name, one in revealed.items()}
        some = {name: masked[name] for name in survivors}
        with pytest.raises(UnopenedError, match="that the others' shares do not open"):
            open_sum(0, some, forged, group.advertisements, 3)
