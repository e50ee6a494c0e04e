"""Look at a table of rows, list its problems, and propose how to read it (`coterie init`).

One pass over the file collects facts of every column; torch is not imported. The facts come from
the rows of clients: levels, ranges and classes that are proposed here are private until the user
accepts them as public knowledge. `Source.accepted` then states so with every guarantee.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from functools import cached_property
from html import escape
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from coterie.core.suggest import counted, did_you_mean, listed
from coterie.data.cells import (
    FORMATS,
    ISO,
    OTHER,
    TEXT,
    decimal_signs,
    is_gap,
    looks_dated,
    read_dates,
    read_numbers,
    spellings,
    trimmed,
)
from coterie.data.config import Source
from coterie.data.federated import DataError
from coterie.data.load import open_rows
from coterie.data.tables import DATE_PARTS, FILE, INDEX, feature_names, is_number, is_text

READ_OFF = " read off the rows and accepted as public"
"""How a fact that was read off the rows ends."""
Kind = Literal[
    "number",
    "category",
    "date",
    "dates",
    "id",
    "constant",
    "empty",
    "text",
    "code",
    "mixed",
    "other",
]
FEW_ROWS = 5
_LEVELS = 30  # levels that are declared at most; further ones are "other"
_COUNTED = 100_000  # different values of a column that are counted
_SAMPLED = 1 << 18  # values of a column whose quantiles are taken
_MERGED = 200  # different values of a column whose spellings are looked at
_ODD = 1000  # different values that are no numbers, or no dates, that are counted
_CLASSES = 20
_FEW = 6  # different whole numbers that may be codes
_TYPED = 0.9  # share of numbers, or of dates, from which a column is one of them
_NONE, _OFTEN = "None", 0.05  # a level if this share of the rows has it, else a gap
_HINTED, _MOSTLY = 0.1, 0.4  # shares of them in its first rows below which a column is none
_SEEN = 20_000  # rows from which the larger of both holds
_CODES = (-9.0, *(sign * (10.0**digits - 1) for digits in range(2, 10) for sign in (-1, 1)))
_CODED_DATES = (
    *("0001-01-01", "1111-11-11", "1800-01-01", "1899-12-30", "1899-12-31", "1900-01-01"),
    *("1970-01-01", "2099-12-31", "2999-12-31", "9999-12-31"),
)
_MARKERS = (
    *("unknown", "unk", "missing", "not available", "not known", "not recorded", "no data", "nil"),
    *("none", "na", "n.a.", "n.a", "nd", "n.d.", "n.d", "n/d", "n/k", "nk", "tbd", "undefined"),
    *("unbekannt", "k.a.", "inconnu", "desconocido", "sconosciuto", "*", "**", "***", "x", "---"),
)
_CLIENT = (
    *("client", "hospital", "clinic", "school", "site", "center", "centre", "bank", "branch"),
    *("district", "device", "user", "ward", "practice", "store", "region", "station", "subject"),
    *("krankenhaus", "klinik", "schule", "filiale", "standort", "hôpital", "école", "ziekenhuis"),
)
_TARGET = ("y", "target", "label", "outcome", "class", "response", "score")
_YES = (
    *("1", "yes", "true", "positive", "case", "died", "dead", "y", "t"),
    *("ja", "j", "oui", "o", "si", "sí", "sì", "sim", "tak", "wahr", "vrai"),
)
_NO = ("0", "no", "none", "never", "absent", "negative", "nein", "non", "nee", "nie", "não")
_CODED = re.compile(
    r"(^|[\W_\d])((zip|post|postal)?_?code|zip|plz|postleitzahl|icd|sex|gender|geschlecht|sexe"
    r"|race|ethnicity|type|kind|category|kategorie|group|gruppe|status|region|ward|unit|department"
    r"|dept|specialty|speciality|diagnosis)([\W_\d]|$)",
    re.IGNORECASE,
)
_PART = re.compile(r"(part|chunk|shard|data|train|test)[\W_]*\d+([\W_]of[\W_]\d+)?$")
_WRITTEN_DATE = re.compile(r"\b\d{1,2}\D{1,3}[^\W\d]{3,}\D{1,3}\d{4}\b")
_CLOCK = re.compile(r"\d{1,2}:\d{2}(:\d{2})?( ?[AaPp][Mm])?")
_ID = re.compile(
    r"(^|[\W_])(id|uid|uuid|guid|key|index|idx|nr|no|number|code)([\W_]|$)|[a-z]I[Dd]$"
)
_UNIT = re.compile(r"[+-]?\d[\d.,]*\s*((?:[^\W\d_%]|°)[^\d]{0,11}[23]?)")


@dataclass
class Column:
    """What is collected of one column, batch by batch."""

    name: str
    rows: int = 0
    gaps: int = 0
    nones: int = 0  # gaps that are written "None", which may be a level
    numbers: int = 0
    commas: int = 0  # numbers with a decimal comma, and with a decimal point
    points: int = 0
    values: Counter[str] = field(default_factory=Counter)
    overflowed: bool = False  # more different values than are counted
    odd: Counter[str] = field(default_factory=Counter)  # no numbers
    dateless: Counter[str] = field(default_factory=Counter)  # no dates in any format left
    sample: list[pa.Array] = field(default_factory=list)
    step: int = 1  # every step-th value is in the sample
    fits: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(FORMATS, 0)))
    type: str = "text"
    firsts: dict[str | None, int] | None = field(default_factory=dict)  # first row of each value
    partition: int = 0  # a fingerprint of which rows have equal values

    @property
    def known(self) -> int:
        """How many rows have a value."""
        return self.rows - self.gaps

    def extend(self, values: pa.Array) -> None:
        """Add the values of a batch."""
        text = self._texts(values)
        gap = is_gap(text)
        self._extend_partition(pc.if_else(gap, pa.scalar(None, TEXT), text))
        self.rows += len(values)
        found = text.filter(pc.invert(gap))
        self.gaps += len(text) - len(found)
        self.nones += pc.sum(pc.equal(text, _NONE)).as_py() or 0
        if not len(found):
            return
        texts, counts = found, np.ones(len(found), dtype=np.int64)
        if not self.overflowed:
            counted = pc.value_counts(found)
            texts, counts = counted.field(0), np.asarray(counted.field(1))
            self.values.update(dict(zip(texts.to_pylist(), counts.tolist(), strict=True)))
            self.overflowed = len(self.values) > _COUNTED
        self._extend_sample(found)
        if self.type in ("text", "number"):
            self._extend_numbers(texts, counts)
        if self.type in ("text", "date") and self.fits:
            self._extend_dates(texts, counts)

    def _texts(self, values: pa.Array) -> pa.Array:
        """Return values as text: dates in ISO form; other types than these are gaps."""
        kind = values.type
        if pa.types.is_timestamp(kind) and kind.tz is not None:
            values = pc.local_timestamp(values)
        if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
            self.type, values = "date", pc.cast(values, pa.date32(), safe=False)
        elif pa.types.is_boolean(kind):
            self.type = "boolean"
        elif is_number(kind) and not pa.types.is_null(kind):
            self.type = "number"
            values = pc.cast(values, pa.float64()) if pa.types.is_float16(kind) else values
        elif not (pa.types.is_null(kind) or is_text(kind)):
            self.type, values = "other", pa.nulls(len(values), TEXT)
        return trimmed(pc.cast(values, TEXT))

    def _extend_partition(self, text: pa.Array) -> None:
        """Add to the fingerprint; two columns have the same one if they tell the same rows apart.

        Columns where nearly every row has a value of its own have none.
        """
        if self.firsts is None or not len(text):
            return
        encoded = pc.dictionary_encode(text, null_encoding="encode")
        codes = np.asarray(encoded.indices)
        places = np.unique(codes, return_index=True)[1] + self.rows
        words = encoded.dictionary.to_pylist()
        first = [
            self.firsts.setdefault(word, int(at)) for word, at in zip(words, places, strict=True)
        ]
        seen = self.rows + len(text)
        if len(self.firsts) > min(_COUNTED, seen if seen < _ODD else _TYPED * seen):
            self.firsts = None
            return
        draws = np.random.default_rng(self.rows).integers(1 << 63, size=len(text), dtype=np.uint64)
        whole = int((np.array(first, dtype=np.uint64)[codes] * draws).sum())
        self.partition = (self.partition + whole) % (1 << 64)

    def _extend_sample(self, found: pa.Array) -> None:
        self.sample.append(found.take(pa.array(np.arange(0, len(found), self.step))))
        while sum(map(len, self.sample)) > _SAMPLED:
            self.step *= 2
            self.sample = [part.take(pa.array(np.arange(0, len(part), 2))) for part in self.sample]

    def _extend_numbers(self, texts: pa.Array, counts: NDArray[np.int64]) -> None:
        if self._hardly(self.numbers, int(counts.sum())):
            return
        _, wrong = read_numbers(texts)
        self.numbers += int(counts[~wrong].sum())
        _count(self.odd, texts, counts, wrong)
        if self.type == "text":
            commas, points = decimal_signs(texts)
            self.commas += int(counts[commas].sum())
            self.points += int(counts[points].sum())

    def _extend_dates(self, texts: pa.Array, counts: NDArray[np.int64]) -> None:
        total = int(counts.sum())
        begun = self.known > total
        if not begun and counts[looks_dated(texts, FORMATS)].sum() < _HINTED * total:
            self.fits.clear()
        if not self.fits:
            return
        iso = read_dates(texts)[1]
        none = iso.copy()
        self.fits[ISO] += int(counts[~iso].sum())
        for form in sorted(FORMATS[1:], key=lambda form: -self.fits[form]):
            # every format reads ISO too; one that was not seen yet may read what others do not
            places = np.flatnonzero(none if begun and not self.fits[form] else iso)
            if len(places):
                read = places[~read_dates(texts.take(pa.array(places)), form)[1]]
                self.fits[form] += int(counts[read].sum())
                none[read] = False
        if self._hardly(sum(self.fits.values()), 0):
            self.fits.clear()
        _count(self.dateless, texts, counts, none)

    def _hardly(self, typed: int, added: int) -> bool:
        """Return whether few of the rows before the last ones were numbers, or dates."""
        before = self.known - added
        least = _MOSTLY if before > _SEEN else _HINTED if before > _ODD else 0
        return typed < least * before


def _count(
    found: Counter[str], texts: pa.Array, counts: NDArray[np.int64], chosen: NDArray[np.bool_]
) -> None:
    """Count the chosen texts, as long as they are few."""
    if chosen.any() and len(found) <= _ODD:
        named = texts.filter(pa.array(chosen)).to_pylist()
        found.update(dict(zip(named, counts[chosen].tolist(), strict=True)))


@dataclass(frozen=True)
class Facts:
    """What a column holds, once all of it was seen.

    Attributes:
        kind: What it becomes.
        rows: How many rows there are, and how many have no value.
        values: How often each value occurs; spellings of one value are one.
        numbers: A sample of the numbers, or of days since 1970 of dates.
        missing: Values that stand for a gap in this column.
        commas: Whether numbers have a decimal comma.
        forms: The formats of dates that the column has.
        unsure: Whether day and month could be the other way round.
        odd: An example of what is no number.
        unit: The unit after each number.
        plain: How often each value occurs as it is written, without gaps as in every column.
        partition: A fingerprint of which rows have equal values; None where all differ.
    """

    name: str
    kind: Kind
    rows: int
    gaps: int
    values: Counter[str]
    numbers: NDArray[np.float64]
    missing: tuple[str, ...] = ()
    commas: bool = False
    forms: tuple[str, ...] = ()
    unsure: bool = False
    odd: str = ""
    unit: str = ""
    plain: Counter[str] = field(default_factory=Counter)
    partition: int | None = None

    @property
    def known(self) -> int:
        """How many rows have a value."""
        return self.rows - self.gaps

    @property
    def share(self) -> str:
        """The share of rows without a value, as text."""
        return f"{max(0.01, self.gaps / self.rows):.0%}"

    @cached_property
    def whole(self) -> bool:
        """Whether all numbers are whole."""
        return bool((np.trunc(self.numbers) == self.numbers).all())

    @property
    def range(self) -> tuple[float, float]:
        """A round range of the numbers, without values that lie far out."""
        return _rounded(*_fenced(self.numbers))


def _fenced(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the least and largest value that lies within twice the spread of the middle 90 %."""
    values = values[np.isfinite(values)]
    if not len(values):
        return 0.0, 0.0
    low, high = np.quantile(values, (0.05, 0.95))
    reach = 2 * (high - low) or np.inf
    near = values[(values >= low - reach) & (values <= high + reach)]
    return float(near.min()), float(near.max())


