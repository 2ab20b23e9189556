"""Every name of Accelerate's that this front end puts something else under, overrides, or takes for granted.

One table, with file and line as of accelerate 1.15.0 and the signature that our code was written for; a test
holds it against what is installed. `TESTED.require` refuses versions that the tests have not been run with.
"""

from __future__ import annotations

from zero_strategy.front_ends.upstream import Name, Tested

TESTED = Tested("accelerate", (1, 10), (1, 15))  # the tests were run with the first and the last


_ACCELERATOR_INIT = (
    "(self, device_placement, split_batches, mixed_precision, gradient_accumulation_steps, cpu, "
    "dataloader_config, deepspeed_plugin, fsdp_plugin, torch_tp_plugin, megatron_lm_plugin, rng_types, "
    "log_with, project_dir, project_config, gradient_accumulation_plugin, step_scheduler_with_optimizer, "
    "kwargs_handlers, dynamo_backend, dynamo_plugin, deepspeed_plugins, parallelism_config)"
)


def _method(name: str, line: int, signature: str, why: str) -> Name:
    return Name("accelerate.accelerator", f"Accelerator.{name}", "accelerator.py", line, signature, why)


# Something else stands under these once `rebinding.install` has been called, and never before.
REBOUND = (
    Name(
        "accelerate.accelerator",
        "Accelerator.__init__",
        "accelerator.py",
        280,
        _ACCELERATOR_INIT,
        "accelerate.Accelerator and accelerate.accelerator.Accelerator become ZeroAccelerator",
    ),
    Name(
        "accelerate.state",
        "PartialState.__init__",
        "state.py",
        177,
        "(self, cpu, **kwargs)",
        "reads ACCELERATE_USE_CPU, as AcceleratorState does, where it is made first",
    ),
    Name(
        "accelerate.utils.operations",
        "GatheredParameters",
        "utils/operations.py",
        973,
        "(params, modifier_rank, fwd_module, enabled)",
        "makes parameters whole that an engine has sharded",
    ),
    Name(
        "accelerate.utils.deepspeed",
        "DummyOptim.__init__",
        "utils/deepspeed.py",
        355,
        "(self, params, lr, weight_decay, **kwargs)",
        "is to be had from accelerate.utils without deepspeed too",
    ),
    Name(
        "accelerate.utils.deepspeed",
        "DummyScheduler.__init__",
        "utils/deepspeed.py",
        380,
        "(self, optimizer, total_num_steps, warmup_num_steps, lr_scheduler_callable, **kwargs)",
        "is to be had from accelerate.utils without deepspeed too",
    ),
)

# Methods that ZeroAccelerator and ZeroOptimizer override or call.
OVERRIDDEN = (
    _method("prepare", 1415, "(self, *args, device_placement)", "models before optimizers; dummies"),
    _method("prepare_model", 1770, "(self, model, device_placement, evaluation_mode)", "an engine, not DDP"),
    _method("prepare_optimizer", 2744, "(self, optimizer, device_placement)", "a sharded optimizer"),
    _method("prepare_scheduler", 2788, "(self, scheduler)", "finds the optimizer inside ours"),
    _method("backward", 2829, "(self, loss, **kwargs)", "through the engine"),
    _method("no_sync", 1133, "(self, model)", "the engine's, at one process too"),
    _method("trigger_sync_in_backward", 1183, "(model)", "does something for DDP only"),
    _method("join_uneven_inputs", 1301, "(self, joinables, even_batches)", "is for DDP only"),
    _method("unscale_gradients", 2922, "(self, optimizer)", "once a step, of shards"),
    _method("clip_grad_norm_", 2989, "(self, parameters, max_norm, norm_type)", "of shards"),
    _method("clip_grad_value_", 3050, "(self, parameters, clip_value)", "of shards"),
    _method("get_state_dict", 4043, "(self, model, unwrap)", "whole, on rank 0"),
    _method(
        "save_state", 3625, "(self, output_dir, safe_serialization, **save_model_func_kwargs)", "of shards"
    ),
    _method("load_state", 3791, "(self, input_dir, load_kwargs, **load_model_func_kwargs)", "into shards"),
    _method("free_memory", 3943, "(self, *objects)", "drops optimizer states"),
    Name(
        "accelerate.optimizer",
        "AcceleratedOptimizer.__init__",
        "optimizer.py",
        55,
        "(self, optimizer, device_placement, scaler)",
        "wraps ours, and moves no state",
    ),
    Name(
        "accelerate.scheduler",
        "AcceleratedScheduler.__init__",
        "scheduler.py",
        47,
        "(self, scheduler, optimizers, step_with_optimizer, split_batches)",
        "is made with the optimizers that were found",
    ),
)

# Names without a promise that are called as they are.
USED = (
    Name(
        "accelerate.commands.launch",
        "launch_command_parser",
        "commands/launch.py",
        141,
        "(subparsers)",
        "reads the command line of a launch",
    ),
    Name(
        "accelerate.commands.launch",
        "_validate_launch_command",
        "commands/launch.py",
        1202,
        "(args)",
        "completes it from the yaml",
    ),
    Name(
        "accelerate.commands.launch",
        "multi_gpu_launcher",
        "commands/launch.py",
        1004,
        "(args)",
        "starts processes by torchrun",
    ),
    Name(
        "accelerate.commands.config.config_args",
        "load_config_from_file",
        "commands/config/config_args.py",
        43,
        "(config_file)",
        "reads a yaml",
    ),
    Name(
        "accelerate.utils.other",
        "compile_regions_deepspeed",
        "utils/other.py",
        181,
        "(module, **compile_kwargs)",
        "compiles blocks in place",
    ),
    Name(
        "accelerate.utils.other",
        "load",
        "utils/other.py",
        460,
        "(f, map_location, **kwargs)",
        "reads a state",
    ),
)
