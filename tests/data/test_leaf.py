import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from coterie.data import leaf
from coterie.data.leaf import LEAF_CHARACTERS
from coterie.data.load import Source, load


def test_one_file(tmp_path: Path, leaf_file) -> None:
    users = {"w2": ([[1, 2], [3, 4]], [0, 1]), "none": ([], []), "w1": ([[5, 6]], [2])}
    path = leaf_file(tmp_path / "a.json", **users)
    data = load(path, Source(classes=4))
    assert (data.names, data.counts.tolist()) == (("w2", "none", "w1"), [2, 0, 1])
    assert data.features.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert data.targets.tolist() == [0, 1, 2]
    assert (data.spec.task, data.spec.outputs) == ("multiclass", 4)
    assert data.source_split is None


def test_a_folder_with_train_and_test(tmp_path: Path, leaf_file) -> None:
    folder = tmp_path / "toy"
    leaf_file(folder / "train" / "0.json", a=([[1.0], [2.0]], [0.5, 1.5]), b=([[3.0]], [2.5]))
    leaf_file(folder / "train" / "1.json", c=([[4.0]], [3.5]))
    leaf_file(folder / "test" / "0.json", b=([[5.0]], [4.5]), a=([[6.0]], [5.5]))
    data = load(folder)
    assert data.names == ("a", "b", "c")
    assert data.features.reshape(-1).tolist() == [1, 2, 6, 3, 5, 4]
    assert data.source_split.tolist() == [0, 0, 1, 0, 1, 0]
    train, test = data.split_by_source()
    assert (train.counts.tolist(), test.counts.tolist()) == ([2, 1, 1], [1, 1, 0])
    flat = load(folder / "train")
    assert (flat.names, flat.source_split) == (("a", "b", "c"), None)


def test_text_is_read_by_declared_characters(tmp_path: Path, leaf_file) -> None:
    path = leaf_file(tmp_path / "a.json", w=(["ab", "ba"], ["c", "a"]))
    source = Source(levels={"x": ("a", "b")}, classes=("a", "b", "c"))
    data = load(path, source)
    assert data.features.tolist() == [[0, 1], [1, 0]]
    assert data.targets.tolist() == [2, 0]


def test_options_apply_to_numbers(tmp_path: Path, leaf_file) -> None:
    path = leaf_file(tmp_path / "a.json", w=([[1, 2, 3, 4], [5, 6, 7, 8]], [0.5, 1.5]))
    assert load(path, Source(shape=(2, 2))).spec.shape == (2, 2)
    source = Source(features=("1", "3"), center={"3": 4.0})
    assert load(path, source).features.tolist() == [[2, 0], [6, 4]]
    gap = leaf_file(tmp_path / "b.json", w=([[1, None], [5, 6]], [0.5, 1.5]))
    assert load(gap, Source(missing="drop")).features.tolist() == [[5, 6]]


def content(**changes) -> str:
    whole = {
        "users": ["v", "w"],
        "num_samples": [1, 2],
        "user_data": {"v": {"x": [[1, 2]], "y": [0]}, "w": {"x": [[3, 4], [5, 6]], "y": [1, 0]}},
    }
    for key, value in changes.items():
        if key in whole:
            whole[key] = value
        else:
            whole["user_data"][key] = value
    return json.dumps({key: value for key, value in whole.items() if value is not None})


@pytest.mark.parametrize(
    ("text", "source", "words"),
    [
        (content()[:-30], Source(), ["not whole JSON", "line 1", "fetch it again"]),
        ("", Source(), ["not whole JSON", "fetch it again"]),
        ("[1, 2]", Source(), ["not LEAF json", "users"]),
        (content(users=None), Source(), ["not LEAF json", "users"]),
        (content(users="v"), Source(), ["not LEAF json", "list"]),
        (content(num_samples=3), Source(), ["not LEAF json", "num_samples are lists"]),
        (content(users=[], num_samples=[], user_data={}), Source(), ["no clients", "at least one"]),
        (content(users=["v", "v"]), Source(), ["duplicate client 'v'", "name each"]),
        (content(users=["v", "u"]), Source(), ["client 'u'", "no x and y", "add them"]),
        (content(num_samples=[1, 3]), Source(), ["client 'w'", "num_samples says 3", "2 rows"]),
        (content(num_samples=[1]), Source(), ["2 users", "1 num_samples", "one of each"]),
        (content(w={"x": [[3, 4], [5, 6]], "y": [1]}), Source(), ["'w'", "x has 2 rows, y 1"]),
        (content(w={"x": [[3, 4], [5]], "y": [1, 0]}), Source(), ["'w', row 1", "(1,)", "(2,)"]),
        (content(w={"x": [[3], [5]], "y": [1, 0]}), Source(), ["'w'", "(1,)", "(2,)"]),
        (content(w={"x": [[3, 4], [5, "a"]], "y": [1, 0]}), Source(), ["'w', row 1", "'a'"]),
        (content(w={"x": ["ab", "cd"], "y": [1, 0]}), Source(), ["'w', row 0", "'ab'", "levels"]),
        (content(w={"x": [[3, 4], [5, None]], "y": [1, 0]}), Source(), ["row 1", "'w'", "gap"]),
        (content(w={"x": [[3, 4], [5, float("inf")]], "y": [1, 0]}), Source(), ["row 1", "inf"]),
        (content(w={"x": [[3, 4], [5, 6]], "y": [1, 7]}), Source(classes=2), ["'w'", "label 7"]),
        (content(w={"x": [[3, 4], [5, 6]], "y": [1, [2]]}), Source(), ["'w'", "unequal widths"]),
        (content(w={"x": [[3, 4], [5, 6]], "y": [1, "a"]}), Source(), ["text", "declare"]),
    ],
)
def test_bad_json_is_refused(tmp_path: Path, refuse, text, source, words) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    message = refuse(path, source)
    for word in words:
        assert word in message


