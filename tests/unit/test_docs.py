"""The pages under docs/ name tests as proof, and files; here the names are held against what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = ROOT / "docs" / "words.md"
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


def test_every_file_that_owns_a_word_exists_and_no_word_stands_twice() -> None:
    """The last column of every table of docs/words.md."""
    rows = [line.strip("| ").split(" | ") for line in WORDS.read_text().splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0] != "word"]
    assert len(rows) > 30 and all(len(row) == 3 for row in rows)
    for word, _, files in rows:
        named = re.findall(r"`([\w/]+\.py)`", files)
        assert named, f"{word!r} has no owner"
        for name in named:
            assert ROOT.joinpath("zero_strategy", name).is_file(), f"{word!r}: there is no {name}"
    words = [word for row in rows for word in re.split("[,;] ", row[0])]
    assert len(words) == len(set(words))
