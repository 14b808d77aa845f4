"""A stand-in for the Hugging Face Hub: a server of the requests that huggingface_hub makes to push
and to read a repository.

Files ending in .safetensors are uploaded by the protocol of Git LFS, others in the commit itself,
as the real Hub decides.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_test"
_NAME = "((?:datasets/)?[^/]+/[^/]+)"
"""Pattern of the name of a repository; those of data sets begin with `datasets/`."""


@dataclass
class Repository:
    """Commits of a repository: id -> files; and branch -> commit."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def add(self, branch: str, files: dict[str, bytes]) -> str:
        """Add a commit, and return its id."""
        commit = hashlib.sha1(f"{branch} {len(self.commits)}".encode()).hexdigest()
        self.commits[commit] = files
        self.branches[branch] = commit
        return commit


@dataclass
class Hub:
    """The state of the server, for tests to look at and to change.

    Attributes:
        url: address.
        repositories: by name.
        uploads: SHA-256 -> content of what was uploaded by Git LFS.
        messages: messages of the commits.
        before_commit: called before a commit is made, once.
        is_full: True if uploads by Git LFS are rejected.
    """

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    before_commit: Any = None
    is_full: bool = False


@contextmanager
def serving() -> Iterator[Hub]:
    """Yield a running server."""
    hub = Hub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Write nothing."""

    def do_HEAD(self) -> None:  # the base class's names
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = self._chunks() if "chunked" in self.headers.get("Transfer-Encoding", "") else b""
        body = body or self.rfile.read(length)
        path = unquote(urlsplit(self.path).path)
        try:
            self._route(path, body)
        except _StatusError as error:
            self._send(error.status, "{}", {"X-Error-Code": error.code})

    def _chunks(self) -> bytes:
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _send(self, status: int, body: str | bytes, headers: dict[str, str] | None = None) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value))

    def _route(self, path: str, body: bytes) -> None:
        path = path.replace("/api/datasets/", "/api/models/datasets/")
        writes = self.command in ("POST", "PUT") and "paths-info" not in path
        if writes and "/lfs-store/" not in path:
            self._check_token()
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._json({"warnings": [], "errors": []})
        elif match := re.fullmatch(r"/lfs-store/([0-9a-f]+)", path):
            if self.state.is_full:
                raise _StatusError(403, "quota exceeded")
            self.state.uploads[match[1]] = body
            self._send(200, b"")
        elif match := re.fullmatch(r"/(.+/.+)\.git/info/lfs/objects/batch", path):
            self._batch(json.loads(body))
        elif match := re.fullmatch(rf"/api/models/{_NAME}/preupload/(.+)", path):
            self._preupload(json.loads(body))
        elif match := re.fullmatch(rf"/api/models/{_NAME}/commit/(.+)", path):
            self._commit(match[1], match[2], body)
        elif match := re.fullmatch(rf"/api/models/{_NAME}/branch/(.+)", path):
            repo = self._repo(match[1])
            repo.branches.setdefault(match[2], repo.branches["main"])
            self._json({})
        elif match := re.fullmatch(rf"/api/models/{_NAME}/paths-info/(.+)", path):
            self._paths_info(match[1], match[2], body)
        elif match := re.fullmatch(rf"/api/models/{_NAME}/tree/([^/]+)/?(.*)", path):
            self._tree(match[1], match[2], match[3])
        elif match := re.fullmatch(rf"/api/models/{_NAME}(?:/revision/(.+))?", path):
            commit, files = self._at(match[1], match[2] or "main")
            self._json(
                {"id": match[1], "sha": commit, "siblings": [{"rfilename": f} for f in files]}
            )
        elif match := re.fullmatch(rf"/{_NAME}/resolve/([^/]+)/(.+)", path):
            self._resolve(match[1], match[2], match[3])
        else:
            raise _StatusError(404, f"no such request: {self.command} {path}")

    def _check_token(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise _StatusError(401, "Unauthorized")

    def _repo(self, name: str) -> Repository:
        repo = self.state.repositories.get(name)
        if repo is None or (repo.private and self.headers.get("Authorization") is None):
            raise _StatusError(404, "RepoNotFound")
        return repo

    def _at(self, name: str, revision: str) -> tuple[str, dict[str, bytes]]:
        repo = self._repo(name)
        commit = repo.branches.get(revision, revision)
        if commit not in repo.commits:
            raise _StatusError(404, "RevisionNotFound")
        return commit, repo.commits[commit]

    def _create(self, request: Any) -> None:
        name = f"{request['organization']}/{request['name']}"
        if name in self.state.repositories:
            self._send(409, json.dumps({"url": f"{self.state.url}/{name}"}))
            return
        repo = Repository(request.get("private") or request.get("visibility") == "private")
        repo.add("main", {".gitattributes": b"*.safetensors filter=lfs\n"})
        self.state.repositories[name] = repo
        self._json({"url": f"{self.state.url}/{name}"})

    def _preupload(self, request: Any) -> None:
        modes = [
            {
                "path": each["path"],
                "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for each in request["files"]
        ]
        self._json({"files": modes})

    def _batch(self, request: Any) -> None:
        objects = []
        for each in request["objects"]:
            href = f"{self.state.url}/lfs-store/{each['oid']}"
            action = {} if each["oid"] in self.state.uploads else {"upload": {"href": href}}
            objects.append({**each, **({"actions": action} if action else {})})
        self._send(
            200,
            json.dumps({"transfer": "basic", "objects": objects}),
            {"Content-Type": "application/vnd.git-lfs+json"},
        )

    def _commit(self, name: str, branch: str, body: bytes) -> None:
        if self.state.before_commit is not None:
            action, self.state.before_commit = self.state.before_commit, None
            action()
        parent, before = self._at(name, branch)
        files = dict(before)
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            match entry["key"]:
                case "header":
                    if value.get("parentCommit", parent) != parent:
                        raise _StatusError(412, "the branch has moved")
                    self.state.messages.append(value["summary"])
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.state.uploads[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
                case other:
                    raise _StatusError(400, f"no such operation: {other}")
        commit = self._repo(name).add(branch, files)
        url = f"{self.state.url}/{name}/commit/{commit}"
        self._json({"success": True, "commitOid": commit, "commitUrl": url})

    def _entry(self, path: str, content: bytes) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content)}
        entry["oid"] = hashlib.sha1(content).hexdigest()
        if path.endswith(".safetensors"):
            digest = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
        return entry

    def _listed(self, files: dict[str, bytes], folder: str, deep: bool) -> list[dict[str, Any]]:
        prefix = f"{folder}/" if folder else ""
        entries: dict[str, dict[str, Any]] = {}
        for path, content in files.items():
            if not path.startswith(prefix):
                continue
            parts = path.removeprefix(prefix).split("/")
            for depth in range(1, len(parts)):
                name = prefix + "/".join(parts[:depth])
                if deep or depth == 1:
                    oid = hashlib.sha1(name.encode()).hexdigest()
                    entries[name] = {"type": "directory", "path": name, "oid": oid, "size": 0}
            if deep or len(parts) == 1:
                entries[path] = self._entry(path, content)
        return list(entries.values())

    def _tree(self, name: str, revision: str, folder: str) -> None:
        _, files = self._at(name, revision)
        listed = self._listed(files, folder, "recursive=true" in self.path.lower())
        if folder and not listed:
            raise _StatusError(404, "EntryNotFound")
        self._json(listed)

    def _paths_info(self, name: str, revision: str, body: bytes) -> None:
        _, files = self._at(name, revision)
        try:
            paths = json.loads(body)["paths"]
        except ValueError:
            paths = [unquote(p.partition("=")[2]) for p in body.decode().split("&") if "paths" in p]
        paths = [paths] if isinstance(paths, str) else paths
        everything = {entry["path"]: entry for entry in self._listed(files, "", True)}
        self._json([everything[path] for path in paths if path in everything])

    def _resolve(self, name: str, revision: str, path: str) -> None:
        commit, files = self._at(name, revision)
        if path not in files:
            raise _StatusError(404, "EntryNotFound")
        content = files[path]
        headers = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if span is None:
            self._send(200, content, headers)
            return
        start, stop = int(span[1]), int(span[2] or len(content) - 1) + 1
        part = content[start:stop]
        headers["Content-Range"] = f"bytes {start}-{start + len(part) - 1}/{len(content)}"
        self._send(206, part, headers)


class _StatusError(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code
