"""The privacy statement and the registry entry: true numbers, one page, and no markup of others.

Numbers are compared with result.json, pages are counted in a PDF that Chromium prints, and the keys
of an entry with those of the registry's public schema, listed here by hand.
"""

import base64
import json
import math
import re
import shutil
from html.parser import HTMLParser

import pytest
import yaml
from tests.report import browser
from tests.report import runs as made

from coterie.cli.main import main
from coterie.data.config import DataConfig
from coterie.methods.pmtl import PMTL
from coterie.planning.about import About, PublicInput
from coterie.planning.plan import Plan, Privacy
from coterie.privacy.events import LocalGaussian, NonPrivate, Participation
from coterie.privacy.noise import SharedNoise
from coterie.report.statement import FIXED, GROWS, write_statement
from coterie.runs.run import execute

EVIL = "<script>alert(1)</script><img src=x onerror=y>\"'&amp;{{7*7}}"
ABOUT = About(
    unit="one hospital with all its patients",
    operator="Consortium of the North",
    purpose="readmission within 30 days",
    contact="dpo@example.org",
    data_period="2019 to 2023",
    region="Norway",
    inputs=(PublicInput(name="method.clusters", source="doi:1", no_private_rows=True),),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with real noise, as a registry lists."""
    folder = tmp_path_factory.mktemp("stated") / "run"
    options = {"clients": 12, "rows": [4, 8], "features": 3}
    plan = Plan(
        method=PMTL(clusters=(0, 1) * 6),
        privacy=Privacy(epsilon=2.0),
        data=DataConfig(name="synthetic", options=options),
        rounds=3,
        about=ABOUT,
    )
    execute(plan, folder=folder, budget=None)
    return folder


def forge(folder, **settings):
    """Make a run by hand, with a certificate that holds anything."""
    changes = {key: settings.pop(key) for key in ("about", "inputs", "assumed_public", "versions")
               if key in settings}  # fmt: skip
    made.make_run(folder, **settings)
    path = folder / "guarantee.json"
    told = json.loads(path.read_text())
    told |= {"format": "coterie certificate", "finished": "2026-01-02T10:00Z"}
    path.write_text(json.dumps(told | changes))
    return folder


class Text(HTMLParser):
    """The text of a page by cells, and its tags."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.rows, self.words, self._style = [], [], [], False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        self._style = tag == "style"

    def handle_endtag(self, tag):
        self._style = False

    def handle_data(self, data):
        if self._style:
            return
        self.words.append(data.strip())
        if self.rows and data.strip() and self.tags[-1] in ("th", "td"):
            self.rows[-1].append(data.strip())

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def page_of(folder, out):
    page = write_statement(folder, out / "statement.html").read_text()
    return Text(page.replace("\u00a0", " "))  # a number and its unit stay on one line


def rounded_up(number):
    """Write four digits, rounded up: the oracle of what a page may show."""
    if number in ("inf", math.inf):
        return "inf"
    return made.up(number) if number else "0"


def test_the_numbers_are_those_of_the_result(run, tmp_path):
    told, page = json.loads((run / "result.json").read_text()), page_of(run, tmp_path)
    rows = {row[0]: row[1:] for row in page.rows if row}
    views, reviewer = told["views"], told["reviewer"]
    others = rows["all other clients together"]
    assert others[0] == rounded_up(views["other_clients"])
    assert others[1] == rounded_up(reviewer["epsilon"]["replace"])
    assert rows["the server"][0] == rounded_up(views["server"])
    for one in reviewer["attack"]:
        shown = rows[f"{100 * one['false_positives']:g} %"][0]
        assert float(shown.rstrip(" %")) / 100 == pytest.approx(one["true_positives"], abs=1e-3)
        assert float(shown.rstrip(" %")) / 100 >= one["true_positives"] - 1e-9
    for one in reviewer["person"]:
        assert rows[str(one["clients"])][0] == rounded_up(one["epsilon"])
    for relation, mu in reviewer["mu"].items():
        assert f"{rounded_up(mu)} ({relation})" in page.text
    assert f"Delta is {told['delta']:.3g}" in page.text


def test_who_what_and_how_to_verify_are_stated(run, tmp_path):
    page = page_of(run, tmp_path)
    certificate = json.loads((run / "guarantee.json").read_text())
    for text in ABOUT.texts().values():
        assert text in page.text
    for line in (*FIXED, *GROWS):
        assert line in page.text
    hashed = next(one["sha256"] for one in certificate["inputs"])
    row = next(row for row in page.rows if row and row[0].startswith("method.clusters"))
    assert row[1].rstrip(".") in hashed and row[2:] == ["doi:1", "not declared", "had no part"]
    versions = certificate["versions"]
    assert versions["coterie_files"] in page.text
    assert f"coterie verify {run.name}" in page.text
    assert "nobody yet" in page.text


def test_a_signature_is_named(run, tmp_path):
    signed = shutil.copytree(run, tmp_path / "signed")
    key = tmp_path / "key"
    assert main(["sign", "--new-key", str(key)]) == 0
    assert main(["sign", str(signed), "--key", str(key)]) == 0
    public = json.loads((signed / "guarantee.sig").read_text())["key"]
    page = page_of(signed, tmp_path)
    assert public in page.text and "--key OWNER.pub" in page.text
    (signed / "guarantee.sig").write_text("{}")
    assert "signed by nobody: guarantee.sig" in page_of(signed, tmp_path).text


def test_the_page_has_no_script_and_fetches_nothing(run, tmp_path):
    text = write_statement(run, tmp_path / "s.html").read_text()
    assert "script" not in Text(text).tags and "default-src 'none'" in text
    assert not re.search(r"(src|href)=|url\(|@import", text)


def test_no_metric_is_on_the_page(run, tmp_path):
    """Two results with other metrics have the same page: it may be public."""
    other = shutil.copytree(run, tmp_path / run.name)
    told = json.loads((other / "result.json").read_text())
    told |= {"value": 0.123456, "local_value": 0.654321, "share_better_than_local": 0.77}
    told |= {"notices": ["notices of rows"], "data_used": None}
    (other / "result.json").write_text(json.dumps(told))
    (other / "metrics.parquet").write_bytes(made.make_run(tmp_path / "m").joinpath(
        "metrics.parquet").read_bytes())  # fmt: skip
    first, second = (write_statement(one, tmp_path / "p.html").read_bytes() for one in (run, other))
    assert first == second


def test_hostile_text_is_text(tmp_path):
    inputs = [{"name": EVIL, "kind": EVIL, "sha256": EVIL, "source": EVIL, "licence": EVIL}]
    folder = forge(
        tmp_path / "evil",
        caveats=[EVIL],
        about=dict.fromkeys(("unit", "operator", "purpose", "contact"), EVIL),
        inputs=inputs,
        assumed_public=[EVIL],
        versions={"coterie": EVIL, "coterie_commit": EVIL},
    )
    path = folder / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"method": EVIL, "data": EVIL}))
    page = page_of(folder, tmp_path)
    assert not {"script", "img"} & set(page.tags)
    assert EVIL in page.text and "49" not in page.text.replace(EVIL, "")
    report = made.write_report([folder], tmp_path / "report.html").read_text()
    assert EVIL in Text(report).text and "img" not in Text(report).tags


