"""A site of a federation: its clients' half of every round, and their state on its own disk.

A site answers requests of the coordinator, and of no other party:

- `handshake`: it has the same agreement, and takes part in this run;
- `round`: the sum of the clipped contributions of its drawn clients;
- `keys`, `shares`, `masked`, `unmask`: the same under secure aggregation;
- `finish`: it makes its clients' models, and keeps them.

Everything that leaves a site is signed, and is a `Bounded` sum, a masked sum, or a short text that
does not depend on rows: a client that cannot be computed contributes zeros (`engine.rounds`), and
its error is written to errors.log at the site.

New personal state is staged when a round is answered. It is committed when the coordinator's next
request states that the answer is in the release, and discarded otherwise, as if the clients had not
been drawn. After a crash on either side a client continues from its last counted round, and a
client that missed rounds returns with the state that it had.

**Guarantee:** whatever is asked of a site, its clients contribute to each planned round of a run at
most once: the same request gets the same sum again; another request for the same round is
refused, and so are rounds that are not in the plan and runs beyond those that the site permits.
Assumes that the site's disk keeps what was written, and that the coordinator's key is not stolen.
Tests: tests/deploy/test_site.py.

**Secure aggregation.** The protocol is in `deploy.secagg`; here it is tied to rounds. Secrets are
in memory only: a site that was restarted answers that it has no session, and the coordinator begins
a new setup.

**Guarantee:** at most one sum of a round is unmasked, whatever a coordinator asks. The sum of a
round is the same however often it is masked (`SiteRun.contribution`). Before a site helps to
unmask a round it writes the list of survivors to its disk, and from then on helps to unmask that
round for no other list. Unmasking takes t = `Federation.sites_needed` of all n sites. Two lists of
one round would need some site to help with both, and an honest one if 2 t exceeds n by more than
the number of dishonest sites. Tests: tests/deploy/test_masked_rounds.py.
"""

import io
import json
import re
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.core.files import write_atomically
from coterie.core.rng import Rng
from coterie.core.tree import Tree
from coterie.data.federated import Clients, FederatedDataset
from coterie.deploy.federation import Agreement, check_seed, load_agreement
from coterie.deploy.keys import StateCipher, load_private
from coterie.deploy.messages import (
    Arrays,
    Envelope,
    Expected,
    Message,
    RefusedError,
    digest,
    peek,
    public_hex,
    sign,
    verify,
)
from coterie.deploy.results import save_models
from coterie.deploy.rows import load_rows, row_hints
from coterie.deploy.secagg.member import Member
from coterie.deploy.secagg.primitives import to_ring
from coterie.deploy.signatures import make_statement
from coterie.engine.rounds import (
    RoundState,
    absent_half,
    check_separate,
    client_half,
    no_contribution,
    personal_models,
)
from coterie.engine.store import Cipher, Ids, Store
from coterie.methods.base import per_row_leaves
from coterie.planning.plan import Speed
from coterie.privacy.billboard import Bounded
from coterie.privacy.validation import grid_steps
from coterie.runs.budget import Budget, spending_of
from coterie.runs.log import versions
from coterie.solvers.sgd import computed_in

SHARED, SUM, MASKED = "shared/", "sum/", "masked"
NO_SESSION = "no session"
MAX_SESSIONS = 256
"""Sums that one setup makes keys for, at most; the protocol itself allows more."""
Reply = tuple[str, dict[str, Any], Arrays]
Finished = Callable[[Path, Tree, Tree], None]
"""Takes the folder of a run, the clients' models (stacked) and the shared tree."""
_WORKING = 0.75
"""The share of the deadline in which a site computes; the rest is for the message."""
_RUN = re.compile(r"[0-9a-f]{16}")


def open_site(
    app: Path, config: Mapping[str, Any], report: Callable[[str], None] = lambda _: None
) -> "Site":
    """Return the site of an app folder under a SuperNode's `--node-config`.

    `report` takes hints about its rows, for the site only.
    """
    agreement, name = load_agreement(app), str(config["site"])
    pinned = str(config.get("agreement", agreement.digest))
    if pinned != agreement.digest:
        raise ValueError(
            f"the app has agreement {agreement.digest}, and this site permits only {pinned} "
            "(agreement=... in --node-config): review plan.toml and federation.toml of the app"
        )
    if agreement.plan.simulation_seed is not None and config.get("simulation") is not True:
        raise ValueError(
            "the plan has a seed, so its noise is known and protects nobody; a site takes part "
            "in a simulation only if it was started with simulation=true in --node-config"
        )
    train, test = load_rows(agreement, name, app, config)
    hints = row_hints(agreement, name, train)
    for hint in hints:
        report(hint)
    key = load_private(Path(str(config["key"])))
    cipher = StateCipher.of(key) if config.get("encrypted") is True else None
    return Site(
        name=name,
        agreement=agreement,
        rows=train,
        folder=Path(str(config["folder"])).resolve(),
        key=key,
        runs=int(config.get("runs", 1)),
        finished=save_models(agreement, name, train, test, hints),
        cipher=cipher,
        budget=Budget(Path(str(config["budget"])) if "budget" in config else None, report),
    )


