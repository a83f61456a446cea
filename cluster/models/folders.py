"""Where commands turn the names of models into folders, before anything else hears of them."""

from __future__ import annotations

from pathlib import Path

from lexshard.actors.configuration import NGRAM
from lexshard.cluster.config import ServeConfig
from lexshard.cluster.models.names import HubName, hub_name
from lexshard.cluster.models.progress import Announce
from lexshard.cluster.models.refusal import LoadingOptions


def model_folder(
    given: str,
    announce: Announce,
    *,
    loading: LoadingOptions | None = None,
) -> str:
    """The folder of a model: ``given``, if it is a path, else what `fetched_folder` fetches, which
    is refused where it could not be loaded as ``loading`` says (None: any model will do).

    Raises:
        ModelNameError: with one sentence that says why it cannot be had.
    """
    name = hub_name(given)
    return given if name is None else _folder(name, announce, loading, weights=True)


def with_model_folders(
    config: ServeConfig, announce: Announce, *, weights: bool = True, served: bool = True
) -> ServeConfig:
    """``config`` with folders in the place of names; clients know the model by its name then.

    Without ``weights`` the folders may lack them. ``served`` says that the models are to be served
    on this machine: what could not be is not fetched.

    Raises:
        ModelNameError: with one sentence that says why one cannot be had.
    """
    loading = None
    if served:
        spread = config.address is not None
        of_ranks = (config.tensor_parallel, spread)
        loading = LoadingOptions(config.dtype, config.body, config.device, *of_ranks)
    changed: dict[str, object] = {"revision": None}
    model = hub_name(config.model, config.revision)
    draft = None if config.draft in (None, NGRAM) else hub_name(config.draft)
    if model is not None:
        changed["model"] = _folder(model, announce, loading, weights=weights)
        changed["served_model_name"] = config.served_model_name or [model.repository]
    if draft is not None:
        drafting = LoadingOptions(config.dtype, device="cpu") if served else None
        changed["draft"] = _folder(draft, announce, drafting, weights=weights)
    return config.model_copy(update=changed)


def _folder(
    name: HubName, announce: Announce, loading: LoadingOptions | None, *, weights: bool
) -> str:
    # A quarter of a second, which folders need not wait for.
    from lexshard.cluster.models.fetch import Wish, fetched_folder
    from lexshard.cluster.models.hub import Hub

    folder: Path = fetched_folder(Wish(name, loading, weights), Hub.of_environment(), announce)
    return str(folder)
