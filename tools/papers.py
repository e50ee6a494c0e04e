"""The items of the four papers: write their pages, or run the commands that remake them.

`python tools/papers.py pages` writes the tables of docs/papers, `python tools/papers.py run
[--machine gpu]` runs the commands. Each command is run once, in the root of the project; its output
goes to build/papers/, and a line says how long it took.
"""

import argparse
import os
import re
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path

from coterie.papers import Item, Paper, read_papers

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- items: made by tools/papers.py -->", "<!-- end of items -->"


def table(paper: Paper) -> str:
    """Return a paper as Markdown: its citation and counts, and one section per item."""
    head = (
        f"{_cite(paper)}. {len(paper.items)} items: {paper.count('runs')} run, "
        f"{paper.count('reproduced')} reproduced, {paper.count('differs')} differ, "
        f"{paper.count('not reproduced')} not reproduced ([what this means](index.md)). The method "
        f"is [{paper.key}](../methods/{paper.key}.md).\n\n"
    )
    return head + "\n".join(line for item in paper.items for line in _section(item)).rstrip()


def _cite(paper: Paper) -> str:
    return f"{paper.authors}. *{paper.title}*. {paper.venue}. <{paper.link}>"


def _section(item: Item) -> list[str]:
    rows = [("here", item.where), ("published", item.published), ("ours", item.ours),
            ("how close", item.tolerance), ("why", item.why)]  # fmt: skip
    lines = [f"### {item.item}", "", f"{item.about} *{item.kind}; {item.status}*", ""]
    lines += [f"- **{name}:** {_linked(text)}" for name, text in rows if text]
    for path in re.findall(r"\bdocs/([\w/.-]+\.svg)", item.where):
        lines += ["", f"![{item.item}: {item.about}]({_from_papers(path)})"]
    if item.command:
        lines += ["", "```sh", item.command, "```"]
    return [*lines, ""]


def _linked(text: str) -> str:
    """Return text with links in place of paths in docs/."""
    return re.sub(
        r"\bdocs/([\w/.-]+\.(?:csv|md|svg))",
        lambda found: f"[{found[1].rpartition('/')[2]}]({_from_papers(found[1])})",
        text,
    )


def _from_papers(path: str) -> str:
    """Return a path in docs/ relative to docs/papers/."""
    return path.removeprefix("papers/") if path.startswith("papers/") else f"../{path}"


def overview(papers: tuple[Paper, ...]) -> str:
    """Return the table of the index: items by paper and status."""
    lines = ["| paper | items | run | reproduced | differ | not reproduced |", "|---" * 6 + "|"]
    statuses = ("runs", "reproduced", "differs", "not reproduced")
    for one in papers:
        counts = " | ".join(str(one.count(status)) for status in statuses)
        lines.append(f"| [{one.title}]({one.key}.md) | {len(one.items)} | {counts} |")
    totals = " | ".join(str(sum(one.count(status) for one in papers)) for status in statuses)
    lines.append(f"| all | {sum(len(one.items) for one in papers)} | {totals} |")
    return "\n".join(lines)


def missing(papers: tuple[Paper, ...]) -> str:
    """Return one line per item that is not reproduced, with the reason."""
    return "\n".join(
        f"- [{paper.key}, {item.item}]({paper.key}.md#{item.anchor}): {item.why}"
        for paper in papers
        for item in paper.items
        if item.status == "not reproduced"
    )


def bibliography(papers: tuple[Paper, ...]) -> str:
    """Return one line per paper."""
    return "\n".join(f"- {_cite(one)}" for one in papers)


def filled(text: str, content: str) -> str:
    """Return a page's text with the content between the marks; raise ValueError without marks."""
    pattern = re.compile(f"({re.escape(BEGIN)}\n).*?({re.escape(END)})", re.DOTALL)
    found, count = pattern.subn(lambda marks: f"{marks[1]}\n{content}\n\n{marks[2]}", text)
    if count != 1:
        raise ValueError(f"expected {BEGIN!r} and {END!r} once, found {count} times")
    return found


def pages() -> dict[Path, str]:
    """Return the text that every page should have."""
    papers = read_papers()
    contents = {one.key: table(one) for one in papers}
    reasons = f"**Not reproduced**, and why:\n\n{missing(papers)}"
    contents["index"] = "\n\n".join((overview(papers), bibliography(papers), reasons))
    found = {}
    for name, content in contents.items():
        path = ROOT / "docs" / "papers" / f"{name}.md"
        found[path] = filled(path.read_text(encoding="utf-8"), content)
    return found


def commands(machine: str) -> list[str]:
    """Return the distinct commands for a machine, in the order of the papers."""
    items = [item for paper in read_papers() for item in paper.items]
    return list(dict.fromkeys(item.command for item in items if item.machine == machine))


def run(machine: str) -> int:
    """Run the commands; return the number that failed."""
    out = ROOT / "build" / "papers"
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("COTERIE_DATA", str(ROOT.parent / "shared" / "data"))
    found, failed, started = commands(machine), 0, (time.monotonic(), _cpu())
    for number, command in enumerate(found, 1):
        begun, spent = time.monotonic(), _cpu()
        words = [_program(os.path.expandvars(word)) for word in shlex.split(command)]
        with (out / f"{machine}-{number:02}.log").open("wb") as log:
            log.write(f"{command}\n".encode())
            log.flush()
            done = subprocess.run(words, cwd=ROOT, stdout=log, stderr=log, check=False)
        failed += done.returncode != 0
        state = f"FAILED ({done.returncode})" if done.returncode else "ok"
        seconds = time.monotonic() - begun
        used = f"{seconds:.0f} s ({_cpu() - spent:.0f} s of CPU)"
        print(f"{number}/{len(found)} {state} {used}: {command}", flush=True)
    used = f"{time.monotonic() - started[0]:.0f} s ({_cpu() - started[1]:.0f} s of CPU)"
    print(f"{len(found)} commands, {failed} failed, {used}; see {out}")
    return failed


def _cpu() -> float:
    """Return the CPU seconds of the commands so far: on a busy machine the wait says little."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _program(word: str) -> str:
    """Use this environment's Python and command line."""
    if word == "python":
        return sys.executable
    return str(Path(sys.executable).with_name("coterie")) if word == "coterie" else word


def main() -> int:
    """Write the pages, or run the commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("pages", "run"))
    parser.add_argument("--machine", choices=("cpu", "gpu"), default="cpu")
    given = parser.parse_args()
    if given.what == "run":
        return min(run(given.machine), 1)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
