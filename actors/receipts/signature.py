"""Signatures of receipts: Ed25519, over all that a receipt says."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lexshard.actors.receipts.document import Receipt, ReceiptError, canonical

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

ALGORITHM = "ed25519"


class Signer:
    """Signs with a server's private key."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key = base64.b64encode(key.public_key().public_bytes_raw()).decode()

    @classmethod
    def read(cls, path: str | Path) -> Signer:
        """That of a PEM file without a password.

        Raises OSError where it cannot be read and ValueError where it is none.
        """
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            key = load_pem_private_key(Path(path).expanduser().read_bytes(), password=None)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is no private key without a password: {error}") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ValueError(f"{path} is no Ed25519 key: openssl genpkey -algorithm ed25519")
        return cls(key)

    def signed(self, receipt: Receipt) -> Receipt:
        """The receipt with its signature."""
        value = base64.b64encode(self._key.sign(canonical(receipt.unsigned()))).decode()
        told = {"algorithm": ALGORITHM, "public_key": self.public_key, "value": value}
        return replace(receipt, signature=told)


def signed_by(receipt: Receipt) -> str | None:
    """The public key whose signature a receipt has, in base64; None where it has none.

    Raises ReceiptError for a signature that is none of this receipt.
    """
    if receipt.signature is None:
        return None
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    told = receipt.signature
    try:
        if told["algorithm"] != ALGORITHM:
            raise ReceiptError(f"its signature is of {told['algorithm']!r}, not {ALGORITHM}")
        key = Ed25519PublicKey.from_public_bytes(base64.b64decode(told["public_key"]))
        key.verify(base64.b64decode(told["value"]), canonical(receipt.unsigned()))
    except (InvalidSignature, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ReceiptError):
            raise
        raise ReceiptError("its signature is not that of what it says") from error
    return told["public_key"]
