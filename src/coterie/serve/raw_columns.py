"""ONNX nodes that turn the columns of a table into features, as the reader of tables does.

A program with them has one input per column, (rows, 1): text for categories and dates, float64 for
numbers. Text may have a space before and after it; dates are ISO, or in the declared format, and
may have spaces after them. What cannot be read is a gap. The nodes need opset 20 of ONNX and opset
4 of ai.onnx.ml.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from coterie.data.cells import GAPS, OTHER, formats, spellings
from coterie.data.config import Source
from coterie.data.load import file_columns

OPSETS = {"": 20, "ai.onnx.ml": 4}
_OURS = "columns/"
_RESULTS = ("outputs", "probability", "prediction")
_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July", "August", "September"),
    *("October", "November", "December"),
)
_SPELLED = {
    form(name): at
    for at, month in enumerate(_MONTHS, start=1)
    for name in (month, month[:3])
    for form in (str.title, str.lower, str.upper)
}
"""The month of each spelling of its name."""
_PARTS = {
    **{"%d": r"[0-9]{1,2}", "%m": r"[0-9]{1,2}", "%Y": r"[0-9]{4}", "%y": r"[0-9]{2}"},
    "%b": f"({'|'.join(name for name in _SPELLED if len(name) == 3)})",
    "%B": f"({'|'.join(_SPELLED)})",
}
_KINDS = {"%y": "%Y", "%b": "%m", "%B": "%m"}
_EXAMPLES = {"%Y": "1970", "%y": "70", "%m": "01", "%b": "Jan", "%B": "Jan", "%d": "01"}
_PLAIN = "%Y%m%d"  # a number
_CLOCK = r"([T ]+[0-9]{1,2}:[0-9]{2}.*)? *"
_CENTURY = 69  # years of two digits from here on are those of 19..


def has_columns(source: Source, names: Sequence[str]) -> bool:
    """Return whether rows are columns of a table of which some are prepared: not arrays."""
    plain = source.text is None and source.images is None and not source.sparse
    return bool(names) and plain and bool(source.levels or source.dates or source.fills)


@dataclass
class Graph:
    """Nodes and constants, as they are added."""

    nodes: list[Any] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node and return the name of its output."""
        name = f"{_OURS}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], **attributes))
        return name

    def hold(self, values: NDArray[Any]) -> str:
        """Add a constant and return its name."""
        name = f"{_OURS}constant{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(values, name))
        return name

    def whole(self, *values: int) -> str:
        """Add a constant of whole numbers, () for one of them."""
        shape = values[0] if len(values) == 1 else values
        return self.hold(np.array(shape, dtype=np.int64))

    def flags(self, text: str, words: Sequence[str]) -> str:
        """Return which texts are among some words."""
        words = list(_padded(dict.fromkeys(words, 1)))
        codes = self.add(
            "LabelEncoder",
            text,
            domain="ai.onnx.ml",
            keys_strings=words,
            values_int64s=[1] * len(words),
            default_int64=0,
        )
        return self.add("Cast", codes, to=TensorProto.BOOL)

    def doubles(self, given: str) -> str:
        """Return values as float64."""
        return self.add("Cast", given, to=TensorProto.DOUBLE)

    def gapped(self, values: str, gaps: str) -> str:
        """Return values with NaN for gaps."""
        return self.add("Where", gaps, self.hold(np.array(np.nan)), values)


@dataclass(frozen=True)
class Inputs:
    """The inputs of a program: the name of each, its column, and what it holds."""

    names: tuple[str, ...]
    columns: tuple[str, ...]
    kinds: tuple[str, ...]

    def values(self) -> list[Any]:
        """Return the inputs for a graph, (rows, 1) each."""
        types = {"number": TensorProto.DOUBLE}
        return [
            helper.make_tensor_value_info(name, types.get(kind, TensorProto.STRING), ["rows", 1])
            for name, kind in zip(self.names, self.kinds, strict=True)
        ]

    def described(self) -> list[dict[str, str]]:
        """Return each input, its column and its kind, for the metadata."""
        rows = zip(self.names, self.columns, self.kinds, strict=True)
        return [{"input": name, "column": column, "kind": kind} for name, column, kind in rows]


