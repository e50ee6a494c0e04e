"""The example: characters drawn from fonts, embedding, a tiny network, and its table."""

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from coterie.data.federated import FederatedDataset, Spec

pytest.importorskip("PIL")

pytestmark = pytest.mark.full

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
glyphs = pytest.importorskip("public_features.glyphs")
network = pytest.importorskip("public_features.network")
from coterie.data.scaling import embed  # noqa: E402
from coterie.data.synthetic import synthetic  # noqa: E402
from coterie.methods.pmtl import PMTL  # noqa: E402
from coterie.models import Linear  # noqa: E402


@pytest.fixture(scope="module")
def fields():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(glyphs, "FONTS", glyphs.FONTS[:3])
        yield glyphs.fields()


def test_every_font_has_every_character():
    prints = np.stack([glyphs._print(path) for path in glyphs.font_files()])
    assert prints.shape[:2] == (len(glyphs.FONTS), len(glyphs.CLASSES))
    assert prints.any(axis=(2, 3)).all()


def test_fields_are_deterministic_and_no_character_is_lost(fields):
    assert torch.equal(fields.bone, glyphs.fields().bone)
    assert fields.bone.shape[:2] == (3, len(glyphs.CLASSES))
    assert (fields.half > 0).all()


def test_thin_keeps_a_line_a_line_and_empties_nothing():
    square = np.zeros((1, 20, 20), dtype=bool)
    square[0, 5:15, 5:15] = True
    thinned = glyphs.thin(square)
    assert thinned.any()
    assert thinned.sum() < square.sum()


def test_render_is_deterministic_given_its_generator_and_varies_by_style(fields):
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([0, 1, 2])
    style = glyphs.Style.draw(3, generator)
    one = glyphs.render(labels, style, torch.Generator().manual_seed(1), fields)
    two = glyphs.render(labels, style, torch.Generator().manual_seed(1), fields)
    assert torch.equal(one, two)
    assert (one >= 0).all() and (one <= 1).all()
    assert one.shape == (3, 28, 28)


def test_normalise_is_invariant_to_shift_and_size(fields):
    generator = torch.Generator().manual_seed(0)
    label = torch.tensor([5])
    style = glyphs.Style.draw(1, generator)
    image = glyphs.render(label, style, torch.Generator().manual_seed(2), fields)
    shifted = torch.zeros(1, 28, 28)
    shifted[0, 4:, 2:] = image[0, :-4, :-2]
    fitted, _ = glyphs.normalise(image)
    moved, _ = glyphs.normalise(shifted)
    torch.testing.assert_close(fitted, moved, atol=0.05, rtol=0)
    assert fitted.shape == (1, 28, 28)


def test_an_empty_row_does_not_crash_and_gives_finite_features():
    fitted, box = glyphs.normalise(torch.zeros(2, 28, 28))
    assert fitted.isfinite().all() and box.isfinite().all()


def tiny_network():
    torch.manual_seed(0)
    net = network.Network()
    net.eval()
    return net


def test_network_features_and_public_map_agree(fields):
    net = tiny_network()
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(len(glyphs.CLASSES), (40,), generator=generator)
    style = glyphs.Style.draw(40, generator)
    drawn = glyphs.render(labels, style, torch.Generator().manual_seed(0), fields)
    public = network.PublicMap(net, drawn)
    scores_by_map = public(1 - drawn) @ public.head["weight"].T + public.head["bias"]
    scores_direct = net.head(net.features(drawn))
    torch.testing.assert_close(scores_by_map, scores_direct, atol=1e-4, rtol=0)


def test_embed_is_row_independent_and_deterministic(fields):
    net = tiny_network()
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(len(glyphs.CLASSES), (20,), generator=generator)
    style = glyphs.Style.draw(20, generator)
    rows = 1 - glyphs.render(labels, style, torch.Generator().manual_seed(0), fields)
    data = FederatedDataset(
        spec=Spec((28, 28), 62, "multiclass", 2),
        names=["a", "b"],
        offsets=np.array([0, 12, 20], dtype=np.int64),
        features=rows,
        targets=labels,
    )

    def map_(x):
        with torch.no_grad():
            return net.features(1 - x)

    one = embed(data, map_, block=5)
    two = embed(data, map_, block=7)
    torch.testing.assert_close(one.features, two.features, atol=1e-4, rtol=0)
    first = map_(rows[:1])
    torch.testing.assert_close(one.features[:1], first, atol=1e-4, rtol=0)
    assert one.features.shape == (20, first.shape[1])


def test_embed_refuses_a_map_that_gives_no_vector_for_each_row():
    data = FederatedDataset(
        spec=Spec((4,), 2, "binary", 1),
        names=["a"],
        offsets=np.array([0, 3], dtype=np.int64),
        features=torch.zeros(3, 4),
        targets=torch.zeros(3),
    )
    with pytest.raises(ValueError, match="one vector per row"):
        embed(data, lambda x: x.sum())


@pytest.fixture(scope="module")
def script():
    path = Path(__file__).parents[2] / "examples" / "public_features.py"
    spec = importlib.util.spec_from_file_location("public_features_script", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_gains_are_paired_with_the_best_local_fit_of_the_same_networks(script):
    def lines(name, *seeds):
        return {name: [script.Line(name, None, np.array(given)) for given in seeds]}

    found = script.table(
        {
            **lines(f"{script.LOCAL}, lam 1", [0.1, 0.2, np.nan], [0.1, 0.2, np.nan]),
            **lines(f"{script.LOCAL}, lam 2", [0.5, 0.3, np.nan], [0.3, 0.1, np.nan]),
            **lines("together, all", [0.6, 0.4, np.nan], [0.6, 0.2, np.nan]),
            **lines("together, once", [0.8, 0.1, np.nan]),
        }
    )
    assert f"against '{script.LOCAL}, lam 2'" in found
    # Means over seeds .4 and .2 locally, .6 and .3 together: gains .2 and .1.
    assert "| together, all | 0.450 | 0.150 | +0.150 | 0.050 | 0% |" in found
    # One seed against its own network: .8 - .5 and .1 - .3.
    assert "| together, once | 0.450 | 0.350 | +0.050 | 0.250 | 50% |" in found


def test_local_training_differs_from_sharing(script):
    data = synthetic("mean", clients=6, rows=(8, 12), features=4, task="multiclass", seed=0).data
    method = PMTL(model=Linear(), shared="slice", directions=2, lam=0.1)
    local, ids = script.last_solve(method, data), np.arange(len(data))
    joined = script.together(method, data, math.inf, 0)
    noisy = script.together(method, data, 1.0, 0)
    for other in (joined, noisy):
        assert not torch.allclose(local(ids)["weight"], other(ids)["weight"], atol=1e-3)
    assert all(torch.equal(leaf, local([3])[name][0]) for name, leaf in _at(local(ids), 3).items())


def _at(models, client):
    return {name: leaf[client] for name, leaf in models.items()}
