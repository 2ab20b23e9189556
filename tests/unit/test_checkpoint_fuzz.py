"""Whatever a file or a folder has become, it loads or is refused by a CheckpointError: never another error.

Seeded flips of one bit and cuts, over a single file of both of torch's formats and over a folder. What
loads is what was saved; a file of torch's old format alone has no checksums. Tolerance: none.
"""

from __future__ import annotations

import io
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.state_support import assert_same
from tests.synthetic_checkpoint import Description, save, small_state
from zero_strategy.checkpoint.extra import decode_extra
from zero_strategy.checkpoint.format import CheckpointReader
from zero_strategy.checkpoint.inspection import find_damage
from zero_strategy.errors import CheckpointError
from zero_strategy.lightning import checkpoint_files

NUM_FLIPS, NUM_CUTS = 200, 40


class TorchCheckpointIO:
    """Stands for Lightning's own, whose local files are read without it."""


class OtherIO:
    """A user's, which reads files as it likes."""

    def load_checkpoint(self, path: Path, **options: object) -> object:
        return torch.load(path, map_location="cpu", weights_only=True)


def spoilt(data: bytes, seed: int) -> Iterator[bytes]:
    generator = random.Random(seed)
    for _ in range(NUM_FLIPS):
        position, bit = generator.randrange(len(data)), generator.randrange(8)
        yield data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :]
    for _ in range(NUM_CUTS):
        yield data[: generator.randrange(len(data))]


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("reader", [TorchCheckpointIO, OtherIO])
def test_a_spoilt_file_is_refused_or_loads(tmp_path: Path, is_zip: bool, reader: type) -> None:
    content = {
        "state_dict": {"a.weight": torch.arange(12.0).reshape(3, 4), "b": torch.ones(2).bfloat16()},
        "optimizer_states": [{"state": {0: {"step": 3}}, "param_groups": [{"lr": 0.1, "params": [0]}]}],
        "epoch": 3,
    }
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=is_zip)
    path, num_refused = tmp_path / "last.ckpt", 0
    for data in spoilt(buffer.getvalue(), seed=42):
        path.write_bytes(data)
        try:
            found = checkpoint_files.load_file(reader(), path, weights_only=None, share=(0, 1))
            assert isinstance(found, dict)
            if is_zip:  # which has checksums of its parts
                assert_same(found, content)
        except CheckpointError as error:
            num_refused += 1
            assert str(path) in error.what and error.why and error.fix
    assert num_refused > NUM_CUTS


@pytest.mark.parametrize("reader", [TorchCheckpointIO, OtherIO])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 100,
        b"root:x:0:0:root:/root:/bin/sh\n",
        b"PK\x03\x04",
        b"\x80\x02.",
        b"\xff\xfe" * 40,
        b"(lp0\n",
    ],
)
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, data: bytes, reader: type) -> None:
    path = tmp_path / "thing"
    path.write_bytes(data)
    for weights_only in (None, False):
        with pytest.raises(CheckpointError, match="thing") as caught:
            checkpoint_files.load_file(reader(), path, weights_only=weights_only, share=(0, 1))
        assert "damaged, or" in caught.value.why


def content_of(folder: Path) -> dict[str, Any] | None:
    """Return all that a checkpoint holds, as it is read; None if it is refused, or `verify` finds damage."""
    try:
        with CheckpointReader(folder, check_files=False) as reader:
            if find_damage(reader):
                return None
            manifest = reader.manifest
            return {
                "tensors": {name: reader.read_tensor(name) for name in sorted(manifest.tensors)},
                "extra": decode_extra(manifest.extra, reader.read_tensor),
                "manifest": manifest.model_dump(),
            }
    except CheckpointError:
        return None


def test_a_folder_with_any_byte_changed_is_refused(tmp_path: Path) -> None:
    state = small_state()
    description = Description(buffers=frozenset({"mask"}), extra={"n": [1, torch.ones(2)]})
    folder = tmp_path / "c"
    save(folder, state, 2, description)
    originals = {path: path.read_bytes() for path in folder.iterdir()}
    expected = content_of(folder)
    assert expected is not None
    for number, (path, original) in enumerate(originals.items()):
        num_changed = 0
        for data in spoilt(original, seed=number):
            path.write_bytes(data)
            found = content_of(folder)
            if data == original:
                assert found is not None and found["manifest"] == expected["manifest"]
            else:
                num_changed += 1
                assert found is None, f"{path.name}: {len(data)} bytes of {len(original)}"
        path.write_bytes(original)
        assert num_changed > NUM_CUTS
    assert_same(content_of(folder), expected)
    shutil.rmtree(folder)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "last.ckpt"
    os.mkfifo(pipe)
    for reader in (TorchCheckpointIO(), OtherIO()):
        with pytest.raises(CheckpointError, match="no ordinary file"):
            checkpoint_files.load_file(reader, pipe, weights_only=None, share=(0, 1))
    (tmp_path / "c").mkdir()
    os.mkfifo(tmp_path / "c" / "manifest.json")
    with pytest.raises(CheckpointError, match="no ordinary file"):
        CheckpointReader(tmp_path / "c")


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("reader", [TorchCheckpointIO, OtherIO])
def test_a_pickle_that_runs_code_is_refused_before_it_does(
    tmp_path: Path, is_zip: bool, reader: type
) -> None:
    path = tmp_path / "last.ckpt"
    torch.save({"x": Bomb(tmp_path / "ran")}, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(CheckpointError) as caught:
        checkpoint_files.load_file(reader(), path, weights_only=None, share=(0, 1))
    assert not (tmp_path / "ran").exists()
    assert not is_zip or "mkdir" in caught.value.what
