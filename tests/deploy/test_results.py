"""The coordinator's run folder, checked with code that shares nothing with what wrote it.

Oracles: `coterie verify`, which computes every epsilon anew; a simulation of the same plan, whose
posts and models a deployment must have; and the files as they were before a crash.
"""

import hashlib
import json
import re
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from tests.deploy.deployed import Deployment, deploy

import coterie as ct
from coterie.cli.main import main
from coterie.core.config import ConfigError
from coterie.data.config import DataConfig
from coterie.deploy import coordinator as coordinate
from coterie.deploy import results as finish
from coterie.deploy.coordinator import Coordinator
from coterie.engine.models import client_scaling, stacked_models
from coterie.privacy.sampling import Everyone
from coterie.report.page import write_report
from coterie.runs.run import execute
from coterie.verification import verify
from coterie.verification.certificate import seal

pytestmark = pytest.mark.full
PUBLIC = ("plan.toml", "federation.toml", "ledger.jsonl", "posts.npz", "shared.npz")
ACCOUNT = (*PUBLIC, "guarantee.json", "result.json", "coordinator.json", "data.json", "model.json")


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Deployment:
    """Return a deployment that is done; whoever changes its folder works on a copy."""
    made = deploy(tmp_path_factory.mktemp("deployment"))
    made.coordinate()
    return made


@pytest.fixture(scope="module")
def simulated(done, tmp_path_factory) -> Path:
    """Return the folder of a simulated run of the same plan."""
    folder = tmp_path_factory.mktemp("simulated") / "run"
    plan = replace(done.agreement.plan, history=False, baselines=(), rounds=2)
    execute(plan, folder=folder)
    return folder


@pytest.fixture
def copy(done, tmp_path) -> Path:
    shutil.copytree(done.run, tmp_path / "run")
    return tmp_path / "run"


def content(folder: Path, names=ACCOUNT) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names}


def site_run(deployment: Deployment, site: str) -> Path:
    (note,) = deployment.site(site).glob("*/run.json")
    return note.parent


def strict(path: Path) -> dict:
    def refuse(word):
        raise AssertionError(f"{word} is not strict JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


class CutError(RuntimeError):
    """Stands for a process that ends there and then."""


def test_posts_and_models_are_those_of_a_simulation(done):
    data = done.agreement.plan.data
    train, _ = data.split(done.whole)
    outcome = ct.simulate(done.agreement.plan, train)
    with np.load(done.run / "posts.npz") as posts:
        for post in outcome.posts:
            for name, leaf in post.value.items():
                assert np.array_equal(posts[f"{post.index:06d}.{name}"], leaf.numpy())
    with np.load(done.run / "shared.npz") as shared:
        assert all(np.array_equal(shared[n], leaf.numpy()) for n, leaf in outcome.shared.items())
    parts = [stacked_models(site_run(done, name)) for name in done.agreement.federation.sites]
    for name, leaf in outcome.models.leaves.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), leaf)


