"""From the text of a cell to a number, a level or a date; and which texts are gaps.

The readers of tables and `coterie init` use the same functions, so a proposal reads its file. Every
function takes a column of text as an Arrow array, and none depends on other rows.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

GAPS = (
    *("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "NaT", "null", "NULL", "Null", "None"),
    *("?", "-", "--", ".", "#NULL!", "#DIV/0!", "#VALUE!", "#REF!", "#NUM!", "#NAME?"),
)
"""The texts that stand for a missing value in every column."""
OTHER = "other"
"""The level that takes every value that is not declared."""
ISO = "%Y-%m-%d"
FORMATS = (
    *(ISO, "%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%d-%m-%Y", "%m-%d-%Y", "%Y/%m/%d", "%Y.%m.%d"),
    *("%d/%m/%y", "%m/%d/%y", "%d.%m.%y", "%Y%m%d", "%d %b %Y", "%d-%b-%Y", "%d %B %Y"),
    *("%b %d, %Y", "%B %d, %Y"),
)
"""The formats of dates that are recognised."""

_SPACES = " '\u2019\u00a0\u202f\u2009"  # that separate thousands, beside a comma or a point
_MONEY = r"[$€£¥₹]|EUR|USD|GBP|CHF|JPY|CNY|INR|CAD|AUD|NZD|SEK|NOK|DKK|PLN|CZK|HUF|BRL|MXN|ZAR|KRW"
_TAIL = r"([eE][+-]?\d+)?"
_POINT = (
    rf"^[+-]?([1-9]\d{{0,2}}([,{_SPACES}]\d{{3}})+(\.\d*)?|[1-9]\d?(,\d{{2}})+,\d{{3}}(\.\d*)?"
    rf"|\d+\.?\d*|\.\d+){_TAIL}$"
)
_COMMA = rf"^[+-]?([1-9]\d{{0,2}}([.{_SPACES}]\d{{3}})+(,\d*)?|\d+,?\d*|,\d+){_TAIL}$"
_INFINITE = r"^[+-]?(inf|infinity)$"
_CLOCK = r"[T\s]+\d{1,2}:\d{2}.*$"  # a time of day after a date
_PARTS = {
    "%d": r"(?P<day>\d{1,2})",
    "%m": r"\d{1,2}",
    "%Y": r"\d{4}",
    "%y": r"\d{2}",
    "%b": r"[[:alpha:]]{3}",
    "%B": r"[[:alpha:]]{3,}",
}
TEXT = pa.string()


def trimmed(text: pa.Array) -> pa.Array:
    """Return text without spaces around it."""
    return pc.utf8_trim_whitespace(text)


def is_gap(text: pa.Array, more: Sequence[str] = ()) -> pa.Array:
    """Return which values of trimmed text are gaps; `more` are declared for the column."""
    return pc.or_(pc.is_in(text, pa.array([*GAPS, *more], TEXT)), pc.is_null(text))


def read_numbers(
    text: pa.Array, *, commas: bool = False, gaps: Sequence[str] = (), unit: str = ""
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return numbers, NaN for gaps, and which values are no numbers.

    Signs of currency and percent are dropped, and so are separators of thousands and a declared
    unit after the number. `commas` is the reading of "1,234" as 1.234 and of "1.234" as 1234; what
    has one reading only is read alike.
    """
    if not commas and not unit:
        with suppress(pa.ArrowInvalid):  # plain numbers: nearly every column, in half the time
            values = _numpy(pc.cast(text, pa.float64()))
            return drop_numbers(values, gaps), np.zeros(len(values), dtype=np.bool_)
    text = trimmed(text)
    if unit:
        text = pc.replace_substring_regex(text, rf"(?i)(\d)\s*{re.escape(unit)}$", r"\1")
    known = pc.if_else(is_gap(text, gaps), pa.scalar(None, TEXT), text)
    try:
        if commas:
            raise pa.ArrowInvalid  # a plain cast would take separators of thousands for points
        values = pc.cast(known, pa.float64())
    except pa.ArrowInvalid:
        values = _cleaned(known, commas)
    wrong = _numpy(pc.and_(pc.is_valid(known), pc.is_null(values)))
    return drop_numbers(_numpy(values), gaps), wrong


