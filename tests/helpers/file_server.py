"""An HTTP server on loopback with the files of a test, which can be moved, cut off or missing."""

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FileServer:
    """Files by path, and what else happens to a request."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.moved: dict[str, str] = {}
        self.cut: set[str] = set()
        self.requests: Counter[str] = Counter()
        self.address = ""

    def add(self, folder: Path, prefix: str = "/") -> None:
        """Serve all files below `folder`."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.files[prefix + path.relative_to(folder).as_posix()] = path.read_bytes()

    def add_hub(self, repo: str, revision: str, folder: Path) -> None:
        """Serve the files below `folder` as a revision of a dataset's repository on the Hugging Face hub."""
        self.add(folder, f"/datasets/{repo}/resolve/{revision}/")
        names = [{"rfilename": path.relative_to(folder).as_posix()} for path in folder.rglob("*") if path.is_file()]
        answer = {"id": repo, "sha": revision, "siblings": names, "private": False, "disabled": False, "gated": False}
        self.files[f"/api/datasets/{repo}/revision/{revision}"] = json.dumps(
            answer | {"downloads": 0, "likes": 0, "tags": []}
        ).encode()
        tree = [
            {"type": "file", "path": path.relative_to(folder).as_posix(), "size": path.stat().st_size, "oid": COMMIT}
            for path in folder.rglob("*")
            if path.is_file()
        ]
        self.files[f"/api/datasets/{repo}/tree/{revision}"] = json.dumps(tree).encode()


@contextlib.contextmanager
def serving() -> Iterator[FileServer]:
    files = FileServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            files.requests[path] += 1
            self._answer(path, with_body=True)

        def do_HEAD(self) -> None:
            self._answer(unquote(urlsplit(self.path).path), with_body=False)

        def _answer(self, path: str, with_body: bool) -> None:
            if path in files.moved:
                self.send_response(302)
                self.send_header("Location", files.moved[path])
                self.end_headers()
                return
            if path not in files.files:
                self.send_error(404)
                return
            content = files.files[path]
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header(
                "Content-Type", "application/json" if path.startswith("/api") else "application/octet-stream"
            )
            self.send_header("ETag", f'"{hash(content) & 0xFFFFFFFF:08x}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if with_body:
                self.wfile.write(content[: len(content) // 2] if path in files.cut else content)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    files.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield files
    finally:
        server.shutdown()
        server.server_close()
