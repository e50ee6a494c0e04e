"""A site's part in one run: what is on its disk, and its clients' half of a round.

See `engines.site` for what is promised, and why state is staged before it is settled.
"""

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.engines.rounds import RoundState, clients_work
from coterie.engines.simulate import Speed
from coterie.engines.store import Ids, Store
from coterie.privacy.billboard import Bounded
from coterie.privacy.files import write_atomically
from coterie.privacy.local import LocalGaussianSum
from coterie.rng import Rng
from coterie.solvers.sgd import computed_in
from coterie.tree import Tree
from coterie.wire import Expected, Letter, RefusedError, digest

if TYPE_CHECKING:
    from coterie.engines.site import Site
    from coterie.engines.site_masks import Masking

SHARED, SUM = "shared/", "sum/"
Arrays = Mapping[str, NDArray[Any]]
Reply = tuple[str, dict[str, Any], Arrays]


class SiteRun:
    """A site's part in one run: what is on its disk, and the work of a round."""

    def __init__(self, site: "Site", name: str) -> None:
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
        if self.store.is_new and self.state["settled"] >= 0:
            # Fresh state would pass for the old one, and its clients would start anew unseen.
            raise RefusedError("personal state of this site is gone; restore its folder")
        self.masking: Masking | None = None
        self.failure: dict[str, str] = {}

    def _join(self) -> None:
        """Enter a run, unless the site has taken part in as many as it permits."""
        setting = self.site.setting
        note = self.folder / "run.json"
        rows = {"fingerprint": setting.rows.fingerprint()}
        if note.exists():
            kept = _read_json(note, {})
            if kept.get("agreement") != setting.agreement:
                raise RefusedError("a run that this site joined under another plan")
            if _read_json(self.folder / "rows.json", rows) != rows:
                raise RefusedError("rows of this site are not those that it joined the run with")
            return
        self._check_runs()
        self.folder.mkdir(parents=True, exist_ok=True)
        # Made of private rows: apart from what people read, and it never leaves.
        write_atomically(self.folder / "rows.json", json.dumps(rows).encode())
        promise = setting.plan.guarantee(setting.federation.spec.clients)
        told = {
            "agreement": setting.agreement,
            "site": setting.name,
            # What the run will have spent of its clients at most, for the site's own books.
            "guarantee": replace(promise, assumed=setting.federation.assumed).to_json(),
        }
        write_atomically(note, json.dumps(told, allow_nan=False).encode())

    def _check_runs(self) -> None:
        """Refuse a run more than the site permits; those count from which an answer has left."""
        setting = self.site.setting
        states = [
            path for path in setting.folder.glob("*/state.json") if path.parent != self.folder
        ]
        begun = sum(_read_json(path, {}).get("answered", -1) >= 0 for path in states)
        if begun >= setting.runs:
            # Of whatever plan: a coordinator that sends another plan must not get another budget.
            raise RefusedError(
                f"this site took part in {begun} runs, and permits {setting.runs}: each run "
                "spends its epsilon anew (runs=... in --node-config)"
            )

    def hello(self, letter: Letter) -> Reply:
        """Say that this site takes part."""
        return "hello", {"agreement": self.site.setting.agreement}, {}

    def round(self, letter: Letter) -> Reply:
        """Return the sum of the drawn clients' bounded contributions."""
        if self.site.setting.federation.trust != "server":
            raise RefusedError("this federation's sums are masked: sites send no plain ones")
        total = self.contribution(letter)
        return "round", self.failure, {SUM + name: leaf for name, leaf in total.items()}

    def contribution(self, letter: Letter) -> Arrays:
        """Compute a round's sum, or give the one that was computed for the same question."""
        number, ids = letter.round, self._drawn(letter)
        self._check_round(number)
        if self.state["answered"] < 0:
            self._check_runs()
        shared = _tree(letter.arrays, SHARED)
        question = digest(
            {**letter.arrays, "ids": ids, "round": np.array([number], dtype=np.int64)}
        )
        kept = self._answered(number)
        if kept is not None and kept[0] != question:
            raise RefusedError(
                f"round {number + 1} was answered to another question; a round is answered once"
            )
        self._settle(letter.body.get("counted"), number)
        total = self._make(number, question, shared, ids) if kept is None else kept[1]
        # On disk before it leaves: what is staged may be thrown away, that it was sent may not.
        if self.state["answered"] < number:
            self.keep(answered=number)
        return total

    def _make(self, number: int, question: str, shared: Tree, ids: Ids) -> Arrays:
        """Compute a round's sum; keep it, and the clients' new state, for when it is counted."""
        self.failure = {}
        try:
            total = self._work(number, shared, ids)
        except OSError:
            raise  # state could not be kept: nothing may leave
        except Exception as error:
            if isinstance(self.site.mechanisms[number], LocalGaussianSum):
                raise  # zeros without the clients' noise must not count as if they had it
            # Zeros, as from a site with nobody drawn: that it fell out must not tell others that
            # its clients were. The coordinator is told the error's name alone.
            self.site.note(f"round {number + 1}: {type(error).__name__}: {error}")
            self.failure = {"failed": type(error).__name__}
            self.store.discard()
            total = self._nothing(number, shared)
        buffer = io.BytesIO()
        told = np.frombuffer(question.encode(), dtype=np.uint8)
        # That it is zeros is told again with the same answer, after a restart too.
        about = {"question": told, "failed": np.array(self.failure.get("failed", ""))}
        np.savez(buffer, allow_pickle=False, **about, **{SUM + n: a for n, a in total.items()})
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
        if self.site.everybody and len(drawn) < len(own):
            raise RefusedError("some of this site's clients, where the plan takes all of them")
        return np.array(drawn, dtype=np.int64)

    def _check_round(self, number: int) -> None:
        if not 0 <= number < len(self.site.mechanisms):
            raise RefusedError(f"round {number + 1}: the plan has {len(self.site.mechanisms)}")
        if number <= self.state["settled"]:
            raise RefusedError(f"round {number + 1} is over at this site")
        answered = self.state["answered"]
        if number < answered:
            raise RefusedError(f"round {number + 1}, after round {answered + 1} was answered")
        if number == answered and self.store.sealed() != number:
            raise RefusedError(f"round {number + 1} was answered; a round is answered once")

    def _settle(self, counted: Any, number: int) -> None:
        """Bring personal state to the last round that counted."""
        if type(counted) is not int or not -1 <= counted < number:
            raise RefusedError("a question that does not say which answer counted last")
        settled, answered = self.state["settled"], self.state["answered"]
        if counted not in (settled, answered):
            # Every question says what became of the answer before it.
            raise RefusedError(
                f"round {counted + 1} counted last, it says; round {settled + 1} did, or "
                f"{answered + 1}"
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
            failed = str(kept["failed"]) if "failed" in kept.files else ""
            self.failure = {"failed": failed} if failed else {}
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
        return self._nothing(number, shared)

    def _nothing(self, number: int, shared: Tree) -> Arrays:
        """Return a sum of nobody's contributions."""
        contribution = self.site.plan.method.contribution(shared)
        template = {name: tuple(leaf.shape) for name, leaf in contribution.items()}
        totals = self.site.mechanisms[number].totals(template)
        return {name: np.zeros(shape) for name, shape in totals.items()}

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
        state = {**self.state, **facts}
        # First on disk: a state that is only remembered would let an answer leave unnoted.
        write_atomically(self.folder / "state.json", json.dumps(state).encode())
        self.state = state


def _tree(arrays: Arrays, prefix: str) -> Tree:
    return {
        name.removeprefix(prefix): torch.from_numpy(array)
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def _read_json(path: Path, otherwise: dict[str, Any]) -> dict[str, Any]:
    if not path.exists():
        return otherwise
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else otherwise


def expected_tree(prefix: str, tree: Tree) -> dict[str, Expected]:
    """Say what arrays a tree travels as."""
    return {
        prefix + name: Expected(str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape))
        for name, leaf in tree.items()
    }
