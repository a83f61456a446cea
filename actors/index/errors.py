"""Why an index cannot be used. Every message ends with what to do about it."""

from __future__ import annotations


class IndexFileError(ValueError):
    """The file is missing, damaged, of another format or lacks what is asked of it."""


class IndexMismatchError(IndexFileError):
    """The file was built from other weights."""
