"""The stage and settings of speed and memory change no bit of what training leaves: `recipes/hash_grid.py`.

Oracle: the cells of a group among themselves, and DDP in two of the groups (the bucket size is a
matter of speed). Tolerance 0: weights, masters and optimizer state are hashed. A part of the grid runs here,
the whole among the slow tests. That a difference would be seen is shown on hashes that were made up.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "recipes" / "hash_grid.py"


@pytest.fixture
def hash_grid(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import hash_grid

    return hash_grid


def run(*arguments: str, timeout: float) -> list[str]:
    """Run the script as a user does and return the lines of its groups."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    lines = [line for line in done.stdout.splitlines() if " cells  " in line]
    assert lines and "HASHES" not in done.stdout
    return lines


@pytest.mark.parametrize(
    ("num_ranks", "precision"), [("2", "fp32"), pytest.param("3", "bf16", marks=pytest.mark.slow)]
)
def test_every_value_of_every_setting_leaves_the_same_bits(num_ranks: str, precision: str) -> None:
    lines = run("--quick", "--ranks", num_ranks, "--precision", precision, timeout=120)
    assert len(lines) == 3 and len({line.split("cells")[1] for line in lines}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("num_ranks", "steps"), [("2", "20"), ("3", "20"), ("4", "5")])
def test_every_combination_of_settings_leaves_the_same_bits(
    num_ranks: str, steps: str, precision: str
) -> None:
    lines = run("--ranks", num_ranks, "--steps", steps, "--precision", precision, timeout=1700)
    assert len(lines) == 3


def test_one_differing_cell_is_named_and_fails(hash_grid: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cells = list(hash_grid.cells_of(2, ["fp32"], is_quick=True))
    same = dict.fromkeys(cells, "aaaa bbbb")
    assert hash_grid.report(2, same)
    assert "HASHES" not in capsys.readouterr().out
    odd = next(cell for cell in cells if cell.values == hash_grid.QUICK[3] and cell.way == "reduced once")
    assert not hash_grid.report(2, same | {odd: "aaaa cccc"})
    said = capsys.readouterr().out
    assert said.count("HASHES") == 1 and f"    aaaa cccc  {odd}" in said and "stage 3, bucket 1," in said


def test_ranks_that_have_come_apart_fail_although_all_cells_agree(hash_grid: Any) -> None:
    cells = list(hash_grid.cells_of(3, ["bf16"], is_quick=True))
    by_rank = [[(weights, "state")] * len(cells) for weights in ("aaaa", "aaaa", "ffff")]
    hashes = hash_grid.whole_hashes(by_rank)
    assert "other weights" in hashes[0]
    assert not hash_grid.report(3, dict(zip(cells, hashes, strict=True)))


def test_a_hash_sees_every_bit_dtype_shape_and_name(hash_grid: Any) -> None:
    value = torch.tensor([[1.0, -0.0], [0.0, 2.0]])
    others = {
        "same": ("w", value.clone()),
        "sign of zero": ("w", value.abs()),
        "dtype": ("w", value.double()),
        "shape": ("w", value.reshape(4)),
        "name": ("v", value),
    }
    hashes = {what: hash_grid.hash_of([named]) for what, named in others.items()}
    assert hash_grid.hash_of([("w", value)]) == hashes["same"]
    assert len(set(hashes.values())) == len(hashes)


def test_the_grid_and_its_part_have_every_value_beside_every_other_at_stage_3(hash_grid: Any) -> None:
    choices = [values for _, values in hash_grid.AXES.values()]
    whole = list(hash_grid.whole_grid())
    for cells in (hash_grid.QUICK, whole):
        sharded = [values[1:] for values in cells if values[0] == 3]
        for one in range(len(choices)):
            for other in range(one):
                found = {(values[one], values[other]) for values in sharded}
                assert found == {(a, b) for a in choices[one] for b in choices[other]}
        assert {values[0] for values in cells} == {0, 1, 2, 3}
    for stage in range(3):
        below = [values[1:] for values in whole if values[0] == stage]
        for place in range(hash_grid.NUM_AXES_BELOW_STAGE_3):
            assert {values[place] for values in below} == set(choices[place])
    assert len(set(whole)) == 3 * 6 + 48
