"""The collectives of the engine, over whatever backend there is, each counted in the ledger.

Two kinds: moves of flat buffers (`all_gather`, `reduce_scatter_mean`), which are asynchronous and return a
handle, and control messages (flags, names, norms, buffers), which are small and wait. Callers do not know the
backend.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_strategy import compat
from zero_strategy.comm import ordered
from zero_strategy.comm.ledger import Ledger, MemoryUse
from zero_strategy.comm.letters import Letters
from zero_strategy.comm.stops import StopRequest
from zero_strategy.comm.topology import Topology
from zero_strategy.comm.waits import Channel, Ticket
from zero_strategy.errors import CheckpointError, ConfigError, OffloadError, ShardingError, ZeroError

# Of a JSON value that all ranks are told: its size, and as much of it as is sent along. A digest fits.
_SIZE_BYTES, _SHORT_BYTES = 8, 120
BUILD_ALIKE = (
    "Build the model and the config alike on every rank (the values of weights may differ: rank 0's count)."
)


class Handle:
    """Something under way.

    Invariant: the handle keeps every tensor of the collective alive until `wait()` returns.
    """

    def __init__(
        self,
        works: list[dist.Work],
        finish: Callable[[], None] | None = None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Take what is under way.

        Args:
            works: What to wait for.
            finish: What to do then.
            waiting: Makes a context to wait in.
        """
        self._works = works
        self._finish = finish
        self._waiting = waiting

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to wait for."""
        return not self._works and self._finish is None

    def wait(self, *, for_all_streams: bool = False) -> None:
        """Return when the result is there. May be called again, at no cost.

        Args:
            for_all_streams: On a device, wait until it is there for whatever is started afterwards; else for
                what the current stream is given.

        Raises:
            ShardingError: Another rank has died, or did not take part before the process group's timeout.
        """
        works, self._works = self._works, []
        finish, self._finish = self._finish, None
        if works:
            with self._waiting(), compat.on_a_stream_of_its_own(for_all_streams):
                for work in works:
                    work.wait()
        if finish is not None:
            finish()


class Collectives:
    """Gathers, reductions and control messages among the ranks of one topology."""

    def __init__(self, topology: Topology, ledger: Ledger) -> None:
        self.rank = topology.rank
        self.world_size = topology.world_size
        self.device = topology.device
        self._topology = topology
        self._watch = topology.watch
        self.stop = StopRequest()
        self._ledger = ledger
        self._receive = ordered.ReceiveBuffer()

    @contextmanager
    def _waiting(self, ticket: Ticket) -> Iterator[None]:
        """Wait for the others; what goes wrong meanwhile is explained."""
        try:
            with self._watch.waits.waiting(ticket):
                yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self._watch.explain(ticket.what, error) from error

    def _begin(self, channel: Channel, what: str) -> Ticket:
        self._watch.check()
        return self._watch.waits.begin(channel, what)

    def open_letters(self) -> Letters:
        """Open what ranks tell one another by without a collective. All ranks must have before one waits."""
        return self._topology.open_letters()

    def close(self) -> None:
        """Give the process groups back. Not collective; safe to call twice."""
        self._topology.close()

    # -- flat buffers --

    def all_gather(self, flat: Tensor, name: str, *, part: range | None = None) -> Handle:
        """Start filling a flat buffer with the shards of all ranks.

        Args:
            flat: The buffer.
            name: The bucket's, for messages.
            part: Which elements of every shard, where that is not all of it.

        Shapes:
            flat [padded_numel]; this rank's range must be filled in already.
        """
        shard_numel = flat.numel() // self.world_size
        whole = range(shard_numel)
        part = whole if part is None else part
        self._ledger.record("all_gather", (self.world_size - 1) * len(part) * flat.element_size())
        group = self._topology.gather_group
        ticket = self._begin("gather", f"The all-gather of bucket {name!r}")
        with self._waiting(ticket):
            if group is not None and self._topology.native and part == whole:
                own = flat[self.rank * shard_numel : (self.rank + 1) * shard_numel]
                works = [compat.native_all_gather(ordered.as_bytes(flat), ordered.as_bytes(own), group)]
            else:
                works = ordered.start_all_gather(flat, part, f"{name} {part.start}", group)
        return Handle(works, waiting=partial(self._waiting, ticket))

    def gather_to_first(self, shard: Tensor, name: str) -> Tensor | None:
        """Return the shards of all ranks as one flat buffer on rank 0, None elsewhere, and wait.

        Args:
            shard: This rank's.
            name: The bucket's, for messages.

        Returns:
            On the device of the shard, or on the host where the backend sends host memory only.

        Shapes:
            shard [shard_numel] -> [N * shard_numel]
        """
        if not self._topology.native:
            shard = shard.cpu()
        whole = None
        if self.rank == 0:
            whole = torch.empty(self.world_size * shard.numel(), dtype=shard.dtype, device=shard.device)
            whole[: shard.numel()].copy_(shard)
        # No formula has this: it is for who wants whole weights, not for a step.
        self._ledger.record("control", shard.numel() * shard.element_size() if self.rank else 0)
        ticket = self._begin("gather", f"The gather of bucket {name!r} to rank 0")
        with self._waiting(ticket):
            works = ordered.start_gather(whole, shard, f"{name} to rank 0", self._topology.gather_group)
        Handle(works, waiting=partial(self._waiting, ticket)).wait()
        return whole

    def reduce_scatter_mean(
        self, full: Tensor, output: Tensor, name: str, *, divisor: float | None = None
    ) -> Handle:
        """Start averaging a flat buffer over all ranks, each rank receiving its own range of the mean.

        The sum is taken in fp32 (fp64 for fp64) and the mean is rounded once, to the dtype of `output`.

        Args:
            full: The buffer.
            output: Where the mean goes.
            name: The bucket's, for messages.
            divisor: What the sum is divided by; None: the number of ranks.

        Shapes:
            full [padded_numel] -> output [padded_numel / N]; `output` may be this rank's range of `full`.
        """
        divisor = self.world_size if divisor is None else divisor
        self._ledger.record("reduce_scatter", (self.world_size - 1) * output.numel() * full.element_size())
        group = self._topology.reduce_group
        ticket = self._begin("reduce", f"The reduce-scatter of bucket {name!r}")
        waiting = partial(self._waiting, ticket)
        sums_exactly = full.dtype in (torch.float32, torch.float64) and output.dtype == full.dtype
        if group is not None and self._topology.native and sums_exactly:
            with waiting():
                work = compat.native_reduce_scatter_sum(output, full, group)
            return Handle([work], lambda: _divide(output, divisor), waiting)
        # NCCL would round a 16-bit sum at every hop; exchanging first sends the same bytes and rounds once.
        received = self._receive.take(full)
        with waiting():
            works = ordered.start_exchange(full, received, name, group)
        return Handle(works, lambda: self._finish_mean(full, received, output, divisor), waiting)

    def end_reductions(self) -> None:
        """Let go of the memory that reductions have kept; to be called after the last of a backward."""
        self._receive.drop()

    def memory(self) -> MemoryUse:
        """Return the bytes of the buffer that reductions receive into."""
        return MemoryUse(grads=self._receive.held_bytes)

    def _finish_mean(self, full: Tensor, received: Tensor, output: Tensor, divisor: float) -> None:
        ordered.mean_in_rank_order(full, received, output, rank=self.rank, divisor=divisor)
        self._receive.give_back(received)

    # -- control messages --

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite a flat tensor with that of rank 0, and wait.

        Shapes:
            tensor [n], any dtype
        """
        group = self._topology.gather_group
        if group is None:
            return
        self._ledger.record("control", tensor.nbytes if self.rank == 0 else 0)
        with self._waiting(self._begin("gather", "A broadcast from rank 0")):
            dist.broadcast(ordered.as_bytes(tensor), src=0, group=group)

    def broadcast_bytes(self, payload: bytes) -> bytes:
        """Return the bytes of rank 0, of any length; what the other ranks pass is ignored."""
        group = self._topology.control_group
        if group is None:
            return payload
        with self._waiting(self._begin("control", "A message from rank 0")):
            size = torch.tensor([len(payload)], dtype=torch.int64, device="cpu")
            dist.broadcast(size, src=0, group=group)
            data = torch.empty(int(size.item()), dtype=torch.uint8, device="cpu")
            if self.rank == 0:
                data.copy_(_to_tensor(payload))
            dist.broadcast(data, src=0, group=group)
        self._ledger.record("control", len(payload) if self.rank == 0 else 0)
        return bytes(data.numpy())

    def broadcast_json(self, value: Any) -> Any:
        """Return the JSON value of rank 0."""
        return json.loads(self.broadcast_bytes(json.dumps(value).encode()))

    def gather_json(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks, in rank order, on all ranks."""
        group = self._topology.control_group
        payload = json.dumps(value).encode()
        if group is None:
            return [json.loads(payload)]
        with self._waiting(self._begin("control", "An exchange of messages among all ranks")):
            head = len(payload).to_bytes(_SIZE_BYTES, "little") + payload[:_SHORT_BYTES]
            heads = self._gather_bytes(head, _SIZE_BYTES + _SHORT_BYTES)
            sizes = [int.from_bytes(found[:_SIZE_BYTES], "little") for found in heads]
            rest_bytes = max(0, max(sizes) - _SHORT_BYTES)
            rests = self._gather_bytes(payload[_SHORT_BYTES:], rest_bytes)
        self._ledger.record("control", (self.world_size - 1) * (_SIZE_BYTES + _SHORT_BYTES + rest_bytes))
        return [
            json.loads((head[_SIZE_BYTES:] + rest)[:size])
            for head, rest, size in zip(heads, rests, sizes, strict=True)
        ]

    def _gather_bytes(self, content: bytes, num_bytes: int) -> list[bytes]:
        """Return what all ranks have, each padded to as many bytes; no bytes are no message."""
        if not num_bytes:
            return [b""] * self.world_size
        gathered = torch.empty(self.world_size, num_bytes, dtype=torch.uint8, device="cpu")
        own = _to_tensor(content.ljust(num_bytes, b"\0"))
        dist.all_gather(list(gathered.unbind()), own, group=self._topology.control_group)
        return [bytes(row.numpy()) for row in gathered]

    def maximum(self, flags: Tensor, what: str = "The message at the end of a backward") -> None:
        """Replace a host tensor by its element-wise maximum over all ranks, and wait.

        Args:
            flags: What this rank says, overwritten by what all say.
            what: The message's name, for an error.

        Shapes:
            flags [n] uint8, on the host
        """
        group = self._topology.control_group
        if group is not None:
            self._ledger.record("control", flags.numel())
            with self._waiting(self._begin("control", what)):
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)

    def sum_in_rank_order(self, values: Tensor) -> Tensor:
        """Return the sum of a few fp64 numbers over all ranks, the same bits on every rank.

        Shapes:
            values [n] fp64, on the host -> [n] fp64
        """
        return self.stack(values).sum(dim=0)

    def stack(self, values: Tensor) -> Tensor:
        """Return everybody's numbers.

        Shapes:
            values [n], on the host -> [world_size, n]
        """
        group = self._topology.control_group
        if group is None:
            return values.unsqueeze(0)
        rows = torch.empty(self.world_size, values.numel(), dtype=values.dtype, device="cpu")
        self._ledger.record("all_reduce", (self.world_size - 1) * values.nbytes)
        with self._waiting(self._begin("control", "The sum of a norm over all ranks")):
            dist.all_gather(list(rows.unbind()), values, group=group)
        return rows

    def require_same(self, lines: list[str], subject: str, *, fix: str = BUILD_ALIKE) -> None:
        """Raise on all ranks if a list of lines is not the same everywhere. Collective.

        Args:
            lines: What must agree, such as a line per parameter.
            subject: What the lines describe, for the message.
            fix: What to do about it.

        Raises:
            ConfigError: Some rank has other lines than rank 0; names the first that differs.
        """
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        if len(set(self.gather_json(digest))) == 1:
            return
        expected: list[str] = self.broadcast_json(lines)
        pairs = itertools.zip_longest(expected, lines, fillvalue="nothing")
        first = next((pair for pair in pairs if pair[0] != pair[1]), None)
        error = None
        if first is not None:
            error = ConfigError(
                what=f"{subject} differs from rank 0's: there {first[0]!r}, here {first[1]!r}.",
                why="Every rank holds its shard of one and the same thing, so all ranks must build the same.",
                fix=fix,
            )
        self.agree(error)

    def agree(self, error: ZeroError | None, word: Any = None) -> Any:
        """Raise on all ranks if any rank has an error to raise. Collective.

        Args:
            error: What this rank found, or None.
            word: A JSON value to tell the others in the same message.

        Returns:
            The word of rank 0.

        Raises:
            ZeroError: The error of the lowest rank that has one, naming the rank.
        """
        mine = None if error is None else [type(error).__name__, error.what, error.why, error.fix]
        everybodys = self.gather_json([mine, word])
        for rank, (found, _) in enumerate(everybodys):
            if found is not None:
                name, what, why, fix = found
                where = f"[rank {rank}] " if len(everybodys) > 1 else ""
                agreed = _AGREED.get(name, ShardingError)(what=f"{where}{what}", why=why, fix=fix)
                self._watch.note_agreed(agreed)
                raise agreed from error
        return everybodys[0][1]


_AGREED: dict[str, type[ZeroError]] = {
    error.__name__: error for error in (ConfigError, ShardingError, CheckpointError, OffloadError)
}


def _divide(tensor: Tensor, divisor: float) -> None:
    tensor.div_(divisor)


def _to_tensor(payload: bytes) -> Tensor:
    if not payload:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)
