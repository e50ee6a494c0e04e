"""What a page says of a deployment is true of it: who must answer, what the coordinator sees."""

import html
import re

import pytest
from tests.deploy.deployed import deploy

import coterie as ct
from coterie.privacy.sampling import Everyone
from coterie.report.page import write_report

pytestmark = pytest.mark.full
SERVER = "the server, which sees each bounded contribution before noise"


def page_of(tmp_path, **settings) -> str:
    made = deploy(tmp_path, **settings)
    made.conduct()
    page = write_report([made.run], tmp_path / "page.html").read_text()
    text = re.sub(r"<script.*?</script>|<style.*?</style>", "", page, flags=re.S)
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text)))


@pytest.mark.parametrize(("sites", "needed"), [(3, 3), (4, 3), (6, 4)])
def test_how_many_sites_must_stay_is_told_in_sites(tmp_path, sites, needed):
    """At a threshold of two thirds, with 2 t > n + 1: by hand."""
    text = page_of(tmp_path, sites=sites, trust="secure_aggregation")
    assert f"{needed} of {sites} sites must answer a round (else it is asked again)" in text
    assert "67 %" not in text


def test_under_secure_aggregation_no_single_contribution_is_seen(tmp_path):
    text = page_of(tmp_path, trust="secure_aggregation")
    assert SERVER not in text
    assert "Not covered: the coordinator, which sees who took part, and the exact sum" in text
    assert "sites must answer" not in page_of(tmp_path / "plain")


def test_a_coordinator_with_a_bound_is_not_among_what_is_not_covered(tmp_path):
    noise = ct.Privacy(epsilon=4.0, noise="local")
    text = page_of(tmp_path, trust="server", privacy=noise, sampler=Everyone())
    assert SERVER not in text and "Not covered: the coordinator" not in text
    assert "Not covered: whoever reads a client's memory" in text


@pytest.mark.parametrize(
    ("sampler", "words"),
    [(ct.Poisson(6), "50 % of all clients"), (Everyone(), "50 % of the clients asked")],
)
def test_the_minimum_is_of_all_where_the_cohort_is_hidden(tmp_path, sampler, words):
    assert words in page_of(tmp_path, sampler=sampler)
