"""PEFT: adapters that came through a stream of their own, as the folders that engines load (docs/trainers.md)."""

from __future__ import annotations

import json
import os
from pathlib import Path

from .._util.files import write_atomically
from .._util.settings import checked_path
from ..errors import InputError
from ..events import Metadata
from ..state.checkpoint import save
from ..state.tensors import State

__all__ = ["write_adapter"]

ADAPTER_CONFIG = "adapter_config"
"""The key of a version's metadata that holds the adapter's config, as JSON."""


def write_adapter(state: State, folder: str | os.PathLike[str], metadata: Metadata) -> Path:
    """Writes an adapter to ``folder`` as PEFT saves it, and returns the folder's absolute path: what
    ``PeftModel.from_pretrained``, vLLM's ``/v1/load_lora_adapter`` and others load.

    ``state`` and ``metadata`` are those of a version that ``PulseCallback(adapter=True)`` has published:
    ``subscriber.state`` and ``update.metadata``. Each file is replaced whole, the weights first; engines want a new
    folder for each version. Imports neither torch nor PEFT. Raises InputError and StoreError.
    """
    config = metadata.get(ADAPTER_CONFIG)
    if not isinstance(config, str):
        raise InputError(
            f"the metadata have no {ADAPTER_CONFIG!r}: the version is no adapter",
            hint="Publish the stream with PulseCallback(..., adapter=True).",
        )
    path = checked_path(folder).absolute()
    save(path / "adapter_model.safetensors", state, {"format": "pt"})
    text = json.dumps(json.loads(config), indent=2, sort_keys=True) + "\n"
    write_atomically(path / "adapter_config.json", [text.encode()])
    return path
