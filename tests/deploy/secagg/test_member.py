"""What a site refuses: each rule that its own, or the others', protection rests on."""

import base64
import copy
import json
import pickle

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coterie.deploy.messages import RefusedError
from coterie.deploy.secagg import primitives
from coterie.deploy.secagg.member import Member, advertise
from coterie.deploy.secagg.primitives import Scope, public_key
from coterie.deploy.secagg.unmask import unmask_sum

X = np.arange(6, dtype=np.uint64)
ALL = ["site-00", "site-01", "site-02", "site-03"]


@pytest.fixture
def four(ready):
    return ready(4, 3, sessions=3)


def masked(group, session=0, about=None):
    return {name: member.mask(session, X, about) for name, member in group.members.items()}


def test_swapped_keys_are_refused(begin):
    """A coordinator that puts a key of its own in place of a site's."""
    group = begin(3, 2)
    own = public_key(bytes(range(32)))
    for field in ("sealing", "masking", "seeds"):
        table = dict(group.advertisements["site-01"])
        length = len(base64.b64decode(table[field]))
        table[field] = base64.b64encode((own * 2)[:length]).decode()
        with pytest.raises(RefusedError, match=r"site-01 is not signed by it|twice"):
            group.members["site-00"].share(
                {**group.advertisements, "site-01": table}, group.keys, 2
            )


def test_an_advertisement_signed_by_another_is_refused(begin):
    group = begin(3, 1)
    forged = advertise(
        Scope("run", "setup-0"),
        "site-01",
        public_key(b"\1" * 32),
        [public_key(b"\2" * 32)],
        [bytes(32)],
        Ed25519PrivateKey.generate(),
    )
    with pytest.raises(RefusedError, match="site-01 is not signed by it"):
        group.members["site-00"].share({**group.advertisements, "site-01": forged}, group.keys, 2)


def test_an_advertisement_of_another_setup_run_or_site_is_refused(begin):
    group = begin(3, 1)
    share = group.members["site-00"].share
    for other in (begin(3, 1, setup="setup-1"), begin(3, 1, run="another")):
        mixed = {**group.advertisements, "site-01": other.advertisements["site-01"]}
        with pytest.raises(RefusedError, match="different runs or setups"):
            share(mixed, group.keys, 2)
    with pytest.raises(RefusedError, match="is from site-02"):
        share({**group.advertisements, "site-01": group.advertisements["site-02"]}, group.keys, 2)
    with pytest.raises(RefusedError, match="not in the federation"):
        share(group.advertisements, {name: group.keys[name] for name in ALL[:2]}, 2)
    with pytest.raises(RefusedError, match="different numbers of sessions"):
        share(
            {**group.advertisements, "site-01": begin(3, 2).advertisements["site-01"]},
            group.keys,
            2,
        )


def test_a_key_advertised_twice_is_refused(begin):
    group = begin(3, 1)
    own = group.advertisements["site-00"]
    copied = advertise(
        Scope("run", "setup-0"),
        "site-01",
        base64.b64decode(own["sealing"]),
        [public_key(b"\2" * 32)],
        [bytes(32)],
        group.private["site-01"],
    )
    with pytest.raises(RefusedError, match="advertised twice"):
        group.members["site-00"].share({**group.advertisements, "site-01": copied}, group.keys, 2)


def test_the_own_advertisement_must_be_there_as_it_was(begin):
    group, again = begin(3, 1), begin(3, 1)
    others = {name: group.advertisements[name] for name in ALL[1:3]}
    for table in ({}, {"site-00": again.advertisements["site-00"]}):
        with pytest.raises(RefusedError, match="not the one that it made"):
            group.members["site-00"].share({**others, **table}, group.keys, 2)


@pytest.mark.parametrize("threshold", [-1, 0, 1, 2, 5])
def test_thresholds_of_half_the_sites_or_less_are_refused(begin, threshold):
    group = begin(4, 1)
    with pytest.raises(RefusedError, match="more than half"):
        group.members["site-00"].share(group.advertisements, group.keys, threshold)


def test_a_key_of_low_order_is_refused(begin):
    group = begin(3, 1)
    weak = advertise(
        Scope("run", "setup-0"),
        "site-01",
        bytes(32),
        [public_key(b"\2" * 32)],
        [bytes(32)],
        group.private["site-01"],
    )
    with pytest.raises(RefusedError, match="site-01 advertised a public key of low order"):
        group.members["site-00"].share({**group.advertisements, "site-01": weak}, group.keys, 2)


def test_secrets_are_shared_once(four):
    member = four.members["site-00"]
    assert member.share(four.advertisements, four.keys, 3) == four.dealt["site-00"]
    fewer = {name: four.advertisements[name] for name in ALL[:3]}
    for advertisements, threshold in ((fewer, 3), (four.advertisements, 4)):
        with pytest.raises(RefusedError, match="other advertisements"):
            member.share(advertisements, four.keys, threshold)


