"""Axolotl: a plugin that publishes the policy of any of its trainers.

Axolotl imports this module where ``plugins`` of its config names it.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from ..errors import InputError
from .transformers import PulseCallback

__all__ = ["PulsePlugin"]


class PulsePluginArgs(BaseModel):
    """What the plugin adds to Axolotl's config: ``pulse``, the arguments of `PulseCallback`."""

    pulse: dict[str, Any] | None = None


class PulsePlugin(BasePlugin):
    """Gives Axolotl's trainers a `PulseCallback` with the arguments under ``pulse`` in the config:
    ``store``, ``stream``, and any other that YAML can say (``every``, ``dtype``, ``adapter``,
    ``keep`` …).

    Raises InputError where they are missing or unknown, before the model is loaded where that can
    be seen.
    """

    def get_input_args(self) -> str:
        """The path of the class that describes ``pulse``."""
        return f"{__name__}.{PulsePluginArgs.__name__}"

    def register(self, cfg: dict[str, Any]) -> None:
        """Check that the config has a store and a stream.

        Args:
            cfg: The config as it was written.

        Raises:
            InputError: It has not.
        """
        _arguments(cfg.get("pulse"))

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """Make the callback.

        Args:
            cfg: The whole config.
            model: Not needed: the Trainer hands it over.

        Raises:
            InputError: Arguments are missing or unknown.
        """
        arguments = _arguments(cfg.pulse)
        try:
            return [PulseCallback(**arguments)]
        except TypeError as error:
            raise InputError(
                f"pulse in Axolotl's config: {error}", hint="Use the arguments of PulseCallback."
            ) from None


def _arguments(given: Any) -> dict[str, Any]:
    found = dict(given or {})
    if not (found.get("store") and found.get("stream")):
        raise InputError(
            "Axolotl's config has no store and stream for pulse",
            hint="Add pulse: {store: s3://bucket/run, stream: policy}.",
        )
    return found
