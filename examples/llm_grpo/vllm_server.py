"""A vLLM server with the language model, in place of the process that imports this. It starts from
the checkpoint that the training began with; the stream brings what was published since."""

from __future__ import annotations

import sys

from ..grpo.run import Alarm, RunFolder, run_role
from ..grpo.vllm_server import become_server
from .settings import Settings


def serve(settings: Settings, folder: RunFolder, alarm: Alarm, name: str, port: str) -> None:
    become_server(settings.folder, port, settings.prompts * settings.group, tokens=64)


if __name__ == "__main__":
    sys.exit(run_role(serve, Settings, "name", "port"))
