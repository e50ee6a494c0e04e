"""The coordinator of a federation: the server's half of every round, over any transport.

The loop is the simulator's: draw a cohort, release the noisy sum of the contributions, update the
shared tree. In between messages travel, and may be late, lost, damaged or hostile:

- The ledger charges a release before any request is sent (`Billboard.charged`). Neither a crash nor
  a silent site leads to a release that was not charged. A round without a release is asked again,
  and is not charged again.
- A cohort is drawn once for a round and kept until its release is out. A new draw after a failure
  would make the clients of the release depend on who answers.
- Answers are admitted one site at a time (`billboard.admit`). Anything that is not an answer to
  this request, signed by this site, is rejected, counted and logged.
- A round that fewer than the planned minimum of clients answer is asked again. Then the run stops,
  to be resumed when sites are back. Under a hidden cohort all sites are asked, and those with no
  drawn clients send zeros. What counts is how many clients the answering sites host, drawn or not.
  Otherwise sites that stay silent on purpose would learn from a repeated request whether clients of
  other sites were drawn. With `minimum = 0` only sites with drawn clients are asked, once.

**Secure aggregation.** The coordinator sees sums over sites and nothing else. A setup (two
messages) makes keys and shares for many sessions; a round then takes two messages: masked sums, and
the shares that unmask their sum. Every site is asked in every round and sends masked zeros if none
of its clients was drawn, so the protocol does not reveal who was drawn elsewhere, only which sites
stayed to the end. A round that too few answer is asked again in a new session: nothing of it was
unmasked. A round whose unmasking fails is *void*: sites unmask a round for one list of survivors
only (`deploy.site`), so it is released without contributions and charged like any other. Where
clients add the noise, a round is unmasked only if at least as many clients answered as the
guarantee relies on.

**Guarantee:** that of the plan, for every client of a site that follows the protocol, whatever
other sites send: `billboard.admit`. Only the coordinator sees who answered, and when. Assumes that
one client's rows do not decide whether its site answers in time: `Agreement.guarantee` states it.
Tests: tests/deploy/test_coordinator.py, tests/deploy/test_masked_rounds.py.
"""

import json
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from coterie.core.files import explain_disk_errors, write_atomically
from coterie.core.rng import Rng
from coterie.core.signals import as_interrupt, raise_if_stopped
from coterie.core.tree import Tree
from coterie.deploy.federation import FEDERATION, Agreement, check_deployable
from coterie.deploy.keys import load_private
from coterie.deploy.messages import (
    MAX_HEADER,
    Arrays,
    Envelope,
    Expected,
    Message,
    RefusedError,
    peek,
    public_hex,
    sign,
    verify,
)
from coterie.deploy.results import finish, finished_summary
from coterie.deploy.secagg.member import sessions_within
from coterie.deploy.secagg.primitives import from_ring
from coterie.deploy.secagg.unmask import unmask_sum
from coterie.deploy.signatures import Statement, is_statement, write_signatures
from coterie.deploy.site import MASKED, MAX_SESSIONS, NO_SESSION, SHARED, SUM, mask_context
from coterie.engine.rounds import server_half
from coterie.engine.store import Ids
from coterie.privacy.billboard import Bounded, admit, admit_sum
from coterie.privacy.entropy import open_entropy
from coterie.privacy.ledger import locked
from coterie.privacy.mechanisms import Mechanism, Shapes, count_numbers
from coterie.privacy.validation import grid_steps
from coterie.runs.folder import check_model, claim
from coterie.runs.log import Log, versions

STATE = "coordinator.json"
Answer = Envelope | str
"""What came back for a request: an envelope, or the reason why there is none."""
Expectations = Mapping[str, Mapping[str, Expected]]
"""The arrays that answers carry, by kind; none where a kind is not listed."""
LogEvent = Callable[..., None]
"""Takes an event and its fields: the log of the run, which is private."""
Report = Callable[[str], None]
_NOTHING: Expectations = {}
_TROUBLE = ("silent", "rejected", "failed", "scaled", "zeroed")


class IncompleteRoundError(RuntimeError):
    """Raised when too few clients answered a round; the run can be resumed."""


