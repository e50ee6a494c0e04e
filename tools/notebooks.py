"""Notebooks of `examples/`: run them with Jupyter's kernel, and show them on the site.

    python tools/notebooks.py                     # run all, keep their new outputs
    python tools/notebooks.py examples/paper.ipynb

A notebook runs in an empty folder that holds a copy of `examples/*.py`, as after a download. What
is kept says nothing about this machine: no times, no paths, no warnings. As a hook of mkdocs
this file makes one page per notebook: text, code and outputs, charts as files beside it.
"""

import argparse
import base64
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NAMES = ("hospitals", "network", "paper", "review")
_PRIVATE = re.compile(r"/(?:tmp|home|root|work|Users|var)/|\b\d\d:\d\d:\d\d\b")
_IMAGES = {"image/svg+xml": "svg", "image/png": "png"}


def main(given: Sequence[str] | None = None) -> int:
    """Run notebooks and keep their outputs."""
    parser = argparse.ArgumentParser(description="run notebooks and keep their outputs")
    parser.add_argument("notebooks", nargs="*", type=Path, metavar="NOTEBOOK")
    chosen = parser.parse_args(given).notebooks or [EXAMPLES / f"{name}.ipynb" for name in NAMES]
    for path in chosen:
        path.write_text(executed(path), encoding="utf-8")
        print(f"{path.name}: {path.stat().st_size // 1024} KB")
    return 0


def executed(path: Path) -> str:
    """Run a notebook with a kernel; return its file with outputs, and nothing of this machine."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        for program in EXAMPLES.glob("*.py"):
            shutil.copy(program, folder)
        client = NotebookClient(
            notebook,
            timeout=600,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
        )
        path_with_commands = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = {"COTERIE_BUDGET": str(Path(folder) / "budget.json"), "PATH": path_with_commands}
        client.execute(env=os.environ | own)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not is_empty(output)]
        for output in cell.get("outputs", ()):
            output.get("metadata", {}).clear()
            if text := refusal(output):
                raise ValueError(
                    f"{path.name}: {cell.source}\nprints what must not be kept:\n{text}"
                )
    return nbformat.writes(notebook) + "\n"


def is_empty(output: Any) -> bool:
    """Return whether an output is a bar of progress that has ended."""
    return output.get("data", {}).get("text/html") == ""


def refusal(output: Any) -> str:
    """Return text of an output that nobody else should see: warnings, paths, times of the day."""
    data = output.get("data", {"text": output.get("text", "")})
    kept = [data[kind] for kind in data if not kind.startswith("image/")]
    text = "\n".join("".join(one) for one in kept)
    return text if "Warning" in text or _PRIVATE.search(text) else ""


def on_files(files: Any, config: Any) -> Any:
    """Add a page for every notebook, its charts, and the notebook to download."""
    from mkdocs.structure.files import File

    for name in NAMES:
        source = EXAMPLES / f"{name}.ipynb"
        charts: dict[str, bytes] = {}
        page = "\n\n".join(page_parts(name, json.loads(source.read_text("utf-8")), charts))
        files.append(File.generated(config, f"notebooks/{name}.md", content=page + "\n"))
        charts[f"{name}.ipynb"] = source.read_bytes()
        for kept, content in charts.items():
            files.append(File.generated(config, f"notebooks/{kept}", content=content))
    helper = EXAMPLES / "hospitals.py"
    files.append(File.generated(config, "notebooks/hospitals.py", content=helper.read_bytes()))
    return files


def page_parts(name: str, notebook: Any, charts: dict[str, bytes]) -> Iterator[str]:
    """Yield the parts of a page in Markdown; collect its charts as files."""
    for at, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield linked(source)
        else:
            yield fenced("python", source)
            for output in cell["outputs"]:
                yield shown(output, name, at, charts)
        if at == 0:
            yield f"[Download this notebook]({name}.ipynb){{ .md-button }}"


def linked(text: str) -> str:
    """Return text with links as they are on the site: to pages, not to notebooks or sources."""
    text = re.sub(r"\]\((\w+)\.ipynb", r"](\1.md", text)
    return text.replace("](../docs/", "](../")


def shown(output: Any, name: str, at: int, charts: dict[str, bytes]) -> str:
    """Return an output in Markdown: a chart, HTML as it is, or text."""
    data = output.get("data", {"text/plain": output.get("text", "")})
    for kind, suffix in _IMAGES.items():
        if kind in data:
            content = "".join(data[kind])
            chart = f"{name}-{at}.{suffix}"
            charts[chart] = base64.b64decode(content) if suffix == "png" else content.encode()
            return f'![Chart drawn by the code above]({chart}){{ .notebook-chart loading="lazy" }}'
    if "text/html" in data:
        html = re.sub(r"\n\s*\n", "\n", "".join(data["text/html"]))
        return f'<div class="notebook-output">\n{html}\n</div>'
    return fenced("text", "".join(data["text/plain"]))


def fenced(language: str, text: str) -> str:
    """Return text in a fence that is longer than any inside."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


if __name__ == "__main__":
    sys.exit(main())
