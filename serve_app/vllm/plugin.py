"""What vLLM calls to load the plugin: entry point ``lexshard`` of ``vllm.general_plugins``."""

from __future__ import annotations

import os

# What was tried. Others may have moved what is replaced here.
KNOWN_VERSIONS = ("0.32", "0.33")
NAME = "lexshard"


def register() -> None:
    """Puts the certified head into this process's vLLM if ``VLLM_PLUGINS`` names it; in a version
    that is not known, nothing is changed and one line says so. May be called again."""
    if NAME not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return  # installed for something else: no one asked for other draws
    from lexshard.serve_app.vllm.tally import logger

    refusal = version_refusal()
    if refusal is not None:
        logger.error("lexshard does not certify here: %s. vLLM serves as without it.", refusal)
        return
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    if "LogitsProcessor" in op_registry_oot:
        other = op_registry_oot["LogitsProcessor"]
        if not other.__module__.startswith("lexshard."):
            logger.error("lexshard does not certify here: %s is in its place.", other.__qualname__)
        return
    from lexshard.serve_app.vllm import v1_runner, v2_runner
    from lexshard.serve_app.vllm.processor import CertifiedLogitsProcessor

    PluggableLayer.register_oot(CertifiedLogitsProcessor, name="LogitsProcessor")
    v1_runner.install()
    v2_runner.install()


def version_refusal() -> str | None:
    """Why the installed vLLM is left alone; None if it is one that is known."""
    import vllm

    version = vllm.__version__
    if not version.startswith(tuple(f"{each}." for each in KNOWN_VERSIONS)):
        return f"vLLM {version} is not a version it knows ({', '.join(KNOWN_VERSIONS)})"
    return None
