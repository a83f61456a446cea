"""From a name on the Hub to a folder on this machine.

The order is that of what can go wrong: names of files, ``config.json``, what would be refused
whatever the weights are, room on the disk, and only then weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError

from lexshard.actors.stored_tensors import INDEX_FILE
from lexshard.cluster.models.download import Downloads
from lexshard.cluster.models.files import (
    CONFIG,
    RemoteFile,
    check_listing,
    descriptions,
    has_all,
    weights,
)
from lexshard.cluster.models.hub import Description, Hub, explained, reason_of
from lexshard.cluster.models.names import HubName, ModelNameError
from lexshard.cluster.models.progress import Announce, FetchProgress, in_units
from lexshard.cluster.models.refusal import LoadingOptions, check_refusal

AT_ONCE = 4  # files


@dataclass(frozen=True, slots=True)
class Wish:
    """``loading`` None: it need not be served on this machine. Without ``weights`` all that comes
    before them is fetched and checked."""

    name: HubName
    loading: LoadingOptions | None
    weights: bool = True


def fetched_folder(wish: Wish, hub: Hub, announce: Announce) -> Path:
    """The folder in the Hub's cache, with all of the model in it.

    What the Hub has under that name now is fetched; where it cannot be asked, what was fetched
    last is taken, and ``announce`` is told.

    Raises:
        ModelNameError: with one sentence that says why it cannot be had.
    """
    found = hub.cached_for_good(wish.name)
    if found is not None:
        return found
    if hub.offline:
        found = hub.cached(wish.name)
        if found is None:
            raise ModelNameError(
                f"no model folder at {wish.name}, nor a whole model of that name in {hub.cache}, "
                "and HF_HUB_OFFLINE forbids to ask the Hub: start once without it, or give a folder"
            )
        return found
    with _explained(wish.name, hub):
        description = _described(wish, hub, announce)
        if isinstance(description, Path):
            return description
        return _fetched(wish, hub, description, announce)


def _described(wish: Wish, hub: Hub, announce: Announce) -> Description | Path:
    """What the Hub says, else the folder that was fetched last."""
    try:
        return hub.describe(wish.name)
    except RevisionNotFoundError:
        raise
    except (httpx2.HTTPError, HfHubHTTPError, ValueError) as error:
        found = hub.cached(wish.name)
        if found is None:
            raise
        announce(
            f"{hub.endpoint} does not tell what {wish.name} is now ({reason_of(error)}): taking "
            f"what was fetched last, {found.name[:12]}"
        )
        return found


@contextmanager
def _explained(name: HubName, hub: Hub) -> Iterator[None]:
    try:
        yield
    except ModelNameError:
        raise
    except (httpx2.HTTPError, OSError, ValueError) as error:
        raise explained(error, name, hub) from error


def _fetched(wish: Wish, hub: Hub, description: Description, announce: Announce) -> Path:
    name, listing = wish.name, description.listing
    check_listing(name.repository, listing)
    folder = hub.snapshot(name, description.commit)
    downloads = Downloads(hub, name, description.commit)
    first = [listing[each] for each in (CONFIG, INDEX_FILE) if each in listing]
    _fetch_all(downloads, first)
    needed = weights(name.repository, listing, folder)
    if not has_all(folder, [file.name for file in needed]):
        stored = sum(file.size or 0 for file in needed)
        if wish.loading is not None:
            check_refusal(name, folder, stored, description.parameters, wish.loading)
        _fetch_all(downloads, descriptions(listing))
        if not wish.weights:
            return folder
        _check_sizes(name, [file for file in needed if not (folder / file.name).is_file()])
        there = sum(map(downloads.there, needed))
        _check_room(name, hub, stored - there)
        announce(f"fetching {name} ({in_units(stored)}{_of_which(there)}) into {hub.cache}, once")
        progress = FetchProgress(str(name), stored, there, announce)
        try:
            _fetch_all(downloads, needed, progress)
        finally:
            progress.close()
    _fetch_all(downloads, descriptions(listing))
    hub.remember(name, description.commit)
    return folder


def _of_which(there: int) -> str:
    return f", {in_units(there)} of it there already" if there else ""


def _check_sizes(name: HubName, files: Iterable[RemoteFile]) -> None:
    for file in files:
        if file.size is not None and file.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
            revision = f" --revision {name.revision}" if name.revision else ""
            raise ModelNameError(
                f"{file.name} of {name} has {in_units(file.size)}, more than the Hub hands out "
                f"over plain HTTP: fetch it with `hf download {name.repository}{revision}`, then "
                "start again"
            )


def _check_room(name: HubName, hub: Hub, wanted: int) -> None:
    free = shutil.disk_usage(hub.storage(name)).free
    if wanted > free:
        raise ModelNameError(
            f"no room for {name} in {hub.cache}: {in_units(wanted)} are to be fetched, and "
            f"{in_units(free)} are free; make some, or set HF_HOME to a folder on a larger disk"
        )


def _fetch_all(
    downloads: Downloads, files: Iterable[RemoteFile], progress: FetchProgress | None = None
) -> None:
    """Some at once. The first failure, or a Ctrl-C, ends the others."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        tasks = [pool.submit(downloads.fetch, file, progress) for file in files]
        try:
            done, _ = wait(tasks, return_when=FIRST_EXCEPTION)
            for task in done:
                task.result()
        except BaseException:
            downloads.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
