import json

import numpy as np
import pytest
from scipy import stats

from coterie.data.describe import describe
from coterie.data.formats import from_arrays, load


def test_numbers_are_those_of_the_clients() -> None:
    owner = np.repeat([0, 1, 2, 3], [1, 2, 3, 10])
    data = from_arrays(np.ones((16, 3)), np.arange(16) % 3, owner, split=np.arange(16) % 2)
    found = describe(data)
    counts = np.array([1, 2, 3, 10])
    assert (found["clients"], found["rows"], found["features"], found["shape"]) == (4, 16, 3, [3])
    assert (found["task"], found["outputs"], found["sparse"]) == ("multiclass", 3, False)
    spread = found["rows_per_client"]
    assert (spread["min"], spread["median"], spread["max"], spread["mean"]) == (1, 2.5, 10, 4)
    assert spread["sd"] == pytest.approx(counts.std())
    assert spread["skew"] == pytest.approx(stats.skew(counts))
    assert found["classes_per_client"] == {"min": 1, "median": 2.5, "max": 3}
    assert found["split"] == {"train": 8, "test": 8}
    assert json.loads(json.dumps(found)) == found


def test_equal_clients_regression_and_labels() -> None:
    found = describe(from_arrays(np.ones((4, 2)), np.ones(4), [0, 0, 1, 1]))
    assert found["rows_per_client"]["skew"] == 0
    assert "classes_per_client" not in found
    assert found["split"] is None
    labels = [[0, 1, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0]]
    found = describe(from_arrays(np.ones((4, 2)), labels, [0, 0, 1, 1]))
    assert found["classes_per_client"] == {"min": 0, "median": 1, "max": 2}
    json.dumps(found, allow_nan=False)


def test_har_has_every_class_in_every_client(shared_data) -> None:
    found = describe(load(shared_data("har_lite/har_lite.npz")))
    assert found["classes_per_client"] == {"min": 6, "median": 6, "max": 6}
    assert found["split"] == {"train": 7715, "test": 2584}