def test_shares_for_another_are_refused(begin, ready):
    """Replayed from another setup, sent to another site, in another's name, or altered."""
    old = ready(3, 2, setup="old")
    group = begin(3, 1)
    dealt = {
        name: member.share(group.advertisements, group.keys, 2)
        for name, member in group.members.items()
    }
    right = {name: dealt[name]["site-00"] for name in ("site-01", "site-02")}
    altered = bytearray(base64.b64decode(right["site-01"]))
    altered[40] ^= 1
    for wrong in (
        old.dealt["site-01"]["site-00"],
        dealt["site-01"]["site-02"],
        dealt["site-02"]["site-00"],
        dealt["site-00"]["site-01"],
        base64.b64encode(altered).decode(),
    ):
        with pytest.raises(RefusedError, match="shares of site-01 are not for site-00"):
            group.members["site-00"].receive({**right, "site-01": wrong})
    assert not group.members["site-00"].ready
    group.members["site-00"].receive(right)
    assert group.members["site-00"].ready


@pytest.mark.parametrize(("shown", "threshold"), [(ALL[:3], 3), (ALL, 4)])
def test_shares_under_another_roster_or_threshold_are_refused(begin, shown, threshold):
    """A coordinator that shows sites different sets, or different thresholds, gets no setup."""
    group = begin(4, 1)
    dealt = {
        name: group.members[name].share(group.advertisements, group.keys, 3)
        for name in ("site-00", "site-02", "site-03")
    }
    others = {name: group.advertisements[name] for name in shown}
    dealt["site-01"] = group.members["site-01"].share(others, group.keys, threshold)
    with pytest.raises(RefusedError, match="shares of site-01 are not for site-00"):
        group.members["site-00"].receive({name: dealt[name]["site-00"] for name in ALL[1:]})


def test_all_shares_are_needed_and_taken_once(four, ready):
    member = four.members["site-00"]
    right = {name: four.dealt[name]["site-00"] for name in ALL[1:]}
    member.receive(right)
    with pytest.raises(RefusedError, match="other shares"):
        member.receive({**right, "site-01": right["site-02"]})
    for some in ({}, {name: right[name] for name in ALL[1:3]}, {**right, "site-00": "AAAA"}):
        with pytest.raises(RefusedError, match="not of the 3 other sites"):
            member.receive(some)


def test_stages_come_in_order(begin):
    group = begin(3, 1)
    member = group.members["site-00"]
    with pytest.raises(RefusedError, match="has no shares yet"):
        member.receive({})
    with pytest.raises(RefusedError, match="has no shares yet"):
        member.mask(0, X)
    member.share(group.advertisements, group.keys, 2)
    with pytest.raises(RefusedError, match="have not arrived yet"):
        member.mask(0, X)
    with pytest.raises(RefusedError, match="have not arrived yet"):
        member.reveal(0, ALL[:3])


def test_a_session_masks_one_input(four):
    member = four.members["site-00"]
    first = member.mask(0, X)
    assert np.array_equal(member.mask(0, X), first)
    for other, about in ((X + np.uint64(1), None), (X[:-1], None), (X, "round 7")):
        with pytest.raises(RefusedError, match="is used"):
            member.mask(0, other, about)
    assert not np.array_equal(member.mask(1, X), first)
    masked(four)
    member.reveal(0, ALL)
    with pytest.raises(RefusedError, match="is used"):
        member.mask(0, X)


@pytest.mark.parametrize("session", [-1, 3, True, 1.0, "0", None])
def test_sessions_that_do_not_exist_are_refused(four, session):
    with pytest.raises(RefusedError, match="expected 0 to 2"):
        four.members["site-00"].mask(session, X)
    with pytest.raises(RefusedError, match="expected 0 to 2"):
        four.members["site-00"].reveal(session, ALL)


@pytest.mark.parametrize(
    ("survivors", "why"),
    [
        (ALL[:2], "at least the threshold, 3"),
        ([], "at least the threshold, 3"),
        (ALL[1:], "do not include site-00"),
        ([*ALL[:3], ALL[1]], "twice"),
        ([*ALL[:3], "unknown_node"], "not of this setup"),
        ("site-00", "not a list"),
        (None, "not a list"),
        ([*ALL[:3], 4], "not a list"),
        ({"site-00": 1}, "not a list"),
    ],
)
def test_lists_that_no_sum_can_have_are_refused(four, survivors, why):
    masked(four)
    with pytest.raises(RefusedError, match=why):
        four.members["site-00"].reveal(0, survivors)


def test_two_survivors_are_the_least(begin):
    group = begin(2, 1)
    with pytest.raises(RefusedError, match="at least 2"):
        group.members["site-00"].share(group.advertisements, group.keys, 1)


def test_a_session_is_revealed_once(four):
    masked(four)
    member = four.members["site-00"]
    first = member.reveal(0, ALL[:3])
    assert member.reveal(0, list(reversed(ALL[:3]))) == first
    with pytest.raises(RefusedError, match="revealed for other survivors"):
        member.reveal(0, ALL)
    assert member.reveal(0, ALL[:3]) == first


def test_nothing_is_revealed_of_a_session_that_masked_nothing(four):
    with pytest.raises(RefusedError, match="masked nothing"):
        four.members["site-00"].reveal(0, ALL)


