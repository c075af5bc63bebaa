"""The program `pulse` is interrupted while it starts: one line and exit status 130, never a
traceback."""

from __future__ import annotations

import pytest

from tests.support.states import run_python

PROGRAM = """
import os, signal, sys
from importlib.metadata import entry_points

module, sys.argv[1:] = sys.argv[1], ["digest", "no-such-file"]

class Interrupt:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == module:
            sys.meta_path.remove(Interrupt)
            os.kill(os.getpid(), signal.SIGINT)

(program,) = entry_points(group="console_scripts", name="pulse")
signal.signal(signal.SIGINT, HANDLER)
sys.meta_path.insert(0, Interrupt)
main = program.load()
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["pulse_rl", "pulse_rl._native", "numpy", "msgspec", "pulse_rl.cli"]
)
def test_an_interrupt_during_the_imports_is_one_line(module: str) -> None:
    code = PROGRAM.replace("HANDLER", "signal.default_int_handler")
    done = run_python(code, module)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "pulse: interrupted\n")


@pytest.mark.slow
def test_interrupts_that_the_shell_ignores_stay_ignored() -> None:
    done = run_python(PROGRAM.replace("HANDLER", "signal.SIG_IGN"), "numpy")
    assert done.returncode == 1
    assert "no checkpoint at no-such-file" in done.stderr