def facts_of(column: Column, *, commas: bool = False) -> Facts:
    """Return what a column holds; `commas` decides between "1.234" and "1,234" where both fit."""
    if column.points != column.commas:
        commas = column.commas > column.points
    shown = next(iter(column.odd), "")
    common: dict[str, Any] = {"name": column.name, "rows": column.rows, "commas": commas}
    common |= {"odd": shown[:40], "plain": column.values}
    common["partition"] = None if column.firsts is None else column.partition
    if column.type == "other" or not column.known:
        kind: Kind = "other" if column.type == "other" else "empty"
        return Facts(kind=kind, gaps=column.rows, values=Counter(), numbers=np.zeros(0), **common)
    for build in (_date_facts, _number_facts, _text_facts):
        found = build(column, common)
        if found is not None:
            return found
    raise AssertionError("every column is text, if nothing else")


def _date_facts(column: Column, common: dict[str, Any]) -> Facts | None:
    """Return the facts of a column of dates; None for other columns."""
    if column.type not in ("text", "date") or not column.fits:
        return None
    forms, typed, unsure = _date_forms(column.fits)
    form = " | ".join(forms)
    other = column.known - typed - sum(column.dateless.values())  # in another order of day, month
    if column.type == "text" and (
        not _is_typed(column, typed, column.dateless) or other > (1 - _TYPED) * column.known / 2
    ):
        return None
    days = pc.cast(read_dates(_sampled(column), form)[0], pa.int32()).drop_null().to_numpy()
    days = days.astype(np.float64)
    codes = {_number_of(date.fromisoformat(code)) for code in _CODED_DATES}
    codes = {code for code in codes if code in days and _is_far(code, days)}
    values = pa.array(list(column.values), TEXT)
    dates, wrong = read_dates(values, form)
    numbers = pc.fill_null(pc.cast(dates, pa.int32()), 0).to_numpy()
    odd = set(values.filter(pa.array(wrong | np.isin(numbers, list(codes)))).to_pylist())
    days = days[~np.isin(days, list(codes))]
    return _with_gaps(column, "date", days, odd, {**common, "forms": forms, "unsure": unsure})