def test_of_each_site_one_share_is_revealed_never_both(four, monkeypatch):
    """Of survivors that of the seed, of others that of the session key, and nothing is kept."""
    masked(four)
    member = four.members["site-00"]
    held = {name: list(row) for name, row in member._sessions[0].held.items()}
    sealed = []
    monkeypatch.setattr(
        "coterie.deploy.secagg.member.encrypt",
        lambda key, content, about: sealed.append(content) or content,
    )
    member.reveal(0, ALL[:3])
    assert primitives.shares_from_bytes(sealed[0]) == [
        *(held[name][0] for name in ALL[:3]),
        held["site-03"][1],
    ]
    one = member._sessions[0]
    assert (one.masking, one.seed, one.gate, one.held) == (b"", b"", [], {})


def test_one_round_is_revealed_for_one_list(four):
    """A round asked again, in another session, for other survivors: a difference would tell."""
    masked(four, 0, "round 4")
    masked(four, 1, "round 4")
    masked(four, 2, "round 5")
    member = four.members["site-00"]
    member.reveal(0, ALL)
    with pytest.raises(RefusedError, match="'round 4' was revealed for other survivors"):
        member.reveal(1, ALL[:3])
    member.reveal(1, ALL)
    member.reveal(2, ALL[:3])
    assert member.lists == {"round 4": tuple(ALL), "round 5": tuple(ALL[:3])}


def test_lists_outlive_a_setup(begin):
    group = begin(3, 1)
    key = group.private["site-00"]
    member, table = Member.begin("run", "setup-0", "site-00", 1, key, {4: ["site-01", "site-00"]})
    assert member.lists == {4: ("site-00", "site-01")}
    group.members["site-00"], group.advertisements["site-00"] = member, table
    dealt = {n: m.share(group.advertisements, group.keys, 2) for n, m in group.members.items()}
    for name, one in group.members.items():
        one.receive({other: dealt[other][name] for other in dealt if other != name})
    masked(group, 0, 4)
    with pytest.raises(RefusedError, match="4 was revealed for other survivors"):
        member.reveal(0, ALL[:3])
    assert member.reveal(0, ALL[:2])["session"] == "0"


@pytest.mark.parametrize("sessions", [0, -1, 4097, True, "2", None])
def test_sessions_are_counted(sessions):
    with pytest.raises(RefusedError, match="expected 1 to 4096"):
        Member.begin("run", "setup", "site", sessions, Ed25519PrivateKey.generate())


def test_inputs_are_rows_of_the_ring(four):
    for vector in (np.zeros(3), np.zeros((2, 2), np.uint64), np.zeros(3, np.int64)):
        with pytest.raises(ValueError, match="expected one row of uint64"):
            four.members["site-00"].mask(0, vector)


def test_secrets_are_not_shown_copied_or_pickled(four):
    member = four.members["site-00"]
    one = member._sessions[0]
    hidden = [member._sealing, one.masking, one.seed]
    texts = [repr(member), str(member), repr(one), f"{member}"]
    for secret in hidden:
        forms = [repr(secret), secret.hex(), str(int.from_bytes(secret, "little"))]
        assert not any(form in text for form in forms for text in texts)
    assert repr(member) == "Member('site-00', setup='setup-0')"
    assert "gate" not in repr(one)
    for take in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="has secrets"):
            take(member)


def test_bodies_are_small_tables_of_text(four):
    masked(four)
    bodies = [four.advertisements["site-00"], four.dealt["site-00"]]
    bodies.append(four.members["site-00"].reveal(0, ALL))
    for body in bodies:
        assert json.loads(json.dumps(body)) == body
        assert all(isinstance(text, str) for text in body.values())


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
FUZZ = settings(
    derandomize=True,
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@FUZZ
@given(
    ANY, st.sampled_from(["run", "setup", "site", "sealing", "masking", "seeds", "signature", ""])
)
def test_malformed_bodies_are_refused_and_nothing_else(begin, thing, field):
    group = begin(2, 1)
    member = group.members["site-00"]
    table = {**group.advertisements["site-01"], field: thing} if field else thing
    with pytest.raises(RefusedError):
        member.share({**group.advertisements, "site-01": table}, group.keys, 2)
    with pytest.raises(RefusedError):
        member.share(thing, group.keys, 2)
    member.share(group.advertisements, group.keys, 2)
    with pytest.raises(RefusedError):
        member.receive(thing)
    with pytest.raises(RefusedError):
        member.receive({"site-01": thing})
    with pytest.raises(RefusedError):
        unmask_sum(0, {"site-00": X, "site-01": X}, {"site-00": thing}, group.advertisements, 2)
    with pytest.raises(RefusedError):
        unmask_sum(0, {"site-00": X, "site-01": X}, {}, {"site-00": thing, "site-01": thing}, 2)


def test_words_that_are_no_unicode_end_nothing():
    member, table = Member.begin("run", "\ud800", "site", 1, Ed25519PrivateKey.generate())
    assert json.loads(json.dumps(table)) == table
    assert not member.ready
