"""What `consolidate` writes for torch is what `torch.save` would have written: every name and every bit.

Oracles: the tensors that were saved, read back by `torch.load(weights_only=True)`, as a whole and mapped;
`zipfile`, which compares checksums; files of `torch.save` itself. Tolerance: none.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.synthetic_checkpoint import Description, same_bits, save, small_state
from tests.unit.test_consolidate import Wrapper, names_in, save_model, tiny_llama
from zero_strategy.checkpoint import torch_archive
from zero_strategy.checkpoint.consolidate import consolidate
from zero_strategy.checkpoint.elements import DTYPES
from zero_strategy.checkpoint.export import MARKER_NAME, ExportOptions
from zero_strategy.checkpoint.extra import MODULES_KEY
from zero_strategy.checkpoint.output_file import BUFFER_BYTES, OutputFile
from zero_strategy.errors import CheckpointError

TORCH = ExportOptions(format="torch")
BIN = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"


def load(path: Path, *, mmap: bool = True) -> dict[str, Any]:
    loaded = torch.load(path, weights_only=True, mmap=mmap)
    assert type(loaded) is dict
    return loaded


def varied_state() -> dict[str, Tensor]:
    """One tensor of every dtype there is, with odd bits, beside `small_state`."""
    every = {
        f"every.{name}": torch.arange(1, 6 * dtype.itemsize + 1, dtype=torch.uint8).view(dtype).reshape(2, 3)
        for name, dtype in DTYPES.items()
        if dtype != torch.bool
    }
    return small_state() | every


def shared(state: dict[str, Tensor]) -> set[frozenset[str]]:
    """Which names share memory."""
    groups: dict[int, set[str]] = {}
    for name, tensor in state.items():
        if tensor.numel():
            groups.setdefault(tensor.untyped_storage().data_ptr(), set()).add(name)
    return {frozenset(names) for names in groups.values() if len(names) > 1}


@pytest.mark.parametrize("max_shard_size_bytes", [5 * 10**9, 200])
def test_torch_load_gives_every_name_and_bit_and_ties_share_their_memory(
    tmp_path: Path, max_shard_size_bytes: int
) -> None:
    state = varied_state()
    description = Description(
        aliases={"block.weight": ("head.weight",), "every.int16": ("a", "b"), "counter": ("counter2",)},
        buffers=frozenset({"mask", "counter"}),
        frozen=frozenset({"block.bias"}),
    )
    save(tmp_path / "checkpoint", state, 3, description)
    options = ExportOptions(format="torch", max_shard_size_bytes=max_shard_size_bytes)
    report = consolidate(tmp_path / "checkpoint", tmp_path / "out", options)
    assert report.tied == {} and report.num_tensors == len(state)
    expected = dict(state)
    for name, aliases in description.aliases.items():
        expected |= dict.fromkeys(aliases, state[name])
    for mmap in (True, False):
        found = {k: v for path in (tmp_path / "out").glob("*.bin") for k, v in load(path, mmap=mmap).items()}
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert same_bits(tensor, expected[name]) and tensor.is_contiguous(), name
            assert tensor.data_ptr() % 64 == 0 or not mmap, name
        ties = {frozenset({name, *aliases}) for name, aliases in description.aliases.items()}
        assert shared(found) == ties
    if max_shard_size_bytes == 200:
        index = json.loads((tmp_path / "out" / INDEX).read_text())
        assert index["metadata"]["total_size"] == report.num_bytes
        assert index["weight_map"].keys() == expected.keys()
        for path in (tmp_path / "out").glob("*.bin"):
            assert load(path).keys() == {k for k, v in index["weight_map"].items() if v == path.name}
    else:
        assert names_in(tmp_path / "out") == {BIN, MARKER_NAME}


@pytest.mark.parametrize("is_large", [False, True])
def test_the_archive_is_one_that_torch_save_would_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    if is_large:  # what zip files need from 2 and 4 GiB on, at once
        monkeypatch.setattr(torch_archive, "_LARGE_BYTES", 0)
        monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 50)
    state = varied_state()
    save(tmp_path / "checkpoint", state, 2)
    consolidate(tmp_path / "checkpoint", tmp_path / "out", TORCH)
    torch.save(state, tmp_path / "torchs.bin")
    assert all(same_bits(value, state[name]) for name, value in load(tmp_path / "out" / BIN).items())
    with zipfile.ZipFile(tmp_path / "out" / BIN) as ours, zipfile.ZipFile(tmp_path / "torchs.bin") as torchs:
        assert ours.testzip() is None  # every checksum is right
        records = {info.filename.partition("/")[2]: info.file_size for info in ours.infolist()}
        wanted = {info.filename.partition("/")[2]: info.file_size for info in torchs.infolist()}
        data = {name: size for name, size in wanted.items() if name.startswith("data/")}
        assert {name: size for name, size in records.items() if name.startswith("data/")} == data
        assert {"data.pkl", "byteorder", "version"} <= records.keys() <= wanted.keys()
        for name in ("byteorder", "version"):
            assert ours.read(f"archive/{name}") == torchs.read(f"torchs/{name}")
    reader = torch._C.PyTorchFileReader(str(tmp_path / "out" / BIN))
    assert all(reader.get_record_offset(name) % 64 == 0 for name in data)


@pytest.mark.parametrize("max_shard_size_bytes", [5 * 10**9, 3000])
def test_transformers_loads_it_too(tmp_path: Path, max_shard_size_bytes: int) -> None:
    transformers = pytest.importorskip("transformers")
    model = tiny_llama(tied=True)
    save_model(tmp_path / "checkpoint", model)
    options = ExportOptions(format="torch", max_shard_size_bytes=max_shard_size_bytes)
    consolidate(tmp_path / "checkpoint", tmp_path / "out", options)
    assert (tmp_path / "out" / INDEX).exists() == (max_shard_size_bytes == 3000)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, tensor in loaded.state_dict().items():
        assert same_bits(tensor, model.state_dict()[name].to(torch.bfloat16)), name


def test_names_are_the_models_own_unless_a_prefix_is_asked_for(tmp_path: Path) -> None:
    wrapper = Wrapper(tiny_llama(tied=True))
    save_model(tmp_path / "checkpoint", wrapper, model_dtype="float32")
    consolidate(tmp_path / "checkpoint", tmp_path / "out", TORCH)
    # A config beside names that are not its model's would make transformers draw random weights.
    assert names_in(tmp_path / "out") == {BIN, MARKER_NAME}
    fresh = Wrapper(tiny_llama(tied=True)).requires_grad_(False)
    for param in fresh.parameters():
        param.zero_()
    fresh.load_state_dict(load(tmp_path / "out" / BIN), strict=True)
    assert all(torch.equal(value, wrapper.state_dict()[name]) for name, value in fresh.state_dict().items())
    options = ExportOptions(format="torch", strip_prefix="model.")
    report = consolidate(tmp_path / "checkpoint", tmp_path / "inner", options)
    assert report.left_out == ("value_head.weight", "value_head.bias")
    assert names_in(tmp_path / "inner") == {BIN, MARKER_NAME, "config.json", "generation_config.json"}
    assert load(tmp_path / "inner" / BIN).keys() == wrapper.model.state_dict().keys()


def test_what_modules_keep_besides_is_in_the_dict_and_named_where_it_cannot_be(tmp_path: Path) -> None:
    states = {
        "block._extra_state": {"steps": 3, "scale": float("inf"), "amax": torch.arange(5.0), "none": None},
        "_extra_state": torch.arange(6).reshape(2, 3),
    }
    extra = {"user": {"note": torch.zeros(3)}, "modules": states}
    manifest = save(tmp_path / "checkpoint", {"w": torch.ones(3)}, 2, Description(extra=extra))
    manifest.model_copy(update={"extra": {MODULES_KEY: manifest.extra}}).write(tmp_path / "checkpoint")
    consolidate(tmp_path / "checkpoint", tmp_path / "out", TORCH)
    found = load(tmp_path / "out" / BIN)
    assert found.keys() == {"w", *states}
    assert torch.equal(found["_extra_state"], states["_extra_state"])
    inner, wanted = found["block._extra_state"], states["block._extra_state"]
    assert torch.equal(inner.pop("amax"), wanted.pop("amax")) and inner == wanted
    report = consolidate(tmp_path / "checkpoint", tmp_path / "other")
    assert report.left_out == ("block._extra_state", "_extra_state")
    alone = ExportOptions(format="torch", trainable_only=True)
    consolidate(tmp_path / "checkpoint", tmp_path / "alone", alone)
    assert load(tmp_path / "alone" / BIN).keys() == {"w"}


def test_another_format_replaces_the_weight_files_of_the_first(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint", {"a": torch.ones(100), "b": torch.ones(100)}, 2)
    out = tmp_path / "out"
    few = {"max_shard_size_bytes": 400}
    for options, kept in (
        (ExportOptions(**few), 3),
        (ExportOptions(format="torch", **few), 3),
        (TORCH, 1),
        (ExportOptions(), 1),
    ):
        consolidate(tmp_path / "checkpoint", out, options)
        suffix = ".bin" if options.format == "torch" else ".safetensors"
        files = names_in(out) - {MARKER_NAME}
        assert len(files) == kept and all(suffix in name for name in files)


@pytest.mark.parametrize("options", [ExportOptions(), TORCH], ids=["safetensors", "torch"])
def test_a_disk_that_refuses_and_a_damaged_checkpoint_leave_nothing(
    tmp_path: Path, options: ExportOptions
) -> None:
    numel = 5 * 2**20  # more than the buffers of a file together
    save(tmp_path / "checkpoint", {"a": torch.zeros(numel), "b": torch.zeros(7)}, 2)
    limit, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * 2**20, hard))
    try:
        with pytest.raises(CheckpointError, match="could not be written") as caught:
            consolidate(tmp_path / "checkpoint", tmp_path / "out", options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    assert "File too large" in caught.value.what and "Check free space" in caught.value.fix
    assert names_in(tmp_path) == {"checkpoint"}
    path = next((tmp_path / "checkpoint").glob("rank-00000-*"))
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    with pytest.raises(CheckpointError, match=path.name):
        consolidate(tmp_path / "checkpoint", tmp_path / "out", options)
    assert names_in(tmp_path) == {"checkpoint"}


def test_a_file_written_behind_holds_what_was_written_however_it_was_cut(tmp_path: Path) -> None:
    content = os.urandom(3 * BUFFER_BYTES + 1)
    cuts = [0, 1, 7, BUFFER_BYTES, BUFFER_BYTES, 2 * BUFFER_BYTES + 9, len(content)]
    with OutputFile(tmp_path / "file") as file:
        for start, stop in itertools.pairwise(cuts):
            scratch = bytearray(content[start:stop])
            assert file.write(memoryview(scratch)) == stop - start and file.tell() == stop
            scratch[:] = bytes(len(scratch))  # the caller's own again
    assert (tmp_path / "file").read_bytes() == content
    with pytest.raises(RuntimeError, match="half-way"), OutputFile(tmp_path / "other") as file:
        file.write(content)
        raise RuntimeError("half-way")
    assert names_in(tmp_path) == {"file"}


@pytest.mark.parametrize("options", [ExportOptions(), TORCH], ids=["safetensors", "torch"])
def test_a_run_that_is_killed_can_be_run_again(tmp_path: Path, options: ExportOptions) -> None:
    state = {"a": torch.randn(2**20), "b": torch.randn(2**20)}
    save(tmp_path / "checkpoint", state, 2)
    child = os.fork()
    if child == 0:
        write, num_calls = OutputFile.write, 0

        def killed_in_between(file: OutputFile, data: bytes | memoryview) -> int:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 3:
                os.kill(os.getpid(), 9)
            return write(file, data)

        OutputFile.write = killed_in_between  # type: ignore[method-assign]
        consolidate(tmp_path / "checkpoint", tmp_path / "out", options)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 9
    assert len(names_in(tmp_path)) == 2 and not (tmp_path / "out").exists()
    consolidate(tmp_path / "checkpoint", tmp_path / "out", options)
    assert names_in(tmp_path) == {"checkpoint", "out"}
    if options.format == "torch":
        assert all(same_bits(value, state[name]) for name, value in load(tmp_path / "out" / BIN).items())
