"""Rounds under secure aggregation, at the coordinator: it sees sums over sites, and nothing else.

A setup (two messages) makes keys and shares for many sessions; a round then takes two messages:
masked sums, and the opening. Every site is asked in every round, with masked zeros where none of
its clients was drawn: so sites do not learn from the protocol who was drawn elsewhere, only which
sites were there to the end.

A round that too few answer is asked again in a new session: nothing of it was opened. A round whose
opening fails is *void*: sites open a round for one list of survivors (`engines.site_masks`), so it
is posted without contributions, charged like any other. Where clients add the noise themselves, a
round is opened only if the clients that answered are at least those whose noise is counted on.

Tests: tests/engines/test_masked.py.
"""

import secrets
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.engine.store import Ids
from coterie.engines.site_masks import MASKED, NO_SESSION, SETUP_SESSIONS, sites_needed, told_of
from coterie.privacy.billboard import Bounded, admit_sum
from coterie.privacy.mechanisms import Mechanism, count_numbers
from coterie.privacy.validation import grid_steps
from coterie.secagg.opening import open_sum
from coterie.secagg.ring import from_ring
from coterie.secagg.roster import sessions_within
from coterie.wire import MOST_HEAD, Expected, Letter, RefusedError

if TYPE_CHECKING:
    from coterie.engines.coordinator import Coordinator

Vectors = Mapping[str, NDArray[np.uint64]]


