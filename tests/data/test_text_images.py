"""Text by a public vocabulary: bags, indices, tags; and LEAF's Sent140 and Shakespeare."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from scipy import sparse
from sklearn.feature_extraction.text import CountVectorizer
from tests.data.samples import refused

from coterie.data import text_images as images
from coterie.data.federated import DataError
from coterie.data.leaf import LEAF_CHARACTERS
from coterie.data.load import Source, load
from coterie.data.text_images import Tags, Text, plan_text, read_words, tokenise

WORDS = ("good", "bad", "day", "!")
TWEETS = ["Good day!", "BAD, bad day", "nothing known", "", "good good good bad"]


def sent140(path: Path, leaf_file, y=(1, 0, 1, 0, 1)) -> Path:
    rows = [[str(k), "Mon", "NO_QUERY", "ann", text, "x"] for k, text in enumerate(TWEETS)]
    return leaf_file(path, ann=(rows[:2], list(y[:2])), bob=(rows[2:], list(y[2:])))


@pytest.mark.parametrize("bag", ["counts", "binary", "mean"])
def test_bags_are_those_of_scikit_learn(bag) -> None:
    reference = CountVectorizer(
        vocabulary=list(WORDS), token_pattern=r"[\w']+|[.,!?;]", binary=bag == "binary"
    ).transform(TWEETS)
    expected = reference.toarray().astype(float)
    if bag == "mean":
        sizes = [len(tokenise(text, "words")) for text in TWEETS]
        assert sizes == [3, 4, 2, 0, 4]
        expected /= np.maximum(sizes, 1)[:, None]
    found = plan_text(Source(text="bag", vocabulary=WORDS, bag=bag)).encode(TWEETS)
    assert sparse.issparse(found)
    np.testing.assert_allclose(found.toarray(), expected)


def test_unknown_words_count_in_the_mean_and_are_dropped() -> None:
    text = Text({"a": 0, "b": 1}, "spaces")
    np.testing.assert_allclose(text.encode(["a b c c", "c"]).toarray(), [[0.25, 0.25], [0, 0]])


def test_indices_are_padded_and_cut() -> None:
    source = Source(text="indices", vocabulary=("a", "b"), length=3)
    found = plan_text(source).encode(["b a", "a what b a", "", "b"])
    assert found.tolist() == [[3, 2, 0], [2, 1, 3], [0, 0, 0], [3, 0, 0]]


def test_sent140(tmp_path: Path, leaf_file) -> None:
    path = sent140(tmp_path / "sent.json", leaf_file)
    data = load(path, Source(text="bag", vocabulary=WORDS, bag="counts", classes=2))
    assert (data.names, data.counts.tolist(), data.is_sparse) == (("ann", "bob"), [2, 3], True)
    assert data.features.toarray().tolist() == [
        [1, 0, 1, 1], [0, 2, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0], [3, 1, 0, 0]
    ]  # fmt: skip
    assert data.features.dtype == np.float32
    assert (data.spec.task, data.spec.shape) == ("binary", (4,))
    assert data.notes == ("text read as counts bags of words over 4 public words",)
    words = load(path, Source(text="indices", vocabulary=WORDS, length=3, classes=2))
    assert words.features.tolist()[0] == [2, 4, 5]
    users = load(path, Source(text="bag", vocabulary=("mon",), features=("1",), classes=2))
    assert users.features.toarray().reshape(-1).tolist() == [1] * 5


@pytest.mark.parametrize("y", [("4", "0", "4", "0", "4"), (4, 0, 4, 0, 4)])
def test_sent140_labels_of_the_raw_file(tmp_path: Path, leaf_file, y) -> None:
    path = sent140(tmp_path / "sent.json", leaf_file, y)
    data = load(path, Source(text="bag", vocabulary=WORDS, classes=("0", "4")))
    assert (data.spec.task, data.targets.tolist()) == ("binary", [1, 0, 1, 0, 1])


def test_many_small_users_are_read_together_and_stay_apart(tmp_path: Path, monkeypatch) -> None:
    texts = {f"u{k}": ["good " * (k % 3)] * (k % 4) for k in range(300)}
    content = {
        "users": list(texts),
        "user_data": {n: {"x": x, "y": [len(x) % 2] * len(x)} for n, x in texts.items()},
    }
    path = tmp_path / "many.json"
    path.write_text(json.dumps(content))
    source = Source(text="bag", vocabulary=("good",), bag="counts", classes=2)
    for together in (1, 300, 1 << 20):
        monkeypatch.setattr("coterie.data.leaf._TOGETHER", together)
        data = load(path, source)
        assert list(data.names) == list(texts)
        assert data.counts.tolist() == [k % 4 for k in range(300)]
        expected = [k % 3 for k in range(300) for _ in range(k % 4)]
        assert data.features.toarray().reshape(-1).tolist() == expected


def test_windows_of_characters_with_unknown_ones(tmp_path: Path, leaf_file) -> None:
    path = leaf_file(tmp_path / "a.json", w=(["ab", "bça", "abab"], ["a", "b", "a"]))
    source = Source(
        text="indices", tokens="characters", vocabulary=("a", "b"), length=3, classes=("a", "b")
    )
    data = load(path, source)
    assert data.features.tolist() == [[2, 3, 0], [3, 1, 2], [2, 3, 2]]
    assert data.targets.tolist() == [0, 1, 0]


def test_shakespeare_by_characters_agrees_with_levels(shared_data) -> None:
    path = shared_data("shakespeare/raw_sample/all_data_niid_0_keep_0_train_9.json")
    plain = load(path, Source(levels={"x": LEAF_CHARACTERS}, classes=LEAF_CHARACTERS))
    source = Source(
        text="indices",
        tokens="characters",
        vocabulary=LEAF_CHARACTERS,
        length=80,
        classes=LEAF_CHARACTERS,
    )
    windows = load(path, source)
    np.testing.assert_array_equal(windows.features.numpy() - 2, plain.features.numpy())


def test_a_vocabulary_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("the\t900\nof 800\n\n  and\n", encoding="utf-8")
    assert read_words(str(path), None, "vocabulary") == ("the", "of", "and")
    assert read_words(str(path), 2, "vocabulary") == ("the", "of")
    counts = tmp_path / "tags.json"
    counts.write_text(json.dumps({"python": 9, "c#": 8}))
    assert read_words(str(counts), None, "tags") == ("python", "c#")


@pytest.mark.parametrize(
    ("text", "most", "words"),
    [
        (b"", None, "no words; give"),
        (b"a\nb\na\n", None, "'a' is given twice"),
        (b"a\nb\n", 3, "2 words, but 3 are declared"),
        (b"a\n\xff\n", None, "could not be read"),
    ],
)
def test_bad_vocabularies_are_refused(tmp_path: Path, text, most, words) -> None:
    path = tmp_path / "words.txt"
    path.write_bytes(text)
    refused(words, read_words, str(path), most, "vocabulary")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"text": "bag"}, "without a vocabulary.*clients' rows.*public one"),
        ({"text": "indices", "vocabulary": WORDS}, "length"),
        ({"text": "bag", "vocabulary": WORDS, "length": 3}, "length"),
        ({"vocabulary": WORDS}, "set text"),
        ({"text": "all", "vocabulary": WORDS}, "expected one of 'bag', 'indices'"),
        ({"text": "bag", "vocabulary": WORDS, "bag": "tfidf"}, "'mean', 'counts', 'binary'"),
        ({"text": "bag", "vocabulary": WORDS, "tokens": "bytes"}, "'words', 'spaces', 'char"),
        ({"text": "bag", "vocabulary": WORDS, "memory_map": "there"}, "memory"),
        ({"text": "bag", "vocabulary": WORDS, "images": "there"}, "images"),
        ({"text": "indices", "vocabulary": WORDS, "length": 0}, ">= 1"),
        ({"tags": ("a", "b"), "task": "regression"}, "tags"),
        ({"tags": ("a", "b"), "target": ("u", "v")}, "one column"),
        ({"splits": ("train", "train")}, "splits"),
        ({"images": "there", "size": (84,)}, "height and width"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, words) -> None:
    refused(words, Source, **options)


def test_text_in_leaf_that_is_none_is_refused(tmp_path: Path, refuse, leaf_file) -> None:
    source = Source(text="bag", vocabulary=WORDS, classes=2)
    path = leaf_file(tmp_path / "a.json", w=(["good", 5], [0, 1]))
    refused(r"client 'w', row 1 \(from 0\): found 5 where text", load, path, source)
    path = leaf_file(tmp_path / "a.json", w=([["1", "2"]], [0]))
    refused(r"client 'w', row 0 .*found \['1', '2'\] where text", load, path, source)
    path = leaf_file(tmp_path / "a.json", w=(["good", None], [0, 1]))
    refused(r"row 1 .*gap", load, path, source)
    assert len(load(path, Source(**{**vars(source), "missing": "drop"})).targets) == 1
    refused("position of the text", load, path, Source(**{**vars(source), "features": ("text",)}))
    tweets = sent140(tmp_path / "b.json", leaf_file)
    assert "public vocabulary=" in refuse(tweets, Source(classes=2))
    message = refuse(leaf_file(tmp_path / "c.json", w=(["a.jpg"], [0])), Source(classes=2))
    assert "images=" in message


POSTS = {
    "client": ["b", "a", "b", "a"],
    "tokens": ["how to sort", "what is c#", "sort sort", "zz"],
    "title": ["sort list", "c#", "how", "zz"],
    "tags": ["list|python", "c#|.net", "unknown", "python|c#"],
    "split": ["train", "train", "test", "test"],
}
TAGS = ("python", "c#", "list")
POST_WORDS = ("sort", "c#", "how")


def posts(tmp_path: Path, **changes) -> Path:
    path = tmp_path / "posts.parquet"
    parquet.write_table(pa.table(POSTS | changes), path)
    return path


def test_posts_with_tags_in_parquet(tmp_path: Path) -> None:
    source = Source(text="bag", vocabulary=POST_WORDS, tokens="spaces", tags=TAGS)
    data = load(posts(tmp_path), source)
    assert (data.names, data.counts.tolist()) == (("b", "a"), [1, 2])
    # "how to sort sort list": the mean over five words
    np.testing.assert_allclose(
        data.features.toarray(), [[0.4, 0, 0.2], [0, 0.5, 0], [0, 0, 0]], rtol=1e-6
    )
    assert (data.spec.task, data.spec.outputs, data.targets.tolist()) == (
        "multiclass",
        3,
        [0, 1, 0],
    )
    assert data.source_split.tolist() == [0, 0, 1]
    assert "1 row without a known tag left out" in data.notes
    assert data.assumed == ()


def test_tags_as_labels_keep_every_row(tmp_path: Path) -> None:
    source = Source(
        text="bag", vocabulary=POST_WORDS, tags=TAGS[:2], task="multilabel", tokens="spaces"
    )
    data = load(posts(tmp_path), source)
    assert data.targets.tolist() == [[1, 0], [0, 0], [0, 1], [1, 1]]
    assert (data.spec.task, data.spec.outputs) == ("multilabel", 2)


def test_classes_say_how_many_tags(tmp_path: Path) -> None:
    path = tmp_path / "tags.txt"
    path.write_text("python 9\nc# 8\nlist 7\n")
    source = Source(text="bag", vocabulary=POST_WORDS, tokens="spaces", tags=str(path), classes=2)
    assert load(posts(tmp_path), source).spec.outputs == 2
    numbers = Source(tags=TAGS, features=("score",))
    data = load(posts(tmp_path, score=[1.0, 2.0, 3.0, 4.0]), numbers)
    assert data.features.reshape(-1).tolist() == [1, 2, 4]
    lists = posts(tmp_path, tags=[["list"], ["c#", "python"], None, []], score=[1.0, 2.0, 3.0, 4.0])
    assert load(lists, numbers).targets.tolist() == [2, 0]


def test_tags_choose_the_first_declared() -> None:
    y, known = Tags({"a": 0, "b": 1}, several=False).encode(["b|a", "z", "b", None, ""])
    assert (y.tolist(), known.tolist()) == ([0, -1, 1, -1, -1], [True, False, True, False, False])


def test_columns_of_text_in_tables(tmp_path: Path, refuse) -> None:
    path = tmp_path / "toy.csv"
    path.write_text('client,note,y\na,"good, bad",1\nb,day,0\n')
    source = Source(text="bag", vocabulary=WORDS, bag="counts", features=("note",), classes=2)
    assert load(path, source).features.toarray().tolist() == [[1, 1, 0, 0], [0, 0, 1, 0]]
    unsaid = Source(text="bag", vocabulary=WORDS, classes=2)
    assert "no column of text is declared" in refuse(path, Source(sparse=True, **_set(unsaid)))
    lost = Source(text="bag", vocabulary=WORDS, classes=2, features=("zz",), sparse=True)
    assert "no column 'zz'" in refuse(path, lost)
    none = posts(tmp_path, title=["a", None, "b", "c"])
    with pytest.raises(DataError, match=r"row 2 \(from 1\), client 'a'.*gap"):
        load(none, Source(text="bag", vocabulary=POST_WORDS, tokens="spaces", tags=TAGS))
    odd = posts(tmp_path, title=[1, 2, 3, 4])
    with pytest.raises(DataError, match=r"row 1 \(from 1\), client 'b'.*found 1 where text"):
        load(odd, Source(text="bag", vocabulary=POST_WORDS, tokens="spaces", tags=TAGS))
    bad = Source(text="bag", vocabulary=str(tmp_path / "none.txt"), classes=2)
    refused(r"none.txt.*no such file", load, path, bad)
    np.savez(tmp_path / "a.npz", X=np.ones((2, 2)), y=[0, 1], client=[0, 1])
    refused("options for tables", load, tmp_path / "a.npz", unsaid)


def _set(source: Source) -> dict:
    return {k: v for k, v in vars(source).items() if v != getattr(Source(), k)}


def test_a_mark_at_the_beginning_is_no_part_of_a_word(tmp_path: Path) -> None:
    for name, text in (("a.txt", "good\nbad\n"), ("a.json", '["good", "bad"]')):
        path = tmp_path / name
        path.write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert read_words(str(path), None, "vocabulary") == ("good", "bad")


def test_characters_may_be_white_space(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a 9\n \n\t\nb\n  7\n".replace("  7\n", ""))
    source = Source(text="bag", tokens="characters", vocabulary=str(path))
    assert list(plan_text(source).index) == ["a", " ", "\t", "b"]
    path.write_text("b\n  7\n")
    assert list(plan_text(source).index) == ["b", " "]


@pytest.mark.parametrize(
    ("tokens", "word"),
    [("characters", "ab"), ("spaces", "new york"), ("words", "c#"), ("words", "Good")],
)
def test_words_that_no_text_is_cut_into_are_refused(tokens, word) -> None:
    with pytest.raises(DataError, match=f"'{word}' never occurs.*{tokens}"):
        plan_text(Source(text="bag", tokens=tokens, vocabulary=("a", word)))
    assert plan_text(Source(text="bag", vocabulary=("Good", "c#"), tokens="spaces")).shape == (2,)


def test_words_given_twice_in_json(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"good": 0, "good": 1}')
    refused("'good' is given twice", read_words, str(path), None, "vocabulary")


@pytest.mark.parametrize(
    "options",
    [
        {"text": "bag", "vocabulary": ("good", 3)},
        {"text": "bag", "vocabulary": None},
        {"tags": ("a", b"b")},
        {"features": (1,)},
        {"target": 3},
        {"classes": 1.5},
        {"levels": {"a": 1}},
        {"center": 1.0},
        {"clip": "a"},
        {"size": "ab"},
        {"size": 5},
        {"size": (3.5, 2)},
        {"text": "indices", "vocabulary": ("a",), "length": "3"},
    ],
)
def test_options_of_other_types_are_refused(options) -> None:
    refused("expected", Source, **options)


def test_tags_may_be_bytes() -> None:
    tags = Tags({"python": 0, "c#": 1}, several=False)
    y, known = tags.encode([b"x|c#", [b"python", None], b"zz"])
    assert (y.tolist(), known.tolist()) == ([1, 0, -1], [True, True, False])


# Images named by LEAF's CelebA, or stored in tables.


Image = pytest.importorskip("PIL.Image")


def picture(seed: int, size=(6, 4), mode="RGB"):
    """Make an image of random pixels; size is height and width."""
    rng = np.random.default_rng(seed)
    shape = size if mode == "L" else (*size, len(mode))
    return Image.fromarray(
        rng.integers(0, 256, shape, dtype=np.uint8), mode="L" if mode == "L" else None
    )


@pytest.fixture
def celeba(tmp_path: Path, leaf_file):
    folder = tmp_path / "raw"
    folder.mkdir()
    for seed in range(5):
        picture(seed).save(folder / f"{seed:06d}.png")
    names = [f"{seed:06d}.png" for seed in range(5)]
    return leaf_file(
        tmp_path / "celeba.json", a=(names[:2], [0, 1]), b=(names[2:], [1, 1, 0])
    ), folder


def test_celeba(celeba) -> None:
    path, folder = celeba
    data = load(path, Source(images=str(folder), size=(6, 4), classes=2))
    assert (data.names, data.counts.tolist()) == (("a", "b"), [2, 3])
    assert (data.spec.shape, data.spec.task) == ((3, 6, 4), "binary")
    expected = np.stack([np.asarray(picture(seed)).transpose(2, 0, 1) for seed in range(5)]) / 255
    np.testing.assert_allclose(data.features, expected, rtol=1e-6)
    assert data.targets.tolist() == [0, 1, 1, 1, 0]


def test_images_are_resized_and_may_live_in_a_folder(celeba, tmp_path: Path, monkeypatch) -> None:
    path, folder = celeba
    monkeypatch.setattr(images, "_IMAGES", 2)
    source = Source(images=str(folder), classes=2, memory_map=str(tmp_path / "mapped"))
    data = load(path, source)
    assert data.spec.shape == (3, 84, 84)
    assert data.mapped is not None
    first = np.asarray(picture(0).resize((84, 84))).transpose(2, 0, 1) / 255
    np.testing.assert_allclose(data.features[0], first, rtol=1e-6)
    assert 0 <= float(data.features.min()) <= float(data.features.max()) <= 1
    scaled = load(path, Source(images=str(folder), classes=2, center={"x": 0.5}, scale={"x": 0.5}))
    np.testing.assert_allclose(scaled.features, data.features * 2 - 1, atol=1e-6)


def test_grey_and_transparent_images_become_rgb(tmp_path: Path, leaf_file) -> None:
    picture(0, mode="L").save(tmp_path / "grey.png")
    picture(1, mode="RGBA").save(tmp_path / "clear.png")
    path = leaf_file(tmp_path / "a.json", w=(["grey.png", "clear.png"], [0, 1]))
    data = load(path, Source(images=str(tmp_path), size=(6, 4), classes=2))
    assert data.features.shape == (2, 3, 6, 4)
    np.testing.assert_array_equal(data.features[0, 0], data.features[0, 2])


def test_bad_images_are_refused(celeba, tmp_path: Path, refuse, leaf_file) -> None:
    path, folder = celeba
    source = Source(images=str(folder), size=(6, 4), classes=2)
    (folder / "000003.png").unlink()
    message = refuse(path, source)
    assert "client 'b', row 1 (from 0): image" in message
    assert "000003.png is missing" in message
    (folder / "000003.png").write_bytes((folder / "000002.png").read_bytes()[:60])
    message = refuse(path, source)
    assert "client 'b', row 1 (from 0): image '000003.png' could not be read" in message
    (folder / "000003.png").write_text("no image")
    assert "could not be read" in refuse(path, source)
    assert "no such folder" in refuse(path, Source(images=str(tmp_path / "none"), classes=2))
    for name in ("../celeba.json", "/etc/hostname"):
        outside = leaf_file(tmp_path / "b.json", w=([name], [0]))
        assert "lies outside of" in refuse(outside, source)
    number = leaf_file(tmp_path / "b.json", w=([7], [0]))
    assert "found '7' where an image" in refuse(number, source)


def test_pillow_is_named_where_it_is_missing(celeba, monkeypatch) -> None:
    path, folder = celeba
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    refused(r"Pillow.*pip install", load, path, Source(images=str(folder), classes=2))


def test_images_inside_a_table(tmp_path: Path) -> None:
    stored = []
    for seed in range(3):
        buffer = io.BytesIO()
        picture(seed).save(buffer, "png")
        stored.append({"bytes": buffer.getvalue(), "path": None})
    columns = {"client": ["a", "b", "a"], "image": stored, "y": [0, 1, 1]}
    parquet.write_table(pa.table(columns), tmp_path / "toy.parquet")
    data = load(tmp_path / "toy.parquet", Source(images="", size=(6, 4), classes=2))
    expected = np.asarray(picture(2)).transpose(2, 0, 1) / 255
    np.testing.assert_allclose(data.features[1], expected, rtol=1e-6)
    assert data.names == ("a", "b")
    columns["image"] = [{"bytes": None, "path": "there.png"}, *stored[1:]]
    parquet.write_table(pa.table(columns), tmp_path / "toy.parquet")
    with pytest.raises(
        DataError, match=r"row 1 \(from 1\), client 'a': image 'there.png' is named"
    ):
        load(tmp_path / "toy.parquet", Source(images="", size=(6, 4), classes=2))


def test_greys_of_16_bits(tmp_path: Path, leaf_file) -> None:
    grey = np.linspace(0, 65535, 24).astype(np.uint16).reshape(4, 6)
    Image.fromarray(grey).save(tmp_path / "deep.png")
    Image.fromarray((grey >> 8).astype(np.uint8)).save(tmp_path / "flat.png")
    path = leaf_file(tmp_path / "a.json", a=(["deep.png", "flat.png"], [0, 1]))
    source = Source(images=str(tmp_path), size=(4, 6), classes=2)
    found = load(path, source).features.numpy()
    np.testing.assert_allclose(found[0], np.broadcast_to(grey / 65535, (3, 4, 6)), atol=1e-6)
    np.testing.assert_allclose(found[0], found[1], atol=1 / 255)
    small = load(path, Source(images=str(tmp_path), size=(2, 3), classes=2)).features.numpy()
    np.testing.assert_allclose(small[0], small[1], atol=2 / 255)
    assert small.min() >= 0
    assert small.max() <= 1


@pytest.mark.parametrize(("mode", "kind"), [("F", np.float32), ("I", np.int32)])
def test_images_of_unknown_range_are_refused(tmp_path: Path, leaf_file, refuse, mode, kind) -> None:
    Image.fromarray(np.full((4, 6), 70_000, dtype=kind)).save(tmp_path / "deep.tiff")
    path = leaf_file(tmp_path / "a.json", a=(["deep.tiff"], [0]))
    assert f"mode '{mode}'" in refuse(path, Source(images=str(tmp_path), classes=2))
