"""The Hub and its cache on this machine: what is asked of the one and found in the other.

Nothing here is imported before a model is given by its name.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident

import httpx2
from huggingface_hub import HfApi, ModelInfo, constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import REGEX_COMMIT_HASH, repo_folder_name

from lexshard.cluster.models.files import Listing, RemoteFile, is_whole
from lexshard.cluster.models.names import HubName, ModelNameError

MAIN = constants.DEFAULT_REVISION


@dataclass(frozen=True, slots=True)
class Hub:
    """Where models come from (``endpoint``) and where they are kept (``cache``), by the variables
    that other tools hear, too: HF_ENDPOINT, HF_HUB_CACHE or HF_HOME, HF_HUB_OFFLINE, HF_TOKEN."""

    endpoint: str
    cache: Path
    offline: bool

    @staticmethod
    def of_environment() -> Hub:
        return Hub(constants.ENDPOINT, Path(constants.HF_HUB_CACHE), constants.is_offline_mode())

    def describe(self, name: HubName) -> Description:
        """What the Hub says of a repository. Raises what huggingface_hub does."""
        info = HfApi(endpoint=self.endpoint).model_info(
            name.repository,
            revision=name.revision or MAIN,
            files_metadata=True,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
        return _description(info)

    def cached(self, name: HubName) -> Path | None:
        """The folder of a whole model in the cache, of the commit that was fetched last."""
        commit = name.revision or MAIN
        reference = self.storage(name) / "refs" / commit
        if not REGEX_COMMIT_HASH.fullmatch(commit):
            if not reference.is_file():
                return None
            commit = reference.read_text(encoding="utf-8").strip()
        folder = self.snapshot(name, commit)
        return folder if is_whole(folder) else None

    def cached_for_good(self, name: HubName) -> Path | None:
        """As `cached`, of a commit that was named itself: the Hub can tell nothing else of it."""
        if name.revision is None or not REGEX_COMMIT_HASH.fullmatch(name.revision):
            return None
        return self.cached(name)

    def remember(self, name: HubName, commit: str) -> None:
        """That the revision of ``name`` is that commit, of which all files are there."""
        revision = name.revision or MAIN
        if revision == commit:
            return
        reference = self.storage(name) / "refs" / revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        if not reference.is_file() or reference.read_text(encoding="utf-8") != commit:
            own = f"{os.getpid()}-{get_ident()}"  # others may be fetching the same
            written = reference.with_name(f"{reference.name}.unfinished-{own}")
            written.write_text(commit, encoding="utf-8")
            written.replace(reference)

    def storage(self, name: HubName) -> Path:
        """The repository's folder in the cache."""
        return self.cache / repo_folder_name(repo_id=name.repository, repo_type="model")

    def snapshot(self, name: HubName, commit: str) -> Path:
        """The folder of a model at a commit: links to files that are named by their hashes."""
        return self.storage(name) / "snapshots" / commit


@dataclass(frozen=True, slots=True)
class Description:
    """A repository at one ``commit``. ``parameters`` is how many numbers its safetensors hold, by
    type; empty where the Hub does not tell."""

    commit: str
    listing: Listing
    parameters: dict[str, int]


def _description(info: ModelInfo) -> Description:
    if info.sha is None or not REGEX_COMMIT_HASH.fullmatch(info.sha):
        raise ValueError("it names no commit")
    listing = {
        each.rfilename: RemoteFile(each.rfilename, each.size, each.lfs.sha256 if each.lfs else None)
        for each in info.siblings or ()
    }
    parameters = info.safetensors.parameters if info.safetensors else {}
    return Description(info.sha, listing, dict(parameters))


def reason_of(error: Exception) -> str:
    """What an error says, in a few words of one line."""
    if isinstance(error, HfHubHTTPError):
        return f"status {error.response.status_code}"
    return " ".join(str(error).split())[:200] or type(error).__name__


def explained(error: Exception, name: HubName, hub: Hub) -> ModelNameError:
    """What went wrong with the Hub or its cache as one sentence, with what to do."""
    page = f"{hub.endpoint}/{name.repository}"
    if isinstance(error, GatedRepoError):
        remedy = f"accept its licence at {page} and set HF_TOKEN to a token of that account"
        if get_token() is not None:
            remedy = f"accept its licence at {page} with the account whose token is in use"
        return ModelNameError(f"{name} is gated: {remedy}")
    if isinstance(error, RepositoryNotFoundError):
        return ModelNameError(
            f"no model folder at {name}, and no model of that name at {hub.endpoint}: check both, "
            "or set HF_TOKEN if it is a private one"
        )
    if isinstance(error, RevisionNotFoundError):
        return ModelNameError(
            f"{name.repository} has no revision {name.revision}: {page}/tree/main lists its "
            "branches, tags and commits"
        )
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        remedy = "check HF_TOKEN" if status in (401, 403) else "try again later, or give a folder"
        return ModelNameError(f"{hub.endpoint} answers {status} when asked for {name}: {remedy}")
    if isinstance(error, httpx2.HTTPError):
        return ModelNameError(
            f"no model folder at {name}, and {hub.endpoint} cannot be reached "
            f"({reason_of(error)}): check the network or HF_ENDPOINT, or give a folder"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelNameError(
            f"no room for {name} in {hub.cache}: make some, or set HF_HOME to a folder on a larger "
            "disk; what has been fetched stays, and the same command goes on from there"
        )
    if isinstance(error, OSError) and error.strerror:
        return ModelNameError(
            f"cannot keep {name} in {hub.cache} ({error.strerror}): set HF_HOME to a folder that "
            "can be written"
        )
    return ModelNameError(
        f"{hub.endpoint} does not answer as the Hub does when asked for {name} "
        f"({reason_of(error)}): check HF_ENDPOINT"
    )