class Transport(Protocol):
    """Carries envelopes to sites and back."""

    def connect(
        self,
        handshake: Callable[[], Envelope],
        identify: Callable[[Envelope], str],
        sites: int,
        seconds: float,
    ) -> set[str]:
        """Send handshakes until so many sites are identified or time is up; return the sites."""

    def ask(self, requests: Mapping[str, Envelope], seconds: float) -> Iterator[tuple[str, Answer]]:
        """Send requests; yield answers as they come, until all did or time is up."""


@dataclass
class RoundStatistics:
    """The outcome of a round's requests.

    `asked` and `answered` count drawn clients, the others sites: `rejected`, `failed` and `silent`
    those of the last attempt, `scaled` and `zeroed` sums that were bounded. `void` is 1 if masked
    sums came and could not be unmasked.
    """

    asked: int = 0
    answered: int = 0
    rejected: int = 0
    failed: int = 0
    silent: int = 0
    scaled: int = 0
    zeroed: int = 0
    void: int = 0

    def new_attempt(self) -> None:
        """Reset the counts of sites; sums that were admitted stay counted."""
        self.rejected = self.failed = self.silent = 0

    def counts(self) -> dict[str, Any]:
        """Return the counts for the log, without zeros except for asked and answered."""
        always = ("asked", "answered")
        return {name: count for name, count in vars(self).items() if count or name in always}


@dataclass
class CoordinatorState:
    """What the coordinator stores between rounds, besides ledger and releases; private.

    `pending` lists the sites whose answers are in the release that is being made, `counted` the
    last round in which each site's answer was in the release.
    """

    run: str = field(default_factory=lambda: secrets.token_hex(8))
    round: int = -1
    cohort: list[int] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    counted: dict[str, int] = field(default_factory=dict)


