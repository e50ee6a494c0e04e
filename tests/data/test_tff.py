"""Dumps of TensorFlow Federated: HDF5 and SQLite, whole and broken."""

import gzip
import json
import lzma
import sqlite3
import struct
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from tests.data.samples import refused

from coterie.cli.main import main
from coterie.data import tff
from coterie.data.federated import DataError
from coterie.data.load import Source, load
from coterie.data.tff import parse_example

WORDS = ("sort", "c#", "how")
TAGS = ("python", "c#", "list")
SOURCE = Source(text="bag", vocabulary=WORDS, tags=TAGS)
# client: rows of (tokens, title, tags), by part
TRAIN = {
    "00000002": [("how to sort", "sort list", "list|python"), ("zz", "zz", "unknown")],
    "00000001": [("what is c#", "c#", "c#|.net")],
    "00000003": [("sort", "how", "list")],
}
TEST = {"00000001": [("how", "how", "python")], "00000009": [("c#", "c#", "c#")]}
HELD_OUT = {"00000000": [("sort", "sort", "list")]}


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    parts = bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def example(packed: bool = True, **features: list) -> bytes:
    """Write tf.train.Example from its definition."""
    entries = b""
    for name, values in features.items():
        if isinstance(values[0], bytes):
            kind, inner = 1, b"".join(field(1, value) for value in values)
        elif isinstance(values[0], float):
            raw = [struct.pack("<f", value) for value in values]
            kind = 2
            inner = field(1, b"".join(raw)) if packed else b"".join(b"\x0d" + one for one in raw)
        else:
            raw = [varint(value) for value in values]
            kind = 3
            inner = field(1, b"".join(raw)) if packed else b"".join(b"\x08" + one for one in raw)
        entries += field(1, field(1, name.encode()) + field(2, field(kind, inner)))
    return field(1, entries)


def sqlite_file(path: Path, metadata: bool = True, **parts) -> Path:
    base = sqlite3.connect(path)
    base.execute(
        "CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)"
    )
    if metadata:
        base.execute(
            "CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER)"
        )
        base.execute("CREATE INDEX i ON examples (client_id)")
    for part, clients in parts.items():
        for client, rows in clients.items():
            for row in rows:
                blob = row if isinstance(row, bytes) else post(*row)
                base.execute("INSERT INTO examples VALUES (?, ?, ?)", (part, client, blob))
            if metadata:
                base.execute(
                    "INSERT INTO client_metadata VALUES (?, ?, ?)", (client, part, len(rows))
                )
    base.commit()
    base.close()
    return path


def post(tokens: str, title: str, tags: str) -> bytes:
    return example(
        tokens=[tokens.encode()], title=[title.encode()], tags=[tags.encode()], score=[-3]
    )


def hdf5_file(path: Path, clients) -> Path:
    h5py = pytest.importorskip("h5py", reason="h5py is not installed (pip install coterie[hdf5])")
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        for client, rows in clients.items():
            for name, column in zip(
                ("tokens", "title", "tags"), zip(*rows, strict=True), strict=True
            ):
                values = np.array([value.encode() for value in column], dtype=object)
                file.create_dataset(
                    f"examples/{client}/{name}", data=values, dtype=h5py.string_dtype()
                )
    return path


def test_examples_as_tensorflow_writes_them() -> None:
    """The bytes that TensorFlow's own tutorial on tf.train.Example prints."""
    printed = (
        b"\nR\n\x14\n\x08feature2\x12\x08\n\x06\n\x04goat\n\x14\n\x08feature3\x12\x08\x12\x06\n\x04[\xd3|?"
        b"\n\x11\n\x08feature0\x12\x05\x1a\x03\n\x01\x00\n\x11\n\x08feature1\x12\x05\x1a\x03\n\x01\x04"
    )
    found = parse_example(printed)
    assert found.pop("feature3") == pytest.approx([0.9876], rel=1e-6)
    assert found == {"feature2": [b"goat"], "feature0": [0], "feature1": [4]}


@pytest.mark.parametrize("packed", [True, False])
def test_examples_of_every_kind(packed) -> None:
    features = {"é": [b"a", b""], "n": [-1, 0, 1 << 40], "f": [0.5, -2.0], "z": [300]}
    assert parse_example(example(packed, **features)) == features
    whole = example(packed, **features)
    for end in range(1, len(whole)):
        try:
            parse_example(whole[:end])
        except ValueError:
            continue
        pytest.fail(f"cut at {end} and still read")
    assert parse_example(b"") == {}
    with pytest.raises(ValueError, match="unknown type"):
        parse_example(b"\x0b")