def test_verify_holds(done, capsys):
    assert main(["verify", str(done.run), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check["status"] for check in seen["runs"][0]["checks"]}
    assert checks.pop("clients") == "not here"
    assert set(checks.values()) == {"ok"}
    assert {"deployment", "releases", "epsilon", "log", "ledger", "public files"} <= set(checks)


@pytest.mark.parametrize(
    ("name", "old", "new", "check"),
    [
        ("federation.toml", 'trust = "server"', 'trust = "secure_aggregation"', "deployment"),
        ("federation.toml", "deadline = 5.0", "deadline = 6.0", "deployment"),
        ("plan.toml", "rounds = 3", "rounds = 4", "plan"),
        ("ledger.jsonl", '{"charge": 1}\n', "", "ledger"),
        ("guarantee.json", 'coordinator": "inf"', 'coordinator": 1.0', "deployment"),
        ("guarantee.json", '"site0": 4', '"site0": 3', "deployment"),
    ],
)  # fmt: skip
def test_tampering_is_found(copy, name, old, new, check):
    text = (copy / name).read_text()
    assert old in text
    (copy / name).write_text(text.replace(old, new, 1))
    verdict = verify(copy)
    failed = {one.name for one in verdict.checks if one.status == "FAILED"}
    assert not verdict.verified
    assert check in failed or "public files" in failed
    assert check != "deployment" or "deployment" in failed


@pytest.mark.parametrize("trust", ["nobody", "elsewhere"])
def test_trust_that_the_noise_does_not_have_is_found(copy, trust):
    """Every hash is made anew, so nothing but the noise contradicts the claim."""
    (copy / "signatures.json").unlink()
    path = copy / "federation.toml"
    path.write_text(path.read_text().replace('trust = "server"', f'trust = "{trust}"'))
    told = strict(copy / "guarantee.json")
    told["deployment"] |= {
        "trust": trust,
        "federation": hashlib.sha256(path.read_bytes()).hexdigest(),
        "coordinator_view": {"nobody": "coordinator"}.get(trust),
        "epsilon_coordinator": None,
    }
    told["sha256"] = seal(told)
    (copy / "guarantee.json").write_text(json.dumps(told, indent=2))
    (copy / "log.jsonl").unlink(missing_ok=True)
    assert [one.name for one in verify(copy).checks if one.status == "FAILED"] == ["deployment"]


def test_a_lost_federation_and_an_undeclared_one_are_found(copy, simulated, tmp_path):
    (copy / "federation.toml").unlink()
    assert "deployment" in {one.name for one in verify(copy).checks if one.status == "FAILED"}
    simulated = shutil.copytree(simulated, tmp_path / "simulated")
    assert verify(simulated).verified
    assert "deployment" not in {one.name for one in verify(simulated).checks}
    (simulated / "federation.toml").write_text("")
    assert not verify(simulated).verified


def test_a_post_that_was_altered_is_found(copy):
    with np.load(copy / "posts.npz") as posts:
        arrays = {name: posts[name] for name in posts.files}
    next(iter(arrays.values()))[...] += 1
    np.savez(copy / "posts.npz", **arrays)
    assert not verify(copy).verified


def test_the_summary_has_the_keys_of_a_simulated_run(done, simulated):
    there, here = (strict(path / "result.json") for path in (simulated, done.run))
    assert set(here) - set(there) == {"deployment"}
    assert set(there) <= set(here)
    seen = here["deployment"]
    assert (seen["trust"], seen["sites"], seen["coordinator_view"]) == ("server", 3, "server")
    assert seen["clients_by_site"] == {"site0": 4, "site1": 4, "site2": 4}
    assert here["metric"] is here["value"] is here["local_value"] is here["seconds"] is None
    assert here["views"] == strict(done.run / "guarantee.json")["views"]


@pytest.mark.parametrize(
    ("trust", "noise", "view", "finite"),
    [
        ("secure_aggregation", "gaussian", "server_secure_aggregation", False),
        ("server", "local", "server", True),
        ("secure_aggregation", "local", "server_secure_aggregation", True),
        ("nobody", "shares", "coordinator", True),
    ],
)
def test_the_view_that_applies_is_said(tmp_path, trust, noise, view, finite):
    privacy = ct.Privacy(epsilon=1.0, noise=noise)
    made = deploy(tmp_path, trust=trust, privacy=privacy, sampler=Everyone(), rounds=2)
    seen = made.coordinate()
    deployed = seen["deployment"]
    assert deployed["coordinator_view"] == view
    assert deployed["epsilon_coordinator"] == seen["views"][view]
    assert (deployed["epsilon_coordinator"] != "inf") is finite
    said = " ".join(seen["caveats"])
    assert f'trust = "{trust}"' in said
    assert ("adds the noise itself" in said or "adds itself" in said) is not finite
    assert "not protected against the operator of its own site" in said
    assert verify(made.run).verified


def test_what_is_public_tells_nobody_who_answered(tmp_path):
    """Two runs that differ in who answered leave the same words, but for posts and their hashes."""
    texts = []
    for name, absent in (("all", set()), ("one away", {"site1"})):
        made = deploy(tmp_path / name / "x", minimum=0.0, patience=0, deadline=0.01)
        made.hood.absent = absent
        seen = made.coordinate()
        write_report([made.run], made.run / "report.html")
        counts = [json.loads(line) for line in (made.run / "log.jsonl").read_text().splitlines()]
        answered = [line["answered"] for line in counts if line["event"] == "round"]
        page = (made.run / "report.html").read_text()
        keys = made.agreement.federation
        for word in (*(site.key for site in keys.sites.values()), keys.coordinator, str(tmp_path)):
            page = page.replace(word, "")
        certificate = strict(made.run / "guarantee.json")
        for part in ("posts", "files", "sha256", "started", "finished"):
            certificate.pop(part)
        certificate["deployment"].pop("federation")  # keys of their own
        seen.pop("run")
        texts.append((seen, certificate, page, answered))
    assert texts[0][3] != texts[1][3]
    assert texts[0][:3] == texts[1][:3]


def test_the_length_of_a_run_does_not_tell_who_was_drawn(tmp_path, monkeypatch):
    """A site that is away keeps the others waiting when its clients are drawn: a round each time.

    Two runs on a clock that is moved by hand: neither the certificate nor the result may tell how
    often somebody was waited for. The log, which does, is the coordinator's own.
    """
    seen, waits = [], []
    for name, seed in (("one", 3), ("other", 4)):
        clock = [datetime(2026, 1, 1, tzinfo=UTC)]
        for module in ("runs.log", "runs.certificate"):
            monkeypatch.setattr(
                f"coterie.{module}.now", lambda c=clock: c[0].strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            )
        made = deploy(
            tmp_path / name, minimum=0.0, patience=0, simulation_seed=seed, rounds=4,
            sampler=ct.Poisson(2), sites=6,
        )  # fmt: skip
        made.hood.absent, count, ask = {"site1"}, [0], made.hood.ask

        def waiting(questions, seconds, ask=ask, count=count, clock=clock):
            if "site1" in questions and b'"kind": "round"' in questions["site1"].header:
                count[0] += 1
                clock[0] += timedelta(seconds=120)
            yield from ask(questions, seconds)

        made.hood.ask = waiting
        result = made.coordinate()
        certificate = strict(made.run / "guarantee.json")
        seen.append((certificate["started"], certificate["finished"], result["seconds"]))
        waits.append(count[0])
        assert verify(made.run).verified
    assert waits[0] != waits[1], "choose other seeds"
    assert seen[0] == seen[1]
    assert seen[0][0] == seen[0][1] and seen[0][0].startswith("2026-01-01T00:00")


def test_what_tells_who_answered_is_the_coordinators_own(done):
    modes = {name: (done.run / name).stat().st_mode & 0o777 for name in ("log.jsonl", *ACCOUNT)}
    assert modes["log.jsonl"] == modes["coordinator.json"] == 0o600


def test_the_page_says_what_was_deployed(done, tmp_path):
    page = write_report([done.run], tmp_path / "page.html").read_text()
    text = re.sub(r"<script.*?</script>|<style.*?</style>", "", page, flags=re.S)
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))
    for said in (
        "3 (clients per site: site0 4, site1 4, site2 4)",
        "stay at the sites",
        "server: the coordinator observes the sum of each site",
        "5 s for the answers",
        "its model: no protection inf",
        "Epsilon spent by round",
        "z = ",
    ):
        assert said in text, said
    assert not re.search(r"\b(nan|None|not a number)\b", text)
    assert not re.search(r'id="(gains|clients)"', page) and "Does joining help" not in text


