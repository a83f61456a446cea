"""Tokens guessed by a draft model: every step of a batch in one call."""

from __future__ import annotations

from lexshard.kernels.draft import cpu
from lexshard.kernels.draft.checks import check_head
from lexshard.kernels.draft.types import Drafted, DraftHead, PendingTokens, Router
from lexshard.kernels.llama import LlamaStack

__all__ = ["DraftHead", "Drafted", "PendingTokens", "Router", "check_head", "draft"]


def draft(stack: LlamaStack, head: DraftHead, pending: PendingTokens) -> Drafted:
    """Put pending tokens into the draft model's cache and guess what follows them.

    Draft step ``t`` of a sequence puts its last pending token in (``t = 0``) or its guess before,
    and draws from the logits of the head's rows exactly as the target draws
    (`kernels.draw`): the largest ``f64(l) * f64(inverse_temperature) + f64(g)`` with the noise
    ``g`` of `kernels.noise` for (key, position of the token drawn, token id), among the tokens that
    the sequence's top-k, top-p and min-p leave of those rows (`kernels.draw`); at temperature 0 the
    largest logit; the lowest id of equals. So a guess stands where the draft model's logits put
    the same token first. Where no row that is looked at is a token, the sequence's guesses end.

    A routed head (DynaSpec, arXiv:2510.13847, section 4) multiplies in step ``t`` the clusters
    ``always`` and, of the others, the ``budgets[t]`` with the highest scores, lower clusters first
    among equals. ``head`` is as `check_head` wants it.

    On the CPU a sequence's guesses are those that it gets alone, bit for bit. Keys and values of
    the tokens put in are written to the cache: all pending ones and all guesses but the last.
    Raises ValueError where ``pending`` is not as said.
    """
    return cpu.draft(stack, head, pending)
