"""Where the origin's folder meets the regions: shown to readers as `pulse serve` shows it, and an inbox for batches."""

from __future__ import annotations

import argparse
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from pulse_rl import LocalStore
from pulse_rl.errors import InputError
from pulse_rl.store.server import FolderServer

from ..grpo.processes import Alarm
from .settings import INBOX_PORT, PORT, RunFolder, Settings

_MOST_BYTES = 1 << 20


class Inbox(ThreadingHTTPServer):
    """Stores what workers put, under the name that they give."""

    def __init__(self, address: str, port: int, store: LocalStore) -> None:
        self.store = store
        super().__init__((address, port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Inbox
    timeout = 10

    def do_PUT(self) -> None:
        length = int(self.headers.get("Content-Length", _MOST_BYTES + 1))
        if length > _MOST_BYTES:
            self.send_error(413)
            return
        data = self.rfile.read(length)
        if len(data) < length:
            return
        try:
            self.server.store.put(self.path.removeprefix("/"), data)
        except InputError:
            self.send_error(400)
            return
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--bind", required=True)
    parser.add_argument("--parent", type=int)
    args = parser.parse_args()
    folder = RunFolder(args.run)
    alarm = Alarm(Settings.load(folder.settings).patience, args.parent)
    folder.origin.mkdir(exist_ok=True)
    inbox = Inbox(args.bind, INBOX_PORT, LocalStore(folder.origin))
    threading.Thread(target=inbox.serve_forever, daemon=True).start()
    with FolderServer(folder.origin, bind=args.bind, port=PORT):
        while True:
            alarm.check_parent()
            time.sleep(0.5)


if __name__ == "__main__":
    main()
