"""The example of `CoterieAccountant`, on a real SuperLink with three SuperNodes."""

import math
import shutil
from pathlib import Path

import pytest
from tests.deploy.real.trials import QUICK
from tests.test_flower_accountant import epsilon_of

from coterie.cli.main import main
from coterie.deploy.keys import make_certificates
from coterie.deploy.processes import LocalFederation
from coterie.verification.certificate import read_certificate

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[3] / "examples" / "flower-accountant"


def test_a_strategy_of_flower_ends_with_a_certificate(tmp_path, capsys):
    names = ("a", "b", "c")
    make_certificates(tmp_path / "keys", list(names))
    app = shutil.copytree(EXAMPLE, tmp_path / "app")
    account = tmp_path / "account"
    with LocalFederation(
        tmp_path / "flower", tmp_path / "keys", {n: {} for n in names}, environment=QUICK,
        patience=180,
    ) as federation:  # fmt: skip
        run = federation.submit(app, {"account": str(account), "rounds": 2})
        assert federation.wait(run, 400) == "finished:completed"
        # The account goes on, and refuses the round that would exceed the limit.
        # Two rounds spend 0.63, and three would spend 0.79.
        more = federation.submit(app, {"account": str(account), "rounds": 1, "limit": 0.7})
        assert federation.wait(more, 400) == "finished:failed"
    assert main(["verify", str(account)]) == 0
    stated = read_certificate(account)
    assert stated["rounds"] == 2 and stated["clients"] == 3
    assert stated["epsilon"] == pytest.approx(epsilon_of(math.sqrt(2) / 8, 1e-5), rel=1e-6)
