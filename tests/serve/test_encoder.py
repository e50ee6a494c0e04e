"""A frozen public encoder: rows are mapped in a run, its predictions and exports alike."""

import csv
import json
import sys

import numpy as np
import pytest
import torch

import coterie as ct
from coterie.cli.main import main
from coterie.core.config import ConfigError, from_table, to_table
from coterie.data.effects import Effects
from coterie.data.encoder import Encoded, made
from coterie.data.federated import DataError
from coterie.serve.export import load_client

NETS = """
import torch
from torch import nn

class Filters(nn.Module):
    def __init__(self):
        super().__init__()
        self.filters = nn.Conv2d(1, 4, 3, padding=1)
        self.drop = nn.Dropout(0.5)

    def forward(self, rows):
        return nn.functional.max_pool2d(self.drop(self.filters(rows[:, None]).relu()), 4).flatten(1)

class Flat(nn.Module):
    def forward(self, rows):
        return rows.sum()

def number():
    return 3

def needs(one):
    return Filters()
"""
DIGITS = "--data digits --encoder nets:Filters"


@pytest.fixture
def nets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(NETS)
    sys.modules.pop("nets", None)
    monkeypatch.syspath_prepend(str(tmp_path))
    import nets

    yield nets
    sys.modules.pop("nets", None)


def test_features_are_those_of_the_module_in_evaluation_mode(nets):
    data = ct.open_named("digits", clients=6)
    effects = Effects(encoder=nets.Filters)
    found = effects.expand(data)
    torch.manual_seed(0)
    module = nets.Filters().eval()
    with torch.no_grad():
        expected = module(data.features)
    np.testing.assert_allclose(found.features, expected, atol=1e-6)
    assert found.spec.shape == (16,) and found.design.shape == (8, 8)
    assert torch.equal(effects.expand(data).features, found.features)  # dropout is off
    assert found.design(data.features.flatten(1)).shape == (len(expected), 16)
    before = torch.random.get_rng_state()
    made.cache_clear()
    made(nets.Filters)
    assert torch.equal(torch.random.get_rng_state(), before)
    table = to_table(effects)
    assert table["encoder"] == "nets:Filters"
    assert from_table(Effects, table, "effects") == effects


def test_a_client_s_features_do_not_depend_on_others(nets):
    data = ct.open_named("digits", clients=6)
    effects = Effects(encoder=nets.Filters)
    alone = effects.expand(data.only([2]))
    start, stop = data.offsets[2:4]
    assert torch.equal(effects.expand(data).features[start:stop], alone.features)


def test_what_is_no_encoder_is_refused(nets):
    data = ct.open_named("digits", clients=6)
    for make, told in (
        (nets.number, "made int"),
        (nets.needs, "called without arguments"),
        (nets.Flat, "end it with nn.Flatten"),
    ):
        with pytest.raises(DataError, match=told):
            Effects(encoder=make).expand(data)
    with pytest.raises(DataError, match=r"failed on rows of shape \(3,\)"):
        Encoded.of(nets.Filters, (), (3,))
    with pytest.raises(ValueError, match="one of them"):
        Effects(encoder=nets.Filters, basis="spline")
    with pytest.raises(DataError, match="encoder takes dense rows"):
        Encoded.of(nets.Filters, (), (8, 8)).expand(Effects(encoder=nets.Filters).expand(data))


def test_a_run_predicts_and_exports_with_its_encoder(nets, tmp_path, capsys):
    run = f"run {DIGITS} --epsilon 4 --anyway --simulation-seed 0 --rounds 2 --no-local --out run"
    assert not main([*run.split(), "--quiet"])
    stated = json.loads((tmp_path / "run" / "guarantee.json").read_text())
    (listed,) = stated["inputs"]
    assert (listed["name"], listed["hashed"]) == ("data.effects.encoder", "code")
    assert not main(["verify", "run"])
    capsys.readouterr()
    assert main(["predict", "run", "--data", "digits"])
    assert "--trust" in capsys.readouterr().err
    assert not main(["predict", "run", "--data", "digits", "--trust", "--out", "p.csv"])
    with (tmp_path / "p.csv").open() as file:
        first = next(iter(csv.DictReader(file)))
    decisions = [float(value) for name, value in first.items() if name.startswith("decision")]
    for form, name in (("safetensors", "m.safetensors"), ("torch", "m.pt2")):
        export = ["export", "run", "--client", first["client"], "--trust", "--format", form]
        assert not main([*export, "--out", name])
    with pytest.raises(ConfigError, match="names code"):
        load_client("m.safetensors")
    assert load_client("m.safetensors", trust=True).info.effects == Effects(encoder=nets.Filters)
    program = torch.export.load("m.pt2").module()
    rows = ct.open_named("digits").features[:3]
    np.testing.assert_allclose(program(rows)[0].detach(), decisions, atol=1e-4)


def test_a_plan_of_others_with_an_encoder_is_code(nets, tmp_path):
    assert not main([*f"run {DIGITS} --epsilon 4 --anyway --rounds 1 --no-local".split(),
                     "--quiet", "--out", "run"])  # fmt: skip
    with pytest.raises(ConfigError, match="names code, 'nets:Filters'"):
        ct.Plan.load(tmp_path / "run" / "plan.toml", trust=False)
