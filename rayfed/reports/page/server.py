"""Serves the page on this machine and keeps it up to date while trials write."""

import hashlib
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rayfed.core.errors import StorageError, UsageError
from rayfed.reports.page.build import page_html
from rayfed.reports.page.content import as_json, page_content

LOOPBACK = "127.0.0.1"
_LEAST_SECONDS = 2.0
_SHARE = 0.2  # of the time, at most, that the server spends on reading results


class LivePage:
    """The latest data of the page, read again at most every few seconds, and only when somebody asks."""

    def __init__(self, folder: str | Path, experiment: str | None):
        self._folder, self._experiment = folder, experiment
        self._lock = threading.Lock()
        self._data, self._version, self._until = "", "", 0.0

    def data(self) -> tuple[str, str]:
        """Return the data as JSON, and their version, which changes with them."""
        with self._lock:
            began = time.monotonic()
            if began >= self._until:
                try:
                    self._data = as_json(page_content(self._folder, self._experiment))
                except (UsageError, StorageError) as error:  # a sweep that is served from its start has no results yet
                    self._data = as_json({"folder": str(self._folder), "experiments": [], "waiting": str(error)})
                self._version = hashlib.blake2b(self._data.encode(), digest_size=8).hexdigest()
                now = time.monotonic()
                self._until = now + max(_LEAST_SECONDS, (now - began) / _SHARE)
            return self._data, self._version


def make_server(folder: str | Path, experiment: str | None, port: int) -> ThreadingHTTPServer:
    """Return the server of the page, bound to the loopback interface; port 0 is any that is free.

    Raises:
        UsageError: the port is taken or does not exist.
    """
    if not 0 <= port < 2**16:
        raise UsageError(f"--serve {port}: no such port; give 0 (any free one) to 65535")
    handler = type("PageHandler", (_Handler,), {"page": LivePage(folder, experiment)})
    try:
        server = ThreadingHTTPServer((LOOPBACK, port), handler)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"--serve {port}: {reason}; give another port, or 0 for any free one") from error
    server.daemon_threads = True
    return server


def serve(folder: str | Path, experiment: str | None, port: int) -> int:
    """Serve the page until Ctrl-C, and return the exit code 0.

    Raises:
        UsageError: the port is taken or does not exist.
    """
    server = make_server(folder, experiment, port)
    print(f"http://{LOOPBACK}:{server.server_port}/ (this machine only; Ctrl-C ends)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return 0


class _Handler(BaseHTTPRequestHandler):
    page: LivePage
    server: ThreadingHTTPServer

    def do_GET(self) -> None:
        # A web site could give its own name the address 127.0.0.1 and so read the page; the Host tells.
        names = {f"{name}:{self.server.server_port}" for name in (LOOPBACK, "localhost")}
        if self.headers.get("Host") not in names:
            self._send(403, "text/plain", "this server answers to 127.0.0.1 and localhost only")
            return
        path, _, query = self.path.partition("?")
        if path == "/":
            self._send(200, "text/html", page_html(self.page.data()[0], live=True))
        elif path == "/data.json":
            data, version = self.page.data()
            if query == f"have={version}":
                self._send(204, "application/json", "")
            else:
                self._send(200, "application/json", data, version)
        else:
            self._send(404, "text/plain", "no such page")

    def _send(self, status: int, kind: str, text: str, version: str | None = None) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if version:
            self.send_header("X-Version", version)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing for each request."""
