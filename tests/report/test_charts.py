"""Axes that do not magnify noise, and names of figures."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.report import charts
from coterie.report.read import slug_of

FINITE = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.lists(FINITE, min_size=1, max_size=8), st.floats(0, 1e5))
def test_an_axis_holds_all_values_and_six_standard_errors(
    values: list[float], noise: float
) -> None:
    low, high = charts.span_of(values, noise)
    assert low <= min(values) and max(values) <= high and low < high
    least = max(0.1 * max(map(abs, values)), 6 * noise)
    bounded = low == 0 or high == 1  # shares and errors do not leave their range
    assert bounded or high - low >= least * (1 - 1e-9)


@given(st.lists(st.floats(0, 1), min_size=1), st.floats(0, 0.3))
def test_an_axis_of_shares_stays_between_0_and_1(values: list[float], noise: float) -> None:
    low, high = charts.span_of(values, noise)
    assert low >= 0 and (high <= 1 or max(values) == 0)


def test_an_axis_of_nothing_is_an_axis() -> None:
    assert charts.span_of([math.nan, math.inf]) == (0.0, 1.0) and charts.span_of([]) == (0.0, 1.0)


def curve(values: list[float], error: float) -> dict:
    x = np.arange(1, len(values) + 1, dtype=float)
    made = charts.lines(
        "name", "title", [("pfeb", x, np.array(values))], along="rounds done", up="accuracy",
        errors={"pfeb": error}, whole=True,
    )  # fmt: skip
    return dict(made.spec)


def test_noise_by_round_does_not_look_like_a_trend() -> None:
    spec = curve([0.695, 0.701, 0.697, 0.699], 0.013)
    (first, *_) = spec["layer"]
    low, high = first["encoding"]["y"]["scale"]["domain"]
    assert high - low >= 6 * 0.013
    axis = first["encoding"]["x"]["axis"]
    assert axis["tickMinStep"] == 1 and axis["format"] == "d", "rounds are counted"
    (end,) = spec["datasets"]["ends"]
    assert (end["x"], end["low"], end["high"]) == (4, pytest.approx(0.673), pytest.approx(0.725))


def test_a_large_change_fills_the_axis() -> None:
    domain = curve([0.2, 0.5, 0.8], 0.01)["layer"][0]["encoding"]["y"]["scale"]["domain"]
    assert domain == [0.2, pytest.approx(0.82)]


def test_an_unknown_error_has_no_bar() -> None:
    spec = curve([0.5, 0.6], math.nan)
    assert "ends" not in spec["datasets"] and len(spec["layer"]) == 2


def test_small_gains_do_not_fill_their_chart() -> None:
    rows = [
        {"client": str(i), "local": 1.0, "personal": 1 - gain, "gain": gain}
        for i, gain in enumerate((-1e-4, 1e-4, 2e-4))
    ]
    spec = charts.gains("name", "title", rows).spec
    low, high = spec["layer"][0]["encoding"]["y"]["scale"]["domain"]
    assert high - low >= 0.1 and low < -1e-4 < 2e-4 < high


@given(st.text())
def test_a_name_of_a_file_is_plain(text: str) -> None:
    slug = slug_of(text)
    assert slug and len(slug) <= 60 and slug.strip("-") == slug
    assert set(slug) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
