"""The scaling contract: a client's own rows decide; unscaled data is refused, scaled is not."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse, stats

import coterie as ct
from coterie.data import contract
from coterie.data.contract import LIMIT, TARGET_LIMIT, cut_note, refuse_unscaled, unscaled
from coterie.data.embedded import digits, districts
from coterie.data.federated import DataError, FederatedDataset, Spec
from coterie.data.formats import Source, load
from coterie.data.scaling import apply_constants, standardise_clients
from coterie.data.synthetic import KINDS, synthetic

PROFILE = settings(derandomize=True, deadline=None, max_examples=80)


def federation(parts, targets=None, task="regression", sparsely=False, shape=None):
    """Make a federation of each client's rows, (n, features)."""
    rows = np.concatenate(parts).astype(np.float32)
    counts = [len(part) for part in parts]
    if targets is None:
        targets = [np.zeros(count) for count in counts]
    shape = shape or rows.shape[1:]
    features = sparse.csr_matrix(rows) if sparsely else torch.from_numpy(rows).reshape(-1, *shape)
    return FederatedDataset(
        spec=Spec(shape=shape, outputs=1, task=task, clients=len(parts)),
        names=[f"c{number}" for number in range(len(parts))],
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        features=features,
        targets=torch.from_numpy(np.concatenate(targets).astype(np.float32)),
        title="made up",
    )


def found(data, **limits):
    """The broken cells of all clients, as a set of (client, column) and the share of rows."""
    answer = unscaled(data.clients(np.arange(len(data))), **limits)
    assert len(answer) == len(answer.columns) == len(answer.shares)
    pairs = zip(answer.clients.tolist(), answer.columns.tolist(), strict=True)
    return dict(zip(pairs, answer.shares.tolist(), strict=True))


def by_hand(parts, targets, task, limit=LIMIT, target_limit=TARGET_LIMIT):
    """The rule, written out with Python loops."""
    broken = {}
    for client, (rows, own) in enumerate(zip(parts, targets, strict=True)):
        columns = [(column, rows[:, column], limit) for column in range(rows.shape[1])]
        if task == "regression":
            columns.append((rows.shape[1], own, target_limit))
        for column, values, bound in columns:
            count = len(values)
            sizes = [abs(float(np.float32(value))) for value in values]
            beyond = sum(size > bound for size in sizes)
            far = sum(size > 2 * limit for size in sizes)
            if column < rows.shape[1]:
                most = beyond > count / 2
            else:
                above, below = (values > bound).sum(), (values < -bound).sum()
                most = abs(above - below) * 3 > 2 * count
            if count <= 2:
                wrong = count > 0 and all(size > 10 * bound for size in sizes)
            else:
                wrong = (beyond >= 3 and most) or far > 0.05 * count + 2
            if wrong:
                broken[client, column] = beyond / count
    return broken


@PROFILE
@given(st.data())
def test_the_rule_agrees_with_loops(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    counts = data.draw(
        st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 19, 60]), min_size=1, max_size=5)
    )
    width, sparsely = data.draw(st.integers(1, 4)), data.draw(st.booleans())
    task = data.draw(st.sampled_from(["regression", "binary"]))
    values = np.array(
        [0.0, 1.0, -5.9, 6.1, 12.1, -14.9, 15.1, -29.0, 31.0, 59.0, -61.0, 149.0, 151.0]
    )
    tilt = rng.dirichlet(np.full(len(values), 0.3))
    parts = [rng.choice(values, (count, width), p=tilt) for count in counts]
    targets = [rng.choice(values, count, p=tilt) for count in counts]
    made = federation(parts, targets, task, sparsely)
    expected = by_hand(parts, targets, task)
    assert found(made) == pytest.approx(expected)
    whole = contract._BLOCK
    try:
        contract._BLOCK = data.draw(st.integers(1, 40))  # a client may span chunks and blocks
        assert found(made) == pytest.approx(expected)
        if expected:
            with pytest.raises(
                DataError, match=f"{len({c for c, _ in expected})} of {len(counts)}"
            ):
                refuse_unscaled(made)
        else:
            refuse_unscaled(made)
    finally:
        contract._BLOCK = whole


