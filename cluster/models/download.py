"""One file of a repository into the Hub's cache: gone on with where it broke off, and checked.

huggingface_hub 2 throws away what it has of a file when it is interrupted, and checks no hash of
what comes over plain HTTP; so bytes are fetched here, and put where it looks for them.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx2
from filelock import Timeout
from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    get_session,
    hf_hub_download,
    hf_hub_url,
)
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import WeakFileLock, build_hf_headers, hf_raise_for_status

from lexshard.cluster.models.files import RemoteFile
from lexshard.cluster.models.hub import Hub, reason_of
from lexshard.cluster.models.names import HubName, ModelNameError
from lexshard.cluster.models.progress import FetchProgress, in_units

TRIES = 5  # one after the other that bring nothing
PAUSE_SECONDS = 1.0
LOCK_SECONDS = 1.0  # between two looks whether to wait on for another start
PASSING = frozenset({408, 429, 500, 502, 503, 504})
_HASH = re.compile(r"[0-9a-f]{64}")
_ETAG = re.compile(r"[\w.+=-]{1,200}", re.ASCII)  # it becomes the name of a file


class DownloadStoppedError(Exception):
    """Another file could not be had, or the user has had enough."""


class Downloads:
    """Fetches files of the repository ``name`` at ``commit``. Several threads may call it."""

    def __init__(self, hub: Hub, name: HubName, commit: str) -> None:
        self._hub, self._name, self._commit = hub, name, commit
        self._folder = hub.storage(name)
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Ends every download at its next chunk; what has come stays."""
        self._stopped.set()

    def there(self, file: RemoteFile) -> int:
        """How many bytes of a file an earlier start has left."""
        if (self._hub.snapshot(self._name, self._commit) / file.name).is_file():
            return file.size or 0
        if file.sha256 is None:
            return 0
        for path in (self._blob(file.sha256), self._partial(file.sha256)):
            with suppress(FileNotFoundError):  # another start may have ended the download meanwhile
                return path.stat().st_size
        return 0

    def fetch(self, file: RemoteFile, progress: FetchProgress | None = None) -> None:
        """Into the snapshot's folder, unless it is there.

        Raises:
            ModelNameError: other bytes came than the Hub says the file has.
            DownloadStoppedError: see `stop`.
            OSError: no room, or no right to write; and what huggingface_hub raises.
        """
        if (self._hub.snapshot(self._name, self._commit) / file.name).is_file():
            return
        url = hf_hub_url(
            self._name.repository, file.name, revision=self._commit, endpoint=self._hub.endpoint
        )
        told = get_hf_file_metadata(url, endpoint=self._hub.endpoint, retry_on_errors=True)
        etag = told.etag or ""
        if not _ETAG.fullmatch(etag):
            raise ModelNameError(
                f"{self._hub.endpoint} tells no usable ETag of {file.name} of {self._name}, so it "
                "is no mirror of the Hub: see HF_ENDPOINT"
            )
        size = told.size if told.size is not None else file.size
        lock = self._hub.cache / ".locks" / self._folder.name / f"{etag}.lock"
        for folder in (lock.parent, self._folder / "blobs"):
            folder.mkdir(parents=True, exist_ok=True)
        with self._alone(lock):
            if not self._blob(etag).is_file():
                self._fetch_blob(url, etag, size, file, progress)
        # Links it into the snapshot's folder, or copies it where there are no links.
        hf_hub_download(
            self._name.repository,
            file.name,
            revision=self._commit,
            cache_dir=self._hub.cache,
            endpoint=self._hub.endpoint,
        )

    @contextmanager
    def _alone(self, lock: Path) -> Iterator[None]:
        """While ``lock`` is held, for which this waits until `stop`."""
        with ExitStack() as held:
            while True:
                if self._stopped.is_set():
                    raise DownloadStoppedError
                with suppress(Timeout):
                    held.enter_context(WeakFileLock(lock, timeout=LOCK_SECONDS))
                    break
            yield

    def _blob(self, etag: str) -> Path:
        return self._folder / "blobs" / etag

    def _partial(self, etag: str) -> Path:
        return self._folder / "blobs" / f"{etag}.incomplete"

    def _fetch_blob(
        self,
        url: str,
        etag: str,
        size: int | None,
        file: RemoteFile,
        progress: FetchProgress | None,
    ) -> None:
        partial = self._partial(etag)
        self._fetch_bytes(url, partial, size, file.name, progress)
        wanted = etag if _HASH.fullmatch(etag) else file.sha256
        if wanted is not None:
            with partial.open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
            if found != wanted:
                partial.unlink()
                raise ModelNameError(
                    f"{file.name} of {self._name} came with the SHA-256 {found[:16]}..., and the "
                    f"Hub says {wanted[:16]}...: it has been thrown away, start again, and look at "
                    "what stands between here and the Hub if that does not help"
                )
        partial.replace(self._blob(etag))

    def _fetch_bytes(
        self,
        url: str,
        partial: Path,
        size: int | None,
        file_name: str,
        progress: FetchProgress | None,
    ) -> None:
        """Until all are there, going on as long as one of every few tries brings some."""
        failures = 0
        while True:
            begun = partial.stat().st_size if partial.is_file() else 0
            if size is None or begun > size:  # what is missing cannot be told
                partial.unlink(missing_ok=True)
                begun = 0
            if begun == size:
                partial.touch()
                return
            try:
                self._stream(url, partial, begun, progress)
                if size is None or partial.stat().st_size == size:
                    return
                raise httpx2.RemoteProtocolError("its length is not what the Hub says")
            except (httpx2.TransportError, HfHubHTTPError) as error:
                if isinstance(error, HfHubHTTPError) and error.response.status_code not in PASSING:
                    raise
                there = partial.stat().st_size if partial.is_file() else 0
                failures = 1 if size is not None and begun < there <= size else failures + 1
                if failures >= TRIES:
                    raise ModelNameError(
                        f"the download of {self._name} broke off ({reason_of(error)}) when "
                        f"{in_units(there)} of {file_name} were there: the same command goes on "
                        "with the next byte"
                    ) from error
                if self._stopped.wait(PAUSE_SECONDS * (failures - 1)):
                    raise DownloadStoppedError from error

    def _stream(self, url: str, partial: Path, begun: int, progress: FetchProgress | None) -> None:
        headers = build_hf_headers() | {"Accept-Encoding": "identity"}
        if begun:
            headers["Range"] = f"bytes={begun}-"
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with (
            partial.open("ab") as stream,
            get_session().stream("GET", url, headers=headers, timeout=timeout) as response,
        ):
            hf_raise_for_status(response)
            if begun and response.status_code != 206:  # a mirror without ranges: all of it again
                stream.truncate(0)
                if progress is not None:
                    progress.add(-begun)
            # As they come: what is still being collected would be lost where the connection is.
            for chunk in response.iter_bytes():
                if self._stopped.is_set():
                    raise DownloadStoppedError
                stream.write(chunk)
                if progress is not None:
                    progress.add(len(chunk))
