"""The command line: what it prints, what it returns, and that a mistake is explained without a traceback.

Oracles: the checkpoint that the test wrote, and the library functions the commands call. Tolerance: none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.synthetic_checkpoint import Description, edit_manifest, save, small_state
from zero_strategy.checkpoint.manifest import Manifest
from zero_strategy.checkpoint.safetensors_io import SafetensorsFile
from zero_strategy.cli import main, parse_size_bytes
from zero_strategy.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    description = Description(
        dtypes={"block.weight": "bfloat16"},
        frozen=frozenset({"block.bias"}),
        aliases={"block.weight": ("head.weight",)},
        buffers=frozenset({"mask"}),
    )
    state = small_state() | {"block.weight": torch.randn(7, 15)}
    save(tmp_path / "checkpoint", state, 3, description)
    return tmp_path / "checkpoint"


def test_inspect_shows_parameters_optimizers_and_files(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(checkpoint)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines if line}
    assert "3 ranks at stage 3" in rows["saved"]
    # 105 + 15 + 1 + 0 + 11, of which the bias is frozen
    assert "5 with 132 elements, 117 of them trainable" in rows["parameters"]
    assert rows["block.weight"].split() == [
        "block.weight", "7x15", "bfloat16", "tied:", "head.weight;", "stored", "as", "float32",
    ]  # fmt: skip
    assert rows["block.bias"].endswith("frozen")
    assert rows["mask"].endswith("buffer")
    assert "optimizer 0: AdamW" in lines
    assert any("4 parameters; lr=0.0001" in line for line in lines)
    assert sum(line.startswith("rank-0000") for line in lines) == 3


def test_inspect_shows_what_else_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = {"$odd": 1, "epoch": 3, "sampler": {"seed": torch.zeros(2)}}
    for tag, content in (("step-1", extra), ("step-2", None), ("step-3", None)):
        save(tmp_path / tag, small_state(), 2, Description(extra=content))
    (tmp_path / "latest").write_text("step-2\n")
    left_out = {"frozen_left_out": ["base.weight", "base.bias", "base.scale"]}
    edit_manifest(tmp_path / "step-1", lambda document: document.update(left_out))
    assert main(["inspect", str(tmp_path / "step-1")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"folder       {tmp_path / 'step-1'}", "beside it    step-2 (latest), step-3"]
    assert "extra state  $odd, epoch, sampler" in lines
    assert "left out     3 frozen parameters (base.weight, base.bias and 1 more)" in lines
    assert main(["inspect", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == ["             the latest there", "beside it    step-1, step-3"]
    assert not any(line.startswith(("extra", "left out")) for line in lines)
    assert main(["inspect", str(tmp_path / "step-1"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tags"] == ["step-1", "step-2", "step-3"] and document["latest"] == "step-2"
    assert document["extra_keys"] == ["$odd", "epoch", "sampler"] and len(document["frozen_left_out"]) == 3


def test_inspect_lists_a_screenful_unless_all_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, {f"layer{i}.weight": torch.zeros(2) for i in range(60)}, 2)
    assert main(["inspect", str(tmp_path)]) == 0
    assert "... and 20 more parameters (--all shows them)" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path), "--all"]) == 0
    assert "layer59.weight" in capsys.readouterr().out


def test_inspect_json_is_one_json_object(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(checkpoint), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["world_size"] == 3
    # 105 * 4 + 15 * 2 + 4 + 0 + 13 + 11 * 8
    assert document["bytes_by_kind"]["model"] == 555
    assert document["optimizers"][0]["groups"] == [{"lr": 1e-4, "params": 4}]


def test_verify_names_the_elements_of_every_tensor_that_is_damaged(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    num_bytes = sum(path.stat().st_size for path in checkpoint.glob("rank-*"))
    assert main(["verify", str(checkpoint)]) == 0
    assert capsys.readouterr().out == f"{checkpoint}: all {num_bytes:,} bytes are as they were written\n"
    damaged = []
    for name, entry in Manifest.read(checkpoint).tensors.items():
        for piece in entry.pieces[-1:]:
            with open(checkpoint / piece.file, "r+b") as file:
                content = file.read()
                offset = SafetensorsFile(checkpoint / piece.file).tensors[piece.key].offset_bytes
                file.seek(offset)
                file.write(bytes([content[offset] ^ 0x80]))
            damaged.append((piece.file, name, piece.start, piece.stop))
    assert len(damaged) == 5  # the empty one has no byte to damage
    assert main(["inspect", str(checkpoint)]) == 0  # the headers are as they were
    capsys.readouterr()
    assert main(["verify", str(checkpoint)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = {line for line in captured.err.splitlines() if line.startswith("damaged: ")}
    assert len(lines) == len(damaged)
    for file, name, start, stop in damaged:
        assert any(
            line.startswith(f"damaged: {file}, elements {start} to {stop} of {name!r}: ") for line in lines
        )
    assert main(["verify", str(checkpoint), "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["num_bytes"] == num_bytes
    assert sorted(
        (part["file"], part["tensor"], part["start"], part["stop"]) for part in found["damage"]
    ) == sorted(damaged)


def test_verify_goes_on_after_a_file_that_is_lost(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, _ = sorted(checkpoint.glob("rank-*"))
    os.truncate(first, first.stat().st_size - 1)
    content = bytearray(second.read_bytes())
    content[-1] ^= 1
    second.write_bytes(content)
    assert main(["verify", str(checkpoint)]) == 2
    errors = capsys.readouterr().err
    assert f"damaged: {first.name}: " in errors and "was written with" in errors
    assert f"damaged: {second.name}, elements " in errors


def test_verify_says_in_one_line_what_lies_beyond_the_end_of_a_file_cut_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "c", {f"layer{number}": torch.ones(64) for number in range(50)}, 1)
    (path,) = (tmp_path / "c").glob("rank-*")
    stored = sorted(SafetensorsFile(path).tensors.values(), key=lambda tensor: tensor.offset_bytes)
    num_bytes = path.stat().st_size
    for num_left in (len(stored) - 1, 20, 0):
        os.truncate(path, stored[num_left].offset_bytes + (100 if num_left else 0))
        assert main(["verify", str(tmp_path / "c")]) == 2
        (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("damaged"))
        lost = [tensor.key for tensor in stored[num_left:]]
        names = " to ".join(map(repr, dict.fromkeys((lost[0], lost[-1]))))
        assert f"was written with {num_bytes}" in line, line
        assert line.endswith(f"Of its {len(stored)} tensors {len(lost)} end beyond that: {names}."), line
    for damage in (lambda: os.truncate(path, 10), path.unlink):
        damage()
        assert main(["verify", str(tmp_path / "c")]) == 2
        (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("damaged"))
        assert f"None of its {len(stored)} tensors can be read: 'model/" in line, line


def test_commands_take_the_outer_folder_of_several_checkpoints(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "other", {"w": torch.zeros(2)}, 1)
    for command in (["inspect"], ["verify"], ["consolidate", str(tmp_path / "out")]):
        assert main([command[0], str(tmp_path), *command[1:]]) == 2
        assert "holds 2 checkpoints: checkpoint, other" in capsys.readouterr().err
    (tmp_path / "latest").write_text("other\n")
    assert main(["verify", str(tmp_path)]) == 0
    assert f"{tmp_path / 'other'}: all" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path)]) == 0
    assert "1 with 2 elements" in capsys.readouterr().out
    assert main(["consolidate", str(tmp_path), str(tmp_path / "out")]) == 0
    assert list(load_file(tmp_path / "out" / "model.safetensors")) == ["w"]


def test_consolidate_writes_the_folder_and_reports_it(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["consolidate", str(checkpoint), str(out), "--dtype", "fp32", "--max-shard-size", "450B"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "wrote 6 tensors" in printed
    assert "head.weight = block.weight" in printed
    assert "no config.json" in printed
    files = sorted(out.glob("model-*.safetensors"))
    assert len(files) == 2 and all(path.name in printed for path in files)
    assert load_file(files[0])["block.weight"].dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["inspect", "nowhere"], ["nowhere does not exist", "why: ", "fix: "]),
        (["consolidate", "nowhere", "out"], ["nowhere does not exist", "why: ", "fix: "]),
        (["consolidate", "CKPT", "out", "--dtype", "int8"], ["'int8' is not a dtype", "fix: Use bf16"]),
        (["consolidate", "CKPT", "out", "--max-shard-size", "5 apples"], ["'5 apples' is not a size"]),
        (["consolidate", "CKPT", "out", "--strip-prefix", "x."], ["'x.'", "block.weight"]),
        (["consolidate", "CKPT", "CKPT"], ["holds a checkpoint"]),
    ],
)
def test_a_mistake_is_explained_on_stderr_with_exit_code_2(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: list[str]
) -> None:
    arguments = [str(checkpoint) if argument == "CKPT" else argument for argument in arguments]
    before = {path: path.read_bytes() for path in checkpoint.iterdir()}
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert all(text in captured.err for text in expected), captured.err
    assert "Traceback" not in captured.err
    assert {path: path.read_bytes() for path in checkpoint.iterdir()} == before
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("5GB", 5 * 10**9), ("512MiB", 2**29), ("1.5 kb", 1500), ("7", 7), ("2tib", 2**41)],
)
def test_sizes_are_read_with_their_units(text: str, num_bytes: int) -> None:
    assert parse_size_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "0", "-1GB", "1e9", "5GX", "0.1B"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size_bytes(text)
    assert repr(text) in caught.value.what


def test_help_names_every_command_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("consolidate", "inspect", "verify"):
        with pytest.raises(SystemExit) as caught:
            main([command, "--help"])
        assert caught.value.code == 0
        assert f"zero-strategy {command} runs/step-1000" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    listed = capsys.readouterr().out
    assert "consolidate" in listed and "inspect" in listed
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2


def test_the_module_runs_as_a_command_and_stands_a_closed_pipe(checkpoint: Path) -> None:
    command = f"{sys.executable} -m zero_strategy inspect --all {checkpoint} | head -n 1"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    result = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment, check=True)
    assert result.stdout.startswith("folder ")
    assert result.stderr == ""
