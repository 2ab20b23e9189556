"""The host copy and the writer process: what is copied is what is written, and neither outlives its rank.

Oracles: the tensors' own bytes; xxhash's one-shot function; /proc. Everything is real: memory shared by two
processes, kills, limits. Tolerance: none.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from tests.harness import PRELOAD
from zero_strategy.checkpoint.background import WriterProcess
from zero_strategy.checkpoint.durable import WRITE_BYTES
from zero_strategy.checkpoint.elements import DTYPES, bytes_of
from zero_strategy.checkpoint.host_copy import PAGE_BYTES, HostCopy
from zero_strategy.checkpoint.safetensors_io import RankFile
from zero_strategy.errors import CheckpointError


@pytest.fixture
def memory() -> Iterator[HostCopy]:
    held = HostCopy()
    yield held
    held.close()


@pytest.fixture
def writer(memory: HostCopy) -> Iterator[WriterProcess]:
    process = WriterProcess(memory)
    yield process
    process.close()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def stage(memory: HostCopy, tensors: list[Tensor]) -> list[int]:
    """Copy tensors in, one after the other, each at a multiple of 16 bytes; return where each ends."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += tensor.numel() * tensor.element_size()
        end += -end % 16
    memory.reserve(end)
    memory.fill(zip(starts, tensors, strict=True))
    return [*starts[1:], end]


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


# -- what is written -----------------------------------------------------------------------------------------


