"""`zero-strategy launch`: Accelerate's launch command for scripts that are to be sharded by this library.

Takes the arguments and the yaml of `accelerate launch`, a yaml of `distributed_type: DEEPSPEED` too, and
starts `zero_strategy.run` with the script on as many processes as are asked for, by Accelerate's own launcher
of several processes. deepspeed need not be there. Called by the command line; it must not know the engine.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.commands.launch import _validate_launch_command, multi_gpu_launcher
from accelerate.utils import ComputeEnvironment, DistributedType
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from zero_strategy.accelerate import environment
from zero_strategy.accelerate.launch_block import Launch, settings_of_block
from zero_strategy.accelerate.launcher import describe, load_yaml, parse
from zero_strategy.accelerate.plugin import ZeroPlugin
from zero_strategy.accelerate.upstream import TESTED
from zero_strategy.config_source import Fault, error_of

RUNNER = "zero_strategy.run"


def launch(arguments: Sequence[str]) -> int:
    """Start a script.

    Args:
        arguments: Those of `accelerate launch`.

    Returns:
        The exit code: that of the process that failed first, if one has.

    Raises:
        ConfigError: The arguments or the yaml ask for what cannot be had.
    """
    TESTED.require("ZeroAccelerator")
    parsed = parse(arguments)
    record = load_yaml(parsed)
    launched = describe(parsed, record)
    _check(parsed, record, launched)
    ZeroPlugin.of_launch(launched)  # raises what every process would
    completed: Any = _validate_launch_command(parsed)[0]
    _aim_at_runner(completed)
    launched = launched._replace(num_processes=completed.num_processes)
    environment.pass_on(launched)
    if completed.cpu or completed.use_cpu or not torch.accelerator.is_available():
        environment.use_cpu()
    try:
        multi_gpu_launcher(completed)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        print(error)
        return abs(failure.exitcode) or 1
    return 0


def _aim_at_runner(parsed: Namespace) -> None:
    """Let a launch of the script become one of the runner, with the script as its argument."""
    script = [parsed.training_script, *parsed.training_script_args]
    parsed.training_script_args = ["-m", *script] if parsed.module else script
    parsed.training_script, parsed.module = RUNNER, True
    parsed.use_deepspeed, parsed.multi_gpu = False, True
    if not parsed.num_processes:  # on a machine without GPUs, where nobody has said a number
        parsed.num_processes = 1


def _check(parsed: Namespace, record: Any, launched: Launch) -> None:
    faults = []
    kind = getattr(record, "distributed_type", None)
    options = {"use_fsdp": "FSDP", "use_megatron_lm": "Megatron-LM", "tpu": "TPUs"}
    others = {
        DistributedType.FSDP: "FSDP",
        DistributedType.MEGATRON_LM: "Megatron-LM",
        DistributedType.XLA: "TPUs",
    }
    asked = [who for name, who in options.items() if getattr(parsed, name, False)] or [others.get(kind, "")]
    if asked[0]:
        faults.append(
            Fault(
                f"{asked[0]} is asked for ({launched.origin}).",
                "A script is sharded by one library.",
                "Write distributed_type: MULTI_GPU (or DEEPSPEED) with zero_stage in deepspeed_config.",
            )
        )
    if getattr(record, "compute_environment", None) == ComputeEnvironment.AMAZON_SAGEMAKER:
        faults.append(
            Fault(
                f"{launched.origin} is for SageMaker.",
                "Its launcher sends the script elsewhere, without this library's runner.",
                "Use a yaml with compute_environment: LOCAL_MACHINE.",
            )
        )
    if parsed.no_python:
        faults.append(
            Fault(
                "--no_python was given.",
                "The script is run by this library's runner.",
                "Name a Python script.",
            )
        )
    if launched.num_processes is None and getattr(record, "num_processes", 0) == -1:
        faults.append(
            Fault(
                f"{launched.origin} leaves num_processes open.",
                "Somebody must say how many processes train.",
                "Pass --num_processes.",
            )
        )
    faults += settings_of_block(launched.block, launched.origin)[1]
    if faults:
        raise error_of(faults)
