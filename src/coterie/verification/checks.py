"""The checks of a finished run: each holds, fails, or says why it could not be made."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from coterie.verification import reading
from coterie.verification.accounting import (
    Account,
    Span,
    by_view,
    count,
    message_epsilon,
    recompute_delta,
)
from coterie.verification.planned import disagreements, spends

Status = Literal["ok", "FAILED", "not recomputed", "not here"]
PUBLIC = ("plan.toml", "ledger.jsonl", "posts.npz", "shared.npz")


@dataclass(frozen=True)
class Check:
    """One check: its name, how it went, what was found and what was expected."""

    name: str
    status: Status
    found: str = ""
    expected: str = ""


@dataclass(frozen=True)
class Verdict:
    """All checks of a folder; verified if each holds, private files that are not here apart."""

    folder: str
    checks: tuple[Check, ...]

    @property
    def verified(self) -> bool:
        """Whether nothing failed, and everything that is public was checked."""
        return all(check.status in ("ok", "not here") for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Give it as plain data."""
        checks = [asdict(check) for check in self.checks]
        return {"run": self.folder, "verified": self.verified, "checks": checks}


def verify(folder: Path) -> Verdict:
    """Check a finished run.

    Raises:
        UnreadableError: If there is no certificate to check.
    """
    certificate = reading.read_certificate(folder)
    wrong = reading.faults(certificate)
    first = _check("certificate well-formed", wrong, "every field there, and of its kind")
    if wrong:
        return Verdict(str(folder), (first,))
    run = _Run(folder, certificate)
    return Verdict(str(folder), (first, *run.checks()))


def _check(name: str, faults: list[str], expected: str, found: str = "") -> Check:
    if not faults:
        return Check(name, "ok", found, expected)
    more = f"; {len(faults) - 3} more" if len(faults) > 3 else ""
    return Check(name, "FAILED", "; ".join(faults[:3]) + more, expected)


