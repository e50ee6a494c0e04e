"""`coterie predict`: predictions for the rows of a file."""

import argparse
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli.options import (
    JSON,
    TRUST,
    Commands,
    add_flags,
    check_data,
    check_file,
    command,
)
from coterie.core.files import refuse_special

if TYPE_CHECKING:
    from coterie.serve.predict import Predictions

_FORMULA = r"\A([=+\-@\t\r])"
_NUMBER = r"\A[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\z"
_MORE = """\
Rows are read as in training, with the same columns and constants; a target column is not needed
and not read. Each row is predicted by its client's own model; with --client every row is treated as
that client's. An exported model predicts rows of its own client: without --client, a file with rows
of other clients is refused. Predictions are for the owner of the rows; they are not private.

The table has one line per row, in the file's order: row, client, columns of the file (--keep),
prediction (a value in the target's own units, or the name of a class), for classes the probability
(binary: of the last of the classes, such as 1 or "yes"; else one column per class; none for support
vector machines) and decision values, with --std standard deviations, with --quantiles bounds.
Gaps and new categories are read as in training. Clients that the run does not know are predicted by
its shared model, where it has one; a column `model` marks them. A row that no model can predict
has empty cells. Notes are printed on stderr. A kept column whose name is taken gets _kept.
In CSV, a name that begins with =, +, -, @, a tab or a carriage return, and is no number, gets an
apostrophe before it: spreadsheets would take it for a formula."""


def add(commands: Commands) -> None:
    """Add `predict`."""
    parser = command(
        commands,
        "predict",
        "predict the rows of a file, each by its client's model",
        "coterie predict runs/districts-pfeb --data new.csv --out predictions.csv",
        _MORE,
        action=predict,
    )
    parser.add_argument(
        "model", metavar="RUN|MODEL", help="the folder of a finished run, or an exported model"
    )
    parser.add_argument(
        "--data", metavar="FILE", required=True, help="rows: csv, parquet, npz, ... or a data name"
    )
    parser.add_argument(
        "--keep",
        metavar="COLUMN",
        nargs="+",
        action="extend",
        default=[],
        help="columns of the file to copy, such as an id",
    )
    flags = {
        "--client NAME": "treat every row as this client's",
        "--client-column COLUMN": "names clients (default: as in training)",
        "--unknown-clients {shared,refuse}": "clients that the run does not know: "
        "use the shared model (default), or refuse them",
        "--std": "also standard deviations (pfeb)",
        "--quantiles SHARES": "also these quantiles of a number, such as 0.05,0.95 (pfeb)",
        **TRUST,
        "--out FILE": ".csv or .parquet (default: CSV on stdout)",
    }
    add_flags(parser, flags | JSON)
    parser.set_defaults(unknown_clients="shared")


def predict(arguments: argparse.Namespace) -> int:
    """Carry out `coterie predict`."""
    out = _check(arguments)
    quantiles = _shares(arguments.quantiles)
    found = _predictions(arguments)
    if quantiles and found.info.spec.task != "regression":
        raise ValueError(
            f"--quantiles are of numbers, and the task is {found.info.spec.task}: classes have "
            "probabilities; leave --quantiles out"
        )
    table = found.table(_kept(arguments, found), quantiles)
    for note in found.notes:
        print(f"coterie predict: {note}", file=sys.stderr)
    if out is None:
        sys.stdout.write(_encoded(table, ".csv").decode())
        return 0
    from coterie.core.files import write_atomically

    write_atomically(out, _encoded(table, out.suffix))
    summary = {
        "rows": table.num_rows,
        "clients": len(found.rows.data),
        "unknown_clients": list(found.unknown),
        "columns": table.column_names,
        "notes": list(found.notes),
        "out": str(out),
    }
    if arguments.json:
        print(json.dumps(summary, allow_nan=False))
    else:
        rows = "1 row" if table.num_rows == 1 else f"{table.num_rows} rows"
        print(f"{rows} of {_clients(len(found.rows.data))} predicted: {out}")
    return 0


def _check(arguments: argparse.Namespace) -> Path | None:
    """Return the file to write; raise an error for flags that cannot be right."""
    out = None if arguments.out is None else Path(arguments.out)
    if out is not None and out.suffix not in (".csv", ".parquet"):
        raise ValueError(f"--out {out}: expected a file that ends in .csv or .parquet")
    if out is None and arguments.json:
        raise ValueError("--json describes the file that is written: give --out")
    if out is not None:
        check_file(out, "--out")
    _check_model(Path(arguments.model))
    check_data(arguments.data)
    return out


def _check_model(path: Path) -> None:
    """Raise an error for what is neither a folder nor begins as a safetensors file does."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or run folder; check the path")
    refuse_special(path)
    if path.is_dir():
        return
    with path.open("rb") as file:
        begins = file.read(9)  # the length of the header, then JSON
    if begins[8:] != b"{":
        raise ValueError(
            f"{path}: not a model; expected RUN, or a safetensors file that `coterie export` wrote "
            "(rows are given by --data)"
        )


def _shares(text: str | None) -> tuple[float, ...]:
    """Return the shares of --quantiles."""
    try:
        found = tuple(float(part) for part in (text or "").split(",") if part.strip())
    except ValueError:
        found = (0.0,)
    if not all(0 < share < 1 for share in found) or (text is not None and not found):
        raise ValueError(f"--quantiles {text}: expected shares between 0 and 1, such as 0.05,0.95")
    return found


def _predictions(arguments: argparse.Namespace) -> "Predictions":
    from coterie.serve.export import load_client
    from coterie.serve.predict import predict_model, predict_run

    given = Path(arguments.model)
    if given.is_dir():
        return predict_run(
            given,
            arguments.data,
            client=arguments.client,
            client_column=arguments.client_column,
            unknown_clients=arguments.unknown_clients,
            std=arguments.std or arguments.quantiles is not None,
            trust=arguments.trust,
        )
    model = load_client(given, trust=arguments.trust)
    if arguments.client not in (None, model.client):
        raise ValueError(
            f"--client {arguments.client!r}: {given} is the model of {model.client!r}; leave "
            "--client out, or give that client's file"
        )
    return predict_model(
        model,
        arguments.data,
        all_rows=arguments.client is not None,
        client_column=arguments.client_column,
        std=arguments.std or arguments.quantiles is not None,
    )


def _kept(arguments: argparse.Namespace, found: "Predictions") -> Any:
    """Return the columns of the file that are copied; None for none."""
    if not arguments.keep:
        return None
    from coterie.data.load import read_columns

    return read_columns(Path(arguments.data), found.info.source, arguments.keep)


def _clients(count: int) -> str:
    return "1 client" if count == 1 else f"{count} clients"


def _encoded(table: Any, suffix: str) -> bytes:
    from pyarrow import csv, parquet

    buffer = io.BytesIO()
    if suffix == ".csv":
        csv.write_csv(_protected(table), buffer)
    else:
        parquet.write_table(table, buffer)
    return buffer.getvalue()


def _protected(table: Any) -> Any:
    """Return a table whose text no spreadsheet takes for a formula: an apostrophe comes first."""
    from pyarrow import compute, types

    for at, column in enumerate(table.columns):
        if types.is_string(column.type):
            safe = compute.replace_substring_regex(column, _FORMULA, r"'\1")
            number = compute.match_substring_regex(column, _NUMBER)
            kept = compute.if_else(number, column, safe)
            table = table.set_column(at, table.column_names[at], kept)
    return table