@dataclass(kw_only=True, eq=False)
class Coordinator:
    """Coordinates one run in a run folder; `key` signs requests, `log` takes events."""

    agreement: Agreement
    folder: Path
    key: Ed25519PrivateKey
    transport: Transport
    log: LogEvent

    def __post_init__(self) -> None:
        self.plan, self.federation = self.agreement.plan, self.agreement.federation
        spec, seed = self.agreement.spec, self.plan.simulation_seed
        self._check()
        self.shared = self.plan.method.init(spec, Rng.seeded(seed or 0).at("init"))
        self.template: Shapes = {
            name: tuple(leaf.shape) for name, leaf in self.plan.method.contribution(spec).items()
        }
        self.billboard = self.plan.open(spec, self.folder)
        self.is_hidden = self.plan.hides_cohort(spec.clients)
        self.statistics = RoundStatistics()
        self.reasons: dict[str, str] = {}
        self.statements: dict[str, Statement] = {}
        self._handshakes: set[str] = set()
        masked = self.federation.masked
        self._ask_parts = MaskedRounds(self).parts if masked else self._parts
        try:
            self.state = self._recover()
        except BaseException:
            self.billboard.ledger.close()
            raise

    def _check(self) -> None:
        """Raise `ValueError` for a plan that cannot run, before anything is written or sent."""
        plan, federation = self.plan, self.federation
        if public_hex(self.key) != federation.coordinator:
            raise ValueError(
                "the coordinator's signing key does not match the public key in federation.toml; "
                "give the private key that belongs to it"
            )
        check_deployable(plan, federation)
        if federation.masked:
            for mechanism in dict.fromkeys(plan.mechanisms(federation.spec.clients)):
                mechanism.check_secure_sum()
        plan.method.check(self.agreement.spec, cohort=plan.sampler.largest(federation.spec.clients))

    def run(self, observe: Callable[[int, Tree, RoundStatistics], None] | None = None) -> Tree:
        """Run the rounds that remain; return the shared tree after the last."""
        try:
            self._connect()
            for number in range(self.billboard.next, self.plan.posts):
                raise_if_stopped()
                self.statistics = RoundStatistics()
                cohort = self._cohort(number)
                with self.billboard.charged(number) as release:
                    for part in self._ask_parts(number, cohort):  # the client's half, at the sites
                        release.add(part)
                    self.shared, _ = server_half(self.plan.method, self.shared, release)
                self._count(number)
                if observe is not None:
                    observe(number, self.shared, self.statistics)
            self._finish()
            return self.shared
        finally:
            self.billboard.ledger.close()

    def request(
        self, kind: str, site: str, number: int = -1, body: Mapping[str, Any] | None = None
    ) -> Message:
        """Return a request; the kinds that need the shared tree carry it."""
        arrays: Arrays = {}
        if kind in ("round", MASKED, "finish"):
            arrays = {SHARED + name: leaf.cpu().numpy() for name, leaf in self.shared.items()}
        nonce = secrets.token_hex(16)
        return Message(kind, self.state.run, site, number, nonce, dict(body or {}), arrays)

    def ask(
        self, requests: Mapping[str, Message], expected: Expectations = _NOTHING
    ) -> Iterator[tuple[str, Message]]:
        """Send requests; yield the valid answers, count and log all others."""
        envelopes = {site: sign(message, self.key) for site, message in requests.items()}
        silent, self.reasons, started = set(requests), {}, time.monotonic()
        for site, answer in self.transport.ask(envelopes, self.federation.deadline):
            if site not in silent:
                self.reject(site, "a second answer, or a site that was not asked")
                continue
            silent.discard(site)
            try:
                message = self._read(requests[site], answer, expected)
            except RefusedError as error:
                self.reject(site, str(error))
                continue
            if message.kind in ("refused", "failed"):
                self._declined(site, message)
                continue
            yield site, message
        self.statistics.silent += len(silent)
        if self.federation.steady:
            time.sleep(max(0.0, self.federation.deadline - (time.monotonic() - started)))

    def _read(self, request: Message, answer: Answer, expected: Expectations) -> Message:
        if isinstance(answer, str):
            raise RefusedError(answer)
        kind = peek(answer).kind
        arrays = expected.get(kind, {}) if kind == request.kind else {}
        message = verify(answer, self.federation.sites[request.site].public_key, arrays)
        if message.kind not in (request.kind, "refused", "failed"):
            raise RefusedError(f"answer is of another kind than {request.kind}")
        for name in ("run", "site", "round", "nonce"):
            if getattr(message, name) != getattr(request, name):
                raise RefusedError(f"answer is to another request: its {name} differs")
        return message

    def reject(self, site: str, reason: str) -> None:
        """Count and log an invalid answer."""
        self.statistics.rejected += 1
        self.log("rejected", site=site, reason=reason)

    def _declined(self, site: str, message: Message) -> None:
        self.statistics.failed += 1
        reason = str(message.body.get("reason", ""))[:200]
        self.reasons[site] = reason
        self.log("declined", site=site, kind=message.kind, reason=reason)

    def handshake(self) -> Envelope:
        """Return a handshake for a node whose site is not known yet."""
        message = self.request("handshake", "", body={"agreement": self.agreement.digest})
        self._handshakes.add(message.nonce)
        return sign(message, self.key)

    def identify(self, envelope: Envelope) -> str:
        """Return the site that answered a handshake; refuse one that has another agreement."""
        site = peek(envelope).site
        if site not in self.federation.sites:
            raise RefusedError("site is not in the federation")
        message = verify(envelope, self.federation.sites[site].public_key, {})
        if message.run != self.state.run or message.nonce not in self._handshakes:
            raise RefusedError("answer is not to a handshake of this run")
        self._handshakes.discard(message.nonce)  # a replay of it identifies nobody
        if message.kind != "handshake" or message.body.get("agreement") != self.agreement.digest:
            reason = str(message.body.get("reason", message.kind))[:200]
            raise RefusedError(f"{site} does not take part: {reason}")
        self._compare(site, message.body.get("versions"))
        return site

    def _compare(self, site: str, theirs: Any) -> None:
        """Log in which versions a site differs: its sums may then differ in their last bits."""
        found, here = theirs if isinstance(theirs, dict) else {}, versions()
        other = [
            f"{name} {str(found.get(name, 'unknown'))[:12]}, here {here[name][:12]}"
            for name in here
            if found.get(name) != here[name]
        ]
        if other:
            self.log("other_version", site=site, reason="; ".join(other))

    def _connect(self) -> None:
        """Wait for the sites: all of them, or those that answer before the deadline."""
        wanted, seconds = len(self.federation.sites), self.federation.deadline
        found = self.transport.connect(self.handshake, self.identify, wanted, seconds)
        self.log("handshake", sites=sorted(found))
        if not found:
            raise IncompleteRoundError(
                f"none of {wanted} sites answered within {seconds:g} s; start their SuperNodes, "
                "check keys and plan, and run again: the run resumes. See log.jsonl here, and "
                "worker.log in a site's folder. A site without worker.log received no request: see "
                "the output of its SuperNode. On a machine with less than a fifth of a core for "
                "each site Flower restarts its apps before they begin"
            )

    def _cohort(self, number: int) -> Ids:
        """Draw the cohort of a round, or return the one drawn before a crash."""
        if self.state.round != number:
            entropy = open_entropy(self.plan.simulation_seed, "cohort", number)
            drawn = self.plan.sampler.draw(self.federation.spec.clients, entropy, number)
            self.state.round, self.state.cohort = number, drawn.tolist()
            self.state.pending = []
            self._save()
        return np.array(self.state.cohort, dtype=np.int64)

    def drawn(self, cohort: Ids) -> dict[str, list[int]]:
        """Return the clients of a cohort by site, without sites that have none."""
        by_site = {
            site: np.intersect1d(cohort, ids).tolist()
            for site, ids in self.federation.client_ids.items()
        }
        return {site: clients for site, clients in by_site.items() if clients}

    def _parts(self, number: int, cohort: Ids) -> Iterator[Bounded]:
        """Ask sites for their sums, and again those that are missing while too few answered."""
        drawn, mechanism = self.drawn(cohort), self.billboard.mechanism(number)
        self.statistics.asked = len(cohort)
        totals = mechanism.totals(self.template)
        sums = {SUM + name: Expected("float64", tuple(shape)) for name, shape in totals.items()}
        ask_once = self.is_hidden and self.federation.minimum == 0
        ask_all = self.is_hidden and not ask_once
        missing = {site: drawn.get(site, []) for site in self.federation.sites if ask_all}
        missing, answered = missing or dict(drawn), set[str]()
        for attempt in range(1 if ask_once else self.federation.patience + 1):
            raise_if_stopped()
            self.statistics.new_attempt()
            requests = {
                site: self.request(
                    "round", site, number, {"clients": ids, "counted": self.counted(site)}
                )
                for site, ids in missing.items()
            }
            for site, message in self.ask(requests, {"round": sums}):
                ids = np.array(missing.pop(site), dtype=np.int64)
                yield self._admit(site, mechanism, message.arrays, ids)
                answered.add(site)
            self.statistics.answered = sum(len(drawn.get(site, ())) for site in answered)
            if self.is_enough(mechanism, answered, cohort):
                break
            self.log_incomplete(number, attempt)
        else:
            raise self.incomplete(number, answered, cohort)
        self.set_pending(sorted(answered))

    def _admit(self, site: str, mechanism: Mechanism, arrays: Arrays, ids: Ids) -> Bounded:
        """Return a site's sum within its bounds; count and log what had to be clipped."""
        totals = {name.removeprefix(SUM): array for name, array in arrays.items()}
        part, verdict = admit(mechanism, totals, ids, self.template)
        if not verdict.taken:
            self.statistics.zeroed += verdict.zeroed
            self.statistics.scaled += not verdict.zeroed
            self.log("clipped", site=site, reason=verdict.why)
        return part

    def is_enough(self, mechanism: Mechanism, answered: Collection[str], cohort: Ids) -> bool:
        """Return whether the answers of these sites complete a round.

        Under a hidden cohort the decision uses only public facts: the clients that sites host, not
        those drawn. Where clients add the noise, a round needs as many clients as the guarantee
        relies on: an adversary who sees only sums would otherwise see them through less noise.
        """
        return not any(self._lacks(mechanism, answered, cohort))

    def _lacks(self, mechanism: Mechanism, answered: Collection[str], cohort: Ids) -> Iterator[str]:
        """Yield what the answers of these sites lack to complete a round."""
        federation, drawn = self.federation, self.drawn(cohort)
        weights = {
            site: len(ids) if self.is_hidden else len(drawn.get(site, ()))
            for site, ids in federation.client_ids.items()
        }
        present, total = sum(weights[site] for site in answered), sum(weights.values())
        if present < federation.minimum * total:
            yield f"sites with at least {federation.minimum:.0%} of the clients (minimum)"
        if federation.masked and len(answered) < federation.sites_needed:
            yield (
                f"{federation.sites_needed} of {len(federation.sites)} sites to unmask a sum "
                "(threshold)"
            )
        noisy, least = present, min(mechanism.needed, total)
        if mechanism.in_shares:  # clients that are not drawn add their shares too
            noisy, least = sum(len(federation.client_ids[s]) for s in answered), mechanism.needed
        if noisy < least:
            name = " (minimum_clients)" if mechanism.in_shares else ""
            yield f"{least} clients that add noise{name}, and these sites have {noisy}"

    def log_incomplete(self, number: int, attempt: int) -> None:
        """Log an attempt at a round that too few answered."""
        counts = self.statistics.counts()
        self.log("incomplete", round=number + 1, attempt=attempt, **counts)

    def incomplete(
        self, number: int, answered: Collection[str], cohort: Ids
    ) -> IncompleteRoundError:
        """Return an error that states what a round lacked, and what to do."""
        lacks = ", and ".join(self._lacks(self.billboard.mechanism(number), answered, cohort))
        counts = self.statistics
        why = "; ".join(f"{site}: {reason}" for site, reason in sorted(self.reasons.items())[:3])
        declined = f" Sites declined: {why}." if why else ""
        return IncompleteRoundError(
            f"round {number + 1}: {counts.answered} of {counts.asked} clients answered, of "
            f"{len(answered)} of {len(self.federation.sites)} sites; expected {lacks}. "
            f"The round is charged and not released.{declined} Start the missing sites and "
            "run again: the run resumes with this round, which is not charged twice"
        )

    def set_pending(self, sites: list[str]) -> None:
        """Store whose answers are in the release, before it is out."""
        self.state.pending = sites
        self._save()

    def counted(self, site: str) -> int:
        """Return the last round in which a site's answer was in the release."""
        return self.state.counted.get(site, -1)

    def _count(self, number: int) -> None:
        self.state.counted |= dict.fromkeys(self.state.pending, number)
        self.state.pending = []
        self._save()

    def _finish(self) -> None:
        """Send the last shared tree to all sites, which make their clients' models of it."""
        missing = set(self.federation.sites)
        for _ in range(self.federation.patience + 1):
            requests = {
                site: self.request("finish", site, body={"counted": self.counted(site)})
                for site in sorted(missing)
            }
            self.statistics = RoundStatistics()
            for site, message in self.ask(requests):
                missing.discard(site)
                self._note_statement(site, message.body.get("statement"))
            if not missing:
                break
        reached = sorted(set(self.federation.sites) - missing)
        self.log("delivered", sites=reached)

    def _note_statement(self, site: str, statement: Any) -> None:
        """Keep what a site signed about the run; log a statement that is not about it."""
        if is_statement(statement, self.agreement, self.state.run, site):
            self.statements[site] = statement
        elif statement is not None:
            self.log("rejected", site=site, reason="its statement is not about this run")

    def _recover(self) -> CoordinatorState:
        for post in self.billboard.posts:
            self.shared = self.plan.method.server_update(self.shared, post)
        path = self.folder / STATE
        if not path.exists():
            if self.billboard.ledger.charged:
                raise ValueError(
                    f"{self.folder}: rounds are charged, but {STATE} is missing: restore it, or "
                    "start a new run in a new folder"
                )
            self.state = CoordinatorState()
            self._save()
            return self.state
        try:
            state = CoordinatorState(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{path}: damaged ({error}); restore it, or start a new run in a new folder"
            ) from error
        if state.pending and state.round < self.billboard.next:
            # The release was out when the process ended: its answers count.
            state.counted |= dict.fromkeys(state.pending, state.round)
            state.pending = []
        return state

    def _save(self) -> None:
        path = self.folder / STATE
        write_atomically(path, json.dumps(vars(self.state)).encode())
        path.chmod(0o600)  # it has the cohort


