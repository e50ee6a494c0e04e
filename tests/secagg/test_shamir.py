"""Shares: against Lagrange's formula over fractions, and by counting in a small field."""

from collections import Counter
from fractions import Fraction
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.secagg import shamir
from coterie.secagg.shamir import PRIME, combine, from_bytes, split, to_bytes
from coterie.wire import RefusedError

PROFILE = settings(derandomize=True, deadline=None, max_examples=60)


def lagrange(points, at):
    """The polynomial through points, at a place, over the rational numbers."""
    total = Fraction(0)
    for x, y in points.items():
        term = Fraction(y)
        for other in points:
            if other != x:
                term *= Fraction(at - other, x - other)
        total += term
    return total


def is_prime(number, rounds=40):
    """Miller and Rabin's test: a composite passes with probability at most 4^-40."""
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in range(2, 2 + rounds):
        power = pow(base, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


def test_the_field_is_of_the_smallest_prime_above_2_256():
    assert is_prime(PRIME)
    assert not any(is_prime(number, 5) for number in range(2**256 + 1, PRIME))


@PROFILE
@given(st.integers(0, PRIME - 1), st.integers(1, 9), st.integers(0, 6), st.randoms())
def test_any_threshold_of_shares_give_the_secret(secret, threshold, more, random):
    places = random.sample(range(1, 60), threshold + more)
    shares = dict(zip(places, split(secret, threshold, places), strict=True))
    chosen = random.sample(places, threshold)
    points = {place: shares[place] for place in chosen}
    # Lagrange over fractions, taken modulo the prime at the end.
    exact = lagrange(points, 0)
    assert exact.numerator * pow(exact.denominator, -1, PRIME) % PRIME == secret
    assert combine(points) == secret
    for place in places:
        assert combine(points, place) == shares[place]


def test_fewer_shares_than_the_threshold_fit_every_secret(monkeypatch):
    """Exact, by counting: in the field of 7 elements all polynomials are listed."""
    small, threshold, places = 7, 3, (1, 2, 4)
    monkeypatch.setattr(shamir, "PRIME", small)
    monkeypatch.setattr(shamir.secrets, "randbelow", lambda _: next(drawn))
    seen = {}
    for secret in range(small):
        counts = Counter()
        for coefficients in product(range(small), repeat=threshold - 1):
            drawn = iter(coefficients)
            shares = split(secret, threshold, places)
            for pair in combinations(range(3), 2):
                counts[pair, tuple(shares[at] for at in pair)] += 1
        seen[secret] = counts
    # Each pair of shares comes exactly once, whatever the secret is: it tells nothing of it.
    assert all(counts == seen[0] for counts in seen.values())
    assert set(seen[0].values()) == {1}
    assert len(seen[0]) == 3 * small**2


def test_coefficients_come_from_the_system_and_fill_the_field(monkeypatch):
    asked = []
    monkeypatch.setattr(shamir.secrets, "randbelow", lambda below: asked.append(below) or 5)
    assert split(7, 4, [1, 2, 3, 4, 5])[0] == 7 + 5 + 5 + 5
    assert asked == [PRIME] * 3


def test_shares_are_linear():
    one, other = split(11, 2, [1, 2, 3]), split(31, 2, [1, 2, 3])
    assert combine({2: one[1] + other[1], 3: one[2] + other[2]}) == 42


def test_bytes():
    values = [0, 1, PRIME - 1, 2**256]
    assert from_bytes(to_bytes(values)) == values
    assert len(to_bytes(values)) == 4 * 33
    with pytest.raises(RefusedError, match="multiple of 33"):
        from_bytes(bytes(34))
    with pytest.raises(RefusedError, match="outside the field"):
        from_bytes(PRIME.to_bytes(33, "little"))


@pytest.mark.parametrize(
    ("secret", "threshold", "places"),
    [
        (PRIME, 2, [1, 2]),
        (-1, 2, [1, 2]),
        (1, 0, [1]),
        (1, 3, [1, 2]),
        (1, 2, [0, 1]),
        (1, 2, [1, 1]),
    ],
)
def test_what_cannot_be_shared_is_refused(secret, threshold, places):
    with pytest.raises(ValueError, match="expected"):
        split(secret, threshold, places)