def test_what_a_run_does_not_guarantee_comes_first(tmp_path):
    cases = {
        "simulation": ({"simulation": True}, "SIMULATION: noise from a known seed"),
        "bare": ({"events": (NonPrivate(),) * 3}, "NOT PRIVATE: epsilon is infinite"),
        "local": ({"events": (), "method": "local"}, "Nothing is released about any client"),
        "tuned": ({"tuning": "NOT COVERED by epsilon"}, "Tuning: NOT COVERED by epsilon"),
    }
    for name, (settings, said) in cases.items():
        text = page_of(forge(tmp_path / name, **settings), tmp_path).text
        assert said in text and ("false alarms" in text) == (name in ("simulation", "tuned"))
        released = name != "local"  # what releases nothing assumes nothing about releases
        assert ("What is assumed" in text) == ("The releases of this run" in text) == released
        assert "The certificate does not list them." in text


def test_a_site_has_no_certificate(tmp_path, capsys):
    folder = made.make_run(tmp_path / "site")
    assert main(["report", str(folder), "--statement", str(tmp_path / "s.html")]) == 2
    assert "its guarantee.json is no certificate" in capsys.readouterr().err
    assert not (tmp_path / "s.html").exists()


def test_the_report_shows_declarations(run, tmp_path):
    text = Text(made.write_report([run], tmp_path / "report.html").read_text()).text
    for said in (*ABOUT.texts().values(), *FIXED, *GROWS, "doi:1", "had no part", "SHA-256"):
        assert said in text
    bare = forge(tmp_path / "bare")
    both = Text(made.write_report([run, bare], tmp_path / "report.html").read_text()).text
    assert "other runs declare something else" in both


# Printed pages.

WORDS = "wards of the hospitals of the consortium, with all of their patients, and their visits "
KEY = {"format": "coterie signature", "format_version": 1, "file": "guarantee.json"}


