"""Samplers: ids in order, without repeats, refused when they make no sense, and unbiased coins."""

import itertools

import numpy as np
import pytest

from coterie.privacy.entropy import SeededEntropy, SystemEntropy, open_entropy, uniforms
from coterie.privacy.events import Participation
from coterie.privacy.sampling import Cyclic, Everyone, FixedSize, Poisson, Sampler, _below

SAMPLERS = [Everyone(), Poisson(), Poisson(3.5), Poisson(9.999), Poisson(1e-9), FixedSize(4)]


class Script:
    """An entropy that hands out given words, then fails."""

    def __init__(self, *words):
        self.left = list(words)

    def words(self, count):
        assert count <= len(self.left), "more words were drawn than the script holds"
        drawn, self.left = self.left[:count], self.left[count:]
        return np.array(drawn, dtype=np.uint64)


class Padded(Script):
    """A script that goes on with ones."""

    def words(self, count):
        self.left += [1] * max(0, count - len(self.left))
        return super().words(count)


class Repeat:
    """An entropy that hands out one word for ever."""

    def __init__(self, word):
        self.word = word

    def words(self, count):
        return np.full(count, self.word, dtype=np.uint64)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_cohorts_are_sorted_ids_without_repeats(sampler):
    entropy = SeededEntropy(1, "cohort", 0)
    for _ in range(200):
        cohort = sampler.draw(10, entropy)
        assert cohort.dtype == np.int64
        assert cohort.ndim == 1
        assert np.all(np.diff(cohort) > 0)
        assert len(cohort) == 0 or (cohort[0] >= 0 and cohort[-1] < 10)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_cohorts_repeat_with_a_seed_and_depend_on_the_round(sampler):
    def cohorts(index):
        entropy = SeededEntropy(7, "cohort", index)
        return [sampler.draw(10, entropy).tolist() for _ in range(20)]

    assert cohorts(0) == cohorts(0)
    if sampler in (Poisson(3.5), FixedSize(4)):
        assert cohorts(0) != cohorts(1)


def test_everyone_and_full_rate_draw_no_coins():
    for sampler in (Everyone(), Poisson(), Poisson(5)):
        assert sampler.draw(5, Script()).tolist() == [0, 1, 2, 3, 4]
    assert FixedSize(5).draw(5, SeededEntropy(0, "c", 0)).tolist() == [0, 1, 2, 3, 4]


def test_a_poisson_cohort_may_be_empty_or_everyone():
    # The smallest uniform makes a gap longer than any population, the largest one a gap of one.
    assert Poisson(0.001).draw(10, Repeat(0)).tolist() == []
    assert Poisson(1.0).draw(1000, Repeat(2**64 - 1)).tolist() == list(range(1000))


def test_poisson_goes_on_until_the_last_client_was_asked():
    # Far more clients join than the first batch of coins foresees.
    cohort = Poisson(1e-6).draw(50_000, Repeat(2**64 - 1))
    assert np.array_equal(cohort, np.arange(50_000))


def test_poisson_gaps_are_the_inverse_of_the_geometric_distribution():
    # A word w means u = ((w >> 12) + 1/2) / 2^52; the gap g has (1-p)^g < u <= (1-p)^(g-1).
    rate, words = 0.25, [2**63, 2**62, 2**60, 3 * 2**62, 2**63 + 2**62 - 2**40] + [2**50] * 60
    cohort = Poisson(250.0).draw(1000, Padded(*words)).tolist()
    position, expected = -1, []
    for word in words:
        u, gap = ((word >> 12) + 0.5) / 2**52, 1
        while u <= (1 - rate) ** gap:
            gap += 1
        position += gap
        if position >= 1000:
            break
        expected.append(position)
    assert cohort[: len(expected)] == expected


def test_huge_populations_with_rare_clients():
    cohort = Poisson(5.0).draw(10**12, SeededEntropy(3, "cohort", 0))
    assert len(cohort) < 40
    assert np.all(cohort < 10**12)