def decimal_signs(text: pa.Array) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which texts are numbers with a decimal comma only, and with a point only."""
    if not pc.any(pc.match_substring(text, ",")).as_py():
        point = _fits(text, r"\d*\.\d+") & ~_fits(text, _COMMA)
        return np.zeros(len(text), dtype=bool), point
    comma, point = _fits(_unmarked(text), _COMMA), _fits(_unmarked(text), _POINT)
    return comma & ~point, point & ~comma


def _fits(text: pa.Array, pattern: str) -> NDArray[np.bool_]:
    return _numpy(pc.fill_null(pc.match_substring_regex(text, pattern), False))


def drop_numbers(values: NDArray[Any], gaps: Sequence[str]) -> NDArray[np.float64]:
    """Return values with NaN for the numbers among declared gaps, such as -999."""
    codes = [number for number in map(_number, gaps) if number is not None]
    return np.where(np.isin(values, codes), np.nan, values) if codes else values


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _unmarked(text: pa.Array) -> pa.Array:
    """Return text without signs of currency and percent, and with a plain minus."""
    for pattern, plain in (
        (r"[\x{2212}\x{2013}]", "-"),
        (r"^\((.*)\)$", r"-\1"),
        (rf"^([+-]?)\s*({_MONEY})[\s\x{{a0}}\x{{202f}}]*", r"\1"),
        (rf"[\s\x{{a0}}\x{{202f}}]*(%|{_MONEY})$", ""),
    ):
        text = pc.replace_substring_regex(text, pattern, plain)
    return text


def _cleaned(text: pa.Array, commas: bool) -> pa.Array:
    """Return numbers in other spellings; null for what is none."""
    text, found = _unmarked(text), pa.nulls(len(text), TEXT)
    for pattern, drop, point in _readings(commas):
        fits = pc.match_substring_regex(text, pattern, ignore_case=True)
        one = pc.replace_substring_regex(text, drop, "")
        one = one if point is None else pc.replace_substring(one, point, ".")
        found = pc.coalesce(found, pc.if_else(fits, one, pa.scalar(None, TEXT)))
    return pc.cast(found, pa.float64())


def _readings(commas: bool) -> list[tuple[str, str, str | None]]:
    """Return patterns of numbers, what is dropped from these, and their decimal sign."""
    point, comma = (_POINT, f"[,{_SPACES}]", None), (_COMMA, f"[.{_SPACES}]", ",")
    return [*((comma, point) if commas else (point, comma)), (_INFINITE, "^$", None)]


def spellings(levels: Sequence[str]) -> Mapping[str, int]:
    """Return the texts that are read as each level: as declared, in other cases, 1.0 for 1.

    >>> spellings(("yes", "No"))["YES"], spellings(("1", "2"))["2.0"]
    (0, 1)
    """
    found = {level: code for code, level in enumerate(levels)}
    for code, level in enumerate(levels):
        plain = level.strip()
        whole = plain.removesuffix(".0")
        more = [plain, plain.lower(), plain.upper(), plain.title(), plain.capitalize()]
        if whole.removeprefix("-").isdecimal():
            more += [whole, f"{whole}.0"]
        for text in more:
            found.setdefault(text, code)
    return found


def read_levels(
    text: pa.Array, levels: Sequence[str], *, gaps: Sequence[str] = ()
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the number of each value's level, -1 for a gap or another value, and the gaps."""
    known, text = spellings(levels), trimmed(text)
    places = pc.fill_null(pc.index_in(text, pa.array(list(known), TEXT)), -1)
    codes = np.array([*known.values(), -1], dtype=np.int64)[_numpy(places)]
    declared = _numpy(pc.is_in(text, pa.array(list(gaps), TEXT)))
    gap = _numpy(is_gap(text)) & (codes < 0) | declared
    return np.where(gap, -1, codes), gap


def read_dates(
    text: pa.Array, form: str = "", *, gaps: Sequence[str] = ()
) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Return dates without their time of day, null for gaps, and which values are no dates.

    Several formats, "%d.%m.%Y | %d/%m/%Y", are tried in turn. ISO dates are read by all.
    """
    text = trimmed(text)
    known = pc.if_else(is_gap(text, gaps), pa.scalar(None, TEXT), text)
    found = pa.nulls(len(text), pa.date32())
    for one in formats(form):
        found = pc.coalesce(found, _dates(known, one))
    return found, _numpy(pc.and_(pc.is_valid(known), pc.is_null(found)))


def formats(form: str) -> tuple[str, ...]:
    """Return the formats that a declared one stands for, ISO among them.

    >>> formats("%d.%m.%Y | %d/%m/%Y"), formats("")
    (('%d.%m.%Y', '%d/%m/%Y', '%Y-%m-%d'), ('%Y-%m-%d',))
    """
    given = [one.strip() for one in form.split("|")]
    return tuple(dict.fromkeys([*filter(None, given), ISO]))


def _dates(text: pa.Array, form: str) -> pa.Array:
    day = text if "%H" in form else pc.replace_substring_regex(text, _CLOCK, "")
    if form == ISO:
        try:
            return pc.cast(day, pa.date32())  # five times as fast, and refuses all else
        except pa.ArrowInvalid:
            pass
    stamps = pc.strptime(day, format=form, unit="s", error_is_null=True)
    if (pattern := date_pattern(form)) is not None:
        # The parser takes 31 February for 3 March, and a year of two digits for one of four.
        parts = pc.extract_regex(day, pattern)
        number = pc.cast(pc.struct_field(parts, "day"), pa.int64())
        stamps = pc.if_else(pc.equal(number, pc.day(stamps)), stamps, pa.scalar(None, stamps.type))
    return pc.cast(stamps, pa.date32(), safe=False)


def looks_dated(text: pa.Array, forms: Sequence[str]) -> NDArray[np.bool_]:
    """Return which texts look like dates in one of these formats; read_dates has the last word."""
    patterns = [date_pattern(form) or "" for form in forms]
    plain = "|".join(pattern[1:-1].replace("?P<day>", "") for pattern in patterns)
    return _fits(text, f"^({plain})({_CLOCK[:-1]})?$")


def date_pattern(form: str) -> str | None:
    """Return the regular expression of a format; None for a format with other parts."""
    pattern = form
    for part, text in _PARTS.items():
        pattern = pattern.replace(part, text)
    if form == "%Y%m%d":  # nothing separates its parts
        pattern = pattern.replace("{1,2}", "{2}")
    return None if "%" in pattern or "<day>" not in pattern else f"^{pattern.replace('.', '[.]')}$"


def parts_of(days: pa.Array, origin: date) -> NDArray[np.float64]:
    """Return year, month, weekday and days since the origin of dates, NaN for a gap."""
    since = pc.subtract(pc.cast(days, pa.int32()), (origin - date(1970, 1, 1)).days)
    parts = (pc.subtract(pc.year(days), origin.year), pc.month(days), pc.day_of_week(days), since)
    return np.column_stack([_numpy(pc.cast(part, pa.float64())) for part in parts])


def _numpy(column: pa.Array) -> NDArray[Any]:
    return np.asarray(column.to_numpy(zero_copy_only=False))
