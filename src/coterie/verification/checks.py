"""The checks of a finished run: each holds, fails, or says why it could not be made."""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.verification import reading
from coterie.verification.accounting import (
    Account,
    Span,
    by_view,
    count,
    message_epsilon,
    recompute_delta,
)
from coterie.verification.archives import read_posts, stray_bytes
from coterie.verification.deployed import of_deployment
from coterie.verification.planned import disagreements, is_silent, spends
from coterie.verification.selections import of_chosen
from coterie.verification.verdict import Check, Makes, Verdict, compared, guarded, judge, point
from coterie.verification.words import wrong_words

__all__ = ["Check", "Verdict", "verify"]
PUBLIC = ("plan.toml", "ledger.jsonl", "posts.npz", "shared.npz")


def verify(folder: Path) -> Verdict:
    """Check a finished run.

    Raises:
        UnreadableError: If there is no certificate to check.
    """
    certificate = reading.read_certificate(folder)
    wrong = reading.faults(certificate)
    first = judge("certificate well-formed", wrong, "every field there, and of its kind")
    if wrong:
        return Verdict(str(folder), (first,))
    return Verdict(str(folder), (first, *_Run(folder, certificate).checks()))


@dataclass(frozen=True)
class _Run:
    folder: Path
    told: Mapping[str, Any]

    def checks(self) -> Iterator[Check]:
        plan, ledger = reading.read_plan(self.folder), reading.read_ledger(self.folder)
        parts: dict[str, Makes] = {
            "certificate unaltered": self._seal,
            "public files": self._files,
            "plan": lambda: judge("plan", disagreements(plan, self.told), "what plan.toml says"),
            "budget": lambda: judge("budget", spends(plan, self.told), "as much noise as planned"),
            "ledger": lambda: self._ledger(ledger),
            "counts": lambda: self._counts(plan, ledger),
            "events": lambda: self._events(ledger),
            "posts": lambda: self._posts(ledger),
            "clients": self._clients,
            "statement": lambda: judge(
                "statement", wrong_words(self.told), "the words that the numbers call for"
            ),
            "epsilon": self._epsilons,
            "selection": lambda: of_chosen(plan, self.told),
            "deployment": lambda: of_deployment(self.folder, self.told),
            "log": self._log,
        }
        for name, make in parts.items():
            yield from guarded(name, make)

    def _seal(self) -> Check:
        found, expected = reading.seal(self.told), str(self.told["sha256"])
        wrong = [] if found == expected else [f"its content hashes to {found[:12]}..."]
        return judge("certificate unaltered", wrong, f"sha256 {expected[:12]}...")

    def _files(self) -> Check:
        stated = self.told["files"]
        wrong = [f"{name} is not among its files" for name in PUBLIC if name not in stated]
        for name, expected in stated.items():
            if name not in PUBLIC:
                wrong.append(f"{name} is not a public file")
            elif (found := reading.hash_file(self.folder / name)) != expected:
                wrong.append(f"{name} is {found if found == 'missing' else 'altered'}")
        wrong += stray_bytes(self.folder / "shared.npz")
        return judge("public files", wrong, f"{', '.join(PUBLIC)} as certified")

    def _ledger(self, ledger: reading.LedgerFound) -> Check:
        """Check the account, and that the plan beside it is the one that it was opened with."""
        wrong, header = list(ledger.faults), ledger.header
        extra = sorted(header.keys() - {"plan", "posts", "events", "plan_file"})
        wrong += [f"its first line holds {', '.join(map(str, extra))}"] * bool(extra)
        found, expected = reading.hash_file(self.folder / "plan.toml"), header.get("plan_file")
        if expected is None:
            wrong.append(
                "its first line has no plan_file: it was begun by an earlier version, which tied "
                "no plan.toml to it"
            )
        elif expected != found:
            wrong.append("plan.toml is not the one that it was opened with")
        void = f", {ledger.void} cut off by a crash" * bool(ledger.void)
        told = f"{len(ledger.charged) + len(ledger.released)} entries{void}"
        return judge("ledger", wrong, "posts of this plan charged, then released, once each", told)

    def _counts(self, plan: Mapping[str, Any], ledger: reading.LedgerFound) -> Check:
        """Compare the numbers of events, charges, releases and posts with each other."""
        events = sum(event["rounds"] for event in self.told["events"])
        kinds = {event["event"] for event in self.told["events"]}
        bare = kinds == {"non_private"}
        planned, posts = ledger.header.get("posts"), len(self.told["posts"])
        wrong = [f"{self.told['rounds']} rounds, {events} events"] * (self.told["rounds"] != events)
        # Rows in one place are one release, though nothing is posted.
        pooled = bare and events == planned == 1 and posts == 0 and ledger.charged == [0]
        early = bare and isinstance(planned, int) and events <= planned
        if type(planned) is not int or (planned != events and not early):
            wrong.append(f"the ledger is of {planned} posts, the certificate of {events} events")
        silent = planned == 0 and is_silent(plan)
        if planned != plan.get("rounds") and not silent and not (bare and events == planned == 1):
            wrong.append(
                f"the ledger is of {planned} posts, the plan of {plan.get('rounds')} rounds"
            )
        if not pooled and ledger.charged != list(range(events)):
            wrong.append(f"charged are {_some(ledger.charged)}")
        if not pooled and posts != events:
            wrong.append(f"{posts} posts are certified for {events} events")
        if list(ledger.released) != list(range(posts)):
            wrong.append(f"released are {_some(list(ledger.released))}")
        return judge("counts", wrong, "one charge, one release and one post an event", f"{events}")

    def _events(self, ledger: reading.LedgerFound) -> Check:
        """Compare events with the digest of those that the ledger was opened with."""
        runs = [dict(event) for event in self.told["events"]]
        planned = ledger.header.get("posts")
        if len(runs) == 1 and runs[0]["event"] == "non_private" and isinstance(planned, int):
            runs[0]["rounds"] = planned  # without privacy a run may end early
        named = [
            {
                key: float(value) if isinstance(value, int | float) else value
                for key, value in run.items()
            }
            for run in runs
        ]
        found = hashlib.sha256(repr(named).encode()).hexdigest()
        expected = str(ledger.header.get("events"))
        wrong = [] if found == expected else [f"events hash to {found[:12]}..."]
        return judge("events", wrong, f"those that the ledger paid for, {expected[:12]}...")

    def _posts(self, ledger: reading.LedgerFound) -> Check:
        lying = read_posts(self.folder)
        wrong = list(lying.faults)
        stated = {post["index"]: post["sha256"] for post in self.told["posts"]}
        wrong += ["posts are not listed in order"] * (list(stated) != list(range(len(stated))))
        wrong += ["a post is listed twice"] * (len(stated) != len(self.told["posts"]))
        for index in sorted({*stated, *lying.digests, *ledger.released}, key=str):
            said = _differs(stated.get(index), lying.digests.get(index), ledger.released.get(index))
            wrong += [f"post {index} {said}"] if said else []
        return judge("posts", wrong, "as certified and released", f"{len(lying.digests)} posts")

    def _clients(self) -> Check:
        named, clients = reading.read_names(self.folder), self.told["clients"]
        wrong = [
            f"{event['honest']} honest clients in every round"
            for event in self.told["events"]
            if event.get("honest", 1) > self._fewest()
        ]
        if named is None and not wrong:
            return Check("clients", "not here", "models/ is private", f"{clients} clients")
        if named is not None:
            rows = reading.read_rows(self.folder)
            wrong += [f"models/clients.json names {named}"] * (named != clients)
            damaged = "models/clients.safetensors is damaged or cut short"
            wrong += [damaged] * (-1 in rows)
            wrong += [f"models have {sorted(rows)} rows"] * (rows not in ({clients}, {clients, -1}))
        return judge("clients", wrong, f"{clients} clients", f"{named} models")

    def _fewest(self) -> int:
        """Return the fewest clients of a round in which a client takes part."""
        rate, clients = self.told["rate"], self.told["clients"]
        if rate == 1:
            return int(clients)
        whole = math.floor(rate * clients * (1 + 1e-12) + 1e-9)
        return max(1, whole) if self.told["sampling"] == "fixed" else 1

    def _epsilons(self) -> Iterator[Check]:
        """Compute every epsilon from the events alone."""
        told = self.told
        account = Account(
            events=count(told["events"]),
            kind=told["sampling"],
            rate=float(told["rate"]),
            visible=told["cohort"] == "visible",
            relation=told["relation"],
            delta=float(told["delta"]),
        )
        stated = {"epsilon": told["epsilon"], **told["views"]}
        yield from compared("epsilon by view", stated, lambda: by_view(account))
        single = told.get("epsilon_per_participation")
        yield from compared(
            "epsilon of one message",
            {} if single is None else {"one message": single},
            lambda: point("one message", message_epsilon(account)),
        )
        yield from self._claims(account)
        yield self._listed()

    def _claims(self, account: Account) -> Iterator[Check]:
        """Compute what is true of releases that a paper prints an epsilon for."""
        printed = [event for event in self.told["events"] if event.get("claimed") is not None]
        stated = {
            key: self.told[key]
            for key in ("claimed_epsilon", "true_delta_at_claimed")
            if key in self.told
        }
        if not printed and not stated:
            return
        alone = Account(**{**vars(account), "events": count(printed)})

        def found() -> dict[str, Span]:
            if not printed:
                return {}
            claimed = math.fsum(event["claimed"] * event["rounds"] for event in printed)
            return {
                **point("claimed_epsilon", claimed),
                "true_delta_at_claimed": _delta(recompute_delta(alone, claimed)),
            }

        yield from compared("printed claims", stated, found)

    def _listed(self) -> Check:
        """Compare the noise that is listed beside the events with theirs."""
        runs = [
            [event.get("noise_multiplier", 0.0), event["rounds"]] for event in self.told["events"]
        ]
        plain = {"gaussian", "non_private"}
        listed = all(event["event"] in plain for event in self.told["events"])
        expected = runs if listed else None
        same = self.told.get("noise_multipliers") == expected
        return judge("noise listed", [] if same else ["another noise"], "the noise of the events")

    def _log(self) -> Check:
        named = reading.read_log(self.folder)
        if named is None:
            return Check("log", "not here", "log.jsonl is private", "")
        wrong = [f"it names certificate {named[:12]}..."] * (named != self.told["sha256"])
        return judge("log", wrong, "names this certificate")


def _delta(value: float) -> Span:
    return Span(value, value, is_delta=True)


def _some(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 6 else f"{str(numbers[:3])[:-1]}, ... {numbers[-1]}]"


def _differs(stated: str | None, lying: str | None, released: str | None) -> str:
    if stated is None:
        return "is not certified"
    if lying is None:
        return "is missing"
    if lying != stated:
        return "is altered"
    return "was released with another content" * (released != stated)
