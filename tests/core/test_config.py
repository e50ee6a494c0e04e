"""Plans as text: what goes in comes out, and what does not fit is named."""

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.config import ConfigError, from_table, to_table, to_toml


class Shape:
    """A family of dataclasses picked by `kind`."""

    @classmethod
    def choices(cls):
        return {"circle": Circle, "box": Box}


@dataclass(frozen=True)
class Circle(Shape):
    kind: ClassVar[str] = "circle"
    radius: float = 1.0


@dataclass(frozen=True)
class Box(Shape):
    kind: ClassVar[str] = "box"
    sides: tuple[float, ...] = (1.0, 2.0)

    def __post_init__(self):
        if any(side <= 0 for side in self.sides):
            raise ValueError(f"sides = {self.sides}: expected positive numbers")


@dataclass(frozen=True)
class Inner:
    number: int
    name: str = "x"
    flag: bool = False


@dataclass(frozen=True, kw_only=True)
class Outer:
    shape: Shape
    inner: Inner = field(default_factory=lambda: Inner(1))
    rate: float | None = None
    test: int | float | None = None
    mode: Literal["slow", "fast"] = "slow"
    labels: tuple[str, ...] = ()
    target: str | tuple[str, ...] = "y"
    classes: int | tuple[str, ...] | None = None
    levels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def through_toml(value):
    text = to_toml(to_table(value))
    return from_table(type(value), tomllib.loads(text), "plan")


# Everything TOML can carry: all of Unicode but surrogates.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
numbers = st.floats(allow_nan=False)
shapes = st.one_of(
    st.builds(Circle, numbers),
    st.builds(Box, st.lists(st.floats(min_value=1e-300), max_size=4).map(tuple)),
)
outers = st.builds(
    Outer,
    shape=shapes,
    inner=st.builds(Inner, st.integers(), texts, st.booleans()),
    rate=st.none() | numbers,
    test=st.none() | st.integers() | numbers,
    mode=st.sampled_from(["slow", "fast"]),
    labels=st.lists(texts, max_size=3).map(tuple),
    target=texts | st.lists(texts, max_size=3).map(tuple),
    classes=st.none() | st.integers() | st.lists(texts, max_size=3).map(tuple),
    levels=st.dictionaries(texts, st.lists(texts, max_size=2).map(tuple), max_size=3),
    options=st.dictionaries(texts, st.integers() | texts | numbers | st.booleans(), max_size=3),
)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(outers)
def test_everything_survives_the_round_trip(value):
    again = through_toml(value)
    assert again == value
    # Equality lets 1 == 1.0 == True pass: types must survive too (1 row is not a share of 1.0).
    assert repr(again) == repr(value)


@pytest.mark.parametrize(
    "text",
    [
        *("", "plain", 'quo"te', "back\\slash", "new\nline", "\r\n\t\b\f", "\\u0041", "\\"),
        *("\x00\x01\x1f\x7f\x80\x9f", "'''\"\"\"", "# not a comment", "[section]", "a = 1"),
        *("é中\u2028\u2029\ufeff", "\U0001f600 emoji", "\U0010ffff"),
    ],
)
def test_odd_strings_survive_as_values_keys_and_items(text):
    table = {"value": text, "list": [text, text], "section": {text: text}, "a": {text: {text: 1}}}
    assert tomllib.loads(to_toml(table)) == table


@pytest.mark.parametrize(
    "number", [math.inf, -math.inf, 0.1, -0.0, 1e16, 1e-5, 5e-324, 1.7976931348623157e308, 2**53]
)
def test_numbers_survive_to_the_last_bit(number):
    again = tomllib.loads(to_toml({"x": number}))["x"]
    assert again == number
    assert type(again) is type(number)
    assert math.copysign(1, again) == math.copysign(1, number)


def test_not_a_number_stays_not_a_number():
    assert math.isnan(tomllib.loads(to_toml({"x": math.nan}))["x"])


@pytest.mark.parametrize(
    "number", [np.float64(0.1), np.float64("inf"), np.int64(7), np.float32(0.5)]
)
def test_numbers_out_of_arrays_are_written_as_numbers_or_refused(number):
    # A hyperparameter from np.linspace must not leave a folder that cannot be read again.
    try:
        text = to_toml({"x": number})
    except ConfigError:
        return
    assert tomllib.loads(text) == {"x": number.item()}


@pytest.mark.parametrize("item", [None, object(), {1, 2}, b"bytes", 1j, [None], [[object()]]])
def test_what_cannot_be_written_is_refused(item):
    with pytest.raises(ConfigError, match="cannot be written"):
        to_toml({"x": item})


def test_a_string_without_a_unicode_form_is_refused_or_survives():
    # os.fsdecode gives such strings for file names that are not UTF-8.
    try:
        text = to_toml({"x": "\udcff"})
        text.encode()
    except (ConfigError, UnicodeEncodeError):
        return
    assert tomllib.loads(text) == {"x": "\udcff"}


def test_sections_come_after_scalars_and_nest():
    table = {"a": {"b": {"c": 1}, "d": 2}, "e": 3, "f": {}}
    text = to_toml(table)
    assert tomllib.loads(text) == table
    assert text.startswith("e = 3\n")
    assert "[a.b]" in text


def test_a_table_names_its_kind_first():
    assert list(to_table(Circle(2.0)).items()) == [("kind", "circle"), ("radius", 2.0)]


