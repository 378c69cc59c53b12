"""A model hub on 127.0.0.1: as much of its protocol as huggingface_hub needs, a log, and faults on demand."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MISSING = (404, "RepoNotFound")
GATED = (403, "GatedRepo")
UNAUTHORISED = (401, "")
BROKEN = (500, "")


@dataclass
class Hub:
    """Repositories by name: their files, or the status and X-Error-Code that they answer with."""

    repositories: dict[str, dict[str, bytes] | tuple[int, str]]
    faults: dict[str, list[str]] = field(
        default_factory=dict
    )  # repository/file → "cut", "short" or "broken", once each
    log: list[str] = field(default_factory=list)
    address: str = ""

    def fetched(self, repository: str) -> list[str]:
        """Files of a repository that were downloaded, in order."""
        begin = f"GET /{repository}/resolve/"
        return [line.split("/", 5)[5] for line in self.log if line.startswith(begin)]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = urlsplit(self.path).path
            hub.log.append(f"{self.command} {path}")
            parts = path.removeprefix("/api/models").strip("/").split("/")
            name, kind, rest = "/".join(parts[:2]), parts[2] if len(parts) > 2 else "", parts[3:]
            found = hub.repositories.get(name, MISSING)
            if isinstance(found, tuple):
                self.refuse(*found)
            elif rest[0] not in ("main", COMMIT):
                self.refuse(404, "RevisionNotFound")
            elif kind == "resolve":
                self.send_file(name, "/".join(rest[1:]), found)
            elif kind == "tree":
                self.send({}, json.dumps([_entry(*item) for item in found.items()]).encode())
            else:
                self.send({}, json.dumps({"id": name, "sha": COMMIT, "siblings": []}).encode())

        def refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def send_file(self, name: str, file: str, files: dict[str, bytes]) -> None:
            if file not in files:
                self.refuse(404, "EntryNotFound")
                return
            content = files[file]
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
            waiting = hub.faults.get(f"{name}/{file}") if self.command == "GET" else None
            fault = waiting.pop(0) if waiting else ""
            if fault == "broken":
                self.refuse(*BROKEN)
            elif fault == "cut":
                self.send(headers, content, upto=len(content) // 2)
                self.close_connection = True
            else:
                self.send(headers, content[:-10] if fault == "short" else content)

        def send(self, headers: dict[str, str], content: bytes, upto: int | None = None) -> None:
            begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
            self.send_response(206 if begin else 200)
            if begin:
                self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content) - begin))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content[begin:upto])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _entry(path: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
