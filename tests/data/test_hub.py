"""Data sets of the package `datasets`, by objects that look like its own and by saved folders."""

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.data.samples import refused

from coterie.data import hub
from coterie.data.federated import DataError
from coterie.data.load import Source, load

ROWS = {
    "who": ["b", "a", "b"],
    "age": [30, 41, 52],
    "text": ["good day", "bad", "good"],
    "y": [0, 1, 1],
}
LATER = {"who": ["a"], "age": [63], "text": ["day"], "y": [0]}
TABLE = Source(client="who", classes=2, features=("age",))


class Label:
    def __init__(self, names):
        self.names = names


class Dataset:
    """What `datasets.Dataset` shows of itself: columns, features, and slices as lists."""

    def __init__(self, columns, **features):
        self.columns = columns
        self.features = {name: features.get(name) for name in columns}
        self.column_names = list(columns)

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, rows):
        return {name: values[rows] for name, values in self.columns.items()}


class DatasetDict(dict):
    pass


def save(folder: Path, columns, features=None, batch=2) -> Path:
    """Write what `save_to_disk` writes: Arrow streams, state.json, dataset_info.json."""
    folder.mkdir(parents=True)
    table = pa.table(columns)
    names = []
    for part, start in enumerate(range(0, table.num_rows, batch)):
        names.append(f"data-{part:05d}-of-00002.arrow")
        sink = pa.OSFile(str(folder / names[-1]), "wb")
        with sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table.slice(start, batch))
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features or {}}))
    return folder


def save_dict(folder: Path, **parts) -> Path:
    for name, columns in parts.items():
        save(folder / name, columns)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(parts)}))
    return folder


def check(data) -> None:
    assert (data.names, data.counts.tolist()) == (("b", "a"), [2, 1])
    assert data.features.tolist() == [[30], [52], [41]]
    assert data.targets.tolist() == [0, 1, 1]


@pytest.mark.parametrize("step", [1, 2, 100])
def test_an_object(monkeypatch, step) -> None:
    monkeypatch.setattr(hub, "_STEP", step)
    check(load(Dataset(ROWS), TABLE))
    arrays = {name: np.array(values) for name, values in ROWS.items()}
    check(load(Dataset(arrays), TABLE))
    assert list(load(Dataset(ROWS), TABLE, clients=1).names) == ["b"]


def test_a_saved_folder_and_one_file(tmp_path: Path) -> None:
    folder = save(tmp_path / "toy", ROWS)
    check(load(folder, TABLE))
    one = save(tmp_path / "one", ROWS, batch=3)
    check(load(one / "data-00000-of-00002.arrow", TABLE))


@pytest.mark.parametrize("kind", ["object", "folder"])
def test_parts_are_the_split(tmp_path: Path, kind) -> None:
    if kind == "object":
        parts = DatasetDict(train=Dataset(ROWS), test=Dataset(LATER), validation=Dataset(LATER))
    else:
        parts = save_dict(tmp_path / "toy", train=ROWS, test=LATER, validation=LATER)
    data = load(parts, TABLE)
    assert data.features.reshape(-1).tolist() == [30, 52, 41, 63]
    assert data.source_split.tolist() == [0, 0, 0, 1]
    assert "parts left out: validation" in data.notes
    only = load(parts, Source(**{**vars(TABLE), "splits": ("validation",)}))
    assert (only.names, only.source_split) == (("a",), None)
    with pytest.raises(DataError, match="the parts are train, test, validation, expected dev"):
        load(parts, Source(**{**vars(TABLE), "splits": ("dev",)}))


def test_class_labels_declare_the_classes(tmp_path: Path) -> None:
    plain = Source(client="who", features=("age",))
    given = load(Dataset(ROWS, y=Label(["no", "yes", "maybe"])), plain)
    assert (given.spec.task, given.spec.outputs, given.assumed) == ("multiclass", 3, ())
    features = {"y": {"names": ["no", "yes", "maybe"], "_type": "ClassLabel"}}
    saved = load(save(tmp_path / "toy", ROWS, features), plain)
    assert (saved.spec.task, saved.spec.outputs) == ("multiclass", 3)
    assert load(Dataset(ROWS), plain).assumed != ()


