r"""Fixed and random effects: public columns made of each row, and which coefficients are personal.

A mixed model (Laird and Ware 1982) predicts row x of client k by

    phi(x)' w + psi(x)' u_k,        u_k ~ N(0, diag(t2)),

with the same w for all clients and psi some columns of phi. `formula` declares both in the language
of lme4, `score ~ bs(age, 5) + sex * stay + (1 + age | hospital)`, or `basis = "spline"` makes them
by rule. Every map phi is public and takes one row at a time: it has no constant that was computed
from rows. It is applied inside each client, after all scaling, so it releases nothing.

A spline `bs(x, df)` spans the cubic splines with df - 3 inner knots, evenly spaced in [-3, 3], the
public range of a scaled column (`data.source.ranges` maps a declared range to it); values outside
are clamped. Its first column is x itself. The others are orthogonal to 1 and x, and of mean square
1, under the public reference N(0, 1.5^2) cut at +-3, so that first-order rounds need few steps.

`encoder` maps rows by a frozen public network instead (`coterie.data.encoder`).
"""

import ast
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import combinations, product
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from coterie.core.suggest import did_you_mean
from coterie.data.federated import DataError, FederatedDataset, Spec

if TYPE_CHECKING:
    from torch import Tensor

    from coterie.data.config import Source
    from coterie.data.encoder import Encoded

RANGE = 3.0
"""Columns of splines and products are clamped to +- this, in their scaled unit."""
SPLINE = 5  # degrees of freedom of `basis = "spline"`
MOST_PRODUCTS = 10
"""`basis = "spline"` has products of two columns where there are at most this many columns."""
_LEAST_DF, _MOST_DF = 2, 12
_SPREAD, _GRID = 1.5, 6000  # of the reference under which splines are orthonormal
_EVERY = "every_column_"  # stands for "." in a formula
_QUOTED = "quoted_column_{}_"  # stands for `a column`
_EXAMPLE = "score ~ bs(age, 5) + sex * stay + (1 + age | hospital)"

Factor = tuple[str, int]
"""A column by name, and the degrees of freedom of its spline: 0 for the column itself."""
Term = tuple[Factor, ...]
"""Factors that are multiplied; () is the intercept."""
Piece = tuple[int, int, int]
"""A column by number, degrees of freedom, and which column of the spline; (j, 0, 0) is x_j."""


