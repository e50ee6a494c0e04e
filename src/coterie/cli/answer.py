"""What `coterie plan` computes and prints: whether joining pays, and what it costs.

From public facts only it loads neither torch nor data. With data or a plan it reads the spec.
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli.account import make_sampler
from coterie.cli.options import ADAPTIVE, aligned, check_file
from coterie.planning.advice import (
    CLIP,
    ERROR,
    FEW_PARAMETERS,
    HEAVY,
    JOIN,
    KNEE,
    LARGE_BUDGET,
    MEAN_SHARE,
    MOST_ROUNDS,
    ROUNDS,
    Advice,
    Facts,
    Forecast,
    Points,
    advise,
    affordable_rounds,
    cut_for,
    describe_error,
    epsilon_by_rounds,
    error_by_clients,
    forecast,
    judge,
    most_rounds,
    noises_near,
    rounds_for,
    search_limit,
)
from coterie.privacy.events import Relation, share_counts
from coterie.privacy.guarantee import RELATIONS, UNIT, round_up, show_delta

if TYPE_CHECKING:
    from coterie.data.federated import Spec, Task
    from coterie.planning.plan import Plan
    from coterie.report.plan import Shown

_EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
_CONCRETE = ("data", "plan", "finetune")
_KNOWN_NOISE = ("gaussian", "shares", "local")
_NO_BUDGET = "No verdict: epsilon = inf adds no noise, so there is nothing to weigh"
_UNKNOWN = (
    "No verdict on {}: the rule weighs Gaussian noise against a released mean, and this plan "
    "releases none, or its noise is not Gaussian"
)
_HEADS = ("epsilon", "verdict", "rounds", "max. parameters", "clients for a small gain", "to join")


def answer(arguments: argparse.Namespace) -> None:
    """Print what `coterie plan` was asked."""
    flags = _concrete_flags(arguments)
    found = _from_plan(arguments, flags) if flags else answer_facts(arguments)
    if arguments.plot:
        draw(found, arguments.plot)
    if arguments.json:
        print(json.dumps(found.to_json(), indent=2, allow_nan=False))
    elif found.advice is None:
        print(f"{found.reason}.")
    else:
        print("\n".join(_lines(found, found.advice, plots=not arguments.no_plot)))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is known about a plan; `reason` alone where there is no verdict."""

    advice: Advice | None = None
    table: Sequence[Advice] = ()
    about: dict[str, Any] = field(default_factory=dict)
    forecast: Forecast | None = None
    limit: float | None = None
    full: bool = True
    reason: str = ""
    default_method: bool = False

    def error_under_pfeb(self) -> float | None:
        """Return the noise of a mean under the default method; None if another was asked for.

        Its contributions have more parts than the mean, and these share the budget.
        """
        advice = self.advice
        if not self.default_method or self.forecast is None or advice is None or self.limit:
            return None
        if advice.parameters <= FEW_PARAMETERS and advice.clients * advice.mu >= LARGE_BUDGET:
            return None  # second derivatives are released too, and the shares differ
        return self.forecast.error / math.sqrt(MEAN_SHARE)

    def omitted(self) -> list[str]:
        """Return what would take longer than the answer itself."""
        grid = 0 if self.full or self.forecast is None else self.forecast.grid
        heavy = ["within.rounds", "within.epsilon", "by_epsilon"] if grid > HEAVY else []
        return [*heavy, *(["epsilon_by_rounds"] if grid > HEAVY // 3 else [])]

    def curves(self) -> tuple[Points, Points]:
        """Return epsilon by rounds and the error of a mean by clients; empty if unknown."""
        if self.forecast is None:
            return (), ()
        slow = "epsilon_by_rounds" in self.omitted()
        by_rounds = () if slow else epsilon_by_rounds(self.forecast)
        return by_rounds, error_by_clients(self.forecast)

    def to_json(self) -> dict[str, Any]:
        """Return what scripts read; strict JSON."""
        if self.advice is None:
            return self.about | {"verdict": None, "words": self.reason}
        found = self.about | self.advice.to_json() | {"by_epsilon": [_row(a) for a in self.table]}
        if self.forecast is None:
            return found
        by_rounds, by_clients = self.curves()
        more = self.forecast.to_json()
        more["error"]["relative_under_pfeb"] = self.error_under_pfeb()
        return {
            **found,
            **more,
            "epsilon_limit": self.limit,
            "epsilon_by_rounds": [list(point) for point in by_rounds],
            "left_out": self.omitted(),
            "error_by_clients": [list(point) for point in by_clients],
        }


def _concrete_flags(arguments: argparse.Namespace) -> list[str]:
    """Return the flags that ask for more than one clipped sum and its budget."""
    given = [name for name in _CONCRETE if getattr(arguments, name) is not None]
    given += ["method"] if arguments.method not in (None, "auto") else []
    given += ["model"] if arguments.model not in (None, "linear") else []
    given += ["set"] if arguments.set else []
    given += ["clip"] if arguments.clip == ADAPTIVE else []
    # With --parameters the plan is one clipped sum; else the noise decides on the method.
    plain = arguments.noise in (None, "gaussian", *(_KNOWN_NOISE if arguments.parameters else ()))
    given += [] if plain else ["noise"]
    return [f"--{name.replace('_', '-')}" for name in given]


def answer_facts(arguments: argparse.Namespace) -> Answer:
    """Answer from the numbers given; torch is not loaded."""
    clients, parameters = _clients(arguments), _parameters(arguments)
    epsilon, noise = arguments.epsilon, arguments.noise_multiplier
    if epsilon is None and noise is None:
        epsilon = 1.0
    if epsilon == math.inf and noise is None:
        _advice(arguments, clients, parameters, 1.0)  # refuses what is wrong with the other facts
        return Answer(reason=_NO_BUDGET)
    advice = _advice(arguments, clients, parameters, epsilon)
    facts = _facts(arguments, clients, parameters, epsilon, advice.rounds)
    limit = None if noise is None else epsilon
    found = forecast(facts, epsilon_limit=limit, full=arguments.full)
    heavy = found.grid > HEAVY and not arguments.full
    rows = () if noise is not None or heavy else _EPSILONS

    def at(epsilon: float, near: float | None) -> Advice:
        if near is None or epsilon == facts.epsilon:
            return _advice(arguments, clients, parameters, epsilon)
        usual = {"delta": arguments.delta, "relation": facts.relation}
        rule = advise(clients, epsilon, parameters, **usual)
        mu = replace(facts, epsilon=None, noise_multiplier=near).mu()
        return judge(replace(facts, epsilon=epsilon), mu=mu, rule=rule.rounds)

    # Closed forms are instant; an account on a grid is queried once per row.
    near = noises_near(facts, found.noise_multiplier, rows) if found.grid and rows else {}
    return Answer(
        advice=advice,
        table=[at(one, near.get(one)) for one in rows],
        forecast=found,
        default_method=arguments.parameters is None
        and arguments.noise != "local"
        and noise is None,
        limit=limit,
        full=arguments.full,
    )


def _facts(
    arguments: argparse.Namespace,
    clients: int,
    parameters: int,
    epsilon: float | None,
    rounds: int,
) -> Facts:
    noise: float | None = arguments.noise_multiplier
    relation: Relation = arguments.relation or "zero_out"
    return Facts(
        clients=clients,
        parameters=parameters,
        rounds=rounds,
        sampler=make_sampler(arguments.sampling, arguments.cohort, arguments.cohort_visible),
        epsilon=None if noise is not None else epsilon,
        noise_multiplier=noise,
        delta=arguments.delta,
        relation=relation,
        clip=CLIP if arguments.clip is None else arguments.clip,
        local=arguments.noise == "local",
        shares=share_counts(clients, arguments.minimum_clients, arguments.corrupt)
        if _in_shares(arguments)
        else None,
        cut=_cut(arguments),
        classes=arguments.task != "regression",
    )


def _cut(arguments: argparse.Namespace) -> float:
    """Return the affordable rounds from which joining gains; unknown models count as large."""
    classes = arguments.classes is not None or arguments.task not in (None, "regression")
    weights = (_features(arguments) if arguments.features else 0) + 1
    return cut_for(weights, classes=classes, rows=arguments.rows_per_client)


def _in_shares(arguments: argparse.Namespace) -> bool:
    return bool(arguments.trust == "nobody" or arguments.noise == "shares")


def _advice(
    arguments: argparse.Namespace, clients: int, parameters: int, epsilon: float | None
) -> Advice:
    """Return whether joining pays; where noise is given, by the rounds that it affords."""
    relation: Relation = arguments.relation or "zero_out"
    rounds: int | None = arguments.rounds
    hidden_poisson = arguments.sampling in (None, "poisson") and not arguments.cohort_visible
    central = arguments.noise != "local" and not _in_shares(arguments)
    if arguments.noise_multiplier is None and hidden_poisson and central:
        assert epsilon is not None
        usual = {"delta": arguments.delta, "relation": relation, "rounds": rounds}
        usual["cut"] = _cut(arguments)
        advice = advise(clients, epsilon, parameters, cohort=arguments.cohort, **usual)
        return replace(advice, clip=CLIP if arguments.clip is None else arguments.clip)
    rule = ROUNDS[1]
    if arguments.noise_multiplier is None:
        assert epsilon is not None
        rule = advise(clients, epsilon, parameters, delta=arguments.delta, relation=relation).rounds
        # Sampling and noise of clients' own leave less of the budget than the rule assumes.
        mu = _facts(arguments, clients, parameters, epsilon, rule).mu()
        rule = min(rule, rounds_for(affordable_rounds(clients * mu, parameters), ROUNDS, KNEE))
    facts = _facts(arguments, clients, parameters, epsilon, rounds or rule)
    if arguments.noise_multiplier is not None:
        if rounds is None and epsilon is not None:
            rule = max(1, most_rounds(facts, arguments.noise_multiplier, epsilon))
        facts = replace(facts, rounds=rounds or rule)
    return judge(facts, mu=facts.mu(), rule=rule)


def _from_plan(arguments: argparse.Namespace, flags: Sequence[str]) -> Answer:
    """Answer for a plan made of flags; torch is loaded here."""
    from coterie.cli.flags import make_plan

    assumed = arguments.data is None and arguments.plan is None
    if arguments.parameters is not None:
        raise ValueError(
            f"--parameters {arguments.parameters} describes one released mean, and "
            f"{', '.join(flags)} asks for a whole plan: leave out --parameters"
            f"{' and give --features N' if assumed else ''}, or leave out {', '.join(flags)}"
        )
    spec = _spec(arguments) if assumed else None
    if assumed:
        absent = ("features", "classes", "clients", "task")
        values = {**vars(arguments), **dict.fromkeys(absent), "data": "synthetic"}
        arguments = argparse.Namespace(**values)
    plan = make_plan(arguments)
    spec = plan.data.open().spec if spec is None else spec
    return answer_plan(plan, spec, None if assumed else plan.data.name, full=arguments.full)


def answer_plan(plan: "Plan", spec: "Spec", named: str | None, *, full: bool) -> Answer:
    """Answer for a plan on data of this spec; `named` is the name of the data, if it is known."""
    from coterie.planning.rules import advice_for, facts_of, resolve

    resolved = resolve(plan, spec)
    resolved.guarantee(spec.clients)
    resolved.method.check(spec)
    about = {"data": named, "method": str(resolved.method), "chosen": resolved.chosen}
    advice = advice_for(resolved, spec)
    if advice is None:
        free = resolved.privacy.epsilon == math.inf
        return Answer(about=about, reason=_NO_BUDGET if free else _UNKNOWN.format(about["method"]))
    table = []
    for epsilon in _EPSILONS:
        budget = replace(plan.privacy, epsilon=epsilon, noise_multiplier=None)
        table.append(advice_for(resolve(replace(plan, privacy=budget), spec), spec))
    facts = facts_of(resolved, spec, advice)
    return Answer(
        advice=advice,
        table=[row for row in table if row is not None],
        about=about,
        forecast=None if facts is None else forecast(facts, full=full),
        full=full,
    )


def _clients(arguments: argparse.Namespace) -> int:
    if arguments.clients is None:
        raise ValueError("how many clients? give --clients N, or --data NAME|FILE")
    return int(arguments.clients)


def _parameters(arguments: argparse.Namespace) -> int:
    """Return the parameters of a linear model: a weight per feature and a bias, per output."""
    if arguments.parameters is None:
        return (_features(arguments) + 1) * _outputs(arguments)
    if arguments.features is not None:
        raise ValueError(
            f"--parameters {arguments.parameters} and --features {arguments.features}: give one"
        )
    return int(arguments.parameters)


def _features(arguments: argparse.Namespace) -> int:
    given = arguments.features
    if given is None:
        raise ValueError("which model? give --parameters N, or --features N for a linear model")
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(f"--features {given}: without --data, expected their number")
    return int(given)


def _outputs(arguments: argparse.Namespace) -> int:
    given = arguments.classes
    if given is None:
        return 1
    count = int(given) if given.isdecimal() else len(given.split(","))
    if count < 2:
        raise ValueError(f"--classes {given}: expected at least 2")
    return count if count > 2 or arguments.task == "multilabel" else 1


def _spec(arguments: argparse.Namespace) -> "Spec":
    """Return the spec of data described by flags."""
    from coterie.data.federated import Spec

    outputs = _outputs(arguments)
    usual: Task = (
        "multiclass" if outputs > 1 else "regression" if arguments.classes is None else "binary"
    )
    return Spec((_features(arguments),), outputs, arguments.task or usual, _clients(arguments))


def _lines(answer: Answer, advice: Advice, *, plots: bool) -> list[str]:
    lines = [f"{advice}"]
    if answer.about:
        about = answer.about
        lines += [f"{about['data'] or 'The plan'}: {about['chosen'] or about['method']}."]
    lines += ["", *aligned(_rows(answer, advice))]
    if advice.remedies:
        lines += ["", "What would help", *(f"  {remedy}" for remedy in advice.remedies)]
    if answer.forecast is not None:
        lead, changes = _limits(answer.forecast, advice.epsilon)
        lines += ["", lead, *(f"  {line}" for line in aligned(changes))]
    if plots:
        lines += _plots(answer)
    if answer.omitted():
        lines += ["", f"Omitted, to answer at once: {', '.join(answer.omitted())}; add --full"]
    if answer.table:
        lines += ["", *lined([_HEADS, *(tuple(_row(one).values()) for one in answer.table)])]
    return lines


def _rows(answer: Answer, advice: Advice) -> list[tuple[str, str]]:
    rows = [
        ("rounds", f"{advice.rounds:,}"),
        ("clip", f"{advice.clip:.4g}"),
        ("shared parameters", f"{advice.parameters:,} (at most {advice.max_parameters:,})"),
        (
            "affordable rounds",
            f"{advice.affordable_rounds:.3g} (below {advice.cut:.2g}: learn alone; to "
            f"{JOIN * advice.cut:.2g}: small gain; beyond: join)",
        ),
        ("protected", f"{UNIT}; relation {advice.relation}: {RELATIONS[advice.relation]}"),
    ]
    found = answer.forecast
    if found is None:
        return rows
    rows += [
        ("noise multiplier", _noise(found)),
        (
            "noise in a mean",
            f"{found.over_clip * found.facts.clip:.3g} per parameter; {found.error:.3g} of the "
            f"clipping norm in total: {describe_error(found.error)}",
        ),
    ]
    if (error := answer.error_under_pfeb()) is not None:
        text = f"{error:.3g} of the clipping norm under pfeb, the default, which releases more"
        rows += [("", f"{text}: {describe_error(error)}")]
    return [*rows, *_views(found), *_rounds_at_noise(found, answer.limit)]


def _noise(found: Forecast) -> str:
    """Return the noise multiplier and what it refers to."""
    z, summed = found.noise_multiplier, found.over_clip * found.cohort
    if found.facts.local:
        text = "standard deviation of the noise in one client's message, divided by the clip"
        return f"{z:.4g} ({text}; in a sum of {found.cohort:,.4g}: {summed:.4g})"
    text = "standard deviation of the noise in a sum, divided by the clip"
    if math.isclose(z, summed, rel_tol=1e-3):
        return f"{z:.4g} ({text})"
    if found.facts.shares is not None:
        return f"{z:.4g} ({text}; with the shares of all clients: {summed:.4g})"
    return f"{z:.4g} ({text}: {summed:.4g}, as its parts share the budget)"


def _views(found: Forecast) -> list[tuple[str, str]]:
    """Return epsilon by adversary, one per line."""
    titles = {
        "other_clients": "against the other clients",
        "server": "against the server",
        "server_secure_aggregation": "against the server, under secure aggregation",
        "coordinator": "against the coordinator, which sees only sums and the cohort",
        "coordinator_and_corrupt": "against the coordinator with the clients that may collude",
        "coalition_of_all_others": "against all other clients together",
        "released_shared_model": "against an outsider who receives the shared model",
    }
    values = {name: round_up(found.views[name]) for name in titles if name in found.views}
    lines = [f"{value} {titles[name]}" for name, value in values.items()]
    if values.get("server") == "inf":
        lines[1:3] = [
            "inf against the server, which observes each clipped contribution (under secure "
            "aggregation, their exact sum) and adds the noise"
        ]
    facts = found.facts
    lines[0] += (
        f" (delta {show_delta(facts.delta_of(facts.clients))}, {facts.relation}, unit: one client)"
    )
    return [("epsilon" if turn == 0 else "", line) for turn, line in enumerate(lines)]


def _rounds_at_noise(found: Forecast, limit: float | None) -> list[tuple[str, str]]:
    if limit is None or found.rounds_at_noise is None:
        return []
    planned = found.facts.rounds
    text = f"{_many(found.rounds_at_noise, planned)}, within epsilon {limit:g} at this noise"
    if found.epsilon > limit * (1 + 1e-9):
        text += f": {planned:,} are too many"
    return [("rounds (at most)", text)]


def _limits(found: Forecast, epsilon: float | None) -> tuple[str, list[tuple[str, str]]]:
    """Return what keeps the noise within the limit, one change at a time: a lead, and changes."""
    at = "at this noise multiplier" if epsilon is None else f"at epsilon {epsilon:g}"
    within = found.within
    rounds, clients, least = within["rounds"], within["clients"], within["epsilon"]

    def most(count: str) -> str:
        return "not possible" if count == "0" else f"at most {count}"

    rows = [
        ("rounds", "" if rounds is None else most(_many(int(rounds), found.facts.rounds))),
        ("clients", "" if clients is None else f"at least {clients:,}"),
        ("epsilon", "" if least is None else f"at least {round_up(least, 3)}"),
        ("shared parameters", most(f"{within['parameters']:,}")),
    ]
    lead = f"To keep the noise in a mean within {ERROR:g} of the clipping norm {at}, change one of"
    return lead, [(name, value) for name, value in rows if value]


def _many(rounds: int, planned: int) -> str:
    if rounds >= search_limit(planned) and rounds < MOST_ROUNDS:
        return f"{rounds:,} or more"
    return f"{rounds:,}"


def _row(advice: Advice) -> dict[str, Any]:
    return {
        "epsilon": advice.epsilon,
        "verdict": advice.verdict,
        "rounds": advice.rounds,
        "most_numbers": advice.max_parameters,
        "clients_for_small_gain": advice.needs["small gain"]["clients"],
        "clients_to_join": advice.needs["join"]["clients"],
    }


def lined(rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return the lines of a table, columns to the right."""
    cells = [[_shown(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    ]


def _shown(cell: float | str) -> str:
    if isinstance(cell, str):
        return cell
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:g}"


def _plots(answer: Answer) -> list[str]:
    """Return two small plots, where the terminal has room for them."""
    width = shutil.get_terminal_size().columns
    by_rounds, by_clients = answer.curves()
    lines = []
    for points, title in (
        (by_rounds, "epsilon against rounds, at this noise"),
        (by_clients, "noise in a released mean, relative to the clip, by number of clients"),
    ):
        drawn = bars(points, title, width=width, height=3, plain=not _has_blocks())
        lines += ["", *drawn] if drawn else []
    return lines


def _has_blocks() -> bool:
    try:
        "▁█".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def bars(
    points: Points, title: str, *, width: int = 60, height: int = 4, plain: bool = False
) -> list[str]:
    """Return y against x as bars of characters, both on logarithmic scales; [] without room.

    `plain` keeps to ASCII. Points that are not positive and finite are left out.

    >>> for line in bars([(1, 1), (10, 10), (100, 100)], "y by x", width=43, height=1):
    ...     print(line)
    y by x
        100 |           ▄▄▄▄▄▄▄▄▄▄▄███████████
          1 |1                             100
    """
    kept = [(x, y) for x, y in points if x > 0 and 0 < y < math.inf]
    if width < 40 or len(kept) < 2:
        return []
    xs, ys = ([math.log(point[axis]) for point in kept] for axis in (0, 1))
    low, high = min(ys), max(ys)
    each = (min(width, 72) - 9) // len(kept)
    marks = " ....::::" if plain else " ▁▂▃▄▅▆▇█"
    full = [0.5 if high == low else (y - low) / (high - low) for y in ys]
    lines = [title]
    for row in range(height - 1, -1, -1):
        cells = [marks[round(8 * min(max(share * height - row, 0), 1))] * each for share in full]
        end = _short(math.exp(high)) if row == height - 1 else ""
        lines.append(f"{end:>7} |{''.join(cells)}".rstrip())
    first, last = _short(math.exp(xs[0])), _short(math.exp(xs[-1]))
    space = each * len(kept) - len(first)
    lines.append(f"{_short(math.exp(low)):>7} |{first}{last:>{max(1, space)}}")
    return lines


def _short(value: float) -> str:
    """Return a number in at most seven characters.

    >>> _short(1000.0), _short(0.0123456), _short(1234567.0)
    ('1,000', '0.0123', '1.2e+06')
    """
    if value >= 99.5 and round(value) < 100_000:
        return f"{round(value):,}"
    return f"{value:.3g}" if 1e-3 <= value < 1e5 else f"{value:.1e}"


def draw(answer: Answer, paths: list[str]) -> None:
    """Write the page or the pictures of a plan, by Vega-Altair (extra `report`)."""
    from coterie.report.plan import KINDS, write_plan

    for path in paths:
        if Path(path).suffix.lower() not in KINDS:
            raise ValueError(f"--plot {path}: expected a name that ends in {', '.join(KINDS)}")
        check_file(Path(path), "--plot")
    shown = _shown_by(answer)
    for path in paths:
        write_plan(shown, Path(path))


def chart_of(answer: Answer) -> Any:
    """Return the plots of an answer as an Altair chart."""
    from coterie.report.plan import picture

    return picture(_shown_by(answer)).chart()


def _shown_by(answer: Answer) -> "Shown":
    from coterie.report.charts import can_draw
    from coterie.report.plan import Shown

    if not can_draw():
        raise ValueError(
            "--plot needs altair, which is not installed: pip install 'coterie[report]'"
        )
    found, advice = answer.forecast, answer.advice
    if found is None or advice is None:
        raise ValueError(
            "--plot: there is nothing to plot, because this plan releases no mean with the same "
            "Gaussian noise in all rounds; leave out --plot"
        )
    by_rounds, by_clients = replace(answer, full=True).curves()
    about = answer.about.get("data") or "Plan"
    return Shown(
        title=f"{about}: {advice.clients:,} clients, {advice.parameters:,} shared parameters",
        advice=advice,
        forecast=found,
        facts=_rows(answer, advice),
        limits=_limits(found, advice.epsilon),
        by_epsilon=(
            _HEADS,
            [[_shown(cell) for cell in _row(one).values()] for one in answer.table],
        ),
        by_rounds=by_rounds,
        by_clients=by_clients,
    )
