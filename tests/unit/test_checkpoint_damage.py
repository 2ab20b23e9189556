"""Damaged, foreign, incomplete and hostile checkpoint folders are refused by name, and left as they are.

Oracle: a good checkpoint, damaged in one way a case; the error must name the file or field, and the bytes
of the whole folder must be the same before and after. Tolerance: none.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.synthetic_checkpoint import edit_manifest, save, small_state
from zero_strategy.checkpoint.format import CheckpointReader
from zero_strategy.checkpoint.manifest import Manifest
from zero_strategy.checkpoint.own_files import MANIFEST_NAME
from zero_strategy.errors import CheckpointError


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda folder: edit_manifest(folder, change)


def _rank_file(folder: Path, rank: int = 1) -> Path:
    return next(folder.glob(f"rank-{rank:05d}-*"))


def _piece(document: dict[str, Any]) -> dict[str, Any]:
    return document["tensors"]["model/block.weight"]["pieces"][0]  # type: ignore[no-any-return]


def _truncate(folder: Path) -> None:
    os.truncate(_rank_file(folder), _rank_file(folder).stat().st_size - 1)


def _grow(folder: Path) -> None:
    _rank_file(folder).write_bytes(_rank_file(folder).read_bytes() + b"x")


def _replace_by_folder(folder: Path) -> None:
    path = _rank_file(folder)
    path.unlink()
    path.mkdir()


def _replace_by_other_save(folder: Path) -> None:
    save(folder / "other", small_state(), world_size=3)
    _rank_file(folder).write_bytes(_rank_file(folder / "other").read_bytes())


def _link_out(folder: Path) -> None:
    path = _rank_file(folder)
    outside = folder.parent / "outside.safetensors"
    path.rename(outside)
    path.symlink_to(outside)


def _overwrite(offset: int, data: bytes) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        with open(_rank_file(folder), "r+b") as file:
            file.seek(offset)
            file.write(data)

    return apply


def _edit_header(old: bytes, new: bytes) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        assert len(old) == len(new)
        content = _rank_file(folder).read_bytes()
        assert old in content
        _rank_file(folder).write_bytes(content.replace(old, new, 1))

    return apply


def _write_manifest(text: str) -> Callable[[Path], None]:
    return lambda folder: _discard((folder / MANIFEST_NAME).write_text(text))


def _change_text(old: bytes, new: bytes) -> Callable[[Path], None]:
    """Change the manifest without a new checksum over it, as a fault of the disk does."""

    def apply(folder: Path) -> None:
        content = (folder / MANIFEST_NAME).read_bytes()
        assert old in content
        (folder / MANIFEST_NAME).write_bytes(content.replace(old, new))

    return apply


def _remove_last_line(folder: Path) -> None:
    document = json.loads((folder / MANIFEST_NAME).read_text())
    del document["checksum"]
    (folder / MANIFEST_NAME).write_text(json.dumps(document))


def _discard(_: object) -> None:
    return None


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    # name: what is done to a good checkpoint, and what the error has to say
    "missing file": (lambda f: _rank_file(f).unlink(), "rank-00001.*missing"),
    "truncated file": (_truncate, "rank-00001.*bytes and was written with"),
    "grown file": (_grow, "rank-00001.*bytes and was written with"),
    "file of another save": (_replace_by_other_save, "rank-00001.*is from save"),
    "file linked from outside": (_link_out, "rank-00001.*link to"),
    "folder in place of a file": (_replace_by_folder, "rank-00001.*missing"),
    "header length of 2**63": (_overwrite(0, struct.pack("<Q", 2**63)), "rank-00001.*header of 92233720"),
    "header length of 0": (_overwrite(0, struct.pack("<Q", 0)), "rank-00001.*header of 0"),
    "header that is no JSON": (_overwrite(8, b"}"), "rank-00001.*not JSON"),
    "header with a negative offset": (_edit_header(b'"data_offsets":[0,', b'"data_offsets":[-,'), "not JSON"),
    "header with another dtype": (_edit_header(b'"F32"', b'"I32"'), "rank-00001.*table of contents"),
    "header of another rank": (_edit_header(b'"rank":"1"', b'"rank":"2"'), "rank-00001.*table of contents"),
    "header with an unknown dtype": (_edit_header(b'"F32"', b'"X32"'), "rank-00001.*malformed"),
    "no manifest": (lambda f: (f / MANIFEST_NAME).unlink(), "incomplete.*rank-00000"),
    "manifest that is no JSON": (_write_manifest("{"), "not JSON"),
    "manifest of a thousand brackets": (_write_manifest("[" * 100_000), "not JSON|another program"),
    "manifest of bytes": (lambda f: _discard((f / MANIFEST_NAME).write_bytes(b"\xff\xfe\xfd")), "not JSON"),
    "manifest that is a list": (_write_manifest("[]"), "another program"),
    "foreign format": (_edit(lambda d: d.update(format="dcp")), "another program"),
    "newer version": (_edit(lambda d: d.update(version=2)), "schema version 2.*[Uu]pgrade"),
    "version that is no number": (_edit(lambda d: d.update(version="1")), "version"),
    "world size of 0": (_edit(lambda d: d.update(world_size=0)), "world_size.*greater"),
    "stage true": (_edit(lambda d: d.update(stage=True)), "stage.*integer"),
    "negative start": (_edit(lambda d: _piece(d).update(start=-1)), "pieces/0/start.*'-1'"),
    "count beyond 2**63": (
        _edit(lambda d: _piece(d).update(numel=2**63)),
        "pieces/0/numel.*9223372036854775808",
    ),
    "count that is a float": (_edit(lambda d: _piece(d).update(numel=1.5)), "pieces/0/numel.*'1.5'"),
    "count that is a string": (_edit(lambda d: _piece(d).update(numel="5")), "pieces/0/numel"),
    "sum beyond 2**63": (_edit(lambda d: _piece(d).update(start=2**63 - 1)), "'model/block.weight'"),
    "piece beyond the tensor": (_edit(lambda d: _piece(d).update(numel=106)), "'model/block.weight'.*105"),
    "piece beyond its key": (
        _edit(lambda d: _piece(d).update(file_start=1)),
        "rank-0000.*'model/block.weight'",
    ),
    "key that is not in the file": (_edit(lambda d: _piece(d).update(key="w")), "no tensor 'w'"),
    "malformed checksum": (_edit(lambda d: _piece(d).update(checksum="md5:0")), "checksum"),
    "gap": (
        _edit(lambda d: d["tensors"]["model/block.weight"]["pieces"].pop(0)),
        "no file holds elements 0 to .* 'model/block.weight'",
    ),
    "file name that leaves the folder": (
        _edit(lambda d: _piece(d).update(file="../x")),
        "pieces/0/file.*'../x'",
    ),
    "absolute file name": (
        _edit(lambda d: _piece(d).update(file="/etc/passwd")),
        "pieces/0/file.*'/etc/passwd'",
    ),
    "hidden file name": (_edit(lambda d: d["files"].update({"..": {"num_bytes": 1}})), r"files/\.\."),
    "file that is not listed": (_edit(lambda d: _piece(d).update(file="x")), "'x', which is not listed"),
    "unknown dtype": (
        _edit(lambda d: d["tensors"]["model/step"].update(dtype="float7")),
        "tensors/model/step/dtype.*'float7'",
    ),
    "shape of too many elements": (
        _edit(lambda d: d["tensors"]["model/step"].update(shape=[2**40, 2**40])),
        "'model/step'.*too many",
    ),
    "parameter without data": (
        _edit(lambda d: d["tensors"].pop("model/step")),
        "'step' has shape.*no tensor",
    ),
    "parameter of another shape": (
        _edit(lambda d: d["params"]["block.weight"].update(shape=[15, 7])),
        r"'block.weight' has shape \[15, 7\].*\[7, 15\]",
    ),
    "optimizer over a foreign parameter": (
        _edit(lambda d: d["optimizers"][0]["param_groups"][0].update(params=["w"])),
        "optimizer 0",
    ),
    "tensor of an unlisted optimizer": (
        _edit(lambda d: d["tensors"].update({"optim/1/step/exp_avg": d["tensors"]["model/step"]})),
        "'optim/1/step/exp_avg' is the state of",
    ),
    "tensor of an unknown kind": (
        _edit(lambda d: d["tensors"].update({"grad/step": d["tensors"]["model/step"]})),
        "'grad/step' is not a name",
    ),
    "missing field": (_edit(lambda d: d.pop("params")), "params"),
    "edited by hand": (_change_text(b'"lr": 0.0001', b'"lr": 0.0009'), "manifest.json.*last line is not"),
    "shape and count edited": (_change_text(b"15", b"11"), "manifest.json.*last line is not"),
    "other checksum": (_change_text(b'\n  "checksum": "x', b'\n  "checksum": "y'), "last line"),
    "no checksum": (_remove_last_line, "last line is not"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_by_name_and_nothing_on_disk_changes(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "checkpoint"
    save(folder, small_state(), world_size=3)
    damage, expected = DAMAGE[name]
    damage(folder)
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        Manifest.read(folder)
    error = caught.value
    text = f"{error.what} {error.why} {error.fix}"
    assert re.search(expected, text, re.DOTALL), text
    assert str(folder) in text
    assert error.why and error.fix
    assert snapshot(tmp_path) == before


def test_a_flipped_bit_is_found_when_its_piece_is_read_whole(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.randn(1000)}, world_size=3)
    path = _rank_file(tmp_path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    entry = Manifest.read(tmp_path).tensors["model/w"]  # sizes and ids still fit
    piece = next(piece for piece in entry.pieces if piece.file == path.name)
    with CheckpointReader(tmp_path) as reader:
        for read_all in (lambda: reader.read("model/w"), lambda: list(reader.chunks("model/w", 64))):
            with pytest.raises(CheckpointError) as caught:
                read_all()
            assert path.name in caught.value.what
            assert f"{piece.start} to {piece.stop} of 'model/w'" in caught.value.what
        assert reader.read("model/w", 0, piece.start).numel() == piece.start  # the other files are fine
        with pytest.raises(CheckpointError):
            reader.verify_piece(entry, piece)


def test_a_reader_that_trusts_the_manifest_still_checks_each_file_it_opens(tmp_path: Path) -> None:
    save(tmp_path, small_state(), world_size=3)
    _truncate(tmp_path)
    with CheckpointReader(tmp_path, check_files=False) as reader, pytest.raises(CheckpointError) as caught:
        for name in reader.manifest.tensors:
            reader.read(name)
    assert "rank-00001" in caught.value.what


def test_a_reader_that_trusts_the_manifest_does_not_read_elements_of_another_kind(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.randn(16)}, world_size=1)
    for change in ({"dtype": "int32"}, {"dtype": "float64", "shape": [8]}):
        _edit(lambda d, change=change: d["tensors"]["model/w"].update(change))(tmp_path)
        _edit(lambda d, change=change: d["params"]["w"].update(change))(tmp_path)
        _edit(
            lambda d: d["tensors"]["model/w"]["pieces"][0].update(numel=d["tensors"]["model/w"]["shape"][0])
        )(tmp_path)
        with (
            CheckpointReader(tmp_path, check_files=False) as reader,
            pytest.raises(CheckpointError) as caught,
        ):
            reader.read("model/w")
        assert "elements of torch.float32" in caught.value.why


def test_a_wrong_folder_is_told_apart_from_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        Manifest.read(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        Manifest.read(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="incomplete"):
        Manifest.read(tmp_path / "empty")
    save(tmp_path / "runs" / "step-10", {"w": torch.zeros(3)}, world_size=1)
    with CheckpointReader(tmp_path / "runs" / "step-10") as reader, pytest.raises(CheckpointError) as caught:
        reader.read("model/v")
    assert "'model/v'" in caught.value.what
