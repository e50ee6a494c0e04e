"""A site of a federation: its clients' half of every round, and their state on its own disk.

The site answers letters of the coordinator (`wire`), and nobody else's:

- `hello`: it has the same plan and federation, and takes part in this run;
- `round`: the sum of the bounded contributions of its clients that were drawn;
- `keys`, `shares`, `masked`, `unmask`: the same under secure aggregation (`engines.site_masks`);
- `finish`: its clients' models are made, and stay here.

What leaves a site is signed, and is either a `Bounded`, a masked one, or a word. New personal state
is staged when a round is answered. It counts when the coordinator says in its next question that
the answer was in the post, and is thrown away otherwise, as if the clients had not been drawn: so
after a crash on either side a client goes on from its last settled round, and one that missed
rounds comes back with the state it had.

**Guarantee:** whatever is asked of a site, its clients contribute to each planned round of a run at
most once: the same question is answered with the same numbers, another question of the same round
is refused, and so are rounds that are not in the plan and runs beyond those that the site permits.
Assumes that the site's disk keeps what was written, and the coordinator's key is not stolen.
Tests: tests/engines/test_site.py.
"""

import io
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from coterie.data.federated import FederatedDataset
from coterie.engines import site_masks
from coterie.engines.federation import Federation
from coterie.engines.rounds import RoundState, clients_work
from coterie.engines.simulate import Speed
from coterie.engines.store import Ids, Store
from coterie.plan import Plan
from coterie.privacy.billboard import Bounded
from coterie.privacy.files import write_atomically
from coterie.rng import Rng
from coterie.solvers.precision import computed_in
from coterie.tree import Tree
from coterie.wire import Expected, Letter, Parcel, RefusedError, digest, peek, seal, unseal

SHARED, SUM = "shared/", "sum/"
Arrays = Mapping[str, NDArray[Any]]
Reply = tuple[str, dict[str, Any], Arrays]
Finished = Callable[[Path, Tree, Tree], None]
"""Takes a run's folder, the clients' models (stacked) and the shared tree."""


@dataclass(frozen=True, kw_only=True)
class SiteSetting:
    """What a site is given.

    Attributes:
        name: Of the site.
        plan: Resolved.
        federation: Its public facts.
        agreement: Names plan and federation: both sides must have the same.
        rows: Training rows, shaped like the whole federation; others' clients have none.
        folder: The site's own, for state and models of its clients.
        key: The site's signing key.
        runs: In how many runs the site takes part in all; each spends its epsilon anew.
        finished: Called with the models when a run ends.
    """

    name: str
    plan: Plan
    federation: Federation
    agreement: str
    rows: FederatedDataset
    folder: Path
    key: Ed25519PrivateKey
    runs: int = 1
    finished: Finished | None = None