def check_train(data) -> None:
    assert data.names == ("00000001", "00000002", "00000003")
    assert data.counts.tolist() == [1, 1, 1]
    expected = [[0, 0.5, 0], [0.4, 0, 0.2], [0.5, 0, 0.5]]
    np.testing.assert_allclose(data.features.toarray(), expected, rtol=1e-6)
    assert data.targets.tolist() == [1, 0, 2]
    assert (data.spec.task, data.spec.outputs, data.source_split) == ("multiclass", 3, None)
    assert "1 row without a known tag left out" in data.notes


def check_both(data) -> None:
    assert data.names == ("00000001", "00000002", "00000003", "00000009")
    assert data.counts.tolist() == [2, 1, 1, 1]
    assert data.source_split.tolist() == [0, 1, 0, 0, 1]
    assert data.targets.tolist() == [1, 0, 0, 2, 1]


def test_one_hdf5_file(tmp_path: Path) -> None:
    check_train(load(hdf5_file(tmp_path / "so_train.h5", TRAIN), SOURCE))


def test_a_folder_of_hdf5_files(tmp_path: Path) -> None:
    folder = tmp_path / "so"
    hdf5_file(folder / "so_train.h5", TRAIN)
    hdf5_file(folder / "so_test.h5", TEST)
    hdf5_file(folder / "so_held_out.h5", HELD_OUT)
    check_both(load(folder, SOURCE))
    check_train(load(folder, Source(**{**vars(SOURCE), "splits": ("train",)})))
    with pytest.raises(DataError, match=r"so_held_out.h5.*each of the parts train, dev"):
        load(folder, Source(**{**vars(SOURCE), "splits": ("train", "dev")}))


@pytest.mark.parametrize("metadata", [True, False])
def test_sqlite(tmp_path: Path, metadata) -> None:
    path = sqlite_file(tmp_path / "so.sqlite", metadata, train=TRAIN, test=TEST, held_out=HELD_OUT)
    data = load(path, SOURCE)
    check_both(data)
    assert "parts left out: held_out" in data.notes
    check_train(load(path, Source(**{**vars(SOURCE), "splits": ("train",)})))
    only = load(path, Source(**{**vars(SOURCE), "splits": ("held_out",)}))
    assert only.names == ("00000000",)


