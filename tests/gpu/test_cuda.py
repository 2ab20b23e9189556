"""What CPU tests cannot show: streams, device memory, NCCL.

Oracles: torch's DDP on the same devices, tolerance 0 at one and two ranks, where the order of additions is
the same; in bf16 stage 0, tolerance 0. Memory: the formulas of `estimate.py`, exact, against the bytes that
were asked of torch's allocator (`requested_bytes`, which leaves out its rounding). Models here have no
operation that adds atomically, so that a run equals itself. Each test runs wherever the machine allows: one
rank over NCCL, two ranks over gloo on one GPU (NCCL refuses that), two ranks over NCCL on two GPUs.
"""

from __future__ import annotations

import datetime
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zero_strategy as zs
from tests.harness import expect_error, rank, run_ranks, subtest, world_size
from zero_strategy.estimate import live_bytes, model_state_bytes

pytestmark = pytest.mark.gpu

TIMEOUT_S = 180.0
STAGES = (0, 1, 2, 3)
SLEEP_CYCLES = 20_000_000  # about 10 ms: longer than any backward here
WHOLE = {"stage3_param_persistence_threshold": 0}  # nothing stays whole at stage 3


class Place(NamedTuple):
    """Where a test runs."""

    backend: str
    num_ranks: int


PLACES = {
    "one rank, nccl": Place("nccl", 1),
    "two ranks, gloo, one GPU": Place("gloo", 2),
    "two ranks, nccl": Place("nccl", 2),
}


def on_gpus(*names: str, **parameters: list[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test, per place, of a module-level function that runs on every rank; by default in all places.

    Args:
        names: Places by name.
        parameters: One name and its values, as of `pytest.mark.parametrize`.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def rank_body(place: str, folder: Path, kwargs: dict[str, Any]) -> None:
            join(PLACES[place], folder)
            body(**kwargs)

        def start(place: str, tmp_path: Path, **kwargs: Any) -> None:
            __tracebackhide__ = True
            backend, num_ranks = PLACES[place]
            if backend == "nccl" and num_ranks > torch.cuda.device_count():
                pytest.skip(f"needs {num_ranks} CUDA devices, there are {torch.cuda.device_count()}")
            everything = {"place": place, "folder": tmp_path, "kwargs": kwargs}
            run_ranks(test, num_ranks, everything, timeout=TIMEOUT_S)

        if parameters:
            [(name, values)] = parameters.items()

            def test(place: str, tmp_path: Path, value: Any) -> None:
                start(place, tmp_path, **{name: value})

            test = pytest.mark.parametrize("value", values, ids=str)(test)
        else:

            def test(place: str, tmp_path: Path) -> None:
                start(place, tmp_path)

        test.__name__, test.__qualname__, test.__doc__ = body.__name__, body.__qualname__, body.__doc__
        test.rank_body = rank_body  # type: ignore[attr-defined]
        return pytest.mark.parametrize("place", names or list(PLACES))(test)

    return decorate


def join(place: Place, folder: Path) -> None:
    """Take this rank's device, and give CUDA tensors the backend of the place."""
    torch.cuda.set_device(rank() if place.backend == "nccl" else 0)
    if place.backend == "nccl":
        # The launch's own group is gloo's; its backend for CUDA tensors cannot be exchanged.
        own_rank, size = rank(), world_size()
        dist.destroy_process_group()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl",
            init_method=f"file://{folder}/rendezvous",
            rank=own_rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=TIMEOUT_S),
        )
    try:
        dist.all_to_all_single(torch.empty(2, device="cuda"), torch.zeros(2, device="cuda"))
        dist.broadcast(torch.zeros(2, device="cuda"), src=0)
    except RuntimeError as error:
        pytest.skip(f"{place.backend} of this torch does not take CUDA tensors here: {error}")


class Net(nn.Module):
    """Equal blocks of odd shapes between two linear layers of other shapes."""

    def __init__(self, width: int = 37, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(19, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 53), nn.Tanh(), nn.Linear(53, width))
            for _ in range(depth)
        )
        self.tail = nn.Sequential(nn.Tanh(), nn.Linear(width, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.tail(x)


class Even(nn.Module):
    """Blocks of one square matrix each: no padding at one or two ranks, nothing in the root."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def net(build: Callable[[], nn.Module] = Net) -> nn.Module:
    """A model on the host, the same on every rank."""
    torch.manual_seed(0)
    return build()


def batch_of(step: int, width: int = 19) -> Tensor:
    """This rank's batch of a step, on its device."""
    generator = torch.Generator("cpu").manual_seed(1000 * rank() + step)
    return torch.randn(4, width, generator=generator, device="cpu").cuda()


def shard(model: nn.Module, stage: int, **settings: Any) -> tuple[zs.ZeroEngine, torch.optim.Optimizer]:
    """An engine over a model on the host, whose shards live on the device."""
    engine = zs.ZeroEngine(model, zs.ZeroConfig(stage=stage, **(WHOLE | settings)), device="cuda")
    return engine, engine.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))


