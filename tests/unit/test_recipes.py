"""The pages on recipes list every script, and every script that is run explains itself.

Oracle: the files of the folder. No tolerance: a script is listed or not.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

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


def stay(_: Any, file: Path) -> None:
    """What a rank of a benchmark does until it is ended."""
    file.with_suffix(".new").write_text(str(os.getpid()))
    file.with_suffix(".new").rename(file)
    time.sleep(300)


@pytest.mark.slow
def test_the_ranks_of_a_benchmark_that_is_killed_end_too(tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(RECIPES)!r}); from benchmarks.ranks import launch; "
        f"from pathlib import Path; from tests.unit.test_recipes import stay; "
        f"launch(1, stay, Path({str(tmp_path / 'pid')!r}))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(RECIPES.parent), str(RECIPES)])}
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as script:
        deadline = time.monotonic() + 90
        while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        pid = int((tmp_path / "pid").read_text())
        script.kill()
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists()
