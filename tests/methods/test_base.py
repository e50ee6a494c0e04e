"""The interface of methods: its size, the registry, the model field, and finetuning as a step."""

import inspect
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from coterie.core.rng import Rng
from coterie.data.synthetic import synthetic
from coterie.methods.base import (
    Method,
    about,
    choices,
    per_row_leaves,
    predictive_std,
    register,
    registered,
    shared_leaves,
)
from coterie.methods.dpfedmtl import DPFedMTL
from coterie.methods.fedavg import FedAvg
from coterie.methods.finetune import Finetune
from coterie.methods.pfeb import PFEB
from coterie.methods.pmtl import PMTL
from coterie.models import MLP, Linear, Model

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import method_table  # noqa: E402

SPEC = synthetic("mean", clients=4, rows=5, features=3, seed=0).data.spec
MEMBERS = {name for name in {*dir(Method), *Method.__annotations__} if not name.startswith("_")}


def test_a_method_has_at_most_18_members_and_all_are_on_one_page():
    assert len(MEMBERS) <= 18, sorted(MEMBERS)
    page = (ROOT / "docs" / "extend.md").read_text()
    assert {name for name in MEMBERS if f"`{name}" not in page} == set()


@pytest.mark.parametrize("name", sorted(registered()))
def test_every_method_accepts_a_torch_module_as_its_model(name):
    made = registered()[name](model=torch.nn.Linear(3, 1))
    assert isinstance(made.model, Model)


def test_the_registry_refuses_a_taken_name_and_knows_texts():
    with pytest.raises(ValueError, match=r"'pmtl' is taken by coterie\.methods\.pmtl"):
        register("pmtl")(type("Other", (PMTL,), {}))
    with pytest.raises(ValueError, match="expected one of auto, "):
        about("nothing")
    for name in choices():
        assert about(name).summary == inspect.getdoc(choices()[name]).splitlines()[0]


@pytest.mark.parametrize(("name", "link"), method_table.FILES.items())
def test_tables_of_methods_agree_with_the_code(name, link):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text == method_table.filled(text, link), "run python tools/method_table.py"


def test_finetune_takes_every_member_but_its_own_from_the_base():
    """Change every member of a base: a finetune of it must show the change."""
    own = {"kind", "check", "resolve", "personalise", "local_update", "server_update"}

    @dataclass(frozen=True, kw_only=True)
    class Odd(FedAvg):
        model: Model = field(default_factory=lambda: MLP(hidden=(2,)))

    for name in MEMBERS - {"kind", "model"}:
        given = getattr(FedAvg, name)
        setattr(Odd, name, (lambda self, *a, n=name, **k: n) if callable(given) else name)
    tuned = Finetune(base=Odd(), how="mean")
    assert tuned.model == Odd().model and str(tuned) == "fedavg+mean"
    for name in MEMBERS - own - {"model"}:
        found = getattr(tuned, name)
        assert (found() if callable(found) else found) == name
    assert tuned.local_update(1, 2, 3, 4, 5) == "local_update"
    assert tuned.server_update(1, 2) == "server_update"


def test_a_finetune_hands_its_model_to_the_base_once():
    tuned = Finetune(base=PMTL(lam=2.0), model=MLP(hidden=(3,)))
    assert tuned.base == PMTL(lam=2.0, model=MLP(hidden=(3,)))
    with pytest.raises(ValueError, match="finetune already"):
        Finetune(base=tuned)


def test_shared_leaves_are_those_of_the_shared_model():
    assert shared_leaves(PMTL(), SPEC) == ("weight", "bias")
    assert shared_leaves(DPFedMTL(model=MLP(hidden=(4,))), SPEC) != ()
    assert shared_leaves(registered()["mpmtl"](), SPEC) == ()
    heads = DPFedMTL(model=MLP(hidden=(4,)))
    assert not set(shared_leaves(heads, SPEC)) & set(heads.heads(SPEC))


def test_leaves_with_an_entry_per_row_are_empty_at_first():
    method = registered()["mtlsvm"]()
    state = method.init_client_state(method.init(SPEC, Rng.seeded(0)), SPEC, 2)
    assert per_row_leaves(state) == ("dual",)
    assert per_row_leaves(PMTL().init_client_state(PMTL().init(SPEC, Rng.seeded(0)), SPEC, 2)) == ()


def test_methods_without_predictive_uncertainty_are_named():
    with pytest.raises(NotImplementedError, match="pmtl has no predictive uncertainty: use pfeb"):
        predictive_std(PMTL(), {}, None, None)
    assert PFEB(model=Linear()).serving.uncertainty is not None


def test_method_names_are_listed_nowhere_outside_their_package():
    """Four method names in a row are a list that somebody has to keep by hand."""
    names = "|".join(sorted(registered()))
    listed = re.compile(rf'(["\'](?:{names})["\'],\s*){{3,}}["\'](?:{names})["\']')
    for path in (ROOT / "src" / "coterie").rglob("*.py"):
        if path.parent.name != "methods":
            assert not listed.search(path.read_text()), path
