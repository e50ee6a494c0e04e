"""Folders: which files are read, of which part each is, and that nothing is skipped in silence."""

import argparse
import gzip
import json
import shlex
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from tests.data.samples import equal, refused

from coterie.cli.flags import data_table
from coterie.cli.main import build_parser
from coterie.core.config import ConfigError, from_table, to_table, to_toml
from coterie.data.config import JSON, MOST_ROWS, DataConfig, find_files
from coterie.data.load import Source, load

SOURCE = Source(classes=2)


def table(path: Path, first: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {"client": ["a", "b"], "y": [0, 1], "z": [first, first + 1]}
    parquet.write_table(pa.table(columns), path)
    return path


def check(data) -> None:
    assert data.names == ("a", "b")
    assert data.features.reshape(-1).tolist() == [1, 8, 2, 9]
    assert data.source_split.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train-00000-of-00001.parquet", "test-00000-of-00001.parquet"),
        ("data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"),
        ("train/a.parquet", "test/b.parquet"),
        ("data/train/a.parquet", "data/test/b.parquet"),
        ("toy_train.parquet", "toy_test.parquet"),
        ("train.parquet", "TEST.PARQUET"),
    ],
)
def test_parts_of_parquet_are_the_split(tmp_path: Path, train, test) -> None:
    table(tmp_path / "set" / train, 1)
    table(tmp_path / "set" / test, 8)
    (tmp_path / "set" / "README.md").write_text("train and test")
    data = load(tmp_path / "set", SOURCE)
    check(data)
    assert data.notes == ()
    single = load(tmp_path / "set", Source(classes=2, splits=("train",)))
    assert single.source_split is None
    assert single.features.reshape(-1).tolist() == [1, 2]


def test_parts_of_other_names(tmp_path: Path) -> None:
    table(tmp_path / "train-0.parquet", 1)
    table(tmp_path / "test-0.parquet", 8)
    table(tmp_path / "validation-0.parquet", 5)
    data = load(tmp_path, SOURCE)
    check(data)
    assert data.notes == ("files left out: validation-0.parquet",)
    both = load(tmp_path, Source(classes=2, splits=("train", "validation")))
    assert both.features.reshape(-1).tolist() == [1, 5, 2, 6]
    table(tmp_path / "more.parquet", 3)
    refused(r"named after a part.*more\.parquet is not; rename", load, tmp_path, SOURCE)


def test_a_name_of_two_parts_is_refused(tmp_path: Path) -> None:
    table(tmp_path / "train_test.parquet", 1)
    refused("several parts", load, tmp_path, SOURCE)


def test_names_that_are_no_parts(tmp_path: Path) -> None:
    """A part's name counts as a whole word only."""
    table(tmp_path / "a" / "latest.parquet", 1)
    table(tmp_path / "a" / "trainer.parquet", 8)
    data = load(tmp_path / "a", SOURCE)
    assert data.source_split is None
    assert data.counts.tolist() == [2, 2]
    table(tmp_path / "b" / "train-0.parquet", 1)
    table(tmp_path / "b" / "train-1.parquet", 8)
    one = load(tmp_path / "b", SOURCE)
    assert one.source_split is None
    assert one.notes == ("no files of the part test",)


def test_a_split_column_goes_before_names(tmp_path: Path) -> None:
    columns = {"client": ["a", "b"], "y": [0, 1], "z": [1.0, 2.0], "split": [1, 0]}
    for name in ("train.parquet", "test.parquet"):
        parquet.write_table(pa.table(columns), tmp_path / name)
    assert load(tmp_path, SOURCE).source_split.tolist() == [1, 1, 0, 0]