@pytest.mark.parametrize("end", [".lzma", ".xz", ".gz", ".zlib"])
def test_packed_sqlite(tmp_path: Path, end, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    plain = sqlite_file(tmp_path / "so.sqlite", train=TRAIN).read_bytes()
    pack = {
        ".lzma": lambda data: lzma.compress(data, format=lzma.FORMAT_ALONE),
        ".xz": lzma.compress,
        ".gz": gzip.compress,
        ".zlib": zlib.compress,
    }[end]
    path = tmp_path / f"so.sqlite{end}"
    path.write_bytes(pack(plain))
    check_train(load(path, SOURCE))
    path.write_bytes(path.read_bytes()[:-100])
    refused(r"so.sqlite.*could not be read", load, path, SOURCE)
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize("kind", ["h5", "sqlite"])
def test_the_first_clients_are_those_of_the_training_part(
    tmp_path: Path, kind, monkeypatch
) -> None:
    if kind == "h5":
        path = tmp_path / "so"
        hdf5_file(path / "train.h5", TRAIN)
        hdf5_file(path / "test.h5", {"00000000": TEST["00000009"], **TEST})
    else:
        parts = {"test": {"00000000": TEST["00000009"], **TEST}, "train": TRAIN}
        path = sqlite_file(tmp_path / "so.sqlite", **parts)
    monkeypatch.setattr(tff, "_ASKED", 1)
    data = load(path, SOURCE, clients=2)
    assert (data.names, data.counts.tolist()) == (("00000001", "00000002"), [2, 1])
    # rows keep the file's order, and the test part comes first in this SQLite file
    assert data.source_split.tolist() == ([0, 1, 0] if kind == "h5" else [1, 0, 0])
    assert "2 of 3 clients kept" in data.notes
    refused("clients = 9: expected 1 to 3", load, path, SOURCE, clients=9)


def test_pieces_do_not_change_the_result(tmp_path: Path, monkeypatch) -> None:
    path = sqlite_file(tmp_path / "so.sqlite", train=TRAIN, test=TEST)
    whole = load(path, SOURCE)
    monkeypatch.setattr(tff, "_ROWS", 1)
    pieces = load(path, SOURCE)
    np.testing.assert_array_equal(whole.features.toarray(), pieces.features.toarray())
    assert (whole.targets == pieces.targets).all()


def test_arrays_and_labels_of_other_sets(tmp_path: Path) -> None:
    """EMNIST's layout: pixels and a label, as floats in SQLite and as an array in HDF5."""
    pixels = np.arange(8, dtype=np.float32).reshape(2, 2, 2) / 8
    rows = [example(pixels=one.reshape(-1).tolist(), label=[k]) for k, one in enumerate(pixels)]
    path = sqlite_file(tmp_path / "emnist.sqlite", train={"f1": rows})
    source = Source(features=("pixels",), target="label", classes=2, shape=(2, 2))
    np.testing.assert_array_equal(load(path, source).features, pixels)
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    with h5py.File(tmp_path / "emnist.h5", "w") as file:
        file["examples/f1/pixels"], file["examples/f1/label"] = pixels, [0, 1]
    source = Source(features=("pixels",), target="label", classes=2)
    data = load(tmp_path / "emnist.h5", source)
    assert data.spec.shape == (2, 2)
    np.testing.assert_array_equal(data.features, pixels)
    with h5py.File(tmp_path / "emnist.h5", "a") as file:
        file["examples/f2/pixels"], file["examples/f2/label"] = np.ones((1, 3)), [0]
    refused(r"client 'f2': values of shape \(3,\)", load, tmp_path / "emnist.h5", source)


def test_bad_sqlite_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.sqlite"
    path.write_bytes(b"no data base at all" * 100)
    refused(r"bad.sqlite: could not be read.*fetch it again", load, path, SOURCE)
    path.write_bytes(sqlite_file(tmp_path / "a.sqlite", train=TRAIN).read_bytes()[:5000])
    refused(r"bad.sqlite: ", load, path, SOURCE)
    path = sqlite_file(tmp_path / "b.sqlite", train={"a": [post("a", "b", "c#"), b"\x0a\x7fabc"]})
    refused(r"b.sqlite: client 'a': no tf.train.Example \(it ends", load, path, SOURCE)
    path = sqlite_file(tmp_path / "c.sqlite", dev=TRAIN)
    refused("the parts are 'dev', expected 'train', 'test'; name them", load, path, SOURCE)
    base = sqlite3.connect(tmp_path / "d.sqlite")
    base.execute("CREATE TABLE other (a)")
    base.close()
    refused("no table 'examples', the tables are other", load, tmp_path / "d.sqlite", SOURCE)
    path = sqlite_file(tmp_path / "e.sqlite", train={"a": [("sort", "sort", "unknown")]})
    refused(r"no row to read.*1 without a known tag", load, path, SOURCE)
    refused("no column 'y'", load, path, Source(text="bag", vocabulary=WORDS))


def test_bad_hdf5_is_refused(tmp_path: Path, monkeypatch) -> None:
    path = hdf5_file(tmp_path / "bad.h5", TRAIN)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused(r"bad.h5: could not be read.*fetch it again", load, path, SOURCE)
    import h5py

    with h5py.File(path, "w") as file:
        file["other"] = [1]
    refused("no group 'examples', the groups are other", load, path, SOURCE)
    hdf5_file(path, TRAIN)
    with h5py.File(path, "a") as file:
        del file["examples/00000003/title"]
    refused(r"client '00000003' has no 'title', only tags, tokens", load, path, SOURCE)
    with h5py.File(path, "a") as file:
        file["examples/00000003/title"] = [b"a", b"b"]
    refused(r"client '00000003' has .*'title': 2.*same number", load, path, SOURCE)
    with h5py.File(path, "w") as file:
        file.create_group("examples")
    refused("no clients in 'examples'", load, path, SOURCE)
    monkeypatch.setitem(sys.modules, "h5py", None)
    refused(r"needs h5py.*pip install coterie\[hdf5\]", load, path, SOURCE)


def test_the_command_line_opens_a_dump(tmp_path: Path, capsys) -> None:
    rows = [example(pixels=[0.5, 1.0], label=[k]) for k in range(2)]
    path = sqlite_file(tmp_path / "emnist.sqlite", train={"f1": rows, "f2": rows})
    command = ["data", "show", str(path), "--features", "pixels", "--target", "label"]
    assert main([*command, "--classes", "2", "--clients", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["clients"], found["rows"], found["shape"]) == (1, 2, [2])


def change(path: Path, *queries: str) -> Path:
    base = sqlite3.connect(path)
    for query in queries:
        base.execute(query)
    base.commit()
    base.close()
    return path


def test_rows_in_a_log_beside_the_file_are_not_lost(tmp_path: Path) -> None:
    path = sqlite_file(tmp_path / "a.sqlite", train=TRAIN)
    base = sqlite3.connect(path)
    base.execute("PRAGMA journal_mode=WAL")
    base.execute("PRAGMA wal_autocheckpoint=0")
    base.execute("DELETE FROM examples WHERE client_id = '00000001'")
    base.commit()
    refused(r"a\.sqlite-wal.*wal_checkpoint\(TRUNCATE\)", load, path, SOURCE)
    base.close()
    journal = tmp_path / "a.sqlite-journal"
    journal.write_bytes(tff._JOURNAL + b"rest")
    refused("never finished", load, path, SOURCE)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        (
            "DELETE FROM examples WHERE client_id = '00000001' AND split_name = 'test'",
            "client '00000001', part 'test': client_metadata declares 1 rows.*has 0",
        ),
        (
            "DELETE FROM examples WHERE rowid = 2",
            "client '00000002', part 'train': client_metadata declares 2 rows.*has 1",
        ),
        (
            "DELETE FROM client_metadata WHERE client_id = '00000003'",
            "client '00000003', part 'train': client_metadata does not list it",
        ),
        ("UPDATE client_metadata SET num_examples = 'x'", "declares 'x' rows"),
        ("UPDATE examples SET client_id = NULL WHERE rowid = 1", "client_id is missing"),
    ],
)
def test_lost_rows_of_sqlite_are_refused(tmp_path: Path, query, words) -> None:
    path = change(sqlite_file(tmp_path / "a.sqlite", train=TRAIN, test=TEST), query)
    refused(words, load, path, SOURCE)