def test_bad_folders_and_text_are_refused(tmp_path: Path, refuse, leaf_file) -> None:
    folder = tmp_path / "toy"
    folder.mkdir()
    assert "no LEAF json here" in refuse(folder)
    leaf_file(folder / "0.json", a=([[1.0]], [0.5]))
    leaf_file(folder / "1.json", a=([[1.0]], [0.5]))
    message = refuse(folder)
    assert "1.json: duplicate client 'a', already in" in message
    assert "0.json; name each client once" in message
    leaf_file(folder / "1.json", b=([[1.0, 2.0]], [0.5]))
    assert "client 'b', row 0 (from 0): values of shape (2,)" in refuse(folder)
    path = leaf_file(tmp_path / "a.json", w=(["ab", "bz"], ["a", "b"]))
    source = Source(levels={"x": ("a", "b")}, classes=("a", "b"))
    assert "client 'w', row 1 (from 0): column 'x': found 'z'" in refuse(path, source)
    path = leaf_file(tmp_path / "a.json", w=(["ab", "a"], ["a", "b"]))
    assert "row 1 (from 0): values of shape (1,), where the first row has (2,)" in refuse(
        path, source
    )


def test_femnist_sample(shared_data) -> None:
    source = Source(classes=62, shape=(28, 28))
    data = load(shared_data("femnist/raw_sample"), source)
    assert data.names == ("f2210_96", "f2235_81", "f3868_35", "f3122_40")
    assert data.counts.tolist() == [5, 5, 5, 8]
    assert (data.spec.task, data.spec.outputs, data.spec.shape) == ("multiclass", 62, (28, 28))
    train, test = data.split_by_source()
    assert (train.counts.tolist(), test.counts.tolist()) == ([4, 4, 4, 7], [1, 1, 1, 1])


def test_femnist_sample_equals_the_same_writers_of_the_whole(shared_data) -> None:
    sample = load(shared_data("femnist/raw_sample"), Source(classes=62, shape=(28, 28)))
    path = shared_data("femnist/femnist.npz")
    writers = np.load(path)["writer"].tolist()
    whole = load(path)
    for k, name in enumerate(sample.names):
        at = writers.index(name)
        mine = sample.features[sample.offsets[k] : sample.offsets[k + 1]].numpy()
        same = whole.features[whole.offsets[at] : whole.offsets[at + 1]].numpy()
        assert mine.shape == same.shape
        key = np.lexsort(mine.reshape(len(mine), -1).T), np.lexsort(same.reshape(len(same), -1).T)
        np.testing.assert_allclose(mine[key[0]], same[key[1]], atol=1e-6)


def test_shakespeare_sample(shared_data) -> None:
    assert len(LEAF_CHARACTERS) == 80
    path = shared_data("shakespeare/raw_sample/all_data_niid_0_keep_0_train_9.json")
    source = Source(levels={"x": LEAF_CHARACTERS}, classes=LEAF_CHARACTERS)
    data = load(path, source)
    assert data.counts.tolist() == [60, 60, 60]
    assert (data.spec.shape, data.spec.outputs) == ((80,), 80)
    first = "".join(LEAF_CHARACTERS[int(code)] for code in data.features[0])
    assert first.startswith("Give me leave, Caesar,-- Thou hast a sister")
    assert LEAF_CHARACTERS[int(data.targets[0])] == "a"


