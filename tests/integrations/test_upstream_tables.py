"""The tables of names of Accelerate's, PEFT's, transformers' and TRL's that are rebound or taken for granted.

Oracle: what is installed. Lines are compared where the version is the one that the table was written for.
"""

from __future__ import annotations

import importlib.metadata
import inspect

import pytest

from zero_strategy.accelerate import upstream as accelerate_table
from zero_strategy.front_ends.upstream import Name, signature_of
from zero_strategy.peft import upstream as peft_table
from zero_strategy.transformers import upstream as transformers_table
from zero_strategy.trl import upstream as trl_table

NAMES = {
    "accelerate": (
        "1.15.0",
        [*accelerate_table.REBOUND, *accelerate_table.OVERRIDDEN, *accelerate_table.USED],
    ),
    "transformers": ("5.24.0", [*transformers_table.REBOUND, *transformers_table.USED]),
    "peft": ("0.21.2", [*peft_table.REPLACED, *peft_table.USED]),
    "trl": ("1.16.0", list(trl_table.REBOUND)),
}
ROWS = [(package, version, name) for package, (version, names) in NAMES.items() for name in names]


@pytest.mark.parametrize(("package", "version", "name"), ROWS, ids=lambda value: getattr(value, "path", None))
def test_names_are_what_the_tables_say(package: str, version: str, name: Name) -> None:
    pytest.importorskip(package)
    thing = name.found()
    assert signature_of(thing) == name.signature
    if importlib.metadata.version(package) == version:
        inside = inspect.unwrap(thing)
        lines, first = inspect.getsourcelines(inside)
        offset = next(i for i, line in enumerate(lines) if line.lstrip().startswith("def "))
        assert first + offset == name.line
        assert str(inspect.getsourcefile(inside)).endswith(f"{package}/{name.file}")