def crowded(folder, local):
    """Make a run whose page is as full as declarations allow."""
    most, kind = WORDS * 2, (LocalGaussian(8.0, honest=3),) * 20
    settings = {"events": kind, "participation": Participation("fixed", 0.5)} if local else {}
    inputs = [
        {"name": f"{i} {most}"[:120], "kind": most[:120], "sha256": "a" * 64,
         "source": most[:120], "licence": most[:120], "no_private_rows": False}
        for i in range(9)
    ]  # fmt: skip
    names = ("unit", "operator", "purpose", "contact", "data_period", "region")
    forge(
        folder,
        about=dict.fromkeys(names, most[:120]),
        inputs=inputs,
        assumed_public=[f"{i} {most}{most}" for i in range(12)],
        caveats=[most, most, most],
        versions={"coterie": "0.1.0", "coterie_commit": "c" * 40, "coterie_files": "f" * 64},
        **settings,
    )
    sealed = KEY | {"key": "ab" * 32, "signature": "cd" * 64}
    (folder / "guarantee.sig").write_text(json.dumps(sealed))
    return folder


CUT = "[...document.querySelectorAll('.scroll')].some((one) => one.scrollWidth > one.clientWidth)"


@pytest.mark.full
@pytest.mark.skipif(browser.find_browser() is None, reason="no chromium")
def test_it_prints_on_one_page(run, tmp_path):
    folders = [
        run,
        crowded(tmp_path / "crowded", False),
        crowded(tmp_path / "crowded-local", True),
        forge(tmp_path / "bare", events=(NonPrivate(),) * 3, simulation=True),
        forge(tmp_path / "silent", events=(), method="local"),
    ]
    pages = [write_statement(one, tmp_path / f"{i}.html") for i, one in enumerate(folders)]
    with browser.Browser(browser.find_browser()) as shown:
        for page in pages:
            shown.open(page)
            told = shown.call("Page.printToPDF", preferCSSPageSize=True)
            pdf = base64.b64decode(told["data"])
            assert len(re.findall(rb"/Type\s*/Page\b", pdf)) == 1, page
            (box,) = re.findall(rb"/MediaBox\s*\[([^\]]*)\]", pdf)
            assert [round(float(x)) for x in box.split()] == [0, 0, 595, 842]  # A4, in points
        for width in (390, 1000):
            shown.resize(width, 800)
            shown.open(pages[1])
            assert shown.evaluate("document.documentElement.scrollWidth") <= width
            assert not shown.evaluate(CUT), "a table that needs to be scrolled"


# The registry. Keys, required keys and values of its public schema, as of July 2026.

SCHEMA = {
    "basic": "name data_curators intended_use data_product_type data_product_region description "
    "publication_date data_product_sector",
    "dp_variant": "variant_name data_domain unprotected_quantities",
    "privacy_loss": "privacy_unit privacy_unit_details privacy_parameters "
    "privacy_parameters_details",
    "deployment_model": "model_name model_name_details actors release_type release_type_details "
    "data_source_type data_source_type_details access_type access_type_details",
    "accounting": "post_processing composition",
    "implementation": "preprocessing_and_hyperparameter_tuning mechanisms justification",
    "administrative": "sources notes registry_authors",
}
VALUES = {
    "data_product_type": {"Machine learning model"},
    "variant_name": {"Pure DP", "Approximate DP"},
    "model_name": {"Local", "Central", "Federated"},
    "release_type": {"One release", "Many releases"},
    "data_source_type": {"Static", "Dynamic"},
    "access_type": {"Interactive", "Non-interactive"},
}


def entry_of(run, tmp_path):
    assert main(["report", str(run), "--registry", str(tmp_path / "entry.yaml")]) == 0
    return yaml.safe_load((tmp_path / "entry.yaml").read_text())