@dataclass(frozen=True)
class Formula:
    """A parsed formula: the target and client it names, and its terms."""

    target: str
    client: str
    fixed: tuple[Term, ...]
    random: tuple[Term, ...]
    intercept: bool  # whether clients have intercepts of their own

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns it names, each once."""
        named = (name for term in (*self.fixed, *self.random) for name, _ in term)
        return tuple(dict.fromkeys(named))


@dataclass(frozen=True, kw_only=True)
class Effects:
    """Which public columns are made of each row, and which coefficients are personal.

    Attributes:
        formula: `target ~ terms + (1 + terms | client)`. Terms are columns, `bs(column, df)`,
            products `a:b`, and `a * b` for a + b + a:b; "." is every column. A categorical column
            (`levels`) has a 0/1 column for each level but the first. The terms in brackets have a
            coefficient of each client, all others one for all clients. Without brackets clients
            have an intercept of their own.
        basis: "spline" makes a formula by rule: a spline of 5 columns of each number, products of
            two columns where there are at most 10, and coefficients of each client for the
            intercept and the columns themselves.
        encoder: A class, or a function without arguments, that makes a `torch.nn.Module` from rows
            (n, ...) to features (n, d): frozen, public, and the same whenever it is made.
    """

    formula: str = ""
    basis: Literal["none", "spline"] = "none"
    encoder: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if self.encoder is not None and (self.formula or self.basis != "none"):
            raise ValueError(
                "encoder and formula or basis: give one of them; features of an encoder have no "
                "names for a formula"
            )
        if self.formula and self.basis != "none":
            raise ValueError(
                f"formula = {self.formula!r} and basis = {self.basis!r}: give one of them; "
                "bs(column, 5) in a formula is a spline"
            )
        if self.formula:
            parse(self.formula)

    def read_by(self, source: "Source") -> "Source":
        """Return how to read a file: its target, client and columns are those of the formula."""
        if not self.formula:
            return source
        found, usual = parse(self.formula), type(source)()
        given: dict[str, Any] = {}
        for key, name in (("target", found.target), ("client", found.client)):
            declared = getattr(source, key)
            if name and declared not in (name, getattr(usual, key)):
                raise DataError(
                    f"{key} = {declared!r}, but the formula has {name!r}: leave one of them out"
                )
            given |= {key: name} if name else {}
        if _EVERY not in found.columns and not source.features:
            from coterie.data.load import file_columns

            given["features"] = file_columns(source, found.columns)
        return replace(source, **given)

    def design(self, columns: Sequence[str], source: "Source | None" = None) -> "Design":
        """Return the columns that are made of rows with these columns, in this order."""
        groups = _groups(columns, source)
        if self.formula:
            return _resolved(parse(self.formula), tuple(columns), groups)
        plain = [name for name in columns if groups.get(name) == [name]]
        fixed: list[Term] = [((name, SPLINE),) for name in plain]
        fixed += [((name, 0),) for name in groups if name not in plain]
        if len(columns) <= MOST_PRODUCTS:
            fixed += [((a, 0), (b, 0)) for a, b in combinations(groups, 2)]
        random = tuple(((name, 0),) for name in groups)
        return _resolved(Formula("", "", tuple(fixed), random, True), tuple(columns), groups)

    def expand(self, data: FederatedDataset) -> FederatedDataset:
        """Return the data with the columns made of its own."""
        if self.encoder is not None:
            return self.design_of(data.columns, data.spec.shape, data.source).expand(data)
        if data.is_sparse or len(data.spec.shape) != 1:
            kind = "sparse" if data.is_sparse else f"of shape {data.spec.shape}"
            raise DataError(
                f"{data.title}: rows are {kind}; effects are for rows of dense columns: leave "
                "formula= and basis= out"
            )
        return self.design_of(data.columns, data.spec.shape, data.source).expand(data)

    def design_of(
        self, columns: Sequence[str], shape: Sequence[int], source: "Source | None"
    ) -> "Design | Encoded":
        """Return the design of rows of a shape; columns without names are x0, x1, ..."""
        if self.encoder is not None:
            from coterie.data.encoder import Encoded

            return Encoded.of(self.encoder, columns, shape)
        width = math.prod(shape)
        names = [str(name) for name in columns]
        if len(names) != width and source is not None and source.features:
            from coterie.data.tables import feature_names

            names = [made for name in source.features for made in feature_names(name, source)]
        return self.design(names if len(names) == width else _numbered(width), source)


def _numbered(width: int) -> list[str]:
    return [f"x{at}" for at in range(width)]


@dataclass(frozen=True)
class Design:
    """A public map of rows to columns, and which coefficients are personal.

    Attributes:
        columns: The columns it reads, in order.
        names: The columns it makes.
        pieces: What is multiplied for each of them.
        personal: Which coefficients are personal: numbers of `names`; len(names) is the intercept.
    """

    columns: tuple[str, ...]
    names: tuple[str, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    personal: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a row that it reads."""
        return (len(self.columns),)

    def spec(self, given: Spec) -> Spec:
        """Return the spec of the rows that are made."""
        return replace(given, shape=(len(self.names),), personal=self.personal)

    def expand(self, data: FederatedDataset) -> FederatedDataset:
        """Return the data with the columns made of its own."""
        import torch

        assert isinstance(data.features, torch.Tensor)
        if data.spec.features != len(self.columns):
            raise DataError(
                f"{data.title}: rows of {data.spec.features} columns, expected "
                f"{len(self.columns)}: {', '.join(self.columns)}"
            )
        own = [self.names[at] for at in self.personal if at < len(self.names)]
        own = [*(["1"] if len(self.names) in self.personal else []), *own]
        note = f"{len(self.names)} columns made by public maps; personal effects of {_some(own)}"
        return replace(
            data,
            spec=self.spec(data.spec),
            features=self(data.features.flatten(1)).float(),
            columns=self.names,
            notes=(*data.notes, note),
            mapped=None,
            gaps=None,
            design=self,
        )

    def __call__(self, rows: "Tensor") -> "Tensor":
        """Return the columns made of rows (n, columns), float64; NaN of a gap stays one."""
        import torch

        x = rows.double()
        cut = x.clamp(-RANGE, RANGE)
        splines = dict[tuple[int, int], Any]()
        for pieces in self.pieces:
            for column, df, _ in pieces:
                if df and (column, df) not in splines:
                    splines[column, df] = _spline_columns(cut[:, column], df)
        made = []
        for pieces in self.pieces:
            source = x if len(pieces) == 1 else cut
            found = [splines[c, df][:, k] if df else source[:, c] for c, df, k in pieces]
            made.append(reduce(torch.mul, found))
        return torch.stack(made, dim=1)


@lru_cache(maxsize=64)
def curves(width: int) -> Design:
    """Return what `basis = "spline"` adds to so many columns: splines, and products of two."""
    whole = Effects(basis="spline").design(_numbered(width))
    bent = [at for at, one in enumerate(whole.pieces) if len(one) > 1 or one[0][1]]
    names, pieces = tuple(whole.names[at] for at in bent), tuple(whole.pieces[at] for at in bent)
    return Design(whole.columns, names, pieces, ())


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


