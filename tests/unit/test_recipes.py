"""The pages on recipes list every script, and every script that is run explains itself.

Oracle: the files of the folder. No tolerance: a script is listed or not.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"
SCRIPTS = sorted(RECIPES.rglob("*.py"))


@pytest.mark.parametrize("page", ["README.md", "benchmarks/README.md"])
def test_every_script_is_on_its_page(page: str) -> None:
    text = (RECIPES / page).read_text()
    folder = (RECIPES / page).parent
    own = [path.relative_to(folder).as_posix() for path in SCRIPTS if path.parent == folder]
    assert own and not [name for name in own if f"`{name}`" not in text]


def test_commands_name_scripts_that_exist() -> None:
    commands = [
        name
        for page in RECIPES.rglob("README.md")
        for name in re.findall(r"python (recipes/[\w/]+\.py)", page.read_text())
    ]
    assert len(set(commands)) > 3
    assert not [name for name in commands if not (RECIPES.parent / name).exists()]