@dataclass(kw_only=True, eq=False)
class Site:
    """Answers requests for the clients of one site.

    Its training rows are shaped like the whole federation; clients of other sites have none. The
    folder is its own, for the state and models of its clients. It takes part in so many runs, each
    of which spends its own epsilon; `finished` is called with the models when one ends. `budget`
    enters a run in the site's register before its first answer leaves; None enters nothing. With a
    `cipher` the state of its clients, and its last answer, are on disk only encrypted.
    """

    name: str
    agreement: Agreement
    rows: FederatedDataset
    folder: Path
    key: Ed25519PrivateKey
    runs: int = 1
    finished: Finished | None = None
    budget: Budget | None = None
    cipher: Cipher | None = None

    def __post_init__(self) -> None:
        self.plan, self.federation = self.agreement.plan, self.agreement.federation
        federation, name = self.federation, self.name
        if name not in federation.sites:
            raise ValueError(
                f"site {name!r} is not in the federation: expected one of "
                f"{', '.join(federation.sites)}"
            )
        if public_hex(self.key) != federation.sites[name].key:
            raise ValueError(
                f"the signing key of site {name} does not match the public key in federation.toml; "
                "give the private key that belongs to it"
            )
        check_seed(self.plan, federation)
        spec = self.agreement.spec
        self.ids = federation.client_ids[name]
        self.start = self.plan.method.init(
            spec, Rng.seeded(self.plan.simulation_seed or 0).at("init")
        )
        self.mechanisms = self.plan.mechanisms(spec.clients)
        self.takes_all = self.plan.sampler.participation(spec.clients).rate == 1
        self.plan.method.check(spec)
        check_separate(self.plan.method, spec)
        own = self.rows.only(self.ids)
        self.offsets = own.offsets
        # Targets that are equal at one site may differ over all sites, which no site can see.
        if bool((own.targets != own.targets[:1]).any()):
            self.plan.method.check(spec, data=own)
        self._run: SiteRun | None = None

    def answer(self, envelope: Envelope) -> Envelope:
        """Answer a request; a request that cannot be answered gets a reason, and no sum."""
        asked = _unverified(envelope)
        try:
            message = self._open(envelope)
            run = self._run_of(message)
            kind, body, arrays = _HANDLERS[message.kind](run, message)
        except RefusedError as error:
            kind, body, arrays = "refused", {"reason": str(error)}, {}
        except Exception as error:
            # Only its type: the text of an error may quote rows.
            self.log_error(f"{type(error).__name__}: {error}")
            kind, body, arrays = "failed", {"reason": type(error).__name__}, {}
        reply = Message(kind, asked.run, self.name, asked.round, asked.nonce, body, arrays)
        return sign(reply, self.key)

    def _open(self, envelope: Envelope) -> Message:
        kind = peek(envelope).kind
        if kind not in _HANDLERS:
            raise RefusedError(f"request of unknown kind {kind[:20]!r}")
        carries_tree = kind in ("round", MASKED, "finish")
        expected = expected_tree(self.start) if carries_tree else {}
        message = verify(envelope, self.federation.coordinator_key, expected)
        if message.site not in ("", self.name):
            raise RefusedError(f"request is for another site than {self.name}")
        if len(message.nonce) < 16 or not _RUN.fullmatch(message.run):
            raise RefusedError("request has no nonce or no run")
        return message

    def _run_of(self, message: Message) -> "SiteRun":
        if self._run is not None and self._run.name == message.run:
            return self._run
        joins = message.kind == "handshake"
        if not joins and not (self.folder / message.run / "run.json").exists():
            raise RefusedError("request is of a run that this site never joined")
        if joins and message.body.get("agreement") != self.agreement.digest:
            raise RefusedError("another plan or federation than this site has")
        self._run = SiteRun(self, message.run)
        return self._run

    def log_error(self, text: str) -> None:
        """Append an error to errors.log in the site's folder."""
        line = text.replace("\n", " ").encode(errors="backslashreplace") + b"\n"
        with suppress(OSError):  # a full disk must not prevent the answer
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "errors.log").open("ab") as file:
                file.write(line)


