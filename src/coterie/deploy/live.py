"""A live page of a deployment's status, for the machine that it runs on.

    /             rounds, answers, sites, epsilon so far by adversary; it reloads itself
    /status.json  the same as `coterie deploy status --json`
    /health       200 while this server runs
    /ready        200 while the run is running or finished, else 503

It listens on 127.0.0.1 only, because who answered a round is private to the coordinator, and
answers no request whose Host is another name: a page of the web that resolves its own name to this
machine cannot read it. It has no script, changes nothing, and shows nothing of clients but how many
there are.
"""

import io
import json
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from coterie.deploy.status import status_of

HOST = "127.0.0.1"
_RELOAD = 3
_PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="{reload}">
<meta name="viewport" content="width=device-width"><title>{state}: {name}</title>
<style>
body {{ font: 16px/1.4 system-ui, sans-serif; margin: 2rem; color: #1a1a1a; background: #fff }}
pre {{ font: 14px/1.35 ui-monospace, monospace; overflow-x: auto }}
@media (prefers-color-scheme: dark) {{ body {{ color: #eee; background: #111 }} }}
</style></head>
<body><h1>{name}</h1>
<pre>{text}</pre></body></html>
"""
Status = Mapping[str, Any]
Render = Callable[[Status], Any]
"""Returns a status for Rich."""


def make_server(folder: Path, render: Render, port: int = 0) -> ThreadingHTTPServer:
    """Return a server of a folder's status; port 0 takes a free one."""
    status_of(folder)  # raises where there is nothing to show

    class Handler(_Handler):
        place, shown = folder, staticmethod(render)

    return ThreadingHTTPServer((HOST, port), Handler)


def page(found: Status, name: str, render: Render) -> str:
    """Return the page of a status."""
    from html import escape

    from rich.console import Console

    console = Console(file=io.StringIO(), width=110, color_system=None, legacy_windows=False)
    console.print(render(found))
    assert isinstance(console.file, io.StringIO)
    return _PAGE.format(
        reload=_RELOAD,
        state=escape(str(found.get("state", found["kind"]))),
        name=escape(name),
        text=escape(console.file.getvalue()),
    )


class _Handler(BaseHTTPRequestHandler):
    place: Path
    shown: Render

    def do_GET(self) -> None:
        """Answer a request."""
        port = self.connection.getsockname()[1]
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            self._send(403, "text/plain", "403: this page is for its own machine\n")
            return
        if self.path == "/health":
            self._send(200, "text/plain", "ok\n")
            return
        try:
            found = status_of(self.place)
        except (OSError, ValueError) as error:
            self._send(503, "text/plain", f"{error}\n")
            return
        if self.path == "/status.json":
            self._send(200, "application/json", json.dumps(found, allow_nan=False))
        elif self.path == "/ready":
            state = str(found.get("state", "running"))
            good = state in ("running", "finished")
            self._send(200 if good else 503, "text/plain", f"{state}\n")
        elif self.path == "/":
            self._send(200, "text/html", page(found, self.place.name, self.shown))
        else:
            self._send(404, "text/plain", "404\n")

    def _send(self, status: int, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log nothing: the page reloads every few seconds."""
