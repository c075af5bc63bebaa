"""Which trainers have fast links among them, and who sums a share for them (docs/loco.md, section 4.5). Arithmetic
alone: all trainers compute the same from the same names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Sites:
    """``members``: the ranks of each site, ascending; sites in the order of their lowest rank. A single one of all
    trainers where sites make no difference."""

    members: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, names: Sequence[str]) -> Self:
        """By the name of each trainer's site, in rank order. They make a difference if there are several, and a trainer
        that is not alone in its own."""
        ranks: dict[str, list[int]] = {}
        for rank, name in enumerate(names):
            ranks.setdefault(name, []).append(rank)
        differ = 1 < len(ranks) < len(names)
        return cls(tuple(map(tuple, ranks.values())) if differ else (tuple(range(len(names))),))

    @property
    def several(self) -> bool:
        return len(self.members) > 1

    @property
    def trainers(self) -> int:
        return sum(map(len, self.members))

    def number_of(self, rank: int) -> int:
        """Which site trainer ``rank`` is in."""
        return next(number for number, ranks in enumerate(self.members) if rank in ranks)

    def beside(self, rank: int) -> tuple[int, ...]:
        """The trainers of the site of ``rank``, itself included."""
        return self.members[self.number_of(rank)]

    def forwarder(self, site: int, owner: int) -> int:
        """Who sums, for the members of a site, their entries for the share of ``owner``: the owner itself, if it is one
        of them."""
        ranks = self.members[site]
        return owner if owner in ranks else ranks[owner % len(ranks)]

    def forwarders(self, owner: int) -> list[int]:
        """Those of the other sites for the share of ``owner``, in the order of the sites."""
        sites = range(len(self.members))
        return [self.forwarder(site, owner) for site in sites if owner not in self.members[site]]

    def forwards(self, rank: int) -> list[int]:
        """The owners whose shares trainer ``rank`` sums for its site, its own included."""
        site = self.number_of(rank)
        return [owner for owner in range(self.trainers) if self.forwarder(site, owner) == rank]