def test_text_by_the_same_options(tmp_path: Path) -> None:
    source = Source(client="who", text="bag", vocabulary=("good", "day"), bag="counts", classes=2)
    for given in (Dataset(ROWS), save(tmp_path / "toy", ROWS)):
        assert load(given, source).features.toarray().tolist() == [[1, 1], [1, 0], [0, 0]]


def test_images_in_objects_and_folders(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (3, 5, 4, 3), dtype=np.uint8)
    pictures = [image.fromarray(one) for one in pixels]
    stored = []
    for picture in pictures:
        buffer = io.BytesIO()
        picture.save(buffer, "png")
        stored.append({"bytes": buffer.getvalue(), "path": "x.png"})
    source = Source(client="who", images="", size=(5, 4), classes=2)
    expected = pixels[[0, 2, 1]].transpose(0, 3, 1, 2) / 255
    for given in (
        Dataset(ROWS | {"image": pictures}),
        save(tmp_path / "toy", ROWS | {"image": stored}),
    ):
        data = load(given, source)
        np.testing.assert_allclose(data.features, expected, rtol=1e-6)
    assert load(Dataset(ROWS | {"image": pictures}), source).spec.shape == (3, 5, 4), "read twice"


def test_arrays_in_a_column(tmp_path: Path) -> None:
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    columns = ROWS | {"pixels": pa.array(pixels.tolist(), pa.list_(pa.list_(pa.uint8())))}
    source = Source(client="who", features=("pixels",), classes=2)
    data = load(save(tmp_path / "toy", columns), source)
    np.testing.assert_allclose(data.features, pixels[[0, 2, 1]] / 255, rtol=1e-6)
    floats = ROWS | {"pixels": [[0.5, 1.0], [1.5, 2.0], [2.5, 3.0]]}
    assert load(Dataset(floats), source).features.tolist() == [[0.5, 1], [2.5, 3], [1.5, 2]]
    floats["pixels"] = [[0.5, 1.0], [1.5], [2.5, 3.0]]
    refused(r"row 2 \(from 1\), client 'a': values of shape \(1,\)", load, Dataset(floats), source)


def test_what_is_none_of_these_is_refused(tmp_path: Path) -> None:
    for given in (5, {}, {"train": 5}, [1, 2]):
        refused(r"cannot load .*from_arrays", load, given, TABLE)
    refused("no column 'client'; the columns are who, age", load, Dataset(ROWS))
    for mixed in ([object(), 1, 2], [[1], 2, 3]):
        with pytest.raises(DataError, match="column 'y' holds values of several kinds"):
            load(Dataset(ROWS | {"y": mixed}), TABLE)
    with pytest.raises(DataError, match="columns differ"):
        load(DatasetDict(train=Dataset(ROWS), test=Dataset({"who": ["a"]})), TABLE)


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "toy", ROWS)
    data = folder / "data-00001-of-00002.arrow"
    whole = data.read_bytes()
    data.write_bytes(whole[:-80])
    refused(r"data-00001.*could not be read", load, folder, TABLE)
    data.write_bytes(b"nothing")
    refused(r"data-00001", load, folder, TABLE)
    data.unlink()
    refused(r"data-00001.*no such file", load, folder, TABLE)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(
        json.dumps(state | {"_indices_data_files": [{"filename": "i"}]})
    )
    refused("flatten_indices", load, folder, TABLE)
    (folder / "state.json").write_text("{}")
    refused("names no data files", load, folder, TABLE)
    (folder / "state.json").write_text("{")
    refused(r"state.json: not whole JSON", load, folder, TABLE)
    (folder / "state.json").write_text("[]")
    refused("expected an object", load, folder, TABLE)


def test_a_file_cut_between_messages_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", ROWS, batch=3)
    path = next(folder.glob("*.arrow"))
    table = pa.table(ROWS)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    check(load(folder, TABLE))
    raw = path.read_bytes()
    reader = pa.BufferReader(raw)
    ends = []
    for _ in range(4):  # the schema and three batches
        pa.ipc.read_message(reader)
        ends.append(reader.tell())
    for end in (*ends, len(raw) - 4, 0):
        path.write_bytes(raw[:end])
        refused(r"\.arrow: could not be read", load, folder, TABLE)


