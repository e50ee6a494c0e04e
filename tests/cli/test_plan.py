"""`coterie plan`: what is printed, from public facts and of data, and what is never touched."""

import json
import math
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.report.runs import check, drawn

from coterie.cli.main import main
from coterie.data.federated import Spec
from coterie.methods.base import choices
from coterie.methods.pmtl import PMTL
from coterie.planning.advice import advise, clients_for, mu_of
from coterie.planning.plan import Plan, Privacy
from coterie.planning.rules import advice_for, plan_for, resolve
from coterie.privacy.guarantee import round_up
from coterie.privacy.sampling import Poisson


@pytest.fixture
def told(capsys):
    def call(line, code=0):
        capsys.readouterr()
        try:
            found = main(shlex.split(f"plan {line}"))
        except SystemExit as stop:
            found = stop.code
        out, err = capsys.readouterr()
        assert found == code, err
        assert (err == "") == (code == 0)
        return out if code == 0 else err

    return call


def strict(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_thirty_clients_are_told_to_learn_alone_and_what_would_help(told):
    out = told("--clients 30 --epsilon 1 --parameters 10")
    assert out.startswith("Learn alone: with 30 clients, epsilon 1 supports models with up to 5 sh")
    for part in (
        "More clients: 40 for a small gain, 79 to join, at epsilon 1.",
        "A larger epsilon: 1.35 for a small gain",
        "Fewer shared parameters: at most 5 for a small gain",
        "Public features",
        'shared = "slice"',
    ):
        assert part in out
    assert max(map(len, out.splitlines())) < 220


def test_the_table_by_epsilon_is_the_rule_at_each(told):
    lines = told("--clients 100 --parameters 10 --no-plot").split("\n\n")[-1].splitlines()
    assert len(lines) == 6 and len({len(line) for line in lines}) == 1
    for line, epsilon in zip(lines[1:], (0.5, 1.0, 2.0, 4.0, 8.0), strict=True):
        advice = advise(100, epsilon, 10)
        small, join = (clients_for(worth, epsilon, 10) for worth in (1.0, 4.0))
        cells = [f"{epsilon:g}", *advice.verdict.split(), str(advice.rounds)]
        assert line.split() == [*cells, f"{advice.max_parameters:,}", f"{small:,}", f"{join:,}"]


KEYS = {
    "noise_multiplier", "accountant", "cohort", "rounds_at_noise", "within", "statement",
    "epsilon_spent", "epsilon_limit", "epsilon_by_view", "reasons", "sampling", "cohort_visible",
    "error", "epsilon_by_rounds", "error_by_clients", "left_out", "by_epsilon", "view", "unit",
}  # fmt: skip


def test_json_has_the_advice_and_what_the_noise_does(told):
    found = strict(told("--clients 550 --epsilon 1 --parameters 10 --json"))
    table = found["by_epsilon"]
    outlook = {key: found.pop(key) for key in KEYS}
    assert found == strict(json.dumps(advise(550, 1.0, 10).to_json()))
    assert [row["epsilon"] for row in table] == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert table[1]["verdict"] == "join" and table[1]["clients_for_small_gain"] == 40
    told_of = {"per_number", "over_clip", "relative", "relative_under_pfeb", "verdict"}
    assert set(outlook["error"]) == told_of and outlook["error"]["relative_under_pfeb"] is None
    assert set(outlook["within"]) == {"error", "rounds", "clients", "epsilon", "numbers"}
    assert outlook["epsilon_by_view"]["server"] == "inf" and outlook["left_out"] == []


def test_every_key_of_the_json_is_documented(told):
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    found = strict(told("--clients 550 --epsilon 1 --parameters 10 --json"))
    missing = [key for key in (*found, *found["error"], *found["within"]) if f"`{key}`" not in page]
    assert not missing


def test_the_noise_of_a_plan_under_coins_is_that_of_calibrate(told, capsys):
    flags = "--clients 205 --cohort 100 --rounds 100 --epsilon 2"
    found = strict(told(f"{flags} --parameters 10 --json"))
    assert main(shlex.split(f"calibrate {flags} --json")) == 0
    assert found["noise_multiplier"] == json.loads(capsys.readouterr().out)["noise_multiplier"]


def test_rows_of_the_table_under_coins_are_near_the_rule_at_each(told):
    found = strict(told("--clients 205 --cohort 100 --rounds 100 --parameters 10 --json"))
    for row in found["by_epsilon"]:
        advice = advise(205, row["epsilon"], 10, cohort=100, rounds=100)
        assert row["most_numbers"] == pytest.approx(advice.max_parameters, rel=0.01, abs=1)
        assert row["clients_to_join"] == pytest.approx(advice.needs["join"]["clients"], rel=0.02)


@pytest.mark.parametrize(
    "flags",
    [
        "--noise-multiplier 20 --rounds 4",
        "--sampling fixed --cohort 40 --relation replace",
        "--cohort 40 --cohort-visible",
        "--sampling everyone --clip 2",
        "--noise local --cohort 40",
    ],
)
def test_facts_alone_are_enough_for_every_sampling_and_noise(told, flags):
    found = strict(told(f"--clients 200 --parameters 8 --json {flags}"))
    assert found["verdict"] in ("join", "small gain", "learn alone")
    z, cohort = found["noise_multiplier"], found["cohort"]
    heard = math.sqrt(cohort) if "local" in flags else cohort
    assert found["error"]["relative"] == pytest.approx(math.sqrt(8) * z / heard)
    assert found["error"]["per_number"] == pytest.approx(found["clip"] * z / heard)
    # The rule is built on the same number: worth = T (0.3 / error)^2, pfeb's reach apart.
    if "replace" not in flags:
        worth = found["rounds"] * (0.3 / found["error"]["relative"]) ** 2
        assert found["worth"] == pytest.approx(worth, rel=1e-6)


@pytest.mark.parametrize(
    ("relation", "compared"),
    [
        ("zero_out", "the client's contributions are replaced by zero"),
        ("replace", "the client is replaced by any other client"),
    ],
)
def test_epsilon_is_printed_with_unit_and_relation(told, relation, compared):
    line = f"--clients 200 --parameters 8 --relation {relation}"
    out = told(line)
    assert f"(delta 1e-05, {relation}, unit: one client)" in out
    (protected,) = [line for line in out.splitlines() if line.startswith("protected")]
    assert "one client, with its whole data and state" in protected and compared in protected
    found = strict(told(f"{line} --json"))
    assert found["relation"] == relation and found["view"] == "other clients"
    assert found["unit"] == "one client, with its whole data and state"


def test_an_outsiders_number_is_not_that_of_whoever_gets_the_model(told):
    line = (
        "--clients 100 --parameters 10 --sampling fixed --cohort 20 --relation replace --rounds 5"
    )
    found = strict(told(f"{line} --json"))
    views = found["epsilon_by_view"]
    assert found["view"] == "other clients"
    assert found["epsilon_spent"] == views["other_clients"]
    assert views["released_shared_model"] == views["outsider"] < views["other_clients"]
    assert "its epsilon is that of the releases" in found["reasons"]["released_shared_model"]
    out = told(line)
    assert f"{round_up(views['other_clients'])} against the other clients" in out
    assert "against an outsider who receives the shared model" in out


def test_noise_of_messages_is_not_called_that_of_a_sum(told):
    line = "--clients 100 --parameters 10 --noise local --rounds 5"
    z = strict(told(f"{line} --json"))["noise_multiplier"]
    # a hundred messages, each with its own noise: the deviation of their sum is ten times one's
    told_of = "standard deviation of the noise in one client's message, divided by the clip"
    assert f"{z:.4g} ({told_of}; in a sum of 100: {10 * z:.4g})" in told(line)
    assert "(standard deviation of the noise in a sum, divided by the clip)" in told(
        "--clients 100 --parameters 10 --rounds 5"
    )


def test_noise_that_is_given_buys_rounds_within_an_epsilon(told):
    line = "--clients 200 --parameters 8 --noise-multiplier 20 --delta 1e-5"
    found = strict(told(f"{line} --epsilon 1 --json"))
    assert found["rounds"] == found["rounds_at_noise"] == int((20 * 0.26805) ** 2) == 28
    assert found["epsilon"] is None and found["epsilon_limit"] == 1 >= found["epsilon_spent"]
    assert "28, within epsilon 1" in told(f"{line} --epsilon 1")
    assert "30 are too many" in told(f"{line} --epsilon 1 --rounds 30")


@pytest.mark.full
def test_a_plan_of_data_has_the_error_that_the_plan_states(told):
    line = "--data synthetic --option clients=120 --option features=5 --epsilon 2"
    for method in ("pmtl", "pfeb", "fedavg"):
        found = strict(told(f"{line} --method {method} --json"))
        spec = Spec((5,), 1, "regression", 120)
        plan = plan_for(spec, Privacy(epsilon=2.0), method=choices()[method]())
        assert found["error"]["relative"] == pytest.approx(plan.relative_error(spec))
        assert found["noise_multiplier"] == pytest.approx(plan.noise_multipliers(120)[0])
        assert found["epsilon_spent"] == pytest.approx(plan.guarantee(120).epsilon)


def test_sketches_fit_the_terminal_and_can_be_left_out(told, monkeypatch):
    line = "--clients 550 --epsilon 1 --parameters 10"
    monkeypatch.setenv("COLUMNS", "60")
    out = told(line)
    drawn = [row for row in out.splitlines() if " |" in row]
    assert len(drawn) == 8 and max(map(len, drawn)) <= 60
    assert "▁" in out or "▅" in out
    assert " |" not in told(f"{line} --no-plot")
    monkeypatch.setenv("COLUMNS", "30")
    assert " |" not in told(line)


def test_the_answer_comes_first_and_fits_a_screen(told):
    out = told("--clients 550 --epsilon 1 --parameters 10").splitlines()
    assert out[0].startswith("Join: ") and len(out) < 45


@pytest.mark.full
def test_plots_are_files_that_need_no_network(told, tmp_path):
    pytest.importorskip("altair")
    paths = [tmp_path / f"plan.{kind}" for kind in ("html", "svg", "png", "pdf")]
    told("--clients 60 --parameters 10 " + " ".join(f"--plot {path}" for path in paths))
    picture = paths[1].read_text()
    assert picture.startswith("<svg") and "joining should bring a small gain" in picture
    assert "rounds" in picture and "clients" in picture and "this plan" in picture
    assert (
        paths[2].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and paths[3].read_bytes()[:4] == b"%PDF"
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("clients", "answer"),
    [(30, "Joining should not pay: train locally."), (60, "Joining should bring a small gain."),
     (550, "Joining should pay.")],
)  # fmt: skip
def test_the_page_of_a_plan_is_a_report(told, tmp_path, clients, answer):
    pytest.importorskip("altair")
    flags = f"--clients {clients} --epsilon 1 --parameters 10"
    found = json.loads(told(f"{flags} --json"))
    told(f"{flags} --plot {tmp_path / 'plan.html'}")
    page = (tmp_path / "plan.html").read_text()
    parts = check(page)
    text = " ".join(" ".join(parts.texts).split())
    assert answer in text[: text.index("What epsilon means")]
    assert all(line in text for line in (found["words"], *found["remedies"]))
    assert ("What would help" in text) == bool(found["remedies"])
    assert found["delta"] == 1e-5 and "epsilon at delta 0.00001, against other clients" in text
    assert "It does not hold against the server" in text
    assert f"in clipping norms: {found['error']['verdict']}" in text, (
        "the card repeats the terminal"
    )
    for row in found["by_epsilon"]:
        assert f"{row['epsilon']:g} {row['verdict']} {row['rounds']:,}" in text
    by_rounds, by_clients = drawn(parts).values()
    (here,) = by_rounds["datasets"]["rounds_here"]
    assert (here["x"], here["y"]) == (found["rounds"], pytest.approx(found["epsilon_spent"], 1e-4))
    (here,) = by_clients["datasets"]["clients_here"]
    assert (here["x"], here["y"]) == (clients, pytest.approx(found["error"]["relative"], 1e-4))
    whole = [(row["x"], row["y"]) for row in by_rounds["datasets"]["by_rounds"]]
    assert whole == [pytest.approx(point, rel=1e-4) for point in found["epsilon_by_rounds"]]


def test_plots_of_other_kinds_are_refused(told, tmp_path):
    err = told(f"--clients 100 --parameters 10 --plot {tmp_path}/plan.bmp", code=2)
    assert ".html, .svg, .png, .pdf" in err


@pytest.mark.parametrize(
    ("flags", "numbers"),
    [
        ("--features 9", 10),
        ("--features 9 --model linear --method auto", 10),
        ("--features 9 --classes 2", 10),
        ("--features 9 --classes 3", 30),
        ("--features 9 --classes a,b,c,d", 40),
        ("--features 9 --classes 2 --task multilabel", 20),
    ],
)
def test_numbers_of_linear_models_are_counted(told, flags, numbers):
    assert strict(told(f"--clients 550 {flags} --json"))["numbers"] == numbers


def test_budgets_reach_the_rule(told):
    line = "--clients 500 --epsilon 2 --parameters 40 --delta 1e-7 --relation replace --json"
    found = strict(told(f"{line} --cohort 50 --rounds 6"))
    advice = advise(500, 2.0, 40, delta=1e-7, relation="replace", cohort=50, rounds=6)
    assert (
        found["worth"] == advice.affordable_rounds
        and found["rounds"] == 6
        and found["delta"] == 1e-7
    )


def test_a_method_without_data_is_judged_by_what_it_posts(told):
    facts = "--clients 200 --features 20 --epsilon 1 --json"
    found = strict(told(f"{facts} --method pmtl"))
    assert (found["method"], found["data"], found["numbers"]) == ("pmtl", None, 21)
    network = strict(told(f"{facts} --clients 150 --classes 5 --model mlp"))
    assert network["method"] == "dpfedmtl" and network["numbers"] == 64 * 21
    assert network["verdict"] == "learn alone" and "slice" in network["chosen"]
    assert "The plan: dpfedmtl" in told("--clients 200 --features 20 --model mlp")


def test_data_give_their_spec_and_nothing_else(told):
    line = "--data synthetic --option clients=120 --option features=5 --method pmtl --cohort 30"
    found = strict(told(f"{line} --epsilon 2 --json"))
    spec = Spec((5,), 1, "regression", 120)
    advice = advice_for(
        resolve(Plan(method=PMTL(), privacy=Privacy(epsilon=2.0), sampler=Poisson(30)), spec), spec
    )
    assert found["worth"] == advice.affordable_rounds and found["data"] == "synthetic"
    assert found["clip"] == 0.5 and found["clients"] == 120
    fewer = strict(told(f"{line} --clients 60 --json"))
    assert fewer["clients"] == 60


def test_plans_in_files_are_read(told, tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(
        'rounds = 4\n[data]\nname = "synthetic"\n[method]\nkind = "fedavg"\n'
        "[privacy]\nnoise_multiplier = 20.0\n"
    )
    found = strict(told(f"--plan {path} --json"))
    assert (found["method"], found["rounds"], found["epsilon"]) == ("fedavg", 4, None)
    assert found["mu"] == pytest.approx(math.sqrt(4) / 20)
    assert "at this noise" in told(f"--plan {path}")


@pytest.mark.parametrize(
    "flags",
    ["--method local", "--method mpmtl", "--method pmtl --noise laplace", "--noise laplace"],
)
def test_where_there_is_no_verdict_it_says_so_and_ends_well(told, flags):
    line = f"--data synthetic --option clients=12 {flags}"
    assert told(line).startswith("No verdict on")
    found = strict(told(f"{line} --json"))
    assert found["verdict"] is None and "No verdict" in found["words"]


@pytest.mark.parametrize(
    "flags",
    [
        "--clients 30 --parameters 10",
        "--clients 30 --features 9 --method pmtl",
        "--data synthetic --option clients=12",
        "--data synthetic --option clients=12 --method pmtl",
    ],
)
def test_without_noise_there_is_no_verdict_and_no_mistake(told, flags):
    assert told(f"{flags} --epsilon inf").startswith("No verdict: epsilon = inf")
    found = strict(told(f"{flags} --epsilon inf --json"))
    assert found["verdict"] is None and found["words"].startswith("No verdict: epsilon = inf")


@pytest.mark.parametrize(
    "flag",
    ["--noise laplace", "--method pmtl", "--model mlp", "--set method.lam=1"],
)
def test_numbers_and_a_plan_are_not_both_given_and_the_flag_is_named(told, flag):
    name = flag.split()[0]
    err = told(f"--clients 30 --parameters 10 {flag}", code=2)
    assert f"{name} asks for a whole plan" in err and "--features N" in err
    err = told(f"--data synthetic --parameters 10 {flag}", code=2)
    assert "--data" in err and name in err and "--features" not in err


def test_noise_under_one_clip_gets_a_method_under_one_clip(told):
    found = strict(told("--clients 200 --features 9 --noise local --json"))
    assert found["method"] == "pmtl" and "local noise is for" in found["chosen"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("", "--clients"),
        ("--clients 30", "--parameters N, or --features N"),
        ("--clients 30 --parameters 5 --features 4", "give one"),
        ("--clients 30 --features x1,x2", "--features x1,x2"),
        ("--clients 30 --features 0", "--features 0"),
        ("--clients 30 --features 3 --classes 1", "--classes 1"),
        ("--clients 0 --parameters 5", "clients = 0"),
        ("--clients 30 --parameters 0", "parameters = 0"),
        ("--clients 30 --parameters 5 --epsilon 0", "--epsilon 0: expected"),
        ("--clients 0 --parameters 5 --epsilon inf", "clients = 0"),
        ("--clients 30 --parameters 5 --cohort 31", "30"),
        ("--clients 30 --parameters 5 --rounds 0", "--rounds 0: expected"),
        ("--clients 30 --parameters 5 --noise-multiplier 0", "--noise-multiplier 0: expected"),
        ("--clients 30 --parameters 5 --sampling fixed", "--cohort"),
        ("--clients 30 --parameters 5 --sampling fixed --cohort 5", "relation 'replace'"),
        ("--clients 30 --parameters 5 --data synthetic", "--parameters 5"),
        ("--clients 30 --parameters 5 --method pmtl", "--parameters 5"),
        ("--data synthetic --set method.lam=3", "auto"),
    ],
)
def test_mistakes_end_in_one_line(told, flags, says):
    err = told(flags, code=2)
    assert says in err and len(err.splitlines()) == 1


def test_public_facts_load_neither_torch_nor_data():
    code = (
        "import sys; from coterie.cli.main import main; "
        "main(['plan', '--clients', '30', '--parameters', '10', '--json']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'coterie.data', 'rich')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_noise_of_clients_own_is_planned_for_the_rounds_that_it_bears(capsys):
    """Every client's noise adds up: fewer rounds are borne than under the server's noise."""
    line = "plan --clients 1000 --epsilon 4 --parameters 10 --noise local --json"
    assert main(line.split()) == 0
    found = json.loads(capsys.readouterr().out)
    # Deviations of everyone's noise are sqrt(clients) times the server's: worth / clients.
    worth = (0.3 * math.sqrt(1000) * mu_of(4.0, 1e-5)) ** 2 / 10
    assert found["worth"] == pytest.approx(worth, rel=1e-3)
    assert found["rounds"] == math.floor(worth) < 10
    assert main([*line.split(), "--rounds", "100"]) == 0
    asked = json.loads(capsys.readouterr().out)
    assert any("Fewer rounds" in told for told in asked["remedies"])


def test_the_noise_of_the_usual_method_is_told_beside_that_of_a_mean(capsys):
    """What `run` says of pfeb, and `plan --method pfeb` of a whole plan, is what facts say."""
    flags = ["--clients", "25", "--features", "2", "--epsilon", "2"]
    assert main(["plan", *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["error"]
    rounds = advise(25, 2.0, 3).rounds
    spec = Spec((2,), 1, "regression", 25)
    asked = choices()["pfeb"]()
    budget = Privacy(epsilon=2.0, delta=1e-5)
    planned = plan_for(spec, budget, method=asked, rounds=rounds)
    assert found["relative_under_pfeb"] == pytest.approx(planned.relative_error(spec), rel=1e-6)
    assert found["relative"] < 0.3 < found["relative_under_pfeb"]
    assert main(["plan", *flags, "--no-plot"]) == 0
    said = capsys.readouterr().out
    assert f"{found['relative_under_pfeb']:.3g} of the clipping norm under pfeb" in said
    assert (
        main(["plan", "--clients", "25", "--parameters", "3", "--epsilon", "2", "--no-plot"]) == 0
    )
    assert "pfeb" not in capsys.readouterr().out, "a count of numbers is of no method"
