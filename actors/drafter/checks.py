"""Early refusals of settings of speculation that cannot work together, and what to do instead."""

from __future__ import annotations

import math

from lexshard.actors.configuration import NGRAM, SIGMOID_LIMITS, EngineConfiguration
from lexshard.actors.messages import BY_DISTRIBUTION


def check_drafting(configuration: EngineConfiguration) -> None:
    """Raises ValueError. Of what `EngineConfiguration` describes, nothing is loaded for it."""
    verify = configuration.verify
    if verify in BY_DISTRIBUTION and configuration.draft_length == "measured":
        raise ValueError(
            f"--verify {verify} gives tokens that depend on the lengths of drafts, and measured "
            "ones depend on the clock: take --draft-length stepping or fixed"
        )
    if configuration.draft == NGRAM and configuration.draft_head != "auto":
        raise ValueError("n-grams are drafted without a model: leave --draft-head out")
    if configuration.draft is None and configuration.draft_head != "auto":
        raise ValueError("--draft-head is of a draft model: give --draft FOLDER, or leave it out")
    alpha, beta = configuration.sigmoid_alpha, configuration.sigmoid_beta
    if verify != "sigmoid":
        if (alpha, beta) != SIGMOID_LIMITS:
            raise ValueError(
                "--sigmoid-alpha and --sigmoid-beta shape what --verify sigmoid alone uses: leave "
                "them out, or add --verify sigmoid"
            )
        return
    if configuration.draft == NGRAM:
        raise ValueError(
            "--verify sigmoid compares what guesses were drawn from: give it a draft model"
        )
    if not -math.inf < alpha < 0 < beta < math.inf:
        raise ValueError(f"--sigmoid-alpha {alpha} must be below 0 and --sigmoid-beta {beta} above")