def test_offsets_outside_their_buffer_are_refused(tmp_path: Path) -> None:
    """They would be read from foreign memory."""
    path = tmp_path / "rows.arrow"
    table = pa.table({"client": ["aaa", "bbb", "ccc"], "x": [1.0, 2.0, 3.0], "y": [1.0, 0.5, 2.0]})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    assert len(load(path)) == 3
    raw = path.read_bytes()
    offsets, wrong = (
        np.array(ends, dtype="<i4").tobytes() for ends in ([0, 3, 6, 9], [0, 3, 1 << 30, 9])
    )
    assert raw.count(offsets) == 1
    path.write_bytes(raw.replace(offsets, wrong))
    refused(r"rows\.arrow: could not be read .*out of bounds", load, path)


@pytest.mark.parametrize("files", [["x", 7], [{}], [{"filename": "../a.arrow"}], {"a": 1}, "x"])
def test_bad_lists_of_files_are_refused(tmp_path: Path, files) -> None:
    folder = save(tmp_path / "a", ROWS)
    (folder / "state.json").write_text(json.dumps({"_data_files": files}))
    refused(r"state\.json names", load, folder, TABLE)


def test_a_file_without_a_column_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", ROWS)
    lesser = pa.table(ROWS).select(["who", "y"])
    path = folder / "data-00001-of-00002.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, lesser.schema) as writer:
        writer.write_table(lesser)
    refused(r"00001-of-00002\.arrow: columns differ.*age, text", load, folder, TABLE)


class Streamed:
    """What `datasets.IterableDataset` shows of itself: no length, and no rows by number."""

    column_names = tuple(ROWS)
    features = None

    def __getitem__(self, rows):
        raise NotImplementedError


@pytest.mark.parametrize("given", [Streamed(), DatasetDict(train=Streamed())])
def test_streamed_data_is_refused(given) -> None:
    refused(r"it is streamed.*without streaming=True", load, given, TABLE)


class Formatted(Dataset):
    """A data set with a format, whose rows come as something else."""

    def __init__(self, columns, kind):
        super().__init__(columns)
        self.format = {"type": kind}

    def with_format(self, kind):
        assert kind is None
        return Dataset(self.columns)

    def __getitem__(self, rows):
        if self.format["type"] == "custom":
            return super().__getitem__(rows)
        return {"age": self.columns["age"][rows]}  # a format may hand out chosen columns only


@pytest.mark.parametrize("kind", ["torch", "arrow", "custom"])
def test_formats_are_set_aside(kind) -> None:
    check(load(Formatted(ROWS, kind), TABLE))


class Array:
    shape, dtype = (1, 2), "uint8"


class Sequence:
    def __init__(self, feature):
        self.feature = feature


class Value:
    dtype = "uint8"


class Grey(pa.ExtensionType):
    """As the package registers its arrays when it is imported."""

    def __init__(self):
        super().__init__(pa.list_(pa.list_(pa.uint8())), "coterie.test.grey")

    def __arrow_ext_serialize__(self):
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage, serialized):
        return cls()


def test_images_of_bytes_are_read_alike(tmp_path: Path) -> None:
    pixels = [[[0, 255]], [[51, 102]], [[10, 20]]]
    rows = {"who": ["b", "a", "b"], "y": [0, 1, 1], "x": pixels}
    source = Source(client="who", classes=2, features=("x",))
    typed = pa.array(pixels, pa.list_(pa.list_(pa.uint8())))
    save(tmp_path / "plain", {**rows, "x": typed})
    pa.register_extension_type(Grey())
    try:
        save(tmp_path / "own", {**rows, "x": pa.ExtensionArray.from_storage(Grey(), typed)})
        own = load(tmp_path / "own", source)
    finally:
        pa.unregister_extension_type("coterie.test.grey")
    expected = np.array([[0, 255], [10, 20], [51, 102]]).reshape(3, 1, 2) / 255
    given = [load(Dataset(rows, x=kind), source) for kind in (Array(), Sequence([Value()]))]
    for data in (own, load(tmp_path / "plain", source), *given):
        np.testing.assert_allclose(data.features.numpy(), expected, rtol=1e-6)
        assert data.notes == ("uint8 images divided by 255",)
    other = load(Dataset(rows), source)
    assert (other.features.max(), other.notes) == (255, ())
