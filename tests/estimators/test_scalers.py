"""Scaling that pools is found out, other scaling is left alone, and that by own rows is exact."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from sklearn import preprocessing
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.datasets import load_diabetes, load_digits
from sklearn.decomposition import PCA
from sklearn.impute import SimpleImputer
from sklearn.pipeline import FeatureUnion, make_pipeline

import coterie as ct
from coterie.estimators.scalers import find_pooled

pytestmark = pytest.mark.full

SCALERS = [
    preprocessing.StandardScaler(),
    preprocessing.StandardScaler(with_mean=False),
    preprocessing.RobustScaler(),
    preprocessing.MinMaxScaler(),
    preprocessing.MaxAbsScaler(),
    preprocessing.QuantileTransformer(n_quantiles=20),
    PCA(whiten=True),
]


def rows(count=200, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(count, 3)) * [1.0, 20.0, 0.3] + [5.0, -1000.0, 0.0]
    y = X @ [0.1, 0.01, 1.0] + rng.normal(size=count)
    return X.astype(dtype), y, rng.integers(0, 5, size=count)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("scaler", SCALERS, ids=str)
def test_scalers_of_all_rows_are_found_out(scaler, dtype):
    X, y, who = rows(dtype=dtype)
    assert find_pooled(X) is None
    scaled = scaler.fit_transform(X)
    assert "of X with" in find_pooled(scaled)
    with pytest.raises(ct.PooledScalingError, match=r"PerClientScaler.*ConstantScaler"):
        ct.CoterieRegressor("pmtl").fit(scaled, y, clients=who)


def test_other_hands_are_found_out_too():
    X, y, who = rows()
    by_pandas = (X - X.mean(axis=0)) / X.std(axis=0, ddof=1)
    assert find_pooled(by_pandas) is not None
    one_of_three = np.column_stack([X[:, :2], preprocessing.scale(X[:, 2])])
    assert "column 2 (from 0)" in find_pooled(one_of_three)
    with pytest.raises(ct.PooledScalingError, match="the target"):
        TransformedTargetRegressor(
            ct.CoterieRegressor("pmtl"), transformer=preprocessing.StandardScaler()
        ).fit(X / 1000, y, clients=who)
    held = sparse.random(200, 4, density=0.5, format="csr", random_state=0)
    assert find_pooled(held) is None
    assert "MaxAbs" in find_pooled(preprocessing.maxabs_scale(held))
    assert "deviation 1" in find_pooled(preprocessing.scale(held, with_mean=False))


def test_a_pipeline_with_a_pooling_scaler_raises_and_warns_on_demand():
    X, y, who = rows()
    told = {"coterieregressor__clients": who}
    for on_pooled in ("raise", "warn", "ignore"):
        estimator = ct.CoterieRegressor("local", on_pooled=on_pooled)
        pipeline = make_pipeline(preprocessing.StandardScaler(), estimator)
        if on_pooled == "raise":
            with pytest.raises(ct.PooledScalingError, match="StandardScaler"):
                pipeline.fit(X, y, **told)
        elif on_pooled == "warn":
            with pytest.warns(ct.PrivacyWarning, match="epsilon does not cover"):
                pipeline.fit(X, y, **told)
        else:
            pipeline.fit(X, y, **told)
            assert pipeline.predict(X, clients=who).shape == y.shape


def test_pooled_scaling_matters_where_something_is_promised_to_several():
    X, y, who = rows()
    scaled = preprocessing.scale(X)
    ct.CoterieRegressor("pmtl", epsilon=np.inf).fit(scaled, y, clients=who)
    ct.CoterieRegressor("pmtl").fit(scaled, y)  # one client's own rows
    # by own rows afterwards: the same as if it had never been pooled
    own = ct.CoterieRegressor("local", standardise="client").fit(scaled, y, clients=who)
    never = ct.CoterieRegressor("local", standardise="client").fit(X, y, clients=who)
    np.testing.assert_allclose(own.predict(scaled, who), never.predict(X, who), atol=1e-4)


@pytest.mark.parametrize("name", ["pixels", "shares", "contrasts", "counts", "ratings"])
def test_what_looks_scaled_by_design_is_left_alone(name):
    rng = np.random.default_rng(0)
    designs = {
        "pixels": load_digits().data / 16,
        "shares": np.clip(rng.normal(0.5, 0.4, size=(400, 3)), 0, 1),
        "contrasts": np.tile([[1.0, -1.0], [-1.0, 1.0]], (200, 1)),
        "counts": rng.integers(-1, 2, size=(400, 3)).astype(float),
        "ratings": rng.choice([-1.0, -0.5, 0.0, 0.5, 1.0], size=(400, 3)),
    }
    assert find_pooled(designs[name]) is None


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_scaling_by_own_rows_is_no_pooling(dtype):
    # Where each client's mean is 0 and deviation 1, those of all together are, too.
    X, y, who = rows(dtype=dtype)
    own = ct.PerClientScaler().fit_transform(X, clients=who)
    assert find_pooled(own) is not None and find_pooled(own, codes=who) is None
    assert find_pooled(own.astype(np.float64), codes=who) is None
    assert ct.CoterieRegressor("pmtl").fit(own, y, clients=who).epsilon_ <= 1


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(2, 60), width=st.integers(1, 4))
def test_chance_does_not_look_like_scaling(seed, count, width):
    rng = np.random.default_rng(seed)
    for X in (rng.normal(size=(count, width)), rng.uniform(size=(count, width))):
        assert find_pooled(X) is None and find_pooled(X.astype(np.float32)) is None


def test_a_scaler_by_own_rows_is_that_of_the_library():
    X, y, who = rows()
    X[who == 2, 1] = 7.3  # a column that does not vary in one client
    data = ct.from_arrays(X, y, who, task="regression")
    expected, _ = ct.standardise_clients(data)
    scaler = ct.PerClientScaler().fit(X, clients=who)
    found = scaler.transform(X, clients=who)
    order = np.argsort(who, kind="stable")
    np.testing.assert_allclose(found[order], expected.features.numpy(), atol=2e-4)
    assert (found[who == 2, 1] == 0).all()
    np.testing.assert_allclose(scaler.center_[3], X[who == 3].mean(axis=0))
    held = np.where(np.abs(X) < 5, 0.0, X)
    thin = ct.from_arrays(sparse.csr_matrix(held), y, who, task="regression")
    expected, _ = ct.standardise_clients(thin)
    found = ct.PerClientScaler().fit_transform(sparse.csr_matrix(held), clients=who)
    np.testing.assert_allclose(found.toarray()[order], expected.features.toarray(), atol=2e-4)


def test_a_scaler_by_own_rows_tells_nobody_about_anybody():
    X, _, who = rows()
    scaler = ct.PerClientScaler().fit(X, clients=who)
    moved = X.copy()
    moved[who == 1] *= 3.0
    other = ct.PerClientScaler().fit(moved, clients=who)
    rest = who != 1
    np.testing.assert_array_equal(
        scaler.transform(X[rest], clients=who[rest]), other.transform(X[rest], clients=who[rest])
    )
    with pytest.raises(ValueError, match="was not fitted"):
        scaler.transform(X, clients=who + 1)
    with pytest.raises(ValueError, match="give each row's client"):
        scaler.transform(X)


def test_constants_are_applied_as_by_the_library():
    X, y, who = rows()
    center, scale = [5.0, -1000.0, 0.0], [1.0, 20.0, 0.5]
    found = ct.ConstantScaler(center, scale, clip=2.0).fit_transform(X)
    data = ct.from_arrays(X, y, who, task="regression")
    expected = ct.apply_constants(data, center, scale, clip=2.0).features.numpy()
    np.testing.assert_allclose(found[np.argsort(who, kind="stable")], expected, atol=2e-4)
    for bad in ({"scale": 0.0}, {"center": [1.0, 2.0]}, {"clip": -1.0}):
        with pytest.raises(ValueError, match=r"expected|positive"):
            ct.ConstantScaler(**bad).fit(X)
    with pytest.raises(ValueError, match="center = 0"):
        ct.ConstantScaler(center=1.0).fit(sparse.csr_matrix(X))


def test_pipelines_name_their_pooling_steps():
    estimator = ct.CoterieRegressor()
    columns = ColumnTransformer(
        [
            ("good", preprocessing.OneHotEncoder(categories=[["a", "b"]]), [0]),
            ("bad", preprocessing.OneHotEncoder(), [1]),
            ("dropped", "drop", [2]),
        ],
        remainder=SimpleImputer(),
    )
    union = FeatureUnion([("pca", PCA(2)), ("norm", preprocessing.Normalizer())])
    found = ct.check_pipeline(make_pipeline(columns, union, ct.PerClientScaler(), estimator))
    assert [one.partition(":")[0] for one in found] == [
        "columntransformer.bad",
        "columntransformer.remainder",
        "featureunion.pca",
    ]
    clean = make_pipeline(
        SimpleImputer(strategy="constant", fill_value=0.0),
        ct.ConstantScaler(scale=2.0),
        preprocessing.FunctionTransformer(),
        preprocessing.PolynomialFeatures(2),
        estimator,
    )
    assert ct.check_pipeline(clean) == ()
    assert ct.check_pipeline(preprocessing.StandardScaler()) != ()
    assert ct.check_pipeline(estimator) == ()


def test_data_that_was_published_centred_is_left_alone():
    X, _ = load_diabetes(return_X_y=True)
    assert find_pooled(X) is None
