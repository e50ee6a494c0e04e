"""Degenerate data is refused in words, everything else is let through."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse

from coterie.data.checks import refuse_degenerate
from coterie.data.federated import DataError, FederatedDataset
from coterie.data.formats import from_arrays
from coterie.data.papers import mpmtl_group_sparse
from coterie.data.synthetic import synthetic


def small(**options: Any) -> FederatedDataset:
    return synthetic(clients=8, rows=3, features=4, **options).data


@pytest.mark.parametrize("task", ["regression", "binary", "multiclass", "multilabel"])
@pytest.mark.parametrize("sparsely", [False, True])
def test_ordinary_data_passes(task: Any, sparsely: bool) -> None:
    refuse_degenerate(small(task=task, sparse=sparsely))


def test_a_client_may_have_one_row_and_one_class() -> None:
    refuse_degenerate(from_arrays([[1.0], [2.0]], [0, 1], ["a", "b"]))
    refuse_degenerate(from_arrays([[0.0], [0.0], [0.0]], [0.5, 0.5, 1.5], ["a", "a", "b"]))


def test_a_constant_target_is_refused() -> None:
    data = small()
    data = replace(data, targets=torch.full_like(data.targets, 2.5))
    with pytest.raises(DataError, match=r"every target is 2\.5, over all 8 clients; expected"):
        refuse_degenerate(data)
    targets = data.targets.clone()
    targets[-1] = 2.6
    refuse_degenerate(replace(data, targets=targets))


@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_one_class_is_refused(task: Any) -> None:
    data = small(task=task)
    data = replace(data, targets=torch.ones_like(data.targets))
    with pytest.raises(DataError, match="every row is of class 1, over all 8 clients"):
        refuse_degenerate(data)


def test_clients_without_rows_are_named() -> None:
    data = small()
    keep = np.ones(24, dtype=bool)
    keep[3:6] = False
    with pytest.raises(DataError, match=r"1 of 8 clients have no rows \('client 1'\)"):
        refuse_degenerate(data.where(keep))
    keep[:21] = False
    with pytest.raises(DataError, match=r"7 of 8.*'client 0'.*'client 4' and 2 others"):
        refuse_degenerate(data.where(keep))
    with pytest.raises(DataError, match="hold out fewer"):
        refuse_degenerate(mpmtl_group_sparse(clients=2, train=3, test=0).data.split_by_source()[1])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["features", "targets", "sparse"])
def test_rows_that_are_not_finite_are_refused(
    value: float, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data: Any = small(sparse=where == "sparse", density=1.0 if where == "sparse" else None)
    if where == "sparse":
        matrix = sparse.csr_matrix(data.features)
        matrix.data[matrix.indptr[7]] = value
        data = replace(data, features=matrix)
    else:
        getattr(data, where)[7] = value
    for chunk in (1 << 16, 2, 7):
        monkeypatch.setattr("coterie.data.checks._CHUNK", chunk)
        with pytest.raises(DataError, match=r"client 'client 2', row 1 \(from 0\).*finite"):
            refuse_degenerate(data)