@pytest.mark.parametrize("order", [("user_data", "users"), ("users", "user_data", "num_samples")])
@pytest.mark.parametrize(
    "style", [{"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}]
)
def test_any_order_of_keys_and_any_white_space(tmp_path, order, style) -> None:
    """Users come in the order of the list, wherever their rows are; other keys do not matter."""
    rows = {
        "é {": {"y": [1], "x": [[3, 4]]},
        '"[\\': {"x": [[1, 2], [5, 6]], "y": [0, 1], "z": {"a": []}},
    }
    whole = {"users": ['"[\\', "é {"], "num_samples": [2, 1], "user_data": rows}
    content = {
        "hierarchies": [["a"], {"b": ["}"]}],
        **{key: whole[key] for key in order},
        "more": None,
    }
    path = tmp_path / "a.json"
    path.write_text(json.dumps(content, **style), encoding="utf-8")
    data = load(path, Source(classes=2))
    assert data.names == ('"[\\', "é {")
    assert data.features.tolist() == [[1, 2], [5, 6], [3, 4]]
    assert data.targets.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("user", "words"),
    [
        ('{"x": {"a": [1]}, "y": [0]}', "x is an object; expected a list"),
        ('{"x": [[1]], "y": 5}', "y is a number; expected a list"),
        ('{"x": [[1]]}', "no x and y"),
        ("[[1], [2]]", "no x and y"),
        ("7", "no x and y"),
        ('{"x": [[1] [2]], "y": [0]}', "(line 1, character 68: Expecting ','"),
        ('{"x": [[1]], "y": [0, ]}', "(line 1, character "),
        ('{"x": [[1]], "y": [0], "x": []}', "'x' is given twice"),
    ],
)
def test_bad_users_are_refused(tmp_path: Path, refuse, user, words) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"users": ["w"], "num_samples": [1], "user_data": {"w": ' + user + "}}")
    assert words in refuse(path, Source(classes=2))


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    whole = content()
    for end in range(0, len(whole) - 1, 7):
        path.write_text(whole[:end])
        with pytest.raises(ValueError, match=r"line 1, character [0-9]+: .*fetch it again"):
            load(path, Source(classes=2))


def test_only_the_first_clients_are_taken(tmp_path: Path) -> None:
    rows = {name: {"x": [[at, 2]], "y": [at % 2]} for at, name in enumerate(["10", "8", "9"])}
    path = tmp_path / "a.json"
    path.write_text(content(users=["10", "9", "8"], num_samples=None, user_data=rows))
    data = load(path, Source(classes=2), clients=2)
    assert (data.names, data.features.tolist()) == (("8", "9"), [[1, 2], [2, 2]])
    assert data.notes == ("2 of 3 clients kept",)
    with pytest.raises(ValueError, match="clients = 4: expected 1 to 3"):
        load(path, Source(classes=2), clients=4)


def large_leaf(path: Path, size: int) -> int:
    """Write a file like FEMNIST's; return the number of users, of 50 rows each."""
    rng = np.random.default_rng(0)
    pixels = np.where(rng.random((50, 784)) < 0.7, 1.0, rng.integers(0, 255, (50, 784)) / 255)
    x, y = json.dumps(pixels.tolist()), json.dumps(rng.integers(0, 62, 50).tolist())
    users = -(-size // len(x))
    names, counts = json.dumps([f"f{user}" for user in range(users)]), json.dumps([50] * users)
    with path.open("w") as file:
        file.write(f'{{"users": {names}, "num_samples": {counts}, "user_data": {{')
        for user in range(users):
            file.write(f'{", " if user else ""}"f{user}": {{"x": {x}, "y": {y}}}')
        file.write("}}")
    return users


def test_memory_holds_one_user_at_a_time(tmp_path: Path, monkeypatch) -> None:
    users = large_leaf(tmp_path / "large.json", 2_500_000)
    load(tmp_path / "large.json", Source(classes=62))  # imports count, too
    monkeypatch.setattr(leaf, "_TOGETHER", 1 << 10)
    source = Source(classes=62, memory_map=str(tmp_path / "mapped"))
    tracemalloc.start()
    try:
        data = load(tmp_path / "large.json", source)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(data) == users == 7
    # a user is 0.4 MB of text, 1.3 MB as Python's floats and 0.3 MB as an array; all are 9 MB
    assert peak < 3_000_000


MEASURE = """
import sys
import torch  # its memory is not that of the file
from coterie.data.load import Source, load

def resident(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(key))

before = resident("VmRSS")
data = load(sys.argv[1], Source(classes=62, memory_map=sys.argv[2]))
print(len(data), data.features.shape[0], before // 1000, resident("VmHWM") // 1000)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_leaf_file_is_streamed_to_disk(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    users = large_leaf(path, 300_000_000)
    command = [sys.executable, "-c", MEASURE, str(path), str(tmp_path / "mapped")]
    clients, rows, before, highest = map(int, subprocess.check_output(command).split())
    assert (clients, rows) == (users, 50 * users)
    # json.load takes 1,500 MB for these 300; resident pages of the folder's arrays count here too
    assert highest - before < 150
    assert highest < 1000


def one_user(path: Path, x, y) -> Path:
    rows = {"a": {"x": [[0] * 3], "y": [1]}, "large": {"x": x, "y": y}}
    path.write_text(json.dumps({"users": ["a", "large"], "user_data": rows}))
    return path


@pytest.mark.parametrize(
    ("x", "words"),
    [
        ([[1, 2, 3]] * 9 + [[1, 2]], "row 9 (from 0)"),
        ([[1, 2, 3]] * 9 + [[1, "b", 3]], "row 9 (from 0)"),
        ([[1, 2, 3]] * 9 + [[1, float("nan"), 3]], "row 9 (from 0)"),
        ([[1, 2, 3]] * 9, "x has 9 rows, y 10"),
        ([[1, 2, 3]] * 14, "x has 14 rows, y 10"),
        ([], "x has 0 rows, y 10"),
    ],
)
def test_bad_rows_are_refused(tmp_path: Path, refuse, x, words) -> None:
    found = refuse(one_user(tmp_path / "a.json", x, [0] * 10), Source(classes=2))
    assert words in found
    assert "client 'large'" in found


@pytest.mark.parametrize("huge", ["x", "y"])
def test_numbers_beyond_float64_are_refused(tmp_path: Path, refuse, huge) -> None:
    path = tmp_path / "a.json"
    number = str(10**400)
    rows = {"x": "[[1]]", "y": "[1]", huge: "[[1]]".replace("1", number)}
    path.write_text(
        f'{{"users": ["w"], "user_data": {{"w": {{"x": {rows["x"]}, "y": {rows["y"]}}}}}}}'
    )
    found = refuse(path, Source(classes=2))
    assert "client 'w'" in found
    assert "found" in found
    assert len(found) < 400


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ([1], [[0, 1, 1]], "client 'b': 3 targets, where the first row has 1"),
        ([[0, 1, 1]], [1], "client 'b': 1 targets, where the first row has 3"),
        ([[0, 1, 1]], [[0, 1]], "client 'b': 2 targets, where the first row has 3"),
        ([[]], [[]], "client 'a': the target is an empty list"),
    ],
)
def test_labels_of_unequal_widths_are_refused(
    tmp_path: Path, refuse, leaf_file, first, second, words
) -> None:
    path = leaf_file(tmp_path / "a.json", a=([[1]], first), b=([[2]], second))
    assert words in refuse(path, Source(task="multilabel", classes=3))


def test_half_a_surrogate_pair_is_not_a_name(tmp_path: Path, refuse, leaf_file) -> None:
    path = leaf_file(tmp_path / "a.json", **{"\ud800": ([[1]], [0])}, b=([[2]], [1]))
    assert "not Unicode text" in refuse(path, Source(classes=2))
    path = leaf_file(tmp_path / "b.json", **{"why?": ([[1]], [0]), "\U0001f600": ([[2]], [1])})
    assert load(path, Source(classes=2)).names == ("why?", "\U0001f600")


def test_deep_nesting_and_keys_given_twice_are_refused(tmp_path: Path, refuse, monkeypatch) -> None:
    path = tmp_path / "a.json"
    user = '{"w": {"x": [[1]], "y": [0]}}'
    for depth in (40, 1_000_000):
        path.write_text(f'{{"users": ["w"], "a": {"[" * depth}{"]" * depth}, "user_data": {user}}}')
        assert "nested deeper than 32" in refuse(path, Source(classes=2))
    for chunk in (1, 3, 1 << 20):
        monkeypatch.setattr(leaf, "_CHUNK", chunk)
        path.write_text(f'{{"users": ["w"], "user_data": {user}, "users" : ["w"]}}')
        assert "'users' is given twice; give it once" in refuse(path, Source(classes=2))
        text = '\\"[' * 40 + "\\\\"
        path.write_text(f'{{"a": "{text}", "b": {{"a": 1}}, "users": ["w"], "user_data": {user}}}')
        assert load(path, Source(classes=2)).names == ("w",)


def test_what_the_file_says_wrongly(tmp_path: Path, refuse) -> None:
    path = tmp_path / "a.json"
    user = '"user_data": {"w": {"x": [[1]], "y": [0]}}}'
    for count in ('"1"', "[1]", "true", "1.5", "NaN", "{}"):
        path.write_text('{"users": ["w"], "num_samples": [' + count + "], " + user)
        assert "; expected a whole number" in refuse(path, Source(classes=2))
    path.write_text('{"users": ["w"], ' + user.replace("[[1]]", '"abc"'))
    assert "client 'w': x is text; expected a list" in refuse(path, Source(classes=2))
