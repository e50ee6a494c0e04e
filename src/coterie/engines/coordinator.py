"""The coordinator of a federation: the server's half of every round, over whatever carries letters.

The loop is that of the simulator: draw a cohort, post the sum of what comes, move the shared tree.
In between letters travel, and may be late, lost, broken or hostile:

- a post is charged before anything is asked (`Billboard.charged`), so that neither a crash nor a
  silent site leads to a post that nobody counted; a round without a post is asked again, and not
  charged again;
- a cohort is drawn once for a round and kept until its post is out: drawing anew after a failure
  would make the clients of the post depend on who answers;
- answers are admitted one site at a time (`billboard.admit`); what is not an answer to this
  question, signed by this site, is refused, counted and logged;
- a round that fewer than the planned minimum of clients answer is asked again, and then the run
  stops, to be resumed when sites are back. Under a hidden cohort all sites are asked, those with
  nobody drawn for zeros, and what counts is how many clients the sites that answered host, drawn or
  not: otherwise sites that stay silent on purpose would learn from being asked again whether
  others' clients were drawn. With `minimum = 0` those drawn alone are asked, once.

**Guarantee:** that of the plan, for every client of a site that follows the protocol, whatever
other sites send: `billboard.admit`. Who answered, and when, is seen by the coordinator alone.
Tests: tests/engines/test_coordinator.py.
"""

import json
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np

from coterie.engine.rounds import server_half
from coterie.engine.store import Ids
from coterie.engines.conducting import Answer, Conduct, Kept, ShortRoundError, Tally
from coterie.engines.masked import Masks
from coterie.engines.site_run import SHARED, SUM, Arrays
from coterie.interrupts import raise_if_asked
from coterie.methods.base import Shape
from coterie.privacy.billboard import Bounded, admit
from coterie.privacy.entropy import open_entropy
from coterie.privacy.files import write_atomically
from coterie.privacy.mechanisms import Mechanism, Shapes
from coterie.privacy.validation import Verdict
from coterie.rng import Rng
from coterie.tree import Tree
from coterie.wire import Expected, Letter, Parcel, RefusedError, peek, public_hex, seal, unseal

Expectations = Mapping[str, Mapping[str, Expected]]
"""The arrays that answers carry, by their kind; none where a kind is not listed."""
_NOTHING: Expectations = {}