# --- splines ------------------------------------------------------------------


def knots(df: int) -> NDArray[np.float64]:
    """Return the inner knots of a spline."""
    return np.linspace(-RANGE, RANGE, max(df - 3, 0) + 2)[1:-1]


@lru_cache(maxsize=64)
def weights(df: int) -> tuple[tuple[float, ...], ...]:
    """Return the columns of a spline beside x itself, as sums of truncated powers.

    Rounded, so that they are the same on every machine.
    """
    grid = RANGE * ((2 * np.arange(_GRID) + 1) / _GRID - 1)
    mass = np.exp(-0.5 * np.square(grid / _SPREAD))
    mass /= mass.sum()
    powers = [grid**degree for degree in range(min(df, 3) + 1)]
    powers += [np.maximum(grid - knot, 0) ** 3 for knot in knots(df)]
    values = np.stack(powers, axis=1)
    _, upper = np.linalg.qr(values * np.sqrt(mass)[:, None])
    inverse = np.linalg.inv(upper)
    inverse *= np.sign(np.diag(inverse))
    return tuple(map(tuple, np.round(inverse[:, 2:], 9).tolist()))


def _spline_columns(x: "Tensor", df: int) -> "Tensor":
    import torch

    powers = [x**degree for degree in range(min(df, 3) + 1)]
    powers += [(x - float(knot)).clamp_min(0) ** 3 for knot in knots(df)]
    # Added in order: a row's columns are the same to the last bit in any company.
    columns = (
        reduce(torch.add, (power * one for power, one in zip(powers, column, strict=True)))
        for column in zip(*weights(df), strict=True)
    )
    return torch.stack(list(columns), dim=1)


# --- formulas -----------------------------------------------------------------


def _groups(columns: Sequence[str], source: "Source | None") -> dict[str, list[str]]:
    """Return the columns that a name stands for: itself, or the levels of a category."""
    levels = {} if source is None else source.levels
    found = dict[str, list[str]]()
    for name in columns:
        found[name] = [name]
    for name in levels:
        made = [f"{name}={level}" for level in levels[name]]
        if all(one in found for one in made):
            for one in made:
                del found[one]
            found[name] = made[1:] or made
    return found


def _resolved(
    formula: Formula, columns: tuple[str, ...], groups: Mapping[str, Sequence[str]]
) -> Design:
    place = {name: at for at, name in enumerate(columns)}
    made = dict[tuple[Piece, ...], str]()
    for term in (*formula.fixed, *formula.random):
        made |= dict(_columns_of(term, place, groups))
    own = {key for term in formula.random for key, _ in _columns_of(term, place, groups)}
    if not made:
        raise DataError("the formula has no column; give at least one")
    personal = [at for at, key in enumerate(made) if key in own]
    personal += [len(made)] if formula.intercept else []
    return Design(columns, tuple(made.values()), tuple(made), tuple(personal))


def _columns_of(
    term: Term, place: Mapping[str, int], groups: Mapping[str, Sequence[str]]
) -> Iterator[tuple[tuple[Piece, ...], str]]:
    """Yield the pieces and the name of each column of a term."""
    if any(name == _EVERY for name, _ in term):
        for name in groups:
            yield from _columns_of(
                tuple((name if one == _EVERY else one, df) for one, df in term), place, groups
            )
        return
    options = []
    for name, df in term:
        if name not in groups and name not in place:
            known = list(groups)
            raise DataError(
                f"the formula has {name!r}: no such column; {did_you_mean(name, known)}"
            )
        parts = groups.get(name, [name])
        if df and list(parts) != [name]:
            raise DataError(f"bs({name}, {df}): {name} is a category; leave bs out")
        options.append([*((place[part], 0, 0, part) for part in parts)])
        options[-1] += [
            (place[name], df, at, f"bs({name}, {df})[{at + 1}]") for at in range(df - 1)
        ]
    for chosen in product(*options):
        ordered = sorted(set(chosen))
        yield tuple(part[:3] for part in ordered), ":".join(part[3] for part in ordered)


