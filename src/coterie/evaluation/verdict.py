"""Whether joining helped: the one place that turns a comparison of clients into a sentence.

Every client is compared with itself under a baseline, on the same test rows. Two tests decide what
may be said: one of the mean difference (`clear_side`), and the exact sign test of the clients that
gain against those that lose. A sentence never claims more than they show, and its claim and its
numbers come from the same comparison.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from scipy import special

Side = Literal["better", "worse", "unclear"]

LEVEL = 0.05
"""A difference is clear if chance alone makes one as large with at most this probability."""
_FEW = 20
"""Up to this many clients are counted; of more, the share is given."""
_LEANS, _LEANS_OVER_SEEDS = 0.5, 0.2
"""Differences of shares that look large to a reader, even where they may be chance."""


def clear_side(t: float, clients: int) -> Side:
    """Return which side is better on average, from t, the mean in standard errors (below 0 better).

    By Student's test over clients.

    >>> clear_side(-2.5, 537), clear_side(-2.5, 3)
    ('better', 'unclear')
    """
    if math.isnan(t) or clients < 2 or abs(t) <= special.stdtrit(clients - 1, 1 - LEVEL / 2):
        return "unclear"
    return "better" if t < 0 else "worse"


@dataclass(frozen=True)
class Verdict:
    """How clients fare with the models of a run, compared with a baseline.

    Attributes:
        average: The side that is clearly better on average.
        better: The share of clients whose error is smaller; NaN if unknown.
        worse: The share of clients whose error is larger.
        clients: Their number, those with test rows.
        baseline: What they are compared with.
        seeds: How many runs the shares are means of. With several, clients do not vary alone, and
            the sign test says nothing.
    """

    average: Side
    better: float
    worse: float
    clients: int
    baseline: str = "local training"
    seeds: int = 1

    @property
    def lead(self) -> str:
        """The claim, such as "joining helps"."""
        if self.better == self.worse == 0:
            return "joining changes nothing"
        losing = self._majority == "worse"
        if self.average == "better":
            few = ", but more clients lose than gain" if losing else ""
            return f"joining helps{' on average' if few else ''}{few}"
        if self.average == "worse":
            few = ", though more clients gain than lose" if self._majority == "better" else ""
            return f"joining hurts{' on average' if few else ''}{few}"
        if self._signs_clear:
            return (
                "joining hurts more clients than it helps"
                if losing
                else ("joining helps more clients than it hurts")
            )
        if self._leans:
            return "joining seems to hurt" if losing else "joining seems to help"
        return "joining makes no clear difference"

    @property
    def hedged(self) -> str:
        """The claim without its numbers: what may be chance is called so."""
        return f"{self.lead}, but this may be chance" if "seems" in self.lead else self.lead

    @property
    def detail(self) -> str:
        """The numbers behind the claim, as a clause."""
        return self._detail(f" than with {self.baseline}")

    def compared(self) -> str:
        """Return claim and numbers as a sentence that names the baseline first."""
        return f"Compared with {self.baseline}, {self.lead}: {self._detail('')}"

    def _detail(self, than: str) -> str:
        if self.better == self.worse == 0:
            return f"no client predicts better or worse{than}"
        first, second = ("worse", "better") if self._majority == "worse" else ("better", "worse")
        shares = {"better": self.better, "worse": self.worse}
        text = f"{self._count(shares[first])} {first}{than}"
        if shares[second] > 0:
            text += f", {_share(shares[second], self.clients)} {second}"
        if self.better + self.worse < 1 - 1e-9:
            text += ", the others equally well"
        if self.average == "unclear" and not self._signs_clear and self._leans:
            few = f"over {self.seeds} seeds" if self.seeds > 1 else "with so few clients"
            text += f"; {few} this may be chance"
        elif self.average == "unclear" and self._signs_clear:
            text += "; the average difference is not clear"
        return text

    def __str__(self) -> str:
        return f"{self.lead}: {self.detail}"

    @property
    def _majority(self) -> Side:
        if self.better == self.worse:
            return "unclear"
        return "better" if self.better > self.worse else "worse"

    @property
    def _signs_clear(self) -> bool:
        """Whether more clients gain than lose, or the other way round, by the exact sign test."""
        if self.seeds > 1:
            return False
        gain, lose = (round(share * self.clients) for share in (self.better, self.worse))
        return gain + lose > 0 and 2 * float(special.bdtr(min(gain, lose), gain + lose, 0.5)) <= (
            LEVEL
        )

    @property
    def _leans(self) -> bool:
        least = _LEANS if self.seeds == 1 else _LEANS_OVER_SEEDS
        return abs(self.better - self.worse) >= least

    def _count(self, share: float) -> str:
        """Return clients and their verb: "6 of 8 clients predict"."""
        if self.clients == 1:
            return "the only client predicts"
        if share > 1 - 0.5 / self.clients:
            return f"all {self.clients:,} clients predict"
        if self.clients <= _FEW:
            number = round(share * self.clients)
            return f"{number} of {self.clients} clients {'predicts' if number == 1 else 'predict'}"
        return f"{_share(share, self.clients)} of {self.clients:,} clients predict"


def _share(share: float, clients: int) -> str:
    """Return a share of clients: their number where they are few, else whole per cent.

    >>> _share(0.25, 8), _share(0.25, 400), _share(0.9999, 30_000)
    ('2', '25 %', 'over 99 %')
    """
    if clients <= _FEW:
        return str(round(share * clients))
    if 0 < share < 0.005:
        return "under 1 %"
    return "over 99 %" if 0.995 <= share < 1 else f"{100 * share:.0f} %"


def of_summary(result: Mapping[str, Any], name: str, baseline: str) -> Verdict | None:
    """Return the verdict of a summary on a baseline that it lists; None where it has none."""
    found = next((one for one in result.get("references") or () if one["name"] == name), None)
    if found is None or found.get("share_worse_off") is None:
        return None
    clients = int(result["clients"]) - int(result.get("clients_without_test_rows") or 0)
    older = result.get("share_better_than_local") if name == "local" else None
    better, t = found.get("share_better_off", older), found.get("t")
    if better is None or clients < 1:  # how many clients were equal is not known
        return None
    side = clear_side(math.nan if t is None else float(t), clients)
    return Verdict(side, float(better), float(found["share_worse_off"]), clients, baseline)


@dataclass(frozen=True)
class Headline:
    """The best private method at one epsilon.

    Attributes:
        value: Its metric.
        local: That of local training; NaN if unknown.
        as_good: Methods that are not clearly worse.
    """

    epsilon: float
    method: str
    value: float
    local: float
    verdict: Verdict | None
    as_good: tuple[str, ...] = ()


def over_epsilons(headlines: Sequence[Headline]) -> str:
    """Return one sentence on several epsilons: at which of them joining helps, and how many."""
    by_lead: dict[str, list[Headline]] = {}
    for one in headlines:
        lead = (
            "it is not known whether joining helps" if one.verdict is None else one.verdict.hedged
        )
        by_lead.setdefault(lead, []).append(one)
    leads = {
        lead: f"{'joining' if number == 0 else 'it'} {lead.removeprefix('joining ')}"
        if lead.startswith("joining ")
        else lead
        for number, lead in enumerate(by_lead)
    }
    parts = [
        f"at {_epsilons([one.epsilon for one in alike], len(headlines))}, {leads[lead]}"
        for lead, alike in by_lead.items()
    ]
    text = "; ".join(parts) + (_range(headlines) if len(by_lead) == 1 else "")
    return f"{text[0].upper()}{text[1:]}."


def _range(headlines: Sequence[Headline]) -> str:
    """Return which clients predict better at several epsilons, as the end of a sentence."""
    verdicts = [one.verdict for one in headlines if one.verdict is not None]
    if not verdicts:
        return ""
    shares, clients = [one.better for one in verdicts], verdicts[0].clients
    low, high = (_share(share, clients) for share in (min(shares), max(shares)))
    both = low if low == high else f"{low.removesuffix(' %')} to {high}"
    return f": {both} of {clients:,} clients predict better than with {verdicts[0].baseline}"


def _epsilons(found: Sequence[float], of: int) -> str:
    if len(found) == of:
        return "every epsilon"
    *first, last = (f"{epsilon:g}" for epsilon in found)
    return f"epsilon {', '.join(first)} and {last}" if first else f"epsilon {last}"
