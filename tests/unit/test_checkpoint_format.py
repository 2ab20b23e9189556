"""The checkpoint format: what is written is read back bit for bit, and nothing else is accepted.

Oracles: the tensors that were saved; for plans, a dictionary that maps every single element to where it
lies; for files, the official safetensors reader; for the bytes read, the kernel's counter in /proc/self/io.
Tolerance: none, bytes are bytes.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tests.synthetic_checkpoint import (
    Description,
    cut,
    same_bits,
    save,
    small_state,
    write_rank_file,
    write_rank_files,
)
from zero_strategy.checkpoint.elements import DTYPES, checksum
from zero_strategy.checkpoint.extra import decode_extra, encode_extra
from zero_strategy.checkpoint.format import CheckpointReader, plan_reads
from zero_strategy.checkpoint.manifest import Manifest
from zero_strategy.checkpoint.own_files import MANIFEST_NAME
from zero_strategy.checkpoint.records import (
    Piece,
    TensorEntry,
    file_metadata,
    new_checkpoint_id,
    rank_file_name,
)
from zero_strategy.errors import CheckpointError

NO_CHECKSUM = "xxh3:0000000000000000"


# -- plans --


def test_elements_saved_by_8_ranks_are_read_bit_for_bit_by_3_and_by_1(tmp_path: Path) -> None:
    state = small_state()
    save(tmp_path, state, world_size=8)
    with CheckpointReader(tmp_path) as reader:
        for world_size in (3, 1, 13):
            for fqn, tensor in state.items():
                runs = cut(tensor.numel(), world_size, seed=world_size)
                parts = [reader.read(f"model/{fqn}", start, stop) for start, stop in runs]
                assert same_bits(torch.cat(parts), tensor.reshape(-1)), (world_size, fqn)
        for fqn, tensor in state.items():
            assert same_bits(reader.read_tensor(f"model/{fqn}"), tensor), fqn


def test_plan_reads_agrees_with_an_element_by_element_map() -> None:
    rng = random.Random(1)
    num_gaps = 0
    for _ in range(300):
        numel = rng.randint(1, 40)
        pieces = []
        for index in range(rng.randint(1, 8)):  # overlapping and gappy as they fall
            start = rng.randint(0, numel)
            stop = rng.randint(start, numel)
            file_start = rng.randint(0, 9)
            pieces.append(
                Piece(
                    file=f"f{index}",
                    key="k",
                    file_start=file_start,
                    start=start,
                    numel=stop - start,
                    checksum=NO_CHECKSUM,
                )
            )
        entry = TensorEntry(name="t", shape=(numel,), dtype="uint8", pieces=tuple(pieces))
        holders = {
            element: {
                (p.file, p.file_start + element - p.start) for p in pieces if p.start <= element < p.stop
            }
            for element in range(numel)
        }
        start = rng.randint(0, numel)
        stop = rng.randint(start, numel)
        missing = [element for element in range(start, stop) if not holders[element]]
        if missing:
            num_gaps += 1
            with pytest.raises(CheckpointError, match=f"Elements {missing[0]} to .* of 't'"):
                plan_reads(entry, start, stop)
            continue
        reads = plan_reads(entry, start, stop)
        assert all(read.numel > 0 for read in reads)
        planned = [
            (read.start + i, (read.piece.file, read.file_start + i))
            for read in reads
            for i in range(read.numel)
        ]
        assert [element for element, _ in planned] == list(range(start, stop))  # in order, none twice
        assert all(place in holders[element] for element, place in planned)
    assert 30 < num_gaps < 270, "the random pieces should give both outcomes often"


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 106)])
def test_a_range_outside_the_tensor_is_refused_with_its_shape(tmp_path: Path, start: int, stop: int) -> None:
    save(tmp_path, small_state(), world_size=2)
    with CheckpointReader(tmp_path) as reader, pytest.raises(CheckpointError) as caught:
        reader.read("model/block.weight", start, stop)
    assert "'model/block.weight'" in caught.value.what
    assert "[7, 15]" in caught.value.why


def test_reading_a_range_reads_only_its_bytes_from_the_disk(tmp_path: Path) -> None:
    weight = torch.randn(1_000_000)
    save(tmp_path, {"w": weight}, world_size=1)
    with CheckpointReader(tmp_path) as reader:
        reader.read("model/w", 0, 1)  # opens the file and reads its header
        before = _bytes_read()
        part = reader.read("model/w", 600_000, 600_100)
        num_bytes = _bytes_read() - before
    assert same_bits(part, weight[600_000:600_100])
    assert 400 <= num_bytes < 8192, num_bytes  # 400 of data; reading the counter costs a little itself


def test_read_into_fills_the_callers_memory_and_chunks_yield_in_order(tmp_path: Path) -> None:
    state = small_state()
    save(tmp_path, state, world_size=5)
    flat = state["block.weight"].reshape(-1)
    out = torch.zeros(40)
    with CheckpointReader(tmp_path) as reader:
        reader.read_into("model/block.weight", 7, out[3:33])
        chunks = [chunk.clone() for chunk in reader.chunks("model/block.weight", chunk_bytes=5 * 4)]
    assert same_bits(out[3:33], flat[7:37])
    assert not out[:3].any() and not out[33:].any()
    assert all(chunk.numel() <= 5 for chunk in chunks)
    assert same_bits(torch.cat(chunks), flat)


def test_more_files_than_a_reader_keeps_open_are_read(tmp_path: Path) -> None:
    weight = torch.randn(500)
    save(tmp_path, {"w": weight}, world_size=150)
    with CheckpointReader(tmp_path) as reader:
        before = len(os.listdir("/proc/self/fd"))
        assert same_bits(reader.read("model/w"), weight)
        assert len(os.listdir("/proc/self/fd")) - before <= 64
        assert same_bits(reader.read("model/w"), weight)
    assert len(os.listdir("/proc/self/fd")) <= before


# -- rank files --


def test_rank_files_are_ordinary_safetensors_files_in_every_dtype(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, dtype in reversed(DTYPES.items()):  # narrow first: in this order wide ones would not be aligned
        raw = torch.randint(0, 2 if name == "bool" else 256, (24,), generator=generator, dtype=torch.uint8)
        tensors[name] = raw.view(dtype)
    tensors["empty"] = torch.empty(0)
    tensors["bool"] = tensors["bool"][:13]
    path = tmp_path / "file.safetensors"
    stored = write_rank_file(path, tensors, {"who": "test"})
    loaded = load_file(path)
    assert [record.key for record in stored.tensors] == list(tensors)
    assert stored.num_bytes == path.stat().st_size
    for record in stored.tensors:
        assert same_bits(loaded[record.key], tensors[record.key]), record.key
        assert record.offset_bytes % record.dtype.itemsize == 0, record
        assert record.checksum == checksum(tensors[record.key])
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"who": "test"}


def test_strided_and_lazily_conjugated_tensors_are_stored_as_they_read(tmp_path: Path) -> None:
    base = torch.randn(6, 10)
    conjugate = torch.randn(5, dtype=torch.complex64).conj()
    tensors = {"columns": base.t()[::2], "conjugate": conjugate, "imaginary": conjugate.imag}
    write_rank_file(tmp_path / "file.safetensors", tensors, {})
    loaded = load_file(tmp_path / "file.safetensors")
    for key, tensor in tensors.items():
        assert torch.equal(loaded[key], tensor.reshape(-1)), key


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_get_the_permissions_the_umask_says(tmp_path: Path, umask: int) -> None:
    previous = os.umask(umask)
    try:
        save(tmp_path, {"w": torch.zeros(3)}, world_size=1)
    finally:
        os.umask(previous)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o666 & ~umask}


def test_a_write_that_fails_leaves_no_file_and_says_why(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    with pytest.raises(CheckpointError, match="complex128"):
        write_rank_file(path, {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.complex128)}, {})
    with pytest.raises(CheckpointError, match="two tensors under the key 'a'"):
        write_rank_file(path, [("a", torch.zeros(2)), ("a", torch.zeros(2))], {})
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (4096, hard)
    )  # the kernel refuses what goes beyond, as a full disk does
    try:
        with pytest.raises(CheckpointError) as caught:
            write_rank_file(path, {"a": torch.zeros(10_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))
    assert str(path) in caught.value.what
    assert "removed" in caught.value.why
    assert "space" in caught.value.fix
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_already_there_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    path.write_text("mine")
    with pytest.raises(CheckpointError, match="File exists"):
        write_rank_file(path, {"a": torch.zeros(2)}, {})
    assert path.read_text() == "mine"


# -- manifest and commit --


def test_a_manifest_reads_back_as_it_was_written(tmp_path: Path) -> None:
    extra = {"loss": float("nan"), "step": 7}
    description = Description(
        dtypes={"block.weight": "bfloat16"},
        frozen=frozenset({"block.bias"}),
        aliases={"block.weight": ("head.weight",)},
        buffers=frozenset({"mask", "counter"}),
        extra=extra,
    )
    written = save(tmp_path, small_state(), 3, description)
    assert Manifest.read(tmp_path) == written
    document = json.loads((tmp_path / MANIFEST_NAME).read_text())
    assert document["optimizers"][0]["class"] == "AdamW"
    assert document["params"]["block.weight"]["aliases"] == ["head.weight"]
    assert "name" not in document["tensors"]["model/step"]


def test_a_second_save_replaces_the_first_and_keeps_what_is_not_ours(tmp_path: Path) -> None:
    first = save(tmp_path, small_state(), world_size=4)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "model.safetensors").write_text("mine")
    (tmp_path / f"{MANIFEST_NAME}.{new_checkpoint_id()}.tmp").write_text("from a save that was cut off")
    second = save(tmp_path, small_state(), world_size=2)
    assert first.checkpoint_id != second.checkpoint_id
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {MANIFEST_NAME, "notes.txt", "model.safetensors", *second.files}


def test_a_crash_at_any_file_operation_of_a_save_leaves_the_old_or_the_new_checkpoint_whole(
    tmp_path: Path,
) -> None:
    old, new = {"w": torch.zeros(50)}, {"w": torch.ones(50)}
    outcomes = []
    for num_events in range(40):
        folder = tmp_path / str(num_events)
        save(folder, old, world_size=2)
        finished = _save_and_die_after(num_events, folder, new)
        with CheckpointReader(folder) as reader:
            values = reader.read("model/w")
        assert torch.equal(values, old["w"]) or torch.equal(values, new["w"]), num_events
        outcomes.append(bool(values[0] == 1))
        if finished:
            break
    else:
        pytest.fail("the save never ran to its end")
    assert outcomes == sorted(outcomes) and not outcomes[0] and outcomes[-1]
    assert len(outcomes) >= 6  # 2 rank files, the temporary manifest, the rename, 2 deletions
    save(folder, old, world_size=3)  # and a later save cleans up
    assert len(list(folder.iterdir())) == 4


def test_a_save_whose_files_this_rank_cannot_see_is_not_committed(tmp_path: Path) -> None:
    before = save(tmp_path, {"w": torch.zeros(50)}, world_size=2)
    checkpoint_id = new_checkpoint_id()
    files, entries = write_rank_files(tmp_path, {"model/w": torch.ones(50)}, 2, checkpoint_id)
    changes = {"checkpoint_id": checkpoint_id, "files": files, "tensors": entries}
    lost = tmp_path / rank_file_name(1, 2, checkpoint_id)
    lost.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=lost.name) as caught:
        before.model_copy(update=changes).write(tmp_path)
    assert "one file system" in caught.value.fix
    assert Manifest.read(tmp_path) == before


# -- extra state --


def test_extra_state_comes_back_with_tensors_in_shape_and_tuples_as_lists(tmp_path: Path) -> None:
    extra = {
        "step": 12,
        "loss": [float("inf"), -float("inf"), 0.1, None, True],
        "nested": {
            "betas": (0.9, 0.999),
            "$tensor": "a user's own key",
            "state": torch.randn(2, 3).bfloat16(),
        },
        "scalar": torch.tensor(5),
        "text": "zero \u00fc \u4e2d",
        "empty": {},
    }
    save(tmp_path, {"w": torch.zeros(3)}, 2, Description(extra=extra))
    with CheckpointReader(tmp_path) as reader:
        loaded = decode_extra(reader.manifest.extra, reader.read_tensor)
    assert isinstance(loaded, dict)
    assert same_bits(loaded["nested"].pop("state"), extra["nested"].pop("state"))
    assert same_bits(loaded.pop("scalar"), extra.pop("scalar"))
    extra["nested"]["betas"] = [0.9, 0.999]
    assert loaded == extra
    not_a_number = decode_extra(encode_extra(float("nan"))[0], reader.read_tensor)
    assert not_a_number != not_a_number


def test_extra_state_of_other_types_is_refused_with_its_path() -> None:
    recursive: list[object] = []
    recursive.append(recursive)
    cases: list[tuple[object, str]] = [
        ({"a": [1, 2, {3}]}, 'extra["a"][2]: set'),
        ({"a": {"b": {1: 2}}}, 'extra["a"]["b"]: a dict with the key 1 (int)'),
        ([torch.zeros(2, device="meta")], "extra[0]: a tensor without plain storage"),
        ({"f": len}, 'extra["f"]: builtin_function_or_method'),
        (recursive, "nested deeper than 64"),
    ]
    for extra, expected in cases:
        with pytest.raises(CheckpointError) as caught:
            encode_extra(extra)
        assert expected in caught.value.what


def test_extra_state_that_was_tampered_with_is_refused() -> None:
    for encoded in ({"$tensor": 3}, {"$float": "1.0"}, {"$dict": []}, {"$other": 1}, {"$dict": {}, "a": 1}):
        with pytest.raises(CheckpointError, match="edited or damaged"):
            decode_extra(encoded, lambda name: torch.zeros(0))


# -- helpers --


def _bytes_read() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    raise AssertionError("no rchar in /proc/self/io")


def _save_and_die_after(num_events: int, folder: Path, state: dict[str, Tensor]) -> bool:
    """Save in a child process that dies at a file operation; return whether it came to the end."""
    child = os.fork()
    if child == 0:
        countdown = num_events

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal countdown
            writes = event == "open" and arguments[1] is not None and set(str(arguments[1])) & set("wxa+")
            if writes or event in ("os.rename", "os.remove"):
                countdown -= 1
                if countdown < 0:
                    os._exit(9)

        sys.addaudithook(count)
        save(folder, state, world_size=2)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def test_file_metadata_names_the_save_and_the_rank() -> None:
    metadata = file_metadata(1, 3, "0123456789abcdef")
    assert metadata == {
        "format": "zero_strategy",
        "checkpoint_id": "0123456789abcdef",
        "rank": "1",
        "world_size": "3",
    }
