"""The pages under docs/ name tests as proof; here the names are held against the tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(ROOT.joinpath("docs").glob("*.md"))
DEFINED = {
    name
    for file in ROOT.joinpath("tests").rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", file.read_text(), flags=re.MULTILINE)
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    named = set(re.findall(r"`(test_\w+)`", page.read_text()))
    assert not named - DEFINED, f"{page.name} names tests that do not exist: {sorted(named - DEFINED)}"


def test_there_are_pages_that_name_tests() -> None:
    assert any("`test_" in page.read_text() for page in PAGES)