def test_metadata_without_counts(tmp_path: Path) -> None:
    path = sqlite_file(tmp_path / "a.sqlite", train=TRAIN)
    change(path, "ALTER TABLE client_metadata DROP COLUMN num_examples")
    check_train(load(path, SOURCE))


@pytest.mark.parametrize("metadata", [True, False])
def test_clients_of_sqlite_may_be_numbers(tmp_path: Path, metadata) -> None:
    numbered = {int(client): rows for client, rows in TRAIN.items()}
    path = sqlite_file(tmp_path / "a.sqlite", metadata, train=numbered)
    change(
        path,
        "CREATE TABLE untyped (split_name, client_id, serialized_example_proto)",
        "INSERT INTO untyped SELECT split_name, CAST(client_id AS INTEGER), "
        "serialized_example_proto FROM examples ORDER BY rowid",
        "DROP TABLE examples",
        "ALTER TABLE untyped RENAME TO examples",
    )
    data = load(path, SOURCE, clients=2)
    assert (data.names, data.counts.tolist()) == (("1", "2"), [1, 1])


@pytest.mark.parametrize("layout", ["examples", "examples/c1", "examples/c1/tokens/a"])
def test_other_layouts_of_hdf5_are_refused(tmp_path: Path, layout) -> None:
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file[layout] = [1, 2]
        if layout.endswith("a"):
            file["examples/c1/y"] = [0, 1]
    refused(r"a\.h5", load, path, Source(features=("tokens",), classes=2))


@pytest.mark.parametrize("mark", [b"HEAP", b"TREE", b"SNOD", b"GCOL"])
def test_damaged_hdf5_is_refused(tmp_path: Path, mark) -> None:
    """Each kind of block begins with a mark; what is raised without it depends on the block."""
    path = hdf5_file(tmp_path / "a.h5", TRAIN)
    raw = path.read_bytes()
    path.write_bytes(raw.replace(mark, mark[::-1]))
    assert path.read_bytes() != raw
    refused(r"a\.h5: could not be read", load, path, SOURCE)


def test_images_of_bytes_in_hdf5(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 3, 4) * 10
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        for client in "ab":
            file[f"examples/{client}/pixels"] = pixels
            file[f"examples/{client}/label"] = [0, 1]
    source = Source(features=("pixels",), target="label", classes=2)
    data = load(path, source)
    np.testing.assert_allclose(data.features[:2].numpy(), pixels / 255, rtol=1e-6)
    assert data.notes == ("uint8 images divided by 255",)
    with h5py.File(path, "a") as file:
        del file["examples/b/pixels"]
        file["examples/b/pixels"] = pixels / 255
    refused("client 'b' holds 'pixels' as float64", load, path, source)


def test_messages_name_no_first_line(tmp_path: Path) -> None:
    path = sqlite_file(tmp_path / "a.sqlite", train=TRAIN)
    with pytest.raises(DataError, match="no column 'y'") as caught:
        load(path, Source(classes=2))
    assert "first line" not in str(caught.value)