def _date_forms(fits: Mapping[str, int]) -> tuple[tuple[str, ...], int, bool]:
    """Return the formats of a column, how many dates these read, and whether the order is unsure.

    Every format reads ISO dates too. Of two orders of day and month the one that reads more is
    taken; where both read all, the one of the other formats, or else the day is first.

    >>> _date_forms({ISO: 5, "%d/%m/%Y": 3, "%m/%d/%Y": 3, "%d.%m.%Y": 0})
    (('%d/%m/%Y',), 8, True)
    >>> _date_forms({"%d.%m.%Y": 1, "%m/%d/%Y": 3, "%d/%m/%Y": 2})
    (('%m/%d/%Y', '%d.%m.%Y'), 4, False)
    """
    alike: dict[str, list[str]] = {}
    for form, count in fits.items():
        if form != ISO and count:
            alike.setdefault(re.sub("%[dm]", "%d", form.replace("%B", "%b")), []).append(form)
    best = [[f for f in each if fits[f] == max(fits[g] for g in each)] for each in alike.values()]
    sure = [each[0] for each in best if not _is_unsure(each)]
    month_first = any(form.startswith("%m") for form in sure)
    chosen = [each[-1] if _is_unsure(each) and month_first else each[0] for each in best]
    chosen.sort(key=lambda form: -fits[form])
    read = sum(fits[form] for form in chosen) + fits.get(ISO, 0)
    unsure = any(map(_is_unsure, best)) and not sure
    return tuple(chosen) or (ISO,), read, unsure


def _is_unsure(forms: Sequence[str]) -> bool:
    """Return whether formats that read the same dates have day and month in another order."""
    return len({form.startswith("%m") for form in forms}) > 1


def _number_of(day: date) -> int:
    return (day - date(1970, 1, 1)).days


def _number_facts(column: Column, common: dict[str, Any]) -> Facts | None:
    """Return the facts of a column of numbers; None for other columns."""
    if column.type not in ("text", "number") or not (column.numbers or column.odd):
        return None
    unit, odd, typed = _unit(column.odd), column.odd, column.numbers
    if not unit and not _is_typed(column, typed, odd):
        return None
    numbers, wrong = read_numbers(_sampled(column), commas=common["commas"], unit=unit)
    if not unit and _is_coded(column):
        return None
    if unit:  # the sample stands for the column
        odd = Counter(value for value in column.odd if not _is_number(value, unit))
        typed = round(column.known * (1 - wrong.mean()))
    few = len(column.values) <= 2 * _CLASSES and not column.overflowed
    marked = all(value.lower() in _MARKERS for value in odd)
    if not _is_typed(column, typed, odd) or (few and odd and not marked and not _digits(odd)):
        return None
    numbers = numbers[np.isfinite(numbers)]
    codes = _codes(numbers)
    numbers = numbers[~np.isin(numbers, codes)]
    missing = {*odd, *(f"{code:.0f}" for code in codes)}
    found = _with_gaps(column, "number", numbers, missing, {**common, "unit": unit})
    return replace(found, kind="id") if found.kind == "number" and _is_id(column, found) else found


def _is_coded(column: Column) -> bool:
    """Return whether whole numbers are codes by their column's name, such as "zip" or "sex"."""
    values = [value.removesuffix(".0") for value in column.values]
    whole = all(value.isdecimal() for value in values) and len(set(values)) > 2
    return whole and not column.overflowed and _CODED.search(column.name) is not None


