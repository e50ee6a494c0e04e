"""Sentences on joining, over a grid of situations: they claim what the clients show, no more."""

import itertools
import math
import re

import numpy as np
import pytest
from scipy.stats import binomtest, ttest_1samp

from coterie.evaluation.baselines import PROMISE, Paired, verdict, verdicts
from coterie.evaluation.metrics import Score
from coterie.evaluation.verdict import (
    Headline,
    Verdict,
    clear_side,
    of_summary,
    over_epsilons,
)

SIZES = (1, 2, 3, 5, 8, 20, 21, 60, 537)
SHARES = (0.0, 0.1, 0.35, 0.5, 0.65, 0.9, 1.0)  # of clients that lose
TIES = (0.0, 0.3, 1.0)
OUTLIERS = ("none", "gain", "loss", "infinite")


def situation(clients: int, losing: float, ties: float, outlier: str) -> np.ndarray:
    """Return each client's error under the run minus its error under the baseline."""
    draw = np.random.default_rng(clients)
    apart = np.abs(draw.normal(0.2, 0.05, clients))
    apart[round(losing * clients) :] *= -1
    draw.shuffle(apart)
    apart[: round(ties * clients)] = 0
    changed = np.flatnonzero(apart)
    if len(changed) and outlier != "none":
        apart[changed[0]] = {"gain": -1e3, "loss": 1e3, "infinite": math.inf}[outlier]
    return apart


def score(errors: np.ndarray) -> Score:
    return Score("nmse", 0.5, 0.1, errors, np.full(len(errors), 4))


def summary_of(apart: np.ndarray, name: str = "local") -> dict:
    """Return the summary of a run with these differences, as `Baselines` writes it."""
    paired = Paired.of(score(1e4 + apart), score(np.full(len(apart), 1e4)))
    t = None if math.isnan(paired.t) else paired.t
    shares = {"share_worse_off": paired.worse, "share_better_off": paired.better}
    one = {"name": name, "t": t, "share_worse_than_local_star": None, **shares}
    return {"clients": len(apart), "references": [one]}


def clear_mean(apart: np.ndarray) -> str:
    if len(apart) < 2 or not np.isfinite(apart).all() or not apart.any():
        return "unclear"
    test = ttest_1samp(apart, 0)
    return "unclear" if test.pvalue > 0.05 else "better" if test.statistic < 0 else "worse"


def clear_signs(apart: np.ndarray) -> str:
    gain, lose = int((apart < 0).sum()), int((apart > 0).sum())
    if not gain + lose or binomtest(gain, gain + lose).pvalue > 0.05:
        return "unclear"
    return "better" if gain > lose else "worse"


CLAIMS = {
    r"joining helps(:| on average)": lambda mean, signs: mean == "better",
    r"joining hurts(:| on average)": lambda mean, signs: mean == "worse",
    "hurts more clients than": lambda mean, signs: (mean, signs) == ("unclear", "worse"),
    "helps more clients than": lambda mean, signs: (mean, signs) == ("unclear", "better"),
    "seems|no clear|may be chance": lambda mean, signs: mean == signs == "unclear",
}
"""What tests must have shown where a sentence has these words."""


def check_claim(text: str, apart: np.ndarray) -> None:
    """Check what a sentence claims against the tests of scipy, and against the clients."""
    gain, lose = int((apart < 0).sum()), int((apart > 0).sum())
    for words, shown in CLAIMS.items():
        assert not re.search(words, text) or shown(clear_mean(apart), clear_signs(apart)), text
    # A claim and the clients that it stands on never point to different sides without saying so.
    assert not re.search(r"joining (helps|seems to help):", text) or gain >= lose
    assert not re.search(r"joining (hurts|seems to hurt):", text) or lose >= gain
    assert ("changes nothing" in text) == (not apart.any())
    assert ("equally well" in text) == (0 < len(apart) - gain - lose < len(apart))
    assert "may be chance" not in text or len(apart) <= 20
    if "no clear" in text:
        assert "all " not in text and "only client" not in text
        assert abs(gain - lose) / len(apart) < 0.5, "a difference that a reader sees"


def check_numbers(text: str, apart: np.ndarray) -> None:
    counts = {"better": int((apart < 0).sum()), "worse": int((apart > 0).sum())}
    percents = r"(?<!over )(?<!under )\b(\d+) %(?: of [\d,]+ clients predict)? (better|worse)"
    for share, word in re.findall(percents, text):
        assert int(share) == pytest.approx(100 * counts[word] / len(apart), abs=0.501)
    for number, word in re.findall(r"(\d+) of \d+ clients predicts? (better|worse)", text):
        assert int(number) == counts[word]
    for word in re.findall(r"all [\d,]+ clients predict (better|worse)", text):
        assert counts[word] == len(apart)


@pytest.mark.parametrize("outlier", OUTLIERS)
def test_a_sentence_never_contradicts_the_clients(outlier: str) -> None:
    claims = set()
    for clients, losing, ties in itertools.product(SIZES, SHARES, TIES):
        apart = situation(clients, losing, ties, outlier)
        found = of_summary(summary_of(apart), "local", "local training")
        assert found is not None
        check_claim(str(found), apart)
        check_numbers(str(found), apart)
        claims.add(found.lead)
    assert len(claims) >= 5, "the grid reaches few claims"