class Site:
    """Answers letters for the clients of one site."""

    def __init__(self, setting: SiteSetting) -> None:
        self.setting, self.plan = setting, setting.plan
        federation, name = setting.federation, setting.name
        if name not in federation.sites:
            raise ValueError(
                f"site {name!r} is not in the federation: expected one of "
                f"{', '.join(federation.sites)}"
            )
        if public_bytes(setting.key) != federation.sites[name].key:
            raise ValueError(
                f"the signing key of site {name} is not the one that federation.toml lists; give "
                "the private key that belongs to it"
            )
        spec = federation.spec
        self.ids = federation.numbers[name]
        self.start = self.plan.method.init(
            spec, Rng.seeded(self.plan.simulation_seed or 0).at("init")
        )
        self.mechanisms = self.plan.mechanisms(spec.clients)
        self.plan.method.check(spec)
        own = _own(setting.rows, self.ids)
        # Targets that are alike at one site may differ over all: only all together know.
        if bool((own.targets != own.targets[:1]).any()):
            self.plan.method.check_data(own)
        self._run: SiteRun | None = None

    def answer(self, parcel: Parcel) -> Parcel:
        """Answer a question; what cannot be answered is said in a word, never in numbers."""
        asked = _name_of(parcel)
        try:
            letter = self._open(parcel)
            run = self._run_of(letter)
            kind, body, arrays = _HANDLERS[letter.kind](run, letter)
        except RefusedError as refusal:
            kind, body, arrays = "refused", {"why": str(refusal)}, {}
        except Exception as error:
            # Only its name: the words of an error may hold numbers of rows.
            self._note(f"{type(error).__name__}: {error}")
            kind, body, arrays = "failed", {"why": type(error).__name__}, {}
        reply = Letter(kind, asked.run, self.setting.name, asked.round, asked.nonce, body, arrays)
        return seal(reply, self.setting.key)

    def _open(self, parcel: Parcel) -> Letter:
        kind = peek(parcel).kind
        if kind not in _HANDLERS:
            raise RefusedError(f"a question of kind {kind[:20]!r}, which nobody asks")
        carries = kind in ("round", "masked", "finish")
        expected = expected_tree(SHARED, self.start) if carries else {}
        letter = unseal(parcel, self.setting.federation.coordinator_key, expected)
        if letter.site not in ("", self.setting.name):
            raise RefusedError(f"a question for another site than {self.setting.name}")
        if len(letter.nonce) < 16 or not letter.run.isalnum():
            raise RefusedError("a question without a nonce or a run")
        return letter

    def _run_of(self, letter: Letter) -> "SiteRun":
        if self._run is not None and self._run.name == letter.run:
            return self._run
        if letter.kind != "hello" and not (self.setting.folder / letter.run / "run.json").exists():
            raise RefusedError("a question of a run that this site never joined")
        if letter.body.get("agreement") != self.setting.agreement and letter.kind == "hello":
            raise RefusedError("another plan or federation than this site has")
        self._run = SiteRun(self, letter.run)
        return self._run

    def _note(self, text: str) -> None:
        """Keep what went wrong where the rows are kept."""
        line = text.replace("\n", " ").encode(errors="backslashreplace") + b"\n"
        with suppress(OSError):  # a full disk must not end the answer
            self.setting.folder.mkdir(parents=True, exist_ok=True)
            with (self.setting.folder / "errors.log").open("ab") as file:
                file.write(line)


