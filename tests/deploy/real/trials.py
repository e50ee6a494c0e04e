"""Federations of real processes: districts dealt to sites, apps honest and hostile, what came out.

What a run should have posted is told by two others that share no process, no network and no wire
with it: the simulator, and sites that answer by a function call (`tests.deploy.federations`).
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.numpy import load_file
from tests.deploy.federations import Keys, Neighbourhood, Tamper, open_coordinator, open_sites

from coterie.core.config import to_table, to_toml
from coterie.data.config import DataConfig
from coterie.data.datasets import DISTRICTS_TEST_ROWS
from coterie.data.federated import FederatedDataset
from coterie.deploy.demo import write_rows
from coterie.deploy.federation import Trust
from coterie.deploy.init import App, init_app
from coterie.deploy.keys import load_private
from coterie.deploy.messages import Envelope, peek
from coterie.deploy.processes import LocalFederation
from coterie.engine.simulate import Outcome, simulate
from coterie.methods.pmtl import PMTL
from coterie.models import Linear
from coterie.planning.plan import Plan, Privacy
from coterie.privacy.sampling import Everyone, Sampler


def packed(app: Path) -> bytes:
    """Return an app as Flower packs it to send it."""
    with tempfile.TemporaryDirectory() as place:
        command = [str(Path(sys.executable).parent / "flwr"), "build", "--app", str(app)]
        subprocess.run(command, cwd=place, check=True, capture_output=True)
        (found,) = Path(place).glob("*.fab")
        return found.read_bytes()


QUICK = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}
"""A SuperNode starts a ClientApp at once; it still looks for messages every 3 s alone."""
SEED = 5
HOSTILE = '''\
"""A site that may do wrong: its folder says how, by kind of question and round."""

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from coterie.deploy.keys import load_private
from coterie.deploy.worker import relay
from coterie.deploy.flower import from_records, to_records
from coterie.deploy.messages import Expected, pack, peek, sign, unpack, verify

APP = Path(__file__).resolve().parent.parent
app = ClientApp()


def opened(envelope, key):
    expected = {name: Expected(raw.dtype, raw.shape) for name, raw in envelope.arrays.items()}
    return verify(envelope, key.public_key(), expected)


def tampered(how, envelope, config):
    """Do wrong, in a message under the site's own key."""
    folder, key = Path(config["folder"]), load_private(Path(config["key"]))
    message = opened(envelope, key)
    if how == "nan":
        wrong = {n: a * np.nan for n, a in message.arrays.items()}
        return sign(replace(message, arrays=wrong), key)
    if how == "huge":
        wrong = {n: a + 1e12 for n, a in message.arrays.items()}
        return sign(replace(message, arrays=wrong), key)
    if how == "ring":  # as large as a masked number can be, which nobody can tell from a mask
        wrong = {n: a + np.uint64(1 << 62) for n, a in message.arrays.items()}
        return sign(replace(message, arrays=wrong), key)
    if how == "other":
        return sign(replace(message, site=config["other"]), key)
    if how == "shape":
        wrong = {n: np.zeros((3, 3)) for n in message.arrays}
        return sign(replace(message, arrays=wrong), key)
    if how == "replay":
        return unpack((folder / "first.envelope").read_bytes())
    if how == "late":  # time in which to end the coordinator before it has all answers
        time.sleep(5)
        return envelope
    if how == "wait":
        (folder / "waiting").touch()
        time.sleep(600)
    raise RuntimeError(f"told to fail: {how}")


@app.train()
@app.query()
def reply(message, context):
    config = dict(context.node_config)
    envelope = unpack(relay(pack(from_records(message.content)), APP, config))
    header, folder = peek(envelope), Path(config["folder"])
    wrongs = folder / "wrongs.json"
    wrong = json.loads(wrongs.read_text()) if wrongs.exists() else {}
    how = wrong.get(f"{header.kind}/{header.round}", "")
    if header.kind in ("round", "masked") and header.round == 0:
        (folder / "first.envelope").write_bytes(pack(envelope))
    if how == "garbage":
        noise = RecordDict({"noise": ConfigRecord({"x": b"\\xff" * 1000})})
        return Message(noise, reply_to=message)
    if how:
        envelope = tampered(how, envelope, config)
    return Message(to_records(envelope), reply_to=message)