@dataclass(frozen=True)
class _Run:
    folder: Path
    told: Mapping[str, Any]

    def checks(self) -> Iterator[Check]:
        yield self._seal()
        yield self._files()
        plan = reading.read_plan(self.folder)
        yield _check("plan", disagreements(plan, self.told), "what plan.toml says")
        yield _check("budget", spends(plan, self.told), "no more spent than planned")
        ledger = reading.read_ledger(self.folder)
        yield _check("ledger", ledger.faults, "posts charged, then released, once each")
        yield self._counts(plan, ledger)
        yield self._events(ledger)
        yield self._posts(ledger)
        yield self._clients()
        yield self._words()
        yield from self._epsilons()
        yield self._log()

    def _seal(self) -> Check:
        found, expected = reading.seal(self.told), str(self.told["sha256"])
        wrong = [] if found == expected else [f"its content hashes to {found[:12]}..."]
        return _check("certificate unaltered", wrong, f"sha256 {expected[:12]}...")

    def _files(self) -> Check:
        stated = self.told["files"]
        wrong = [f"{name} is not among its files" for name in PUBLIC if name not in stated]
        for name, expected in stated.items():
            if name not in PUBLIC:
                wrong.append(f"{name} is not a public file")
            elif (found := reading.hash_file(self.folder / name)) != expected:
                wrong.append(f"{name} is {found if found == 'missing' else 'altered'}")
        return _check("public files", wrong, f"{', '.join(PUBLIC)} as certified")

    def _counts(self, plan: Mapping[str, Any], ledger: reading.LedgerFound) -> Check:
        """Compare the numbers of events, charges, releases and posts with each other."""
        events = sum(event["rounds"] for event in self.told["events"])
        bare = all(event["event"] == "non_private" for event in self.told["events"])
        planned, posts = ledger.header.get("posts"), len(self.told["posts"])
        wrong = [f"{self.told['rounds']} rounds, {events} events"] * (self.told["rounds"] != events)
        # Rows in one place are one release, though nothing is posted.
        pooled = bare and events == planned == 1 and posts == 0 and ledger.charged == [0]
        early = bare and isinstance(planned, int) and events <= planned
        if planned != events and not early:
            wrong.append(f"the ledger is of {planned} posts, the certificate of {events} events")
        if planned not in (plan.get("rounds"), 0) and not (bare and planned == 1):
            wrong.append(
                f"the ledger is of {planned} posts, the plan of {plan.get('rounds')} rounds"
            )
        if not pooled and ledger.charged != list(range(events)):
            wrong.append(f"charged are {_some(ledger.charged)}")
        if not pooled and posts != events:
            wrong.append(f"{posts} posts are certified for {events} events")
        if list(ledger.released) != list(range(posts)):
            wrong.append(f"released are {_some(list(ledger.released))}")
        return _check("counts", wrong, "one charge, one release and one post an event", f"{events}")

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
        return _check("events", wrong, f"those that the ledger paid for, {expected[:12]}...")

    def _posts(self, ledger: reading.LedgerFound) -> Check:
        lying = reading.read_posts(self.folder)
        wrong = list(lying.faults)
        stated = {post["index"]: post["sha256"] for post in self.told["posts"]}
        wrong += ["posts are not listed in order"] * (list(stated) != list(range(len(stated))))
        wrong += ["a post is listed twice"] * (len(stated) != len(self.told["posts"]))
        for index in sorted({*stated, *lying.digests, *ledger.released}, key=str):
            said = _differs(stated.get(index), lying.digests.get(index), ledger.released.get(index))
            wrong += [f"post {index} {said}"] if said else []
        return _check("posts", wrong, "as certified and released", f"{len(lying.digests)} posts")

    def _clients(self) -> Check:
        named, clients = reading.read_names(self.folder), self.told["clients"]
        if named is None:
            return Check("clients", "not here", "models/ is private", f"{clients} clients")
        rows = reading.read_rows(self.folder)
        wrong = [f"models/clients.json names {named}"] * (named != clients)
        wrong += [f"models have {sorted(rows)} rows"] * (rows != {clients})
        wrong += [
            f"{event['honest']} honest clients in every round"
            for event in self.told["events"]
            if event.get("honest", 1) > self._fewest()
        ]
        return _check("clients", wrong, f"{clients} clients", f"{named} models")

    def _fewest(self) -> int:
        """Give the fewest clients of a round in which a client takes part."""
        rate, clients = self.told["rate"], self.told["clients"]
        if rate == 1:
            return int(clients)
        whole = math.floor(rate * clients * (1 + 1e-12) + 1e-9)
        return max(1, whole) if self.told["sampling"] == "fixed" else 1

    def _words(self) -> Check:
        """Compare the words with the numbers that they must warn of."""
        said, infinite = self.told["statement"], self.told["epsilon"] == "inf"
        marks = {
            "SIMULATION": self.told["simulation"],
            "NOT PRIVATE": infinite,
            "NOT A GUARANTEE": "claimed_epsilon" in self.told,
        }
        wrong = [
            f"{mark!r} is {'not ' * flag}said"
            for mark, flag in marks.items()
            if (mark in said) != flag
        ]
        wrong += [
            f"{key} is {self.told.get(key)!r}, not {value!r}"
            for key, value in self._seen().items()
            if self.told.get(key) != value
        ]
        return _check("statement", wrong, "warnings that the numbers call for")

    def _seen(self) -> dict[str, Any]:
        """Say whose view the first epsilon is, and whether it is seen who takes part."""
        kinds = {event["event"] for event in self.told["events"]}
        hidden = self.told["cohort"] == "hidden"
        view = "other clients"
        if kinds == {"local_gaussian"}:
            view = "the server and the other clients"
        elif self.told["sampling"] == "fixed" and self.told["rate"] < 1 and hidden:
            view = view if "local_gaussian" in kinds else "an outsider who sees the posts alone"
        return {"view": view, "participation_seen": not hidden or "local_gaussian" in kinds}

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
        yield from _compared("epsilon by view", stated, lambda: by_view(account))
        single = told.get("epsilon_per_participation")
        yield from _compared(
            "epsilon of one message",
            {} if single is None else {"one message": single},
            lambda: _point("one message", message_epsilon(account)),
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
            claimed = math.fsum(event["claimed"] * event["rounds"] for event in printed)
            return {
                **_point("claimed_epsilon", claimed),
                "true_delta_at_claimed": _delta(recompute_delta(alone, claimed)),
            }

        yield from _compared("printed claims", stated, found)

    def _listed(self) -> Check:
        """Compare the noise that is listed beside the events with theirs."""
        runs = [
            [event.get("noise_multiplier", 0.0), event["rounds"]] for event in self.told["events"]
        ]
        plain = {"gaussian", "non_private"}
        listed = all(event["event"] in plain for event in self.told["events"])
        expected = runs if listed else None
        same = self.told.get("noise_multipliers") == expected
        return _check("noise listed", [] if same else ["another noise"], "the noise of the events")

    def _log(self) -> Check:
        named = reading.read_log(self.folder)
        if named is None:
            return Check("log", "not here", "log.jsonl is private", "")
        wrong = [f"it names certificate {named[:12]}..."] * (named != self.told["sha256"])
        return _check("log", wrong, "names this certificate")


def _point(name: str, value: float | None) -> dict[str, Span]:
    return {} if value is None else {name: Span(value, value)}


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


def _compared(
    name: str, stated: Mapping[str, Any], recompute: Callable[[], Mapping[str, Span]]
) -> Iterator[Check]:
    """Compare stated numbers with those computed anew, a check each."""
    try:
        found = recompute()
    except (ValueError, ArithmeticError, KeyError) as error:
        yield Check(name, "not recomputed", str(error), "a number computed anew")
        return
    for key in sorted({*stated, *found}):
        label = key if key in ("epsilon", name) else f"{name}: {key}"
        if key not in stated or key not in found:
            yield Check(
                label, "FAILED", f"stated {stated.get(key)}", f"recomputed {found.get(key)}"
            )
            continue
        yield _near(label, stated[key], found[key])


def _near(label: str, stated: Any, span: Span) -> Check:
    number = math.inf if stated == "inf" else stated
    expected = f"{span.low:.6g}" if span.low == span.high else f"{span.low:.6g} to {span.high:.6g}"
    good = type(number) in (int, float) and span.holds(number)
    found = f"stated {stated}, recomputed {expected}"
    return Check(label, "ok" if good else "FAILED", found, "the same, to rounding")
