"""A small Hugging Face Hub: what a client asks of the real one when it fetches a model, as the real
one answers, redirects to another host for large files included; and what can go wrong there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.support.http_stand_in import StandInHandler, serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"
# What is neither of these is kept in git itself, under a SHA-1.
LARGE = (".safetensors", ".tensors", "tokenizer.json", ".bin")
CHUNK_BYTES = 64 << 10


@dataclass
class Repository:
    """Files by name, and what is said of them. ``claims`` are sizes that are told of weights that
    no disk here could hold; ``parameters`` what is told of their numbers, by type."""

    files: dict[str, bytes]
    commit: str = COMMIT
    revisions: tuple[str, ...] = ("main",)
    gated: bool = False
    claims: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, int] | None = None

    @staticmethod
    def of_folder(folder: Path) -> Repository:
        """A model on this disk as it would be on the Hub, pickles of it beside the safetensors."""
        # But for its index, which another test may just be building.
        own = (path for path in folder.iterdir() if ".lexshard" not in path.name)
        files = {path.name: path.read_bytes() for path in own}
        return Repository(files | {"pytorch_model.bin": b"never to be fetched"})


@dataclass(frozen=True)
class HubRequest:
    """What was asked, and of a file which bytes were sent: ``begin`` to ``end``."""

    method: str
    name: str
    token: str | None
    begin: int = 0
    end: int = 0


@dataclass
class HubServer:
    """``cuts`` are places where the connection breaks, once each, by file; ``wrong`` are files
    whose bytes come out other than they are; ``status`` is what is answered to everything, once it
    is set; ``ranges`` says whether it knows them."""

    repositories: dict[str, Repository]
    url: str = ""
    cdn: str = ""
    requests: list[HubRequest] = field(default_factory=list)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    wrong: set[str] = field(default_factory=set)
    status: int | None = None
    ranges: bool = True

    def sent(self, ending: str = ".safetensors") -> int:
        """Bytes of files with that ending, all requests together."""
        return sum(each.end - each.begin for each in self.requests if each.name.endswith(ending))

    def asked(self, ending: str) -> list[HubRequest]:
        return [
            each for each in self.requests if each.method == "GET" and each.name.endswith(ending)
        ]


@contextmanager
def hub_serving(repositories: dict[str, Repository]) -> Iterator[HubServer]:
    hub = HubServer(repositories)

    class Handler(_Handler):
        server_of = hub

    with serving(Handler) as hub.url:
        hub.cdn = hub.url.replace("127.0.0.1", "localhost")  # to a client another host
        yield hub


class _Handler(StandInHandler):
    server_of: HubServer

    def answer(self) -> None:
        hub = self.server_of
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if hub.status is not None:
            self.say(hub.status)
        elif parts[0] == "cdn":
            self._send_file("/".join(parts[1:3]), "/".join(parts[3:]))
        elif parts[:2] == ["api", "models"] and len(parts) >= 6 and parts[4] == "revision":
            self._describe("/".join(parts[2:4]), "/".join(parts[5:]))
        elif len(parts) > 4 and parts[2] == "resolve":
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self._fail(404, "RepoNotFound")

    @property
    def _token(self) -> str | None:
        return self.headers.get("Authorization")

    def _note(self, name: str, begin: int = 0, end: int = 0) -> None:
        hub = self.server_of
        hub.requests.append(HubRequest(self.command, name, self._token, begin, end))

    def _known(self, name: str, revision: str) -> Repository | None:
        repository = self.server_of.repositories.get(name)
        if repository is None:
            # So that no stranger learns which private ones there are.
            self._fail(401 if self._token is None else 404, "RepoNotFound")
        elif revision not in (*repository.revisions, repository.commit):
            self._fail(404, "RevisionNotFound")
            return None
        return repository

    def _describe(self, name: str, revision: str) -> None:
        self._note(f"{name}@{revision}")
        repository = self._known(name, revision)
        if repository is None:
            return
        siblings = []
        for file, content in repository.files.items():
            size = repository.claims.get(file, len(content))
            told: dict[str, Any] = {"rfilename": file, "size": size, "blobId": _git_hash(content)}
            if file.endswith(LARGE):
                told["lfs"] = {"sha256": _sha256(content), "size": size, "pointerSize": 134}
            siblings.append(told)
        data: dict[str, Any] = {"id": name, "sha": repository.commit, "siblings": siblings}
        if repository.parameters is not None:
            total = sum(repository.parameters.values())
            data["safetensors"] = {"parameters": repository.parameters, "total": total}
        self.say(200, json.dumps(data).encode(), {"Content-Type": "application/json"})

    def _resolve(self, name: str, revision: str, file: str) -> None:
        repository = self._known(name, revision)
        if repository is None:
            return
        if repository.gated:
            self._fail(401 if self._token is None else 403, "GatedRepo")
            return
        content = repository.files.get(file)
        if content is None:
            self._fail(404, "EntryNotFound", {"X-Repo-Commit": repository.commit})
            return
        headers = {"X-Repo-Commit": repository.commit, "Accept-Ranges": "bytes"}
        if not file.endswith(LARGE):
            self._send(file, content, headers | {"ETag": f'"{_git_hash(content)}"'})
            return
        digest = _sha256(content)
        token_route = f"/api/models/{name}/xet-read-token/{revision}"
        headers |= {
            "X-Linked-Etag": f'"{digest}"',
            "X-Linked-Size": str(len(content)),
            # The real one offers its other way of large files, too.
            "X-Xet-Hash": digest,
            "X-Xet-Refresh-Route": self.server_of.url + token_route,
            "Location": f"{self.server_of.cdn}/cdn/{name}/{file}",
        }
        self.say(302, b"", headers)

    def _send_file(self, name: str, file: str) -> None:
        content = self.server_of.repositories[name].files[file]
        self._send(file, content, {"ETag": '"of-the-cdn"'})

    def _send(self, file: str, content: bytes, headers: dict[str, str]) -> None:
        """All of it or the range that is asked for, as far as the next cut."""
        hub = self.server_of
        begin, status = 0, 200
        asked = self.headers.get("Range")
        if asked is not None and hub.ranges:
            begin, status = int(asked.removeprefix("bytes=").removesuffix("-")), 206
            headers = headers | {
                "Content-Range": f"bytes {begin}-{len(content) - 1}/{len(content)}"
            }
        if self.command == "HEAD":
            self._note(file)
            self.say(status, b"", headers | {"Content-Length": str(len(content))})
            return
        end = len(content)
        cuts = hub.cuts.get(file, [])
        if cuts and begin <= cuts[0]:
            end = cuts.pop(0)
        if file in hub.wrong:
            content = bytes(len(content))
        self._note(file, begin, end)
        self.head(status, headers | {"Content-Length": str(len(content) - begin)})
        for place in range(begin, end, CHUNK_BYTES):
            self.wfile.write(content[place : min(place + CHUNK_BYTES, end)])
        if end < len(content):
            self.wfile.flush()
            self.close_connection = True

    def _fail(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self.say(status, b"", {"X-Error-Code": code} | (headers or {}))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