def test_suffixes_in_capitals(tmp_path: Path, leaf_file) -> None:
    table(tmp_path / "p" / "a.parquet", 1)
    table(tmp_path / "p" / "B.PARQUET", 8)
    assert load(tmp_path / "p", SOURCE).counts.tolist() == [2, 2]
    leaf_file(tmp_path / "l" / "A.JSON", a=([[1]], [0]))
    leaf_file(tmp_path / "l" / "b.json", b=([[2]], [1]))
    assert load(tmp_path / "l", SOURCE).names == ("a", "b")


def test_packed_and_deeper_files_are_refused(tmp_path: Path, leaf_file, refuse) -> None:
    folder = tmp_path / "toy"
    path = leaf_file(folder / "a.json", a=([[1]], [0]))
    (folder / "b.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert "b.json.gz: packed" in refuse(folder, SOURCE)
    (folder / "b.json.gz").unlink()
    leaf_file(folder / "sub" / "c.json", c=([[1]], [0]))
    assert "c.json: lies deeper" in refuse(folder, SOURCE)
    deep = tmp_path / "deep"
    leaf_file(deep / "train" / "b.json", b=([[1]], [0]))
    leaf_file(deep / "train" / "sub" / "a.json", a=([[1]], [0]))
    leaf_file(deep / "test" / "a.json", a=([[1]], [0]))
    assert "a.json: lies deeper" in refuse(deep, SOURCE)


def test_what_lies_beside_is_noted(tmp_path: Path, leaf_file) -> None:
    for name in ("train", "test", "all_data"):
        leaf_file(tmp_path / name / "a.json", a=([[1]], [0]))
    (tmp_path / "rows.csv").write_text("client,y\n")
    (tmp_path / "LICENSE.txt").write_text("free")
    (tmp_path / ".hidden.json").write_text("{}")
    data = load(tmp_path, SOURCE)
    assert data.counts.tolist() == [2]
    assert data.notes == ("files left out: all_data, rows.csv",)


def test_what_lies_beside_the_folder_data_is_noted(tmp_path: Path) -> None:
    table(tmp_path / "data" / "train.parquet", 1)
    table(tmp_path / "data" / "test.parquet", 8)
    table(tmp_path / "more" / "a.parquet", 1)
    (tmp_path / "dataset_infos.json").write_text("{}")
    data = load(tmp_path, SOURCE)
    check(data)
    assert data.notes == ("files left out: dataset_infos.json, more",)


def test_parts_of_leaf_by_name(tmp_path: Path, leaf_file) -> None:
    leaf_file(tmp_path / "niid_train_9.json", a=([[1]], [0]), b=([[2]], [1]))
    leaf_file(tmp_path / "niid_test_9.json", a=([[8]], [0]), b=([[9]], [1]))
    check(load(tmp_path, SOURCE))


def test_a_folder_of_one_part(tmp_path: Path, leaf_file) -> None:
    leaf_file(tmp_path / "train" / "a.json", a=([[1]], [0]))
    (tmp_path / "test").mkdir()
    data = load(tmp_path, SOURCE)
    assert data.source_split is None
    assert data.notes == ("no files of the part test",)


def test_nothing_to_read(tmp_path: Path, refuse) -> None:
    (tmp_path / "none").mkdir()
    assert "no LEAF json here" in refuse(tmp_path / "none")
    assert find_files(tmp_path / "none", JSON, ("train",)).files == ()


def test_a_mark_at_the_beginning_of_json(tmp_path: Path, leaf_file) -> None:
    path = leaf_file(tmp_path / "a.json", a=([[1, 2], [3, 4]], [0, 1]))
    whole = load(path, SOURCE)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load(path, SOURCE).features.tolist() == whole.features.tolist()
    broken = path.read_bytes()[:-1]
    path.write_bytes(broken)
    refused("line 1, character 94: Expecting", load, path, SOURCE)
    assert json.loads(broken.decode("utf-8-sig") + "}")["users"] == ["a"]


def config_of(flags: str) -> DataConfig:
    arguments: argparse.Namespace = build_parser().parse_args(shlex.split(flags))
    return from_table(DataConfig, data_table(arguments), "plan.data")


# A plan's config of data, and its flags.


def test_rows_are_kept_after_the_split_and_before_scaling() -> None:
    options = {"clients": 6, "rows": 40, "features": 3}
    whole = DataConfig(name="synthetic", options=options, split_seed=5)
    train, test = replace(whole, most_rows=7, clients=4).split()
    all_train, all_test = whole.split()
    assert train.counts.tolist() == [7] * 4
    assert equal(test, all_test.first(4))
    assert equal(train, all_train.first(4).at_most(7, seed=5))
    other, _ = replace(whole, most_rows=7, clients=4, split_seed=6).split()
    assert not torch.equal(train.targets, other.targets)
    scaled, held = replace(whole, most_rows=7, standardise="client").split()
    assert isinstance(scaled.features, torch.Tensor)
    means = scaled.features.reshape(6, 7, 3).mean(dim=1)
    torch.testing.assert_close(means, torch.zeros(6, 3), atol=1e-5, rtol=0)
    assert held.counts.tolist() == [10] * 6


def test_rows_of_a_declared_split() -> None:
    train, test = DataConfig(name="mtlsvm:regression", most_rows=100, clients=3).split()
    assert (train.counts.tolist(), test.counts.tolist()) == ([100] * 3, [60] * 3)
    assert len(DataConfig(name="mtlsvm:regression", clients=3).open()) == 3


def test_flags_say_it() -> None:
    config = config_of("run --data a.npz --positive 3 --rows 100 --clients 20")
    assert (config.most_rows, config.clients, config.source.positives) == (100, 20, ("3",))
    assert config_of("tune --data a.npz --positive 3,4 --rows 9").source.positives == ("3", "4")
    shown = config_of("data show a.npz --positive=-1 --clients 2")
    assert (shown.source.positives, shown.clients, shown.most_rows) == (("-1",), 2, MOST_ROWS)
    plain = config_of("run --data a.npz")
    assert (plain.most_rows, plain.clients, plain.source) == (MOST_ROWS, None, Source())


def test_a_plan_keeps_it_and_an_old_plan_reads_as_before() -> None:
    for source in (Source(positive=3), Source(positive=("3", 4), classes=6)):
        config = DataConfig(name="a.npz", source=source, most_rows=100, clients=20)
        read = from_table(DataConfig, tomllib.loads(to_toml(to_table(config))), "data")
        assert read == config
    table = to_table(DataConfig(name="a.npz"))
    assert "clients" not in table and table["most_rows"] == MOST_ROWS
    assert "positive" not in table["source"]


@pytest.mark.parametrize("name", ["most_rows", "clients"])
def test_impossible_numbers_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} = 0: expected a whole number >= 1"):
        from_table(DataConfig, {"name": "a.npz", name: 0}, "data")


def test_files_are_read_and_refused_without_torch(tmp_path: Path, leaf_file) -> None:
    """Importing torch takes seconds; checks of files and options do not need it."""
    leaf_file(tmp_path / "a.json", u=([[1, 2]], [0]), v=([[3, 4]], [1]))
    (tmp_path / "a.csv").write_text("client,a,y\nu,1,0.5\nv,3,1.5\n")
    np.savez(tmp_path / "a.npz", X=np.ones((4, 2)), y=[0.5, 1, 1.5, 2], client=[0, 0, 1, 1])
    code = """
import sys
from coterie.data.config import DataConfig
from coterie.data.federated import DataError, describe
for name in ("a.json", "a.csv", "a.npz"):
    assert describe(DataConfig(name=name, clients=1).read())["clients"] == 1
for refused in ({"name": "no.csv"}, {"name": "no"}, {"name": "a.csv", "clients": 9}):
    try:
        DataConfig(**refused).read()
    except DataError:
        continue
    raise AssertionError(refused)
print(*sorted({"torch", "scipy.sparse", "numba"} & set(sys.modules)))
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert ran.stdout.strip() == ""
