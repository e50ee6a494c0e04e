"""The index of a JSON file: what it finds is what `json.loads` finds."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.data import json_stream
from coterie.data.federated import DataError
from coterie.data.json_stream import index_json

pytestmark = pytest.mark.full

# texts that would confuse a search for brackets and quotes
NASTY = [
    '{"x": [',
    "}]",
    '"',
    "\\",
    '\\"',
    "\\\\",
    "é",
    "\u2028",
    "😀",
    "",
    "\n\t",
    "a]b[c",
    "\x00",
]
texts = st.one_of(st.sampled_from(NASTY), st.text(max_size=6))
scalars = st.one_of(texts, st.integers(-9, 9), st.floats(allow_nan=False), st.none(), st.booleans())
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=20,
)


def restored(index, file, content, depth):
    """Put the parts back into the skeleton."""
    if depth == 0 and isinstance(content, list):
        return index.value(file, content[0])
    if depth == 0 and isinstance(content, dict):
        return index.value(file, content[""])
    if isinstance(content, list):
        return [restored(index, file, inner, depth - 1) for inner in content]
    if isinstance(content, dict):
        return {key: restored(index, file, inner, depth - 1) for key, inner in content.items()}
    return content


@given(
    values,
    st.integers(1, 4),
    st.integers(1, 30),
    st.sampled_from([{}, {"indent": 2}, {"ensure_ascii": False, "separators": (",", ":")}]),
)
@settings(derandomize=True, deadline=None, max_examples=150)
def test_skeleton_and_parts_are_the_whole(tmp_path_factory, value, depth, chunk, style) -> None:
    path = tmp_path_factory.getbasetemp() / "whole.json"
    path.write_text(json.dumps(value, **style), encoding="utf-8", newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_stream, "_CHUNK", chunk)
        index = index_json(path, depth, dict)
    with path.open("rb") as file:
        assert restored(index, file, index.content, depth) == value


@given(values, st.integers(1, 30), st.data())
@settings(derandomize=True, deadline=None, max_examples=150)
def test_what_json_refuses_is_refused(tmp_path_factory, value, chunk, data) -> None:
    """Cut a file short, or change a byte of it: index and parts refuse what `json.loads` does."""
    text = json.dumps(value).encode()
    at = data.draw(st.integers(0, len(text) - 1))
    change = data.draw(st.sampled_from([b"", b'"', b"}", b"[", b",", b"\xff", b"x"]))
    damaged = text[:at] + (change + text[at + 1 :] if change else b"")
    try:
        expected = json.loads(damaged)
    except ValueError:
        expected = ValueError
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    path.write_bytes(damaged)

    def found():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_stream, "_CHUNK", chunk)
            index = index_json(path, 2, dict)
        with path.open("rb") as file:
            return restored(index, file, index.content, 2)

    if expected is ValueError:
        with pytest.raises(DataError, match=r"damaged.json: not whole JSON \(line \d+, byte \d+: "):
            found()
    else:
        assert found() == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "line 1, byte 0: Expecting value"),
        (b'{"a": [1, 2', "line 1, byte 11: the file ends with 2 brackets open"),
        (b'{"a": "b', "line 1, byte 8: the file ends inside a text"),
        (b'{\n"a": 1}\n]', "line 3, byte 10: a bracket closes"),
        (b'{\n"a" 1}', "line 2, byte 6: Expecting ':'"),
        ('{"é": [], "b" 1}'.encode(), "byte 15: Expecting ':'"),
        (b'{"a": [[1]], "b" 1}', "byte 17: Expecting ':'"),
        (b'{"a": 1} {"b": 2}', "byte 9: Extra data"),
        (b'{"a": "\xff"}', "byte 7: not UTF-8"),
    ],
)
def test_errors_name_the_byte(tmp_path: Path, text, words) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(text)
    with pytest.raises(DataError) as caught:
        index_json(path, 1, dict)
    assert words in str(caught.value)
    assert "fetch it again" in str(caught.value)


def test_errors_inside_a_part_name_the_byte_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes('{"é": 1,\n "a": [1, 2 3]}'.encode())
    index = index_json(path, 1, dict)
    with path.open("rb") as file, pytest.raises(DataError, match=r"line 2, byte 22: Expecting ','"):
        index.value(file, 0)
    path.write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    index = index_json(path, 1, dict)
    with path.open("rb") as file, pytest.raises(DataError, match="byte 6: brackets too deep"):
        index.value(file, 0)


@settings(max_examples=150, deadline=None)
@given(st.lists(values, max_size=6), st.sampled_from([1, 2, 5, 64]), st.booleans())
def test_items_are_those_of_the_list(tmp_path_factory, items, chunk, ascii_only) -> None:
    path = tmp_path_factory.mktemp("items") / "a.json"
    path.write_text(json.dumps({"a": items}, ensure_ascii=ascii_only), encoding="utf-8")
    before, json_stream._CHUNK = json_stream._CHUNK, chunk
    try:
        index = index_json(path, 1, dict)
        with path.open("rb") as file:
            found = [item for part in index.items(file, 0) for item in part]
    finally:
        json_stream._CHUNK = before
    assert found == items


@pytest.mark.parametrize(
    "text", ["[1,2,,3]", "[1,2,]", "[,1]", "[1 2]", "[[1},2]", "[1,2}", '[1,\\",2]', "[,]"]
)
@pytest.mark.parametrize("chunk", [1, 2, 3, 64])
def test_broken_lists_are_refused(tmp_path: Path, monkeypatch, text, chunk) -> None:
    monkeypatch.setattr(json_stream, "_CHUNK", chunk)
    path = tmp_path / "a.json"
    path.write_text('{"a": ' + text + "}")
    with pytest.raises(DataError, match="not whole JSON"), path.open("rb") as file:
        list(index_json(path, 1, dict).items(file, 0))