def prepend_columns(program: Any, source: Source, names: Sequence[str]) -> Inputs:
    """Put nodes from columns to features before an ONNX program whose input is "rows"."""
    columns = file_columns(source, names)
    kinds = tuple(_kind(column, source) for column in columns)
    inputs = tuple(f"{column} (column)" if column in _RESULTS else column for column in columns)
    graph, parts = Graph(), list[str]()
    for name, column, kind in zip(inputs, columns, kinds, strict=True):
        make = {"category": _category, "date": _dates}.get(kind, _numbers)
        features, gaps = make(graph, name, column, source)
        parts.append(features)
        if column in source.indicators:
            parts.append(graph.doubles(gaps))
    rows = graph.add("Concat", *parts, axis=1)
    for node in program.graph.node:
        node.input[:] = [rows if name == "rows" else name for name in node.input]
    found = Inputs(inputs, tuple(columns), kinds)
    old = list(program.graph.node)
    del program.graph.node[:], program.graph.input[:]
    program.graph.node.extend([*graph.nodes, *old])
    program.graph.initializer.extend(graph.constants)
    program.graph.input.extend(found.values())
    return found


def _kind(column: str, source: Source) -> str:
    if column in source.levels:
        return "category"
    return "date" if column in source.dates else "number"


def append_results(program: Any, task: str, classes: Sequence[str], *, odds: bool) -> None:
    """Add the outputs "probability" and "prediction" of classes to an ONNX program."""
    if task not in ("binary", "multiclass"):
        return
    graph, nodes = Graph(), program.graph.node
    if task == "binary":
        chosen = graph.add("Greater", "outputs", graph.hold(np.array(0, dtype=np.float32)))
        number = graph.add("Cast", chosen, to=TensorProto.INT64)
    else:
        number = graph.add("ArgMax", "outputs", axis=-1, keepdims=0)
    named = graph.hold(np.array(classes, dtype=object))
    graph.nodes.append(helper.make_node("Gather", [named, number], ["prediction"], axis=0))
    made = [("prediction", TensorProto.STRING)]
    if odds:
        how: dict[str, Any] = {} if task == "binary" else {"axis": -1}
        op = "Softmax" if how else "Sigmoid"
        graph.nodes.append(helper.make_node(op, ["outputs"], ["probability"], **how))
        made.append(("probability", TensorProto.FLOAT))
    for node in graph.nodes:  # names of the columns' nodes are taken
        node.output[:] = [name.replace(_OURS, "results/") for name in node.output]
        node.input[:] = [name.replace(_OURS, "results/") for name in node.input]
    for constant in graph.constants:
        constant.name = constant.name.replace(_OURS, "results/")
    nodes.extend(graph.nodes)
    program.graph.initializer.extend(graph.constants)
    shape = program.graph.output[0].type.tensor_type.shape
    rows = [one.dim_param or None for one in shape.dim]
    for name, kind in made:
        size = rows if task == "binary" or name == "probability" else rows[:1]
        if name == "probability" and task == "multiclass":
            size = [*rows[:1], len(classes)]
        program.graph.output.append(helper.make_tensor_value_info(name, kind, size))


def _padded(codes: Mapping[str, int]) -> dict[str, int]:
    """Return the codes of texts also for these with a space before or after them."""
    pads = (("", ""), (" ", ""), ("", " "), (" ", " "))
    return {f"{a}{text}{b}": code for a, b in pads for text, code in codes.items()}


def _words(column: str, source: Source) -> list[str]:
    return [*GAPS, *source.gaps.get(column, ())]


def _numbers(graph: Graph, given: str, column: str, source: Source) -> tuple[str, str]:
    """Return numbers with NaN for gaps, and which are gaps."""
    gaps = graph.add("IsNaN", given)
    if source.fills:
        gaps = graph.add("Or", gaps, graph.add("IsInf", given))
    for text in source.gaps.get(column, ()):
        try:
            code = graph.hold(np.array(float(text)))
        except ValueError:
            continue
        gaps = graph.add("Or", gaps, graph.add("Equal", given, code))
    return graph.gapped(given, gaps), gaps


