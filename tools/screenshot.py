"""Make a picture of a report: `python tools/screenshot.py runs/demo/report.html report.png`.

Needs a Chromium (or `$COTERIE_CHROMIUM`); it is driven by the code of `tests/report/browser.py`.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "report"))

import browser


def main() -> int:
    """Make one picture."""
    parser = argparse.ArgumentParser(description="make a picture of a report")
    parser.add_argument("page", type=Path, metavar="REPORT")
    parser.add_argument("out", type=Path, metavar="OUT.png")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--whole", action="store_true", help="the whole page, not its top")
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--height", type=int, default=1500, help="of the top (default 1500)")
    parser.add_argument("--scale", type=float, default=1, help="pixels a CSS pixel (default 1)")
    given = parser.parse_args()
    with browser.opened(given.page) as window:
        window.prefer("dark" if given.dark else "light")
        window.resize(given.width, given.height, scale=given.scale)
        window.wait_for("new Promise((done) => setTimeout(() => done(true), 500))")
        window.screenshot(given.out, whole=given.whole)
        if complaints := window.complaints():
            sys.stderr.write("\n".join(complaints) + "\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
