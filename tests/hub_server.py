"""A Hub on loopback: the part of its protocol that `huggingface_hub` uses to read and to push a model repository.

Files live in memory, by repository and commit. The client is pointed here by `HF_ENDPOINT`, in a process of its own,
and is not touched otherwise. Every request is written down, so that a test can tell a download from a cache hit.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Repo:
    """A model repository: files by commit, branches, and who may read it."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    private: bool = False
    truncated: set[str] = field(default_factory=set)  # sent short of what the headers say

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Adds files on top of a branch; returns the commit's name."""
        content = {**self.commits.get(self.branches.get(branch), {}), **files}
        name = hashlib.sha1(json.dumps([len(self.commits), sorted(content)]).encode()).hexdigest()
        self.commits[name] = content
        self.branches[branch] = name
        return name


class Hub:
    """The server, its repositories, and what was asked of it.

    Attributes:
        repos (`dict[str, Repo]`): by id.
        token (`str`): the one that opens private repositories and may push.
        requests (`list[tuple[str, str, int, int]]`): method, path, status and bytes sent of every answer.
    """

    def __init__(self):
        self.repos: dict[str, Repo] = {}
        self.token = "hf_right"
        self.requests: list[tuple[str, str, int, int]] = []
        self.uploads: dict[str, bytes] = {}  # large files by SHA-256, put there before the commit that names them
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    def __enter__(self) -> Hub:
        self.thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def sent(self, repo: str, name: str) -> list[int]:
        """Bytes sent of a repository's file, download by download."""
        return [
            size
            for method, path, status, size in self.requests
            if method == "GET"
            and status in (200, 206)
            and path.startswith(f"/{repo}/resolve/")
            and path.endswith(name)
        ]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments) -> None:
        pass

    # Answers --------------------------------------------------------------------------------------------

    def answer(self, status: int, body: bytes = b"", length: int | None = None, **headers: str) -> None:
        self.hub.requests.append((self.command, unquote(urlsplit(self.path).path), status, len(body)))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        if length is not None and self.command != "HEAD" and length != len(body):
            self.close_connection = True

    def answer_json(self, content, status: int = 200) -> None:
        self.answer(status, json.dumps(content).encode(), Content_Type="application/json")

    def refuse(self, status: int, code: str, message: str) -> None:
        body = json.dumps({"error": message}).encode()
        self.answer(status, body, X_Error_Code=code, X_Error_Message=message, Content_Type="application/json")

    # Requests -------------------------------------------------------------------------------------------

    def do_HEAD(self) -> None:
        self.route()

    def do_GET(self) -> None:
        self.route()

    def do_POST(self) -> None:
        self.route()

    def do_PUT(self) -> None:
        self.route()

    def route(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length) if length else self._chunked()
        path = unquote(urlsplit(self.path).path)
        routes = (
            (r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<name>.+)", self.resolve),
            (r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)(?:/.*)?", self.tree),
            (r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/revision/(?P<revision>[^/]+))?", self.info),
            (r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<revision>[^/]+)", self.preupload),
            (r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<revision>[^/]+)", self.commit),
            (r"/api/repos/create", self.create),
            (r"/api/validate-yaml", self.validate),
            (r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", self.batch),
            (r"/lfs/(?P<oid>[0-9a-f]+)", self.upload),
        )
        for pattern, action in routes:
            match = re.fullmatch(pattern, path)
            if match:
                return action(**match.groupdict())
        return self.refuse(404, "RepoNotFound", f"nothing at {path}")

    def _chunked(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return b""
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def repo(self, name: str) -> Repo | None:
        """A repository the caller may read; else the refusal is sent. The Hub does not tell absent from private."""
        found = self.hub.repos.get(name)
        allowed = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if found is None or (found.private and not allowed):
            self.refuse(401, "RepoNotFound", "Repository not found")
            return None
        return found

    def files(self, repo: str, revision: str | None) -> tuple[str, dict[str, bytes]] | None:
        found = self.repo(repo)
        if found is None:
            return None
        commit = found.branches.get(revision or "main", revision)
        if commit not in found.commits:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return commit, found.commits[commit]

    # Reading --------------------------------------------------------------------------------------------

    def resolve(self, repo: str, revision: str, name: str) -> None:
        found = self.files(repo, revision)
        if found is None:
            return
        commit, files = found
        if name not in files:
            return self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        content = files[name]
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X_Repo_Commit": commit}
        if name.endswith(".safetensors"):
            headers |= {"X_Linked_Etag": headers["ETag"], "X_Linked_Size": str(len(content))}
        start, end = 0, len(content) - 1
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted:
            start, end = int(wanted[1]), min(int(wanted[2] or end), end)
            headers |= {"Content_Range": f"bytes {start}-{end}/{len(content)}"}
        part = content[start : end + 1]
        if name in self.hub.repos[repo].truncated and self.command == "GET":
            return self.answer(200, part[: len(part) // 2], length=len(part), **headers)
        return self.answer(206 if wanted else 200, part, **headers)

    def info(self, repo: str, revision: str | None) -> None:
        found = self.files(repo, revision)
        if found is not None:
            commit, files = found
            siblings = [{"rfilename": name} for name in sorted(files)]
            self.answer_json({"id": repo, "modelId": repo, "sha": commit, "siblings": siblings, "tags": []})

    def tree(self, repo: str, revision: str) -> None:
        found = self.files(repo, revision)
        if found is not None:
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in sorted(found[1].items())
            ]
            self.answer_json(entries)

    # Pushing --------------------------------------------------------------------------------------------

    def create(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self.refuse(401, "Unauthorized", "Invalid username or password.")
        wanted = json.loads(self.body)
        name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        status = 409 if name in self.hub.repos else 200
        repo = self.hub.repos.setdefault(name, Repo(private=bool(wanted.get("private"))))
        if not repo.commits:
            repo.commit({".gitattributes": b""})
        return self.answer_json({"url": f"{self.hub.endpoint}/{name}", "id": name, "name": name}, status)

    def validate(self) -> None:
        self.answer_json({"errors": [], "warnings": []})

    def preupload(self, repo: str, revision: str) -> None:
        if self.files(repo, revision) is not None:
            asked = json.loads(self.body)["files"]
            modes = [{"path": f["path"], "uploadMode": "lfs" if f["size"] > 4096 else "regular"} for f in asked]
            self.answer_json({"files": [mode | {"shouldIgnore": False, "oid": None} for mode in modes]})

    def batch(self, repo: str) -> None:
        objects = json.loads(self.body)["objects"]
        actions = [
            {
                "oid": o["oid"],
                "size": o["size"],
                "actions": {"upload": {"href": f"{self.hub.endpoint}/lfs/{o['oid']}"}},
            }
            for o in objects
        ]
        self.answer_json({"transfer": "basic", "objects": actions})

    def upload(self, oid: str) -> None:
        self.hub.uploads[oid] = self.body
        self.answer(200)

    def commit(self, repo: str, revision: str) -> None:
        found = self.repo(repo)
        if found is None:
            return
        files: dict[str, bytes] = {}
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploads[value["oid"]]
        name = found.commit(files, revision)
        self.answer_json(
            {"success": True, "commitOid": name, "commitUrl": f"{self.hub.endpoint}/{repo}/commit/{name}"}
        )
