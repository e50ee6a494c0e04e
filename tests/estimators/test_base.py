"""The estimators against closed forms, scikit-learn, and the library's own runs."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import sklearn
from scipy import sparse
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression, Ridge, RidgeCV
from sklearn.metrics import accuracy_score, r2_score
from sklearn.model_selection import GridSearchCV, GroupKFold, KFold, cross_val_score
from sklearn.pipeline import make_pipeline

import coterie as ct
from coterie.estimators import base
from coterie.estimators.base import count_fit, sketch_rows
from coterie.methods.base import Shape, choices

pytestmark = pytest.mark.full

FEATURES = 3


@pytest.fixture
def routing():
    with sklearn.config_context(enable_metadata_routing=True):
        yield


def federation(clients=8, rows=12, seed=0, spread=0.3):
    """Rows in any order, clients by name, targets that clients weigh differently."""
    rng = np.random.default_rng(seed)
    ids = rng.permutation(np.repeat(np.arange(clients), rows))
    X = rng.normal(size=(len(ids), FEATURES))
    weights = rng.normal(size=(clients, FEATURES)) * spread + [1.0, -0.5, 0.2]
    y = 0.5 * (X * weights[ids]).sum(axis=1) + 0.1 * rng.normal(size=len(ids))
    return X, y, np.array([f"school {k}" for k in ids])


def ridge_alone(X, y, lam):
    """The least mean of squares / 2 + lam/2 |w|^2, the bias penalised like the weights."""
    wide = np.column_stack([X, np.ones(len(X))])
    return Ridge(alpha=lam * len(X), fit_intercept=False).fit(wide, y)


def test_local_is_ridge_of_each_client():
    X, y, who = federation()
    found = ct.CoterieRegressor("local", method_settings={"lam": 0.2}).fit(X, y, clients=who)
    assert found.epsilon_ == 0 and found.guarantee_.events == ()
    for name in np.unique(who):
        own = who == name
        wide = np.column_stack([X[own], np.ones(own.sum())])
        expected = ridge_alone(X[own], y[own], 0.2).predict(wide)
        np.testing.assert_allclose(found.predict(X[own], who[own]), expected, atol=1e-5)


def test_pooled_without_privacy_is_one_ridge():
    X, y, who = federation()
    found = ct.CoterieRegressor("pooled", epsilon=np.inf).fit(X, y, clients=who)
    assert found.epsilon_ == np.inf
    wide = np.column_stack([X, np.ones(len(X))])
    # Both choose among these penalties by leaving single rows out.
    expected = RidgeCV(alphas=(0.01, 0.1, 1.0, 10.0, 100.0, 1000.0), fit_intercept=False)
    np.testing.assert_allclose(
        found.predict(X, clients=who), expected.fit(wide, y).predict(wide), atol=1e-5
    )


def test_one_client_learns_alone_like_logistic_regression():
    X, y, _ = federation(clients=1, rows=60)
    labels = np.where(y > 0, "yes", "no")
    steps = ct.SGD(epochs=400, lr=0.02)
    found = ct.CoterieClassifier(ct.Local(lam=0.1, sgd=steps), random_state=0).fit(X, labels)
    assert found.epsilon_ == 0 and len(found.clients_) == 1
    wide = np.column_stack([X, np.ones(len(X))])
    fitted = LogisticRegression(C=1 / (0.1 * len(X)), fit_intercept=False, tol=1e-8)
    expected = fitted.fit(wide, labels).predict_proba(wide)
    np.testing.assert_allclose(found.predict_proba(X), expected, atol=1e-3)  # found by steps
    assert list(found.classes_) == ["no", "yes"]


@pytest.mark.filterwarnings("ignore::coterie.PrivacyWarning")
@pytest.mark.parametrize("method", ["auto", "pmtl", "fedavg"])
def test_it_is_the_same_run_as_simulate(method):
    X, y, who = federation()
    found = ct.CoterieRegressor(method, epsilon=2.0, random_state=3).fit(X, y, clients=who)
    data = ct.from_arrays(X, y, who, task="regression")
    named = None if method == "auto" else choices()[method]()
    plan = ct.plan_for(data.spec, ct.Privacy(epsilon=2.0), method=named, simulation_seed=3)
    outcome = ct.simulate(plan, data)
    assert found.plan_ == plan and found.guarantee_ == outcome.guarantee
    assert list(found.clients_) == list(data.names)
    for client, answers in enumerate(ct.predict(outcome, data)):
        own = who == data.names[client]
        np.testing.assert_array_equal(found.predict(X[own], who[own]), answers)


def test_epsilon_is_that_of_the_guarantee_for_other_clients():
    X, y, who = federation()
    sampler = ct.FixedSize(4)
    settings = {"relation": "replace", "cohort": sampler, "rounds": 3, "epsilon": 2.0}
    found = ct.CoterieRegressor("fedavg", **settings).fit(X, y, clients=who)
    assert found.epsilon_ == found.guarantee_.epsilon
    assert found.epsilon_ > found.guarantee_.views["outsider"]  # others know who was invited
    assert found.delta_ == found.guarantee_.delta
    assert found.guarantee_.clients == 8 and not found.guarantee_.simulation


def test_noise_can_be_given_instead_of_a_budget():
    X, y, who = federation()
    noisy = ct.CoterieRegressor("pmtl", epsilon=None, noise_multiplier=20.0, rounds=3, clip=0.2)
    noisy.fit(X, y, clients=who)
    assert noisy.plan_.noise_multipliers(8) == (20.0,) * 3 and noisy.plan_.clip(8) == 0.2
    with pytest.raises(ValueError, match="exactly one"):
        ct.CoterieRegressor("pmtl", noise_multiplier=20.0).fit(X, y, clients=who)


def test_a_verdict_against_joining_is_a_caveat():
    X, y, who = federation(seed=71)  # eight clients
    caveats = ct.CoterieRegressor(epsilon=1.0).fit(X, y, clients=who).caveats_
    assert "Learn alone" in caveats[-1] and "method='local'" in caveats[-1]
    X, y, who = federation(seed=72)
    named = ct.CoterieRegressor("pfeb", epsilon=1.0).fit(X, y, clients=who)
    assert not any("Learn alone" in caveat for caveat in named.caveats_)


def test_a_random_state_is_a_simulation_and_says_so():
    X, y, who = federation()
    with pytest.warns(ct.PrivacyWarning, match="protects nobody"):
        first = ct.CoterieRegressor("pmtl", random_state=1).fit(X, y, clients=who)
    with pytest.warns(ct.PrivacyWarning):
        again = ct.CoterieRegressor("pmtl", random_state=1).fit(X, y, clients=who)
    assert first.guarantee_.simulation and "protects nobody" in first.caveats_[-1]
    np.testing.assert_array_equal(first.predict(X, who), again.predict(X, who))
    assert not ct.CoterieRegressor("pmtl").fit(X, y, clients=who).guarantee_.simulation


def test_private_noise_is_new_each_time():
    X, y, who = federation()
    one = ct.CoterieRegressor("fedavg").fit(X, y, clients=who)
    with pytest.warns(ct.PrivacyWarning, match="fit 2 of these rows"):
        two = ct.CoterieRegressor("fedavg").fit(X, y, clients=who)
    assert not np.allclose(one.predict(X, who), two.predict(X, who))


def test_fits_of_the_same_rows_are_counted_and_said_once():
    X, y, who = federation(rows=20)
    part = np.arange(len(y)) % 5 != 0
    ct.CoterieRegressor("pmtl").fit(X[part], y[part], clients=who[part])
    with pytest.warns(ct.PrivacyWarning, match=r"together up to 2 .*covered by none"):
        ct.CoterieRegressor("pmtl").fit(X, y, clients=who)
    third = ct.CoterieRegressor("pmtl").fit(X, y, clients=who)  # a warning would be an error
    assert "fit 3 of these rows" in third.caveats_[-1]
    with pytest.warns(ct.PrivacyWarning, match="fit 2 of these rows"):  # scaled in between
        base._PAST_FITS.clear()
        for factor in (1.0, 0.5):
            ct.CoterieRegressor("pmtl").fit(factor * X, y, clients=who)
    other = federation(seed=1)
    assert ct.CoterieRegressor("pmtl").fit(*other[:2], clients=other[2]).caveats_ == ()
    local = ct.CoterieRegressor("local").fit(X, y, clients=who)
    assert local.caveats_ == ()  # it releases nothing


def test_classes_read_off_y_are_assumed_and_declared_ones_are_not():
    X, y, who = federation()
    labels = np.digitize(y, [-0.3, 0.3]) + 5
    found = ct.CoterieClassifier("pmtl").fit(X, labels, clients=who)
    assert found.classes_.tolist() == [5, 6, 7]
    assert "classes taken from the labels of y (5, 6, 7)" in found.guarantee_.assumed[0]
    declared = ct.CoterieClassifier("local", classes=[5, 6, 7, 8]).fit(X, labels, clients=who)
    assert declared.guarantee_.assumed == () and declared.classes_.tolist() == [5, 6, 7, 8]
    odds = declared.predict_proba(X, who)
    assert odds.shape == (len(y), 4) and np.allclose(odds.sum(axis=1), 1)
    np.testing.assert_allclose(np.log(odds), declared.predict_log_proba(X, who))
    chosen = declared.classes_[declared.decision_function(X, who).argmax(axis=1)]
    np.testing.assert_array_equal(chosen, declared.predict(X, who))
    with pytest.raises(ValueError, match="not among the declared classes"):
        ct.CoterieClassifier(classes=[5, 6]).fit(X, labels, clients=who)
    with pytest.raises(ValueError, match="one class"):
        ct.CoterieClassifier().fit(X, np.ones(len(y)), clients=who)


def test_support_vector_machines_have_no_probabilities():
    machine = ct.CoterieClassifier("mtlsvm")
    assert not hasattr(machine, "predict_proba") and hasattr(machine, "decision_function")
    assert hasattr(ct.CoterieClassifier(), "predict_proba")


@pytest.mark.parametrize("name", sorted(choices()))
@pytest.mark.filterwarnings("ignore::coterie.PrivacyWarning")
def test_every_method_fits_and_predicts_or_says_why_not(name):
    X, y, who = federation(clients=5, rows=8)
    tasks = {
        ct.CoterieRegressor: (y, r2_score),
        ct.CoterieClassifier: (np.digitize(y, [-0.3, 0.3]), accuracy_score),
    }
    pooled = choices()[name]().shape if name != "auto" else Shape.SUM
    for kind, (targets, metric) in tasks.items():
        epsilon = np.inf if pooled is Shape.POOLED else 4.0
        estimator = kind(name, epsilon=epsilon, rounds=2, random_state=0)
        try:
            estimator.fit(X, targets, clients=who)
        except ValueError as error:
            assert kind is ct.CoterieClassifier and "use " in str(error)
            continue
        predicted = estimator.predict(X, clients=who)
        assert predicted.shape == targets.shape and np.isfinite(predicted).all()
        assert estimator.score(X, targets, clients=who) == metric(targets, predicted)
        assert estimator.epsilon_ <= 4.0 or pooled is Shape.POOLED
        again = pickle.loads(pickle.dumps(estimator))
        np.testing.assert_array_equal(again.predict(X, clients=who), predicted)
        assert not hasattr(again, "outcome_") and again.guarantee_ == estimator.guarantee_


@pytest.mark.filterwarnings("ignore::coterie.NewClientWarning")
@pytest.mark.parametrize("name", sorted(set(choices()) - {"auto"}))
def test_a_shared_model_speaks_for_strangers_or_nobody_does(name):
    X, y, who = federation(clients=12, spread=0.0)
    found = ct.CoterieRegressor(name, epsilon=np.inf, rounds=20).fit(X, y, clients=who)
    strangers = np.full(len(y), "somewhere")
    if found._common is None:
        with pytest.raises(ValueError, match="no shared model"):
            found.predict(X, clients=strangers)
    else:  # clients are alike here, so what they share is a good model of anybody
        assert found.score(X, y, clients=strangers) > 0.6


def test_strangers_are_warned_of_and_close_names_are_given():
    X, y, who = federation()
    found = ct.CoterieRegressor("pmtl", epsilon=np.inf).fit(X, y, clients=who)
    asked = np.where(np.arange(len(y)) == 0, "schol 3", who)
    with pytest.warns(ct.NewClientWarning, match="'schol 3' .close: 'school 3'"):
        answers = found.predict(X, clients=asked)
    np.testing.assert_array_equal(answers[1:], found.predict(X, clients=who)[1:])
    local = ct.CoterieRegressor("local").fit(X, y, clients=who)
    with pytest.raises(ValueError, match="close: 'school 3'"):
        local.predict(X, clients=asked)
    with pytest.raises(ValueError, match="8 clients with a model each"):
        local.predict(X)


@pytest.mark.parametrize("standardise", ["none", "client"])
def test_newcomers_join_and_have_models_of_their_own(standardise):
    X, y, who = federation()
    late = np.isin(who, ["school 6", "school 7"])
    settings = {"epsilon": np.inf, "standardise": standardise}
    found = ct.CoterieRegressor("pmtl", **settings).fit(X[~late], y[~late], clients=who[~late])
    before = found.predict(X[~late], who[~late])
    found.join(X[late], y[late], who[late])
    assert set(found.clients_) == set(who) and found.guarantee_.clients == 6
    np.testing.assert_array_equal(found.predict(X[~late], who[~late]), before)
    if standardise == "none":
        data = ct.from_arrays(X[late], y[late], who[late], task="regression")
        models = found.outcome_.onboard(data)
        own = who == data.names[1]
        expected = X[own] @ models["weight"][1, 0].numpy() + models["bias"][1].numpy()
        np.testing.assert_allclose(found.predict(X[own], who[own]), expected, atol=1e-5)
    assert found.score(X[late], y[late], who[late]) > 0.9
    with pytest.raises(ValueError, match="has a model already"):
        found.join(X[late], y[late], who[late])


def test_own_standardisation_is_that_of_the_library():
    X, y, who = federation()
    X = X * [1.0, 50.0, 0.01] + [3.0, 1000.0, 0.0]
    settings = {"epsilon": np.inf, "method_settings": {"lam": 0.5}}
    found = ct.CoterieRegressor("pmtl", standardise="client", **settings).fit(X, y, clients=who)
    data = ct.from_arrays(X, y, who, task="regression")
    scaled, _ = ct.standardise_clients(data)
    plan = ct.plan_for(scaled.spec, ct.Privacy(epsilon=np.inf), method=ct.PMTL(lam=0.5))
    for client, answers in enumerate(ct.predict(ct.simulate(plan, scaled), scaled)):
        own = who == data.names[client]
        np.testing.assert_allclose(found.predict(X[own], who[own]), answers, atol=2e-5)


def test_targets_of_other_units_go_by_public_constants():
    X, y, who = federation()
    plain = ct.CoterieRegressor("pfeb", epsilon=np.inf).fit(X, y, clients=who)
    moved = ct.CoterieRegressor("pfeb", epsilon=np.inf, target_center=500.0, target_scale=40.0)
    moved.fit(X, 40 * y + 500, clients=who)
    values, deviations = moved.predict(X, clients=who, return_std=True)
    np.testing.assert_allclose(values, 40 * plain.predict(X, who) + 500, rtol=1e-5)
    np.testing.assert_allclose(
        deviations, 40 * plain.predict(X, who, return_std=True)[1], rtol=1e-4
    )
    with pytest.raises(ct.DataError, match="target_center and target_scale"):
        ct.CoterieRegressor("pfeb").fit(X, 40 * y + 500, clients=who)


def test_deviations_are_those_of_the_library_and_need_the_rows():
    X, y, who = federation()
    found = ct.CoterieRegressor("pfeb", epsilon=np.inf).fit(X, y, clients=who)
    data = ct.from_arrays(X, y, who, task="regression")
    _, expected = ct.predict(found.outcome_, data, return_std=True, train=data)
    _, deviations = found.predict(X, who, return_std=True)
    for client, own in enumerate(expected):
        np.testing.assert_allclose(deviations[who == data.names[client]], own, rtol=1e-6)
    with pytest.raises(ValueError, match="pickle does not"):
        pickle.loads(pickle.dumps(found)).predict(X, who, return_std=True)
    with pytest.raises(NotImplementedError, match="use pfeb"):
        ct.CoterieRegressor("local").fit(X, y, who).predict(X, who, return_std=True)


def test_ids_may_be_anything_hashable():
    X, y, who = federation()
    number = np.array([int(name[-1]) for name in who])
    pairs = [("school", int(k)) for k in number]
    by_number = ct.CoterieRegressor("local").fit(X, y, clients=number)
    by_pair = ct.CoterieRegressor("local").fit(X, y, clients=pairs)
    assert by_number.clients_.tolist() == list(range(8)) and by_pair.clients_[0] == pairs[0]
    np.testing.assert_array_equal(by_number.predict(X, number), by_pair.predict(X, pairs))
    mixed = [int(k) if k % 2 else str(k) for k in number]
    ct.CoterieRegressor("local").fit(X, y, clients=[*mixed[:-1], "1"])  # 1 and "1" are two
    for bad in (None, float("nan"), ["a"], ""):
        with pytest.raises(ValueError, match="expected an id"):
            ct.CoterieRegressor("local").fit(X, y, clients=[*pairs[:-1], bad])
    with pytest.raises(ValueError, match="give one per row"):
        ct.CoterieRegressor("local").fit(X, y, clients=number[:-1])


def test_a_column_of_rows_can_name_the_clients():
    pandas = pytest.importorskip("pandas")
    X, y, who = federation(rows=20)
    number = np.array([int(name[-1]) for name in who])
    plain = ct.CoterieRegressor("local").fit(X, y, clients=number)
    expected = plain.predict(X, clients=number)
    placed = ct.CoterieRegressor("local", client_column=1)
    wide = np.insert(X, 1, number, axis=1)
    np.testing.assert_array_equal(placed.fit(wide, y).predict(wide), expected)
    assert placed.clients_.tolist() == list(range(8)) and placed.n_features_in_ == FEATURES
    held = sparse.csr_matrix(wide)
    np.testing.assert_allclose(placed.fit(held, y).predict(held), expected, atol=1e-5)
    frame = pandas.DataFrame(X, columns=["age", "dose", "size"]).assign(school=who)
    named = ct.CoterieRegressor("local", client_column="school")
    np.testing.assert_allclose(named.fit(frame, y).predict(frame), expected, atol=1e-5)
    # Tools that know nothing of clients work, scorers by name among them.
    scores = cross_val_score(named, frame, y, cv=KFold(3), scoring="neg_mean_absolute_error")
    assert scores.min() > -0.2
    with pytest.raises(ValueError, match="give one of them"):
        named.predict(frame, clients=who)
    with pytest.raises(ValueError, match="expected one of the columns, 'age'"):
        named.predict(frame[["age", "dose"]])
    with pytest.raises(ValueError, match="index of a column"):
        ct.CoterieRegressor(client_column=7).fit(X, y)


def test_frames_keep_their_column_names():
    pandas = pytest.importorskip("pandas")
    X, y, who = federation()
    frame = pandas.DataFrame(X, columns=["age", "dose", "size"])
    found = ct.CoterieRegressor("local").fit(frame, pandas.Series(y), clients=pandas.Series(who))
    assert found.feature_names_in_.tolist() == ["age", "dose", "size"]
    plain = ct.CoterieRegressor("local").fit(X, y, clients=who)
    np.testing.assert_array_equal(found.predict(frame, who), plain.predict(X, who))
    with pytest.raises(ct.DataError, match="'dose'"):
        frame["dose"] *= 1000
        ct.CoterieRegressor("pfeb").fit(frame, y, clients=who)


def test_sparse_rows_give_what_dense_rows_give():
    X, y, who = federation()
    X = np.where(np.abs(X) < 0.5, 0.0, X)
    dense = ct.CoterieRegressor("pmtl", epsilon=np.inf).fit(X, y, clients=who)
    held = sparse.csr_matrix(X)
    thin = ct.CoterieRegressor("pmtl", epsilon=np.inf).fit(held, y, clients=who)
    np.testing.assert_allclose(thin.predict(held, who), dense.predict(X, who), atol=1e-4)


def test_networks_and_shapes_of_rows():
    torch = pytest.importorskip("torch")
    X, y, who = federation(clients=4)
    wide = np.column_stack([X, X[:, :1]])
    found = ct.CoterieRegressor("pmtl", model="mlp", epsilon=np.inf, rounds=2)
    assert found.fit(wide, y, clients=who).plan_.method.model == ct.MLP()
    flat = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 1))
    shaped = ct.CoterieRegressor(
        "fedavg", model=ct.Module(flat), row_shape=(2, 2), epsilon=np.inf, rounds=2
    )
    assert shaped.fit(wide, y, clients=who)._spec.shape == (2, 2)
    assert shaped.predict(wide, who).shape == y.shape


def test_settings_of_the_method_are_parameters():
    named = ct.CoterieRegressor("pmtl", method_settings={"lam": 0.5})
    assert named.get_params()["method__lam"] == 0.5
    copy = clone(named).set_params(method__lam=2.0, method__solver="sgd")
    assert copy.method_settings == {"lam": 2.0, "solver": "sgd"}
    assert named.method_settings == {"lam": 0.5}
    X, y, who = federation()
    copy.set_params(epsilon=np.inf, rounds=1).fit(X, y, clients=who)
    assert copy.plan_.method.lam == 2.0 and copy.plan_.method.solver == "sgd"
    value = ct.CoterieRegressor(ct.PMTL(lam=3.0), method_settings={"sgd": ct.SGD(epochs=2)})
    value.set_params(epsilon=np.inf, rounds=1).fit(X, y, clients=who)
    assert value.plan_.method.lam == 3.0 and value.plan_.method.sgd.epochs == 2


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"method": "pmlt"}, "close: pmtl"),
        ({"method": 3}, "expected a name"),
        ({"method": "pmtl", "method_settings": {"lamda": 1}}, "which pmtl does not know"),
        ({"method": "pmtl", "method_settings": {"lam": "x"}}, "expected float"),
        ({"method_settings": {"lam": 1}}, "name the method"),
        ({"method_settings": 3}, "expected settings by name"),
        ({"model": "liner"}, "expected one of"),
        ({"standardise": "all"}, "'none' or 'client'"),
        ({"on_pooled": "no"}, "'raise', 'warn' or 'ignore'"),
        ({"cohort": "half"}, "expected number of clients"),
        ({"random_state": -1}, "protects nobody"),
        ({"target_scale": 0.0}, "positive number"),
        ({"method": "pooled"}, "epsilon = inf"),
    ],
)
def test_bad_settings_are_told(settings, said):
    X, y, who = federation()
    with pytest.raises(ValueError, match=said):
        ct.CoterieRegressor(**settings).fit(X, y, clients=who)


@pytest.mark.parametrize("kind", [ct.CoterieRegressor, ct.CoterieClassifier])
def test_ids_that_were_left_in_the_rows_are_told_where_they_belong(kind):
    pandas = pytest.importorskip("pandas")
    X, y, who = federation()
    y = y if kind is ct.CoterieRegressor else y > 0
    frame = pandas.DataFrame(X, columns=["age", "dose", "size"]).assign(school=who)
    told = r"X holds text.*'school \d'.*clients=.*client_column="
    for given in (frame, frame.to_numpy()):
        with pytest.raises(ValueError, match=told):
            kind("local").fit(given, y, clients=who)
    fitted = kind("local").fit(X, y, clients=who)
    with pytest.raises(ValueError, match=told):
        fitted.predict(np.column_stack([X[:, :2], who]).astype(object), clients=who)


def test_text_among_the_targets_is_not_said_of_the_rows():
    X, _, who = federation()
    with pytest.raises(ValueError, match="could not convert string to float") as told:
        ct.CoterieRegressor("local").fit(X, who.astype(object), clients=who)
    assert "X holds text" not in str(told.value)


def test_warnings_point_at_the_call():
    X, y, who = federation(clients=20)
    estimator = ct.CoterieRegressor("pmtl", random_state=0)
    with pytest.warns(ct.estimators.PrivacyWarning) as said:
        estimator.fit(X, y, clients=who)
    assert {warning.filename for warning in said} == {__file__}
    with pytest.warns(ct.estimators.NewClientWarning) as said:
        estimator.predict(X[:1], clients=["a stranger"])
    assert {warning.filename for warning in said} == {__file__}


def test_weights_are_refused_with_a_reason():
    X, y, who = federation()
    for kind in (ct.CoterieRegressor, ct.CoterieClassifier):
        with pytest.raises(TypeError, match="every row of a client counts alike"):
            kind().fit(X, y > 0, clients=who, sample_weight=np.ones(len(y)))


def test_pipelines_and_searches_hand_clients_on(routing):
    X, y, who = federation(rows=20)
    far = X * 30 + 100
    pipeline = make_pipeline(
        ct.PerClientScaler(), ct.CoterieRegressor("pmtl", epsilon=np.inf, rounds=3)
    )
    pipeline.fit(far, y, clients=who)
    direct = ct.CoterieRegressor("pmtl", epsilon=np.inf, rounds=3, standardise="client")
    direct.fit(far, y, clients=who)
    np.testing.assert_allclose(
        pipeline.predict(far, clients=who), direct.predict(far, clients=who), atol=1e-5
    )
    grid = {"coterieregressor__method__lam": [0.01, 100.0]}
    search = GridSearchCV(pipeline, grid, cv=KFold(3)).fit(far, y, clients=who)
    assert search.best_params_ == {"coterieregressor__method__lam": 0.01}
    assert search.score(far, y, clients=who) > 0.9
    scores = cross_val_score(pipeline, far, y, cv=KFold(3), params={"clients": who})
    assert scores.min() > 0.8


def test_rows_sorted_by_client_are_split_inside_clients(routing):
    X, y, who = federation(clients=6)
    order = np.argsort(who)
    X, y, who = X[order], y[order], who[order]
    local = ct.CoterieRegressor("local")
    folds = ct.WithinClientKFold(3)
    for fit, test in folds.split(X, y, clients=who):
        assert set(who[fit]) == set(who[test]) == set(who) and not set(fit) & set(test)
    scores = cross_val_score(local, X, y, cv=folds, params={"clients": who})
    assert scores.min() > 0.5
    with sklearn.config_context(enable_metadata_routing=False):
        wide = np.column_stack([X, np.unique(who, return_inverse=True)[1]])
        column = ct.CoterieRegressor("local", client_column=FEATURES)
        folds = ct.WithinClientKFold(3, client_column=FEATURES)
        np.testing.assert_allclose(cross_val_score(column, wide, y, cv=folds), scores, rtol=1e-5)
        with pytest.raises(ValueError, match="WithinClientKFold needs the client of each row"):
            next(ct.WithinClientKFold(3).split(X, y))
    known = ct.CoterieRegressor("local").fit(X, y, clients=who)
    with pytest.raises(ValueError, match="split inside clients with cv=WithinClientKFold"):
        known.predict(X[:1], clients=["a stranger"])


def test_groups_are_clients_that_nobody_trained_with(routing):
    X, y, who = federation(clients=6, spread=0.0)
    estimator = ct.CoterieRegressor("fedavg", epsilon=np.inf, rounds=5)
    with pytest.warns(ct.NewClientWarning):
        scores = cross_val_score(
            estimator, X, y, cv=GroupKFold(3), params={"clients": who, "groups": who}
        )
    assert scores.min() > 0.8


def test_searches_are_warned_of(routing):
    X, y, who = federation(rows=20)
    with pytest.warns(ct.PrivacyWarning, match="covered by none") as caught:
        cross_val_score(ct.CoterieRegressor("pmtl"), X, y, cv=KFold(4), params={"clients": who})
    assert len(caught) == 1


def test_importing_coterie_does_not_import_scikit_learn():
    code = "import sys, coterie; assert not {'sklearn', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    missing = "import sys; sys.modules['sklearn'] = None; import coterie; coterie.CoterieRegressor"
    told = subprocess.run(
        [sys.executable, "-c", missing], check=False, capture_output=True, text=True
    )
    assert told.returncode and "pip install 'coterie[sklearn]'" in told.stderr


# --- repeated fits ------------------------------------------------------------

NAMES = [f"client {number}" for number in range(4)]


def sketch(seed, count=40):
    draw = np.random.default_rng(seed)
    X, y = draw.normal(size=(count, 3)), draw.normal(size=count)
    return sketch_rows(X, y, np.arange(count) % 4, NAMES)


def test_fits_of_many_rows_are_all_counted():
    for _ in range(300):
        spent = count_fit(sketch(0), 0.5, 1e-6)
    assert (spent.fits, spent.epsilon) == (300, 150.0) and spent.delta == pytest.approx(3e-4)
    for seed in range(1, 400):
        count_fit(sketch(seed), 1.0, 1e-6)
    assert len(base._PAST_FITS) <= 256
    # Merged sets may count too much, never too little.
    spent = count_fit(sketch(0), 1.0, 1e-6)
    assert spent.fits >= 301 and spent.epsilon >= 151.0
    assert count_fit(sketch(1000), 1.0, 1e-6).fits == 1, "new rows"
    assert sum(one.fits for one in base._PAST_FITS.values()) == 300 + 399 + 1 + 1


def test_what_recognises_rows():
    draw, codes = np.random.default_rng(0), np.arange(40) % 4
    X, y = draw.normal(size=(40, 3)), draw.normal(size=40)
    count_fit(sketch_rows(X, y, codes, NAMES), 1.0, 1e-6)
    reversed_columns = sketch_rows(X[:, ::-1], y, codes, NAMES)
    assert count_fit(reversed_columns, 1.0, 1e-6).fits == 2, "continuous targets do"
    classes = (y > 0).astype(float)
    count_fit(sketch_rows(X, classes, codes, NAMES), 1.0, 1e-6)
    reversed_columns = sketch_rows(X[:, ::-1], classes, codes, NAMES)
    assert count_fit(reversed_columns, 1.0, 1e-6).fits == 1, "classes do not"
