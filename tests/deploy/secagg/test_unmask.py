"""The protocol, against its published description (Bonawitz et al. 2017) written out slowly."""

import base64
import json
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from coterie.deploy.messages import RefusedError
from coterie.deploy.secagg import primitives
from coterie.deploy.secagg.member import MAX_SESSIONS, sessions_within
from coterie.deploy.secagg.unmask import UnmaskError, unmask_sum

PROFILE = settings(
    derandomize=True,
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
WORDS = 5


def inputs(names, seed, words=WORDS):
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 2**64, words, dtype=np.uint64) for name in names}


def plain_sum(vectors):
    return [sum(column) % 2**64 for column in zip(*(v.tolist() for v in vectors), strict=True)]


def test_masked_inputs_are_those_of_the_paper(ready, slow):
    """y_u = x_u + PRG(b_u) + sum over v > u of PRG(s_uv) - sum over v < u of PRG(s_uv)."""
    group = ready(4, 3, sessions=2)
    given_ = inputs(group.members, 1)
    secret = {name: member._sessions[1] for name, member in group.members.items()}
    base = (9).to_bytes(32, "little")
    public = {name: slow.ladder(one.masking, base) for name, one in secret.items()}
    for u, member in group.members.items():
        seed = slow.derived(secret[u].seed, "self", "run", "setup-0", "1", u)
        masks = [(1, slow.words_of(seed, WORDS))]
        for v in group.members:
            if v != u:
                agreed = slow.ladder(secret[u].masking, public[v])
                key = slow.derived(agreed, "pair", "run", "setup-0", "1", *sorted((u, v)), "")
                masks.append((1 if u < v else -1, slow.words_of(key, WORDS)))
        expected = [
            (x + sum(sign * mask[at] for sign, mask in masks)) % 2**64
            for at, x in enumerate(given_[u].tolist())
        ]
        assert member.mask(1, given_[u]).tolist() == expected


