"""`ZeroPlugin`: what `ZeroAccelerator` is to shard, and how. It knows neither models nor the engine.

The blocks `optimizer` and `scheduler` of a ds_config.json are taken out here: the engine's config refuses
them, while Accelerate's scripts may stand `DummyOptim` and `DummyScheduler` in for what they describe.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from zero_strategy.accelerate import environment
from zero_strategy.accelerate.launch_block import Launch, settings_of_block
from zero_strategy.accelerate.launcher import find_launcher
from zero_strategy.config import ZeroConfig, settings_of
from zero_strategy.config_source import Settings, error_of
from zero_strategy.errors import ConfigError
from zero_strategy.front_ends.settings import load_config
from zero_strategy.materialize import InitFn

STATE_DICT_TYPES = ("full", "sharded")
_TAKEN_OUT = ("optimizer", "scheduler")


class ZeroPlugin:
    """What is to be sharded.

    Example:
        accelerator = ZeroAccelerator(zero_plugin=ZeroPlugin(stage=3))
        accelerator = ZeroAccelerator(zero_plugin=ZeroPlugin(config="ds_config.json", overlap_comm=False))

    Without one, `ZeroAccelerator` takes what its launcher was asked for, and stage 3 where nobody has asked.

    Attributes:
        config: As the user wrote it, not resolved.
        state_dict_type: What `save_state` writes of models and optimizers.
        param_init_fn: Fills what is on meta.
        gathers_to_generate: Whether a Trainer that generates makes the model whole for all of an evaluation.
        optimizer: The block `optimizer` of the config, with dotted keys below it; empty if there is none.
        scheduler: The block `scheduler`, likewise.
    """

    def __init__(
        self,
        stage: int | None = None,
        config: ZeroConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        *,
        state_dict_type: str = "full",
        param_init_fn: InitFn | None = None,
        gathers_to_generate: bool = False,
        **keywords: Any,
    ) -> None:
        """Read a config.

        Args:
            stage: 0, 1, 2 or 3. By default what `config` says, else 3.
            config: A `ZeroConfig`, a dict or the path of a JSON file in the schema of `ds_config.json`.
            state_dict_type: "full": `save_state` writes whole weights and states from rank 0, the files of
                plain Accelerate. "sharded": a folder for each model, every rank its part. `load_state`
                takes either.
            param_init_fn: Fills modules on meta that have no `reset_parameters`.
            gathers_to_generate: At stage 3, `Seq2SeqTrainer` with `predict_with_generate` makes the model
                whole once for an evaluation, instead of block by block for every token: fewer messages, and
                memory for the whole model.
            **keywords: Settings of `ZeroConfig`, which beat `config`.

        Raises:
            ConfigError: A setting is unknown or cannot be honoured.
        """
        if state_dict_type not in STATE_DICT_TYPES:
            raise ConfigError(
                what=f"state_dict_type={state_dict_type!r} is not known.",
                why="'full' writes whole weights and states, 'sharded' folders with every rank's part.",
                fix=f"Use one of {', '.join(map(repr, STATE_DICT_TYPES))}.",
            )
        settings = settings_of(config)
        blocks = {name: _take(settings, name) for name in _TAKEN_OUT}
        self.config = load_config(stage, ZeroConfig.from_settings(settings), keywords)
        self.optimizer, self.scheduler = blocks["optimizer"], blocks["scheduler"]
        self.state_dict_type = state_dict_type
        self.param_init_fn = param_init_fn
        self.gathers_to_generate = gathers_to_generate

    @classmethod
    def of_launch(cls, launch: Launch) -> ZeroPlugin:
        """Return what a launcher was asked for.

        Raises:
            ConfigError: With every fault of the launcher's block and of its config file at once.
        """
        settings, faults = settings_of_block(launch.block, launch.origin)
        if faults:
            raise error_of(faults)
        return cls.of_settings(settings)

    @classmethod
    def of_settings(cls, settings: Settings) -> ZeroPlugin:
        """Return what settings say, wherever they come from; stage 3 if they name none.

        Raises:
            ConfigError: A setting is unknown or cannot be honoured.
        """
        settings = dict(settings)
        blocks = {name: _take(settings, name) for name in _TAKEN_OUT}
        plugin = cls(config=ZeroConfig.from_settings(settings))
        plugin.optimizer, plugin.scheduler = blocks["optimizer"], blocks["scheduler"]
        return plugin

    @classmethod
    def from_environment(cls) -> ZeroPlugin:
        """Return what the launcher of this process was asked for; stage 3 if nobody has asked.

        Raises:
            ConfigError: It was asked for what cannot be had, or for another number of processes.
        """
        launch = environment.find_launch() or find_launcher()
        environment.check_num_processes(launch)
        return cls() if launch is None else cls.of_launch(launch)


def _take(settings: Settings, name: str) -> Settings:
    """Take a block out of settings and return it, by what comes after the name."""
    keys = [key for key in settings if key == name or key.startswith(f"{name}.")]
    return {key.removeprefix(name).removeprefix("."): settings.pop(key) for key in keys}
