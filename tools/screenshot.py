"""Pictures of pages in a real browser.

    python tools/screenshot.py runs/demo/report.html report.png    # one page
    python tools/screenshot.py --all build/screenshots             # every kind of page

With `--all` the runs, the plan and the documentation are made first (minutes, kept in the folder
for the next time), and every page is shown on a desktop, on a phone and in dark mode.

Needs a Chromium (or `$COTERIE_CHROMIUM`); it is driven by the code of `tests/report/browser.py`.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "report"))

import browser

ROOT = Path(__file__).resolve().parent.parent
DESKTOP, PHONE = (1280, 1000), (390, 844)
VIEWS = {
    "desktop": (*DESKTOP, "light", False),
    "dark": (*DESKTOP, "dark", False),
    "phone": (*PHONE, "light", False),
    "phone-dark": (*PHONE, "dark", False),
    "whole": (*DESKTOP, "light", True),
}
"""Width, height, colours, and whether the whole page is shown."""
_BASELINES = "local,local_star,centralised"
COMMANDS = {
    "demo": "demo --epsilon 1 --out {0}",
    "classes": "run --data digits --epsilon 8 --anyway --history --out {0}",
    "epsilons": "run --data districts --epsilon 0.5,1,4 --out {0}",
    "compare": "compare --data districts --method local,fedavg,pmtl,pfeb --epsilon 0.5,1,4 "
    "--seeds 3 --out {0}",
    "single": f"run --data districts --epsilon 1 --history --baselines {_BASELINES} --out {{0}}",
}
"""What makes the folder of each page, which holds report.html."""
FILES = {
    "plan": "plan --clients 550 --epsilon 1 --parameters 10 --plot {0}",
    "plan-alone": "plan --clients 30 --epsilon 1 --parameters 10 --plot {0}",
    "statement": "report {1}/single --statement {0}",
}
"""What makes each page that is a file of its own; {1} is the folder of all of them."""
DOCS = {
    "docs": "index.html",
    "docs-accounting": "concepts/accounting.html",
    "docs-notebook": "notebooks/hospitals.html",
    "docs-plan": "plan.html",
}


def main() -> int:
    """Make one picture, or all."""
    parser = argparse.ArgumentParser(description="make pictures of pages")
    parser.add_argument("page", type=Path, nargs="?", metavar="PAGE.html")
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT.png")
    parser.add_argument("--all", type=Path, metavar="DIR", help="every kind of page, into DIR")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--whole", action="store_true", help="the whole page, not its top")
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--height", type=int, default=1500, help="of the top (default 1500)")
    parser.add_argument("--scale", type=float, default=1, help="pixels per CSS pixel (default 1)")
    given = parser.parse_args()
    if given.all is not None:
        return picture_all(given.all.resolve())
    if given.page is None or given.out is None:
        parser.error("give a page and a picture, or --all DIR")
    with browser.opened(given.page) as window:
        window.resize(given.width, given.height, scale=given.scale)
        show(window, given.page, "dark" if given.dark else "light")
        take(window, given.out, whole=given.whole)
        return complain(window, given.page)


def picture_all(out: Path) -> int:
    """Make every page that is not there yet, and its pictures."""
    failed = 0
    for name, page in pages(out):
        with browser.opened(page) as window:
            for view, (width, height, scheme, whole) in VIEWS.items():
                window.resize(width, height)
                show(window, page, scheme)
                take(window, out / f"{name}-{view}.png", whole=whole)
            failed |= complain(window, page)
        sys.stderr.write(f"{out / name}-*.png\n")
    return failed


def pages(out: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and the path of every page."""
    made = out / "pages"
    made.mkdir(parents=True, exist_ok=True)
    for name, line in COMMANDS.items():
        if not (made / name / "report.html").exists():
            coterie(line.format(made / name), out)
        yield name, made / name / "report.html"
    for name, line in FILES.items():
        page = made / f"{name}.html"
        if not page.exists():
            coterie(line.format(page, made), out)
        yield name, page
    site = made / "site"
    if not site.exists():
        run([sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)], {})
    yield from ((name, site / page) for name, page in DOCS.items())


def coterie(line: str, out: Path) -> None:
    """Run a command of coterie, with a register of its own."""
    own = {"COTERIE_BUDGET": str(out / "pages" / "budget.json"), "COTERIE_OFFLINE": "1"}
    run([sys.executable, "-m", "coterie", *line.split()], own)


def run(command: list[str], more: dict[str, str]) -> None:
    """Run a program; its output is shown if it fails."""
    settings = {**os.environ, "NO_MKDOCS_2_WARNING": "1", **more}
    done = subprocess.run(
        command, cwd=ROOT, env=settings, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def show(window: browser.Browser, page: Path, scheme: str) -> None:
    """Open a page as a first visit: the documentation keeps the scheme of an earlier one."""
    window.prefer(scheme)
    window.open(page)
    window.evaluate("localStorage.clear()")
    window.open(page)
    window.evaluate("document.querySelectorAll('img').forEach((one) => { one.loading = 'eager' })")
    window.wait_for_charts()


def take(window: browser.Browser, picture: Path, *, whole: bool) -> None:
    """Take a picture when the charts have their new size."""
    window.wait_for("new Promise((done) => setTimeout(() => done(true), 500))")
    window.screenshot(picture, whole=whole)


def complain(window: browser.Browser, page: Path) -> int:
    """Return whether the browser complained, and say of what."""
    complaints = window.complaints()
    if complaints:
        sys.stderr.write("\n".join([f"{page}:", *complaints]) + "\n")
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