@PROFILE
@given(st.data())
def test_a_clients_answer_is_the_same_whatever_others_hold(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    sparsely = data.draw(st.booleans())
    mine, own = rng.standard_t(1.2, (data.draw(st.integers(1, 30)), 3)) * 4, rng.standard_t(1, 1)
    alone = found(federation([mine], [np.full(len(mine), own)], sparsely=sparsely))
    place = data.draw(st.integers(0, 3))
    others = [
        rng.standard_normal((data.draw(st.sampled_from([0, 1, 7, 50])), 3))
        * data.draw(st.sampled_from([0.0, 1.0, 1e6]))
        for _ in range(3)
    ]
    parts = [*others[:place], mine, *others[place:]]
    targets = [np.full(len(part), own if part is mine else 1e9) for part in parts]
    beside = federation(parts, targets, sparsely=sparsely)
    assert {(0, column): s for (who, column), s in found(beside).items() if who == place} == alone
    one = unscaled(beside.clients(np.array([place])))
    assert dict(zip(one.columns.tolist(), one.shares.tolist(), strict=True)) == {
        column: share for (_, column), share in alone.items()
    }


def test_only_the_clients_that_are_asked_for_are_looked_at():
    data = federation([np.full((4, 1), size) for size in (1.0, 100.0, 1.0, 100.0)])
    assert len(unscaled(data.clients(np.array([2, 0])))) == 0
    answer = unscaled(data.clients(np.array([3, 0, 1])))
    assert sorted(answer.clients.tolist()) == [1, 3]
    assert answer.shares.tolist() == [1.0, 1.0]


# Data that must pass.


def test_generated_federations_pass():
    for kind in KINDS:
        for seed in range(3):
            refuse_unscaled(synthetic(kind, clients=200, rows=(2, 40), features=7, seed=seed).data)
    refuse_unscaled(synthetic(clients=50, rows=15, features=40, sparse=True).data)
    refuse_unscaled(synthetic(clients=50, rows=15, features=40, unit_rows=True).data)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 19, 60, 200])
def test_heavy_tails_pass(rows):
    # t with 3 degrees of freedom over its standard deviation: a client breaks the contract by
    # chance with probability below 1e-7 a column (2e-6 of one or two rows), see the docstring;
    # 1,000 clients and 4 columns: a false alarm below 4e-4 over the seed (8e-3).
    rng = np.random.default_rng(rows)
    draws = rng.standard_t(3, (1000, rows, 4)) / math.sqrt(3)
    assert not found(federation(list(draws[..., :3]), list(draws[..., 3])))


