"""What shows how a command fares that goes on until it is stopped: its events, /metrics, /healthz
and /readyz."""

from __future__ import annotations

import argparse
import math
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from .._util.retry import RETRY_SECONDS
from .._util.serial import Closing
from ..errors import EmptyStream, InputError, PulseError
from ..events import CallFailed, Event, Listener
from ..metrics import INSTALL, Heartbeat, JsonLines, PrometheusMetrics, tee_listeners
from .common import Console, options, path, port

# A pass may wait for a store for RETRY_SECONDS; a failed one is followed by a wait of a minute.
_SLOW_SECONDS = 120.0 + RETRY_SECONDS + 60.0
_CLIENT_SECONDS = 10.0

MONITORED = options()
_text = "serve /metrics for Prometheus, /healthz and /readyz at this port; 0: a free one"
MONITORED.add_argument("--metrics-port", type=port, metavar="N", help=_text)
_text = "this machine's address to serve them at (default: 127.0.0.1; 0.0.0.0: all of them)"
MONITORED.add_argument("--metrics-bind", default="127.0.0.1", metavar="ADDRESS", help=_text)
_text = "append the command's events to this file, as JSON lines"
MONITORED.add_argument("--events", type=path, metavar="FILE", help=_text)


class Monitor(Closing):
    """The listener of a command, for ``console`` and for what ``args`` ask for: a file of events, a
    port of metrics.

    ``role`` is the metrics' label. ``call`` names a pass of the command over its ``streams`` in
    `CallFailed`. Raises InputError.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        console: Console,
        role: str,
        call: str,
        streams: Collection[str] = (),
    ) -> None:
        self._role, self._call, self._streams = role, call, streams
        # A server has no passes.
        self._most = 3 * args.poll + _SLOW_SECONDS if hasattr(args, "poll") else math.inf
        self._alive = time.monotonic()
        self._reported = False
        self._metrics: PrometheusMetrics | None = None
        self._heartbeat: Heartbeat | None = None
        self._others: list[Listener] = []
        self._opened = ExitStack()
        #: Whether a version is there for those who wait for this process.
        self.ready = False
        try:
            if args.metrics_port is not None:
                console.note(f"metrics at {self._serve(args.metrics_bind, args.metrics_port)}")
            if args.events is not None:
                self._others.append(self._opened.enter_context(JsonLines(args.events)))
        except BaseException:
            self._opened.close()
            raise
        self._tee = tee_listeners(console, *self._others)

    def __call__(self, event: Event) -> None:
        self._alive = time.monotonic()
        self._reported |= isinstance(event, CallFailed)
        self._tee(event)

    def beat(self, heartbeat: Heartbeat, *, leave: bool) -> None:
        """``heartbeat`` gets the events, too, and (``leave``) ends with the command."""
        self._heartbeat = heartbeat
        self._others.append(heartbeat)
        self._tee = tee_listeners(self._tee, heartbeat)
        if leave:
            self._opened.enter_context(heartbeat)

    def record(self, event: Event) -> None:
        """Pass on an event of which the console has printed its own line."""
        for listener in self._others:
            listener(event)

    def succeeded(self, stream: str, version: int | None) -> None:
        """A pass over ``stream`` ended well; ``version`` is held."""
        self.ready |= version is not None
        if self._heartbeat and version is not None:
            self._heartbeat.beat(stream, version)
        if self._metrics:
            self._metrics.succeeded(stream, self._role, version)

    def ended(self, error: PulseError | None) -> None:
        """A pass ended, with an error or without. A stream without versions is no failure: its
        trainer has not begun."""
        self._alive = time.monotonic()
        reported, self._reported = self._reported, False
        if error is not None and not reported and not isinstance(error, EmptyStream):
            for stream in self._streams:
                self.record(CallFailed(stream, self._call, error.kind, str(error)))

    def close(self) -> None:
        """Ends the server and closes the file."""
        self._opened.close()

    def _serve(self, bind: str, number: int) -> str:
        """The address of the metrics."""
        try:
            from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
        except ImportError:
            raise InputError(
                "--metrics-port needs the package prometheus-client", hint=INSTALL
            ) from None
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)  # an alert asks when the process began
        self._metrics = PrometheusMetrics(registry)
        self._others.append(self._metrics)
        metrics = make_wsgi_app(registry)

        def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            place = environ.get("PATH_INFO")
            if place == "/metrics":
                answered: Iterable[bytes] = metrics(environ, start)
                return answered
            found = {"/healthz": self._health, "/readyz": self._readiness}.get(str(place))
            good, text = found() if found else (None, "see /metrics, /healthz and /readyz")
            status = {True: "200 OK", False: "503 Service Unavailable", None: "404 Not Found"}[good]
            start(status, [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{text}\n".encode()]

        try:
            kind = _ServerV6 if ":" in bind else _Server
            server = make_server(bind, number, answer, server_class=kind, handler_class=_Handler)
        except (OSError, OverflowError) as error:
            raise InputError(
                f"cannot serve metrics at {bind}, port {number}: {error}",
                hint="Choose another port.",
            ) from None
        threading.Thread(target=server.serve_forever, name="pulse-metrics", daemon=True).start()
        self._opened.callback(server.server_close)
        self._opened.callback(server.shutdown)
        host = f"[{bind}]" if ":" in bind else bind
        return f"http://{host}:{server.server_port}/metrics"

    def _health(self) -> tuple[bool, str]:
        seconds = time.monotonic() - self._alive
        return seconds <= self._most, f"the last sign of life was {seconds:.0f} s ago"

    def _readiness(self) -> tuple[bool, str]:
        return self.ready, "a version is there" if self.ready else "no version is there yet"


class _Server(ThreadingMixIn, WSGIServer):
    """A slow client holds nobody else up."""

    daemon_threads = True

    def server_bind(self) -> None:
        """Without the look-up of this machine's name, which may take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "pulse", self.server_address[1]
        self.setup_environ()


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_SECONDS

    def log_message(self, *_: object) -> None:
        """Prints nothing: probes come each second."""
