"""A local hub, for tests that download by hub name through the real client.

It implements the part of the hub's public HTTP interface that `huggingface_hub` uses (information on a repository, its
tree, files with ranges, error codes), and logs the requests. A folder OWNER/NAME is served as a data set or a model,
whichever is requested.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = hashlib.sha1(b"the only commit").hexdigest()
REVISIONS = ("main", "refs/convert/parquet", COMMIT)


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, root: Path, requests: list[tuple[str, str, int]], *args):
        self.root, self.requests = root, requests
        super().__init__(*args)

    def log_message(self, *args) -> None:
        pass

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.requests.append((self.command, unquote(urlsplit(self.path).path), len(body)))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def say(self, content) -> None:
        self.answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def fail(self, status: int, code: str) -> None:
        self.answer(status, b"{}", {"X-Error-Code": code})

    def handle_one(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        asked = self.rfile.read(length)
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[0] == "api":
            parts = parts[1:]
        if parts[0] in ("datasets", "models"):
            parts = parts[1:]
        if len(parts) < 2:
            return self.fail(404, "EntryNotFound")
        repository, rest = "/".join(parts[:2]), parts[2:]
        folder = self.root / repository
        if repository == "gated/set":
            return self.fail(403, "GatedRepo")
        if not folder.is_dir():
            return self.fail(404, "RepoNotFound")
        what = rest[0] if rest else "revision"
        revision = next(
            (name for name in REVISIONS if "/".join(rest[1:]).startswith(name)), None if rest[1:] else "main"
        )
        if revision is None:
            return self.fail(404, "RevisionNotFound")
        inside = "/".join(rest[1:])[len(revision) :].strip("/")
        if what == "revision":
            siblings = [described(folder, path) for path in files(folder)]
            return self.say({"id": repository, "sha": COMMIT, "siblings": siblings})
        if what == "tree" and (folder / inside).is_dir():
            if "recursive=true" in self.path.lower():
                return self.say([node(folder, path) for path in files(folder / inside)])
            return self.say([node(folder, path) for path in sorted((folder / inside).iterdir())])
        if what == "paths-info":
            form = json.loads(asked) if asked[:1] == b"{" else {}
            wanted = form.get("paths") or [unquote(pair.partition("=")[2]) for pair in asked.decode().split("&")]
            return self.say([node(folder, folder / path) for path in wanted if (folder / path).is_file()])
        if what == "resolve" and (folder / inside).is_file():
            return self.give(folder / inside)
        return self.fail(404, "EntryNotFound")

    def give(self, path: Path) -> None:
        content = path.read_bytes()
        headers = {"ETag": f'"{digest(path)}"', "X-Repo-Commit": COMMIT, "X-Linked-Size": str(len(content))}
        headers |= {"Accept-Ranges": "bytes"}
        status, ranged = 200, self.headers.get("Range")
        if ranged:
            start, _, stop = ranged.removeprefix("bytes=").partition("-")
            begin, end = int(start), min(int(stop) + 1 if stop else len(content), len(content))
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
            status, content = 206, content[begin:end]
        self.answer(status, content, headers)

    do_GET = do_HEAD = do_POST = handle_one


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def described(folder: Path, path: Path) -> dict:
    size = path.stat().st_size
    lfs = {"sha256": digest(path), "size": size, "pointerSize": 100}
    return {"rfilename": path.relative_to(folder).as_posix(), "size": size, "blobId": "0" * 40, "lfs": lfs}


def node(folder: Path, path: Path) -> dict:
    if path.is_dir():
        return {"type": "directory", "path": path.relative_to(folder).as_posix(), "oid": "0" * 40, "size": 0}
    size = path.stat().st_size
    lfs = {"oid": digest(path), "size": size, "pointerSize": 100}
    name = path.relative_to(folder).as_posix()
    return {"type": "file", "path": name, "size": size, "oid": "0" * 40, "lfs": lfs}


@contextmanager
def serving(root: Path) -> Iterator[tuple[str, list[tuple[str, str, int]]]]:
    """(address, log of requests: method, path, bytes sent) of a hub of the folders in `root`."""
    requests: list[tuple[str, str, int]] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, root, requests))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
