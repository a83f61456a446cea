"""What vLLM calls to load the plugin: entry point ``lexshard`` of ``vllm.general_plugins``."""

from __future__ import annotations

import os

from lexshard.serve_app.vllm.tally import logger

# What was tried. Others may have moved what is replaced here.
KNOWN_VERSIONS = ("0.32", "0.33")


def register() -> None:
    """Puts the certified head into this process's vLLM if ``VLLM_PLUGINS`` names it; in a version
    that is not known, nothing is changed and one line says so. May be called again."""
    if "lexshard" not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return  # installed for something else: no one asked for other draws
    if (refusal := version_refusal()) is not None:
        logger.error("lexshard does not certify here: %s. vLLM serves as without it.", refusal)
        return
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    if "LogitsProcessor" in op_registry_oot:
        other = op_registry_oot["LogitsProcessor"]
        if not other.__module__.startswith("lexshard."):
            logger.error("lexshard does not certify here: %s is in its place.", other.__qualname__)
        return
    from lexshard.serve_app.vllm import runners
    from lexshard.serve_app.vllm.processor import CertifiedLogitsProcessor

    PluggableLayer.register_oot(CertifiedLogitsProcessor, name="LogitsProcessor")
    runners.install()


def version_refusal() -> str | None:
    """Why the installed vLLM is left alone; None if it is one that is known."""
    import vllm

    known = vllm.__version__.startswith(tuple(f"{each}." for each in KNOWN_VERSIONS))
    told = f"vLLM {vllm.__version__} is not a version it knows ({', '.join(KNOWN_VERSIONS)})"
    return None if known else told