@PROFILE
@given(st.integers(2, 8), st.data())
def test_sums_are_plain_sums_whoever_falls_out_where(ready, count, data):
    """At random, sites fall out before masking, on the way, and before unmasking."""
    threshold = data.draw(st.integers(max(2, count // 2 + 1), count), label="threshold")
    group = ready(count, threshold, sessions=2)
    names = sorted(group.members)
    for session in (1, 0):
        order = data.draw(st.permutations(names))
        masking = data.draw(st.integers(threshold, count), label="masked")
        arrived = data.draw(st.integers(threshold, masking), label="arrived")
        answering = data.draw(st.integers(threshold, arrived), label="answered")
        given_ = inputs(names, session)
        masked = {name: group.members[name].mask(session, given_[name]) for name in order[:masking]}
        # Inputs that come too late count as fallen out.
        masked = {name: masked[name] for name in order[:arrived]}
        survivors = sorted(masked)
        revealed = {
            name: group.members[name].reveal(session, survivors) for name in order[:answering]
        }
        opened = unmask_sum(session, masked, revealed, group.advertisements, threshold)
        assert opened.total.tolist() == plain_sum([given_[name] for name in survivors])
        assert opened.total.dtype == np.uint64
        assert opened.wrong == {}


@pytest.mark.parametrize("fallen", [None, "site-01"])
def test_sums_open_only_of_inputs_under_the_same_words(ready, fallen):
    """A site that was told otherwise leaves masks on the sum, whatever words open it."""
    for other, opens in (("told", True), ("told otherwise", False)):
        group = ready(4, 3)
        names = [name for name in group.members if name != fallen]
        words = dict.fromkeys(group.members, "told") | {"site-00": other}
        given_ = inputs(group.members, 8)
        masked = {name: group.members[name].mask(0, given_[name], 0, words[name]) for name in names}
        revealed = {name: group.members[name].reveal(0, names) for name in names}
        for word in {"told", other}:
            total = unmask_sum(0, masked, revealed, group.advertisements, 3, word).total.tolist()
            assert (total == plain_sum([given_[name] for name in names])) is opens


def test_a_session_is_masked_under_the_same_words_again(ready):
    member = ready(3, 2).members["site-00"]
    vector = np.zeros(5, np.uint64)
    first = member.mask(0, vector, 0, "told")
    assert np.array_equal(member.mask(0, vector, 0, "told"), first)
    with pytest.raises(RefusedError, match="is used"):
        member.mask(0, vector, 0, "told otherwise")


def test_sites_that_fall_out_in_a_setup_are_left_out_of_the_next(begin, ready):
    group = begin(4, 1)
    gone = "site-02"
    advertised = {name: table for name, table in group.advertisements.items() if name != gone}
    dealt = {name: group.members[name].share(advertised, group.keys, 3) for name in advertised}
    for name in advertised:
        group.members[name].receive({a: dealt[a][name] for a in advertised if a != name})
    given_ = inputs(advertised, 5)
    masked = {name: group.members[name].mask(0, given_[name]) for name in advertised}
    revealed = {name: group.members[name].reveal(0, sorted(masked)) for name in advertised}
    opened = unmask_sum(0, masked, revealed, advertised, 3)
    assert opened.total.tolist() == plain_sum(given_.values())


def test_a_late_input_stays_hidden(ready):
    """Its pairwise masks are known by then; its own mask is not, and hides it."""
    group = ready(4, 3)
    given_ = {name: np.zeros(4096, np.uint64) for name in group.members}
    masked = {name: member.mask(0, given_[name]) for name, member in group.members.items()}
    late = masked.pop("site-03")
    survivors = sorted(masked)
    revealed = {name: group.members[name].reveal(0, survivors) for name in survivors}
    assert not unmask_sum(0, masked, revealed, group.advertisements, 3).total.any()
    with pytest.raises(UnmaskError, match="another session, or other survivors"):
        unmask_sum(0, {**masked, "site-03": late}, revealed, group.advertisements, 3)
    looks_uniform(late)


def looks_uniform(vector):
    """All bytes equally often: Pearson's test; a false alarm has probability 1e-6."""
    counts = np.bincount(vector.view(np.uint8), minlength=256)
    expected = vector.nbytes / 256
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < chi2.isf(1e-6, 255)


def test_masked_inputs_look_uniform(ready):
    """One false alarm in 250,000: four tests of 1e-6 each."""
    group = ready(4, 3, sessions=2)
    for name, session in (("site-00", 0), ("site-03", 0), ("site-00", 1)):
        looks_uniform(group.members[name].mask(session, np.zeros(8192, np.uint64)))
    # So does the difference of two sessions with one input: masks are never used again.
    member = group.members["site-01"]
    zeros = np.zeros(8192, np.uint64)
    looks_uniform(member.mask(0, zeros) - member.mask(1, zeros))


def test_the_test_of_uniformity_can_fail():
    with pytest.raises(AssertionError):
        looks_uniform(np.arange(8192, dtype=np.uint64))


def test_an_empty_input_is_a_sum(ready):
    group = ready(2, 2)
    masked = {name: m.mask(0, np.zeros(0, np.uint64)) for name, m in group.members.items()}
    revealed = {name: m.reveal(0, sorted(masked)) for name, m in group.members.items()}
    assert unmask_sum(0, masked, revealed, group.advertisements, 2).total.size == 0


def test_sizes_are_as_documented(ready):
    """Bytes of base64 text: 4 for each 3 begun."""
    sites, sessions = 5, 7
    group = ready(sites, 3, sessions=sessions)
    table = group.advertisements["site-00"]
    assert len(table["masking"]) == len(table["seeds"]) == -(-32 * sessions // 3) * 4
    for text in group.dealt["site-00"].values():
        assert len(text) == -(-(33 * (sites + 3) * sessions + 16) // 3) * 4
    for member in group.members.values():
        member.mask(0, np.zeros(3, np.uint64))
    answer = group.members["site-00"].reveal(0, sorted(group.members))
    assert len(answer["gates"]) == -(-33 * sites // 3) * 4
    assert len(answer["sealed"]) == -(-(33 * sites + 16) // 3) * 4


@pytest.mark.parametrize(("sites", "content"), [(2, 3000), (3, 9000), (5, 20_000), (8, 60_000)])
def test_letters_stay_within_what_they_may_take(ready, sites, content):
    sessions = sessions_within(content, sites)
    group = ready(sites, sites, sessions=sessions)
    for dealt in group.dealt.values():
        assert 0.7 * content < len(json.dumps(dealt)) <= content
    assert len(json.dumps(group.advertisements)) <= content
    assert sessions_within(10**9, sites) == MAX_SESSIONS
    assert sessions_within(10, sites) == 0


# The coordinator: a right sum or none, and wrong shares found.


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


@pytest.mark.parametrize(("gone", "liar"), [((), "site-01"), (("site-05",), "site-04")])
def test_a_wrong_gate_is_found(ready, gone, liar):
    group = ready(6, 4)
    masked, revealed = rounds(group, gone)
    for at in range(6):
        revealed[liar] = altered(revealed[liar], "gates", 33 * at)
    opened = unmask_sum(0, masked, revealed, group.advertisements, 4)
    assert opened.total.tolist() == [total_without(gone)] * 3
    assert set(opened.wrong) == {liar}
    assert "does not fit" in opened.wrong[liar]


def test_a_wrong_gate_where_every_answer_is_needed_gives_no_sum(ready):
    group = ready(6, 4)
    masked, revealed = rounds(group, ("site-00", "site-05"))
    revealed["site-01"] = altered(revealed["site-01"], "gates", 33 * 2)
    with pytest.raises(UnmaskError, match="3 usable answers, expected at least 4"):
        unmask_sum(0, masked, revealed, group.advertisements, 4)


@pytest.mark.parametrize("liar", NAMES[:5:4])
def test_a_wrong_share_under_the_seal_is_found(ready, liar):
    """A site that seals wrong shares, of seeds and of session keys, rightly."""
    group = ready(6, 4)
    for row in group.members[liar]._sessions[0].held.values():
        row[0], row[1] = (row[0] + 1) % primitives.PRIME, (row[1] + 1) % primitives.PRIME
    masked, revealed = rounds(group, ("site-05",))
    opened = unmask_sum(0, masked, revealed, group.advertisements, 4)
    assert opened.total.tolist() == [total_without(("site-05",))] * 3
    assert set(opened.wrong) == {liar}


def test_two_liars_among_six_with_four_right(ready):
    group = ready(6, 4)
    for liar, shift in (("site-00", 1), ("site-03", 7)):
        for row in group.members[liar]._sessions[0].held.values():
            row[:] = [(value + shift) % primitives.PRIME for value in row]
    masked, revealed = rounds(group)
    opened = unmask_sum(0, masked, revealed, group.advertisements, 4)
    assert opened.total.tolist() == [total_without(())] * 3
    assert set(opened.wrong) == {"site-00", "site-03"}


def test_too_many_liars_give_no_sum(ready):
    group = ready(6, 4)
    # Unequal shifts: equal ones can cancel in Lagrange's formula, and then the secret is right.
    for liar, shift in zip(NAMES[:3], (1, 1000, 12345678), strict=True):
        for row in group.members[liar]._sessions[0].held.values():
            row[0] = (row[0] + shift) % primitives.PRIME
    masked, revealed = rounds(group)
    with pytest.raises(UnmaskError, match="do not give the seed that it committed to"):
        unmask_sum(0, masked, revealed, group.advertisements, 4)


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
    with pytest.raises(UnmaskError, match=f"shares that site-03 dealt do not give the {what}"):
        unmask_sum(0, masked, revealed, group.advertisements, 3)


def test_altered_answers_never_give_a_wrong_sum(ready):
    """A byte here and there, in either field, of any one of just enough answers."""
    group = ready(3, 3)
    masked, revealed = rounds(group)
    places = {"gates": (0, 32, 33, 98), "sealed": (0, 50, 98, 99, 114)}
    for name, (field, spots) in product(revealed, places.items()):
        for at in spots:
            wrong = {**revealed, name: altered(revealed[name], field, at)}
            with pytest.raises(UnmaskError, match="usable answers"):
                unmask_sum(0, masked, wrong, group.advertisements, 3)
    assert unmask_sum(0, masked, revealed, group.advertisements, 3).total.tolist() == [3, 3, 3]


def test_too_few_answers(ready):
    group = ready(6, 4)
    masked, revealed = rounds(group)
    some = {name: revealed[name] for name in NAMES[:3]}
    with pytest.raises(UnmaskError, match="3 usable answers, expected at least 4"):
        unmask_sum(0, masked, some, group.advertisements, 4)
    with pytest.raises(UnmaskError, match="3 masked inputs: expected at least 4"):
        unmask_sum(0, {n: masked[n] for n in NAMES[:3]}, some, group.advertisements, 4)


def test_answers_about_something_else_are_left_out_with_the_reason(ready):
    group = ready(6, 4, sessions=2)
    masked, revealed = rounds(group)
    _, others = rounds(group, ("site-05",), session=1)
    revealed["site-00"] = others["site-00"]
    revealed["site-01"] = "garbage"
    opened = unmask_sum(0, masked, revealed, group.advertisements, 4)
    assert opened.total.tolist() == [15] * 3
    assert opened.wrong == {
        "site-00": "the answer is about another session, or other survivors",
        "site-01": "an answer without the fields session, list, gates, sealed",
    }


def test_answers_of_who_is_not_asked_are_left_out(ready):
    group = ready(6, 4)
    masked, revealed = rounds(group, ("site-05",))
    opened = unmask_sum(
        0, masked, {**revealed, "site-05": revealed["site-00"]}, group.advertisements, 4
    )
    assert opened.total.tolist() == [10] * 3
    assert list(opened.wrong) == ["site-05"]


def test_inputs_of_another_setup_or_form_are_refused(ready):
    group = ready(3, 2)
    masked, revealed = rounds(group)
    for name, vector in (
        ("unknown_node", masked["site-00"]),
        ("site-00", masked["site-00"][:2]),
        ("site-00", masked["site-00"].astype(np.int64)),
    ):
        with pytest.raises(RefusedError):
            unmask_sum(0, {**masked, name: vector}, revealed, group.advertisements, 2)
    for session in (-1, 1):
        with pytest.raises(RefusedError, match="expected 0 to 0"):
            unmask_sum(session, masked, revealed, group.advertisements, 2)


def test_inputs_are_left_as_they_were(ready):
    group = ready(3, 2)
    masked, revealed = rounds(group)
    before = {name: vector.copy() for name, vector in masked.items()}
    unmask_sum(0, masked, revealed, group.advertisements, 2)
    assert all(np.array_equal(masked[name], before[name]) for name in masked)
