"""Run test bodies on several ranks, each a real process, over gloo.

`@distributed(world_size=[2, 3])` turns a module-level test function into one pytest test per world size whose
body runs on every rank; `run_ranks` calls any module-level function so and returns what each rank returned.
Workers are forked from a server with torch loaded, so a launch costs tenths of a second; they meet through a
file, so no port can clash; they are seeded with 42 + rank and have one thread each. A rank that fails ends
the others at once and its traceback becomes the test's failure; ranks that hang are ended by a watchdog that
shows where each stood. No process outlives a launch. It knows nothing of zero_strategy.
"""

from __future__ import annotations

import ast
import contextlib
import datetime
import faulthandler
import functools
import importlib.util
import inspect
import marshal
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from _pytest.assertion.rewrite import rewrite_asserts

# Loaded once, by the server that workers are forked from.
PRELOAD = [
    "torch.distributed",
    "torch.nn.parallel",
    "torch._dynamo",
    "torch.utils.checkpoint",
    "torch.utils.serialization",
    "torch.profiler._cupti_monitor",
    "pytest",
]
# The same, each if the collected tests have loaded its key.
PRELOAD_IF_USED = {
    "pydantic": "pydantic",
    "lightning.pytorch": "lightning.pytorch",
    "pytorch_lightning": "pytorch_lightning",
    "accelerate": "accelerate",
    "transformers": "transformers.modeling_utils",  # which is lazy: some seconds at the first model
    "transformers.trainer": "transformers.trainer",
}
GRACE_S = 0.2  # seconds the other ranks have to report their own failure after the first, so that both show


class Launch(NamedTuple):
    """All a rank must know, in a form that crosses a process boundary."""

    module: str
    qualname: str
    code: bytes
    kwargs: dict[str, Any]
    world_size: int
    process_group: bool
    timeout_s: float
    folder: str


class Outcome(NamedTuple):
    """How a rank ended: `kind` is "value", "error", "skip" or "died"; `at` is when."""

    kind: str
    at: float
    payload: Any


class Worker(NamedTuple):
    """A rank as its parent sees it."""

    rank: int
    pid: int
    process: BaseProcess
    connection: Connection


# -- for tests -----------------------------------------------------------------------------------------------