class Coordinator:
    """Conducts one run."""

    def __init__(self, conduct: Conduct) -> None:
        self.conduct, self.plan, self.federation = conduct, conduct.plan, conduct.federation
        spec, seed = self.federation.spec, self.plan.simulation_seed
        _check(conduct)
        self.shared = self.plan.method.init(spec, Rng.seeded(seed or 0).at("init"))
        self.template: Shapes = {
            name: tuple(leaf.shape) for name, leaf in self.plan.method.contribution(spec).items()
        }
        self.billboard = self.plan.open(spec, self.shared, conduct.folder)
        self.is_hidden = self.plan.hides_cohort(spec.clients)
        self.tally = Tally()
        self.words: dict[str, str] = {}
        self._greetings: set[str] = set()
        self._masks = Masks(self) if self.federation.trust == "secure_aggregation" else None
        try:
            self.kept = self._recover()
        except BaseException:
            self.billboard.ledger.close()
            raise

    def run(self, observe: Callable[[int, Tree, Tally], None] | None = None) -> Tree:
        """Do the rounds that are still to do; give the shared tree after the last."""
        try:
            self._gather()
            for number in range(self.billboard.next, self.plan.posts):
                raise_if_asked()
                self.tally = Tally()
                ask = self._parts if self._masks is None else self._masks.parts
                cohort = self._cohort(number)
                with self.billboard.charged(number) as release:
                    for part in ask(number, cohort):  # the client's half, at the sites
                        release.add(part)
                    self.shared, _ = server_half(self.plan.method, self.shared, release)
                self._count(number)
                if observe is not None:
                    observe(number, self.shared, self.tally)
            self._finish()
            return self.shared
        finally:
            self.billboard.ledger.close()

    def question(
        self, kind: str, site: str, number: int = -1, body: Mapping[str, Any] | None = None
    ) -> Letter:
        """Make a question; those that need it carry the shared tree."""
        arrays: Arrays = {}
        if kind in ("round", "masked", "finish"):
            arrays = {SHARED + name: leaf.cpu().numpy() for name, leaf in self.shared.items()}
        nonce = secrets.token_hex(16)
        return Letter(kind, self.kept.run, site, number, nonce, dict(body or {}), arrays)

    def ask(
        self, questions: Mapping[str, Letter], expected: Expectations = _NOTHING
    ) -> Iterator[tuple[str, Letter]]:
        """Ask sites; give the answers that are ones, count and log all others."""
        parcels = {site: seal(letter, self.conduct.key) for site, letter in questions.items()}
        silent, self.words, started = set(questions), {}, time.monotonic()
        for site, answer in self.conduct.transport.ask(parcels, self.federation.deadline):
            if site not in silent:
                self.refuse(site, "an answer twice, or of a site that was not asked")
                continue
            silent.discard(site)
            try:
                letter = self._read(questions[site], answer, expected)
            except RefusedError as refusal:
                self.refuse(site, str(refusal))
                continue
            if letter.kind in ("refused", "failed"):
                self._declined(site, letter)
                continue
            if "failed" in letter.body:
                self._declined(site, letter)  # it sent zeros, and counts as an answer
            yield site, letter
        self.tally.silent += len(silent)
        if self.federation.steady:
            time.sleep(max(0.0, self.federation.deadline - (time.monotonic() - started)))

    def _read(self, question: Letter, answer: Answer, expected: Expectations) -> Letter:
        if isinstance(answer, str):
            raise RefusedError(answer)
        kind = peek(answer).kind
        wanted = expected.get(kind, {}) if kind == question.kind else {}
        letter = unseal(answer, self.federation.sites[question.site].public_key, wanted)
        if letter.kind not in (question.kind, "refused", "failed"):
            raise RefusedError(f"an answer of another kind than {question.kind}")
        for name in ("run", "site", "round", "nonce"):
            if getattr(letter, name) != getattr(question, name):
                raise RefusedError(f"an answer to another question: its {name} differs")
        return letter

    def refuse(self, site: str, why: str) -> None:
        """Count and log what is not an answer."""
        self.tally.refused += 1
        self.conduct.note("refused", site=site, why=why)

    def _declined(self, site: str, letter: Letter) -> None:
        self.tally.failed += 1
        why = self.words[site] = str(letter.body.get("why", letter.body.get("failed", "")))[:200]
        self.conduct.note("declined", site=site, kind=letter.kind, why=why)

    def greeting(self) -> Parcel:
        """Make a greeting for whoever is there."""
        letter = self.question("hello", "", body={"agreement": self.conduct.agreement})
        self._greetings.add(letter.nonce)
        return seal(letter, self.conduct.key)

    def recognise(self, parcel: Parcel) -> str:
        """Say which site a greeting was answered by.

        Raises:
            RefusedError: If it is none of the federation, or has another plan.
        """
        site = peek(parcel).site
        if site not in self.federation.sites:
            raise RefusedError("a site that is not in the federation")
        letter = unseal(parcel, self.federation.sites[site].public_key, {})
        if letter.run != self.kept.run or letter.nonce not in self._greetings:
            raise RefusedError("an answer to a greeting of another run, or to none")
        self._greetings.discard(letter.nonce)  # whoever sends it again is not that site
        if letter.kind != "hello" or letter.body.get("agreement") != self.conduct.agreement:
            why = str(letter.body.get("why", letter.kind))[:200]
            raise RefusedError(f"{site} does not take part: {why}")
        return site

    def _gather(self) -> None:
        """Wait for the sites: all of them, or as many as are there when time is up."""
        wanted = len(self.federation.sites)
        seconds = self.federation.deadline
        found = self.conduct.transport.meet(self.greeting, self.recognise, wanted, seconds)
        self.conduct.note("gathered", sites=sorted(found))
        if not found:
            raise ShortRoundError(
                f"no site of {wanted} answered within {seconds:g} s; start their SuperNodes, check "
                "keys and plan (log.jsonl says what was refused; worker.log at each site, what "
                "failed there), and run again: the run goes on"
            )

    def _cohort(self, number: int) -> Ids:
        """Draw a round's cohort, or read the one that was drawn before a crash."""
        if self.kept.round != number:
            entropy = open_entropy(self.plan.simulation_seed, "cohort", number)
            drawn = self.plan.sampler.draw(self.federation.spec.clients, entropy)
            self.kept.round, self.kept.cohort = number, drawn.tolist()
            self.kept.pending = []
            self._keep()
        return np.array(self.kept.cohort, dtype=np.int64)

    def drawn(self, cohort: Ids) -> dict[str, list[int]]:
        """Return the clients of a cohort by site; sites without any are left out."""
        by_site = {
            site: np.intersect1d(cohort, numbers).tolist()
            for site, numbers in self.federation.numbers.items()
        }
        return {site: clients for site, clients in by_site.items() if clients}

    def _parts(self, number: int, cohort: Ids) -> Iterator[Bounded]:
        """Ask sites, and again those who are missing while too few answered."""
        drawn, mechanism = self.drawn(cohort), self.billboard.mechanism(number)
        self.tally.asked = len(cohort)
        expected = {"round": expected_sum(mechanism, self.template)}
        open_minded = self.is_hidden and self.federation.minimum == 0
        everyone = self.is_hidden and not open_minded
        missing = {site: drawn.get(site, []) for site in self.federation.sites if everyone}
        missing, answered = missing or dict(drawn), set[str]()
        for attempt in range(1 if open_minded else self.federation.patience + 1):
            raise_if_asked()
            self.tally.ask_again()
            questions = {
                site: self.question(
                    "round", site, number, {"clients": ids, "counted": self.counted(site)}
                )
                for site, ids in missing.items()
            }
            for site, letter in self.ask(questions, expected):
                ids = np.array(missing.pop(site), dtype=np.int64)
                yield self.take_in(site, mechanism, letter.arrays, ids)
                answered.add(site)
            self.tally.answered = sum(len(drawn.get(site, ())) for site in answered)
            if self.is_enough(mechanism, answered, cohort):
                break
            self.conduct.note("short", round=number + 1, attempt=attempt, **self.tally.told())
        else:
            raise self.short(number)
        self.pend(sorted(answered))

    def take_in(self, site: str, mechanism: Mechanism, arrays: Arrays, ids: Ids) -> Bounded:
        """Admit what a site sent; what had to be cut is counted and logged."""
        totals = {name.removeprefix(SUM): array for name, array in arrays.items()}
        part, verdict = admit(mechanism, totals, ids, self.template)
        self.judge(site, verdict)
        return part

    def judge(self, site: str, verdict: Verdict) -> None:
        """Count and log what had to be done to a sum."""
        if verdict.taken:
            return
        if verdict.zeroed:
            self.tally.zeroed += 1
        else:
            self.tally.scaled += 1
        self.conduct.note("cut", site=site, why=verdict.why)

    def is_enough(self, mechanism: Mechanism, answered: Collection[str], cohort: Ids) -> bool:
        """Return whether the answers of these sites make a round.

        Under a hidden cohort by public facts alone: the clients that sites host, not those drawn.
        Where clients add the noise, fewer than those whose noise is counted on make no round:
        whoever sees sums alone would see them through less noise than stated.
        """
        drawn = self.drawn(cohort)
        weights = {
            site: len(numbers) if self.is_hidden else len(drawn.get(site, ()))
            for site, numbers in self.federation.numbers.items()
        }
        there, all_ = sum(weights[site] for site in answered), sum(weights.values())
        trusted = mechanism.honest
        return there >= max(self.federation.minimum * all_, min(trusted, all_))

    def short(self, number: int) -> ShortRoundError:
        """Say what a round lacked, and what to do."""
        mechanism = self.billboard.mechanism(number)
        trusted = mechanism.honest
        counts = f", and {trusted} clients whose noise is counted on" if trusted > 1 else ""
        return ShortRoundError(
            f"round {number + 1}: {self.tally.answered} of {self.tally.asked} clients answered; "
            f"expected are sites with at least {self.federation.minimum:.0%} of the clients "
            f"(minimum){counts}. The round is charged and not posted.{self._refusals()} Bring the "
            "sites back and run again: the run goes on with this round, which is not charged twice"
        )

    def _refusals(self) -> str:
        told = "; ".join(f"{site}: {word}" for site, word in sorted(self.words.items())[:3])
        return f" Sites said: {told}." if told else ""

    def pend(self, sites: list[str]) -> None:
        """Keep whose answers are in the post, before it is out."""
        self.kept.pending = sites
        self._keep()

    def counted(self, site: str) -> int:
        """Return the last round in which a site's answer was in the post."""
        return self.kept.counted.get(site, -1)

    def _count(self, number: int) -> None:
        self.kept.counted |= dict.fromkeys(self.kept.pending, number)
        self.kept.pending = []
        self._keep()

    def _finish(self) -> None:
        """Return all sites the last shared tree, so that they can make their clients' models."""
        missing = set(self.federation.sites)
        for _ in range(self.federation.patience + 1):
            questions = {
                site: self.question("finish", site, body={"counted": self.counted(site)})
                for site in sorted(missing)
            }
            self.tally = Tally()
            missing -= {site for site, _ in self.ask(questions)}
            if not missing:
                break
        home = sorted(set(self.federation.sites) - missing)
        self.conduct.note("taken_home", sites=len(home), names=home)

    def _recover(self) -> Kept:
        for post in self.billboard.posts:
            self.shared = self.plan.method.server_update(self.shared, post)
        path = self.conduct.folder / "coordinator.json"
        if not path.exists():
            if self.billboard.ledger.charged:
                raise ValueError(
                    f"{self.conduct.folder}: rounds were charged, but coordinator.json is gone: "
                    "restore it, or start a new run in a new folder"
                )
            return self._begin()
        try:
            kept = Kept(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{path}: damaged ({error}); restore it, or start a new run in a new folder"
            ) from error
        if kept.pending and kept.round < self.billboard.next:
            # The post was out when the process ended; its answers count.
            kept.counted |= dict.fromkeys(kept.pending, kept.round)
            kept.pending = []
        return kept

    def _begin(self) -> Kept:
        kept = Kept()
        self.kept = kept
        self._keep()
        return kept

    def _keep(self) -> None:
        path = self.conduct.folder / "coordinator.json"
        write_atomically(path, json.dumps(vars(self.kept)).encode())
        path.chmod(0o600)  # it says who was drawn


