"""Transcripts: a post is kept bit for bit, whole or not at all."""

import hashlib
import os

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


def test_the_digest_is_of_the_file(tmp_path):
    transcript = FolderTranscript(tmp_path)
    digest = transcript.write(3, value())
    (path,) = tmp_path.iterdir()
    assert digest == transcript.digest(3) == hashlib.sha256(path.read_bytes()).hexdigest()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert transcript.digest(3) != digest


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


def test_a_file_without_its_final_name_is_no_post(tmp_path):
    transcript = FolderTranscript(tmp_path)
    (tmp_path / "000000.npz.partial").write_bytes(b"half")
    assert not transcript.has(0)
    transcript.write(0, value())
    assert same(transcript.read(0), value())
    assert [path.name for path in tmp_path.iterdir()] == ["000000.npz"]


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