def _category(graph: Graph, given: str, column: str, source: Source) -> tuple[str, str]:
    """Return 0/1 columns of the levels, and which are gaps."""
    levels, words = source.levels[column], _words(column, source)
    declared = set(source.gaps.get(column, ()))
    known = {text: code for text, code in spellings(levels).items() if text not in declared}
    other = levels.index(OTHER) if OTHER in levels else -1
    gap = other if source.fills else -1
    codes = _padded(dict.fromkeys(words, gap) | known)
    code = graph.add(
        "LabelEncoder",
        given,
        domain="ai.onnx.ml",
        keys_strings=list(codes),
        values_int64s=list(codes.values()),
        default_int64=other,
    )
    wide = graph.add("Equal", code, graph.hold(np.arange(len(levels))[None]))
    unread = graph.add("Less", code, graph.whole(0))
    gaps = graph.add("Or", unread, graph.flags(given, [w for w in words if w not in known]))
    features = graph.doubles(wide)
    return (features if source.fills else graph.gapped(features, gaps)), gaps


def _dates(graph: Graph, given: str, column: str, source: Source) -> tuple[str, str]:
    """Return year, month, weekday and days of dates with NaN for gaps, and which are gaps."""
    first, _, form = source.dates[column].partition(" ")
    year = month = day = fits = ""
    for one in formats(form):
        found = _parsed(graph, given, one)
        if not fits:
            fits, year, month, day = found
            continue
        year, month, day = (
            graph.add("Where", fits, old, new)
            for old, new in zip((year, month, day), found[1:], strict=True)
        )
        fits = graph.add("Or", fits, found[0])
    real = graph.add("And", fits, _is_real(graph, year, month, day))
    gaps = graph.add("Or", graph.add("Not", real), graph.flags(given, _words(column, source)))
    days, origin = _days(graph, year, month, day), date.fromisoformat(first)
    parts = (
        graph.add("Sub", year, graph.whole(origin.year)),
        month,
        graph.add("Mod", graph.add("Add", days, graph.whole(3)), graph.whole(7)),
        graph.add("Sub", days, graph.whole((origin - date(1970, 1, 1)).days)),
    )
    return graph.gapped(graph.doubles(graph.add("Concat", *parts, axis=1)), gaps), gaps


def _pieces(form: str) -> tuple[list[str], list[str]]:
    """Return the parts of a format of dates, and what separates them; raise ValueError for others.

    >>> _pieces("%b %d, %Y")
    (['%b', '%d', '%Y'], [' ', ', '])
    """
    first, *cut = re.split(r"(%.)", form)
    parts, marks, last = cut[::2], cut[1:-1:2], cut[-1:]
    kinds = sorted(_KINDS.get(part, part) for part in parts)
    apart = all(marks) and not re.search(r"[\w%]", "".join(marks))
    if kinds != ["%Y", "%d", "%m"] or first or last != [""] or not (apart or form == _PLAIN):
        raise ValueError(
            f"dates in the format {form!r} cannot be read by an ONNX program; choose --format "
            "safetensors, or train with dates in ISO form, such as 2024-01-31"
        )
    return parts, marks


def _pattern(form: str) -> str:
    """Return the regular expression of a format, with a time of day after it."""
    parts, marks = _pieces(form)
    wanted = {**_PARTS, "%m": r"[0-9]{2}", "%d": r"[0-9]{2}"} if form == _PLAIN else _PARTS
    marks = [re.escape(mark) for mark in marks]
    return "".join(wanted[p] + m for p, m in zip(parts, [*marks, ""], strict=True)) + _CLOCK


def _parsed(graph: Graph, given: str, form: str) -> tuple[str, str, str, str]:
    """Return which texts have a format, and their year, month and day."""
    parts, marks = _pieces(form)
    fits = graph.add("RegexFullMatch", given, pattern=_pattern(form))
    example = "".join(_EXAMPLES[p] + m for p, m in zip(parts, [*marks, ""], strict=True))
    rest = graph.add("Where", fits, given, graph.hold(np.array(example, dtype=object)))
    if form == _PLAIN:
        number = graph.add("Cast", _date_alone(graph, rest), to=TensorProto.INT64)
        days = graph.add("Div", number, graph.whole(100))
        found = [
            graph.add("Div", number, graph.whole(10000)),
            graph.add("Mod", days, graph.whole(100)),
            graph.add("Mod", number, graph.whole(100)),
        ]
        return fits, found[0], found[1], found[2]
    texts = []
    for mark in marks:
        split = _split(graph, rest, mark)
        first, rest = (graph.add("Gather", split, graph.whole(at), axis=-1) for at in (0, 1))
        texts.append(first)
    texts.append(_date_alone(graph, rest))
    values = {
        _KINDS.get(part, part): _part(graph, text, part)
        for part, text in zip(parts, texts, strict=True)
    }
    return fits, values["%Y"], values["%m"], values["%d"]


