"""Look at a table of rows, list its problems, and propose how to read it (`coterie init`).

One pass over the file collects facts of every column; torch is not imported. The facts come from
the rows of clients: levels, ranges and classes that are proposed here are private until the user
accepts them as public knowledge. `Source.accepted` then states so with every guarantee.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coterie.core.suggest import did_you_mean
from coterie.data.config import Source
from coterie.data.federated import DataError
from coterie.data.load import open_rows
from coterie.data.tables import DATE_PARTS, OTHER, File, is_gap, is_number

Kind = Literal["number", "category", "date", "id", "constant", "empty", "text", "mixed"]
FORMATS = ("%Y-%m-%d", "%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%Y/%m/%d")
FEW_ROWS = 5
_LEVELS = 30  # levels that are declared at most; further ones are "other"
_COUNTED = 100_000  # different values of a column that are counted
_SAMPLED = 1 << 20  # numbers of a column whose quantiles are taken
_CLASSES = 20
_CLIENT = (
    *("client", "hospital", "clinic", "school", "site", "center", "centre", "bank", "branch"),
    *("district", "device", "user", "ward", "practice", "store", "region", "station", "subject"),
)
_TARGET = ("y", "target", "label", "outcome", "class", "response", "score")
_YES = ("1", "yes", "true", "positive", "case", "died", "dead", "y", "t")


@dataclass
class Column:
    """Facts of one column, collected batch by batch."""

    name: str
    rows: int = 0
    gaps: int = 0
    numbers: int = 0
    whole: bool = True
    values: Counter[str] = field(default_factory=Counter)
    sample: list[Any] = field(default_factory=list)  # arrays of numbers
    sampled: int = 0
    formats: tuple[str, ...] = FORMATS  # those that fit every value so far
    first: str = ""  # the least and largest date, as ISO text
    last: str = ""
    odd: str = ""  # an example of a value that is no number
    typed_date: bool = False

    @property
    def known(self) -> int:
        """How many rows have a value."""
        return self.rows - self.gaps

    @property
    def kind(self) -> Kind:
        """What the column holds, by its values."""
        if not self.known:
            return "empty"
        if len(self.values) == 1:
            return "constant"
        if self.typed_date or self.formats:
            return "date"
        unique = len(self.values) == self.known and self.known > FEW_ROWS
        if self.numbers == self.known:
            return "id" if unique and self.whole and self._is_consecutive() else "number"
        if self.numbers > self.known / 2:
            return "mixed"
        if unique:
            return "id"
        return "category" if len(self.values) <= max(_LEVELS, 2 * _CLASSES) else "text"

    def _is_consecutive(self) -> bool:
        """Whether unique whole numbers are dense, as numbers of rows are."""
        low, high = self.extremes()
        return high - low < 2 * self.known

    def extremes(self, tail: float = 0.0) -> tuple[float, float]:
        """Return the least and largest number, without a share of them at each end."""
        values = np.concatenate(self.sample) if self.sample else np.zeros(1)
        values = values[np.isfinite(values)]
        low, high = np.quantile(values if len(values) else np.zeros(1), (tail, 1 - tail))
        return float(low), float(high)

    def extend(self, values: pa.Array) -> None:
        """Add the values of a batch."""
        self.rows += len(values)
        typed = is_number(values.type)
        if typed:
            self._extend_numbers(pc.cast(values, pa.float64(), safe=False))
        text = self._texts(values)
        gap = is_gap(text)
        self.gaps += int(pc.sum(pc.cast(gap, pa.int64())).as_py() or 0)
        found = text.filter(pc.invert(gap))
        if len(self.values) <= _COUNTED:
            for entry in pc.value_counts(found).to_pylist():
                self.values[entry["values"]] += entry["counts"]
        if not typed:
            self._extend_text(found)
            self._extend_dates(found)

    def _texts(self, values: pa.Array) -> pa.Array:
        """Return values as text: dates in ISO form, lists and structs as `true`."""
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        if pa.types.is_temporal(values.type):
            self.typed_date = True
            values = pc.cast(values, pa.date32(), safe=False)
        elif pa.types.is_nested(values.type) or pa.types.is_binary(values.type):
            values = pc.is_valid(values)
        return pc.utf8_trim_whitespace(pc.cast(values, pa.string()))

    def _extend_numbers(self, values: pa.Array) -> None:
        numbers = values.drop_null().to_numpy(zero_copy_only=False)
        numbers = numbers[~np.isnan(numbers)]
        self.numbers += len(numbers)
        self.whole = self.whole and bool((np.trunc(numbers) == numbers).all())
        if self.sampled < _SAMPLED:
            self.sample.append(numbers)
            self.sampled += len(numbers)
        self.formats = ()

    def _extend_text(self, found: pa.Array) -> None:
        number = pc.match_substring_regex(found, r"^[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?)$")
        numbers = found.filter(number)
        if len(numbers):
            formats = self.formats
            self._extend_numbers(pc.cast(numbers, pa.float64()))
            self.formats = formats
        odd = found.filter(pc.invert(number))
        self.odd = self.odd or (str(odd[0].as_py())[:40] if len(odd) else "")

    def _extend_dates(self, found: pa.Array) -> None:
        if not len(found) or not self.formats:
            return
        days = pc.utf8_slice_codeunits(found, 0, 10)
        fits, best = [], None
        for form in self.formats:
            stamps = pc.strptime(days, format=form, unit="s", error_is_null=True)
            if stamps.null_count == 0:
                fits.append(form)
                best = stamps if best is None else best
        self.formats = tuple(fits)
        if best is not None:
            ends = pc.min_max(best).as_py()
            low, high = (str(ends[side].date()) for side in ("min", "max"))
            self.first = min(self.first or low, low)
            self.last = max(self.last, high)


@dataclass(frozen=True)
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


def inspect(path: Path, *, client: str | None = None, target: str | None = None) -> Proposal:
    """Return a proposal for a table; `client` and `target` name columns, None guesses them."""
    file = open_rows(path)
    columns = _collect(file)
    for name in (client, target):
        if name is not None and name not in columns:
            raise DataError(f"{path}: no column {name!r}; {did_you_mean(name, list(columns))}")
    client = client or guess_client(columns, target)
    target = target or guess_target(columns, client)
    return _propose(path, columns, client, target)


def _collect(file: File) -> dict[str, Column]:
    columns = {name: Column(name) for name in file.names}
    for _, piece in file.batches(list(columns)):
        for name, column in columns.items():
            values = piece.columns[name]
            column.extend(pa.array([""] * len(values)) if isinstance(values, list) else values)
    if not any(column.rows for column in columns.values()):
        raise DataError(f"{file.where}: no rows; give a file with at least one row")
    return columns


def guess_client(columns: Mapping[str, Column], target: str | None) -> str:
    """Return the column that most likely names the client of a row."""
    usable = {
        name: column
        for name, column in columns.items()
        if name != target and 2 <= len(column.values) <= column.rows / 2 and not column.gaps
    }
    for word in _CLIENT:
        for name in usable:
            if word in name.lower().replace("_", " ").split() or name.lower().startswith(word):
                return name
    grouped = {n: c for n, c in usable.items() if c.kind in ("category", "text")}
    grouped = grouped or {n: c for n, c in usable.items() if c.kind == "number" and c.whole}
    if not grouped:
        raise DataError(
            f"no column names the client of each row; the columns are {', '.join(columns)}: give "
            "one with --client"
        )
    return max(grouped, key=lambda name: len(grouped[name].values))


def guess_target(columns: Mapping[str, Column], client: str) -> str:
    """Return the column that is most likely to be predicted: by its name, else the last."""
    named = [n for word in _TARGET for n in columns if n.lower() == word and n != client]
    kinds = ("number", "category")
    others = [n for n, column in columns.items() if n != client and column.kind in kinds]
    if not named and not others:
        raise DataError("no column can be predicted; give one with --target")
    return (named or others[::-1])[0]


def _propose(path: Path, columns: Mapping[str, Column], client: str, target: str) -> Proposal:
    others = {n: c for n, c in columns.items() if n not in (client, target)}
    features, left_out = _features(others)
    options, task_text, blocking = _target(columns[target])
    used = [others[name] for name in features]
    levels = {c.name: _levels(c) for c in used if c.kind == "category"}
    dates = {c.name: _origin(c) for c in used if c.kind == "date"}
    ranges = dict(_ranges(used))
    if options["task"] == "regression":
        ranges[target] = _rounded(*columns[target].extremes())
    gaps = [c for c in used if c.gaps]
    options |= {
        "client": client,
        "target": target,
        "features": tuple(features),
        "levels": levels,
        "dates": dates,
        "ranges": ranges,
        "clip": 3.0,
        "missing": "client-median",
        "indicators": tuple(c.name for c in gaps if c.gaps > c.rows / 20),
    }
    if not features:
        blocking.append("no column is left to predict from: see the columns left out")
    blocking += _client_problems(columns[client])
    read = tuple(_read_facts(path, levels, ranges, dates, options))
    texts = {client: "client", target: task_text} | {c.name: _text(c) for c in used}
    return Proposal(
        source=Source(**options, accepted=read),
        rows=columns[client].rows,
        clients=len(columns[client].values),
        columns=texts,
        left_out=left_out,
        problems=tuple(_problems(columns, client, target, features, left_out)),
        blocking=tuple(blocking),
        read=read,
    )


def _features(others: Mapping[str, Column]) -> tuple[list[str], dict[str, str]]:
    reasons = {
        "id": "every value is different: an id",
        "constant": "only one value",
        "empty": "no values",
        "text": f"text with more than {max(_LEVELS, 2 * _CLASSES)} different values",
        "mixed": "some values are no numbers",
    }
    left_out = {n: reasons[c.kind] for n, c in others.items() if c.kind in reasons}
    return [name for name in others if name not in left_out], left_out


def _target(column: Column) -> tuple[dict[str, Any], str, list[str]]:
    """Return the options of the target, what it is in words, and blocking problems."""
    values = sorted(column.values)
    if column.kind in ("empty", "constant"):
        return {"task": "regression"}, "target", [f"the target {column.name!r} never varies"]
    if column.kind == "number" and not (column.whole and len(values) <= _CLASSES):
        return {"task": "regression"}, "target: a number (regression)", []
    if column.kind in ("date", "id", "text", "mixed"):
        text = f"the target {column.name!r} holds {_HELD[column.kind]}: give another with --target"
        return {"task": "regression"}, "target", [text]
    if column.kind == "number":
        values = sorted(values, key=float)
    if len(values) == 2:
        values.sort(key=lambda value: value.lower() in _YES)
        text = f"target: {values[1]!r} against {values[0]!r} (binary)"
        return {"task": "binary", "classes": tuple(values)}, text, []
    text = f"target: {len(values)} classes (multiclass)"
    return {"task": "multiclass", "classes": tuple(values)}, text, []


_HELD = {
    "date": "dates",
    "id": "a different value in every row",
    "text": "text with many different values",
    "mixed": "numbers and other values",
}


def _levels(column: Column) -> tuple[str, ...]:
    common = [value for value, _ in column.values.most_common(_LEVELS)]
    return (*sorted(value for value in common if value != OTHER), OTHER)


def _origin(column: Column) -> str:
    first = f"{column.first[:4]}-01-01"
    form = "" if column.typed_date or not column.formats else column.formats[0]
    return first if form in ("", FORMATS[0]) else f"{first} {form}"


def _ranges(columns: Sequence[Column]) -> Iterator[tuple[str, tuple[float, float]]]:
    for column in columns:
        if column.kind == "number":
            yield column.name, _rounded(*column.extremes(0.001))
        elif column.kind == "date":
            first = date(int(column.first[:4]), 1, 1)
            last = datetime.fromisoformat(column.last).date()
            ends = (max(1, last.year - first.year), 12, 6, math.ceil((last - first).days / 30) * 30)
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


def _client_problems(client: Column) -> list[str]:
    found = []
    if client.gaps:
        found.append(
            f"column {client.name!r}: {client.gaps} rows name no client: give it, or remove them"
        )
    if client.known and len(client.values) > client.known / 2:
        found.append(
            f"column {client.name!r} has {len(client.values)} different values in {client.known} "
            "rows: it is an id of rows, not a client; name another column with --client"
        )
    elif len(client.values) < 2:
        found.append(f"column {client.name!r} names one client: at least two are needed")
    return found


def _problems(
    columns: Mapping[str, Column],
    client: str,
    target: str,
    features: Sequence[str],
    left_out: Mapping[str, str],
) -> Iterator[str]:
    few = sum(count < FEW_ROWS for count in columns[client].values.values())
    if few:
        yield f"{few} clients have fewer than {FEW_ROWS} rows: they have little to learn from"
    if columns[target].gaps:
        yield f"{columns[target].gaps} rows have no target: they are left out of training"
    gaps = [f"{n} ({columns[n].gaps / columns[n].rows:.0%})" for n in features if columns[n].gaps]
    if gaps:
        yield f"gaps in {', '.join(gaps)}: filled with the median of the client's own rows"
    for name, reason in left_out.items():
        odd = columns[name].odd
        more = f", such as {odd!r}: remove units and marks" if reason.startswith("some") else ""
        yield f"column {name!r} is left out: {reason}{more}"
    for name in features:
        if columns[name].kind == "category" and len(columns[name].values) > _LEVELS:
            yield f"column {name!r}: the {_LEVELS} most common levels are declared, then other"
        if len(columns[name].formats) > 1 and columns[name].kind == "date":
            yield f"column {name!r}: dates are read as {columns[name].formats[0]}: check the order"


def _text(column: Column) -> str:
    if column.kind == "category":
        return f"{len(_levels(column)) - 1} levels, and other"
    if column.kind == "date":
        return f"date, from {column.first[:4]} to {column.last[:4]}"
    low, high = _rounded(*column.extremes(0.001))
    return f"number, {low:g} to {high:g}"


def _read_facts(
    path: Path,
    levels: Mapping[str, Any],
    ranges: Mapping[str, Any],
    dates: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Iterator[str]:
    """Yield what was read off the rows, one sentence per kind of fact."""
    tail = "read off the rows and accepted as public"
    if levels:
        yield f"levels of {', '.join(levels)} {tail}"
    numbers = [name for name in ranges if name.rsplit(".", 1)[0] not in dates]
    if numbers:
        yield f"ranges of {', '.join(numbers)} {tail}"
    if dates:
        yield f"origins and ranges of {', '.join(dates)} {tail}"
    classes = options.get("classes")
    yield f"task{' and classes' if classes else ''} of {options['target']} {tail}"
