"""Why a model is not served. Every message ends with what to do about it."""

from __future__ import annotations


class ModelRefusedError(ValueError):
    """A model that cannot be served, or not correctly."""


class ModelPathError(ModelRefusedError):
    """There is no model in that folder."""


class WeightsError(ModelRefusedError):
    """The weights are missing, incomplete or in a format that can run code."""


class UnsupportedModelError(ModelRefusedError):
    """The architecture needs something that a paged body does not compute."""


class ModelCodeError(UnsupportedModelError):
    """transformers' code of the model fails: as it is, or on what it is given here."""


class BuildToolsError(ModelRefusedError):
    """The machine cannot compile what launches kernels on its GPU: whatever the model."""


class InsufficientMemoryError(ModelRefusedError):
    """The weights do not fit the memory given."""


class SelfTestError(ModelRefusedError):
    """The loaded model does not reproduce its own plain forward pass."""
