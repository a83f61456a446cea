"""Where transformers' own code of a model runs while the model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lexshard.actors.body.errors import ModelCodeError, ModelRefusedError

_LONGEST = 300  # characters of what was raised


@contextmanager
def model_code(failure: str, remedy: str = "choose another model") -> Iterator[None]:
    """Families differ in what they need: whatever their code raises inside is why one is refused.

    ``failure`` says what could not be done, ``remedy`` what to do about it. For loading only: there
    the reason matters more than the place. A model that is served raises what it raises.

    Raises ModelCodeError in place of everything but refusals.
    """
    try:
        yield
    except ModelRefusedError:
        raise
    except Exception as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        told = told if len(told) <= _LONGEST else told[:_LONGEST] + "..."
        raise ModelCodeError(f"{failure} ({told}): {remedy}") from error


@contextmanager
def without_a_word() -> Iterator[None]:
    """What transformers would tell of a part of a model: progress, and a warning for every weight
    of a folder that the part has no use for."""
    from transformers.utils import logging

    before, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bar:
            logging.enable_progress_bar()