def test_none_is_left_out_and_comes_back_as_the_default():
    table = to_table(Outer(shape=Circle()))
    assert "rate" not in table
    assert from_table(Outer, table, "plan").rate is None


def test_none_where_the_default_is_something_else_is_not_lost():
    @dataclass(frozen=True)
    class Trap:
        limit: float | None = 0.5

    try:
        table = to_table(Trap(None))
    except ConfigError:
        return
    assert from_table(Trap, table, "trap") == Trap(None)


def test_kind_picks_the_class():
    table = {"shape": {"kind": "box", "sides": [3, 4.5]}}
    assert from_table(Outer, table, "plan").shape == Box((3.0, 4.5))


@pytest.mark.parametrize("kind", ["", "Circle", None, 3, ["circle"], {"circle": 1}])
def test_an_unknown_kind_is_refused_with_the_known_ones(kind):
    with pytest.raises(ConfigError, match=r"kind.*box, circle"):
        from_table(Outer, {"shape": {"kind": kind}}, "plan")


def test_a_missing_kind_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"\[plan.shape\].*box, circle"):
        from_table(Outer, {"shape": {"radius": 1.0}}, "plan")


@pytest.mark.parametrize(
    ("table", "place", "key", "known"),
    [
        ({"shape": {"kind": "circle"}, "rats": 1}, "[plan]", "rats", "rate"),
        ({"shape": {"kind": "circle", "sides": [1.0]}}, "[plan.shape]", "sides", "radius"),
        ({"shape": {"kind": "circle"}, "inner": {"numbr": 1}}, "[plan.inner]", "numbr", "number"),
    ],
)
def test_an_unknown_key_is_refused_with_its_place_and_the_known_ones(table, place, key, known):
    with pytest.raises(ConfigError) as caught:
        from_table(Outer, table, "plan")
    message = str(caught.value)
    assert place in message
    assert key in message
    assert known in message


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("rate", "fast", "float"),
        ("rate", True, "float"),
        ("rate", [1.0], "float"),
        ("mode", "medium", "'slow', 'fast'"),
        ("labels", "one", "tuple"),
        ("labels", [1], "str"),
        ("test", True, "int"),
        ("inner", 3, "Inner"),
        ("shape", 3, "Shape"),
        ("levels", {"a": [1]}, "str"),
        ("options", 3, "Mapping"),
    ],
)
def test_a_wrong_type_is_refused_by_name(key, value, expected):
    table = {"shape": {"kind": "circle"}, key: value}
    with pytest.raises(ConfigError) as caught:
        from_table(Outer, table, "plan")
    message = str(caught.value)
    assert f"plan.{key}" in message or f"[plan.{key}]" in message
    assert expected in message


@pytest.mark.parametrize(
    ("key", "value"), [("number", 1.0), ("number", True), ("number", "1"), ("name", 1), ("flag", 1)]
)
def test_scalars_are_not_coerced(key, value):
    with pytest.raises(ConfigError, match=f"inner.{key}"):
        from_table(Inner, {"number": 1, key: value}, "inner")


def test_an_integer_is_a_fine_float():
    assert from_table(Circle, {"kind": "circle", "radius": 2}, "c") == Circle(2.0)
    radius = from_table(Circle, {"kind": "circle", "radius": 2}, "c").radius
    assert isinstance(radius, float)


def test_an_integer_too_large_for_a_float_is_refused():
    with pytest.raises(ConfigError):
        from_table(Circle, {"kind": "circle", "radius": 10**400}, "c")


def test_missing_keys_and_failed_checks_name_the_table():
    with pytest.raises(ConfigError, match=r"\[plan\].*shape"):
        from_table(Outer, {}, "plan")
    with pytest.raises(ConfigError, match=r"\[plan.shape\].*positive"):
        from_table(Outer, {"shape": {"kind": "box", "sides": [-1.0]}}, "plan")
    with pytest.raises(ConfigError, match=r"\[i\].*number"):
        from_table(Inner, {}, "i")


def test_a_config_error_is_a_value_error():
    assert issubclass(ConfigError, ValueError)


def test_the_table_given_is_not_changed():
    table = {"shape": {"kind": "circle"}, "inner": {"number": 3}}
    from_table(Outer, table, "plan")
    assert table == {"shape": {"kind": "circle"}, "inner": {"number": 3}}


def test_fields_that_are_not_for_init_are_not_written_or_read():
    @dataclass(frozen=True)
    class Derived:
        base: int
        double: int = field(init=False, default=0)

    assert to_table(Derived(2)) == {"base": 2}
    with pytest.raises(ConfigError, match="double"):
        from_table(Derived, {"base": 2, "double": 4}, "d")


def test_the_real_samplers_and_plans_round_trip():
    from coterie.planning.plan import Privacy
    from coterie.privacy.sampling import Everyone, FixedSize, Poisson, Sampler

    for sampler in (Everyone(), Poisson(), Poisson(2.5, True), FixedSize(3), FixedSize(4, True)):
        table = tomllib.loads(to_toml(to_table(sampler)))
        assert from_table(Sampler, table, "sampler") == sampler
    for privacy in (
        Privacy(epsilon=math.inf),
        Privacy(noise_multiplier=1.1, delta=1e-7, relation="replace", clip=0.5, budget=(1.0, 2.0)),
    ):
        assert through_toml(privacy) == privacy
    assert dataclasses.is_dataclass(Privacy)
