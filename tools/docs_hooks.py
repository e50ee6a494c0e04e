"""What the site is made of besides its pages: the command line, formulas, pictures, ways back.

The page of the command line is written from the parser. Formulas are converted to MathML, which
browsers draw without a program or a font from elsewhere. Pictures of docs/pictures become part of
the page, where they take the page's colours, light or dark. Pages that are not in the menu get a
link to the page that lists them.
"""

import argparse
import html
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File

_HEAD = """\
# Command line

This page is generated from the parser. Results go to stdout, progress and notes to stderr. Exit
status: 0 success, 1 a failed check, 2 bad input, 130 interrupted.
"""
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_BELOW = re.compile(r"\\(min|operatorname\*\{argmin\})_(\{(?:[^{}]|\{[^{}]*\})*\}|\\?\w+)")
_PICTURE = re.compile(r'<img alt="[^"]*" src="((?:\.\./)*pictures/([\w-]+)\.svg)" ?/?>')
_DECISIONS = "<!-- decisions -->"


def on_files(files: Any, config: Any) -> Any:
    """Add the page of the command line."""
    files.append(File.generated(config, "cli.md", content=cli_page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """List all decisions, in order, on their first page."""
    folder = Path(config.docs_dir) / "adr"
    lines = [f"- [{_title(one)}]({one.name})" for one in sorted(folder.glob("0*.md"))]
    return markdown.replace(_DECISIONS, "\n".join(lines))


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Convert formulas, put pictures into the page, and add the link back."""
    content = _FORMULA.sub(_mathml, content)
    content = re.sub(r"(</math>)([,.;:)])", r"\1&#8288;\2", content)  # no break between them
    content = _PICTURE.sub(lambda found: _inlined(Path(config.docs_dir), found[2]), content)
    return _way_back(page, files) + content


def _mathml(found: re.Match[str]) -> str:
    """Return a formula as MathML; a wide one scrolls inside its own box."""
    inline = found[1] == "span"
    latex = _BELOW.sub(r"\\underset{\2}{\\\1}", html.unescape(found[2]))
    made = convert(latex, display="inline" if inline else "block")
    made = made.replace("<mo>&#x02016;</mo>", '<mo stretchy="false">&#x02016;</mo>')
    if "\\" in made:
        raise ValueError(f"formula with an unknown command: {found[2]}")
    return made if inline else f'<div class="formula">{made}</div>'


def _inlined(docs: Path, name: str) -> str:
    """Return a picture without its own colours, its names made unique on the page."""
    text = (docs / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
    text = re.sub(r"<style>.*?</style>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = re.sub(r'aria-labelledby="(\w+) (\w+)"', rf'aria-labelledby="{name}-\1 {name}-\2"', text)
    return f'<span class="picture">{text.strip()}</span>'


def _way_back(page: Any, files: Any) -> str:
    """Return a link to the page that lists this one, for a page that is not in the menu."""
    here = page.file.src_uri
    listing = f"{posixpath.dirname(here)}/index.md"
    if page.parent or page.is_homepage or not (above := files.get_file_from_path(listing)):
        return ""
    if above.page is None or above is page.file:
        return ""
    link = above.url_relative_to(page.file)
    return f'<p class="back"><a href="{link}">{html.escape(above.page.title)}</a></p>\n'


def cli_page() -> str:
    """Write the page of the command line from the parser."""
    from coterie.cli.main import build_parser

    os.environ["COLUMNS"] = "100"  # help is as wide as the page, whoever builds it
    parser = build_parser()
    parts = [_HEAD, "## coterie", _shown(parser)]
    for name, command in commands(parser).items():
        parts += [f"## coterie {name}", _shown(command)]
    return "\n\n".join(parts) + "\n"


def commands(parser: argparse.ArgumentParser, before: str = "") -> dict[str, Any]:
    """Find all commands, and those inside commands, by name."""
    found = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                found[before + name] = command
                found |= commands(command, f"{before}{name} ")
    return found


def _shown(parser: argparse.ArgumentParser) -> str:
    return f"```text\n{parser.format_help().rstrip()}\n```"


def _title(page: Path) -> str:
    """Return the number and the heading of a decision."""
    heading = next(
        line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("# ")
    )
    words = re.sub(r"^(ADR )?\d+[.:]?\s*", "", heading.removeprefix("# "))
    return f"{int(page.name[:4])}. {words}"