class MaskedRounds:
    """Asks sites for masked sums, for a coordinator."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._lead = coordinator
        self._needed = coordinator.federation.sites_needed
        self._setup = ""
        self._sessions = 0
        self._next = 0
        self._advertisements: dict[str, Any] = {}
        self._dealt: dict[str, dict[str, str]] = {}
        self._ready: set[str] = set()
        self._context = ""
        self._is_stale = True

    def parts(self, number: int, cohort: Ids) -> Iterator[Bounded]:
        """Yield the sum of a round once it is unmasked; nothing if the round is void."""
        lead = self._lead
        drawn, vectors = lead.drawn(cohort), dict[str, NDArray[np.uint64]]()
        lead.statistics.asked = len(cohort)
        for attempt in range(lead.federation.patience + 1):
            lead.statistics.new_attempt()
            ready = not self._is_stale and self._next < self._sessions
            if not ready and not self._set_up(number):
                lead.log("incomplete", round=number + 1, attempt=attempt, reason="too few sites")
                continue
            session, self._next = self._next, self._next + 1
            vectors = self._collect(number, session, drawn)
            lead.statistics.answered = sum(len(drawn.get(site, ())) for site in vectors)
            mechanism = lead.billboard.mechanism(number)
            if lead.is_enough(mechanism, vectors, cohort):
                yield from self._unmask(number, session, vectors)
                return
            lead.log_incomplete(number, attempt)
        raise lead.incomplete(number, vectors, cohort)

    def _set_up(self, number: int) -> bool:
        """Have sites make keys and share them; return whether enough did.

        All sites that advertised must share. A site that is lost in between is left out of a new
        setup.
        """
        lead = self._lead
        present, shared = list(lead.federation.sites), list[str]()
        self._next, self._is_stale, self._ready = 0, True, set()
        wanted = lead.plan.posts - number + lead.federation.patience
        # Half a header: names and other fields must fit beside the shares.
        fitting = sessions_within(MAX_HEADER // 2, len(present))
        self._sessions = max(1, min(wanted, MAX_SESSIONS, fitting))
        while len(present) >= self._needed:
            body: dict[str, Any] = {"setup": secrets.token_hex(16), "sessions": self._sessions}
            answers = self._ask("keys", present, number, body)
            self._setup = body["setup"]
            self._advertisements = {
                site: message.body.get("advertisement") for site, message in answers.items()
            }
            body = {"setup": self._setup, "advertisements": self._advertisements}
            dealt = self._ask("shares", list(answers), number, body)
            self._dealt = {site: message.body.get("shares", {}) for site, message in dealt.items()}
            present, shared = list(answers), list(dealt)
            if len(present) == len(shared) >= self._needed:
                self._is_stale = False
                break
            present = shared
        lead.log("setup", sites=len(shared), sessions=self._sessions)
        return not self._is_stale

    def _ask(
        self, kind: str, sites: list[str], number: int, body: Mapping[str, Any]
    ) -> dict[str, Message]:
        requests = {site: self._lead.request(kind, site, number, body) for site in sites}
        return dict(self._lead.ask(requests))

    def _collect(
        self, number: int, session: int, drawn: Mapping[str, list[int]]
    ) -> dict[str, NDArray[np.uint64]]:
        """Ask every site of the setup for its masked sum, and other sites whether they are back."""
        lead = self._lead
        requests = {
            site: self._request(site, number, session, drawn.get(site, []))
            for site in lead.federation.sites
        }
        # The same at all sites, so any masked request determines it.
        masked = next(request for request in requests.values() if request.kind == MASKED)
        self._context = mask_context(number, masked.arrays)
        size = count_numbers(lead.billboard.mechanism(number).totals(lead.template))
        vectors = {}
        for site, message in lead.ask(requests, {MASKED: {MASKED: Expected("uint64", (size,))}}):
            if message.kind == MASKED:
                self._ready.add(site)
                vectors[site] = message.arrays[MASKED]
            else:
                self._is_stale = True  # it is back: include it in a setup before the next round
        if any(NO_SESSION in reason for reason in lead.reasons.values()):
            self._is_stale = True
        return vectors

    def _request(self, site: str, number: int, session: int, clients: list[int]) -> Message:
        lead = self._lead
        if site not in self._dealt:
            agreement = {"agreement": lead.agreement.digest}
            return lead.request("handshake", site, number, agreement)
        # Shares are large: they are sent until a site has answered with them.
        dealers = [name for name in self._dealt if name != site and site not in self._ready]
        body = {
            "setup": self._setup,
            "session": session,
            "clients": clients,
            "counted": lead.counted(site),
            "shares": {name: str(self._dealt[name].get(site, "")) for name in dealers},
        }
        return lead.request(MASKED, site, number, body)

    def _unmask(
        self, number: int, session: int, vectors: Mapping[str, NDArray[np.uint64]]
    ) -> Iterator[Bounded]:
        lead = self._lead
        survivors = sorted(vectors)
        body = {"setup": self._setup, "session": session, "survivors": survivors}
        revealed: dict[str, Any] = {}
        for _ in range(lead.federation.patience + 1):
            missing = [site for site in survivors if site not in revealed]
            for site, message in self._ask("unmask", missing, number, body).items():
                revealed[site] = message.body.get("revealed")
            if len(revealed) >= self._needed:
                break
        try:
            unmasked = unmask_sum(
                session, vectors, revealed, self._advertisements, self._needed, self._context
            )
        except RefusedError as error:
            self._is_stale = True
            lead.statistics.void, lead.statistics.answered = 1, 0
            lead.log("void", round=number + 1, reason=str(error))
            lead.set_pending([])
            return
        for site, reason in unmasked.wrong.items():
            lead.reject(site, reason)
        yield self._admit(number, unmasked.total, survivors)
        lead.set_pending(survivors)

    def _admit(self, number: int, total: NDArray[np.uint64], survivors: list[str]) -> Bounded:
        lead, mechanism = self._lead, self._lead.billboard.mechanism(number)
        shapes = mechanism.totals(lead.template)
        grid = grid_steps(mechanism, shapes)
        assert grid is not None
        # All clients of these sites, drawn or not: see `admit_sum`.
        ids = np.concatenate([lead.federation.client_ids[site] for site in survivors])
        return admit_sum(mechanism, from_ring(total, shapes, grid), np.sort(ids), lead.template)


def run_coordinator(
    agreement: Agreement,
    folder: Path,
    key: Path,
    transport: Callable[[LogEvent], Transport],
    report: Report = lambda _: None,
) -> dict[str, Any]:
    """Coordinate a run, or resume the one in the folder; return its summary.

    A finished run stays as it is: only sites that missed the last shared tree receive it.
    `transport` makes the transport, given where to log events; `report` takes one line per round.
    """
    started = time.perf_counter()
    folder = folder.resolve()
    with as_interrupt(), explain_disk_errors(folder), locked(folder):
        claim(folder, agreement.plan)
        _claim_federation(folder, agreement)
        check_model(folder, agreement.plan.method.model, agreement.spec)
        log = Log(folder / "log.jsonl")
        log.open()
        log.path.chmod(0o600)  # it has who answered
        with log.until_end(reasons=True):
            done = finished_summary(folder)
            coordinator = Coordinator(
                agreement=agreement,
                folder=folder,
                key=load_private(key),
                transport=transport(log.note),
                log=log.note,
            )
            shared = _run_rounds(coordinator, log, report)
            if done is None:
                seconds = time.perf_counter() - started
                done = finish(folder, agreement, coordinator.billboard, shared, log, seconds)
            write_signatures(folder, coordinator.key, coordinator.statements)
            return done


def _run_rounds(coordinator: Coordinator, log: Log, report: Report) -> Tree:
    """Run the rounds that remain; where none do, absent sites do not prevent the end."""
    done = coordinator.billboard.next >= coordinator.plan.posts

    def observe(number: int, shared: Tree, statistics: RoundStatistics) -> None:
        log.note("round", round=number + 1, **statistics.counts())
        rounds, hidden = coordinator.plan.posts, coordinator.is_hidden
        report(round_line(number + 1, rounds, statistics, hidden=hidden))

    try:
        return coordinator.run(observe)
    except IncompleteRoundError as error:
        if not done:
            raise
        log.note("delivered", sites=[], reason=str(error)[:500])
        return coordinator.shared


def round_line(number: int, rounds: int, counts: RoundStatistics, *, hidden: bool) -> str:
    """Return one line on the outcome of a round; rounds are counted from 1.

    Under a hidden cohort it has no counts, because Flower shows the line to anyone who may ask its
    SuperLink.
    """
    if hidden:
        return f"round {number} of {rounds}: released"
    if counts.void:
        return f"round {number} of {rounds}: void, released without contributions"
    trouble = ", ".join(f"{n} {name}" for name in _TROUBLE if (n := getattr(counts, name)))
    line = f"round {number} of {rounds}: {counts.answered} of {counts.asked} clients answered"
    return f"{line} (sites: {trouble})" if trouble else line


def _claim_federation(folder: Path, agreement: Agreement) -> None:
    """Store the federation beside the plan; refuse to resume with another."""
    text = agreement.federation.to_toml()
    path = folder / FEDERATION
    if not path.exists():
        write_atomically(path, text.encode())
    elif path.read_text(encoding="utf-8") != text:
        raise FileExistsError(f"{folder} has a run of another federation; choose another folder")
