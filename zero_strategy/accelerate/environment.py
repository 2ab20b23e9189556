"""The environment variables that this front end reads and writes, and what its launcher was asked for.

The one place here that knows names of environment variables: Accelerate's, and two of our own. Must not know
Accelerate's classes.

[Note: What a launcher leaves out]
`accelerate launch` hands keys of its yaml to its processes one by one, by environment variables, and only
those that it knows for the kind of launch at hand. Of a `deepspeed_config` block under `distributed_type:
MULTI_GPU` none arrives, nor does `use_cpu`. So a process looks at the command line of the launcher that has
started it, and reads the same yaml. `zero-strategy launch` passes everything on itself.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from zero_strategy.accelerate.launch_block import FILE_KEY, Launch
from zero_strategy.errors import ConfigError
from zero_strategy.log import get_launched_world_size

LAUNCH = "ZERO_STRATEGY_LAUNCH"  # JSON of a `Launch`, from a launcher to its processes
CONFIG = "ZERO_STRATEGY_CONFIG"  # path of a ds_config.json, from the user

_USE_DEEPSPEED, _USE_CPU = "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_CPU"
_OTHERS = {
    _USE_DEEPSPEED: "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
}
# What Accelerate's launcher of DeepSpeed hands over, and the key of its yaml that it comes from.
_OF_DEEPSPEED = {
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": FILE_KEY,
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "zero_stage",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "offload_optimizer_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "offload_param_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "offload_optimizer_nvme_path",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "offload_param_nvme_path",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "zero3_save_16bit_model",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "zero3_init_flag",
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "deepspeed_moe_layer_cls_names",
    "ACCELERATE_GRADIENT_CLIPPING": "gradient_clipping",
}


def find_launch() -> Launch | None:
    """Return what this process was launched for, None if nothing says so.

    That is, in this order: what our launcher has passed on; the file in `ZERO_STRATEGY_CONFIG`; what
    Accelerate's launcher of DeepSpeed has passed on.
    """
    passed = os.environ.get(LAUNCH)
    if passed:
        return Launch.from_json(passed)
    path = os.environ.get(CONFIG)
    if path:
        return Launch({FILE_KEY: path}, CONFIG, None)
    found = {key: os.environ[name] for name, key in _OF_DEEPSPEED.items() if name in os.environ}
    return Launch(found, "ACCELERATE_DEEPSPEED_* variables", None) if found else None


def pass_on(launch: Launch, environment: MutableMapping[str, str] | None = None) -> None:
    """Let `find_launch` find this, here or in processes that get an environment."""
    (os.environ if environment is None else environment)[LAUNCH] = launch.to_json()


def drop_deepspeed() -> bool:
    """Let Accelerate forget that its launcher wanted DeepSpeed; return whether it did."""
    return os.environ.pop(_USE_DEEPSPEED, "false").lower() == "true"


def others_asked_for() -> list[str]:
    """Return which other ways of sharding the environment asks Accelerate for, with the variable."""
    asked = {name: who for name, who in _OTHERS.items() if os.environ.get(name, "false").lower() == "true"}
    return [f"{who} ({name}=true)" for name, who in asked.items()]


def use_cpu() -> None:
    """Let Accelerate train several processes together on CPUs: it asks for this word, and no launcher of
    several processes says it."""
    os.environ[_USE_CPU] = "true"


def asked_precision() -> str:
    """Return the `mixed_precision` of the launcher: "no" where nothing was said."""
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()


def asked_accumulation() -> int | None:
    """Return the micro-batches per step that the launcher was asked for, None if it was not."""
    text = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")
    return int(text) if text.isdigit() else None


def check_num_processes(launch: Launch | None) -> None:
    """Refuse a launch that has started fewer or more processes than it was asked for.

    Raises:
        ConfigError: It has.
    """
    started = get_launched_world_size()
    asked = None if launch is None else launch.num_processes
    if asked is None or asked == started:
        return
    raise ConfigError(
        what=f"{asked} processes were asked for ({launch.origin if launch else ''}), and {started} "
        f"{'was' if started == 1 else 'were'} started.",
        why="With distributed_type NO or MULTI_CPU, or on a machine without GPUs, Accelerate's launcher "
        "starts one process, unless there is mpirun; it would train alone.",
        fix="Write distributed_type: MULTI_GPU in the yaml, which starts as many as asked, on CPUs too; or "
        "use `zero-strategy launch`, which does so whatever the yaml says.",
    )