def test_a_page_of_a_deployment_beside_a_simulation(done, simulated, tmp_path):
    folders = [done.run, simulated]
    page = write_report(folders, tmp_path / "page.html", clients=False).read_text()
    assert "Does joining help a client?" in page and "What each adversary observes" in page
    two = write_report([done.run, done.run], tmp_path / "two.html").read_text()
    assert "the best of" not in two and "What each adversary observes" in two


STEPS = (
    "coterie.privacy.billboard.Billboard.pack",
    "coterie.deploy.results.keep_shared",
    "coterie.deploy.results.write_atomically",
    "coterie.deploy.results.keep_certificate",
    "coterie.deploy.results.keep_summary",
)


def test_crashes_between_the_last_files_are_mended(tmp_path, monkeypatch):
    """One after another, at each file; then it ends as if there had been none."""
    made = deploy(tmp_path)

    def cut(*arguments, **named):
        raise CutError

    for at, step in enumerate(STEPS):
        made.hood.asked.clear()
        with monkeypatch.context() as patch:
            patch.setattr(step, cut)
            with pytest.raises(CutError):
                made.coordinate()
        assert not (made.run / "result.json").exists()
        if not at:
            ledger, posts = (made.run / "ledger.jsonl").read_bytes(), _posts(made.run)
            continue
        assert (made.run / "ledger.jsonl").read_bytes() == ledger
        assert _posts(made.run) == posts
        assert {json.loads(head)["kind"] for _, head in made.hood.asked} == {"finish"}
    made.coordinate()
    assert _posts(made.run) == posts
    assert verify(made.run).verified


