"""The command ``pulse serve``."""

from __future__ import annotations

import argparse
import threading

from .output import Console

DEFAULT_PORT = 8734


def serve(args: argparse.Namespace, console: Console) -> int:
    from ..store.server import FolderServer

    with FolderServer(args.folder, bind=args.bind, port=args.port) as server:
        console.result({"url": server.url, "folder": args.folder}, [f"{args.folder} is served at {server.url}"])
        threading.Event().wait()
    return 0
