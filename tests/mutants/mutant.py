"""One fault to be planted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pulse_rl

PACKAGE = Path(pulse_rl.__file__).parent


@dataclass(frozen=True, slots=True)
class Mutant:
    """``edits`` are pairs of old and new text in the module ``module`` (of the package). ``survives``: why none of the
    sequences can notice it, "" where they must."""

    name: str
    module: str
    edits: tuple[tuple[str, str], ...]
    survives: str = ""

    @property
    def path(self) -> Path:
        return PACKAGE / f"{self.module.replace('.', '/')}.py"

    def planted(self) -> str:
        """The module's source with the fault. Raises ValueError where a text is not there exactly once."""
        source = self.path.read_text()
        for old, new in self.edits:
            if source.count(old) != 1:
                raise ValueError(f"mutant {self.name!r}: {old!r} is {source.count(old)} times in {self.path.name}")
            source = source.replace(old, new)
        return source


def one(name: str, module: str, old: str, new: str, survives: str = "") -> Mutant:
    return Mutant(name, module, ((old, new),), survives)