def test_a_crash_before_the_folder_is_done_needs_no_site(tmp_path, monkeypatch):
    made = deploy(tmp_path, deadline=0.01)
    with monkeypatch.context() as patch:
        patch.setattr(coordinate, "finish", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made.coordinate()
    made.hood.absent = set(made.agreement.federation.sites)
    made.coordinate()
    assert verify(made.run).verified


def test_a_run_that_is_done_stays_as_it_is_and_tells_those_who_missed_it(tmp_path):
    made = deploy(tmp_path, minimum=0.0, patience=0)
    seen = _coordinate_without(made, "site2")
    before = content(made.run)
    assert not (site_run(made, "site2") / "models").exists()
    models = {name: _models(made, name) for name in ("site0", "site1")}
    made.reopen()
    again = made.coordinate()
    assert again == seen
    assert content(made.run) == before
    assert (site_run(made, "site2") / "models").exists()
    assert {name: _models(made, name) for name in ("site0", "site1")} == models
    assert verify(made.run).verified


def test_models_of_fresh_coins_are_not_drawn_a_second_time(tmp_path):
    steps = ct.FedAvg(model=ct.Linear())
    method = ct.Finetune(base=steps) if hasattr(ct, "Finetune") else steps
    made = deploy(tmp_path, method=method, simulation_seed=None, simulation=False, rounds=1)
    made.coordinate()
    models = _models(made, "site0")
    made.reopen()
    made.coordinate()
    assert _models(made, "site0") == models


def test_a_summary_that_is_damaged_is_refused(copy):
    assert finish.finished_summary(copy)["method"] == "pmtl"
    (copy / "guarantee.json").write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        finish.finished_summary(copy)
    (copy / "result.json").unlink()
    assert finish.finished_summary(copy) is None


@pytest.mark.parametrize("command", ["predict RUN --data districts", "export RUN --all OUT"])
def test_commands_that_need_models_say_where_they_are(done, tmp_path, capsys, command):
    words = [w.replace("RUN", str(done.run)).replace("OUT", str(tmp_path)) for w in command.split()]
    assert main(words) == 2
    said = capsys.readouterr().err.strip()
    assert "models stay at the sites" in said and "\n" not in said


def test_a_deployment_is_not_gone_on_with_as_a_simulation(copy, capsys):
    (copy / "result.json").unlink()
    before = content(copy, PUBLIC)
    assert main(["run", "--resume", str(copy)]) == 2
    said = capsys.readouterr().err.strip()
    assert "deployment" in said and "coterie deploy status" in said and "\n" not in said
    assert content(copy, PUBLIC) == before and not (copy / "personal").exists()
    for command in ("report", "verify"):
        (copy / "guarantee.json").unlink(missing_ok=True)
        assert main([command, str(copy)]) == 2
        assert "coterie deploy status" in capsys.readouterr().err


def test_a_finished_deployment_is_shown(copy, capsys):
    assert main(["run", "--resume", str(copy)]) == 0
    said = capsys.readouterr().out
    assert "stay at the sites" in said and "None" not in said and "nan" not in said


def test_new_clients_are_onboarded_to_a_deployment(done, tmp_path, capsys):
    words = f"onboard {done.run} --data districts --clients 14 --out {tmp_path / 'joined'} --json"
    assert main(words.split()) == 0
    seen = json.loads(capsys.readouterr().out)
    assert (seen["clients"], seen["took_part"]) == (14, 12)
    assert seen["caveats"] == strict(done.run / "result.json")["caveats"]


def test_nothing_is_posted_and_nothing_is_claimed(tmp_path):
    made = deploy(tmp_path, method=ct.Local(model=ct.Linear()))
    seen = made.coordinate()
    assert seen["rounds"] == 0 and seen["epsilon"] == 0
    assert seen["deployment"]["epsilon_coordinator"] == 0
    assert verify(made.run).verified


def _posts(folder: Path) -> dict[str, bytes]:
    """Read posts, packed or one by one."""
    if (folder / "posts.npz").exists():
        with np.load(folder / "posts.npz") as kept:
            return {name: kept[name].tobytes() for name in kept.files}
    found = {}
    for path in sorted((folder / "posts").glob("*.npz")):
        with np.load(path) as kept:
            for name in kept.files:
                place = f"{path.stem}.{name.partition('.')[2]}"
                found[place] = kept[name].tobytes()
    return found


def _models(made: Deployment, site: str) -> bytes:
    return (site_run(made, site) / "models" / "clients.safetensors").read_bytes()


def _coordinate_without(made: Deployment, site: str) -> dict:
    """Conduct a run whose last words a site does not hear."""
    heard = Coordinator._finish

    def finish_without(self):
        made.hood.absent = {site}
        heard(self)
        made.hood.absent = set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Coordinator, "_finish", finish_without)
        return made.coordinate()


