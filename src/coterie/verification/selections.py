"""The checks of settings that were chosen by private runs: of the chosen run, and of the whole.

The chosen run states what it costs whoever sees it alone, and what that follows from
(`selection` in its certificate, `[charged]` in its plan). The folder of the whole selection, which
is not for them, has `selection.json` with both numbers, the scores, and every run.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.verification.accounting import Account, Span, by_view, count
from coterie.verification.archives import read_loose, read_number
from coterie.verification.reading import UnreadableError, is_event, is_positive, read_ledger
from coterie.verification.renyi import Choice, parameter
from coterie.verification.verdict import Check, Makes, Verdict, compared, guarded, judge
from coterie.verification.words import round_up

RECORD = "selection.json"
_COARSE = 1.02
"""How much more a bound on a grid of orders may be than one without."""
_CHOSEN = "RDP bound (Papernot and Steinke 2022, Theorem 2), for whoever sees the chosen run alone"
_OTHERS = "other clients: all runs and scores together"
_BOUNDS = {"epsilon_chosen_alone": _CHOSEN, "epsilon_other_clients": _OTHERS}
_SAME = ("relation", "delta", "clients", "sampling", "rate", "cohort", "simulation")
_UNCHECKED = (
    "that K and settings were drawn by chance and scores computed as stated; that nobody made the "
    "folder up whole: selection.json is not signed",
)


def of_chosen(plan: Mapping[str, Any], told: Mapping[str, Any]) -> Iterator[Check]:
    """Check what a run says of having been chosen, if it does or its plan does."""
    charged, stated = plan.get("charged"), told.get("selection")
    if charged is None and stated is None:
        return
    if not isinstance(charged, dict) or not isinstance(stated, dict):
        yield Check("selection", "FAILED", "of plan and certificate one says nothing", "both")
        return
    wrong = _misfits(charged, stated, told)
    yield judge("selection", wrong, "as [charged] in plan.toml, this run on offer")
    if wrong:
        return
    choice = _choice(told, stated["candidates"], stated["score_event"], stated)
    yield from compared(
        "epsilon of the chosen run alone",
        {"epsilon of the chosen run alone": stated.get("epsilon_chosen_alone")},
        lambda: {"epsilon of the chosen run alone": _span(choice)},
    )


def _misfits(
    charged: Mapping[str, Any], stated: Mapping[str, Any], told: Mapping[str, Any]
) -> list[str]:
    """List how the choice of a certificate, its plan and its events disagree."""
    score, offered = stated.get("score_event"), stated.get("candidates")
    if not _is_offer(offered) or not _is_score(score):
        return ["candidates or score_event are no lists of Gaussian events"]
    if not _is_law(stated.get("runs_mean"), stated.get("eta")):
        return [f"runs_mean = {stated.get('runs_mean')!r}, eta = {stated.get('eta')!r}"]
    assert isinstance(score, dict) and isinstance(offered, list)
    planned = {
        "runs": stated["runs_mean"],
        "eta": stated["eta"],
        "score_noise": score["noise_multiplier"],
        "score_replaced": score["replaced"],
        "candidates": [
            [[run["noise_multiplier"], run["replaced"], run["rounds"]] for run in runs]
            for runs in offered
        ],
    }
    found = [
        f"{key}: certificate {value}, plan {charged.get(key)}"
        for key, value in planned.items()
        if charged.get(key) != value
    ]
    found += ["its own events were not on offer"] * (told["events"] not in offered)
    found += ["another delta"] * (stated.get("delta") != told["delta"])
    return found


def _choice(
    shared: Mapping[str, Any], offered: list[Any], score: Mapping[str, Any], law: Mapping[str, Any]
) -> Choice:
    kinds = {json.dumps(runs): runs for runs in offered}
    return Choice(
        candidates=list(kinds.values()),
        score=score,
        mean=float(law["runs_mean"]),
        eta=float(law["eta"]),
        sampling=shared["sampling"],
        rate=float(shared["rate"]),
        visible=shared["cohort"] == "visible",
        relation=shared["relation"],
        delta=float(shared["delta"]),
    )


def _span(choice: Choice) -> Span:
    found = choice.chosen_alone()
    return Span(found, found * _COARSE)


def _is_offer(offered: Any) -> bool:
    return (
        isinstance(offered, list)
        and bool(offered)
        and all(isinstance(runs, list) and runs for runs in offered)
        and all(is_event(run) and run["event"] == "gaussian" for runs in offered for run in runs)
    )


def _is_score(score: Any) -> bool:
    return is_event(score) and score["event"] == "gaussian" and score["rounds"] == 1


def _is_law(mean: Any, eta: Any) -> bool:
    good = is_positive(mean) and 1 < mean <= 1000
    return good and type(eta) in (int, float) and 0 <= eta <= 100


def verify_selection(folder: Path) -> Verdict:
    """Check the whole of a selection: both epsilons, the scores, and that the runs are its own.

    The runs themselves are checked one by one, as any other.

    Raises:
        UnreadableError: If there is no record of it to check.
    """
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnreadableError(f"{folder / RECORD} cannot be read ({error}); restore it") from error
    wrong = list(guarded("selection well-formed", lambda: _formed(record)))
    if wrong[0].status != "ok":
        return Verdict(str(folder), tuple(wrong), _UNCHECKED)
    return Verdict(str(folder), (*wrong, *_Whole(folder, record).checks()), _UNCHECKED)


def _formed(record: Any) -> Check:
    told = record["guarantee"]
    drawn, runs, law = told["drawn"], record["runs"], told["law"]
    wrong = ["candidates are no lists of Gaussian events"] * (not _is_offer(told["candidates"]))
    wrong += ["score is no Gaussian event"] * (
        not isinstance(told["score"], list)
        or len(told["score"]) != 1
        or not _is_score(told["score"][0])
    )
    wrong += [f"law is {law!r}"] * (not _is_law(law["mean"], law["eta"]))
    if not isinstance(drawn, list) or not all(type(number) is int for number in drawn):
        wrong.append("drawn are no numbers")
    elif not drawn or not 0 <= min(drawn) <= max(drawn) < len(told["candidates"]):
        wrong.append("drawn are others than are on offer")
    wrong += [f"{len(runs)} runs, {len(drawn)} drawn"] * (len(runs) != len(drawn))
    wrong += ["rate, delta or clients are none"] * (
        not all(is_positive(told[key]) for key in ("rate", "delta", "clients"))
        or not told["rate"] <= 1 > told["delta"]
    )
    names = [run["run"] for run in runs]
    wrong += ["a run is listed twice"] * (len(set(names)) != len(names))
    wrong += ["it is not finished: go on with the command that began it"] * (
        record["finished"] is not True
    )
    return judge("selection well-formed", wrong, "every field there, and of its kind")


@dataclass(frozen=True)
class _Whole:
    folder: Path
    record: Mapping[str, Any]

    @property
    def told(self) -> Mapping[str, Any]:
        found = self.record["guarantee"]
        assert isinstance(found, dict)
        return found

    def checks(self) -> Iterator[Check]:
        parts: dict[str, Makes] = {
            "draw": self._draw,
            "epsilon of the chosen run alone": self._alone,
            "epsilon of the other clients": self._others,
            "scores": self._scores,
            "runs": self._runs,
            "words": self._words,
        }
        for name, make in parts.items():
            yield from guarded(name, make)

    def _draw(self) -> Check:
        """Compare what was drawn, and from what, with what was asked for."""
        told, asked = self.told, self.record["asked"]
        law = told["law"]
        wrong = [
            f"{key}: asked for {asked[key]}, law {law[name]}"
            for key, name in (("runs", "mean"), ("eta", "eta"))
            if asked[key] != law[name]
        ]
        gamma = parameter(float(law["mean"]), float(law["eta"]))
        wrong += [f"gamma {law['gamma']}, of this mean {gamma}"] * (
            not math.isclose(law["gamma"], gamma, rel_tol=1e-6)
        )
        wrong += ["a seed, and no simulation"] * ((asked["seed"] is None) == told["simulation"])
        settings: dict[int, Any] = {}
        for number, run in zip(told["drawn"], self.record["runs"], strict=True):
            if settings.setdefault(number, run["settings"]) != run["settings"]:
                wrong.append(f"candidate {number} has several settings")
        return judge("draw", wrong, "the law that was asked for", f"{len(told['drawn'])} runs")

    def _alone(self) -> Iterator[Check]:
        told, name = self.told, "epsilon of the chosen run alone"
        law = {"runs_mean": told["law"]["mean"], "eta": told["law"]["eta"]}
        choice = _choice(told, told["candidates"], told["score"][0], law)
        stated = told["epsilon_chosen_alone"]
        yield from compared(name, {name: stated["epsilon"]}, lambda: {name: _span(choice)})

    def _others(self) -> Iterator[Check]:
        """Compose all runs and scores, as the other clients see them."""
        told, name = self.told, "epsilon of the other clients"
        events = [
            event
            for number in told["drawn"]
            for event in (*told["candidates"][number], *told["score"])
        ]
        account = Account(
            events=count(events),
            kind=told["sampling"],
            rate=float(told["rate"]),
            visible=told["cohort"] == "visible",
            relation=told["relation"],
            delta=float(told["delta"]),
        )
        stated = told["epsilon_other_clients"]
        yield from compared(
            name,
            {name: stated["epsilon"]},
            lambda: {name: by_view(account)["other_clients"]},
        )

    def _scores(self) -> Check:
        """Check the scores' account and posts, and that the best of them was chosen."""
        scores, runs, told = self.folder / "scores", self.record["runs"], self.told
        ledger, lying = read_ledger(scores), read_loose(scores / "posts")
        wrong, every = [*ledger.faults, *lying.faults], list(range(len(runs)))
        event = {**told["score"][0], "rounds": len(runs)}
        named = [{key: float(v) if key != "event" else v for key, v in event.items()}]
        header = {
            "plan": _hash(json.dumps([self.record["asked"], told["drawn"]], sort_keys=True)),
            "posts": len(runs),
            "events": _hash(repr(named)),
        }
        wrong += [
            f"its ledger was opened for another {key}"
            for key, value in header.items()
            if ledger.header.get(key) != value
        ]
        if not ledger.charged == list(ledger.released) == sorted(lying.digests) == every:
            wrong.append(f"{len(lying.digests)} scores for {len(runs)} runs")
        wrong += [
            f"score {index} is altered"
            for index, digest in lying.digests.items()
            if ledger.released.get(index) != digest
        ]
        return judge("scores", wrong + self._best(), "one a run, the best chosen", f"{len(runs)}")

    def _best(self) -> list[str]:
        cohort, runs = float(self.told["rate"]) * self.told["clients"], self.record["runs"]
        posts = self.folder / "scores" / "posts"
        found = [read_number(posts / f"{i:06d}.npz", "score") / cohort for i in range(len(runs))]
        wrong = [
            f"score {index}: stated {run['score']}, posted {score:g}"
            for index, (run, score) in enumerate(zip(runs, found, strict=True))
            if not math.isclose(run["score"], score, rel_tol=1e-6, abs_tol=1e-12)
        ]
        best = runs[max(range(len(runs)), key=lambda index: found[index])]["run"]
        return wrong + [f"chosen is {self.record['chosen']}, the best is {best}"] * (
            self.record["chosen"] != best
        )

    def _runs(self) -> Check:
        """Compare each run's certificate with the candidate that it was drawn as."""
        wrong = []
        listed = {run["run"] for run in self.record["runs"]}
        lying = {f"runs/{path.name}" for path in (self.folder / "runs").iterdir()}
        wrong += [f"{name} is not of this selection" for name in sorted(lying - listed)]
        for number, run in zip(self.told["drawn"], self.record["runs"], strict=True):
            if run["run"] not in lying:
                wrong.append(f"{run['run']} is missing")
                continue
            wrong += [f"{run['run']}: {said}" for said in self._unlike(number, run["run"])]
        return judge("runs", wrong, "each as it was drawn", f"{len(listed)} runs")

    def _unlike(self, number: int, name: str) -> list[str]:
        text = (self.folder / name / "guarantee.json").read_text(encoding="utf-8")
        run, told = json.loads(text), self.told
        found = [f"another {key}" for key in _SAME if run[key] != told[key]]
        found += ["other events"] * (run["events"] != told["candidates"][number])
        stated = told["epsilon_chosen_alone"]["epsilon"]
        chosen = run.get("selection", {}).get("epsilon_chosen_alone")
        if not is_positive(chosen) or not math.isclose(chosen, stated, rel_tol=1e-9):
            found.append(f"epsilon of the chosen run alone {chosen}, selection {stated}")
        return found

    def _words(self) -> Check:
        told, lines = self.told, []
        if told["simulation"]:
            lines.append("SIMULATION: noise from a known seed, not a guarantee.")
        at, number = f"at delta = {told['delta']:.3g}", len(told["drawn"])
        runs = "1 run" if number == 1 else f"{number} runs"
        alone, others = (round_up(told[key]["epsilon"]) for key in _BOUNDS)
        lines.append(f"{_CHOSEN}: epsilon = {alone} {at}.")
        lines.append(f"{_OTHERS} ({runs}): epsilon = {others} {at}.")
        said = self.record["words"]
        wrong = [] if said == "\n".join(lines) else [f"said is {said!r}"]
        wrong += [
            f"{key} is a {told[key]['bound']!r}"
            for key, bound in _BOUNDS.items()
            if told[key]["bound"] != bound
        ]
        return judge("words", wrong, " ".join(lines))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