def test_what_is_copied_is_what_is_written_whatever_happens_to_the_tensors(
    memory: HostCopy, writer: WriterProcess, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    raw = [torch.randint(0, 2, (24,), generator=generator, dtype=torch.uint8) for _ in DTYPES]
    tensors = [values.view(dtype) for values, dtype in zip(raw, DTYPES.values(), strict=True)]
    conjugate = torch.randn(5, dtype=torch.complex64).conj()
    tensors += [conjugate, conjugate.imag, torch.randn(6, 10).t()[::2], torch.empty(0), torch.tensor(3.0)]
    ends = stage(memory, tensors)
    plain = [tensor.reshape(-1).resolve_conj().resolve_neg().clone() for tensor in tensors]
    expected = [bytes(bytes_of(tensor)) for tensor in plain]
    for tensor in [*raw, *tensors]:
        tensor.resolve_conj().zero_()
    checksums = writer.write(tmp_path / "file", ends)
    written = (tmp_path / "file").read_bytes()
    assert len(written) == ends[-1]
    for start, end, data, found in zip([0, *ends], ends, expected, checksums, strict=False):
        assert written[start : start + len(data)] == data
        assert found == f"xxh3:{xxh3_64_hexdigest(written[start:end])}"


def test_memory_and_process_are_kept_from_file_to_file_and_grow(
    memory: HostCopy, writer: WriterProcess, tmp_path: Path
) -> None:
    ends = stage(memory, [torch.arange(1000)])
    writer.write(tmp_path / "first", ends)
    assert memory.num_bytes == PAGE_BYTES
    pid, before = writer.pid, os.fstat(memory.descriptor).st_ino
    large = torch.arange(PAGE_BYTES // 4)
    writer.write(tmp_path / "second", stage(memory, [large]))
    writer.write(tmp_path / "third", stage(memory, [torch.arange(7)]))
    assert (writer.pid, os.fstat(memory.descriptor).st_ino) == (pid, before)
    assert memory.num_bytes == 2 * PAGE_BYTES, "what was needed once is kept"
    assert (tmp_path / "second").read_bytes() == bytes(bytes_of(large))
    assert (tmp_path / "third").stat().st_size == 64


def test_what_is_larger_than_one_write_is_written_and_summed_as_a_whole(
    memory: HostCopy, writer: WriterProcess, tmp_path: Path
) -> None:
    sizes = {"a": 2 * WRITE_BYTES + 7, "b": 0, "c": WRITE_BYTES, "d": 5, "e": WRITE_BYTES + 1}
    generator = torch.Generator().manual_seed(0)
    tensors = {
        key: torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
        for key, size in sizes.items()
    }
    by_rank = RankFile(tmp_path / "by rank", tensors, {}).write()
    for stored, tensor in zip(by_rank.tensors, tensors.values(), strict=True):
        assert stored.checksum == f"xxh3:{xxh3_64_hexdigest(bytes(bytes_of(tensor)))}", stored.key
    content = (tmp_path / "by rank").read_bytes()
    assert by_rank.header_checksum == f"xxh3:{xxh3_64_hexdigest(content[: by_rank.tensors[0].offset_bytes])}"
    assert all(torch.equal(value, tensors[key]) for key, value in load(content).items())

    file = RankFile(tmp_path / "by process", tensors, {})
    memory.reserve(file.layout.ends[-1])
    memory.fill(file.placed())
    assert file.layout.written(writer.write(tmp_path / "by process", file.layout.ends)) == by_rank
    assert (tmp_path / "by process").read_bytes() == content


def test_the_process_is_small_and_never_imports_torch(
    memory: HostCopy, writer: WriterProcess, tmp_path: Path
) -> None:
    writer.write(tmp_path / "file", stage(memory, [torch.arange(10)]))
    status = Path(f"/proc/{writer.pid}/status").read_text()
    own_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
    assert own_kib < 32 * 1024
    loaded = Path(f"/proc/{writer.pid}/maps").read_text()
    assert "xxhash" in loaded and "torch" not in loaded and "pydantic" not in loaded


# -- what can go wrong ---------------------------------------------------------------------------------------


def test_a_file_that_is_there_is_refused_and_left_alone(
    memory: HostCopy, writer: WriterProcess, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    ends = stage(memory, [torch.arange(10)])
    with pytest.raises(CheckpointError, match="file could not be written"):
        writer.write(tmp_path / "file", ends)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_is_an_error_and_leaves_no_file(
    memory: HostCopy, writer: WriterProcess, tmp_path: Path
) -> None:
    ends = stage(memory, [torch.arange(10_000)])
    writer.write(tmp_path / "before", ends)
    assert writer.pid is not None
    resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (5_000, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError, match="too large") as info:
        writer.write(tmp_path / "file", ends)
    assert "Check free space" in info.value.fix
    assert [path.name for path in tmp_path.iterdir()] == ["before"]
    resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    writer.write(tmp_path / "after", ends)


@pytest.mark.parametrize("kill", ["from outside", "by the rank"])
def test_a_killed_process_is_an_error_and_another_one_follows(
    kill: str, memory: HostCopy, writer: WriterProcess, tmp_path: Path
) -> None:
    ends = stage(memory, [torch.arange(10)])
    writer.write(tmp_path / "before", ends)
    pid = writer.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    thread, raised = in_thread(lambda: writer.write(tmp_path / "file", ends))
    thread.join(0.2)
    assert thread.is_alive(), "written by a stopped process"
    if kill == "by the rank":
        writer.kill()
    else:
        os.kill(pid, signal.SIGKILL)
    thread.join(20)
    with pytest.raises(CheckpointError, match=r"SIGKILL before .*file was complete") as info:
        raise raised[0]
    assert "Save again" in info.value.fix
    writer.write(tmp_path / "after", ends)
    assert writer.pid != pid
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after", "before"]


def test_signals_meant_for_the_rank_do_not_end_the_process(
    memory: HostCopy, writer: WriterProcess, tmp_path: Path
) -> None:
    ends = stage(memory, [torch.arange(10)])
    writer.write(tmp_path / "before", ends)
    pid = writer.pid
    assert pid is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    writer.write(tmp_path / "after", ends)
    assert writer.pid == pid
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []), "the rank's own signals are as they were"


# -- the end -------------------------------------------------------------------------------------------------


def test_closing_leaves_no_process_no_memory_and_no_descriptor(tmp_path: Path) -> None:
    descriptors, shared = set(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    for is_closed in (True, False):
        memory = HostCopy()
        writer = WriterProcess(memory)
        writer.write(tmp_path / f"closed {is_closed}", stage(memory, [torch.arange(10)]))
        pid = writer.pid
        assert pid is not None and is_running(pid)
        if is_closed:
            for _ in range(2):
                writer.close()
                memory.close()
            assert not Path(f"/proc/{pid}").exists()
        del writer, memory  # without having been closed, too
        assert until(lambda pid=pid: not is_running(pid))  # type: ignore[misc]
        assert set(os.listdir("/proc/self/fd")) == descriptors
        assert set(os.listdir("/dev/shm")) == shared
        assert "zero_strategy-host-copy" not in Path("/proc/self/maps").read_text()


def write_and_wait(folder: Path) -> None:
    """Be a rank with a writer process, and a forked process that holds its pipes as a data loader's does."""
    memory = HostCopy()
    writer = WriterProcess(memory)
    writer.write(folder / "file", stage(memory, [torch.arange(10)]))
    child = os.fork()
    if child:
        (folder / "new").write_text(f"{writer.pid} {child}")
        (folder / "new").rename(folder / "pids")
    time.sleep(60)


def test_the_process_ends_when_its_rank_is_killed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    rank = context.Process(target=write_and_wait, args=(tmp_path,))
    rank.start()
    assert until((tmp_path / "pids").exists)
    writer_pid, child = map(int, (tmp_path / "pids").read_text().split())
    try:
        assert is_running(writer_pid)
        rank.kill()
        assert until(lambda: not is_running(writer_pid))
    finally:
        os.kill(child, signal.SIGKILL)
        rank.join()