@pytest.mark.parametrize("cohort", [0, -1, 11, float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [Poisson, FixedSize])
def test_a_cohort_that_makes_no_sense_is_refused(kind, cohort):
    sampler = kind(cohort)
    with pytest.raises(ValueError, match=r"cohort = .*expected .*\(10\)"):
        sampler.draw(10, SystemEntropy())
    with pytest.raises(ValueError, match="cohort"):
        sampler.participation(10)


def test_expected_cohorts_are_public_numbers():
    assert Everyone().expected(7) == 7.0
    assert Poisson().expected(7) == 7.0
    assert Poisson(2.5).expected(7) == pytest.approx(2.5, rel=1e-15)
    assert FixedSize(3).expected(7) == 3.0


def test_what_the_accountant_is_told():
    assert Everyone().participation(8) == Participation("everyone", 1.0, False)
    assert Poisson(2.0).participation(8) == Participation("poisson", 0.25, False)
    assert Poisson(2.0, visible=True).participation(8) == Participation("poisson", 0.25, True)
    assert Poisson().participation(8) == Participation("poisson", 1.0, False)
    assert FixedSize(2).participation(8) == Participation("fixed", 0.25, False)
    assert FixedSize(2, visible=True).participation(8).visible


def test_hidden_cohorts_are_the_default():
    assert not Poisson(1.0).visible
    assert not FixedSize(1).visible


def test_samplers_are_found_by_name():
    assert Sampler.choices() == {
        "everyone": Everyone,
        "poisson": Poisson,
        "fixed": FixedSize,
        "cyclic": Cyclic,
    }


def test_integers_below_a_limit_reject_the_biased_remainder():
    limit = 3  # 2^64 = 1 mod 3: exactly one word, the last, must be thrown away
    assert _below(limit, 2**64 - 1, Script(5)) == 2
    assert _below(limit, 2**64 - 2, Script()) == (2**64 - 2) % 3
    assert _below(1, 2**64 - 1, Script()) == 0
    assert _below(2**63 + 1, 2**64 - 1, Script(2**63 + 1, 2**63)) == 2**63


def test_uniforms_are_inside_the_open_interval():
    low, high = uniforms(Script(0, 2**64 - 1), 2)
    assert 0 < low < 2**-52
    assert 1 - 2**-52 < high < 1


def test_entropy_is_the_systems_unless_a_seed_is_given():
    assert isinstance(open_entropy(None, "noise", 0), SystemEntropy)
    assert isinstance(open_entropy(0, "noise", 0), SeededEntropy)


def test_seeded_entropy_is_one_stream_by_seed_purpose_and_index():
    def words(*name):
        return SeededEntropy(*name).words(8).tolist()

    names = [(1, "noise", 0), (2, "noise", 0), (1, "cohort", 0), (1, "noise", 1)]
    assert len({tuple(words(*name)) for name in names}) == len(names)
    assert words(1, "noise", 0) == words(1, "noise", 0)
    stream = SeededEntropy(1, "noise", 0)
    assert stream.words(3).tolist() + stream.words(5).tolist() == words(1, "noise", 0)
    assert stream.words(0).shape == (0,)
    assert stream.words(1).shape == (1,)


def test_system_entropy_draws_anew():
    assert SystemEntropy().words(4).tolist() != SystemEntropy().words(4).tolist()
    assert SystemEntropy().words(0).shape == (0,)


@pytest.mark.parametrize("clients, cohort, period", [(10, 4, 3), (10, 10, 1), (7, 1, 7), (9, 3, 3)])
def test_a_public_schedule_takes_each_client_once_in_a_period(clients, cohort, period):
    sampler, entropy = Cyclic(cohort), Script()
    assert sampler.participation(clients) == Participation("cyclic", 1 / period, visible=True)
    cohorts = [sampler.draw(clients, entropy, number).tolist() for number in range(3 * period)]
    for first in range(2 * period + 1):
        several = itertools.chain.from_iterable(cohorts[first : first + period])
        assert sorted(several) == list(range(clients))
    assert all(one == sorted(one) for one in cohorts)
    assert max(map(len, cohorts)) == sampler.largest(clients) <= cohort
    assert sum(map(len, cohorts)) / len(cohorts) == pytest.approx(sampler.expected(clients))
    assert [sampler.scheduled(clients, n).tolist() for n in range(3 * period)] == cohorts


@pytest.mark.parametrize("cohort", [0, -1, 11, 2.0, True])
def test_a_schedule_needs_a_whole_number_of_clients(cohort):
    with pytest.raises(ValueError, match="cohort = "):
        Cyclic(cohort).participation(10)