@dataclass
class Masking:
    """One setup of a site: its member of the protocol, and the round of each session."""

    setup: str
    member: Member
    advertisement: dict[str, str]
    rounds: dict[int, int] = field(default_factory=dict)


class SiteRun:
    """A site's part in one run: its files, and the work of a round."""

    def __init__(self, site: Site, name: str) -> None:
        self.site, self.name = site, name
        self.folder = site.folder / name
        self._join()
        state = site.plan.method.init_client_state(site.start, site.agreement.spec, 1)
        self.store = Store(
            state,
            len(site.ids),
            self.folder / "personal",
            per_row=per_row_leaves(state),
            offsets=site.offsets,
            cipher=site.cipher,
        )
        seed = site.plan.simulation_seed
        self.rng = Rng.fresh() if seed is None else Rng.seeded(seed)
        fresh: dict[str, Any] = {"counted": -1, "answered": -1, "unmasked": {}}
        self.state = {**fresh, **_read_json(self.folder / "state.json", {})}
        if self.store.is_new and self.state["counted"] >= 0:
            # Fresh state would replace the old one, and its clients would start again unnoticed.
            raise RefusedError("personal state of this site is missing; restore its folder")
        self.masking: Masking | None = None

    def _join(self) -> None:
        """Join a run, unless the site has taken part in as many as it permits."""
        agreement = self.site.agreement
        note = self.folder / "run.json"
        rows = {"fingerprint": self.site.rows.fingerprint()}
        if note.exists():
            if _read_json(note, {}).get("agreement") != agreement.digest:
                raise RefusedError("this site joined the run under another plan")
            if _read_json(self.folder / "rows.json", rows) != rows:
                raise RefusedError("rows of this site changed after it joined the run")
            return
        self._check_runs()
        self._account(enter=False)
        self.folder.mkdir(parents=True, exist_ok=True)
        # A fingerprint of private rows: in a file of its own, and never sent.
        write_atomically(self.folder / "rows.json", json.dumps(rows).encode())
        about = {
            "agreement": agreement.digest,
            "site": self.site.name,
            # What the run spends of its clients' budget at most, for the site's own account.
            "guarantee": agreement.guarantee.to_json(),
        }
        write_atomically(note, json.dumps(about, allow_nan=False).encode())

    def _check_runs(self) -> None:
        """Refuse a run beyond those that the site permits; runs that got an answer count."""
        states = set(self.site.folder.glob("*/state.json")) - {self.folder / "state.json"}
        answered = sum(_read_json(path, {}).get("answered", -1) >= 0 for path in states)
        if answered >= self.site.runs:
            # Of any plan: a coordinator that sends another plan must not get another budget.
            raise RefusedError(
                f"this site took part in {answered} runs, and permits {self.site.runs}: each run "
                "spends its own epsilon (runs=... in --node-config)"
            )

    def _account(self, *, enter: bool) -> None:
        """Check the total of this site's clients; enter the run before its first answer leaves."""
        site, budget = self.site, self.site.budget
        if budget is None:
            return
        names = [site.rows.names[one] for one in site.ids]
        spending = spending_of(site.plan, names, site.agreement.guarantee)
        try:
            if enter:
                budget.enter(spending, self.folder)
            else:
                budget.check(spending)
        except ValueError as error:
            site.log_error(str(error))  # what was spent before is the site's own affair
            raise RefusedError("the budget register of this site does not permit the run") from None

    def handshake(self, message: Message) -> Reply:
        """Confirm that this site takes part, and say what it computes with."""
        body = {"agreement": self.site.agreement.digest, "versions": versions()}
        return "handshake", body, {}

    def round(self, message: Message) -> Reply:
        """Return the sum of the drawn clients' clipped contributions."""
        if self.site.federation.masked:
            raise RefusedError("sums of this federation are masked: sites send no plain ones")
        total = self.contribution(message)
        return "round", {}, {SUM + name: leaf for name, leaf in total.items()}

    def contribution(self, message: Message) -> Arrays:
        """Compute the sum of a round, or return the one computed for the same request."""
        number, ids = message.round, self._drawn(message)
        self._check_round(number)
        self._check_schedule(number, ids)
        if self.state["answered"] < 0:
            self._check_runs()
            self._account(enter=True)
        shared = _tree(message.arrays)
        request = digest(
            {**message.arrays, "ids": ids, "round": np.array([number], dtype=np.int64)}
        )
        stored = self._stored(number)
        if stored is not None and stored[0] != request:
            raise RefusedError(
                f"round {number + 1} was answered to another request; a round is answered once"
            )
        self._commit(message.body.get("counted"), number)
        total = self._compute(number, request, shared, ids) if stored is None else stored[1]
        # On disk before it leaves: staged state may be discarded, the fact of sending may not.
        if self.state["answered"] < number:
            self.save(answered=number)
        return total

    def _compute(self, number: int, request: str, shared: Tree, ids: Ids) -> Arrays:
        """Compute the sum of a round; store it, and stage the clients' new state."""
        total = self._clients_half(number, shared, ids)
        buffer = io.BytesIO()
        asked = np.frombuffer(request.encode(), dtype=np.uint8)
        arrays = {SUM + name: leaf for name, leaf in total.items()}
        np.savez(buffer, allow_pickle=False, request=asked, **arrays)
        content, cipher = buffer.getvalue(), self.site.cipher
        content = content if cipher is None else cipher.encrypt("answer.npz", content)
        write_atomically(self.folder / "answer.npz", content)
        self.store.seal(number)
        return total

    def _drawn(self, message: Message) -> Ids:
        drawn = message.body.get("clients")
        own = set(self.site.ids.tolist())
        if not isinstance(drawn, list) or any(type(one) is not int for one in drawn):
            raise RefusedError("request has no list of clients")
        if sorted(set(drawn)) != drawn or not own.issuperset(drawn):
            raise RefusedError("clients of another site, listed twice, or out of order")
        if self.site.takes_all and len(drawn) < len(own):
            raise RefusedError("only some of this site's clients, where the plan takes all of them")
        return np.array(drawn, dtype=np.int64)

    def _check_schedule(self, number: int, drawn: Ids) -> None:
        """Refuse other clients than those whose turn it is, under a public schedule."""
        spec = self.site.agreement.spec
        scheduled = self.site.plan.sampler.scheduled(spec.clients, number)
        if scheduled is None:
            return
        if drawn.tolist() != np.intersect1d(scheduled, self.site.ids).tolist():
            raise RefusedError(f"other clients than those whose turn is in round {number + 1}")

    def _check_round(self, number: int) -> None:
        if not 0 <= number < len(self.site.mechanisms):
            raise RefusedError(f"round {number + 1}: the plan has {len(self.site.mechanisms)}")
        if number <= self.state["counted"]:
            raise RefusedError(f"round {number + 1} is over at this site")
        answered = self.state["answered"]
        if number < answered:
            raise RefusedError(f"round {number + 1}, after round {answered + 1} was answered")
        if number == answered and self.store.sealed() != number:
            raise RefusedError(f"round {number + 1} was answered; a round is answered once")

    def _commit(self, counted: Any, number: int) -> None:
        """Bring personal state to the last round that counted."""
        if type(counted) is not int or not -1 <= counted < number:
            raise RefusedError("request does not state which answer counted last")
        last, answered = self.state["counted"], self.state["answered"]
        if counted not in (last, answered):
            # Every request states the outcome of the answer before it.
            raise RefusedError(
                f"request states that round {counted + 1} counted last; expected round {last + 1} "
                f"or {answered + 1}"
            )
        staged = self.store.sealed()
        if staged is not None and staged <= counted:
            # Committed if it is the round that counted, else discarded.
            self.store.recover(counted + 1)
        elif staged is not None and staged < number:
            self.store.discard()
        if counted > last:
            self.save(counted=counted)

    def _stored(self, number: int) -> tuple[str, Arrays] | None:
        """Return the request and the sum of a round that was answered and is still staged."""
        path = self.folder / "answer.npz"
        if self.store.sealed() != number or not path.exists():
            return None
        content, cipher = path.read_bytes(), self.site.cipher
        content = content if cipher is None else cipher.decrypt("answer.npz", content)
        with np.load(io.BytesIO(content), allow_pickle=False) as stored:
            total = {n.removeprefix(SUM): stored[n] for n in stored.files if n.startswith(SUM)}
            return stored["request"].tobytes().decode(), total

    def _clients_half(self, number: int, shared: Tree, ids: Ids) -> Arrays:
        """Compute the clients' clipped contributions and their sum; stage their new state.

        Clients with fewer rows come first. Those that are not done when most of the deadline is
        over contribute zeros: a late answer would drop all clients of the site.
        """
        plan, mechanism = self.site.plan, self.site.mechanisms[number]
        state = RoundState(plan.method, mechanism, shared, self.rng, number, plan.simulation_seed)
        self.store.discard()
        total: Bounded | None = None
        end = time.monotonic() + _WORKING * self.site.federation.deadline
        for block in self.site.rows.blocks(ids, Speed().clients(shared)):
            local, before = self._personal(block, shared)
            in_time = time.monotonic() < end
            half = (client_half if in_time else no_contribution)(state, before, block)
            if in_time:
                self.store.stage(local, half.personal)
            else:
                self.site.log_error(f"round {number + 1}: no time for {len(block)} clients")
            for error in half.errors:
                self.site.log_error(f"round {number + 1}: {error}")
            total = half.part if total is None else total + half.part
        shares = absent_half(state, self.site.agreement.spec, ids, self.site.ids)
        if shares is not None:
            total = shares if total is None else total + shares
        if total is not None:
            return {name: leaf.numpy() for name, leaf in total.total.items()}
        return self._zeros(number)

    def _personal(self, block: Clients, shared: Tree) -> tuple[Ids, Tree]:
        """Return the places of stacked clients in the store, and their personal state."""
        spec, method = self.site.agreement.spec, self.site.plan.method
        local: Ids = block.ids.numpy() - int(self.site.ids[0])
        return local, self.store.take(local, lambda n: method.init_client_state(shared, spec, n))

    def _zeros(self, number: int) -> Arrays:
        """Return the sum over no clients."""
        contribution = self.site.plan.method.contribution(self.site.agreement.spec)
        template = {name: tuple(leaf.shape) for name, leaf in contribution.items()}
        totals = self.site.mechanisms[number].totals(template)
        return {name: np.zeros(shape) for name, shape in totals.items()}

    def finish(self, message: Message) -> Reply:
        """Make the clients' models from the last shared tree; they stay here."""
        self._commit(message.body.get("counted"), len(self.site.mechanisms))
        shared, method = _tree(message.arrays), self.site.plan.method
        made: dict[str, list[torch.Tensor]] = {}
        places: list[Ids] = []
        stream = self.rng.at("personalise")
        for block in self.site.rows.blocks(self.site.ids, Speed().clients(shared)):
            local, personal = self._personal(block, shared)
            with computed_in("float32"):
                rows, errors = personal_models(method, shared, personal, block, stream)
            for error in errors:
                self.site.log_error(f"models: {error}")
            places.append(local)
            for name, row in rows.items():
                made.setdefault(name, []).append(row)
        order = torch.from_numpy(np.argsort(np.concatenate(places)))
        models = {name: torch.cat(rows)[order] for name, rows in made.items()}
        if self.site.finished is not None:
            self.site.finished(self.folder, models, shared)
        site = self.site
        statement = make_statement(site.agreement, self.name, site.name, site.key)
        return "finish", {"statement": statement}, {}

    def save(self, **fields: Any) -> None:
        """Store fields of this run's state on the site's disk."""
        state = {**self.state, **fields}
        # Disk first: with a state in memory only, an answer could leave unrecorded.
        write_atomically(self.folder / "state.json", json.dumps(state).encode())
        self.state = state

    def keys(self, message: Message) -> Reply:
        """Begin a setup: make keys for many sessions, and advertise the public ones."""
        if not self.site.federation.masked:
            raise RefusedError("sums of this federation are not masked")
        setup, sessions = message.body.get("setup"), message.body.get("sessions")
        if type(setup) is not str or type(sessions) is not int or not 1 <= sessions <= MAX_SESSIONS:
            raise RefusedError("setup without a name or a number of sessions")
        if self.masking is not None and self.masking.setup == setup:
            return "keys", {"advertisement": self.masking.advertisement}, {}
        unmasked: dict[Hashable, list[str]] = {
            int(number): names for number, names in self.state["unmasked"].items()
        }
        member, advertisement = Member.begin(
            self.name, setup, self.site.name, sessions, self.site.key, unmasked
        )
        self.masking = Masking(setup, member, advertisement)
        return "keys", {"advertisement": advertisement}, {}

    def shares(self, message: Message) -> Reply:
        """Share secrets with the sites whose keys came, each under its own key."""
        masking, federation = self._masking(message), self.site.federation
        advertisements = message.body.get("advertisements")
        if not isinstance(advertisements, dict):
            raise RefusedError("request for shares without keys")
        keys = {name: site.public_key for name, site in federation.sites.items()}
        dealt = masking.member.share(advertisements, keys, federation.sites_needed)
        return "shares", {"shares": dealt}, {}

    def masked(self, message: Message) -> Reply:
        """Return the sum of the round under this session's masks."""
        masking, session = self._masking(message), _session(message)
        if masking.rounds.get(session, message.round) != message.round:
            raise RefusedError("session belongs to another round")
        if not masking.member.ready:
            dealt = message.body.get("shares")
            masking.member.receive(dealt if isinstance(dealt, dict) else {})
        total = self.contribution(message)
        mechanism = self.site.mechanisms[message.round]
        grid = grid_steps(mechanism, {name: tuple(leaf.shape) for name, leaf in total.items()})
        if grid is None:
            raise RefusedError("sums without noise are on no grid, and cannot be masked")
        masking.rounds[session] = message.round
        context = mask_context(message.round, message.arrays)
        vector = masking.member.mask(session, to_ring(total, grid), message.round, context)
        return MASKED, {}, {MASKED: vector}

    def unmask(self, message: Message) -> Reply:
        """Reveal the shares that unmask the sum of a round, for one list of survivors."""
        masking, session = self._masking(message), _session(message)
        survivors = message.body.get("survivors")
        if masking.rounds.get(session) != message.round:
            raise RefusedError("session is not of this round")
        if not isinstance(survivors, list) or any(type(one) is not str for one in survivors):
            raise RefusedError("request has no list of survivors")
        unmasked, number = self.state["unmasked"], str(message.round)
        if unmasked.get(number, sorted(survivors)) != sorted(survivors):
            raise RefusedError(f"round {message.round + 1} was unmasked for other survivors")
        self._check_noise(message.round, survivors)
        revealed = masking.member.reveal(session, survivors)
        # On disk before it leaves; a list that the member refuses is not stored.
        self.save(unmasked={**unmasked, number: sorted(survivors)})
        return "unmask", {"revealed": revealed}, {}

    def _check_noise(self, number: int, survivors: list[str]) -> None:
        """Refuse to unmask a sum of fewer clients than those whose noise the guarantee needs."""
        needed = self.site.mechanisms[number].needed
        sites = self.site.federation.sites
        hosted = sum(len(sites[one].clients) for one in survivors if one in sites)
        if hosted < needed:
            raise RefusedError(f"survivors have {hosted} clients, expected at least {needed}")

    def _masking(self, message: Message) -> Masking:
        if self.masking is None or message.body.get("setup") != self.masking.setup:
            raise RefusedError(f"{NO_SESSION}: this site has no such setup")
        return self.masking


