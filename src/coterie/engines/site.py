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

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.data.federated import FederatedDataset
from coterie.engine.store import Ids
from coterie.engines import site_masks
from coterie.engines.federation import Federation
from coterie.engines.site_run import SHARED, Reply, SiteRun, expected_tree
from coterie.plan import Plan
from coterie.rng import Rng
from coterie.tree import Tree
from coterie.wire import Letter, Parcel, RefusedError, peek, public_hex, seal, unseal

_RUN = re.compile(r"[0-9a-f]{16}")
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
        if public_hex(setting.key) != federation.sites[name].key:
            raise ValueError(
                f"the signing key of site {name} is not the one that federation.toml lists; give "
                "the private key that belongs to it"
            )
        if self.plan.simulation_seed is not None and not federation.simulation:
            raise ValueError(
                f"simulation_seed = {self.plan.simulation_seed}: noise of a known seed protects "
                "nobody, and the federation is no simulation; leave the seed out of plan.toml"
            )
        spec = federation.spec
        self.ids = federation.numbers[name]
        self.start = self.plan.method.init(
            spec, Rng.seeded(self.plan.simulation_seed or 0).at("init")
        )
        self.mechanisms = self.plan.mechanisms(spec.clients)
        self.everybody = self.plan.sampler.participation(spec.clients).rate == 1
        self.plan.method.check(spec)
        own = _own(setting.rows, self.ids)
        # Targets that are alike at one site may differ over all: only all together know.
        if bool((own.targets != own.targets[:1]).any()):
            self.plan.method.check(spec, data=own)
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
            self.note(f"{type(error).__name__}: {error}")
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
        if len(letter.nonce) < 16 or not _RUN.fullmatch(letter.run):
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

    def note(self, text: str) -> None:
        """Keep what went wrong where the rows are kept."""
        line = text.replace("\n", " ").encode(errors="backslashreplace") + b"\n"
        with suppress(OSError):  # a full disk must not end the answer
            self.setting.folder.mkdir(parents=True, exist_ok=True)
            with (self.setting.folder / "errors.log").open("ab") as file:
                file.write(line)


_HANDLERS: Mapping[str, Callable[[SiteRun, Letter], Reply]] = {
    "hello": SiteRun.hello,
    "round": SiteRun.round,
    "keys": site_masks.keys,
    "shares": site_masks.shares,
    "masked": site_masks.masked,
    "unmask": site_masks.unmask,
    "finish": SiteRun.finish,
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
