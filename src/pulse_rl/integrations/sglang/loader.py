"""The custom weight loader, by whose name SGLang's updater calls it."""

from __future__ import annotations

from typing import Any

LOADER = "pulse_rl.integrations.sglang.load"
"""The ``load_format`` of an update, and the value of ``--custom-weight-loader``."""


def load(model: Any, named_tensors: list[tuple[str, Any]]) -> None:
    """Moves the live parameters of ``model`` to the version that is staged. Called by SGLang, in every worker, for
    ``/update_weights_from_tensor`` with this function's name as ``load_format``; ``named_tensors`` is empty.

    Never raises: an error in a worker ends SGLang's server. The plugin lets the request answer with it instead.
    """
    from .worker import update

    update(model, named_tensors)