'''


@dataclass(frozen=True)
class Trial:
    """An app with rows for its sites, and the folder in which all of it lies."""

    folder: Path
    app: App
    plan: Plan
    data: FederatedDataset
    keys: Path

    @property
    def sites(self) -> tuple[str, ...]:
        """Return the names of the sites."""
        return tuple(self.app.agreement.federation.sites)

    def node(self, site: str, **more: Any) -> dict[str, Any]:
        """Return the `--node-config` of a site's SuperNode."""
        return {
            "site": site,
            "key": str(self.keys / "sites" / site / "signing.key"),
            "folder": str(self.site_folder(site)),
            "data": str(self.folder / f"{site}.parquet"),
            "runs": 99,
            "simulation": True,
            **more,
        }

    def site_folder(self, site: str) -> Path:
        """Return what a site calls its own."""
        return self.folder / "sites" / site

    @property
    def train(self) -> FederatedDataset:
        """The rows that models are made of."""
        return self.plan.data.split(self.data)[0]

    @cached_property
    def simulated(self) -> Outcome:
        """The same plan in the simulator."""
        folder = self.folder / "simulated" / self.app.name
        folder.mkdir(parents=True, exist_ok=True)
        return simulate(self.app.agreement.plan, self.train, folder=folder)

    def expected(self) -> list[str]:
        """Return the digests of the posts that an undisturbed run makes."""
        assert self.simulated
        return releases(self.folder / "simulated" / self.app.name)

    def expected_with(self, tamper: Tamper, trust: Trust = "server") -> list[str]:
        """Return the digests of posts when answers are changed on their way, or do not come.

        Sums are plain by default, whatever the federation's trust: masks must change nothing.
        """
        federation = replace(self.app.agreement.federation, trust=trust, patience=0, minimum=0.0)
        keys = Keys(
            load_private(self.keys / "coordinator.key"),
            {site: self.signing_key(site) for site in self.sites},
        )
        plan, place = self.app.agreement.plan, self.folder / "function-calls" / self.app.name
        near = Neighbourhood(
            open_sites(plan, self.train, federation, keys, place / "sites"), tamper
        )
        open_coordinator(plan, federation, keys, place / "run", near, []).run()
        return releases(place / "run")

    def expected_without(self, absent: Mapping[int, set[str]]) -> list[str]:
        """Return the digests of posts when some sites are silent in some rounds."""

        def silence(site: str, question: Envelope, answer: Envelope) -> Envelope | None:
            seen = peek(question)
            return None if seen.kind == "round" and site in absent[seen.round] else answer

        return self.expected_with(silence)

    def signing_key(self, site: str) -> Ed25519PrivateKey:
        """Return a site's key."""
        return load_private(self.keys / "sites" / site / "signing.key")


@dataclass(frozen=True)
class Attempt:
    """A run of a trial's app, in a folder of its own."""

    trial: Trial
    federation: LocalFederation
    folder: Path
    runs: list[int] = field(default_factory=list)

    def submit(self, **config: str) -> int:
        """Submit the app to the federation; again to go on."""
        seen = {
            "folder": str(self.folder),
            "key": str(self.trial.keys / "coordinator.key"),
            **config,
        }
        self.runs.append(self.federation.submit(self.trial.app.folder, seen))
        return self.runs[-1]

    def wait(self, seconds: float = 600) -> str:
        """Wait for the end; give Flower's status."""
        return self.federation.wait(self.runs[-1], seconds)

    def log(self, event: str | None = None) -> list[dict[str, Any]]:
        """Read the log, or its lines of one event."""
        lines = json_lines(self.folder / "log.jsonl")
        return [line for line in lines if event in (None, line["event"])]

    def released(self) -> list[str]:
        """Return the digests of posts, in order; no post is there twice, none was not charged."""
        return releases(self.folder)

    def until(self, done: Callable[[], object], seconds: float = 240) -> None:
        """Wait for something while the run is on."""
        end, look = time.monotonic() + seconds, 0.0
        while not done():
            if time.monotonic() > look:
                status, look = self.federation.run_status(self.runs[-1]), time.monotonic() + 1
                assert not status.startswith("finished"), f"ended as {status}: {self.log()}"
            assert time.monotonic() < end, f"waited {seconds} s in vain: {self.log()}"
            time.sleep(0.02)

    def absent(self) -> dict[int, set[str]]:
        """Read off the log who was silent in which round: every set of sites has its own size."""
        sizes = {s: len(e.clients) for s, e in self.trial.app.agreement.federation.sites.items()}
        found = {}
        for line in self.log("round"):
            missing = line["asked"] - line["answered"]
            (names,) = [names for names in _subsets(sizes) if sum(names.values()) == missing]
            found[line["round"] - 1] = set(names)
        return found


def deal(folder: Path, data: FederatedDataset, sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """Write every site's rows; give clients by site."""
    assert sum(sizes.values()) == len(data)
    folder.mkdir(parents=True, exist_ok=True)
    first, found = 0, {}
    for site, count in sizes.items():
        write_rows(folder / f"{site}.parquet", data, first, first + count)
        found[site] = list(data.names[first : first + count])
        first += count
    return found


def write_trial(
    folder: Path,
    name: str,
    sizes: Mapping[str, int],
    *,
    rounds: int,
    keys: Path | None = None,
    hostile: bool = False,
    sampler: Sampler | None = None,
    seed: int = SEED,
    privacy: Privacy | None = None,
    **facts: Any,
) -> Trial:
    """Write an app called so, for as many districts at each site as said."""
    data = DataConfig(name="districts").open().only(np.arange(sum(sizes.values())))
    plan = Plan(
        data=DataConfig(name="districts", test=DISTRICTS_TEST_ROWS),
        method=PMTL(model=Linear()),
        privacy=privacy or Privacy(epsilon=1.0),
        sampler=sampler or Everyone(),
        rounds=rounds,
        simulation_seed=seed,
    )
    sites = deal(folder, data, sizes)
    (folder / f"{name}.toml").write_text(to_toml(to_table(plan)))
    spec = data.spec
    known = {"task": spec.task, "shape": spec.shape, "outputs": spec.outputs, "simulation": True}
    place = folder / "apps" / name
    app = init_app(place, folder / f"{name}.toml", sites, {**known, **facts}, keys)
    if hostile:
        (place / app.package / "client.py").write_text(HOSTILE)
    return Trial(folder, app, plan, data, keys or place / "keys")


def releases(folder: Path) -> list[str]:
    """Read the digests of posts off a ledger; each was charged once, before it was out, once."""
    lines = json_lines(folder / "ledger.jsonl")[1:]
    charged: list[int] = []
    found: list[str] = []
    for line in lines:
        if "charge" in line:
            assert line["charge"] == len(charged), lines
            charged.append(line["charge"])
        else:
            assert line["release"] == len(found) < len(charged), lines
            found.append(line["sha256"])
    return found


def charges(folder: Path) -> int:
    """Count the posts that were charged."""
    return sum("charge" in line for line in json_lines(folder / "ledger.jsonl"))


def site_run(trial: Trial, site: str, run: Path) -> Path:
    """Return a site's folder of a run."""
    return trial.site_folder(site) / json.loads((run / "coordinator.json").read_text())["run"]


def site_models(trial: Trial, run: Path) -> dict[str, np.ndarray]:
    """Read all sites' models, stacked in the order of the federation."""
    parts = [
        load_file(site_run(trial, site, run) / "models" / "clients.safetensors")
        for site in trial.sites
    ]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def same_models(trial: Trial, run: Path) -> bool:
    """Return whether the sites' models are those of the simulation."""
    found = site_models(trial, run)
    leaves = trial.simulated.models.leaves
    assert set(found) == set(leaves)
    return all(np.allclose(found[n], leaves[n].numpy(), rtol=1e-6, atol=1e-7) for n in leaves)


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Read whole lines of JSON; none of a file that is not there."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines() if line]


def _subsets(sizes: Mapping[str, int]) -> list[dict[str, int]]:
    found: list[dict[str, int]] = [{}]
    for name, size in sizes.items():
        found += [{**one, name: size} for one in found]
    return found
