"""The coordinator: a right sum or none, and wrong shares found."""

import base64
from itertools import product

import numpy as np
import pytest

from coterie.secagg import shamir
from coterie.secagg.opening import UnopenedError, open_sum
from coterie.wire import RefusedError

NAMES = [f"site-{number:02d}" for number in range(6)]


def rounds(group, gone=(), session=0):
    """One session; every input is the site's number."""
    masked = {
        name: member.mask(session, np.full(3, number, np.uint64))
        for number, (name, member) in enumerate(sorted(group.members.items()))
        if name not in gone
    }
    survivors = sorted(masked)
    revealed = {name: group.members[name].reveal(session, survivors) for name in survivors}
    return masked, revealed


def total_without(gone):
    return sum(number for number, name in enumerate(NAMES) if name not in gone)


def altered(answer, field, at=5):
    content = bytearray(base64.b64decode(answer[field]))
    content[at] ^= 1
    return {**answer, field: base64.b64encode(bytes(content)).decode()}


@pytest.mark.parametrize("gone", [(), ("site-05",)])
@pytest.mark.parametrize("liar", ["site-01", "site-04"])
def test_a_wrong_gate_is_found(ready, gone, liar):
    group = ready(6, 4)
    masked, revealed = rounds(group, gone)
    for at in range(6):
        revealed[liar] = altered(revealed[liar], "gates", 33 * at)
    opened = open_sum(0, masked, revealed, group.advertisements, 4)
    assert opened.total.tolist() == [total_without(gone)] * 3
    assert set(opened.wrong) == {liar}
    assert "does not fit" in opened.wrong[liar]


def test_a_wrong_gate_where_every_answer_is_needed_gives_no_sum(ready):
    group = ready(6, 4)
    masked, revealed = rounds(group, ("site-00", "site-05"))
    revealed["site-01"] = altered(revealed["site-01"], "gates", 33 * 2)
    with pytest.raises(UnopenedError, match="3 answers that can be used, expected at least 4"):
        open_sum(0, masked, revealed, group.advertisements, 4)


@pytest.mark.parametrize("liar", NAMES[:5])
def test_a_wrong_share_under_the_seal_is_found(ready, liar):
    """A site that seals wrong shares, of seeds and of session keys, rightly."""
    group = ready(6, 4)
    for row in group.members[liar]._sessions[0].held.values():
        row[0], row[1] = (row[0] + 1) % shamir.PRIME, (row[1] + 1) % shamir.PRIME
    masked, revealed = rounds(group, ("site-05",))
    opened = open_sum(0, masked, revealed, group.advertisements, 4)
    assert opened.total.tolist() == [total_without(("site-05",))] * 3
    assert set(opened.wrong) == {liar}


def test_two_liars_among_six_with_four_right(ready):
    group = ready(6, 4)
    for liar, shift in (("site-00", 1), ("site-03", 7)):
        for row in group.members[liar]._sessions[0].held.values():
            row[:] = [(value + shift) % shamir.PRIME for value in row]
    masked, revealed = rounds(group)
    opened = open_sum(0, masked, revealed, group.advertisements, 4)
    assert opened.total.tolist() == [total_without(())] * 3
    assert set(opened.wrong) == {"site-00", "site-03"}


def test_too_many_liars_give_no_sum(ready):
    group = ready(6, 4)
    # Unequal shifts: equal ones can cancel in Lagrange's formula, and then the secret is right.
    for liar, shift in zip(NAMES[:3], (1, 1000, 12345678), strict=True):
        for row in group.members[liar]._sessions[0].held.values():
            row[0] = (row[0] + shift) % shamir.PRIME
    masked, revealed = rounds(group)
    with pytest.raises(UnopenedError, match="do not give the seed that it committed to"):
        open_sum(0, masked, revealed, group.advertisements, 4)