def test_the_grid_reaches_every_claim() -> None:
    cells = itertools.product(SIZES, SHARES, TIES, OUTLIERS)
    found = (of_summary(summary_of(situation(*cell)), "local", "local") for cell in cells)
    assert {one.lead for one in found if one is not None} == {
        "joining changes nothing",
        "joining helps",
        "joining helps more clients than it hurts",
        "joining seems to help",
        "joining makes no clear difference",
        "joining seems to hurt",
        "joining hurts more clients than it helps",
        "joining hurts",
    }
    rare = Verdict("worse", 0.6, 0.4, 537)
    assert rare.lead == "joining hurts on average, though more clients gain than lose"
    assert Verdict("better", 0.4, 0.6, 537).lead == (
        "joining helps on average, but more clients lose than gain"
    )


def test_three_clients_that_all_lose_are_said_to_lose() -> None:
    """The mean is not clear, since one of three loses much; a reader sees that all lose."""
    found = of_summary(summary_of(np.array([0.1, 0.2, 26.0])), "local", "local training")
    assert str(found) == (
        "joining seems to hurt: all 3 clients predict worse than with local training; with so few "
        "clients this may be chance"
    )


def test_shares_are_never_rounded_to_all_or_none() -> None:
    text = str(Verdict("better", 9999 / 10_000, 1 / 10_000, 10_000))
    assert "over 99 % of 10,000 clients" in text and "under 1 % worse" in text
    assert "1 of 8 clients predicts worse" in str(Verdict("unclear", 0.0, 1 / 8, 8))


@pytest.mark.parametrize(("t", "clients"), [(-2.5, 3), (2.1, 5), (2.0, 1), (math.nan, 50)])
def test_few_clients_need_a_larger_difference(t: float, clients: int) -> None:
    assert clear_side(t, clients) == "unclear"
    assert math.isnan(t) or clear_side(t, 537) == ("better" if t < 0 else "worse")


def test_the_sentence_of_a_run_and_of_several() -> None:
    gains = np.array([-0.5, -0.4, -0.6, -0.3, 0.1, -0.45, -0.55, -0.2])
    one, star = summary_of(gains), summary_of(-gains, "local_star")
    mixed = {"name": "mixed", "t": 0.1, "share_worse_off": 0.1, "share_worse_than_local_star": 0.08}
    run = {**one, "references": [*one["references"], *star["references"], mixed]}
    assert verdict(run) == (
        "Compared with local training, joining helps: 7 of 8 clients predict better, 1 "
        "worse. Compared with local*, joining hurts: 7 of 8 clients predict worse, 1 better "
        "(without privacy, 8 %)."
    )
    first, second, promise = verdicts({"pmtl": one, "fedavg": summary_of(-gains)})
    assert first.startswith("pmtl: Compared") and "fedavg: " in second and promise == PROMISE
    assert list(verdicts({"local": {"references": [], "clients": 3}})) == []


def test_an_older_summary_has_fewer_sentences() -> None:
    """Summaries had one share only: with ties, the other one cannot be known."""
    told = {"name": "local_star", "t": -3.0, "share_worse_off": 0.2}
    older = {"clients": 60, "references": [told], "share_better_than_local": 0.7}
    assert of_summary(older, "local_star", "local*") is None and verdict(older) == ""
    assert of_summary(older, "local", "local training") is None
    told["name"] = "local"
    assert "70 % of 60 clients" in str(of_summary(older, "local", "local training"))
    nobody = {**older, "clients_without_test_rows": 60}
    assert of_summary(nobody, "local", "local training") is None


def test_over_seeds_a_large_share_may_be_chance() -> None:
    """Seeds vary too: the sign test over clients does not speak, and no claim is made of it."""
    one = Verdict("unclear", 0.7, 0.3, 537, seeds=3)
    assert str(one) == (
        "joining seems to help: 70 % of 537 clients predict better than with local training, 30 % "
        "worse; over 3 seeds this may be chance"
    )
    assert Verdict("unclear", 0.7, 0.3, 537).lead == "joining helps more clients than it hurts"
    assert Verdict("unclear", 0.55, 0.45, 537, seeds=3).lead == "joining makes no clear difference"


def test_one_sentence_on_several_epsilons() -> None:
    helps, also, unclear = (
        Verdict(side, better, 1 - better, 537)
        for side, better in (("better", 0.7), ("better", 0.75), ("unclear", 0.51))
    )
    told = {0.5: unclear, 1.0: helps, 4.0: also}
    found = [Headline(epsilon, "pfeb", 0.3, 0.5, one) for epsilon, one in told.items()]
    assert over_epsilons(found) == (
        "At epsilon 0.5, joining makes no clear difference; at epsilon 1 and 4, it helps."
    )
    assert over_epsilons(found[1:]) == (
        "At every epsilon, joining helps: 70 to 75 % of 537 clients predict better than with local "
        "training."
    )
    leaning = Headline(0.5, "pfeb", 0.3, 0.5, Verdict("unclear", 0.7, 0.3, 537, seeds=3))
    assert over_epsilons([leaning, *found[1:]]) == (
        "At epsilon 0.5, joining seems to help, but this may be chance; at epsilon 1 and 4, it "
        "helps."
    )
    assert over_epsilons([Headline(1.0, "a", 0.3, math.nan, None)]) == (
        "At every epsilon, it is not known whether joining helps."
    )