@lru_cache(maxsize=64)
def parse(text: str) -> Formula:
    """Return a parsed formula.

    >>> parse("score ~ bs(age, 5) + (1 + age | hospital)").random
    ((('age', 0),),)

    Raises:
        DataError: If it is no formula; the message shows one.
    """
    left, tilde, right = text.partition("~")
    if not tilde:
        raise _wrong(text, "it has no ~ between the target and the terms")
    quoted: list[str] = []

    def keep(found: re.Match[str]) -> str:
        quoted.append(found[1])
        return _QUOTED.format(len(quoted) - 1)

    right = re.sub(r"`([^`]*)`", keep, right)
    right = re.sub(r"(?<![\w.)])\.(?![\w.])", _EVERY, right).replace(":", "**")
    try:
        tree = ast.parse(right.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _wrong(text, "its terms cannot be read") from error
    reader = _Reader(text, quoted)
    fixed, random, client, intercept = reader.read(tree)
    return Formula(left.strip().strip("`"), client, fixed, random, intercept)


def _wrong(text: str, why: str) -> DataError:
    return DataError(f"formula = {text!r}: {why}; expected one such as {_EXAMPLE!r}")


@dataclass(frozen=True)
class _Reader:
    """Reads the syntax tree of a formula; nothing of it is ever evaluated."""

    text: str
    quoted: Sequence[str]

    def read(self, tree: ast.expr) -> tuple[tuple[Term, ...], tuple[Term, ...], str, bool]:
        """Return fixed and random terms, the client, and whether it has intercepts of its own."""
        fixed, random, client, intercept = list[Term](), list[Term](), "", True
        groups = [node for _, node in self._summands(tree) if _is_group(node)]
        for node in groups:
            assert isinstance(node, ast.BinOp)
            name = self._name(node.right)
            if client and name != client:
                raise self._error(
                    f"it has groups {client!r} and {name!r}: there is one, the client"
                )
            client = name
        own = list[bool]()
        for sign, node in self._summands(tree):
            if not _is_group(node):
                fixed += self._summand(sign, node, fixed)
                continue
            assert isinstance(node, ast.BinOp)
            own.append(self._keeps_intercept(node.left))
            for inner, part in self._summands(node.left):
                random += self._summand(inner, part, random)
        if not self._keeps_intercept(tree):
            raise self._error(
                "it has no intercept: leave 0 and -1 out of the fixed terms (a model without one "
                "is --set method.model.bias=false)"
            )
        intercept = any(own) if groups else True
        return tuple(dict.fromkeys(fixed)), tuple(dict.fromkeys(random)), client, intercept

    def _error(self, why: str) -> DataError:
        return _wrong(self.text, why)

    def _summands(self, node: ast.expr, sign: int = 1) -> Iterator[tuple[int, ast.expr]]:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            yield from self._summands(node.left, sign)
            yield from self._summands(node.right, sign if isinstance(node.op, ast.Add) else -sign)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield from self._summands(node.operand, -sign)
        else:
            yield sign, node

    def _keeps_intercept(self, node: ast.expr) -> bool:
        found = [(sign, _constant(part)) for sign, part in self._summands(node)]
        return (1, 0) not in found and (-1, 1) not in found

    def _summand(self, sign: int, node: ast.expr, before: Sequence[Term]) -> list[Term]:
        if _constant(node) in (0, 1):
            return []
        if sign < 0:
            raise self._error(f"- {ast.unparse(node)}: only -1 can be taken away")
        return self._terms(node)

    def _terms(self, node: ast.expr) -> list[Term]:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Pow):
            left, right = self._terms(node.left), self._terms(node.right)
            both = [tuple(dict.fromkeys((*a, *b))) for a in left for b in right]
            return both if isinstance(node.op, ast.Pow) else [*left, *right, *both]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return [*self._terms(node.left), *self._terms(node.right)]
        if isinstance(node, ast.Call):
            return [(self._spline(node),)]
        return [((self._name(node), 0),)]

    def _spline(self, node: ast.Call) -> Factor:
        names = {"df": node.args[1]} if len(node.args) == 2 else {}
        names |= {str(one.arg): one.value for one in node.keywords}
        function = ast.unparse(node.func)
        if function != "bs" or not 1 <= len(node.args) <= 2 or set(names) - {"df"}:
            raise self._error(f"{ast.unparse(node)}: the one function is bs(column, df)")
        df = _constant(names["df"]) if names else SPLINE
        if df is None or not _LEAST_DF <= df <= _MOST_DF:
            raise self._error(
                f"{ast.unparse(node)}: expected {_LEAST_DF} to {_MOST_DF} degrees of freedom"
            )
        return self._name(node.args[0]), df

    def _name(self, node: ast.expr) -> str:
        if not isinstance(node, ast.Name | ast.Attribute):
            raise self._error(f"{ast.unparse(node).replace('**', ':')}: expected a column")
        name = ast.unparse(node)
        found = re.fullmatch(_QUOTED.format(r"(\d+)"), name)
        return self.quoted[int(found[1])] if found else name


def _is_group(node: ast.expr) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)


def _constant(node: ast.expr) -> int | None:
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None
