"""The keys of `ds_config.json` that are not simply honoured, and what this library does with each.

Owns the table of replaced and refused keys, the keys that may be "auto", and the search for the nearest
known key. Called by `config.py` (whose fields are the honoured keys) and `config_source.py`. Must not know
pydantic or torch: adding a key here is adding a line to a table.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Literal, NamedTuple

AUTO = "auto"
ZERO_BLOCK = "zero_optimization"
SHORTHAND_FIELD = {
    "offload_optimizer": "device",
    "offload_param": "device",
    "bf16": "enabled",
    "fp16": "enabled",
}


class KeyRule(NamedTuple):
    """What happens to a known key without a field in `ZeroConfig`, or to values that are not built yet.

    Attributes:
        verdict: "replaced" (one line says by what) or "refused" (an error says why).
        reason: What does its work here, or why it cannot be honoured.
        fix: What to write instead; refused keys only.
        neutral: Values that ask for nothing beyond what happens anyway; accepted without a word.
    """

    verdict: Literal["replaced", "refused"]
    reason: str
    fix: str = ""
    neutral: tuple[object, ...] = ()

    def asks_for_nothing(self, value: object) -> bool:
        """Whether `value` (a scalar, or a block as a dict) describes what happens anyway.

        Args:
            value: What the user wrote. A block is off if its `enabled` or `device` says so, or if all of it
                is falsy.

        Returns:
            True if there is nothing to honour and so nothing to say.
        """
        if not isinstance(value, dict):
            return value in self.neutral
        if "enabled" in value:
            return not value["enabled"]
        if "device" in value:
            return bool(value["device"] == "none")
        return not any(value.values())


def _replaced(reason: str, *neutral: object) -> KeyRule:
    return KeyRule("replaced", reason, neutral=neutral)


def _refused(reason: str, fix: str = "Remove the key.", *neutral: object) -> KeyRule:
    return KeyRule("refused", reason, fix, neutral or (False,))


def _later(subject: str, fix: str = "Remove the key until then.", *neutral: object) -> KeyRule:
    return _refused(
        f"{subject} comes in a later version; until then it is refused, never ignored.", fix, *neutral
    )


_MANIFEST = "every checkpoint has a manifest and loads at any world size, stage and bucket size"
_FLAT_GATHER = "a bucket is gathered as one flat tensor in place: there is nothing to copy together first"
_LOGGERS = "the loggers of your training framework"
_FOREIGN = (
    "autotuning", "compile", "compression_training", "curriculum_learning", "data_efficiency",
    "datastates_ckpt", "eigenvalue", "elasticity", "expert_parallel", "graph_harvesting", "hybrid_engine",
    "nebula", "pipeline", "progressive_layer_drop", "quantize_training", "sparse_attention",
    "tensor_parallel", "use_data_before_expert_parallelism", "weight_quantization",
)  # fmt: skip
_NO_ZERO_INIT = (
    "there is no zero.Init and no module method is patched: the engine shards the finished model in place"
)

_ZERO_RULES: dict[str, KeyRule] = {
    "contiguous_gradients": _replaced("gradients always live in flat buffers", True),
    "allgather_partitions": _replaced("updated parameters are always all-gathered, bucket by bucket", True),
    "reduce_scatter": _replaced(
        "gradients are always reduce-scattered: the same sum for half the bytes", True
    ),
    "use_multi_rank_bucket_allreduce": _replaced(
        "every bucket is reduce-scattered over all ranks at once", True
    ),
    "round_robin_gradients": _replaced(
        "every rank owns an equal range of every bucket, so the work is even", False
    ),
    "stage3_gather_fp16_weights_on_model_save": _refused(
        "It is the old spelling of stage3_gather_16bit_weights_on_model_save.",
        "Write stage3_gather_16bit_weights_on_model_save.",
    ),
    "stage3_module_granularity_threshold": _replaced(
        "buckets are whole repeated blocks, found automatically", 0
    ),
    "stage3_use_all_reduce_for_fetch_params": _replaced(_FLAT_GATHER, False),
    "stage3_allgather_sequential": _replaced(_FLAT_GATHER, False),
    "stage3_partition_stream_chunk_size": _later("Sharding one parameter in chunks", "Remove the key.", 0),
    "memory_efficient_linear": _replaced("linear layers are left as they are"),
    "override_module_apply": _replaced(_NO_ZERO_INIT),
    "pipeline_loading_checkpoint": _replaced("every rank reads only the ranges it owns", False),
    "log_trace_cache_warnings": _replaced("a changed order of modules is recorded anew, quietly", False),
    "enable_sanity_checks": _replaced("internal invariants are always checked", False),
    "elastic_checkpoint": _replaced(_MANIFEST, False),
    "load_from_fp32_weights": _refused(
        "Masters are always restored from their fp32 copies.", "Remove the key, or set it to true.", True
    ),
    "ignore_unused_parameters": _refused(
        "Unused parameters are allowed here: they count as zero, and the optimizer skips what no rank used.",
        "Remove the key, or set it to true.",
        True,
    ),
    "grad_hooks": _replaced("gradients are always taken over by hooks", True),
    "legacy_stage1": _refused("There is one engine for all stages, and no old one."),
    "offload_optimizer": _later(
        "Offloading the optimizer", 'Remove the block, or set its device to "none".', "none"
    ),
    "offload_param": _later(
        "Offloading parameters", 'Remove the block, or set its device to "none".', "none"
    ),
    "cpu_offload": _later("Offloading the optimizer (the old spelling of offload_optimizer)"),
    "cpu_offload_param": _later("Offloading parameters (the old spelling of offload_param)"),
    "cpu_offload_use_pin_memory": _later("Pinned host memory (the old spelling of pin_memory)"),
    "zero_hpz_partition_size": _later(
        "hpZ, a secondary shard per node,", "Remove the key, or set it to 1.", 0, 1
    ),
    "zero_quantized_weights": _later("qwZ, quantised weights,"),
    "zero_quantized_nontrainable_weights": _later("qwZ for frozen weights"),
    "zero_quantized_gradients": _later("qgZ, quantised gradients,"),
    "zeropp_loco_param": _refused("LoCo error feedback is not part of this library."),
    "mics_shard_size": _refused("Sub-group sharding (MiCS) is not built.", "Remove the key.", -1),
    "mics_hierarchical_params_gather": _refused("Sub-group sharding (MiCS) is not built."),
    "zenflow": _refused("ZenFlow is not part of this library."),
    "save_muon_momentum_buffer_in_memory": _refused(
        "Muon needs whole matrices and cannot run on flat shards."
    ),
}

_TOP_RULES: dict[str, KeyRule] = {
    "fp16.auto_cast": _refused(
        "The engine does not change what is passed to the model.",
        "Remove the key, and cast in your script: model(batch.half()). Lightning's precision='16-true' does.",
    ),
    "fp16.fp16_master_weights_and_grads": _refused(
        "An fp16 master would lose every update below 1/2048 of a weight, so masters are in fp32.",
        "Remove the key, or set it to false.",
    ),
    "fp16.fused_mode": _replaced("your optimizer's own fused=True", True),
    "bf16.immediate_grad_update": _replaced("a gradient is always taken over as soon as it is ready", True),
    "bfloat16": _refused("It is the old spelling of bf16.", "Write bf16."),
    "data_types.param_dtype": _refused(
        "Parameters have the dtype that bf16 or fp16 gives them, or keep their own.",
        'Remove the key; write "bf16": {"enabled": true}, or build the model in that dtype.',
    ),
    "data_types.buffer_dtype": _refused(
        "Buffers keep the dtype they have in the model.", "Remove the key; cast them in your script."
    ),
    "log_level": _replaced('logging.getLogger("zero_strategy").setLevel(...)'),
    "seq_parallel_communication_data_type": _refused(
        "Sequence parallelism is not built.", "Remove the key.", "fp32"
    ),
    "sequence_parallel_size": _refused("Sequence parallelism is not built.", "Remove the key.", 1),
    "gradient_allreduce_op": _refused(
        "Gradients are averaged over ranks.",
        "Remove the key; for a sum, multiply the loss by the number of ranks.",
        "mean",
    ),
    "optimizer": _refused(
        "The engine takes optimizers and builds none; under Accelerate the block describes a DummyOptim.",
        "Remove the block and build the optimizer in your script.",
    ),
    "scheduler": _refused(
        "The engine knows no schedulers; under Accelerate the block describes a DummyScheduler.",
        "Remove the block and build the scheduler in your script.",
    ),
    "aio": _later("NVMe offload, which the aio block tunes,", "Remove the block until then."),
    "activation_checkpointing": _later(
        "Partitioned activation checkpointing", "Remove the block; torch.utils.checkpoint works as it is."
    ),
    "torch_autocast": _refused(
        "Autocast belongs to the caller.", "Remove the block; use torch.autocast or precision=."
    ),
    "amp": _refused("Apex is not used.", 'Remove the block; use "bf16": {"enabled": true}.'),
    "sparse_gradients": _refused(
        "Flat buffers hold dense gradients only.", "Use dense embeddings (sparse=False)."
    ),
    "disable_allgather": _refused("Without the all-gather the ranks' parameters would differ."),
    "managed_gradient_accumulation": _replaced(
        "whoever drives the loop counts micro-batches, with no_sync()"
    ),
    "dataloader_drop_last": _refused(
        "Loaders belong to your script.", "Set drop_last=True on your DataLoader."
    ),
    **{key: _refused("It is not part of ZeRO and not built here.", "Remove it.") for key in _FOREIGN},
    "zero_allow_untested_optimizer": _replaced(
        "every element-wise torch optimizer works; others are refused by name"
    ),
    "zero_force_ds_cpu_optimizer": _replaced("your optimizer's own class is always used"),
    "vocabulary_size": _replaced("buckets are aligned whatever the shapes"),
    "checkpoint": _replaced(_MANIFEST),
    "load_universal_checkpoint": _replaced(_MANIFEST, False),
    "steps_per_print": _replaced(_LOGGERS),
    "wall_clock_breakdown": _replaced("torch.profiler, where every phase has a span named ZeRO::", False),
    "memory_breakdown": _replaced("engine.ledger.report()", False),
    "dump_state": _replaced("the resolved config is always logged once", False),
    "timers": _replaced("torch.profiler, where every phase has a span named ZeRO::"),
    "flops_profiler": _replaced("torch.profiler"),
    "comms_logger": _replaced("engine.ledger, which counts every call and byte"),
    **{key: _replaced(_LOGGERS) for key in ("tensorboard", "wandb", "comet", "csv_monitor")},
}

KEY_RULES: dict[str, KeyRule] = {
    f"{ZERO_BLOCK}.{key}": rule for key, rule in _ZERO_RULES.items()
} | _TOP_RULES

# Keys a front end resolves, and what to write where there is none.
AUTO_HINTS: dict[str, str] = {
    "train_batch_size": "the product of the other two and the world size, or leave it out",
    "train_micro_batch_size_per_gpu": "the batch size of your DataLoader, or leave it out",
    "gradient_accumulation_steps": "the number of micro-batches per optimizer step, or leave it out",
    "gradient_clipping": "the largest gradient norm, such as 1.0; 0 is off",
    "bf16.enabled": "true or false",
    "fp16.enabled": "true or false",
    f"{ZERO_BLOCK}.reduce_bucket_size": "a number of elements, or leave it out (8000000)",
    f"{ZERO_BLOCK}.stage3_prefetch_bucket_size": "a number of elements, or leave it out (the next unit)",
    f"{ZERO_BLOCK}.stage3_param_persistence_threshold": "a number of elements, or leave it out (100000)",
    f"{ZERO_BLOCK}.stage3_gather_16bit_weights_on_model_save": "true or false, or leave it out (false)",
}

# The stages at which an honoured key changes anything; keys not named here act at every stage.
STAGES_OF_KEY: dict[str, tuple[int, ...]] = {
    f"{ZERO_BLOCK}.allgather_bucket_size": (1, 2, 3),
    f"{ZERO_BLOCK}.stage3_max_live_parameters": (3,),
    f"{ZERO_BLOCK}.stage3_max_reuse_distance": (3,),
    f"{ZERO_BLOCK}.stage3_prefetch_bucket_size": (3,),
    f"{ZERO_BLOCK}.stage3_param_persistence_threshold": (3,),
    f"{ZERO_BLOCK}.stage3_model_persistence_threshold": (3,),
    f"{ZERO_BLOCK}.stage3_gather_16bit_weights_on_model_save": (3,),
    f"{ZERO_BLOCK}.leaf_module.classes": (3,),
    f"{ZERO_BLOCK}.leaf_module.names": (3,),
    f"{ZERO_BLOCK}.leaf_module.name_suffixes": (3,),
    "accumulate_whole_gradients": (2, 3),
}


# -- queries --


def first_unknown_part(dotted: str, known: frozenset[str]) -> str:
    """Return the shortest part of an unknown key that is no block: a misspelt block is named once."""
    blocks = parent_blocks(known)
    parts = dotted.split(".")
    for length in range(1, len(parts)):
        prefix = ".".join(parts[:length])
        if prefix not in blocks:
            return prefix
    return dotted


def parent_blocks(known: Iterable[str]) -> frozenset[str]:
    """Return the dotted names of all blocks that contain a known key."""
    return frozenset(key.rsplit(".", depth)[0] for key in known for depth in range(1, key.count(".") + 1))


def nearest_known(dotted: str, known: frozenset[str]) -> str | None:
    """Return the known key or block most like an unknown one, by last name: in its block, then anywhere."""
    candidates = known | parent_blocks(known)
    parent, _, name = dotted.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in candidates if key.rpartition(".")[0] == parent}
    others = {key.rpartition(".")[2]: key for key in candidates}
    for names, cutoff in ((siblings, 0.75), (others, 1.0), (siblings, 0.6), (others, 0.6)):
        match = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
        if match:
            return names[match[0]]
    return None