class Masks:
    """Asks masked rounds for a coordinator."""

    def __init__(self, coordinator: "Coordinator") -> None:
        self._lead = coordinator
        self._needed = sites_needed(coordinator.federation)
        self._setup = ""
        self._sessions = 0
        self._next = 0
        self._advertisements: dict[str, Any] = {}
        self._dealt: dict[str, dict[str, str]] = {}
        self._ready: set[str] = set()
        self._told = ""
        self._is_stale = True

    def parts(self, number: int, cohort: Ids) -> Iterator[Bounded]:
        """Return a round's sum, once it is opened; nothing if the round is void."""
        lead = self._lead
        drawn = lead.drawn(cohort)
        lead.tally.asked = len(cohort)
        for attempt in range(lead.federation.patience + 1):
            lead.tally.ask_again()
            if not self._is_ready() and not self._set_up(number):
                lead.conduct.note("short", round=number + 1, attempt=attempt, why="too few sites")
                continue
            session, self._next = self._next, self._next + 1
            vectors = self._collect(number, session, drawn)
            lead.tally.answered = sum(len(drawn.get(site, ())) for site in vectors)
            if self._may_open(number, vectors, cohort):
                yield from self._open(number, session, vectors)
                return
            lead.conduct.note("short", round=number + 1, attempt=attempt, **lead.tally.told())
        raise lead.short(number)

    def _is_ready(self) -> bool:
        return not self._is_stale and self._next < self._sessions

    def _set_up(self, number: int) -> bool:
        """Have sites make keys and share them; say whether enough did.

        All that advertised must share: whoever is gone in between is left out, in a setup anew.
        """
        lead = self._lead
        there, shared = list(lead.federation.sites), list[str]()
        self._next, self._is_stale, self._ready = 0, True, set()
        wanted = lead.plan.posts - number + lead.federation.patience
        # Half a head: names and the rest must fit beside the shares.
        room = sessions_within(MOST_HEAD // 2, len(there))
        self._sessions = max(1, min(wanted, SETUP_SESSIONS, room))
        while len(there) >= self._needed:
            body: dict[str, Any] = {"setup": secrets.token_hex(16), "sessions": self._sessions}
            answers = self._ask("keys", there, number, body)
            self._setup = body["setup"]
            self._advertisements = {
                site: letter.body.get("advertisement") for site, letter in answers.items()
            }
            told = {"setup": self._setup, "advertisements": self._advertisements}
            dealt = self._ask("shares", list(answers), number, told)
            self._dealt = {site: letter.body.get("shares", {}) for site, letter in dealt.items()}
            there, shared = list(answers), list(dealt)
            if len(there) == len(shared) >= self._needed:
                self._is_stale = False
                break
            there = shared
        lead.conduct.note("set_up", sites=len(shared), sessions=self._sessions)
        return not self._is_stale

    def _ask(
        self, kind: str, sites: list[str], number: int, body: Mapping[str, Any]
    ) -> dict[str, Letter]:
        questions = {site: self._lead.question(kind, site, number, body) for site in sites}
        return dict(self._lead.ask(questions))

    def _collect(
        self, number: int, session: int, drawn: Mapping[str, list[int]]
    ) -> dict[str, NDArray[np.uint64]]:
        """Ask every site of the setup for its masked sum; look whether others came back."""
        lead, mechanism = self._lead, self._lead.billboard.mechanism(number)
        numbers = count_numbers(mechanism.totals(lead.template))
        questions = {}
        for site in lead.federation.sites:
            if site not in self._dealt:
                agreed = {"agreement": lead.conduct.agreement}
                questions[site] = lead.question("hello", site, number, agreed)
                continue
            # Shares are large: they travel until a site has answered with them.
            dealt = {} if site in self._ready else self._shares_for(site)
            body = {
                "setup": self._setup,
                "session": session,
                "clients": drawn.get(site, []),
                "counted": lead.counted(site),
                "shares": dealt,
            }
            questions[site] = lead.question(MASKED, site, number, body)
        # The same at all sites: one of the questions names it for all.
        asked = next(one for one in questions.values() if one.kind == MASKED)
        self._told = told_of(number, asked.arrays)
        vectors = {}
        expected = {MASKED: {MASKED: Expected("uint64", (numbers,))}}
        for site, letter in lead.ask(questions, expected):
            if letter.kind == MASKED:
                self._ready.add(site)
                vectors[site] = letter.arrays[MASKED]
            else:
                self._is_stale = True  # it is back: set up with it before the next round
        if any(NO_SESSION in word for word in lead.words.values()):
            self._is_stale = True
        return vectors

    def _shares_for(self, site: str) -> dict[str, str]:
        boxes = ((sender, box) for sender, box in self._dealt.items() if sender != site)
        return {sender: str(box.get(site, "")) for sender, box in boxes}

    def _may_open(self, number: int, vectors: Vectors, cohort: Ids) -> bool:
        lead, mechanism = self._lead, self._lead.billboard.mechanism(number)
        return len(vectors) >= self._needed and lead.is_enough(mechanism, vectors, cohort)

    def _open(self, number: int, session: int, vectors: Vectors) -> Iterator[Bounded]:
        lead, mechanism = self._lead, self._lead.billboard.mechanism(number)
        survivors = sorted(vectors)
        body = {"setup": self._setup, "session": session, "survivors": survivors}
        revealed: dict[str, Any] = {}
        for _ in range(lead.federation.patience + 1):
            missing = [site for site in survivors if site not in revealed]
            for site, letter in self._ask("unmask", missing, number, body).items():
                revealed[site] = letter.body.get("revealed")
            if len(revealed) >= self._needed:
                break
        try:
            opened = open_sum(
                session, vectors, revealed, self._advertisements, self._needed, self._told
            )
        except RefusedError as error:
            self._is_stale = True
            self._void(number, str(error))
            return
        for site, why in opened.wrong.items():
            lead.refuse(site, why)
        yield self._take_in(mechanism, opened.total, survivors)
        lead.pend(survivors)

    def _take_in(
        self, mechanism: Mechanism, total: NDArray[np.uint64], survivors: list[str]
    ) -> Bounded:
        lead = self._lead
        shapes = mechanism.totals(lead.template)
        grid = grid_steps(mechanism, shapes)
        assert grid is not None
        # All clients of these sites, drawn or not: see `admit_sum`.
        ids = np.concatenate([lead.federation.numbers[site] for site in survivors])
        return admit_sum(mechanism, from_ring(total, shapes, grid), np.sort(ids), lead.template)

    def _void(self, number: int, why: str) -> None:
        """Note that a round is posted without contributions."""
        lead = self._lead
        lead.tally.void, lead.tally.answered = 1, 0
        lead.conduct.note("void", round=number + 1, why=why)
        lead.pend([])