def test_an_entry_fits_the_schema(run, tmp_path, capsys):
    found = entry_of(run, tmp_path)
    assert capsys.readouterr().err == ""  # everything required was declared
    assert list(found) == ["url_slug", "status", "tier", "deployment"]
    assert found["status"] == "Draft" and found["tier"] in (1, 2, 3)
    parts = found["deployment"]
    assert parts.keys() == SCHEMA.keys()
    for part, keys in SCHEMA.items():
        assert parts[part].keys() <= set(keys.split())
        for key, value in parts[part].items():
            if key == "privacy_parameters":
                assert all(isinstance(number, float) for number in value.values())
            elif key in ("data_curators", "registry_authors"):
                assert value and all(isinstance(one, str) for one in value)
            else:
                assert isinstance(value, str) and value
                assert value in VALUES.get(key, {value})
    assert set(SCHEMA["basic"].split()) - parts["basic"].keys() == {"data_product_sector"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", parts["basic"]["publication_date"])
    year = parts["basic"]["publication_date"][:4]
    slug = f"personal-models-for-synthetic-consortium-of-the-north-{year}"
    assert (tmp_path / "entry.yaml").read_text().startswith(f"url_slug: {slug}\n")


def test_an_entry_says_who_adds_the_noise_and_how_much_of_it_is_in_a_sum(tmp_path):
    """Of 12 clients at least 8 answer: a sum has the noise of all, sqrt(12 / 8) of the planned."""
    plan = Plan(
        method=PMTL(),
        privacy=Privacy(epsilon=2.0, noise=SharedNoise()),
        data=DataConfig(name="synthetic", options={"clients": 12, "rows": [4, 8], "features": 3}),
        rounds=3,
    )
    execute(plan, folder=tmp_path / "run", budget=None)
    model = entry_of(tmp_path / "run", tmp_path)["deployment"]["deployment_model"]
    assert "All clients together add the noise, in shares." in model["model_name_details"]
    assert "server" not in model["model_name_details"]
    told = json.loads((tmp_path / "run" / "result.json").read_text())["reviewer"]["releases"]
    ((part,),) = (one["parts"] for one in told)
    certificate = json.loads((tmp_path / "run" / "guarantee.json").read_text())
    planned = certificate["events"][0]["noise_multiplier"] * part["bound"]
    assert part["noise"] == pytest.approx(planned * math.sqrt(12 / 8))


def test_an_entry_has_the_numbers_of_the_result(run, tmp_path):
    told, parts = (
        json.loads((run / "result.json").read_text()),
        entry_of(run, tmp_path)["deployment"],
    )
    loss = parts["privacy_loss"]
    assert loss["privacy_parameters"] == {"epsilon": told["epsilon"], "delta": told["delta"]}
    assert loss["privacy_unit"] == ABOUT.unit
    details = loss["privacy_parameters_details"]
    assert f"{rounded_up(told['reviewer']['epsilon']['replace'])} under replace" in details
    assert f"mu = {rounded_up(told['reviewer']['mu']['zero_out'])}" in details
    assert parts["basic"]["intended_use"] == ABOUT.purpose
    assert "grid" in parts["implementation"]["mechanisms"]


@pytest.mark.parametrize(
    ("assumed", "stated"),
    [(("levels of ward read off the rows and accepted as public",), "used; accepted"), ((), "not")],
)
def test_private_rows_had_a_part_in_what_was_read_off(tmp_path, assumed, stated):
    given = {"kind": "levels of categories", "hashed": "value", "sha256": "0" * 64}
    given |= {"source": None, "licence": None, "no_private_rows": False}
    inputs = [{**given, "name": name} for name in ("data.source.levels", "method.start")]
    folder = forge(tmp_path / "run", inputs=inputs, assumed_public=list(assumed))
    notes = entry_of(folder, tmp_path)["deployment"]["implementation"]
    text = notes["preprocessing_and_hyperparameter_tuning"]
    assert f"licence not declared, private rows {stated}" in text
    assert "method.start (levels of categories), source not declared" in text
    assert text.endswith("private rows not declared") or assumed


def test_what_is_missing_in_an_entry_is_said(tmp_path, capsys):
    entry_of(forge(tmp_path / "run"), tmp_path)
    assert "intended_use" in capsys.readouterr().err


@pytest.mark.parametrize("settings", [{"simulation": True}, {"events": (NonPrivate(),)}])
def test_only_private_runs_are_entered(tmp_path, capsys, settings):
    folder = forge(tmp_path / "run", **settings)
    assert main(["report", str(folder), "--registry", str(tmp_path / "entry.yaml")]) == 2
    assert "the registry lists private deployments" in capsys.readouterr().err
    assert not (tmp_path / "entry.yaml").exists()


def test_yaml_holds_any_text(tmp_path):
    odd = 'a: b # "c" \\ \u2028 \x85 \x7f {x} - & * ! | > % @ ` \U0001f600 ü'
    folder = forge(tmp_path / "run", about={"operator": odd, "purpose": "yes", "unit": "1e5"})
    basic = entry_of(folder, tmp_path)["deployment"]["basic"]
    assert basic["data_curators"] == [re.sub("[\u2028\x85\x7f]", " ", odd)]
    assert basic["intended_use"] == "yes"


def test_a_statement_is_of_one_run(run, tmp_path, capsys):
    out = str(tmp_path / "s.html")
    assert main(["report", str(run), str(run), "--statement", out]) == 2
    assert "give one folder" in capsys.readouterr().err
    assert main(["report", str(run), "--statement", str(tmp_path)]) == 2
    assert main(["report", str(run), "--statement", out, "--out", str(tmp_path / "r.html")]) == 0
    assert (tmp_path / "r.html").exists() and not (run / "report.html").exists()