def expected_sum(mechanism: Mechanism, template: Shapes) -> dict[str, Expected]:
    """Say what arrays a site's sum travels as."""
    totals = mechanism.totals(template)
    return {SUM + name: Expected("float64", tuple(shape)) for name, shape in totals.items()}


def _check(conduct: Conduct) -> None:
    """Refuse what cannot be conducted, before anything is written or asked."""
    plan, federation = conduct.plan, conduct.federation
    if public_hex(conduct.key) != federation.coordinator:
        raise ValueError(
            "the coordinator's signing key is not the one that federation.toml lists; give the "
            "private key that belongs to it"
        )
    if plan.method.shape is Shape.POOLED:
        raise ValueError(
            f"{plan.method.kind} brings all rows together: nothing of that kind can be deployed"
        )
    if plan.simulation_seed is not None and not federation.simulation:
        raise ValueError(
            f"simulation_seed = {plan.simulation_seed}: noise of a known seed protects nobody; "
            "leave it out of plan.toml, or set simulation = true in federation.toml for a rehearsal"
        )
    if federation.trust == "secure_aggregation":
        for mechanism in dict.fromkeys(plan.mechanisms(federation.spec.clients)):
            mechanism.check_secure_sum()
    most = plan.sampler.largest(federation.spec.clients)
    plan.method.check(federation.spec, cohort=most)
