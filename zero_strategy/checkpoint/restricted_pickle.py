"""Files of `torch.save` read without running anything that they name.

A pickle can call any function of any module by naming it. torch's own unpickler for weights
(`torch.load(weights_only=True)`) knows tensors and plain containers only, and that is nearly enough: what
other libraries keep of their own beside them is given to it as inert stand-ins, by name, so that neither
their code nor that of anybody else is imported. All other names are refused before anything is read. Used by
the importers; it knows no format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from zero_strategy.errors import CheckpointError, first_line

_ZIP_MAGIC = b"PK\x03\x04"
# In texts of torch's errors: of files before torch 1.6, and of a kind of dict that is not dict itself.
_REFUSED_BY_TORCH = re.compile(r"GLOBAL (\S+)|Can only SETITEMS? .* but got <class '(\S+)'>")
_MAX_NAME = 120  # characters shown of a name that a file asks for


class StandIn:
    """Takes the place of an object of another library: keeps what it was made of, and does nothing.

    Attributes:
        arguments: What its class was to be called with.
        attributes: What was to become its attributes.
    """

    arguments: tuple[object, ...]
    attributes: dict[str, Any]

    def __new__(cls, *arguments: object) -> StandIn:
        made = super().__new__(cls)
        made.arguments = arguments
        made.attributes = {}
        return made

    def __setstate__(self, state: object) -> None:
        self.attributes = dict(state) if isinstance(state, dict) else {"state": state}


def load_pickled(
    path: Path, stand_ins: Mapping[str, Callable[..., Any]], *, drop_unknown: bool = False
) -> Any:
    """Read a file of `torch.save`, with its tensors mapped from the file where it is of the usual kind.

    Only what is looked at is then read from the disk; a file from before torch 1.6 is read whole. The file
    is never written to, also where a tensor is.

    Args:
        path: The file.
        stand_ins: What takes the place of classes that are not torch's, by "module.name". They are called,
            and must do no harm whatever they are called with.
        drop_unknown: Put a `StandIn` in the place of everything else that it names, too.

    Raises:
        CheckpointError: It names anything else, is damaged, or is no such file.
    """
    names: list[Any] = [(stand_in, name) for name, stand_in in stand_ins.items()]
    try:
        with open(path, "rb") as file:
            is_zip = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
        with torch.serialization.safe_globals(names):
            unknown = torch.serialization.get_unsafe_globals_in_checkpoint(str(path)) if is_zip else []
        if unknown and not drop_unknown:
            raise _refused(path, unknown)
        names += [(_inert(name), name) for name in unknown]
        with torch.serialization.safe_globals(names):
            return torch.load(path, map_location="cpu", mmap=is_zip, weights_only=True)
    except CheckpointError:
        raise
    except OSError as error:
        raise _damaged(path, f"it could not be opened ({error.strerror or error})") from error
    except Exception as error:  # what a damaged file makes torch raise is any of a dozen types
        named = _REFUSED_BY_TORCH.search(str(error))
        if named is not None:
            raise _refused(path, [named[1] or named[2]]) from None
        raise _damaged(path, first_line(error)[:200]) from error


def _inert(name: str) -> type[StandIn]:
    """Return a class that does nothing, and is called as what it takes the place of."""
    module, _, own = name.rpartition(".")
    return type(own, (StandIn,), {"__module__": module})


def _refused(path: Path, names: list[str]) -> CheckpointError:
    shown = ", ".join(repr(name[:_MAX_NAME]) for name in sorted(names)[:5])
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return CheckpointError(
        what=f"{path} was refused: it asks for {shown}{more}.",
        why="Reading it the usual way would import and run what it names. Only tensors and plain containers "
        "are read here. Nothing was run.",
        fix="Leave such objects out, which are often in client_state: zero-strategy import --drop-unknown. "
        "If that is refused too and the file is yours: save it again, where it was saved, without them.",
    )


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        what=f"{path} is not a whole file of torch.save.",
        why=f"Reading it ended with: {why}.",
        fix="Copy it again from where it was saved, or use an earlier checkpoint. Nothing was changed.",
    )
