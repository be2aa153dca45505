"""vllm-pp-plugin: pipeline parallelism for vLLM that does not wait for its sends.

vLLM finds :func:`register` by the entry-point group ``vllm.general_plugins`` and calls it in every
process it starts. This module imports neither vLLM nor torch: it is loaded by every ``vllm`` command.
"""

from __future__ import annotations

__all__ = ["__version__", "register"]

__version__ = "0.1.0"


def register() -> None:
    """Set up the plugin in this process; called by vLLM, possibly several times.

    Never raises: vLLM does not catch what a plugin raises, so an error here would end every ``vllm``
    command, ``vllm --help`` too. What went wrong is kept for ``vllm-pp doctor`` and logged as one warning.
    A feature that was asked for by name and cannot be had stops the engine later, when it starts.
    """
    try:
        from vllm_pp_plugin import plugin

        plugin.arm()
    except Exception as exc:  # noqa: BLE001 - the one place that must not raise; reported, not swallowed
        import logging

        logging.getLogger("vllm.pp_plugin").warning(
            "vllm-pp-plugin %s is off in this process: %s: %s (see `vllm-pp doctor`)",
            __version__,
            type(exc).__name__,
            exc,
        )