def _unit(odd: Counter[str]) -> str:
    """Return the one unit that nearly all odd values end with, after a number; "" for none."""
    units = Counter[str]()
    for value, count in odd.items():
        match = _UNIT.fullmatch(value)
        units[match[1].lower() if match else ""] += count
    unit, most = next(iter(units.most_common(1)), ("", 0))
    return unit if most >= _TYPED * sum(odd.values()) else ""


def _is_number(value: str, unit: str) -> bool:
    return not read_numbers(pa.array([value], TEXT), unit=unit)[1].any()


def _text_facts(column: Column, common: dict[str, Any]) -> Facts:
    """Return the facts of any other column."""
    column = _with_none(column)
    codes = {
        value
        for value in column.values
        if value in {f"{code:.0f}" for code in _CODES} and column.numbers < column.known / 2
    }
    found = _with_gaps(column, "category", np.zeros(0), codes, common)
    if found.kind != "category":
        return found
    most = sum(count for _, count in found.values.most_common(_LEVELS))
    kind: Kind = "category" if len(found.values) <= 2 * _CLASSES else "text"
    if kind == "text" and 2 * most >= found.known and len(found.values) < found.known / 2:
        kind = "category"
    if _is_coded(column) and len(found.values) > _CLASSES:
        kind = "code"
    if column.numbers > column.known / 2 and _digits(column.odd):
        kind = "mixed"
    elif column.type == "text" and 2 * sum(column.fits.values()) > column.known:
        kind = "dates"
    elif len(column.values) == column.known > FEW_ROWS and column.type == "text":
        kind = "id"
    return replace(found, kind=kind)


def _with_none(column: Column) -> Column:
    """Return a column of text with "None" as a value, where it is as frequent as one."""
    if column.type != "text" or column.nones < _OFTEN * (column.known + column.nones):
        return column
    values = column.values + Counter({_NONE: column.nones})
    return replace(column, values=values, gaps=column.gaps - column.nones)


def _with_gaps(
    column: Column,
    kind: Kind,
    numbers: NDArray[np.float64],
    odd: set[str],
    common: dict[str, Any],
) -> Facts:
    """Return facts with the odd values as gaps; a column of one value has nothing to tell."""
    plain = column.values
    if odd:
        plain = Counter({value: n for value, n in plain.items() if not _is_odd(value, odd)})
    values = merged(plain, numbers=kind == "number")
    lost = sum(column.values.values()) - sum(plain.values())
    gaps = column.gaps + lost
    if len(values) <= 1 and not column.overflowed:
        gappy = gaps >= FEW_ROWS and len(values) == 1 and kind != "date"
        kind = "category" if gappy else "constant" if values else "empty"
    return Facts(
        kind=kind,
        gaps=gaps,
        values=values,
        numbers=numbers,
        missing=tuple(sorted(odd)),
        **common,
    )


def _is_odd(value: str, odd: set[str]) -> bool:
    return value in odd or (value.endswith(".0") and value[:-2] in odd)


def _is_typed(column: Column, typed: int, odd: Counter[str]) -> bool:
    """Return whether nearly all values are of a type, or all but a few words for a gap."""
    if typed == column.known or typed < column.known / 2 or len(odd) > 2 * _CLASSES:
        return typed == column.known
    codes = {f"{code:.0f}" for code in _CODES}
    words = {v for v in odd if v in codes or not any(sign.isdigit() for sign in v)}
    marked = all(value.lower() in (*_MARKERS, *codes) for value in words) or len(words) <= 3
    rest = sum(count for value, count in odd.items() if value not in words)
    return typed >= _TYPED * column.known or (marked and rest <= (1 - _TYPED) * column.known / 2)


def _digits(odd: Counter[str]) -> bool:
    """Return whether most odd values hold digits, as numbers with units do."""
    held = sum(count for value, count in odd.items() if any(sign.isdigit() for sign in value))
    return 2 * held > sum(odd.values())


def _sampled(column: Column) -> pa.Array:
    return pa.chunked_array(column.sample, TEXT).combine_chunks()


def _codes(values: NDArray[np.float64]) -> list[float]:
    """Return numbers such as -999 that lie farther out than all others are apart."""
    found: list[float] = []
    while True:
        rest = values[~np.isin(values, found)]
        if len(np.unique(rest)) < 3:
            return found
        ends = [code for code in (rest.min(), rest.max()) if code in _CODES]
        far = [code for code in ends if _is_far(code, rest) and (rest == code).sum() > 1]
        if not far:
            return found
        found += far[:1]


def _is_far(code: float, values: NDArray[Any]) -> bool:
    others = values[values != code]
    apart = float(others.max()) - float(others.min()) if len(others) else np.inf
    return bool(len(others)) and float(np.abs(others - code).min()) > apart


def _is_id(column: Column, found: Facts) -> bool:
    """Return whether whole numbers are all different: dense as numbers of rows, or called an id."""
    numbers = found.numbers
    unique = len(np.unique(numbers)) == len(numbers) > FEW_ROWS and found.whole
    if not unique or (not column.overflowed and len(column.values) < column.known):
        return False
    return bool(np.ptp(numbers) < 2 * column.known) or _ID.search(column.name) is not None


def merged(values: Counter[str], *, numbers: bool = False) -> Counter[str]:
    """Return values with spellings of one value counted as the most common of them.

    >>> merged(Counter({"yes": 5, "YES": 1, "no": 3}))
    Counter({'yes': 6, 'no': 3})
    """
    found: Counter[str] = Counter()
    if len(values) > _MERGED:
        return values
    known: dict[str, str] = {}
    for text, count in sorted(values.items(), key=lambda pair: (-pair[1], pair[0])):
        whole = text.removesuffix(".0")
        value = whole if numbers and whole.lstrip("-").isdecimal() else text
        if value not in known:
            known.update((one, value) for one in spellings((value,)) if one not in known)
        found[known[value]] += count
    return found