def distributed(
    world_size: int | Sequence[int] = 2, *, timeout: float = 60.0, process_group: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a pytest test of a module-level function that runs on every rank.

    The function's parameters are pytest's as ever (`tmp_path`, parametrised values) and must be picklable:
    all ranks get the same. With `process_group=False` ranks are plain processes that have no process group.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**kwargs: Any) -> None:
            __tracebackhide__ = True
            num_ranks = kwargs.pop("num_ranks", world_size)
            run_ranks(body, num_ranks, kwargs, timeout=timeout, process_group=process_group)

        test.rank_body = body  # type: ignore[attr-defined]
        parameters = list(inspect.signature(body).parameters.values())
        if isinstance(world_size, int):
            test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
            return test
        parameters.append(inspect.Parameter("num_ranks", inspect.Parameter.KEYWORD_ONLY))
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("num_ranks", world_size, ids=lambda n: f"{n}ranks")(test)

    return decorate


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    kwargs: dict[str, Any] | None = None,
    *,
    timeout: float = 60.0,
    process_group: bool = True,
) -> list[Any]:
    """Call the module-level function `fn(**kwargs)` on every rank; return what each returned, by rank.

    Raises:
        AssertionError: A rank failed, died or did not end within `timeout` seconds; the text shows where.
    """
    __tracebackhide__ = True
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_to_preload())
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        names = (fn.__module__, fn.__qualname__)
        launch = Launch(
            *names, _compile(fn.__module__), kwargs or {}, world_size, process_group, timeout, folder
        )
        workers: list[Worker] = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(launch, rank, theirs))
                process.start()
                theirs.close()  # or a dead rank would never read as end of file
                assert process.pid is not None, "a process that was started has no id"
                workers.append(Worker(rank, process.pid, process, ours))
            outcomes = _collect(workers, time.monotonic() + timeout)
            failure = _describe(launch, workers, outcomes)
        finally:
            _end(workers)
    if failure:
        raise AssertionError(failure)
    for outcome in outcomes.values():
        if outcome.kind == "skip":
            pytest.skip(outcome.payload)
    return [outcomes[rank].payload for rank in range(world_size)]


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """How many ranks run this body; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


@contextlib.contextmanager
def subtest(name: str) -> Iterator[None]:
    """Name a cell of a grid that shares a launch: its errors begin so, and it starts from the rank's seed."""
    torch.manual_seed(42 + rank())
    print(f"[rank {rank()}] subtest {name}", file=sys.stderr, flush=True)  # shown beside a failure or a hang
    try:
        yield
    except Exception as error:
        raise AssertionError(f"[subtest {name}] {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def expect_error(
    error: type[BaseException], contains: str | Sequence[str] = ()
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Require that the block raises `error` and that its text has every string of `contains`."""
    with pytest.raises(error) as info:
        yield info
    for text in (contains,) if isinstance(contains, str) else contains:
        assert text in str(info.value), f"{text!r} is not in the message of {error.__name__}:\n{info.value}"


# -- parent --------------------------------------------------------------------------------------------------


def _to_preload() -> list[str]:
    """Return what the server of workers loads: the above and all of ours, but for test modules."""
    used = [name for key, name in PRELOAD_IF_USED.items() if key in sys.modules]
    ours = [
        name
        for name in sys.modules
        if name.startswith(("zero_strategy.", "tests.")) and not name.rpartition(".")[2].startswith("test_")
    ]
    return [*PRELOAD, *used, *sorted(ours)]


@functools.cache
def _compile(name: str) -> bytes:
    """Compile a test module as pytest does, so that a bare `assert` of a rank says what it compared.

    Once for all launches: it takes a rank a quarter of the time of a small test.
    """
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None, f"no module {name!r}: is its folder a package?"
    source = Path(spec.origin).read_bytes()
    tree = ast.parse(source, filename=spec.origin)
    rewrite_asserts(tree, source, spec.origin)
    return marshal.dumps(compile(tree, spec.origin, "exec", dont_inherit=True))


def _collect(workers: list[Worker], deadline: float) -> dict[int, Outcome]:
    """Receive until all ranks have an outcome, or one is no value (and a grace has passed), or time is up."""
    pending = {worker.connection: worker for worker in workers}
    outcomes: dict[int, Outcome] = {}
    while pending and (ready := wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))):
        for worker in [pending.pop(connection) for connection in ready]:  # type: ignore[call-overload]
            try:
                outcome = Outcome(*pickle.loads(worker.connection.recv_bytes()))
            except EOFError:
                worker.process.join(timeout=5)
                outcome = Outcome("died", 0.0, f"died without a word, exit code {worker.process.exitcode}\n")
            outcomes[worker.rank] = outcome
            if outcome.kind != "value":
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return outcomes


def _describe(launch: Launch, workers: list[Worker], outcomes: dict[int, Outcome]) -> str | None:
    """Say what went wrong on which rank, the likely cause first: deaths, then errors as they happened."""
    failures = sorted((o.at, rank) for rank, o in outcomes.items() if o.kind in ("error", "died"))
    ranks, head = [rank for _, rank in failures], "failed"
    if not failures and all(outcome.kind == "value" for outcome in outcomes.values()):
        ranks, head = [w.rank for w in workers if w.rank not in outcomes], f"hung for {launch.timeout_s:g} s"
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(workers[rank].pid, signal.SIGUSR2)  # faulthandler writes the stacks, within C too
        time.sleep(GRACE_S if ranks else 0.0)
    lines = [f"{launch.qualname} {head} on {len(ranks)} of {launch.world_size} ranks"]
    for rank in ranks:
        path = Path(launch.folder, f"stacks-{rank}")
        stacks = path.read_text() if path.exists() else ""
        lines.append(f"-- rank {rank} --\n{outcomes[rank].payload if rank in outcomes else ''}{stacks}")
    return "\n".join(lines) if ranks else None


def _end(workers: list[Worker]) -> None:
    """End all ranks, each with the processes it started: a rank leads its own session."""
    for worker in workers:
        worker.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.process.kill()  # a rank stopped before it led a session
    for worker in workers:
        worker.process.join(timeout=5)


# -- worker --------------------------------------------------------------------------------------------------


def _work(launch: Launch, rank: int, connection: Connection) -> None:
    """Life of one rank: run the body, report, wait until the parent has heard from all, go."""
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with open(Path(launch.folder, f"stacks-{rank}"), "w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR2, stacks, all_threads=True)
        try:
            message = pickle.dumps(("value", time.monotonic(), _run_body(launch, rank)))
        except pytest.skip.Exception as skip:
            message = pickle.dumps(("skip", time.monotonic(), str(skip)))
        except BaseException:
            message = pickle.dumps(("error", time.monotonic(), traceback.format_exc()))
        # A rank that left now would close its sockets under ranks still talking to it: the parent says when.
        with contextlib.suppress(EOFError, OSError):
            connection.send_bytes(message)
            connection.recv_bytes()
        os._exit(0)


def _end_with_parent() -> None:
    """End this rank and what it started when a test session is killed before it could."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank has a parent"
    parent.join()
    os.killpg(os.getpid(), signal.SIGKILL)


def _run_body(launch: Launch, rank: int) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(42 + rank)
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # or gloo resolves this host's name, which may fail
    body = functools.reduce(getattr, launch.qualname.split("."), _load(launch.module, launch.code))
    if launch.process_group:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{launch.folder}/rendezvous",
            rank=rank,
            world_size=launch.world_size,
            timeout=datetime.timedelta(seconds=launch.timeout_s),
        )
    return getattr(body, "rank_body", body)(**launch.kwargs)


def _load(name: str, code: bytes) -> Any:
    """Import a test module from what the parent has compiled."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"no module {name!r}"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    exec(marshal.loads(code), module.__dict__)
    return module
