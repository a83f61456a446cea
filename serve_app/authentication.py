"""API keys: kept as hashes, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from lexshard.serve_app.openai.errors import unauthorized


@dataclass(frozen=True, slots=True)
class KeyOwner:
    """The owner of a key, named by a piece of its hash. ``lowest_priority`` is how far before the
    default of 0 its requests may ask to go."""

    name: str
    lowest_priority: int


class ApiKeys:
    """The keys that open the API, each followed by ``priority=N`` or nothing; none at all leaves it
    open."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._owners: list[tuple[bytes, KeyOwner]] = []
        for entry in keys:
            key, _, priority = entry.partition(" ")
            digest = _digest(key)
            lowest = int(priority.strip().removeprefix("priority=") or 0)
            self._owners.append((digest, KeyOwner("key-" + digest.hex()[:16], lowest)))

    def check(self, authorization: str | None) -> KeyOwner | None:
        """The key's owner, None where no keys are set.

        Every key is compared whatever the outcome, so that time tells nothing.

        Raises:
            ApiError: 401.
        """
        if not self._owners:
            return None
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        matches = [owner for known, owner in self._owners if hmac.compare_digest(given, known)]
        if scheme.lower() != "bearer" or not matches:
            raise unauthorized()
        return matches[0]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