@dataclass(frozen=True, repr=False)
class Proposal:
    """How to read a file: the options, why columns are left out, and problems.

    `blocking` problems must be solved first; `problems` are for the user to know.
    """

    source: Source
    rows: int
    clients: int
    columns: Mapping[str, str]  # what each column becomes, in words
    left_out: Mapping[str, str]  # columns that are not used, with the reason
    problems: tuple[str, ...]
    blocking: tuple[str, ...]
    read: tuple[str, ...]  # facts that were read off the rows

    def __repr__(self) -> str:
        solve = f", {len(self.blocking)} to solve first" if self.blocking else ""
        return (
            f"<Proposal: {self.rows:,} rows of {self.clients:,} clients by {self.source.client!r}, "
            f"{self.source.task} of {self.source.target!r}, {len(self.source.features)} columns, "
            f"{len(self.left_out)} left out, {len(self.problems)} notes{solve}>"
        )

    def _repr_html_(self) -> str:
        """Return columns, notes, and what was read off the rows, for a notebook."""
        columns = (
            *self.columns.items(),
            *((n, f"left out: {w}") for n, w in self.left_out.items()),
        )
        table = "".join(
            f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in columns
        )
        lists = {
            "Solve this first": self.blocking,
            "Notes": self.problems,
            "Read off the rows; public once you use this proposal": self.read,
        }
        parts = "".join(
            f"<p><strong>{title}</strong></p><ul>"
            + "".join(f"<li>{escape(text.removesuffix(READ_OFF))}</li>" for text in texts)
            + "</ul>"
            for title, texts in lists.items()
            if texts
        )
        return f"<p>{self.rows:,} rows of {self.clients:,} clients</p><table>{table}</table>{parts}"


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """What the user decides instead of the proposal.

    Attributes:
        client: The client column; None guesses it.
        target: The target column; None guesses it.
        task: The task; None takes it from the target.
        features: The columns to predict from; () is all that can be used.
        categories: Columns that are read as categories, such as codes that are numbers.
    """

    client: str | None = None
    target: str | None = None
    task: Literal["regression", "binary", "multiclass"] | None = None
    features: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()


def inspect(given: Path | Any, **overrides: Any) -> Proposal:
    """Return a proposal for a file or frame; the arguments are those of `Overrides`."""
    return look(given).propose(Overrides(**overrides))


@dataclass(frozen=True)
class Look:
    """A table that was looked at: the facts of every column.

    `files` states whether the column `file` has the name of the file of each row: it can be the
    client, and nothing else.
    """

    where: str
    rows: int
    columns: Mapping[str, Facts]
    notes: tuple[str, ...] = ()
    files: bool = False

    def propose(self, overrides: Overrides) -> Proposal:
        """Return a proposal; problems do not stop it. Raise DataError for an unknown column."""
        self._check(overrides)
        client = overrides.client or guess_client(self.columns, overrides.target, files=self.files)
        target = overrides.target or guess_target(self.columns, client)
        guessed = tuple(
            f"the {what} column {name!r} is a guess: give another with --{what}"
            for what, given, name in (
                ("client", overrides.client, client),
                ("target", overrides.target, target),
            )
            if given is None and name is not None
        )
        found = _propose(self, replace(overrides, client=client, target=target))
        return replace(found, problems=(*guessed, *found.problems))

    def _check(self, overrides: Overrides) -> None:
        """Raise DataError for columns that do not exist, or are given two parts to play."""
        parts: dict[str, set[str]] = {
            "client": set() if overrides.client is None else {overrides.client},
            "target": set() if overrides.target is None else {overrides.target},
            "features": {*overrides.features},
        }
        wrong = [
            f"--{flag} {name}: no such column; {did_you_mean(name, list(self.columns))}"
            for flag, names in (*parts.items(), ("categories", {*overrides.categories}))
            for name in sorted(names - self.columns.keys())
        ]
        wrong += [
            f"column {name!r} is both --{one} and --{other}: name another"
            for one, other in combinations(parts, 2)
            for name in sorted(parts[one] & parts[other])
        ]
        if self.files and FILE in parts["target"] | parts["features"]:
            wrong.append(f"column {FILE!r} is the name of each file: it can be the client only")
        if wrong:
            raise DataError(f"{self.where}: {'; '.join(wrong)}")


def look(given: Path | Any) -> Look:
    """Read a table once and return the facts of its columns; raise DataError if it has no rows."""
    folder = isinstance(given, Path) and given.is_dir()
    file = open_rows(given, Source(client=FILE) if folder else None)
    files = folder and FILE not in open_rows(given).names
    columns = {name: Column(name) for name in file.names if not name.startswith(INDEX)}
    for _, piece in file.batches(list(columns)):
        for name, column in columns.items():
            values = piece.columns[name]
            if isinstance(values, list):  # of several kinds
                values = pa.nulls(len(values), pa.binary())
            if pa.types.is_dictionary(values.type):
                values = values.dictionary_decode()
            column.extend(values)
    rows = next((column.rows for column in columns.values()), 0)
    if not rows:
        raise DataError(f"{file.where}: no rows; give a file with at least one row")
    commas = sum(c.commas > c.points for c in columns.values())
    points = sum(c.points > c.commas for c in columns.values())
    found = {name: facts_of(c, commas=commas > points) for name, c in columns.items()}
    if files and len(found[FILE].plain) < 2:
        del found[FILE]
        files = False
    return Look(file.where, rows, found, file.notes, files)


def guess_client(
    columns: Mapping[str, Facts], target: str | None, *, files: bool = False
) -> str | None:
    """Return the column that most likely names the client of a row; None if there is none.

    `files` states whether there is a column with the name of each row's file.
    """
    usable = {
        name: column
        for name, column in columns.items()
        if name != target and 2 <= len(column.plain) <= column.rows / 2 and not column.gaps
    }
    for word in _CLIENT:
        for name in usable:
            if word in name.lower().replace("_", " ").split() or name.lower().startswith(word):
                return name
    if files and FILE in usable and not all(_PART.search(name) for name in usable[FILE].plain):
        return FILE
    grouped = {n: c for n, c in usable.items() if c.kind in ("category", "text", "mixed")}
    grouped = grouped or {n: c for n, c in usable.items() if c.kind == "number" and c.whole}
    return max(grouped, key=lambda name: len(grouped[name].plain)) if grouped else None


