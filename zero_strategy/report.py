"""The ledger's report: what was counted on this rank, and beside it what ZeRO's formulas say.

Called by the engine's ledger. Rows compare the last optimizer step, when gradients and optimizer state are
all there, with the closed forms of `estimate`; what a formula leaves out (padding, parameters kept whole) is
named in the last column. It reads buckets and counts, and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import Tensor

from zero_strategy.bucket import Bucket
from zero_strategy.bucketing import has_masters
from zero_strategy.comm.ledger import Ledger, StepRecord
from zero_strategy.config import ZeroConfig
from zero_strategy.estimate import (
    FP32_MASTER_BYTES,
    ModelStateBytes,
    TableRow,
    format_bytes,
    format_table,
    live_bytes,
    model_state_bytes,
    traffic_numel,
)
from zero_strategy.live_buckets import LiveLimits
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer


def write_report(
    ledger: Ledger,
    buckets: Sequence[Bucket],
    optimizers: Sequence[ShardedOptimizer],
    *,
    world_size: int,
    config: ZeroConfig,
) -> str:
    """Return the table as plain text.

    Args:
        ledger: The counts.
        buckets: All buckets of the engine.
        optimizers: All optimizers of the engine.
        world_size: N.
        config: What was asked for.
    """
    facts = _Facts(buckets, optimizers, world_size, config)
    lines = [facts.describe(), ""]
    step = ledger.last_step
    if step is None:
        rows = [TableRow(kind, nbytes, "") for kind, nbytes in ledger.memory.items()]
        return "\n".join([*lines, "No optimizer step yet. Held now, on this rank:", format_table(rows)])
    lines += [f"Held at step {step.memory_of_step} of {ledger.num_steps}, on this rank:"]
    rows = _held(step, facts)
    if ledger.memory["host_copy"]:  # of any step: it is made by the first asynchronous save and kept
        rows.append(TableRow("host copy of saves", ledger.memory["host_copy"], "this rank's file"))
    lines += [format_table(rows)]
    if world_size > 1:
        micro = f" ({step.num_backwards} micro-batches)" if step.num_backwards > 1 else ""
        lines += ["", f"Sent for it{micro}, by this rank:", format_table(_sent(step, facts))]
    sent = {kind: count["bytes_sent"] for kind, count in ledger.comm.items()}
    total = ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in sent.items() if nbytes)
    lines.append(f"\nSent since the last reset of the ledger: {total or 'nothing'}.")
    return "\n".join(lines)


class _Facts:
    """What the formulas need to know of an engine."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        optimizers: Sequence[ShardedOptimizer],
        world_size: int,
        config: ZeroConfig,
    ) -> None:
        trainable = [bucket for bucket in buckets if bucket.trainable]
        self.buckets = buckets
        self.world_size = world_size
        self.stage = config.stage
        self.limits = LiveLimits.of(config.zero_optimization)
        self.num_params = sum(bucket.layout.numel for bucket in buckets)
        self.num_trainable = sum(bucket.layout.numel for bucket in trainable)
        self.param_bytes = _common(bucket.flat.element_size() for bucket in buckets)
        has_copies = any(has_masters(bucket.flat.dtype, config) for bucket in trainable)
        self.master_bytes = FP32_MASTER_BYTES if has_copies and self.param_bytes else 0
        self.grad_bytes = _common(bucket.grads.dtype.itemsize for bucket in trainable)
        self.wire_bytes = _common(bucket.grads.wire_dtype.itemsize for bucket in trainable)
        self.state_bytes = _common(_state_bytes(optimizer) for optimizer in optimizers)
        self.num_kept_whole = sum(b.layout.numel for b in buckets if _stage_of(b) < self.stage)

    def describe(self) -> str:
        """Say what the symbols stand for."""
        text = f"ZeRO stage {self.stage} on N = {self.world_size} ranks, Psi = {self.num_params:,} parameters"
        if self.num_trainable != self.num_params:
            text += f", Psi_t = {self.num_trainable:,} of them trainable"
        if self.num_kept_whole:
            text += f"; {self.num_kept_whole:,} of them kept whole, being small"
        return text

    @property
    def trainable_symbol(self) -> str:
        """Return the symbol of the parameters that train."""
        return "Psi" if self.num_trainable == self.num_params else "Psi_t"

    def state(self, num_params: int, item_bytes: int) -> ModelStateBytes:
        """Return the formulas for parameters or gradients of `item_bytes`."""
        return model_state_bytes(
            num_params,
            self.world_size,
            self.stage,
            param_bytes=item_bytes,
            optimizer_state_bytes=self.state_bytes or 0,
            master_bytes=self.master_bytes,
        )


