"""Where the program ``pulse`` starts: a package of its own, because to import any part of
`pulse_rl` takes a while.

An interrupt in the middle of these imports is answered here, in one line, instead of with a
traceback from wherever it struck.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

INTERRUPTED = 130


def main() -> int:
    """Runs the command line of this process; returns its exit status."""
    # Not where the caller has it ignored, as a shell does for jobs in the background.
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, _quit)
    from pulse_rl.cli import main as run

    try:
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return run()
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        if interruptible:
            signal.signal(signal.SIGINT, _quit)


def _quit(*_: object) -> NoReturn:
    """Ends the process at once: before there is anything to clean up, and after all of it is."""
    os.write(2, b"pulse: interrupted\n")
    os._exit(INTERRUPTED)
