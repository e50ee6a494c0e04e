"""`coterie plan`: its flags. `coterie.cli.answer` computes the answer."""

import argparse

from coterie.cli.options import (
    JSON,
    SET,
    SHARES,
    Commands,
    add_flags,
    add_plan,
    check_flags,
    check_shares,
    command,
    reword,
)

_MORE = """\
Without --data and --plan, only given numbers are used:

  clients    --clients
  model      --parameters, or --features (how many) and --classes
  budget     --epsilon, or --noise-multiplier (then --epsilon limits the rounds)
  rounds     --rounds, --cohort, --sampling
  guarantee  --delta, --relation

Then the verdict is that for pfeb, and the noise is that of a sum under one clip. With --data or
--plan both are those of the method, from public facts of the data: clients, features, classes. The
exit status is 0 for every verdict.

--json prints one object: verdict ("join", "small gain", "learn alone", or null where the rule does
not apply), words, remedies, clients, numbers (shared parameters), most_numbers, rounds, clip, mu,
worth = (0.3 clients mu)^2 / parameters, epsilon, delta, relation; needs gives for "small gain" and
"join" the clients, epsilon and numbers that would be enough; by_epsilon is the table; data, method
and chosen (why) appear where a plan was given. For the noise: noise_multiplier, epsilon_spent,
epsilon_by_view, error (per_number, over_clip, relative), within (what keeps error.relative within
0.3), rounds_at_noise, epsilon_by_rounds, error_by_clients. See docs/plan.md."""


def add(commands: Commands) -> None:
    """Add `plan`."""
    parser = command(
        commands,
        "plan",
        "show whether joining pays and what it costs, before any data is read",
        "coterie plan --clients 550 --epsilon 1 --parameters 10",
        _MORE,
        usual="--clients --parameters --epsilon --data --client-column --target --method --plan "
        "--plot --json",
        action=_print,
    )
    add_flags(add_plan(parser), {"--epsilon NUMBER:float": "for the whole run (default 1)"})
    reword(
        parser,
        clients=("N", "number of clients; with --data: use the first N"),
        features=("N|COLUMN,COLUMN", "number of features; with --data: which (default: all)"),
        noise_multiplier=("NUMBER", "instead of --epsilon, which then limits the rounds"),
    )
    flags = {
        "--parameters N:int": "instead of data: shared parameters, such as features + 1",
        "--plot FILE...": "write a page (.html), or draw epsilon against rounds and noise against "
        "clients (.svg, .png, .pdf)",
        "--no-plot": "no plots in the terminal",
        "--full": "also compute values that take some seconds",
    }
    add_flags(parser, flags | SHARES | SET | JSON)


def _print(arguments: argparse.Namespace) -> None:
    check_flags(arguments)
    check_shares(arguments)
    from coterie.cli.answer import answer

    answer(arguments)