def guess_target(columns: Mapping[str, Facts], client: str | None) -> str | None:
    """Return the column that is most likely to be predicted: by its name, else the last."""
    named = [n for word in _TARGET for n in columns if n.lower() == word and n != client]
    kinds = ("number", "category")
    others = [n for n, column in columns.items() if n != client and column.kind in kinds]
    return next(iter(named or others[::-1]), None)


def _spellings(columns: Sequence[Facts]) -> dict[str, Any]:
    """Return the options for how gaps and numbers are written."""
    numbers = [c for c in columns if c.kind == "number"]
    return {
        "gaps": {c.name: c.missing for c in columns if c.missing},
        "decimal_commas": tuple(c.name for c in numbers if c.commas),
        "units": {c.name: c.unit for c in numbers if c.unit},
    }


def _propose(seen: Look, overrides: Overrides) -> Proposal:
    client, target = overrides.client, overrides.target
    columns = {
        name: _as_category(column) if name in overrides.categories else column
        for name, column in seen.columns.items()
    }
    taken = (client, target, *((FILE,) if seen.files else ()))
    others = {n: c for n, c in columns.items() if n not in taken}
    split, others = _split(others)
    known = {} if overrides.features else dict(_repeated(others, columns, client, target))
    others = _only(others, overrides.features)
    features, left_out = _features(others, known)
    aim = _without_markers(columns.get(target or ""))
    options, text, blocking = _target(aim, overrides.task)
    used = [others[name] for name in features]
    options |= {"client": client or "client", "target": target or "y", "split": split}
    options |= _schema(used, aim, options["task"])
    if not features:
        blocking.append(
            "no column is left to predict from: see the columns left out, or name some with "
            "--features"
        )
    more, problems = _client_problems(columns, client)
    read = tuple(_read_facts(options, options["dates"])) if target else ()
    owner = "client: the name of the file" if seen.files and client == FILE else "client"
    texts = {n: t for n, t in ((client, owner), (target, text)) if n is not None}
    return Proposal(
        source=Source(**options, accepted=read),
        rows=seen.rows,
        clients=len(columns[client].plain) if client else 0,
        columns=texts | {c.name: _text(c) for c in used},
        left_out=left_out,
        problems=(
            *seen.notes,
            *problems,
            *(_SPLIT for name in columns if name == split),
            *_problems(others, aim, options, left_out),
        ),
        blocking=(*more, *blocking),
        read=read,
    )


def _schema(used: Sequence[Facts], aim: Facts | None, task: str | None) -> dict[str, Any]:
    """Return how the columns of features are read, as options of `Source`."""
    ranges = dict(_ranges(used))
    if task == "regression" and aim is not None:
        ranges[aim.name] = aim.range
    return {
        "features": tuple(c.name for c in used),
        "levels": {c.name: _levels(c) for c in used if c.kind == "category"},
        "dates": {c.name: _origin(c) for c in used if c.kind == "date"},
        "ranges": ranges,
        "clip": 3.0,
        "missing": "client-median",
        **_spellings([*used, *([] if aim is None else [aim])]),
        "indicators": tuple(c.name for c in used if c.gaps > c.rows / 20),
    }


def _as_category(column: Facts) -> Facts:
    """Return a column of numbers or text as one of categories."""
    if column.kind not in ("number", "id", "text", "code", "mixed"):
        return column
    return replace(column, kind="category", commas=False, unit="", forms=())


def _only(others: dict[str, Facts], features: Sequence[str]) -> dict[str, Facts]:
    """Return the columns that the user chose to predict from; () takes all as they are."""
    if not features:
        return others
    return {name: _as_feature(column) for name, column in others.items() if name in features}


def _as_feature(column: Facts) -> Facts:
    """Return a column in a form that can be used, also if it looks like an id or a text."""
    if column.kind == "number":
        return column
    if column.kind == "id" and len(column.numbers):
        return replace(column, kind="number")
    return _as_category(column)


_SPLIT = "column 'split' is taken for the split into training and test rows"


def _split(others: dict[str, Facts]) -> tuple[str, dict[str, Facts]]:
    """Return the column of the split, or "" for none, and the other columns."""
    column = others.get("split")
    names = set() if column is None else {value.lower() for value in column.values}
    if names and (names <= {"0", "1"} or names <= {"train", "test"}):
        return "split", {name: c for name, c in others.items() if name != "split"}
    return ("" if column is not None else "split"), others


def _repeated(
    others: Mapping[str, Facts],
    columns: Mapping[str, Facts],
    client: str | None,
    target: str | None,
) -> Iterator[tuple[str, str]]:
    """Yield the columns that tell the same rows apart as another column does, and the reason."""
    known = {
        columns[name].partition: (name, reason)
        for name, reason in (
            (client, "names the client again"),
            (target, "gives the target away"),
        )
        if name is not None
    }
    for name, column in others.items():
        if column.partition is None or column.kind in ("constant", "empty", "other"):
            continue
        if (first := known.get(column.partition)) is not None:
            yield name, f"it {first[1]}: each value goes with one value of {first[0]!r}"
        elif column.kind == "category":
            known[column.partition] = (name, "repeats a column")


