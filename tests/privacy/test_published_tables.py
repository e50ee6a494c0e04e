"""Published and reference epsilons, to 1 %.

`pmtl_epsilon.csv`: the settings of "Private Multi-Task Learning" (100 of m clients a round, delta =
1/m), what its theorem claims (`claimed`, with the constant 4 for the unspecified c2), and what
holds under each relation and view. `sigma_needed.csv`: the noise that meets an epsilon, and by how
much the theorem's formula exceeds the exact noise at full participation. `gdp.csv`: Gaussian DP.
"""

import math

import pytest
from tests.privacy.oracles import golden

from coterie.privacy.accounting import profile
from coterie.privacy.calibrate import calibrate
from coterie.privacy.events import Gaussian, Participation
from coterie.privacy.profiles import GaussianProfile, gaussian_mu

TOLERANCE = 0.01
COLUMNS = {
    "poisson_zero_out": ("poisson", False, "zero_out"),
    "poisson_zero_out_1e-5": ("poisson", False, "zero_out"),
    "poisson_replace": ("poisson", False, "replace"),
    "fixed_replace": ("fixed", False, "replace"),
    "visible_zero_out": ("poisson", True, "zero_out"),
}


def entries():
    """Every epsilon of the table that is ours to reproduce."""
    return [
        (row, column) for row in golden("pmtl_epsilon.csv") for column in COLUMNS if row[column]
    ]


def name_of(row, column):
    return f"{row['data']}-T{row['rounds']}-z{row['noise_multiplier']}-{column}"


def check_epsilon(row, column):
    kind, visible, relation = COLUMNS[column]
    clients, cohort = int(row["clients"]), int(row["cohort"])
    plan = [Gaussian(float(row["noise_multiplier"]))] * int(row["rounds"])
    delta = 1e-5 if column.endswith("1e-5") else 1 / clients
    found = profile(plan, Participation(kind, cohort / clients, visible), relation).epsilon(delta)
    assert found == pytest.approx(float(row[column]), rel=TOLERANCE)


SAMPLE = {
    "FEMNIST-T1000-z1-poisson_zero_out",
    "FEMNIST-T1000-z10-poisson_zero_out",
    "FEMNIST-T1000-z10-poisson_zero_out_1e-5",
    "FEMNIST-T1000-z100-poisson_zero_out",
    "FEMNIST-T200-z10-poisson_zero_out",
    "CelebA-T1000-z1-fixed_replace",
    "CelebA-T1000-z5-poisson_replace",
    "CelebA-T1000-z50-visible_zero_out",
    "StackOverflow-T1000-z2-visible_zero_out",
    "StackOverflow-T1000-z20-fixed_replace",
}


@pytest.mark.parametrize(
    ("row", "column"),
    [
        pytest.param(
            row,
            column,
            id=name_of(row, column),
            marks=() if name_of(row, column) in SAMPLE else pytest.mark.slow,
        )
        for row, column in entries()
    ],
)
def test_epsilon_of_pmtl(row, column):
    check_epsilon(row, column)


def test_sample_is_in_the_table():
    assert {name_of(row, column) for row, column in entries()} >= SAMPLE


@pytest.mark.parametrize(
    "row",
    [row for row in golden("pmtl_epsilon.csv") if row["claimed"]],
    ids=lambda row: name_of(row, "claimed"),
)
def test_claimed_epsilon_is_the_theorem(row):
    clients, cohort, rounds = (int(row[key]) for key in ("clients", "cohort", "rounds"))
    spread = math.sqrt(rounds * math.log(clients))
    claimed = 4 * cohort / clients * spread / float(row["noise_multiplier"])
    assert claimed == pytest.approx(float(row["claimed"]), rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [row for row in golden("pmtl_epsilon.csv") if row["fixed_replace_rdp"]],
    ids=lambda row: name_of(row, "rdp"),
)
def test_fixed_size_by_renyi(row):
    """The looser account that dp-accounting offers for cohorts of a fixed size."""
    import dp_accounting
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
    )
    base = dp_accounting.GaussianDpEvent(float(row["noise_multiplier"]) / 2)
    sampled = dp_accounting.SampledWithoutReplacementDpEvent(
        int(row["clients"]), int(row["cohort"]), base
    )
    accountant.compose(dp_accounting.SelfComposedDpEvent(sampled, int(row["rounds"])))
    found = accountant.get_epsilon(1 / int(row["clients"]))
    assert found == pytest.approx(float(row["fixed_replace_rdp"]), rel=TOLERANCE)
    assert float(row["fixed_replace"]) < found


@pytest.mark.parametrize("row", golden("gdp.csv"), ids=lambda row: f"mu{row['mu']}-{row['delta']}")
def test_gaussian_dp(row):
    mu, epsilon, delta = (float(row[key]) for key in ("mu", "epsilon", "delta"))
    assert GaussianProfile(mu).epsilon(delta) == pytest.approx(epsilon, rel=5e-4)
    assert gaussian_mu(epsilon, delta) == pytest.approx(mu, rel=5e-4)


@pytest.mark.parametrize(
    "row",
    [row for row in golden("sigma_needed.csv") if row["kind"] == "sigma_over_clip"],
    ids=lambda row: f"{row['data']}-{row['epsilon']}",
)
def test_noise_needed_with_poisson_sampling(row):
    """z = cohort * sigma / clip, so sigma / clip = z / cohort."""
    clients, cohort, rounds = (int(row[key]) for key in ("clients", "cohort", "rounds"))
    z = calibrate(
        float(row["epsilon"]),
        1 / clients,
        weights=[1.0] * rounds,
        participation=Participation("poisson", cohort / clients),
        relation=row["relation"],
    )
    assert z / cohort == pytest.approx(float(row["value"]), rel=TOLERANCE)
    theorem = 4 * math.sqrt(rounds * math.log(clients)) / (float(row["epsilon"]) * clients)
    assert theorem == pytest.approx(float(row["claimed"]), rel=TOLERANCE)


@pytest.mark.parametrize(
    "row",
    [row for row in golden("sigma_needed.csv") if row["kind"] == "formula_over_exact"],
    ids=lambda row: f"{row['data']}-{row['relation']}-{row['epsilon']}",
)
def test_theorem_against_exact_noise_at_full_participation(row):
    clients, rounds, epsilon = int(row["clients"]), int(row["rounds"]), float(row["epsilon"])
    z = calibrate(
        epsilon,
        1 / clients,
        weights=[1.0] * rounds,
        participation=Participation("everyone"),
        relation=row["relation"],
    )
    theorem = 4 * math.sqrt(rounds * math.log(clients)) / epsilon
    assert theorem / z == pytest.approx(float(row["value"]), rel=TOLERANCE)
