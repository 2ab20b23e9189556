"""Every name of transformers' that this front end puts something else under, or takes for granted.

One table, with file and line as of transformers 5.24.0 and the signature that our code was written for; a
test holds it against what is installed. `TESTED.require` refuses versions that the tests have not been run
with.
"""

from __future__ import annotations

from zero_strategy.front_ends.upstream import Name, Tested

TESTED = Tested("transformers", (5, 24), (5, 24))


def _method(name: str, line: int, signature: str, why: str) -> Name:
    return Name("transformers.trainer", f"Trainer.{name}", "trainer.py", line, signature, why)


# `rebinding.install` puts ours under these; `ZeroTrainerMixin` and `ZeroArgumentsMixin` override them.
REBOUND = (
    _method(
        "create_accelerator_and_postprocess",
        806,
        "(self)",
        "makes transformers.trainer.Accelerator, which becomes TrainerAccelerator",
    ),
    _method("_build_accelerator_args", 741, "(self, **kwargs)", "the plugin, agreed with the arguments"),
    _method(
        "_move_model_to_device", 4758, "(self, model, device)", "not where the engine moves it shard by shard"
    ),
    _method(
        "evaluation_loop",
        2904,
        "(self, dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)",
        "on a whole model, if that was asked for",
    ),
    _method("create_optimizer", 1259, "(self, model)", "the config's, if it has one"),
    _method(
        "create_scheduler",
        1347,
        "(self, num_training_steps, optimizer)",
        "the config's, if it has one",
    ),
    _method("save_model", 4085, "(self, output_dir, _internal_call)", "whole weights, from all ranks"),
    _method("_save_optimizer_and_scheduler", 3521, "(self, output_dir)", "the whole state, from all ranks"),
    _method(
        "_load_from_checkpoint", 3610, "(self, resume_from_checkpoint, model)", "into shards, where there are"
    ),
    _method("_load_best_model", 3743, "(self)", "into shards"),
    Name(
        "transformers.training_args",
        "TrainingArguments.__post_init__",
        "training_args.py",
        1515,
        "(self)",
        "takes a ds_config.json as deepspeed without deepspeed",
    ),
    _method("_load_optimizer_and_scheduler", 3894, "(self, checkpoint)", "read once, into shards"),
)

# Called as they are.
USED = (
    _method("_save", 4139, "(self, output_dir, state_dict)", "writes a model's files, on rank 0"),
    _method("_issue_warnings_after_load", 4067, "(self, load_result)", "says which names did not match"),
    Name(
        "transformers.distributed.fsdp",
        "is_fsdp_managed_module",
        "distributed/fsdp.py",
        54,
        "(module)",
        "lets ranks generate until the last of them has ended; reads _is_fsdp_managed_module",
    ),
)
