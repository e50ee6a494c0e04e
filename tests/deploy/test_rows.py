"""A site's rows: as in a simulation of the whole, and every mistake of a site owner is one line."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import sparse

from coterie.planning.plan import Plan

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.deploy.federations import federate, rows_of

from coterie.core.config import from_table
from coterie.data.federated import DataError, FederatedDataset, Spec
from coterie.data.synthetic import synthetic
from coterie.deploy.federation import Agreement
from coterie.deploy.rows import load_rows, place_rows, row_hints

DATA = synthetic("mean", clients=5, rows=(4, 9), features=3, spread=0.3, seed=1).data
SITES = {"north": (0, 1), "south": (2, 3, 4)}
FEDERATION, _ = federate(DATA, SITES)
X, Y = np.arange(12.0).reshape(4, 3), np.arange(4.0)
GOOD = dict.fromkeys(FEDERATION.sites["north"].clients, (X, Y))
FIRST = FEDERATION.clients[0]


BY_CLIENT = """
import builtins

def rows(config):
    data = builtins.site_rows
    spans = zip(data.names, data.offsets, data.offsets[1:])
    x, y = data.features.numpy(), data.targets.numpy()
    return {name: (x[a:b], y[a:b]) for name, a, b in spans if b > a}
"""


def agreement(federation=FEDERATION, **data):
    table = {
        "method": {"kind": "pmtl"},
        "privacy": {"epsilon": 1.0},
        "data": {"name": "synthetic", "test": 0.4, **data},
    }
    return Agreement(from_table(Plan, table, "plan"), federation)


def hook(folder, text):
    path = folder / "rows.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "choice",
    [{}, {"most_rows": 2}, {"split_seed": 3}, {"validation": 0.3}, {"standardise": "client"}],
    ids=str,
)
def test_a_site_has_the_rows_that_a_simulation_would_give_it(choice, tmp_path, monkeypatch):
    """Oracle: the split of all rows together, cut into clients afterwards."""
    agreed = agreement(**choice)
    whole = agreed.plan.data.split(DATA)
    for site, ids in SITES.items():
        monkeypatch.setattr("builtins.site_rows", rows_of(DATA, FEDERATION, site), raising=False)
        hook(tmp_path, BY_CLIENT)
        for mine, theirs in zip(load_rows(agreed, site, tmp_path, {})[:2], whole, strict=True):
            assert list(mine.names) == list(DATA.names) and mine.spec == theirs.spec
            for client in range(len(DATA)):
                a, b = (int(n) for n in mine.offsets[client : client + 2])
                if client not in ids:
                    assert a == b
                    continue
                c, d = (int(n) for n in theirs.offsets[client : client + 2])
                assert torch.equal(mine.features[a:b], theirs.features[c:d])
                assert torch.equal(mine.targets[a:b], theirs.targets[c:d])


def test_moments_come_with_rows_that_are_scaled_and_only_then(tmp_path):
    hook(tmp_path, f"def rows(config):\n    return {{n: ({X.tolist()}, {Y.tolist()}) "
         f"for n in {list(GOOD)!r}}}\n")  # fmt: skip
    assert load_rows(agreement(), "north", tmp_path, {})[0].scaling == {}
    train = load_rows(agreement(standardise="client"), "north", tmp_path, {})[0]
    assert {name: len(part) for name, part in train.scaling.items()} == {
        "center": len(train),
        "scale": len(train),
    }


def test_a_hook_is_told_what_its_site_was_started_with(tmp_path):
    other = tmp_path / "elsewhere.py"
    other.write_text(
        "def rows(config):\n"
        "    assert config['site'] == 'north' and config['table'] == 'x.csv', config\n"
        "    assert config['app'], config\n"
        f"    return {{n: ({X.tolist()}, {Y.tolist()}) for n in {list(GOOD)!r}}}\n"
    )
    train, test = load_rows(
        agreement(), "north", tmp_path, {"hook": str(other), "table": "x.csv", "site": "forged"}
    )
    assert train.counts[:2].sum() + test.counts[:2].sum() == 8


def test_a_hook_may_return_a_federated_data_set(tmp_path, monkeypatch):
    part = rows_of(DATA, FEDERATION, "north").only(np.array([0, 1]))
    monkeypatch.setattr("builtins.site_rows", part, raising=False)
    hook(tmp_path, "import builtins\ndef rows(config):\n    return builtins.site_rows\n")
    train, test = load_rows(agreement(), "north", tmp_path, {})
    assert (train.counts + test.counts)[:2].tolist() == DATA.counts[:2].tolist()


HOOKS = {
    "a mistake in Python": ("def rows(config:\n", "SyntaxError"),
    "a module that is not there": ("import no_such_module_4711\n", "no_such_module_4711"),
    "an error while loading": ("1 / 0\n", "ZeroDivisionError"),
    "no function": ("x = 1\n", "expected a function rows(config)"),
    "no function by that name": ("rows = 3\n", "expected a function rows(config)"),
    "an empty file": ("", "expected a function rows(config)"),
    "no argument": ("def rows():\n    return {}\n", "TypeError"),
    "an error": ("def rows(config):\n    return config['path']\n", "KeyError: 'path'"),
    "an error of many lines": ("def rows(c):\n    raise ValueError('a\\nb\\n' * 99)\n", "a b a b"),
    "an error without words": ("def rows(c):\n    raise ValueError\n", "(ValueError)"),
    "its own words": (
        "from coterie.data.federated import DataError\n"
        "def rows(c):\n    raise DataError('the table is locked')\n",
        "the table is locked",
    ),
    "nothing": ("def rows(config):\n    pass\n", "returned NoneType"),
    "a list": ("def rows(config):\n    return [1, 2]\n", "returned list"),
    "a pair": ("def rows(config):\n    return [1], [2]\n", "returned tuple"),
    "a generator": ("def rows(config):\n    yield 1\n", "returned generator"),
    "one name twice": ("def rows(c):\n    return {1: ([], []), '1': ([], [])}\n", "same name"),
}


@pytest.mark.parametrize("text,word", HOOKS.values(), ids=HOOKS)
def test_a_hook_with_a_mistake_names_its_file(text, word, tmp_path):
    path = hook(tmp_path, text)
    with pytest.raises(DataError) as mistake:
        load_rows(agreement(), "north", tmp_path, {})
    seen = str(mistake.value)
    assert word in seen and "\n" not in seen and len(seen) < 400, seen
    assert str(path) in seen or word == "the table is locked"


def test_no_hook_is_said_to_be_none(tmp_path):
    for hook in (tmp_path / "rows.py", tmp_path, tmp_path / "rows.txt"):
        with pytest.raises(DataError, match="no such data hook"):
            load_rows(agreement(), "north", tmp_path, {"hook": str(hook)})


def one(x=X, y=Y):
    return {**GOOD, FIRST: (x, y)}


RAGGED = [[1.0, 2.0, 3.0], [1.0]]
MISTAKES = {
    "another's client": ({**GOOD, FEDERATION.clients[4]: (X, Y)}, "not at site north"),
    "a stranger": ({**GOOD, "nobody": (X, Y)}, "not at site north"),
    "a missing client": ({FIRST: (X, Y)}, "no rows of client"),
    "nobody": ({}, "no rows of client"),
    "no pair": ({**GOOD, FIRST: X}, "pair (X, y)"),
    "X alone": ({**GOOD, FIRST: (X,)}, "pair (X, y)"),
    "three": ({**GOOD, FIRST: (X, Y, Y)}, "pair (X, y)"),
    "None": ({**GOOD, FIRST: None}, "pair (X, y)"),
    "fewer features": (one(X[:, :2]), "X has shape (4, 2), expected (4, 3)"),
    "one row flat": (one(X[0], Y[:1]), "X has shape (3,)"),
    "more rows than targets": (one(X, Y[:3]), "X has shape (4, 3), expected (3, 3)"),
    "targets in a column": (one(X, Y[:, None]), "y has shape (4, 1)"),
    "one target": (one(X, 3.0), "no rows"),
    "no rows": (one(X[:0], Y[:0]), "no rows"),
    "lists of different lengths": (one(RAGGED, Y[:2]), "one length"),
    "sparse": (one(sparse.csr_matrix(X)), "dense"),
    "words": (one(np.full((4, 3), "a")), "not numbers"),
    "numbers in words": (one(X.astype(str)), "not numbers"),
    "objects": (one(np.full((4, 3), object())), "not numbers"),
    "dates": (one(np.full((4, 3), np.datetime64("2020-01-01"))), "not numbers"),
    "complex": (one(X * 1j), "not numbers"),
    "targets in words": (one(X, np.array(list("abcd"))), "not numbers"),
    "a gap": (one(np.where(X == 5, np.nan, X)), "gaps"),
    "None inside": (one([[None, 1.0, 2.0]] * 4), "gaps"),
    "an infinite number": (one(np.where(X == 5, -np.inf, X)), "gaps"),
    "an infinite target": (one(X, np.full(4, np.inf)), "gaps"),
    "beyond float32": (one(X * 1e300), "beyond"),
    "needs a gradient": (one(torch.ones(4, 3, requires_grad=True)), "not an array"),
}


@pytest.mark.parametrize("rows,word", MISTAKES.values(), ids=MISTAKES)
def test_rows_with_a_mistake_name_the_client(rows, word, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.site_rows", rows, raising=False)
    hook(tmp_path, "import builtins\ndef rows(config):\n    return builtins.site_rows\n")
    with pytest.raises(DataError) as mistake:
        load_rows(agreement(), "north", tmp_path, {})
    seen = str(mistake.value)
    assert word in seen and "\n" not in seen and len(seen) < 400, seen


@pytest.mark.parametrize(
    "task,outputs,y,word",
    [
        ("binary", 1, [0, 1, 2, 0], "0 and 1"),
        ("binary", 1, [-1, 1, 1, -1], "0 and 1"),
        ("binary", 1, [0.5, 1, 1, 0], "0 and 1"),
        ("multiclass", 3, [0, 1, 2, 3], "0 to 2"),
        ("multiclass", 3, [1, 2, -1, 1], "0 to 2"),
        ("multiclass", 3, [1, 2, 0.5, 1], "0 to 2"),
        ("multilabel", 2, [0, 1, 1, 0], r"expected \(4, 2\)"),
        ("multilabel", 2, [[0, 2]] * 4, "0 and 1"),
    ],
)
def test_targets_are_those_of_the_task(task, outputs, y, word):
    federation = replace(FEDERATION, task=task, outputs=outputs)
    rows = dict.fromkeys(GOOD, (X, np.asarray(y)))
    with pytest.raises(DataError, match=word):
        place_rows(rows, federation, "north", "here")


@pytest.mark.parametrize(
    "task,outputs,y,kind",
    [
        ("regression", 1, [1, 2, 3, 4], torch.float32),
        ("binary", 1, [True, False, True, True], torch.float32),
        ("multiclass", 3, [0.0, 1.0, 2.0, 2.0], torch.int64),
        ("multilabel", 2, [[0, 1]] * 4, torch.float32),
    ],
)
def test_numbers_of_other_types_are_taken_by_value(task, outputs, y, kind):
    federation = replace(FEDERATION, task=task, outputs=outputs)
    for x in (X, X.astype(int), X.astype(np.float16), X.astype(object), X.astype(bool)):
        found = place_rows(dict.fromkeys(GOOD, (x, np.asarray(y))), federation, "north", "here")
        assert found.features.dtype == torch.float32 and found.targets.dtype == kind
        np.testing.assert_array_equal(found.features[:4].numpy(), x.astype(np.float32))
        np.testing.assert_array_equal(found.targets[:4].numpy(), np.asarray(y))
        assert found.counts.tolist() == [4, 4, 0, 0, 0]


def test_rows_are_put_in_the_order_of_the_federation():
    reverse = dict(reversed([(name, (X + i, Y + i)) for i, name in enumerate(GOOD)]))
    found = place_rows(reverse, FEDERATION, "north", "here")
    np.testing.assert_array_equal(found.targets.numpy(), np.concatenate([Y, Y + 1]))


def test_a_site_that_is_not_listed():
    with pytest.raises(DataError, match=r"'west' is not in the federation.*north, south"):
        place_rows(GOOD, FEDERATION, "west", "here")


def test_a_data_set_keeps_its_own_split_and_its_sparsity():
    """As `simulate` sees them: the source's split, rows as CSR, clients in the agreed order."""
    draw = np.random.default_rng(0)
    x = sparse.csr_matrix(draw.normal(size=(12, 4)) * (draw.random((12, 4)) < 0.5), dtype="float32")
    data = FederatedDataset(
        spec=Spec((4,), 1, "regression", 3),
        names=["a", "b", "c"],
        offsets=np.array([0, 4, 8, 12]),
        features=x,
        targets=torch.arange(12.0),
        source_split=np.tile(np.array([0, 0, 0, 1], dtype=np.int8), 3),
    )
    federation, _ = federate(data, {"one": (0, 1), "two": (2,)})
    train, test = data.split_by_source()
    for site, ids in (("one", [1, 0]), ("two", [2])):
        whole = place_rows(data.only(ids), federation, site, "test")
        mine, held = whole.split_by_source()
        for k in ids:
            for ours, theirs in ((mine, train), (held, test)):
                a, b = ours.clients(np.array([k])), theirs.clients(np.array([k]))
                np.testing.assert_array_equal(a.x, b.x)
                np.testing.assert_array_equal(a.y, b.y)
        assert sum(mine.counts) == 3 * len(ids)
    with pytest.raises(DataError, match="not at site"):
        place_rows(data, federation, "one", "test")


def test_hints_are_of_the_sites_own_rows(tmp_path):
    rows = dict.fromkeys(FEDERATION.sites["north"].clients, (50 * X, Y))
    big = place_rows(rows, FEDERATION, "north", "test")
    (hint,) = row_hints(agreement(), "north", big)
    assert hint.startswith("site north: some features have size") and "scale" in hint
    small = place_rows(dict.fromkeys(rows, (X / 10, Y / 2)), FEDERATION, "north", "test")
    assert row_hints(agreement(), "north", small) == ()


def test_masked_entries_are_not_read_as_numbers(tmp_path):
    hook = tmp_path / "rows.py"
    hook.write_text(
        "import numpy as np\n"
        "def rows(config):\n"
        "    x = np.ma.masked_array(np.ones((4, 3)), mask=np.eye(4, 3))\n"
        f"    return dict.fromkeys({FEDERATION.sites['north'].clients!r}, (x, np.arange(4.0)))\n"
    )
    with pytest.raises(DataError, match="masked"):
        load_rows(agreement(), "north", tmp_path, {"hook": str(hook)})