def _held(step: StepRecord, facts: _Facts) -> list[TableRow]:
    rows = []
    trainable = facts.trainable_symbol
    plans = (
        ("params", "parameters", facts.param_bytes, "Psi", 3),
        ("grads", "gradients", facts.grad_bytes, trainable, 2),
        ("master", "fp32 masters", facts.master_bytes, trainable, 1),
        ("optimizer", "optimizer state", facts.state_bytes, trainable, 1),
    )
    for kind, what, item_bytes, symbol, sharded_from in plans:
        if item_bytes is None:  # of several dtypes: no one factor stands before Psi
            rows.append(TableRow(what, step.memory[kind], "several dtypes"))
            continue
        num_params = facts.num_params if kind == "params" else facts.num_trainable
        is_factor = kind in ("params", "grads")
        state = facts.state(num_params, item_bytes if is_factor else facts.param_bytes or 4)
        text = f"{item_bytes} {symbol}{'/N' if facts.stage >= sharded_from else ''}" if item_bytes else "0"
        value: int = getattr(state, kind)
        is_freed = kind == "grads" and step.memory[kind] < value
        note = "cut down to this rank's part already" if is_freed else _note(facts)
        rows.append(TableRow(what, step.memory[kind], text, value, note=note))
    if step.memory["averages"]:
        share = "/N" if facts.stage else ""
        rows.append(TableRow("averages of weights", step.memory["averages"], f"4 {trainable}{share} each"))
    rows.append(TableRow("  padding in these", step.memory["padding"], "declared"))
    if facts.stage == 3:
        rows.append(TableRow("whole, for the moment", step.memory["unsharded"], _live_text(facts)))
    return rows


def _sent(step: StepRecord, facts: _Facts) -> list[TableRow]:
    per_psi = {
        "all_gather": {0: step.num_reducing, 3: 2 * step.num_backwards}.get(facts.stage, 1),
        "reduce_scatter": step.num_reducing,
    }
    rows = []
    for kind, factor in per_psi.items():
        name = kind.replace("_", "-")
        gathered_bytes = facts.param_bytes if facts.stage else facts.grad_bytes
        item_bytes = facts.wire_bytes if kind == "reduce_scatter" else gathered_bytes
        is_frozen_too = kind == "all_gather" and facts.stage == 3
        symbol = "Psi" if is_frozen_too else facts.trainable_symbol
        if item_bytes is None:
            rows.append(
                TableRow(name, step.sent[kind], f"{factor} {symbol} (N-1)/N elements, several dtypes")
            )
            continue
        num_params = facts.num_params if is_frozen_too else facts.num_trainable
        numel = factor * traffic_numel(num_params, facts.world_size, 0) / 2
        text = f"{factor} {symbol} (N-1)/N x {item_bytes} B"
        value = round(numel * item_bytes)
        rows.append(TableRow(name, step.sent[kind], text, value, note=_sent_note(kind, facts)))
    rows.append(TableRow("norms", step.sent["all_reduce"], ""))
    rows.append(TableRow("control messages", step.sent["control"], ""))
    return rows


def _note(facts: _Facts) -> str:
    return "padding, and what is kept whole" if facts.num_kept_whole else "padding"


def _sent_note(kind: str, facts: _Facts) -> str:
    if kind == "all_gather" and facts.stage == 3:
        return "padding, and the root's one gather"
    return "padding"


def _live_text(facts: _Facts) -> str:
    if facts.limits.max_reuse_numel or facts.limits.prefetch_numel not in (0, None):
        return f"at most {facts.limits.max_live_numel:,} elements, or what is used at a time"
    sharded = [bucket for bucket in facts.buckets if bucket.policy.shard_params]
    whole_bytes = {bucket: bucket.layout.padded_numel * bucket.flat.element_size() for bucket in sharded}
    root_bytes = sum(size for bucket, size in whole_bytes.items() if bucket.is_root)
    unit_bytes: Counter[str] = Counter()
    for bucket, size in whole_bytes.items():
        unit_bytes[bucket.unit] += 0 if bucket.is_root else size
    return f"at most the root and two units = {format_bytes(live_bytes([*unit_bytes.values()], root_bytes))}"


def _stage_of(bucket: Bucket) -> int:
    return sum((bucket.policy.shard_optim, bucket.policy.shard_grads, bucket.policy.shard_params))


def _state_bytes(optimizer: ShardedOptimizer) -> int:
    """Return the bytes of state per element, of the first slice that has any."""
    found: tuple[str, int] | None = None
    total = 0
    for entry in optimizer.slice_states():
        key = (entry.fqn, entry.piece.param_start)
        if found is not None and key != found:
            break
        if isinstance(entry.value, Tensor) and entry.value.numel() == entry.piece.numel and entry.value.dim():
            found = key
            total += entry.value.element_size()
    return total


def _common(values: Iterable[int]) -> int | None:
    """Return the one value that all are, 0 if there is none, None if they differ."""
    different = set(values)
    return None if len(different) > 1 else next(iter(different), 0)
