"""API keys: kept as hashes, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from serve_app.openai.errors import unauthorized


class ApiKeys:
    """The keys that open the API; none at all leaves it open."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._hashes = [_digest(key) for key in keys]

    def check(self, authorization: str | None) -> str | None:
        """The name of the key's owner (a piece of its hash), None where no keys are set.

        Every key is compared whatever the outcome, so that time tells nothing.

        Raises:
            ApiError: 401.
        """
        if not self._hashes:
            return None
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, known) for known in self._hashes]
        if scheme.lower() != "bearer" or not any(matches):
            raise unauthorized()
        return "key-" + given.hex()[:16]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
