"""What a site keeps: models that a hospital can use with nothing but its own folder.

Oracles: the linear model by hand, on rows scaled by hand; and a simulation of the same plan.
"""

import json
from pathlib import Path

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from tests.deployed import Deployment, deploy

from coterie.cli import main
from coterie.data.config import DataConfig
from coterie.finished_models import client_scaling, stacked_models

pytestmark = pytest.mark.full


@pytest.fixture(scope="module", params=["none", "client"])
def kept(request, tmp_path_factory) -> tuple[Deployment, Path]:
    made = deploy(tmp_path_factory.mktemp("kept"), standardise=request.param)
    made.conduct()
    (note,) = made.site("site1").glob("*/run.json")
    return made, note.parent


@pytest.fixture
def no_data(monkeypatch):
    """Forbid to read the training rows: a site's models are used where these may be gone."""

    def gone(self):
        raise AssertionError("the training rows were asked for")

    monkeypatch.setattr(DataConfig, "open", gone)


def _file(made: Deployment, path: Path) -> tuple[list[str], np.ndarray]:
    """Write rows of the site's clients to a file; give whose they are, and the rows."""
    names, rows = [], []
    for name in made.agreement.federation.sites["site1"].clients:
        at = list(made.whole.names).index(name)
        first = int(made.whole.offsets[at])
        rows.append(made.whole.features[first : first + 3].numpy())
        names += [name] * 3
    x = np.concatenate(rows)
    columns = [f"x{j}" for j in range(x.shape[1])]
    lines = [",".join(["client", *columns])]
    lines += [",".join([n, *map(repr, r.tolist())]) for n, r in zip(names, x, strict=True)]
    path.write_text("\n".join(lines) + "\n")
    return names, x


def _by_hand(made: Deployment, folder: Path, names: list[str], x: np.ndarray) -> np.ndarray:
    """Answer rows by the linear models, scaled by each client's own training rows."""
    clients = list(made.agreement.federation.sites["site1"].clients)
    models = {name: leaf.double().numpy() for name, leaf in stacked_models(folder).items()}
    train = DataConfig(name="districts").split(made.whole)[0]
    found = []
    for name, given in zip(names, x.astype(np.float64), strict=True):
        row = given
        at, place = clients.index(name), list(made.whole.names).index(name)
        if made.agreement.run_plan.data.standardise == "client":
            own = train.features[int(train.offsets[place]) : int(train.offsets[place + 1])]
            own = own.double().numpy()
            wide = own.std(axis=0)
            safe = np.where(wide > 0, wide, 1)
            row = np.where(wide > 0, np.clip((given - own.mean(axis=0)) / safe, -15, 15), 0)
        found.append(float(models["weight"][at, 0] @ row + models["bias"][at, 0]))
    return np.array(found)


def test_a_site_predicts_with_its_own_folder(kept, tmp_path, no_data):
    made, folder = kept
    names, x = _file(made, tmp_path / "rows.csv")
    out = tmp_path / "answers.csv"
    line = ["predict", str(folder), "--data", str(tmp_path / "rows.csv"), "--out", str(out)]
    assert main(line) == 0
    table = pyarrow.csv.read_csv(out).to_pydict()
    assert table["client"] == names
    expected = _by_hand(made, folder, names, x)
    np.testing.assert_allclose(table["prediction"], expected, rtol=1e-4, atol=1e-4)


def test_a_site_exports_a_model_that_answers_alike(kept, tmp_path, no_data):
    made, folder = kept
    names, x = _file(made, tmp_path / "rows.csv")
    file = tmp_path / "model.safetensors"
    assert main(["export", str(folder), "--client", names[0], "--out", str(file)]) == 0
    own = tmp_path / "own.csv"
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    own.write_text("\n".join(lines[:4]) + "\n")
    out = tmp_path / "answers.csv"
    assert main(["predict", str(file), "--data", str(own), "--out", str(out)]) == 0
    found = pyarrow.csv.read_csv(out).to_pydict()["prediction"]
    expected = _by_hand(made, folder, names[:3], x[:3])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_clients_of_other_sites_are_not_known(kept, capsys):
    made, folder = kept
    stranger = made.agreement.federation.sites["site0"].clients[0]
    assert main(["export", str(folder), "--client", stranger]) == 2
    assert "not among the 4 clients" in capsys.readouterr().err
    for path in folder.rglob("*"):
        # Names stand in the agreement alone, which is public.
        if path.is_file() and path.name not in ("federation.toml",):
            assert stranger.encode() not in path.read_bytes(), path


def test_scores_are_those_of_a_simulation_and_stay_here(kept, tmp_path):
    made, folder = kept
    found = pq.read_table(folder / "metrics.parquet").to_pydict()
    assert found["client"] == list(made.agreement.federation.sites["site1"].clients)
    train, test = made.agreement.run_plan.data.split(made.whole)
    models = {name: leaf.double().numpy() for name, leaf in stacked_models(folder).items()}
    for at, name in enumerate(found["client"]):
        place = list(test.names).index(name)
        span = slice(int(test.offsets[place]), int(test.offsets[place + 1]))
        x, y = test.features[span].double().numpy(), test.targets[span].double().numpy()
        error = np.mean((x @ models["weight"][at, 0] + models["bias"][at, 0] - y) ** 2)
        assert found["error"][at] == pytest.approx(error, rel=1e-4)
        assert found["train_rows"][at] == train.counts[place]
    assert np.isfinite(found["error_alone"]).all()
    told = json.loads((folder / "result.json").read_text())
    assert told["deployment"]["site"] == "site1" and told["clients"] == 4
    assert told["metric"] == "nmse" and told["value"] is not None
    public = json.loads((made.run / "result.json").read_text())
    assert set(public) == set(told)
    assert public["metric"] is None and "site" not in public["deployment"]


def test_a_site_has_a_page_of_its_own(kept, tmp_path, capsys):
    _, folder = kept
    out = tmp_path / "page.html"
    assert main(["report", str(folder), "--out", str(out)]) == 0
    page = out.read_text()
    assert "of site site1" in page and "Does joining help me" in page
    capsys.readouterr()
    assert main(["verify", str(folder)]) == 2
    assert "coordinator" in capsys.readouterr().err


def test_runs_are_verified_together_where_a_site_lies_beside_them(kept):
    made, _ = kept
    assert main(["verify", str(made.root)]) == 0


def test_scaling_that_is_damaged_is_refused(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "clients.json").write_text('["a"]')
    assert client_scaling(tmp_path, ["a"]) is None
    (tmp_path / "scaling.npz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match="damaged"):
        client_scaling(tmp_path, ["a"])
    with pytest.raises(ValueError, match="not among the 1 clients"):
        client_scaling(tmp_path, ["b"])
