"""Bad input is refused in one line, with status 2, before torch is imported."""

import json
import subprocess
import sys

import pytest

REFUSED = {
    "data show nowhere.csv": "nowhere.csv: no such file, and no dataset of that name",
    "data show distrcts": "did you mean districts?",
    "run --data nowhere.csv": "expected a file, or one of ",
    "run --epsilon 1": "no data: give --data NAME|FILE",
    "run --data districts --method pmlt": "--method pmlt: no such method; did you mean pmtl?",
    "run --data districts --model lnear": "--model lnear: no such model; did you mean linear?",
    "run --data districts --epsilon -1": "epsilon = -1.0: expected a positive number",
    "run --data districts --epsilon nan": "epsilon = nan: expected a positive number",
    "run --data districts --delta 2": "--delta 2: expected a number from 1e-30 to below 1, or 0",
    "run --data districts --noise laplac": "--noise laplac: no such noise; did you mean laplace?",
    "run --data districts --rounds 0": "rounds = 0: expected a whole number of at least 1",
    "run --data districts --clip 0": "clip = 0.0: expected a positive number",
    "run --data districts --set lam": "--set 'lam': expected KEY=VALUE",
    "run --data districts --epsilom 1": "did you mean --epsilon?",
    "run --plan nowhere.toml": "nowhere.toml: cannot be read (no such file)",
    "run --resume nowhere": "nowhere: no such folder",
    "plan --data nowhere.csv": "nowhere.csv: no such file",
    "plan --clients 0 --parameters 3": "clients = 0: expected at least 1",
    "compare --data nowhere.csv": "nowhere.csv: no such file",
    "tune --data nowhere.csv": "nowhere.csv: no such file",
    "verify nowhere": "nowhere: no such folder",
    "report nowhere": "nowhere: no such folder",
    "predict nowhere --data districts": "nowhere: no such file or run folder",
    "export nowhere --client a": "nowhere: no such folder",
    "onboard nowhere --data districts --out new": "nowhere: no such folder",
    "account --clients 5 --rounds 0 --noise-multiplier 1": "--rounds 0: expected at least 1",
    "calibrate --clients 5 --rounds 1 --epsilon -1": "epsilon = -1",
    "verfy nowhere": "did you mean verify?",
}
QUICK = ("--version", "--help", "run --help", "data show rows.csv", "completion bash", "methods")
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
