"""Transcripts: a post is kept bit for bit, whole or not at all."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from coterie.privacy.transcript import FolderTranscript, MemoryTranscript, write_atomically


def value(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(3, 2, generator=generator, dtype=torch.float64),
        "bias": torch.tensor(0.1, dtype=torch.float64),
    }


@pytest.fixture(params=["memory", "folder"])
def transcript(request, tmp_path):
    return MemoryTranscript() if request.param == "memory" else FolderTranscript(tmp_path / "posts")


def same(left, right):
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name])
        for name in left
    )


def test_what_is_written_is_read_back_bit_for_bit(transcript):
    for index in (0, 1, 1_234_567):
        assert not transcript.has(index)
        transcript.write(index, value(index))
        assert transcript.has(index)
    for index in (0, 1, 1_234_567):
        assert same(transcript.read(index), value(index))
    assert not transcript.has(2)


def test_odd_numbers_survive(transcript):
    odd = {"x": torch.tensor([0.0, -0.0, 5e-324, 1.7e308, float("inf")], dtype=torch.float64)}
    transcript.write(0, odd)
    read = transcript.read(0)["x"]
    assert read.tolist() == odd["x"].tolist()
    assert torch.signbit(read).tolist() == torch.signbit(odd["x"]).tolist()


@pytest.mark.parametrize(
    "name", ["file", "arr_0", "allow_pickle", "layers.0.weight", "a/b", "é", "self", "args"]
)
def test_any_leaf_name_survives(transcript, name):
    given = {name: torch.ones(2, dtype=torch.float64), "w": torch.zeros(1, dtype=torch.float64)}
    transcript.write(0, given)
    assert same(transcript.read(0), given)


def test_what_is_kept_does_not_change_with_what_was_given(transcript):
    given = value()
    transcript.write(0, given)
    given["weight"].mul_(100)
    assert same(transcript.read(0), value())


def test_what_is_kept_does_not_change_with_what_was_read(transcript):
    transcript.write(0, value())
    transcript.read(0)["weight"].mul_(100)
    assert same(transcript.read(0), value())


def test_a_post_that_is_not_kept_cannot_be_read(transcript):
    with pytest.raises((KeyError, FileNotFoundError)):
        transcript.read(0)


def test_the_digest_is_of_what_the_post_says(tmp_path):
    transcript = FolderTranscript(tmp_path / "posts")
    digest = transcript.write(3, value())
    weight, bias = (value()[name].numpy() for name in ("weight", "bias"))
    told = b'{"leaf": "weight", "dtype": "<f8", "shape": [3, 2]}\n' + weight.tobytes()
    told += b'{"leaf": "bias", "dtype": "<f8", "shape": []}\n' + bias.tobytes()
    assert digest == transcript.digest(3) == hashlib.sha256(told).hexdigest()
    (path,) = (tmp_path / "posts").iterdir()
    content = bytearray(path.read_bytes())
    content[content.index(weight.tobytes()) + 7] ^= 1
    path.write_bytes(content)
    assert transcript.digest(3) != digest


@pytest.mark.parametrize(
    "other",
    [
        {"bias": value()["bias"], "weight": value()["weight"]},  # another order
        {"weight": value()["weight"].reshape(2, 3), "bias": value()["bias"]},
        {"weights": value()["weight"], "bias": value()["bias"]},
        {"weight": value()["weight"].float(), "bias": value()["bias"]},
        {"weight": value()["weight"]},
    ],
)
def test_the_digest_tells_order_shape_name_and_type(tmp_path, other):
    transcript = FolderTranscript(tmp_path / "posts")
    assert transcript.write(0, value()) != transcript.write(1, other)


INDICES = (0, 1, 2, 1_234_567)


def packed_transcript(folder):
    transcript = FolderTranscript(folder / "posts")
    digests = {index: transcript.write(index, value(index)) for index in INDICES}
    transcript.pack()
    return transcript, digests


def test_packing_changes_where_posts_are_and_nothing_else(tmp_path):
    transcript, digests = packed_transcript(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["posts.npz"]
    for found in (transcript, FolderTranscript(tmp_path / "posts")):
        assert found.indices() == set(INDICES) and not found.has(3)
        for index in INDICES:
            assert found.has(index) and found.digest(index) == digests[index]
            assert same(found.read(index), value(index))
    with np.load(tmp_path / "posts.npz") as arrays:  # plain NumPy reads it
        assert arrays.files[:2] == ["000000.weight", "000000.bias"]
        np.testing.assert_array_equal(arrays["000001.weight"], value(1)["weight"].numpy())


def test_packing_twice_or_with_more_posts_keeps_all(tmp_path):
    transcript, digests = packed_transcript(tmp_path)
    content = (tmp_path / "posts.npz").read_bytes()
    transcript.pack()
    assert (tmp_path / "posts.npz").read_bytes() == content
    digests[7] = transcript.write(7, value(7))
    transcript.pack()
    again = FolderTranscript(tmp_path / "posts")
    assert {index: again.digest(index) for index in again.indices()} == digests


def test_a_run_that_posted_nothing_packs_nothing(tmp_path):
    FolderTranscript(tmp_path / "posts").pack()
    assert FolderTranscript(tmp_path / "posts").indices() == set()
    with np.load(tmp_path / "posts.npz") as arrays:
        assert arrays.files == []


class Crash(BaseException):
    pass


@pytest.mark.parametrize("step", range(12))
def test_a_crash_while_packing_loses_nothing(tmp_path, monkeypatch, step):
    """Cut off at every sync, rename and removal; the next process finds all posts."""
    transcript = FolderTranscript(tmp_path / "posts")
    digests = {index: transcript.write(index, value(index)) for index in INDICES}
    count = 0

    def cut(act):
        def counted(*args, **kwargs):
            nonlocal count
            count += 1
            if count > step:
                raise Crash
            return act(*args, **kwargs)

        return counted

    for place, name in ((os, "fsync"), (os, "unlink"), (os, "rmdir")):
        monkeypatch.setattr(place, name, cut(getattr(place, name)))
    monkeypatch.setattr(type(tmp_path), "replace", cut(type(tmp_path).replace))
    try:
        transcript.pack()
    except Crash:
        pass
    else:
        assert count <= step
    monkeypatch.undo()
    again = FolderTranscript(tmp_path / "posts")
    assert {index: again.digest(index) for index in again.indices()} == digests
    again.pack()
    assert [path.name for path in tmp_path.iterdir()] == ["posts.npz"]
    assert {index: again.digest(index) for index in again.indices()} == digests


@pytest.mark.parametrize("damage", ["cut", "empty", "array", "bit"])
def test_a_damaged_packed_file_holds_no_post_that_passes(tmp_path, damage):
    _, digests = packed_transcript(tmp_path)
    path = tmp_path / "posts.npz"
    content = bytearray(path.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "empty":
        content = bytearray()
    elif damage == "bit":
        content[content.index(value(0)["weight"].numpy().tobytes()) + 5] ^= 1
    path.write_bytes(content)
    if damage == "array":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    assert FolderTranscript(tmp_path / "posts").digest(0) != digests[0]


def test_a_post_without_a_leaf_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no leaf"):
        FolderTranscript(tmp_path / "posts").write(0, {})


def test_the_digest_depends_on_the_value_alone(tmp_path):
    one, two = FolderTranscript(tmp_path / "one"), FolderTranscript(tmp_path / "two")
    assert one.write(0, value()) == two.write(5, value())
    assert one.write(1, value(1)) != two.write(1, value(2))


def test_another_process_reads_it_back(tmp_path):
    FolderTranscript(tmp_path).write(0, value())
    assert same(FolderTranscript(tmp_path).read(0), value())


def test_nothing_is_unpickled(tmp_path):
    path = tmp_path / "000000.npz"
    with path.open("wb") as file:
        np.savez(file, x=np.array([object()], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="pickle"):
        FolderTranscript(tmp_path).read(0)


def test_an_unfinished_release_is_never_where_releases_are_published(tmp_path, monkeypatch):
    folder, hidden = tmp_path / "posts", tmp_path / ".unreleased"
    transcript = FolderTranscript(folder)

    def killed(self, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            transcript.write(0, value())
    assert not list(folder.iterdir()) and not transcript.has(0)
    assert [path.name for path in hidden.iterdir()] == ["000000.npz.partial"]
    assert hidden.stat().st_mode & 0o077 == 0
    again = FolderTranscript(folder)
    assert list(hidden.iterdir())  # a reader removes nothing
    again.write(1, value())
    assert not list(hidden.iterdir())
    again.write(0, value())
    assert same(again.read(0), value())
    assert sorted(path.name for path in folder.iterdir()) == ["000000.npz", "000001.npz"]
    again.pack()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["posts.npz"]


def test_content_is_synced_before_the_name_and_the_name_before_return(tmp_path, monkeypatch):
    path = tmp_path / "file"
    steps = []
    sync = os.fsync

    def record_sync(descriptor):
        target = os.readlink(f"/proc/self/fd/{descriptor}")
        kind = "folder" if os.path.isdir(target) else "file"
        steps.append((kind, path.exists()))
        if kind == "file":
            assert os.fstat(descriptor).st_size == 7, "the content must be written before the sync"
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record_sync)
    write_atomically(path, b"content")
    assert steps == [("file", False), ("folder", True)]
    assert path.read_bytes() == b"content"


@pytest.mark.parametrize("fails", [1, 2])
def test_a_failed_sync_is_not_swallowed(tmp_path, monkeypatch, fails):
    calls = []

    def broken(descriptor):
        calls.append(descriptor)
        if len(calls) == fails:
            raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", broken)
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == (b"old" if fails == 1 else b"new")


def test_overwriting_is_atomic(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, b"first")
    write_atomically(path, b"second")
    assert path.read_bytes() == b"second"
    assert len(list(tmp_path.iterdir())) == 1
