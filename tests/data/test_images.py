"""Images named by LEAF's CelebA, or stored in tables."""

import io
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from coterie.data import coders, images
from coterie.data.federated import DataError
from coterie.data.formats import Source, load

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
    monkeypatch.setattr(images, "STEP", 2)
    monkeypatch.setattr(coders, "STEP", 2)
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
    with pytest.raises(DataError, match=r"Pillow.*pip install"):
        load(path, Source(images=str(folder), classes=2))


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
