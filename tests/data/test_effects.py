"""Formulas and public columns: against B-splines of SciPy, quadrature, and columns made by hand."""

import math

import numpy as np
import pytest
import torch
from scipy.interpolate import BSpline

from coterie.core.config import ConfigError
from coterie.data.config import DataConfig, Source
from coterie.data.effects import Effects, knots, parse, weights
from coterie.data.federated import DataError
from coterie.data.load import from_arrays
from coterie.planning.plan import Plan


def data(columns=("age", "stay", "sex=F", "sex=M"), rows=40, seed=0, **source):
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((rows, len(columns)))
    if "sex=F" in columns:
        x[:, 2] = np.arange(rows) % 2
        x[:, 3] = 1 - x[:, 2]
    owner = np.arange(rows) % 4
    given = Source(**source)
    found = from_arrays(x, draw.standard_normal(rows), owner, columns=columns, source=given)
    return found


SEX = {"levels": {"sex": ("F", "M")}}


def made(formula, given=None, **source):
    """Return the columns of a formula by name, and its data."""
    given = data() if given is None else given
    design = Effects(formula=formula).design(given.columns, Source(**source))
    found = design.expand(given)
    return dict(zip(found.columns, found.features.numpy().T, strict=True)), found, given


@pytest.mark.parametrize(
    ("text", "fixed", "random", "client", "intercept"),
    [
        ("y ~ a", "a", "", "", True),
        ("y ~ a + b + a:b", "a b a:b", "", "", True),
        ("y ~ 1 + a*b", "a b a:b", "", "", True),
        ("y ~ a*b*c", "a b a:b c a:c b:c a:b:c", "", "", True),
        ("y ~ a + (1 | h)", "a", "", "h", True),
        ("y ~ a + (1 + a | h)", "a", "a", "h", True),
        ("y ~ a + (0 + a | h)", "a", "a", "h", False),
        ("y ~ a + (a - 1 | h)", "a", "a", "h", False),
        ("y ~ (1 + day.year | h)", "", "day.year", "h", True),
        ("y ~ `a b` + (1 | `the h`)", "a b", "", "the h", True),
    ],
)
def test_formulas(text, fixed, random, client, intercept):
    found = parse(text)

    def shown(terms):
        return [":".join(name for name, _ in term) for term in terms]

    assert shown(found.fixed) == (fixed.split() if "`" not in text else [fixed])
    assert shown(found.random) == random.split()
    assert (found.target, found.client, found.intercept) == ("y", client, intercept)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a + b", "no ~"),
        ("y ~ a +", "cannot be read"),
        ("y ~ __import__('os').system('true')", "one function is bs"),
        ("y ~ log(a)", "one function is bs"),
        ("y ~ bs(a, 40)", "degrees of freedom"),
        ("y ~ a - b", "only -1 can be taken away"),
        ("y ~ 0 + a", "no intercept"),
        ("y ~ a + (1 | g) + (1 | h)", "groups"),
        ("y ~ a[0]", "expected a column"),
    ],
)
def test_what_is_no_formula_is_refused_with_an_example(text, why):
    with pytest.raises(DataError, match=r"bs\(age, 5\)") as told:
        parse(text)
    assert why in str(told.value)


@pytest.mark.parametrize("df", [2, 3, 4, 5, 8, 12])
def test_a_spline_spans_the_cubic_splines_of_its_knots(df):
    """B-splines of SciPy on the same knots are combinations of 1, x and ours, and no others are."""
    x = np.linspace(-3, 3, 400)
    columns, _, _ = made(
        f"y ~ bs(a, {df})", from_arrays(x[:, None], x, np.arange(400) % 4, columns=["a"])
    )
    order = np.argsort(np.arange(400) % 4, kind="stable")
    ours = np.column_stack([np.ones(400), *columns.values()])
    degree = min(df, 3)
    ends = np.repeat([-3.0, 3.0], degree + 1)
    full = np.concatenate([ends[: degree + 1], knots(df), ends[degree + 1 :]])
    theirs = BSpline.design_matrix(x[order], full, degree).toarray()
    assert ours.shape[1] == theirs.shape[1] == df + 1 == np.linalg.matrix_rank(ours)
    fitted = ours @ np.linalg.lstsq(ours, theirs, rcond=None)[0]
    np.testing.assert_allclose(fitted, theirs, atol=2e-6)


@pytest.mark.parametrize("df", [3, 5, 9])
def test_a_spline_is_orthonormal_under_the_reference(df):
    nodes, mass = np.polynomial.legendre.leggauss(400)
    x, mass = 3 * nodes, mass * np.exp(-0.5 * (3 * nodes / 1.5) ** 2)
    table = np.array(weights(df))
    powers = [x**degree for degree in range(min(df, 3) + 1)]
    powers += [np.maximum(x - knot, 0) ** 3 for knot in knots(df)]
    columns = np.column_stack([np.ones_like(x), x, np.column_stack(powers) @ table])
    gram = (columns * mass[:, None]).T @ columns / mass.sum()
    np.testing.assert_allclose(gram[2:, 2:], np.eye(df - 1), atol=1e-4)
    np.testing.assert_allclose(gram[:2, 2:], 0, atol=1e-4)