class SiteRun:
    """A site's part in one run: what is on its disk, and the work of a round."""

    def __init__(self, site: Site, name: str) -> None:
        self.site, self.name = site, name
        self.folder = site.setting.folder / name
        self._join()
        rows, first = site.setting.rows, int(site.ids[0])
        method, spec = site.plan.method, site.setting.federation.spec
        span = rows.offsets[first : first + len(site.ids) + 1]
        self.store = Store(
            method.enrol(site.start, spec, 1),
            len(site.ids),
            self.folder / "personal",
            per_row=method.per_row,
            offsets=span - span[0],
        )
        seed = site.plan.simulation_seed
        self.rng = Rng.fresh() if seed is None else Rng.seeded(seed)
        fresh: dict[str, Any] = {"settled": -1, "answered": -1, "opened": {}}
        self.state = {**fresh, **_read_json(self.folder / "state.json", {})}
        self.masking: site_masks.Masking | None = None

    def _join(self) -> None:
        """Enter a run, unless the site has taken part in as many as it permits."""
        setting = self.site.setting
        note = self.folder / "run.json"
        if note.exists():
            if _read_json(note, {}).get("agreement") != setting.agreement:
                raise RefusedError("a run that this site joined under another plan")
            return
        joined = len(list(setting.folder.glob("*/run.json")))
        if joined >= setting.runs:
            # Of whatever plan: a coordinator that sends another plan must not get another budget.
            raise RefusedError(
                f"this site took part in {joined} runs, and permits {setting.runs}: each run "
                "spends its epsilon anew (runs=... in --node-config)"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        promise = setting.plan.guarantee(setting.federation.spec.clients)
        told = {
            "agreement": setting.agreement,
            "site": setting.name,
            # What the run will have spent of its clients at most, for the site's own books.
            "guarantee": replace(promise, assumed=setting.federation.assumed).to_json(),
        }
        write_atomically(note, json.dumps(told, allow_nan=False).encode())

    def hello(self, letter: Letter) -> Reply:
        """Say that this site takes part."""
        return "hello", {"agreement": self.site.setting.agreement}, {}

    def round(self, letter: Letter) -> Reply:
        """Give the sum of the drawn clients' bounded contributions."""
        if self.site.setting.federation.trust != "server":
            raise RefusedError("this federation's sums are masked: sites send no plain ones")
        total = self.contribution(letter)
        return "round", {}, {SUM + name: leaf for name, leaf in total.items()}

    def contribution(self, letter: Letter) -> Arrays:
        """Compute a round's sum, or give the one that was computed for the same question."""
        number, ids = letter.round, self._drawn(letter)
        self._check_round(number)
        shared = _tree(letter.arrays, SHARED)
        arrays = {name: leaf.numpy() for name, leaf in shared.items()}
        question = digest({**arrays, "ids": ids, "round": np.array([number], dtype=np.int64)})
        kept = self._answered(number)
        if kept is not None and kept[0] != question:
            raise RefusedError(
                f"round {number} was answered to another question; a round is answered once"
            )
        self._settle(letter.body.get("counted"), number)
        total = self._make(number, question, shared, ids) if kept is None else kept[1]
        # On disk before it leaves: what is staged may be thrown away, that it was sent may not.
        if self.state["answered"] < number:
            self.keep(answered=number)
        return total

    def _make(self, number: int, question: str, shared: Tree, ids: Ids) -> Arrays:
        """Compute a round's sum; keep it, and the clients' new state, for when it is counted."""
        total = self._work(number, shared, ids)
        buffer = io.BytesIO()
        told = np.frombuffer(question.encode(), dtype=np.uint8)
        np.savez(
            buffer, allow_pickle=False, question=told, **{SUM + n: a for n, a in total.items()}
        )
        write_atomically(self.folder / "answer.npz", buffer.getvalue())
        self.store.seal(number)
        return total

    def _drawn(self, letter: Letter) -> Ids:
        drawn = letter.body.get("clients")
        own = set(self.site.ids.tolist())
        if not isinstance(drawn, list) or any(type(one) is not int for one in drawn):
            raise RefusedError("a round without a list of clients")
        if sorted(set(drawn)) != drawn or not own.issuperset(drawn):
            raise RefusedError("clients that are not this site's, or twice, or out of order")
        return np.array(drawn, dtype=np.int64)

    def _check_round(self, number: int) -> None:
        if not 0 <= number < len(self.site.mechanisms):
            raise RefusedError(f"round {number}: the plan has {len(self.site.mechanisms)}")
        if number <= self.state["settled"]:
            raise RefusedError(f"round {number} is over at this site")
        answered = self.state["answered"]
        if number < answered:
            raise RefusedError(f"round {number}, after round {answered} was answered")
        if number == answered and self.store.sealed() != number:
            raise RefusedError(f"round {number} was answered; a round is answered once")

    def _settle(self, counted: Any, number: int) -> None:
        """Bring personal state to the last round that counted."""
        if type(counted) is not int or not -1 <= counted < number:
            raise RefusedError("a question that does not say which answer counted last")
        settled, answered = self.state["settled"], self.state["answered"]
        if counted not in (settled, answered):
            # Every question says what became of the answer before it.
            raise RefusedError(
                f"round {counted} counted last, it says; round {settled} did, or {answered}"
            )
        staged = self.store.sealed()
        if staged is not None and staged <= counted:
            self.store.recover(counted + 1)  # applied if it is the round that counted, else dropped
        elif staged is not None and staged < number:
            self.store.discard()
        if counted > settled:
            self.keep(settled=counted)

    def _answered(self, number: int) -> tuple[str, Arrays] | None:
        path = self.folder / "answer.npz"
        if self.store.sealed() != number or not path.exists():
            return None
        with np.load(path, allow_pickle=False) as kept:
            total = {n.removeprefix(SUM): kept[n] for n in kept.files if n.startswith(SUM)}
            return kept["question"].tobytes().decode(), total

    def _work(self, number: int, shared: Tree, ids: Ids) -> Arrays:
        """Let the clients do their half; stage their new state."""
        plan, mechanism = self.site.plan, self.site.mechanisms[number]
        state = RoundState(plan.method, mechanism, shared, self.rng, number, plan.simulation_seed)
        spec = self.site.setting.federation.spec
        self.store.discard()
        total: Bounded | None = None
        for block in self.site.setting.rows.blocks(ids, Speed().clients(shared)):
            local = block.ids.numpy() - int(self.site.ids[0])
            before = self.store.take(local, lambda n: plan.method.enrol(shared, spec, n))
            part, after, _ = clients_work(state, before, block)
            self.store.stage(local, after)
            total = part if total is None else total + part
        if total is not None:
            return {name: leaf.numpy() for name, leaf in total.total.items()}
        template = {n: tuple(leaf.shape) for n, leaf in plan.method.contribution(shared).items()}
        return {name: np.zeros(shape) for name, shape in mechanism.totals(template).items()}

    def finish(self, letter: Letter) -> Reply:
        """Make the clients' models of the last shared tree; they stay here."""
        posts = len(self.site.mechanisms)
        self._settle(letter.body.get("counted"), posts)
        shared, plan = _tree(letter.arrays, SHARED), self.site.plan
        spec, first = self.site.setting.federation.spec, int(self.site.ids[0])
        made: dict[str, list[torch.Tensor]] = {}
        places: list[Ids] = []
        coins = self.rng.at("personalise")
        for block in self.site.setting.rows.blocks(self.site.ids, Speed().clients(shared)):
            local = block.ids.numpy() - first
            personal = self.store.take(local, lambda n: plan.method.enrol(shared, spec, n))
            with computed_in("float32"):
                rows = plan.method.personalise(shared, personal, block, coins)
            places.append(local)
            for name, row in rows.items():
                made.setdefault(name, []).append(row)
        order = torch.from_numpy(np.argsort(np.concatenate(places)))
        models = {name: torch.cat(rows)[order] for name, rows in made.items()}
        if self.site.setting.finished is not None:
            self.site.setting.finished(self.folder, models, shared)
        return "finish", {}, {}

    def keep(self, **facts: Any) -> None:
        """Note facts of this run on the site's disk."""
        self.state = {**self.state, **facts}
        write_atomically(self.folder / "state.json", json.dumps(self.state).encode())


_HANDLERS: Mapping[str, Callable[[SiteRun, Letter], Reply]] = {
    "hello": SiteRun.hello,
    "round": SiteRun.round,
    "keys": site_masks.keys,
    "shares": site_masks.shares,
    "masked": site_masks.masked,
    "unmask": site_masks.unmask,
    "finish": SiteRun.finish,
}


def expected_tree(prefix: str, tree: Tree) -> dict[str, Expected]:
    """Say what arrays a tree travels as."""
    return {
        prefix + name: Expected(str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape))
        for name, leaf in tree.items()
    }


def public_bytes(key: Ed25519PrivateKey) -> str:
    """Give the public half of a key as federation.toml lists it."""
    return key.public_key().public_bytes_raw().hex()


def _tree(arrays: Arrays, prefix: str) -> Tree:
    return {
        name.removeprefix(prefix): torch.from_numpy(array)
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def _own(rows: FederatedDataset, ids: Ids) -> FederatedDataset:
    """Leave the clients out who live elsewhere, and have no rows here."""
    first, stop = int(ids[0]), int(ids[-1]) + 1
    span = rows.offsets[first : stop + 1]
    spec = replace(rows.spec, clients=len(ids))
    return replace(rows, spec=spec, names=rows.names[first:stop], offsets=span - span[0])


def _name_of(parcel: Parcel) -> Letter:
    try:
        return peek(parcel)
    except RefusedError:
        return Letter("", "", "")


def _read_json(path: Path, otherwise: dict[str, Any]) -> dict[str, Any]:
    if not path.exists():
        return otherwise
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else otherwise
