"""The certificate of a run, read without trusting it, and compared with the plan.

Format 2 is closed: numbers, names and hashes under the keys listed here, events of a closed
vocabulary, and what the owner declares, as short text. It names a method and a kind of noise;
nothing here depends on which.
"""

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scipy import optimize

from coterie.verification.account import gaussian_epsilon

FORMAT = "coterie certificate"
ACCOUNT = "coterie account"
FORMAT_VERSION = 2
CERTIFICATE, FEDERATION = "guarantee.json", "federation.toml"
_HASH = re.compile("[0-9a-f]{64}")
_MOST = 10**7
"""Rounds of a run that can be checked."""
_NEAR = 1e-9
_SPENT = 0.99
"""Share of a budget that calibrated noise spends at least."""
_FINEST = 2.0**-31
"""Grid step over the bound: with a finer one, sums of many clients are not exact."""
_FIELDS: dict[str, tuple[str, ...]] = {
    "gaussian": ("noise_multiplier", "replaced"),
    "gaussian_shares": ("noise_multiplier", "replaced", "minimum_clients", "corrupt"),
    "gaussian_banded": ("noise_multiplier", "replaced", "bands"),
    "local_gaussian": ("noise_multiplier", "honest", "claimed"),
    "laplace": ("epsilon",),
    "wishart": ("degrees", "ratio", "claimed"),
    "non_private": (),
}
"""The vocabulary of events."""
_WHOLE = ("honest", "degrees", "minimum_clients", "corrupt", "bands")
_REPRODUCTIONS = ("wishart_paper", "local_paper")
_EVENTS = {
    "gaussian": "gaussian",
    "shares": "gaussian_shares",
    "banded": "gaussian_banded",
    "laplace": "laplace",
    "wishart": "wishart",
    "wishart_paper": "wishart",
    "local": "local_gaussian",
    "local_paper": "local_gaussian",
}
"""The event of each built-in kind of noise."""
_NORMS = {
    "gaussian": 2,
    "gaussian_shares": 2,
    "gaussian_banded": 2,
    "local_gaussian": 2,
    "wishart": 2,
    "laplace": 1,
}
_REPLACED = {"sum": 2.0, "rows": 2.0, "gram": math.sqrt(2), "squares": math.sqrt(2)}
"""How far a replaced client moves a release under one bound, over a zeroed one."""
_TYPES: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (str, "format method shape tuning unit relation sampling cohort started finished sha256"),
    (int, "format_version clients rounds"),
    ((int, float), "rate delta"),
    ((int, float, str), "epsilon"),
    ((int, type(None)), "protected_rows"),
    (bool, "simulation"),
    (list, "events releases posts assumed_public"),
    (dict, "views files versions"),
)
_KEYS = {key: kind for kind, keys in _TYPES for key in keys.split()}
_CLAIMS = ("claimed_epsilon", "true_delta_at_claimed")
_OPTIONAL = {
    "epsilon_per_participation", *_CLAIMS, "selection", "deployment", "about", "inputs",
}  # fmt: skip
_ABOUT = ("unit", "operator", "purpose", "contact", "data_period", "region")
_DECLARED = ("source", "licence", "no_private_rows")
_INPUT = ("name", "kind", "hashed", "sha256", *_DECLARED)
_IN_FILES = ("start", "vocabulary", "tags")
_CODE = re.compile(r"[\w.]+:[\w.]+")
_LONGEST = 120
"""Characters of a declared text."""
_PUBLIC_OF_DATA = {
    "vocabulary": "vocabulary",
    "tags": "vocabulary of tags",
    "classes": "names of classes",
    "levels": "levels of categories",
    "dates": "origins of dates",
    "fill": "constants for gaps",
    **dict.fromkeys(("ranges", "center", "scale"), "scaling constants"),
}
_PUBLIC_OF_METHOD = {
    **dict.fromkeys(("start", "weights"), "start weights"),
    **dict.fromkeys(("make", "loss"), "code"),
    "clusters": "clusters of clients",
    **dict.fromkeys(("omega", "diagonal", "factors", "signs"), "relation of clients"),
}
"""Settings of a plan that are public inputs, and what they are."""
_NAMES = {
    "relation": ("zero_out", "replace"),
    "sampling": ("everyone", "poisson", "fixed", "cyclic"),
    "cohort": ("visible", "hidden"),
    "unit": ("client",),
    "shape": ("none", "sum", "gram", "squares", "rows", "pooled"),
}