def _part(graph: Graph, text: str, part: str) -> str:
    """Return a year, month or day as a number."""
    if part in ("%b", "%B"):
        return graph.add(
            "LabelEncoder",
            text,
            domain="ai.onnx.ml",
            keys_strings=list(_SPELLED),
            values_int64s=list(_SPELLED.values()),
            default_int64=0,
        )
    number = graph.add("Cast", text, to=TensorProto.INT64)
    if part != "%y":
        return number
    late = graph.add("Less", number, graph.whole(_CENTURY))
    century = graph.add("Where", late, graph.whole(2000), graph.whole(1900))
    return graph.add("Add", number, century)


def _date_alone(graph: Graph, text: str) -> str:
    """Return texts without a time of day."""
    for delimiter in ("T", " "):
        split = _split(graph, text, delimiter)
        text = graph.add("Gather", split, graph.whole(0), axis=-1)
    return text


def _split(graph: Graph, text: str, delimiter: str) -> str:
    """Return the text before a delimiter and, where there is one, the text after it."""
    name, count = (f"{_OURS}{len(graph.nodes)}{end}" for end in ("", "count"))
    node = helper.make_node("StringSplit", [text], [name, count], delimiter=delimiter, maxsplit=1)
    graph.nodes.append(node)
    return name


def _is_real(graph: Graph, year: str, month: str, day: str) -> str:
    """Return which dates exist: no 31 February."""
    plain = graph.add("Not", _divides(graph, year, 100))
    leap = graph.add("And", _divides(graph, year, 4), plain)
    leap = graph.add("Or", leap, _divides(graph, year, 400))
    valid = graph.add("And", _between(graph, month, 1, 12), _between(graph, year, 1, 9999))
    safe = graph.add("Where", valid, month, graph.whole(1))
    index = graph.add("Sub", safe, graph.whole(1))
    most = graph.add("Gather", graph.hold(np.array(_DAYS, dtype=np.int64)), index, axis=0)
    february = graph.add("And", leap, graph.add("Equal", month, graph.whole(2)))
    most = graph.add("Add", most, graph.add("Cast", february, to=TensorProto.INT64))
    fits = graph.add("LessOrEqual", day, most)
    begun = graph.add("GreaterOrEqual", day, graph.whole(1))
    return graph.add("And", valid, graph.add("And", fits, begun))


def _divides(graph: Graph, values: str, by: int) -> str:
    return graph.add("Equal", graph.add("Mod", values, graph.whole(by)), graph.whole(0))


def _between(graph: Graph, values: str, low: int, high: int) -> str:
    above = graph.add("GreaterOrEqual", values, graph.whole(low))
    return graph.add("And", above, graph.add("LessOrEqual", values, graph.whole(high)))


def _days(graph: Graph, year: str, month: str, day: str) -> str:
    """Return days since 1970: years from March on, in eras of 400 years."""

    def step(op: str, values: str, by: int) -> str:
        return graph.add(op, values, graph.whole(by))

    early = graph.add("Cast", graph.add("Less", month, graph.whole(3)), to=TensorProto.INT64)
    since = graph.add("Sub", year, early)
    era = step("Div", since, 400)
    of_era = graph.add("Sub", since, step("Mul", era, 400))
    from_march = step("Mod", step("Add", month, 9), 12)
    of_year = step("Div", step("Add", step("Mul", from_march, 153), 2), 5)
    of_year = graph.add("Add", of_year, step("Sub", day, 1))
    leaps = graph.add("Sub", step("Div", of_era, 4), step("Div", of_era, 100))
    in_era = graph.add("Add", graph.add("Add", step("Mul", of_era, 365), leaps), of_year)
    return step("Sub", graph.add("Add", step("Mul", era, 146097), in_era), 719468)