def train(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    num_steps: int = 4,
    *,
    width: int = 19,
    between: Callable[[], None] = lambda: None,
) -> list[Tensor]:
    """Train without ever waiting for the device; return the losses, which are still on their way.

    Args:
        module: What is called.
        optimizer: Its optimizer.
        num_steps: How many steps.
        width: Of the input.
        between: Called after every backward and after every step.
    """
    inputs = [batch_of(step, width) for step in range(num_steps)]
    losses = []
    for x in inputs:
        loss = module(x).float().square().mean()
        loss.backward()
        between()
        optimizer.step()
        optimizer.zero_grad()
        between()
        losses.append(loss.detach())
    return losses


def train_ddp(build: Callable[[], nn.Module] = Net, **how: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train under DDP; return losses and weights."""
    model = net(build).cuda()
    module = DistributedDataParallel(model)
    losses = train(module, torch.optim.AdamW(model.parameters(), lr=1e-2), **how)
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}


def train_zero(
    stage: int, build: Callable[[], nn.Module] = Net, *, settings: dict[str, Any] | None = None, **how: Any
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train on the engine; return losses and, on rank 0, weights."""
    model = net(build)
    engine, optimizer = shard(model, stage, **(settings or {}))
    losses = train(model, optimizer, **how)
    weights = engine.full_state_dict()
    engine.close()
    return losses, weights


def assert_same(
    result: tuple[list[Tensor], dict[str, Tensor]], wanted: tuple[list[Tensor], dict[str, Tensor]]
) -> None:
    """Require equal losses on every rank, and equal weights on rank 0, in every bit."""
    assert [float(loss) for loss in result[0]] == [float(loss) for loss in wanted[0]]
    if rank() == 0:
        assert result[1].keys() == wanted[1].keys()
        for name, value in wanted[1].items():
            assert torch.equal(result[1][name], value), name


# -- the numbers ---------------------------------------------------------------------------------------------


@on_gpus()
def test_every_stage_equals_ddp_in_every_bit() -> None:
    wanted = train_ddp()
    for stage in STAGES:
        for size in (500, 25_000_000):
            with subtest(f"stage {stage}, reduce_bucket_size {size}"):
                assert_same(train_zero(stage, settings={"reduce_bucket_size": size}), wanted)


@on_gpus(accumulate=[None, "fp32"])
def test_stages_equal_one_another_in_bf16(accumulate: str | None) -> None:
    settings = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": accumulate}}
    wanted = train_zero(0, _net_of_bf16_inputs, settings=settings)
    for stage in STAGES[1:]:
        with subtest(f"stage {stage}"):
            assert_same(train_zero(stage, _net_of_bf16_inputs, settings=settings), wanted)


def _net_of_bf16_inputs() -> nn.Module:
    model = Net()
    model.register_forward_pre_hook(lambda module, args: tuple(x.bfloat16() for x in args))
    return model


@on_gpus()
def test_clipping_gives_the_norm_of_ddp() -> None:
    reference = net().cuda()
    module = DistributedDataParallel(reference)  # kept: without it nobody reduces
    module(batch_of(0)).square().mean().backward()
    wanted = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            model = net()
            engine, optimizer = shard(model, stage)
            model(batch_of(0)).square().mean().backward()
            norm = optimizer.clip_grad_norm_(0.01)
            # torch sums a norm per tensor and in fp32, the engine per slice and in fp64: equal to rounding.
            assert float(norm) == pytest.approx(float(wanted), rel=1e-5)
            for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
                difference = (engine.full_grad(param) - other.grad).norm() / other.grad.norm()
                assert difference < 1e-5, name
            engine.close()


@on_gpus()
def test_a_forward_in_inference_mode_between_steps_changes_nothing() -> None:
    """What a gather allocates in there must not turn parameters into inference tensors."""
    wanted = train_zero(3)
    model = net()
    engine, optimizer = shard(model, 3)

    def look() -> None:
        with torch.inference_mode():
            model(batch_of(99))

    losses = train(model, optimizer, between=look)
    assert_same((losses, engine.full_state_dict()), wanted)
    assert not any(param.is_inference() for param in model.parameters())
    engine.close()


@on_gpus("one rank, nccl")
def test_a_default_device_changes_nothing() -> None:
    """Messages between ranks live on the host, whatever device new tensors go to."""
    wanted = train_zero(3)
    model = net()
    with torch.device("cuda"):
        engine, optimizer = shard(model, 3)
        losses = train(model, optimizer)
        assert float(optimizer.clip_grad_norm_(1.0)) == 0.0  # cleared
        weights = engine.full_state_dict()
        engine.close()
    assert_same((losses, weights), wanted)


# -- streams -------------------------------------------------------------------------------------------------


@on_gpus()
def test_long_transfers_and_short_compute_do_not_race() -> None:
    """Four rows through 16 MiB matrices: were a buffer used too early or freed too soon, it would show here.

    Reference and subject run one after the other, each without waiting for the device, so that the waits of
    one do not hide what the other lacks.
    """
    how: dict[str, Any] = {"width": 2048, "num_steps": 3}
    wanted = train_ddp(_wide, **how)
    torch.cuda.synchronize()
    for stage in STAGES:
        for overlap in (True, False):
            with subtest(f"stage {stage}, overlap_comm {overlap}"):
                settings = {"overlap_comm": overlap, "reduce_bucket_size": 2048 * 2048}
                if not overlap:
                    settings["stage3_prefetch_bucket_size"] = 0
                assert_same(train_zero(stage, _wide, settings=settings, **how), wanted)


def _wide() -> nn.Module:
    return Even(2048, depth=5)


@on_gpus()
def test_gradients_and_updates_that_come_late_are_waited_for() -> None:
    """Collectives are issued while the compute stream still sleeps: they must wait for it."""
    wanted = train_zero(0)
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            model = net(_sleepy)
            engine, optimizer = shard(model, stage)
            losses = train(model, optimizer, between=lambda: torch.cuda._sleep(SLEEP_CYCLES))
            assert_same((losses, engine.full_state_dict()), wanted)
            engine.close()


def _sleepy() -> nn.Module:
    """A net in which the device sleeps before it computes the gradients of each block."""
    model = Net()
    for block in model.blocks:
        block.register_forward_hook(_sleep_in_backward)
    return model


def _sleep_in_backward(module: nn.Module, args: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda grad: torch.cuda._sleep(SLEEP_CYCLES))


@on_gpus()
def test_a_sleeping_device_does_not_change_a_reduced_gradient() -> None:
    grads: dict[str, list[Tensor | None]] = {}
    for name, build in (("awake", Net), ("sleepy", _sleepy)):
        for overlap in (True, False):
            model = net(build)
            engine, _ = shard(model, 3, overlap_comm=overlap)
            model(batch_of(0)).square().mean().backward()
            grads[f"{name}, {overlap}"] = [engine.full_grad(param) for param in model.parameters()]
            engine.close()
    first = grads.pop("awake, True")
    for name, others in grads.items():
        for index, (grad, other) in enumerate(zip(first, others, strict=True)):
            assert grad is not None and other is not None
            assert torch.equal(grad, other), f"parameter {index}, {name}"


# -- memory --------------------------------------------------------------------------------------------------

WIDTH, DEPTH = 256, 12
BLOCK_NUMEL = WIDTH * WIDTH
NUM_PARAMS = DEPTH * BLOCK_NUMEL  # Psi
SLACK_BYTES = 256 * 1024  # activations of four rows, losses: some kB


def _even() -> nn.Module:
    return Even(WIDTH, DEPTH)


def held_bytes() -> int:
    """Bytes asked of torch's allocator and not given back."""
    gc.collect()  # an engine and its hooks hold one another
    torch.cuda.synchronize()
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def warm_up() -> None:
    """Have cuBLAS allocate its workspaces, of this thread and of autograd's."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(4, WIDTH, device="cuda", dtype=dtype, requires_grad=True)
        weight = torch.randn(WIDTH, WIDTH, device="cuda", dtype=dtype, requires_grad=True)
        nn.functional.linear(x, weight).sum().backward()


@contextmanager
def peak_above(limit: Callable[[], int]) -> Iterator[None]:
    """Require that the block holds at most `limit()` bytes more than there are before it."""
    before = held_bytes()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.synchronize()
    peak = int(torch.cuda.memory_stats()["requested_bytes.all.peak"]) - before
    assert peak <= limit(), f"{peak:,} bytes at once, {limit():,} allowed"


@on_gpus(dtype=[torch.float32, torch.bfloat16])
def test_bytes_on_the_device_equal_the_formulas(dtype: torch.dtype) -> None:
    """Nothing is padded here, so what is held are the terms of `estimate.py`, and stand-ins at stage 3."""
    warm_up()
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            before = held_bytes()
            model = net(_even).to(dtype)
            engine, optimizer = shard(model, stage)
            formula = model_state_bytes(NUM_PARAMS, world_size(), stage, param_bytes=dtype.itemsize)
            stand_ins = DEPTH * dtype.itemsize if stage == 3 else 0  # one element a bucket
            # Parameters and, in bf16, masters.
            assert held_bytes() - before == formula.params + formula.master + stand_ins
            x = batch_of(0, WIDTH).to(dtype)
            model(x).float().square().mean().backward()
            # And gradients: whole at stages 0 and 1, the shard at 2 and 3.
            rest = formula.params + formula.master + stand_ins + x.nbytes
            assert held_bytes() - before == rest + formula.grads
            optimizer.step()
            # And two moments. Step counters are on the host.
            assert held_bytes() - before == rest + formula.grads + formula.optimizer
            optimizer.zero_grad()
            assert held_bytes() - before == rest + formula.optimizer
            assert engine.ledger.memory["params"] == formula.params
            assert engine.ledger.memory["optimizer"] == formula.optimizer
            engine.close()
            del engine, optimizer, model, x
            assert held_bytes() == before, "something has stayed"


@on_gpus()
def test_bytes_on_the_device_equal_the_ledger_where_there_is_padding() -> None:
    warm_up()
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            before = held_bytes()
            model = net()
            engine, optimizer = shard(model, stage)
            train(model, optimizer, num_steps=1)
            memory = engine.ledger.memory
            kinds = ("params", "grads", "master", "optimizer", "unsharded")
            stand_ins = len(engine.buckets) * 4 if stage == 3 else 0
            assert held_bytes() - before == sum(memory[kind] for kind in kinds) + stand_ins
            engine.close()
            del engine, optimizer, model
            assert held_bytes() == before, "something has stayed"


@on_gpus(dtype=[torch.float32, torch.bfloat16])
def test_a_stage_3_step_holds_two_blocks_whole_and_its_gradients(dtype: torch.dtype) -> None:
    warm_up()
    model = net(_even).to(dtype)
    engine, optimizer = shard(model, 3)
    train_once(model, optimizer, dtype)
    block_bytes = BLOCK_NUMEL * dtype.itemsize
    shards = model_state_bytes(NUM_PARAMS, world_size(), 3, param_bytes=dtype.itemsize)

    def limit() -> int:
        return (
            live_bytes([block_bytes] * DEPTH, root_bytes=0)  # a block in use, one gathered ahead
            + block_bytes  # a gradient as autograd hands it over
            + 2 * block_bytes  # whole gradients: one bucket filling, one being reduced
            + block_bytes  # received versions, where the backend does not sum itself
            + 4 * BLOCK_NUMEL // world_size()  # their fp32 sum, of a 16-bit bucket
            + shards.grads  # reduced
            + SLACK_BYTES
        )

    for _ in range(2):
        with peak_above(limit):
            model(batch_of(0, WIDTH).to(dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.close()


def train_once(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
    """Train one step, after which moments exist and the order of gathers is known."""
    model(batch_of(0, WIDTH).to(dtype)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@on_gpus(bf16=[False, True])
def test_a_model_on_the_host_is_sharded_onto_the_device_bucket_by_bucket(bf16: bool) -> None:
    """The whole model is never on the device: the shards and one bucket are."""
    model = net(_even)
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    itemsize = 2 if bf16 else 4
    shard_bytes = (itemsize + (4 if bf16 else 0)) * NUM_PARAMS // world_size()  # weights, unrounded masters
    bucket_bytes = (itemsize + (4 if bf16 else 0)) * BLOCK_NUMEL  # whole, before and after rounding
    with peak_above(lambda: shard_bytes + bucket_bytes + SLACK_BYTES):
        engine = zs.ZeroEngine(model, zs.ZeroConfig(stage=3, bf16={"enabled": bf16}, **WHOLE), device="cuda")
    assert {param.device.type for param in model.parameters()} == {"cuda"}
    state = engine.full_state_dict()
    if rank() == 0:
        for name, value in whole.items():
            assert torch.equal(state[name], value.to(state[name].dtype)), name
    engine.close()


# -- bad input -----------------------------------------------------------------------------------------------


@on_gpus("one rank, nccl")
def test_a_model_left_on_the_host_is_refused_if_only_nccl_is_there() -> None:
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    with expect_error(zs.ConfigError, ["on cpu", "cuda:nccl", "device="]):
        zs.ZeroEngine(net(), zs.ZeroConfig(stage=3))