class UnreadableError(ValueError):
    """Raised when a folder cannot be checked at all."""


def read_certificate(folder: Path) -> dict[str, Any]:
    """Return the certificate of a run.

    Raises:
        UnreadableError: If there is none, or it has another format.
    """
    path = folder / CERTIFICATE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        onward = f"finish it with `coterie run --resume {folder}`"
        if (folder / FEDERATION).exists():
            onward = f"see what it needs to continue: `coterie deploy status {folder}`"
        raise UnreadableError(
            f"{folder}: no {CERTIFICATE}; give the folder of a finished run, or {onward}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UnreadableError(f"{path} cannot be read ({error}); restore it") from error
    if (folder / "run.json").exists() and not (folder / "ledger.jsonl").exists():
        raise UnreadableError(
            f"{folder} is a site's folder of a deployment, which has models and no ledger: check "
            "the coordinator's folder of the run, or its public files"
        )
    if isinstance(found, dict) and found.get("format") == ACCOUNT:
        return found
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise UnreadableError(
            f"{path} is not a certificate: expected format = {FORMAT!r}; run the plan again"
        )
    version = found.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise UnreadableError(
            f"{path}: format_version = {version!r}, expected {FORMAT_VERSION}; check it "
            "with the version of coterie that wrote it, or run the plan again"
        )
    return found


def read_toml(path: Path) -> dict[str, Any] | None:
    """Return a TOML file; None if it is missing, empty if it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return {}


def seal(certificate: Mapping[str, Any]) -> str:
    """Return the hash of a certificate without its own hash: JSON without spaces, keys sorted."""
    rest = {key: value for key, value in certificate.items() if key != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def faults(certificate: Mapping[str, Any]) -> list[str]:
    """Return what a certificate lacks, has in addition, or has of a wrong type."""
    found = [f"unknown field {_short(key)}" for key in certificate.keys() - _KEYS - _OPTIONAL]
    found += [f"{key} is missing" for key in _KEYS.keys() - certificate.keys()]
    found += [
        f"{key} is {_short(value)}"
        for key, value in certificate.items()
        if (kind := _KEYS.get(key)) is not None
        and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool))
    ]
    return found or list(_wrong_values(certificate))


def _wrong_values(stated: Mapping[str, Any]) -> Iterator[str]:
    good = {key: stated[key] in names for key, names in _NAMES.items()}
    good |= {"rate": 0 < stated["rate"] <= 1, "delta": 0 <= stated["delta"] < 1}
    good |= {key: 0 <= stated[key] <= 10**15 for key in ("clients", "rounds")}
    good |= {"clients": good["clients"] and stated["clients"] > 0}
    yield from (f"{key} is {_short(stated[key])}" for key in good if not good[key])
    for name, is_one in (("events", is_event), ("posts", _is_post), ("releases", _is_release)):
        wrong = [one for one in stated[name] if not is_one(one)]
        yield from (f"{name} hold {_short(one)}" for one in wrong)
        if not wrong and (rounds := sum(one.get("rounds", 1) for one in stated[name])) > _MOST:
            yield f"{name}: {_short(rounds)}, more than {_MOST}"
    yield from _wrong_texts(stated)


def _wrong_texts(stated: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with versions, and with what the owner declares."""
    about, inputs, versions = stated.get("about", {}), stated.get("inputs", []), stated["versions"]
    if not isinstance(about, dict) or not about.keys() <= set(_ABOUT):
        yield f"about is {_short(about)}"
    elif not all(_is_text(text) for text in about.values()):
        yield f"about holds {_short(about)}, and not one short printable line each"
    if not isinstance(inputs, list):
        yield f"inputs are {_short(inputs)}"
    else:
        yield from (f"inputs hold {_short(one)}" for one in inputs if not _is_input(one))
    odd = [name for name, text in versions.items() if not (_is_text(name) and _is_text(text))]
    yield from (f"versions hold {_short(name)}" for name in odd)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _LONGEST and value.isprintable()


def _is_input(one: Any) -> bool:
    if not isinstance(one, dict) or set(one) != set(_INPUT):
        return False
    named = _is_text(one["name"]) and _is_text(one["kind"])
    told = all(one[key] is None or _is_text(one[key]) for key in ("source", "licence"))
    digest = one["sha256"]
    hashed = digest is None or (isinstance(digest, str) and _HASH.fullmatch(digest) is not None)
    how = one["hashed"] in ("file", "value", "code")
    return named and told and hashed and how and type(one["no_private_rows"]) is bool


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # too many digits, or too deep
        return f"a {type(value).__name__} that cannot be written"
    return text if len(text) <= 120 else f"{text[:120]}..."


def is_positive(value: Any) -> bool:
    """Return whether a value is a number above 0 that a float can hold."""
    return type(value) in (int, float) and 0 < value < 1.7e308


def is_event(event: Any) -> bool:
    """Return whether a value is an event of the vocabulary with its numbers and its count."""
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return False
    fields = _FIELDS.get(event["event"])
    if fields is None or set(event) != {"event", "rounds", *fields} or not _counts(event):
        return False
    for name in fields:
        is_nothing = (name == "claimed" and event[name] is None) or (
            name == "corrupt" and event[name] == 0
        )
        if not is_nothing and not is_positive(event[name]):
            return False
    whole = all(type(event[name]) is int for name in _WHOLE if name in fields)
    if event.get("corrupt", 0) >= event.get("minimum_clients", 1):
        return False
    return whole and 1 <= event.get("replaced", 1) <= 2 and event.get("degrees", 2) >= 2


def _counts(value: Mapping[str, Any]) -> bool:
    return type(value["rounds"]) is int and value["rounds"] >= 1


def _is_post(post: Any) -> bool:
    return (
        isinstance(post, dict)
        and set(post) == {"index", "sha256"}
        and type(post["index"]) is int
        and isinstance(post["sha256"], str)
    )


def _is_release(release: Any) -> bool:
    good = isinstance(release, dict) and set(release) == {"rounds", "parts"} and _counts(release)
    if not good or not isinstance(release["parts"], list):
        return False
    return bool(release["parts"]) and all(_is_part(part) for part in release["parts"])


def _is_part(part: Any) -> bool:
    if not isinstance(part, dict) or set(part) != {"leaves", "norm", "bound", "grid"}:
        return False
    leaves, numbers = part["leaves"], (part["bound"], part["grid"])
    named = isinstance(leaves, list) and bool(leaves) and all(isinstance(n, str) for n in leaves)
    sized = all(number is None or is_positive(number) for number in numbers)
    return named and sized and part["norm"] in (None, 1, 2) and type(part["norm"]) is not bool


def each(runs: list[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Return the entries of a list of runs one by one, as often as their `rounds` say."""
    for run in runs:
        yield from [run] * run["rounds"]


# The bounds and grids of releases.


def wrong_bounds(plan: Mapping[str, Any], stated: Mapping[str, Any]) -> list[str]:
    """Return how bounds and grids disagree with the events, with each other and with the clip."""
    # The clip bounds the vector of which a second moment is released.
    power = 2 if stated["shape"] in ("gram", "squares") else 1
    clip = _number(_table(plan, "privacy").get("clip")) ** power
    found: list[str] = []
    own = _noise_of(plan)["kind"] in _EVENTS
    for event, release in zip(each(stated["events"]), each(stated["releases"]), strict=False):
        for part in release["parts"]:
            found += _wrong_part(event, part, own=own)
        # Blocks of a sum may be without negative entries, or single numbers: see `replaced_by`.
        least = 1.0 if len(release["parts"]) > 1 else _REPLACED.get(stated["shape"], 1.0)
        if own and event.get("replaced", 2.0) < least * (1 - _NEAR):
            found.append(f"replaced {event['replaced']:g}, of one bound at least {least:g}")
        leaves = [leaf for part in release["parts"] for leaf in part["leaves"]]
        found += ["a leaf is listed twice"] * (len(set(leaves)) != len(leaves))
        bound = release["parts"][0]["bound"]  # further blocks have bounds of their own
        if bound is not None and not math.isclose(bound, clip, rel_tol=_NEAR):
            found.append(f"bound {bound:g}, by the clip of the plan {clip:g}")
    return list(dict.fromkeys(found))


def _wrong_part(event: Mapping[str, Any], part: Mapping[str, Any], *, own: bool) -> Iterator[str]:
    """Yield what is wrong; all of our `own` noise has a bound and a grid."""
    norm, bound, grid = part["norm"], part["bound"], part["grid"]
    if event["event"] == "non_private":
        if (norm, bound, grid) != (None, None, None):
            yield "a release without noise states a bound"
        return
    if (norm is None) != (bound is None):
        yield f"norm {norm}, bound {bound}"
    elif norm is not None and norm != _NORMS[event["event"]]:
        yield f"a bound on the l{norm} norm under {event['event']} noise"
    if grid is None:
        yield from [f"no grid under {event['event']} noise"] * own
    elif math.frexp(grid)[0] != 0.5:
        yield f"grid {grid!r} is no power of two"
    elif bound is not None and grid < _FINEST * bound:
        yield f"grid {grid:g} is too fine for the bound {bound:g}"


# The plan.


def disagreements(plan: Mapping[str, Any], stated: Mapping[str, Any]) -> list[str]:
    """Return what a certificate states differently from the plan of the run."""
    privacy, sampler = _table(plan, "privacy"), _table(plan, "sampler")
    is_cyclic = sampler.get("kind") == "cyclic"
    cohort = _number(sampler.get("cohort", stated["clients"]))
    expected = {
        "relation": privacy.get("relation", "zero_out"),
        "sampling": sampler.get("kind", "poisson"),
        "cohort": "visible" if sampler.get("visible", is_cyclic) else "hidden",
        "simulation": "simulation_seed" in plan,
        "method": _table(plan, "method").get("kind"),
        "tuning": plan.get("tuned", "no"),
    }
    if expected["sampling"] == "fixed" and stated.get("cohort") == "visible":
        # Hidden cohorts of fixed size count as visible where clients keep state: see `Plan`.
        del expected["cohort"]
    found = [
        f"{key}: certificate {stated.get(key)!r}, plan {value!r}"
        for key, value in expected.items()
        if stated.get(key) != value
    ]
    numbers = {
        "delta": _number(privacy.get("delta")),
        # A schedule has a whole number of groups, of at most `cohort` clients each.
        "rate": 1 / math.ceil(stated["clients"] / cohort)
        if is_cyclic and cohort > 0
        else cohort / stated["clients"],
    }
    found += [
        f"{key}: certificate {stated[key]}, plan {value}"
        for key, value in numbers.items()
        if not math.isclose(stated[key], value, rel_tol=_NEAR)
    ]
    accepted = _table(_table(plan, "data"), "source").get("accepted", [])
    found += [
        f"accepted as public, and not stated: {text!r}"
        for text in (accepted if isinstance(accepted, list) else ["accepted is no list"])
        if text not in stated["assumed_public"]
    ]
    charged, chosen = "charged" in plan, "selection" in stated
    return found + [f"a selection: certificate {chosen}, plan {charged}"] * (charged != chosen)


def wrong_declarations(plan: Mapping[str, Any], stated: Mapping[str, Any]) -> list[str]:
    """Return how a certificate's declarations and public inputs differ from those of the plan."""
    declared = _table(plan, "about")
    texts = {key: text for key, text in declared.items() if key != "inputs"}
    found = [
        f"{key}: certificate {stated.get('about', {}).get(key)!r}, plan {texts.get(key)!r}"
        for key in _ABOUT
        if stated.get("about", {}).get(key) != texts.get(key)
    ]
    entries = [one for one in declared.get("inputs", []) if isinstance(one, dict)]
    by_name = {str(one.get("name")): one for one in entries}
    expected = _public_inputs(plan)
    for name, one in by_name.items():
        if "file" in one:
            expected[name] = {"kind": one.get("kind", "other"), "hashed": "file"}
    listed = [one["name"] for one in stated["inputs"]]
    found += [f"{name} is listed twice" for name in set(listed) if listed.count(name) > 1]
    found += [f"{name} is not listed" for name in expected.keys() - set(listed)]
    found += [f"{name} is no input of the plan" for name in set(listed) - expected.keys()]
    usual = {"source": None, "licence": None, "no_private_rows": False}
    return found + [
        f"{key} of {one['name']}: certificate {one[key]!r}, plan {value!r}"
        for one in stated["inputs"]
        for key, value in {
            **{key: by_name.get(one["name"], {}).get(key, usual[key]) for key in usual},
            **expected.get(one["name"], {}),
        }.items()
        if one[key] != value
    ]


def _public_inputs(plan: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings of a plan that are public inputs, and what is to be stated of each."""
    source = _table(_table(plan, "data"), "source")
    found = {
        f"data.source.{key}": _expected(key, kind, source[key])
        for key, kind in _PUBLIC_OF_DATA.items()
        if source.get(key) and type(source[key]) is not int
    }
    if encoder := _table(_table(plan, "data"), "effects").get("encoder"):
        found["data.effects.encoder"] = _expected("encoder", "encoder", encoder)
    left = [("method", _table(plan, "method"))]
    while left:
        place, table = left.pop()
        for key, value in table.items():
            kind = _PUBLIC_OF_METHOD.get(key)
            if kind is not None and value and (key != "loss" or _CODE.fullmatch(str(value))):
                found[f"{place}.{key}"] = _expected(key, kind, value)
            elif isinstance(value, dict):
                left.append((f"{place}.{key}", value))
    return found


def _expected(key: str, kind: str, value: Any) -> dict[str, Any]:
    """Return kind and how it is hashed; a value of the plan has a hash that is known."""
    if isinstance(value, str) and (key in _IN_FILES or _CODE.fullmatch(value)):
        return {"kind": kind, "hashed": "file" if key in _IN_FILES else "code"}
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return {
        "kind": kind,
        "hashed": "value",
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


def wrong_budget(plan: Mapping[str, Any], stated: Mapping[str, Any]) -> list[str]:
    """Return how the events, the budget and the noise of a plan disagree."""
    privacy = _table(plan, "privacy")
    asked, given = privacy.get("epsilon"), privacy.get("noise_multiplier")
    if (asked is None) == (given is None):
        return [f"the plan has epsilon = {asked} and noise_multiplier = {given}: one is needed"]
    if asked != math.inf and not is_positive(given if asked is None else asked):
        return [f"the plan has epsilon = {asked!r}, noise_multiplier = {given!r}: no such budget"]
    kinds = {event["event"] for event in stated["events"]}
    if asked == math.inf:
        noisy = kinds - {"non_private"}
        return ["the plan asks for no privacy, and events have noise"] * bool(noisy)
    if "non_private" in kinds:
        return ["the plan asks for privacy, and an event has no noise"]
    return _wrong_noise(privacy, stated) or (_wrong_amount(plan, stated) if kinds else [])


def _noise_of(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan's noise as a table with its kind."""
    noise = _table(plan, "privacy").get("noise", "gaussian")
    return {"kind": "gaussian", **noise} if isinstance(noise, dict) else {"kind": noise}


def _wrong_noise(privacy: Mapping[str, Any], stated: Mapping[str, Any]) -> list[str]:
    """Compare events with the noise of the plan.

    A built-in kind of noise has one kind of event, and only a reproduction has a paper's claim. A
    setting of the noise that is also a field of the event has the same value there. Of noise of
    other packages nothing else is assumed.
    """
    noise = _noise_of({"privacy": privacy})
    kind = noise["kind"]
    wanted = {key: value for key, value in noise.items() if key != "kind"}
    wanted |= {"event": _EVENTS[kind]} if kind in _EVENTS else {}
    if kind == "shares":  # two thirds of all clients answer, and a tenth of these may collude
        least = int(_number(wanted.setdefault("minimum_clients", -(-2 * stated["clients"] // 3))))
        wanted.setdefault("corrupt", least // 10)
    found = [
        f"{key} of an event is {event[key]!r}, of the plan's noise {value!r}"
        for event in stated["events"]
        for key, value in wanted.items()
        if key in event and event[key] != value
    ]
    claims = {event.get("claimed") is not None for event in stated["events"]}
    found += ["a paper's claim on some events and not on others"] * (len(claims) > 1)
    if kind in _EVENTS and claims and claims != {kind in _REPRODUCTIONS}:
        found.append(f"a paper's claim: certificate {True in claims}, plan's noise {kind!r}")
    return found


def _wrong_amount(plan: Mapping[str, Any], stated: Mapping[str, Any]) -> list[str]:
    """Compare how much noise there is with the plan: by round, and in total."""
    privacy = _table(plan, "privacy")
    asked, given = privacy.get("epsilon"), privacy.get("noise_multiplier")
    weights, wrong = _weights(privacy, stated["rounds"])
    if wrong:
        return wrong
    if (claimed := stated.get("claimed_epsilon")) is not None:
        # A reproduction: the paper's number is the budget, and nothing is guaranteed.
        same = asked is None or (is_positive(claimed) and math.isclose(claimed, asked))
        return [f"claimed_epsilon: certificate {claimed!r}, plan {asked}"] * (not same)
    if asked is None:
        return _wrong_rounds(stated["events"], weights, _number(given))
    if stated["protected_rows"] is not None:
        base = _converted(float(asked), stated, weights)
        return _wrong_rounds(stated["events"], weights, base)
    found = _wrong_rounds(stated["events"], weights, None)
    # The budget holds against the other clients; with noise in shares, the coordinator among them.
    spent = stated["views"].get("coordinator_and_corrupt", stated["epsilon"])
    good = is_positive(spent) and _SPENT * asked <= spent <= asked * (1 + 1e-6)
    return found + [f"epsilon {spent}, the noise was made for {asked}"] * (not good)


def _converted(asked: float, stated: Mapping[str, Any], weights: list[float]) -> float:
    """Return the noise multiplier of a recipe that protects rows, for clients of several rows.

    Liang et al., Proposition 3: (epsilon/n, delta/(n e^epsilon)) for one of n rows, which moves a
    fit by at most 2/n of its bound.
    """
    rows = float(stated["protected_rows"])
    target, delta = asked / rows, stated["delta"] / rows * math.exp(-asked)
    log = optimize.brentq(
        lambda log: gaussian_epsilon(math.exp(log), delta) - target, -30.0, 8.0, xtol=1e-13
    )
    moved = 2 / rows * math.sqrt(math.fsum(weight**2 for weight in weights))
    return moved / math.exp(float(log))


def _wrong_rounds(
    events: list[Mapping[str, Any]], weights: list[float], base: float | None
) -> list[str]:
    """Compare each round's noise with the base over its weight; without a base, with the first."""
    found: list[str] = []
    near = _NEAR if base is None else 1e-6
    for number, (event, weight) in enumerate(zip(each(events), weights, strict=False), 1):
        noise = _noise(event)
        base = noise * weight if base is None else base
        if not math.isclose(noise * weight, base, rel_tol=near):
            found.append(f"round {number}: noise {noise:g}, plan {base:g} over {weight:g}")
    return found


def _noise(event: Mapping[str, Any]) -> float:
    """Return what a weight divides: the noise of a round."""
    if "noise_multiplier" in event:
        return float(event["noise_multiplier"])
    return 1 / float(event["ratio"] if "ratio" in event else event["epsilon"])


def _weights(privacy: Mapping[str, Any], rounds: int) -> tuple[list[float], list[str]]:
    """Return the weights of the rounds, or what is wrong with them."""
    spend, budget = _table(privacy, "spend"), privacy.get("budget", [])
    if budget:
        good = isinstance(budget, list) and len(budget) == rounds
        if not good or not all(is_positive(weight) for weight in budget):
            return [], [f"budget is not {rounds} positive weights"]
        return [float(weight) for weight in budget], []
    kind, steps = str(spend.get("kind", "even")), range(1, rounds + 1)
    if kind == "even":
        return [1.0] * rounds, []
    name, usual = {"power": ("alpha", 0.4), "geometric": ("Q", 0.97)}.get(kind, ("kind", kind))
    value = spend.get(name, usual)
    if type(value) not in (int, float) or not math.isfinite(value):
        return [], [f"spend.{name} is {value!r}"]
    if kind == "power":
        return [(step / (rounds if value > 0 else 1)) ** value for step in steps], []
    return [value ** ((rounds if value < 1 else 1) - step) for step in steps], []


def _number(value: Any) -> float:
    """Return a number of a plan that is not negative; not-a-number for anything else."""
    good = type(value) in (int, float) and 0 <= value < 1.7e308
    return float(value) if good else math.nan


def _table(plan: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = plan.get(name)
    return found if isinstance(found, dict) else {}