def test_columns_are_products_clamped_and_levels_but_the_first():
    columns, found, given = made("y ~ age*stay + sex:stay + (1 + stay | client)", **SEX)
    x = given.features.numpy().astype(float)
    cut = np.clip(x, -3, 3)
    assert list(columns) == ["age", "stay", "age:stay", "stay:sex=M"]
    np.testing.assert_allclose(columns["age"], x[:, 0], rtol=1e-6)
    np.testing.assert_allclose(columns["age:stay"], cut[:, 0] * cut[:, 1], rtol=1e-6)
    np.testing.assert_allclose(columns["stay:sex=M"], cut[:, 1] * x[:, 3], rtol=1e-6)
    assert found.spec.shape == (4,)
    assert found.spec.personal == (1, 4)  # stay, and the intercept


def test_beyond_the_range_a_spline_and_a_product_stay_what_they_are_at_its_end():
    x = np.array([[3.0, 1.0], [8.0, 1.0], [-3.0, 2.0], [-1e9, 2.0]])
    columns, _, _ = made("y ~ bs(a) + a:b", from_arrays(x, x[:, 0], [0] * 4, columns=["a", "b"]))
    for name, values in columns.items():
        if name != "a":  # the column itself goes on
            assert values[0] == values[1], name
            assert values[2] == values[3], name


def test_a_row_is_mapped_alone():
    """What one row becomes does not depend on any other: the map releases nothing."""
    given = data()
    design = Effects(basis="spline").design(given.columns, Source(**SEX))
    whole = design(given.features)
    for row in range(0, 40, 7):
        assert torch.equal(design(given.features[row : row + 1])[0], whole[row])


def test_the_spline_basis_has_splines_products_and_personal_slopes_of_columns():
    found = Effects(basis="spline").design(["age", "stay", "sex=F", "sex=M"], Source(**SEX))
    splines = [f"bs({name}, 5)[{at}]" for name in ("age", "stay") for at in range(1, 5)]
    assert sorted(found.names) == sorted(
        ["age", "stay", "sex=M", *splines, "age:stay", "age:sex=M", "stay:sex=M"]
    )
    own = {found.names[at] for at in found.personal[:-1]}
    assert own == {"age", "stay", "sex=M"}
    assert found.personal[-1] == len(found.names)
    wide = Effects(basis="spline").design([f"x{at}" for at in range(11)])
    assert len(wide.names) == 55  # splines, and no products


def test_a_formula_says_what_is_read(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("ward,age,sex,note,score\n" + "a,1.5,M,x,2\nb,-4,F,y,3\n" * 3)
    effects = Effects(formula="score ~ bs(age, 4) + sex + (1 | ward)")
    config = DataConfig(name=str(path), effects=effects, source=Source(**SEX, task="regression"))
    train, test = config.split()
    assert train.names == ("a", "b")
    assert list(train.columns) == [*test.columns]
    assert train.design.columns == ("age", "sex=F", "sex=M")
    assert train.left_out == ("note",)
    every = DataConfig(name=str(path), effects=Effects(formula="score ~ . + (1 | ward)"))
    assert every.source.features == ()
    with pytest.raises(DataError, match="the formula has 'score'"):
        DataConfig(name=str(path), effects=effects, source=Source(target="other"))


def test_a_plan_keeps_its_effects():
    table = {"data": {"name": "x.csv"}, "privacy": {"epsilon": 1.0}, "method": {"kind": "pfeb"}}
    one = Plan.from_table(table | {"effects": {"formula": "y ~ bs(a) + (1 | client)"}})
    assert one.data.effects == Effects(formula="y ~ bs(a) + (1 | client)")
    assert Plan.from_table(one.to_table()) == one
    with pytest.raises(ConfigError, match="give one of them"):
        Plan.from_table(table | {"effects": {"formula": "y ~ a", "basis": "spline"}})


def test_refusals():
    given = data()
    with pytest.raises(DataError, match=r"'agee': no such column; did you mean age"):
        Effects(formula="y ~ agee").expand(given)
    with pytest.raises(DataError, match="is a category"):
        Effects(formula="y ~ bs(sex)").design(given.columns, Source(**SEX))
    sparse = data(("a", "b"), sparse=True)
    with pytest.raises(DataError, match="rows are sparse"):
        Effects(basis="spline").expand(sparse)


def test_gaps_stay_gaps():
    x = np.array([[1.0, 2.0], [math.nan, 1.0]])
    design = Effects(formula="y ~ bs(x0) + x0:x1").design(["x0", "x1"])
    found = design(torch.from_numpy(x))
    assert bool(found[0].isfinite().all())
    assert bool(found[1].isnan().all())
