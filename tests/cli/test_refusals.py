"""Bad input is refused in one line, with status 2, before torch is imported."""

import json
import os
import subprocess
import sys

import pytest

from coterie.cli.main import main

REFUSED = {
    "data show nowhere.csv": "nowhere.csv: no such file, and no dataset of that name",
    "data show distrcts": "did you mean districts?",
    "run --data nowhere.csv": "no dataset of that name; check the path",
    "run --data nowhere": "expected a file, or one of ",
    "run --epsilon 1": "no data: give --data NAME|FILE",
    "run --data rows.cvs": "no dataset of that name; did you mean rows.csv?",
    "run --data book.xlsx --target y": "a workbook; save the sheet of the rows as CSV",
    "init book.xlsx": "a workbook; save the sheet of the rows as CSV",
    "run rows.csv": "unknown argument 'rows.csv': did you mean --data rows.csv?",
    "run --data synthetic:men": "did you mean synthetic:mean?",
    "run --data rows.csv --target yy": "rows.csv: no column 'yy'",
    "run --data rows.csv --client-column cliet": "no column 'cliet' (did you mean 'client'?)",
    "run --data rows.csv --features xs": "no column 'xs' (did you mean 'x'?)",
    "run --data rows.csv --levels xs=1": "no column 'xs' (did you mean 'x'?)",
    "run --data rows.csv --target x --features y --positive 9": "classes found are 0..3: correct "
    "--positive",
    "run --data gap.csv": "leave such rows out with --missing drop",
    "run --data empty.csv": "empty.csv: no line of column names",
    "run --data folder": "folder: no LEAF json here",
    "run --plan rows.csv": "rows.csv: not valid TOML",
    "run --plan folder": "--plan folder: is a folder; expected a TOML file",
    "run --plan typo.toml": "typo.toml: method.kind = pmlt: no such method; did you mean pmtl?",
    "run --data districts --model nts:Net": "--model nts:Net: no module nts",
    "run --data districts --model nets.Net": "a class of your own is written nets:Net",
    "run --data districts --baselines mixd": "no such baseline; did you mean mixed?",
    "run --data districts --track mlfow": "unknown --track 'mlfow': did you mean mlflow?",
    "run --data districts --sampling fixed": "--sampling fixed needs a whole number of clients",
    "run --data districts --target z": "options of files (--target, --levels, ...) do not apply",
    "run --resume folder": "folder: no plan.toml or members.json in it",
    "run --resume rows.csv": "rows.csv: is a file; expected a run folder",
    "compare --data districts --method pmlt,local": "--method pmlt: no such method; did you mean",
    "compare --data districts --seeds x": "--seeds: 'x': expected 3, or 1,2,5",
    "compare --data rows.csv --target yy": "no column 'yy'",
    "tune --data districts --method pmtl": "nothing to tune: give values to try, for",
    "tune --data rows.csv --grid rounds=1,2 --out rows.csv": "rows.csv exists",
    "plan --data rows.csv --target yy": "no column 'yy'",
    "export folder --client a": "folder: no models or federation.toml in it",
    "onboard folder --data rows.csv --out new": "folder: no plan.toml in it",
    "run --data districts --method pmlt": "--method pmlt: no such method; did you mean pmtl?",
    "run --data districts --model lnear": "--model lnear: no such model; did you mean linear?",
    "run --data districts --epsilon -1": "--epsilon -1: expected a positive number",
    "run --data districts --epsilon nan": "--epsilon nan: expected a positive number",
    "run --data districts --delta 2": "--delta 2: expected a number from 1e-30 to below 1, or 0",
    "run --data districts --noise laplac": "--noise laplac: no such noise; did you mean laplace?",
    "run --data districts --rounds 0": "--rounds 0: expected a whole number of at least 1",
    "run --data districts --clip 0": "--clip 0: expected a positive number",
    "run --data districts --set lam": "--set 'lam': expected KEY=VALUE",
    "run --data districts --epsilom 1": "did you mean --epsilon?",
    "run --plan nowhere.toml": "--plan nowhere.toml: no such file; check the path",
    "run --resume nowhere": "nowhere: no such folder",
    "plan --data nowhere.csv": "nowhere.csv: no such file",
    "plan --clients 0 --parameters 3": "clients = 0: expected at least 1",
    "compare --data nowhere.csv": "nowhere.csv: no such file",
    "tune --data nowhere.csv": "nowhere.csv: no such file",
    "verify nowhere": "nowhere: no such folder",
    "report nowhere": "nowhere: no such folder",
    "predict nowhere --data districts": "nowhere: no such file or run folder",
    "predict rows.csv --data rows.csv": "rows.csv: not a model; expected RUN, or a saf",
    "predict empty.csv --data rows.csv": "empty.csv: not a model",
    "init": "no data: give FILE",
    "init --data nowhere.csv": "nowhere.csv: no such file or folder",
    "export nowhere --client a": "nowhere: no such folder",
    "onboard nowhere --data districts --out new": "nowhere: no such folder",
    "account --clients 5 --rounds 0 --noise-multiplier 1": "--rounds 0: expected at least 1",
    "calibrate --clients 5 --rounds 1 --epsilon -1": "epsilon = -1",
    "verfy nowhere": "did you mean verify?",
}
QUICK = (
    "--version", "--help", "run --help", "run --help-all", "data show rows.csv", "completion bash",
    "methods",
)  # fmt: skip
_CODE = """
import contextlib, io, json, sys
from coterie.cli.main import _HidePandas, main
sys.meta_path.insert(0, _HidePandas)  # as the entry point does
found = {}
for line in json.loads(sys.argv[1]):
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = main(line.split())
        except SystemExit as end:
            status = end.code
    heavy = [name for name in ("torch", "numba", "pandas") if name in sys.modules]
    found[line] = (status, err.getvalue(), heavy)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return status, message and heavy modules of every command, all in one process."""
    folder = tmp_path_factory.mktemp("here")
    rows = "".join(f"{client},{row},{int(client) * row}\n" for client in "12" for row in range(4))
    (folder / "rows.csv").write_text("client,x,y\n" + rows)
    (folder / "gap.csv").write_text("client,x,y\n1,,3\n")
    (folder / "book.xlsx").write_bytes(b"PK")
    (folder / "empty.csv").touch()
    (folder / "typo.toml").write_text('[data]\nname = "districts"\n[method]\nkind = "pmlt"\n')
    (folder / "folder").mkdir()
    lines = json.dumps([*QUICK, *REFUSED])
    done = subprocess.run(
        [sys.executable, "-c", _CODE, lines], cwd=folder, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("line", REFUSED)
def test_bad_input_is_refused_in_one_line_without_torch(answers, line):
    status, message, heavy = answers[line]
    assert status == 2 and REFUSED[line] in message
    assert message.count("\n") == 1 and not heavy


@pytest.mark.parametrize("line", QUICK)
def test_quick_commands_import_neither_torch_nor_pandas(answers, line):
    status, message, heavy = answers[line]
    assert (status, heavy) == (0, []), message


def test_help_imports_neither_numpy_nor_scipy():
    code = (
        "import sys\nfrom coterie.cli.main import build_parser\nbuild_parser().format_help()\n"
        "assert not {'numpy', 'scipy', 'torch', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_cells_and_names_do_not_command_the_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.csv").write_text("client,\x1b[31mred\x07,y\na,1,2\n")
    assert main(["data", "show", "odd.csv", "--target", "z"]) == 2
    assert main(["data", "show", "two\nlines.csv"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 2 and "?[31mred?" in err and "two?lines.csv" in err
    assert all(sign.isprintable() for sign in err.replace("\n", ""))


def test_what_may_not_be_read_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "closed.csv").touch(mode=0)
    if os.access("closed.csv", os.R_OK):
        pytest.skip("this user reads everything")
    assert main(["data", "show", "closed.csv"]) == 2
    assert capsys.readouterr().err == (
        "coterie data: closed.csv: permission denied; let this user read it\n"
    )