_HANDLERS: Mapping[str, Callable[[SiteRun, Message], Reply]] = {
    "handshake": SiteRun.handshake,
    "round": SiteRun.round,
    "keys": SiteRun.keys,
    "shares": SiteRun.shares,
    MASKED: SiteRun.masked,
    "unmask": SiteRun.unmask,
    "finish": SiteRun.finish,
}


def mask_context(round: int, arrays: Arrays) -> str:
    """Return a hash of what a round is about: its number and the shared tree.

    It goes into the masks between sites. Masks of sites that received different trees or rounds do
    not cancel, so a coordinator that sends one site another tree, or another round, unmasks
    nothing.
    """
    return digest({**arrays, "round": np.array([round], dtype=np.int64)})


def expected_tree(tree: Tree) -> dict[str, Expected]:
    """Return the arrays that carry a shared tree."""
    return {
        SHARED + name: Expected(str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape))
        for name, leaf in tree.items()
    }


def _session(message: Message) -> int:
    session = message.body.get("session")
    if type(session) is not int or session < 0:
        raise RefusedError(f"{NO_SESSION}: the request names none")
    return session


def _unverified(envelope: Envelope) -> Message:
    try:
        return peek(envelope)
    except RefusedError:
        return Message("", "", "")


def _tree(arrays: Arrays) -> Tree:
    return {name.removeprefix(SHARED): torch.from_numpy(a) for name, a in arrays.items()}


def _read_json(path: Path, otherwise: dict[str, Any]) -> dict[str, Any]:
    if not path.exists():
        return otherwise
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else otherwise
