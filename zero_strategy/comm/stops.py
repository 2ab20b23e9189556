"""A request to stop that reached one rank, and the backward after which all ranks know of it.

A signal comes to each rank at its own moment, in the middle of anything. What it asks for travels in the
message at the end of a backward, so that all ranks stop after the same one, with equal weights and nothing
under way. Written by a front end's signal handler, carried by the reducer. Knows no signals, only numbers.
"""

from __future__ import annotations


class StopRequest:
    """What this rank was asked, and what all ranks have agreed on.

    Attributes:
        asked: The number that stands for the request, 1 to 255; 0 for none.
        agreed: The largest that any rank was asked when the last backward ended; 0 for none.
    """

    def __init__(self) -> None:
        self.asked = 0
        self.agreed = 0

    def agree(self, largest: int) -> None:
        """Note what the ranks have asked; once asked, it stays."""
        self.agreed = max(self.agreed, largest)

    def take(self) -> int:
        """Return what was agreed on, and forget it."""
        agreed, self.asked, self.agreed = self.agreed, 0, 0
        return agreed