# What a site keeps: models that a hospital can use with nothing but its own folder.
#
# Oracles: the linear model by hand, on rows scaled by hand; and a simulation of the same plan.


@pytest.fixture(scope="module", params=["none", "client"])
def kept(request, tmp_path_factory) -> tuple[Deployment, Path]:
    made = deploy(tmp_path_factory.mktemp("kept"), standardise=request.param)
    made.coordinate()
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
        if made.agreement.plan.data.standardise == "client":
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
    train, test = made.agreement.plan.data.split(made.whole)
    models = {name: leaf.double().numpy() for name, leaf in stacked_models(folder).items()}
    for at, name in enumerate(found["client"]):
        place = list(test.names).index(name)
        span = slice(int(test.offsets[place]), int(test.offsets[place + 1]))
        x, y = test.features[span].double().numpy(), test.targets[span].double().numpy()
        error = np.mean((x @ models["weight"][at, 0] + models["bias"][at, 0] - y) ** 2)
        assert found["error"][at] == pytest.approx(error, rel=1e-4)
        assert found["train_rows"][at] == train.counts[place]
    assert np.isfinite(found["error_alone"]).all()
    seen = json.loads((folder / "result.json").read_text())
    assert seen["deployment"]["site"] == "site1" and seen["clients"] == 4
    assert seen["metric"] == "nmse" and seen["value"] is not None
    public = json.loads((made.run / "result.json").read_text())
    assert set(public) == set(seen)
    assert public["metric"] is None and "site" not in public["deployment"]


def test_a_site_has_a_page_of_its_own(kept, tmp_path, capsys):
    _, folder = kept
    out = tmp_path / "page.html"
    assert main(["report", str(folder), "--out", str(out)]) == 0
    page = out.read_text()
    assert "site site1: scores of its own clients" in page and "Does joining help" in page
    capsys.readouterr()
    assert main(["verify", str(folder)]) == 2
    assert "coordinator" in capsys.readouterr().err


def test_runs_are_verified_together_where_a_site_lies_beside_them(kept):
    made, _ = kept
    assert main(["verify", str(made.root)]) == 0


def test_scaling_that_is_damaged_is_refused(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "clients.json").write_text('["a"]')
    assert client_scaling(tmp_path, ["a"]) == {}
    (tmp_path / "models" / "scaling.npz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match="damaged"):
        client_scaling(tmp_path, ["a"])
    with pytest.raises(ValueError, match="not among the 1 clients"):
        client_scaling(tmp_path, ["b"])


def test_a_deployment_states_declarations_and_can_be_signed(tmp_path):
    """The certificate has the unit; the statement has what the coordinator observes."""
    about = ct.About(unit="one hospital with all its patients", operator="Consortium")
    made = deploy(tmp_path / "deployment", about=about)
    made.coordinate()
    told = strict(made.run / "guarantee.json")
    assert told["about"] == about.texts() and told["inputs"] == []
    assert verify(made.run).verified
    key, page = tmp_path / "owner", tmp_path / "statement.html"
    assert main(["sign", "--new-key", str(key)]) == 0
    assert main(["sign", str(made.run), "--key", str(key)]) == 0
    assert main(["verify", str(made.run), "--key", f"{key}.pub"]) == 0
    assert main(["report", str(made.run), "--statement", str(page)]) == 0
    text = page.read_text()
    for said in (about.unit, "12 clients at 3 sites", "the coordinator", "Deployed with trust"):
        assert said in text
    assert "the server, with secure aggregation" not in text