def _features(
    others: Mapping[str, Facts], known: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the columns to predict from, and why others are left out; some reasons are known."""
    left_out: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name, column in others.items():
        reason = known.get(name) or _REASONS.get(column.kind, "")
        made = feature_names(name, Source(dates={name: "2000-01-01"})) if _is_date(column) else []
        made = made or [name, f"{name}.missing"]
        if not reason and (twice := taken.keys() & set(made)):
            reason = f"it is called as what {taken[min(twice)]!r} becomes: rename it"
        if reason:
            left_out[name] = reason
        else:
            taken |= dict.fromkeys([*made, *_levelled(column)], name)
    return [name for name in others if name not in left_out], left_out


def _is_date(column: Facts) -> bool:
    return column.kind == "date"


def _levelled(column: Facts) -> list[str]:
    levels = _levels(column) if column.kind == "category" else ()
    return [f"{column.name}={level}" for level in levels]


_REASONS = {
    "id": "every value is different: an id",
    "constant": "only one value",
    "empty": "no values",
    "text": f"more than {2 * _CLASSES} different values, most of them rare",
    "code": f"codes with more than {_CLASSES} different values; --categories takes the common ones",
    "mixed": "some values are no numbers",
    "dates": "dates with day and month in two orders, or not all of them dates",
    "other": "neither numbers, text nor dates",
}


def _without_markers(column: Facts | None) -> Facts | None:
    """Return the facts of a target with words such as "unknown" as gaps, not as a class."""
    if column is None or column.kind != "category":
        return column
    # "none" may be the class of those who have nothing, if many rows have it
    marked = {
        value
        for value, count in column.values.items()
        if value.lower() in _MARKERS and (value.title() != _NONE or count < _OFTEN * column.known)
    }
    if not marked or len(column.values) - len(marked) < 2:
        return column
    return replace(
        column,
        values=Counter({v: n for v, n in column.values.items() if v not in marked}),
        gaps=column.gaps + sum(column.values[value] for value in marked),
        missing=(*column.missing, *sorted(marked)),
    )


def _target(column: Facts | None, task: str | None) -> tuple[dict[str, Any], str, list[str]]:
    """Return the options of the target, what it is in words, and blocking problems."""
    number = column is not None and column.kind in ("number", "id") and len(column.numbers) > 0
    if column is not None and number:
        classes = column.whole and len(column.values) <= _CLASSES
        if task == "regression" or (task is None and not classes):
            return {"task": "regression"}, "target: a number (regression)", []
    if wrong := _target_problem(column, task):
        return {"task": "regression"}, "target", [wrong]
    values = sorted(column.values if column is not None else ())
    if number:
        values.sort(key=lambda value: float(read_numbers(pa.array([value]))[0][0]))
    if len(values) == 2:
        values.sort(key=lambda value: (value.lower() in _YES) - (value.lower() in _NO))
        text = f"target: {values[1]!r} against {values[0]!r} (binary)"
        return {"task": "binary", "classes": tuple(values)}, text, []
    text = f"target: {len(values)} classes (multiclass)"
    return {"task": "multiclass", "classes": tuple(values)}, text, []


def _target_problem(column: Facts | None, task: str | None) -> str:
    """Return why a column has no classes to predict; "" if it has."""
    if column is None:
        return "no column looks like the one to predict: give it with --target"
    if column.kind in ("empty", "constant") or len(column.values) < 2:
        return f"the target {column.name!r} never varies"
    if task == "regression":
        return f"the target {column.name!r} holds no numbers: leave --task regression out"
    if task == "binary" and len(column.values) > 2:
        text = "name the classes that count as 1 by `coterie run --positive`, or give a column of 2"
        return f"the target {column.name!r} has {len(column.values)} values: {text}"
    known: tuple[Kind, ...] = ("number", "category", "code")
    known = known if task is None else (*known, "id", "text")
    if column.kind not in known:
        return f"the target {column.name!r} holds {_HELD[column.kind]}: give another with --target"
    return ""


_HELD = {
    "date": "dates",
    "id": "a different value in every row",
    "text": "text with many different values",
    "code": "codes",
    "mixed": "numbers and other values",
    "dates": "dates",
    "other": "neither numbers nor text",
}


def _levels(column: Facts) -> tuple[str, ...]:
    common = [value for value, _ in column.values.most_common(_LEVELS)]
    return (*sorted(value for value in common if value.lower() != OTHER), OTHER)


def _ends(column: Facts) -> tuple[date, date]:
    """Return the first and the last date, without those that lie far out."""
    low, high = _fenced(column.numbers)
    first = date(1970, 1, 1)
    return first + timedelta(days=int(low)), first + timedelta(days=int(high))


def _origin(column: Facts) -> str:
    first = f"{_ends(column)[0].year:04}-01-01"
    return first if column.forms == (ISO,) else f"{first} {' | '.join(column.forms)}"


def _ranges(columns: Sequence[Facts]) -> Iterator[tuple[str, tuple[float, float]]]:
    for column in columns:
        if column.kind == "number":
            yield column.name, column.range
        elif column.kind == "date":
            first, last = _ends(column)
            days = math.ceil((last - date(first.year, 1, 1)).days / 30) * 30
            ends = (max(1, last.year - first.year), 12, 6, days)
            for part, low, high in zip(DATE_PARTS, (0, 1, 0, 0), ends, strict=True):
                yield f"{column.name}.{part}", (float(low), float(max(high, low + 1)))


def _rounded(low: float, high: float) -> tuple[float, float]:
    """Return a range that holds another one, with ends of two digits of its width."""
    if not high > low:
        return low - 1.0, high + 1.0
    step = 10.0 ** (math.floor(math.log10(high - low)) - 1)
    digits = max(0, -math.floor(math.log10(step)))
    return (
        round(math.floor(low / step) * step, digits),
        round(math.ceil(high / step) * step, digits),
    )


def _client_problems(
    columns: Mapping[str, Facts], client: str | None
) -> tuple[list[str], list[str]]:
    """Return problems of the clients that must be solved first, and others."""
    if client is None:
        return ["no column names the client of each row: give it with --client"], []
    column = columns[client]
    named, blocking, found = len(column.plain), list[str](), list[str]()
    rows = sum(column.plain.values())
    if column.kind == "other":
        blocking.append(f"column {client!r} holds {_HELD['other']}: name another with --client")
    elif named < 2:
        blocking.append(f"column {client!r} names one client: at least two are needed")
    elif named > rows / 2:
        several = f"column {client!r} has {named:,} different values in {rows:,} rows"
        if named == rows:
            text = f"{several}: it is an id of rows, not a client; name another with --client"
            blocking.append(text)
        else:
            found.append(f"{several}: it may be an id of rows, not a client")
    few = sum(count < FEW_ROWS for count in column.plain.values())
    if few and not blocking:
        text = f"{counted(few, 'client')} with fewer than {FEW_ROWS} rows: little to learn from"
        found.append(text)
    if rows < column.rows:
        lost = counted(column.rows - rows, "row")
        found.append(f"{lost} without a client: left out of training")
    return blocking, [*found, *_twins(column.plain)]


def _twins(names: Mapping[str, int]) -> Iterator[str]:
    """Yield the first clients whose names differ in case or leading zeros only."""
    seen: dict[str, str] = {}
    for name in names:
        twin = seen.setdefault(name.casefold().lstrip("0").removesuffix(".0"), name)
        if twin != name:
            yield f"clients {twin!r} and {name!r} are two clients: give one name if they are one"
            return


def _problems(
    columns: Mapping[str, Facts],
    target: Facts | None,
    options: Mapping[str, Any],
    left_out: Mapping[str, str],
) -> Iterator[str]:
    used = [columns[name] for name in options["features"]]
    yield from () if target is None else _target_problems(target, options)
    yield from _gap_problems(used, target)
    yield from _code_problems(used)
    for name, reason in left_out.items():
        yield f"column {name!r} is left out: {reason}{_remedy(columns[name])}"
    for column in used:
        yield from _column_problems(column)
        if found := _outside(column):
            yield f"column {column.name!r}: {found}: cut to this range"
    if options["decimal_commas"]:
        yield f"numbers are read with a decimal comma in {', '.join(options['decimal_commas'])}"
    for name, unit in options["units"].items():
        yield f"column {name!r}: numbers are read without the unit {unit!r}"


def _remedy(column: Facts) -> str:
    """Return an example of what is in the way, and what helps; "" for most columns."""
    if column.kind == "mixed":
        return f", such as {column.odd!r}: remove units and marks"
    first = next(iter(column.values), "")
    if column.kind == "dates" or (column.kind == "text" and _WRITTEN_DATE.search(first)):
        return f", such as {first[:40]!r}: write dates as 2024-01-31"
    if column.kind == "text" and _CLOCK.fullmatch(first):
        return f", such as {first!r}: write times of day as numbers, such as 13.5"
    return ""


def _target_problems(target: Facts, options: Mapping[str, Any]) -> Iterator[str]:
    if target.gaps:
        yield f"{counted(target.gaps, 'row')} without a target: left out of training"
    if options["task"] == "regression" and (found := _outside(target)):
        yield (
            f"the target {target.name!r}: {found}: read as they are; correct them, or list them in "
            "the plan, under data.source.gaps"
        )
    classes = options.get("classes", ())
    if none := [name for name in classes if name.title() == _NONE]:
        yield (
            f"the target {target.name!r}: {none[0]!r} is read as a class; if it stands for a gap, "
            f"list it in the plan, under data.source.gaps"
        )
    if options["task"] == "multiclass" and target.kind == "number":
        yield (
            f"the target {target.name!r} is read as {len(classes)} classes; to predict it as a "
            "number, give --task regression"
        )


def _outside(column: Facts) -> str:
    """Return which numbers lie far out of a column's range; "" if none does."""
    if column.kind != "number" or not len(column.numbers):
        return ""
    low, high = column.range
    far = column.numbers[(column.numbers < low) | (column.numbers > high)]
    if not len(far):
        return ""
    share = max(0.0001, len(far) / len(column.numbers))
    example = far[np.abs(far).argmax()]
    return f"{share:.2%} of the values lie outside {low:g} to {high:g}, such as {example:g}"


def _column_problems(column: Facts) -> Iterator[str]:
    if column.kind == "category" and all(value.isdecimal() for value in column.values):
        yield f"column {column.name!r}: its numbers are read as categories"
    if column.kind == "category" and len(column.values) > _LEVELS:
        yield f"column {column.name!r}: the {_LEVELS} most common levels are declared, then other"
    if column.kind == "date" and (column.unsure or len(column.forms) > 1):
        check = ": check the order" if column.unsure else ""
        yield f"column {column.name!r}: dates are read as {' or '.join(column.forms)}{check}"


def _code_problems(used: Sequence[Facts]) -> Iterator[str]:
    """Yield the columns of few whole numbers, which may be codes."""
    few = [c.name for c in used if c.kind == "number" and c.whole and 2 < len(c.values) <= _FEW]
    if few:
        yield (
            f"{', '.join(few)}: whole numbers, {_FEW} different ones at most; if they are codes, "
            f"give --categories {','.join(few)}"
        )


def _gap_problems(used: Sequence[Facts], target: Facts | None) -> Iterator[str]:
    for levels, text in (
        (False, "filled with the median of the client's own rows"),
        (True, f"read as the level {OTHER!r}"),
    ):
        found = [c for c in used if c.gaps and (c.kind == "category") == levels]
        if found:
            yield f"gaps in {listed([f'{c.name} ({c.share})' for c in found])}: {text}"
    for column in (*used, *(() if target is None else (target,))):
        if column.missing:
            few = ", ".join(repr(value[:40]) for value in column.missing[:5])
            more = ", ..." if len(column.missing) > 5 else ""
            yield f"column {column.name!r}: {few}{more} is read as a gap"


def _text(column: Facts) -> str:
    if column.kind == "category":
        return f"{counted(len(_levels(column)) - 1, 'level')}, and other"
    if column.kind == "date":
        first, last = _ends(column)
        return f"date, from {first.year} to {last.year}"
    low, high = column.range
    return f"number, {low:g} to {high:g}"


def _read_facts(options: Mapping[str, Any], dates: Mapping[str, Any]) -> Iterator[str]:
    """Yield what was read off the rows, one sentence per kind of fact."""
    tail = READ_OFF.strip()
    if options["features"]:
        yield f"choice and format of columns {tail}"
    if options["levels"]:
        yield f"levels of {listed([*options['levels']])} {tail}"
    numbers = [name for name in options["ranges"] if name.rsplit(".", 1)[0] not in dates]
    if numbers:
        yield f"ranges of {listed(numbers)} {tail}"
    if dates:
        yield f"origins, formats and ranges of {', '.join(dates)} {tail}"
    if options["gaps"]:
        yield f"values that stand for gaps in {', '.join(options['gaps'])} {tail}"
    classes = options.get("classes")
    yield f"task{' and classes' if classes else ''} of {options['target']} {tail}"