def test_the_stated_chances_are_those_of_the_rule():
    count = np.arange(3, 5000)
    for limit in (LIMIT, TARGET_LIMIT):
        beyond, far, alone = (2 * stats.t.sf(f * limit * math.sqrt(3), 3) for f in (1, 2, 10))
        most = stats.binom.sf(np.maximum(count // 2, 2), count, beyond)
        some = stats.binom.sf(np.floor(0.05 * count + 2), count, far)
        assert (most + some).max() < 1e-7
        assert alone < 2e-6
    assert 1 / 8100 < 2 * stats.t.sf(15 * math.sqrt(3), 3) < 1 / 7900
    assert 1 / 550 < 2 * stats.t.sf(6 * math.sqrt(3), 3) < 1 / 500


def test_indicators_counts_and_outliers_pass():
    rng = np.random.default_rng(0)
    one_hot = np.eye(5)[rng.integers(0, 5, 60)]
    counts = rng.poisson(5.0, (60, 3))
    outlier = rng.standard_normal((60, 1))
    outlier[7] = 1e6
    refuse_unscaled(federation([np.hstack([one_hot, counts, outlier])] * 3))


def test_classes_are_no_outcomes():
    labels = [np.array([0.0, 1.0, 1.0, 0.0])]
    rows = [np.ones((4, 2))]
    refuse_unscaled(federation(rows, labels, "binary"), target_limit=0.5)
    with pytest.raises(DataError, match="the target"):
        refuse_unscaled(federation(rows, [np.full(4, 7.0)], "regression"))


def test_embedded_data_passes():
    refuse_unscaled(districts())
    refuse_unscaled(digits())


CONSTANTS = {
    "exam": Source(),
    "school": Source(
        center={"3": 25, "4": 20, "y": 20}, scale={"3": 15, "4": 10, "y": 12}, task="regression"
    ),
    "chem97": Source(center={"2": 6, "y": 6}, scale={"1": 4, "y": 3}, task="regression"),
    "landmine": Source(),
    "har_lite": Source(),
    "femnist": Source(),
    "heart": Source(
        missing="drop",
        center={"0": 50, "3": 130, "4": 200, "7": 140},
        scale={"0": 10, "3": 20, "4": 100, "7": 25},
    ),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_real_federations_pass_with_sensible_constants(name, shared_data):
    path = shared_data(f"{name}/{name}.npz")
    data = load(path, CONSTANTS[name])
    refuse_unscaled(data)
    refuse_unscaled(standardise_clients(data)[0])


# Data that must not.


@pytest.mark.parametrize(
    ("name", "columns", "target"),
    [("school", {3, 4}, True), ("chem97", set(), True), ("heart", {0, 3, 4, 7}, False)],
)
def test_real_federations_in_their_own_units_are_refused(name, columns, target, shared_data):
    path = shared_data(f"{name}/{name}.npz")
    data = load(path, Source(missing="drop"))
    broken = {column for _, column in found(data)}
    assert broken == columns | ({data.spec.features} if target else set())
    with pytest.raises(DataError):
        refuse_unscaled(data)


@pytest.mark.parametrize("change", [lambda x: x * 100, lambda x: x + 40, lambda x: 50 * x + 50])
@pytest.mark.parametrize("sparsely", [False, True])
def test_another_unit_is_found_in_every_client_of_three_rows_or_more(change, sparsely):
    rng = np.random.default_rng(1)
    parts = [rng.standard_normal((count, 3)) for count in (3, 8, 40, 500)]
    for part in parts:
        part[:, 1] = change(part[:, 1])
    data = federation(parts, sparsely=sparsely)
    assert {column for _, column in found(data)} == {1}
    assert {client for client, _ in found(data)} >= {2, 3}


def test_a_few_per_cent_far_out_are_enough():
    """More than 5 % of the rows and two more, beyond twice the limit; not one row less."""
    rows = np.zeros((100, 1))
    rows[:8] = -2 * LIMIT - 0.1
    assert found(federation([rows])) == {(0, 0): 0.08}
    rows[0] = -2 * LIMIT + 0.1
    assert not found(federation([rows]))


def test_more_than_half_beyond_the_limit_are_enough():
    rows = np.zeros((10, 1))
    rows[:6] = LIMIT + 0.1
    assert found(federation([rows])) == {(0, 0): pytest.approx(0.6)}
    rows[0] = LIMIT - 0.1
    assert not found(federation([rows]))


def test_one_or_two_rows_speak_only_when_all_are_ten_times_beyond():
    parts = [np.full((count, 1), 9.9 * LIMIT) for count in (1, 2)]
    assert not found(federation(parts))
    parts = [np.full((count, 1), 10.1 * LIMIT) for count in (1, 2)]
    assert set(found(federation(parts))) == {(0, 0), (1, 0)}
    parts[1][0] = 0.0
    assert set(found(federation(parts))) == {(0, 0)}


def test_infinite_rows_count_and_gaps_do_not():
    rows = np.zeros((10, 2))
    rows[:, 0], rows[:, 1] = np.inf, np.nan
    assert set(found(federation([rows]))) == {(0, 0)}


def test_entries_stored_in_parts_are_one_number():
    rows = np.zeros((3, 1), dtype=np.float32)
    data = federation([rows], sparsely=True)
    parts = (np.full(6, 10, dtype=np.float32), np.zeros(6, dtype=np.int32), np.array([0, 2, 4, 6]))
    data = replace(data, features=sparse.csr_matrix(parts, shape=(3, 1)))
    assert found(data) == {(0, 0): 1.0}, "three rows of 10 + 10"


def test_images_are_looked_at_number_by_number():
    rows = np.zeros((6, 4))
    rows[:, 2] = 255.0
    data = federation([rows], shape=(2, 2))
    assert set(found(data)) == {(0, 2)}


# What is said.


def test_the_message_names_columns_clients_shares_and_the_remedy():
    rng = np.random.default_rng(0)
    parts = [rng.standard_normal((20, 3)) for _ in range(6)]
    for part in parts[2:]:
        part[:15, 1] = 40.0
    with pytest.raises(DataError) as caught:
        refuse_unscaled(federation(parts))
    text = str(caught.value)
    assert text.startswith("made up: found column 1 (from 0) beyond +-15 (column 1 in 75% of the")
    assert "client 'c2', column 1 in 75% of the rows of client 'c3'" in text
    assert "'c5'" not in text
    assert "...; 4 of 6 clients" in text
    for remedy in ("data.source.center.1=", "data.source.scale.1=", "data.source.clip="):
        assert remedy in text
    assert "ct.apply_constants" in text
    assert "--standardise client" in text
    assert "outcome" not in text
    assert hasattr(ct, "apply_constants")
    assert hasattr(ct, "standardise_clients")


def test_an_outcome_is_told_how_to_be_scaled():
    data = federation([np.zeros((9, 2))] * 2, [np.full(9, 50.0), np.zeros(9)])
    with pytest.raises(DataError) as caught:
        refuse_unscaled(data)
    text = str(caught.value)
    assert (
        "found the target beyond +-6 (the target in 100% of the rows of client 'c0'; 1 of" in text
    )
    assert "target_center and target_scale" in text
    assert "--standardise" not in text, "it scales features alone"


def test_noisy_clients_pass_and_outcomes_on_one_side_do_not():
    """3 of 300 clients with residuals of ten deviations are noisy, not of another unit."""
    rng = np.random.default_rng(2)
    rows, targets = [np.zeros((9, 1))] * 300, [rng.standard_normal(9) for _ in range(300)]
    for noisy in (25, 148, 184):
        targets[noisy] = 10 * rng.standard_normal(9)
    assert max((abs(y) > 6).mean() for y in targets) > 0.5
    refuse_unscaled(federation(rows, targets))
    targets[25] = 6.5 + rng.random(9)
    assert set(found(federation(rows, targets))) == {(25, 1)}
    targets[25][:3] = 0  # two thirds, and not more
    assert not found(federation(rows, targets))
    # Another unit everywhere is found, whatever its side.
    wide = [30 * rng.standard_normal(9) for _ in range(300)]
    with pytest.raises(DataError, match="a larger scale is enough"):
        refuse_unscaled(federation(rows, wide))


def test_columns_are_named_as_the_file_names_them(tmp_path):
    lines = [f"c{k % 9},{100 + k % 13},{k % 5},{k % 7}" for k in range(90)]
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["client,hours,other,y", *lines]))
    data = load(path, Source(task="regression"))
    train, _ = data.split(0.25, seed=0)
    with pytest.raises(DataError, match="found column 'hours' beyond") as caught:
        refuse_unscaled(train)
    assert "column 'hours' in 100% of the rows of client 'c0'" in str(caught.value)
    assert "--set data.source.center.hours=... --set data.source.scale.hours=..." in str(
        caught.value
    )
    refuse_unscaled(load(path, Source(task="regression", center={"hours": 106})))
    odd = replace(data, columns=("working hours", "other"))
    with pytest.raises(DataError, match=r"'working hours' .*center\.COLUMN="):
        refuse_unscaled(odd)


def test_the_remedies_that_are_named_do_help():
    rng = np.random.default_rng(3)
    parts = [50 + 20 * rng.standard_normal((30, 2)) for _ in range(4)]
    data = federation(parts, [100 + 9 * rng.standard_normal(30) for _ in parts])
    with pytest.raises(DataError, match=r"columns 0, 1 .* and the target"):
        refuse_unscaled(data)
    scaled = apply_constants(data, 50, 20, target_center=100, target_scale=10)
    refuse_unscaled(scaled)
    only_features, _ = standardise_clients(data)
    with pytest.raises(DataError, match="found the target beyond"):
        refuse_unscaled(only_features)
    refuse_unscaled(apply_constants(only_features, 0, 1, target_center=100, target_scale=10))


def test_many_columns_are_counted_not_listed():
    data = federation([np.full((5, 30), 99.0)])
    with pytest.raises(DataError, match=re.escape("columns 0, 1, 2 and 27 others (from 0)")):
        refuse_unscaled(data)


# Declared clips.


def test_a_clip_that_cuts_much_is_noted_and_never_refused():
    rng = np.random.default_rng(0)
    parts = [rng.standard_normal((20, 3)) for _ in range(5)]
    parts[3][:, 1] = 8.0
    for sparsely in (False, True):
        data = federation(parts, sparsely=sparsely)
        scaled = apply_constants(data, 0, 1, clip=3.0)
        assert "for 1 of 5 clients, in column 1 (from 0)" in scaled.notes[-1]
        assert len(scaled.notes) == len(data.notes) + 2
        assert float(abs(scaled.features).max()) == 3.0
        assert float(abs(data.features).max()) == 8.0, "the rows given are not touched"
        assert len(apply_constants(data, 0, 1, clip=9.0).notes) == len(data.notes) + 1
        assert len(apply_constants(data, 0, 1).notes) == len(data.notes) + 1
    assert cut_note(federation(parts), 9.0) is None


def test_districts_far_out_are_noted():
    assert any("the cut at +-3 takes" in note for note in districts().notes)


def test_what_overflows_is_cut():
    data = federation([np.full((3, 1), 1e30)])
    scaled = apply_constants(data, 0, 1e-20, clip=3.0)
    assert scaled.features.flatten().tolist() == [3.0] * 3
