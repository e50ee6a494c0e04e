"""The protocol, against its published description (Bonawitz et al. 2017) written out slowly."""

import json
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from coterie.secagg.opening import UnopenedError, open_sum
from coterie.secagg.roster import MOST_SESSIONS, sessions_within
from coterie.wire import RefusedError

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
        opened = open_sum(session, masked, revealed, group.advertisements, threshold)
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
            total = open_sum(0, masked, revealed, group.advertisements, 3, word).total.tolist()
            assert (total == plain_sum([given_[name] for name in names])) is opens


def test_a_session_is_masked_under_the_same_words_again(ready):
    member = ready(3, 2).members["site-00"]
    vector = np.zeros(5, np.uint64)
    first = member.mask(0, vector, 0, "told")
    assert np.array_equal(member.mask(0, vector, 0, "told"), first)
    with pytest.raises(RefusedError, match="used up"):
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
    opened = open_sum(0, masked, revealed, advertised, 3)
    assert opened.total.tolist() == plain_sum(given_.values())


def test_a_late_input_stays_hidden(ready):
    """Its pairwise masks are known by then; its own mask is not, and hides it."""
    group = ready(4, 3)
    given_ = {name: np.zeros(4096, np.uint64) for name in group.members}
    masked = {name: member.mask(0, given_[name]) for name, member in group.members.items()}
    late = masked.pop("site-03")
    survivors = sorted(masked)
    revealed = {name: group.members[name].reveal(0, survivors) for name in survivors}
    assert not open_sum(0, masked, revealed, group.advertisements, 3).total.any()
    with pytest.raises(UnopenedError, match="another session, or other survivors"):
        open_sum(0, {**masked, "site-03": late}, revealed, group.advertisements, 3)
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
    assert open_sum(0, masked, revealed, group.advertisements, 2).total.size == 0


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
    assert sessions_within(10**9, sites) == MOST_SESSIONS
    assert sessions_within(10, sites) == 0


def test_masking_is_quick(ready):
    """20 sites and 200,000 numbers; time of this process, whatever else the machine does."""
    group = ready(20, 14)
    vector = np.zeros(200_000, np.uint64)
    before = time.process_time()
    group.members["site-07"].mask(0, vector)
    assert time.process_time() - before < 0.5
