"""Write the table of methods into docs/methods/index.md.

The table is made from the texts of every method: `coterie.methods.base.about`. Run

    python tools/method_table.py

after adding a method; tests/methods/test_base.py checks that the page agrees with the code.
"""

import re
from pathlib import Path

from coterie.methods.base import about, choices

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- methods: made by tools/method_table.py -->", "<!-- end of methods -->"
FILES = {"docs/methods/index.md": "[{0}]({0}.md)"}


def table(link: str) -> str:
    """Return the table, with names written as `link`."""
    lines = ["| name | method | releases |", "|---|---|---|"]
    for name in choices():
        texts = about(name)
        lines.append(f"| {link.format(name)} | {texts.summary.rstrip('.')} | {texts.releases} |")
    return "\n".join(lines)


def filled(text: str, link: str) -> str:
    """Return a file's text with the table between the two marks.

    Raises:
        ValueError: If the marks are missing.
    """
    pattern = re.compile(f"({re.escape(BEGIN)}\n).*?({re.escape(END)})", re.DOTALL)
    found, count = pattern.subn(lambda marks: f"{marks[1]}\n{table(link)}\n\n{marks[2]}", text)
    if count != 1:
        raise ValueError(f"expected {BEGIN!r} and {END!r} once, found {count} times")
    return found


def main() -> None:
    """Rewrite the page."""
    for name, link in FILES.items():
        path = ROOT / name
        path.write_text(filled(path.read_text(encoding="utf-8"), link), encoding="utf-8")


if __name__ == "__main__":
    main()