@pytest.mark.parametrize(("secret", "what"), [(0, "seed"), (1, "session key")])
def test_a_dealer_of_wrong_shares_is_named(begin, secret, what):
    """It shares another secret than it advertised: the session is lost, and says whose fault."""
    group = begin(4, 1)
    one = group.members["site-03"]._sessions[0]
    true = one.seed, one.masking
    one.seed, one.masking = [(bytes(32), true[1]), (true[0], bytes(32))][secret]
    dealt = {n: m.share(group.advertisements, group.keys, 3) for n, m in group.members.items()}
    one.seed, one.masking = true
    for name, member in group.members.items():
        member.receive({other: dealt[other][name] for other in dealt if other != name})
    gone = ("site-03",) if secret == 1 else ()
    masked, revealed = rounds(group, gone)
    with pytest.raises(UnopenedError, match=f"shares that site-03 dealt do not give the {what}"):
        open_sum(0, masked, revealed, group.advertisements, 3)


def test_altered_answers_never_give_a_wrong_sum(ready):
    """A byte here and there, in either field, of any one of just enough answers."""
    group = ready(3, 3)
    masked, revealed = rounds(group)
    places = {"gates": (0, 32, 33, 98), "sealed": (0, 50, 98, 99, 114)}
    for name, (field, spots) in product(revealed, places.items()):
        for at in spots:
            wrong = {**revealed, name: altered(revealed[name], field, at)}
            with pytest.raises(UnopenedError, match="answers that can be used"):
                open_sum(0, masked, wrong, group.advertisements, 3)
    assert open_sum(0, masked, revealed, group.advertisements, 3).total.tolist() == [3, 3, 3]


def test_too_few_answers(ready):
    group = ready(6, 4)
    masked, revealed = rounds(group)
    some = {name: revealed[name] for name in NAMES[:3]}
    with pytest.raises(UnopenedError, match="3 answers that can be used, expected at least 4"):
        open_sum(0, masked, some, group.advertisements, 4)
    with pytest.raises(UnopenedError, match="3 masked inputs: expected at least 4"):
        open_sum(0, {n: masked[n] for n in NAMES[:3]}, some, group.advertisements, 4)


def test_answers_about_something_else_are_left_out_with_the_reason(ready):
    group = ready(6, 4, sessions=2)
    masked, revealed = rounds(group)
    _, others = rounds(group, ("site-05",), session=1)
    revealed["site-00"] = others["site-00"]
    revealed["site-01"] = "garbage"
    opened = open_sum(0, masked, revealed, group.advertisements, 4)
    assert opened.total.tolist() == [15] * 3
    assert opened.wrong == {
        "site-00": "an answer about another session, or other survivors",
        "site-01": "an answer without the fields session, list, gates, sealed",
    }


def test_answers_of_who_is_not_asked_are_left_out(ready):
    group = ready(6, 4)
    masked, revealed = rounds(group, ("site-05",))
    opened = open_sum(
        0, masked, {**revealed, "site-05": revealed["site-00"]}, group.advertisements, 4
    )
    assert opened.total.tolist() == [10] * 3
    assert list(opened.wrong) == ["site-05"]


def test_inputs_of_another_setup_or_form_are_refused(ready):
    group = ready(3, 2)
    masked, revealed = rounds(group)
    for name, vector in (
        ("stranger", masked["site-00"]),
        ("site-00", masked["site-00"][:2]),
        ("site-00", masked["site-00"].astype(np.int64)),
    ):
        with pytest.raises(RefusedError):
            open_sum(0, {**masked, name: vector}, revealed, group.advertisements, 2)
    for session in (-1, 1):
        with pytest.raises(RefusedError, match="expected 0 to 0"):
            open_sum(session, masked, revealed, group.advertisements, 2)


def test_inputs_are_left_as_they_were(ready):
    group = ready(3, 2)
    masked, revealed = rounds(group)
    before = {name: vector.copy() for name, vector in masked.items()}
    open_sum(0, masked, revealed, group.advertisements, 2)
    assert all(np.array_equal(masked[name], before[name]) for name in masked)
