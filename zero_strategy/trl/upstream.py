"""Every name of TRL's that something else is put under; a test holds the table against what is installed.

File and line are those of trl 1.16.0. Each body asks for the engine of the model it is given, and does what
TRL does where there is none.
"""

from __future__ import annotations

from zero_strategy.front_ends.upstream import Name, Tested

TESTED = Tested("trl", (1, 16), (1, 16))

REBOUND = (
    Name(
        "trl.models.utils",
        "_unwrap_model_for_generation",
        "models/utils.py",
        106,
        "(model, accelerator, gather_deepspeed3_params, gradient_checkpointing_kwargs)",
        "gathers once for a whole generation, with ds3_gather_for_generation",
    ),
    Name(
        "trl.distributed",
        "DistributedBackend.gather_params",
        "distributed.py",
        58,
        "(self, params)",
        "makes parameters whole, which vLLM is given",
    ),
    Name(
        "trl.trainer.callbacks",
        "SyncRefModelCallback.sync_target_model",
        "trainer/callbacks.py",
        135,
        "(model, target_model, alpha)",
        "mixes shards",
    ),
    Name(
        "trl.trainer.dpo_trainer",
        "DPOTrainer._precompute_ref_logps",
        "trainer/dpo_trainer.py",
        1168,
        "(self, dataset, name, batch_size)",
        "runs the model before it is trained: sharded, where it is to be",
    ),
    Name(
        "trl.trainer.kto_trainer",
        "KTOTrainer._precompute_ref_logps",
        "trainer/kto_trainer.py",
        1220,
        "(self, dataset, name, batch_size)",
        "runs the model before it is trained: sharded, where it is to be",
    ),
)
