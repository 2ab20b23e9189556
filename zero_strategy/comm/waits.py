"""What this rank has begun with the others, and what it waits for; and whether ranks can still meet.

`Waits` keeps the count of collectives begun, by process group, and the latest names; a note is an append, so
it costs nothing beside a collective. `find_divergence` compares the notes of several ranks. Called by the
collectives, read by the watch's thread. Knows neither tensors nor process groups.

[Note: When ranks have parted]
Two things prove it, and slowness proves neither. The n-th collective of a group has another name on two
ranks: it is one operation, so it would mix up what they mean. Or every rank waits, and each for something
that some other rank has not begun: nobody can move. A rank that computes, compiles, writes a file or stands
in a debugger waits for nobody, so the others wait for it as long as the process group's timeout says.

What others than the engine call on the default group (main_thread.py) has torch's numbers, and gloo counts
messages between two ranks too: after those, ranks number one and the same collective differently. So names
of that group prove something only where every rank waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

Channel = Literal["gather", "reduce", "control", "default"]
_MOST_RANKS = 8  # in a message
_KEPT = 256  # names per channel that are kept to compare: a few passes of a usual model


class Ticket(NamedTuple):
    """One collective: the `number`-th of its channel on this rank, and its name for messages."""

    channel: str
    number: int
    what: str


class Waiting(NamedTuple):
    """A wait that is going on; `serial` is different for each."""

    ticket: Ticket
    since: float  # seconds, monotonic
    serial: int


class Notes(NamedTuple):
    """What a rank that waits long tells the others."""

    rank: int
    serial: int
    beat: int  # grows while the wait goes on: a note that stands still is out of date
    ticket: Ticket
    begun: dict[str, int]  # collectives begun, by channel
    recent: dict[str, list[str]]  # names of the latest, by channel
    line: str = ""  # of the user's code, where the rank stands

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return self._asdict()

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Notes:
        """Undo `to_json`."""
        return cls(**{**fields, "ticket": Ticket(*fields["ticket"])})


class Waits:
    """The notes of this rank.

    Attributes:
        current: What the main thread waits for in this moment, or None.
    """

    def __init__(self) -> None:
        self.current: Waiting | None = None
        self._begun: dict[str, int] = {}
        self._recent: dict[str, deque[str]] = {}
        self._serial = 0

    def begin(self, channel: Channel, what: str) -> Ticket:
        """Note that a collective begins."""
        number = self._begun.get(channel, 0)
        self._begun[channel] = number + 1
        names = self._recent.get(channel)
        if names is None:
            names = self._recent[channel] = deque(maxlen=_KEPT)
        names.append(what)
        return Ticket(channel, number, what)

    @contextmanager
    def waiting(self, ticket: Ticket) -> Iterator[None]:
        """Note that this rank waits, for as long as the block runs."""
        self._serial += 1
        self.current = Waiting(ticket, time.monotonic(), self._serial)
        try:
            yield
        finally:
            self.current = None

    def notes(self, rank: int, waiting: Waiting, beat: int) -> Notes:
        """Return what to tell the others. Called by another thread, while this rank waits."""
        recent = {channel: list(names) for channel, names in dict(self._recent).items()}
        return Notes(rank, waiting.serial, beat, waiting.ticket, dict(self._begun), recent)


def find_divergence(notes: Sequence[Notes], world_size: int) -> str | None:
    """Tell whether ranks can never meet, and where they parted. See [Note: When ranks have parted].

    Args:
        notes: Of the ranks that wait.
        world_size: How many ranks there are.

    Returns:
        What happened, with ranks and names; None if nothing is proven.
    """
    do_all_wait = len(notes) >= world_size
    for channel in ("gather", "reduce", "control", *(["default"] if do_all_wait else [])):
        parted = _first_difference(channel, notes)
        if parted is not None:
            return parted + _lines(notes)
    if not do_all_wait:
        return None
    missing = [[other.rank for other in notes if not _has_begun(other, note.ticket)] for note in notes]
    if not all(missing):
        return None
    lines = [
        f"rank {note.rank} waits in {_lower(note.ticket.what)}, which rank {others[0]} has not begun"
        for note, others in zip(notes, missing, strict=True)
    ]
    return "Every rank waits for another: " + "; ".join(lines[:_MOST_RANKS]) + "." + _lines(notes)


def _lines(notes: Sequence[Notes]) -> str:
    """Say where in the user's code the ranks stand."""
    lines = [f"rank {note.rank} at {note.line}" for note in notes if note.line]
    return f" In your code: {'; '.join(lines[:_MOST_RANKS])}." if lines else ""


def _first_difference(channel: str, notes: Sequence[Notes]) -> str | None:
    by_rank = {note.rank: _numbered(note, channel) for note in notes}
    numbers = {number for names in by_rank.values() for number in names}
    for number in sorted(numbers):
        ranks: dict[str, list[str]] = {}
        for rank, names in by_rank.items():
            if number in names:
                ranks.setdefault(names[number], []).append(str(rank))
        if len(ranks) > 1:
            places = [
                f"{_lower(what)} on rank{'s' if len(where) > 1 else ''} {', '.join(where)}"
                for what, where in ranks.items()
            ]
            return f"Ranks have parted: {'; '.join(places)}; each as number {number + 1} of its kind."
    return None


def _numbered(note: Notes, channel: str) -> dict[int, str]:
    names = note.recent.get(channel, [])
    first = note.begun.get(channel, 0) - len(names)
    return {first + place: name for place, name in enumerate(names)}


def _has_begun(note: Notes, ticket: Ticket) -> bool:
    return note.begun.get(ticket.channel, 0) > ticket.number


def _lower(what: str) -> str:
    return what[0].lower() + what[1:]
