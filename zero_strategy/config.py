"""The configuration: the `ds_config.json` schema as frozen models.

Owns the top level of the schema and the step from what a user wrote to what the engine reads: `load` accepts,
`resolve` completes. Called by the engine and every front end. The honoured keys are the fields, here and in
`config_blocks.py`; the others stand in `config_keys.py`, reading in `config_source.py`. Must not know models,
optimizers or process groups; the world size is passed in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, PrivateAttr, StrictBool, ValidationError
from pydantic.fields import FieldInfo

from zero_strategy.config_blocks import (
    UNWRITTEN,
    Bf16,
    Block,
    Count,
    DataTypes,
    Factor,
    Fp16,
    Norm,
    WireDtype,
    ZeroOptimization,
)
from zero_strategy.config_keys import AUTO, AUTO_HINTS, KEY_RULES, STAGES_OF_KEY
from zero_strategy.config_source import (
    BATCH_KEYS,
    Fault,
    Setting,
    Settings,
    check_keys,
    complete_batch_numbers,
    error_of,
    flatten,
    nest,
    read_file,
    read_keywords,
)
from zero_strategy.errors import ConfigError
from zero_strategy.log import log_once


class Resolution(NamedTuple):
    """Where a config came from and what is known about it besides its fields."""

    settings: Settings  # what was written, dotted; the source of every rebuild
    auto_keys: tuple[str, ...]  # dotted keys still "auto"; their fields hold defaults
    notices: tuple[str, ...]  # replaced keys, keys without effect
    known_batch_keys: frozenset[str]  # batch numbers given or derived; the others are 1 because nobody said
    world_size: int  # 0 before resolve()


class Examination(NamedTuple):
    """What there is to say about settings."""

    faults: list[Fault]  # if there is one, they do not load
    idle: dict[str, str]  # dotted key -> why it has no effect; empty while a value is not valid


class ZeroConfig(Block):
    """Everything a user can set, with the names of `ds_config.json`.

    `ZeroConfig.load("ds_config.json", stage=3)` reads a file, a dict or another config and lets keywords beat
    it; `ZeroConfig(stage=3, bf16=True)` takes keywords alone. Keys of `zero_optimization` may be flat
    keywords. The engine works with `resolve(world_size)`.

    The surprise: while a key is listed in `auto_keys`, its field holds the default.

    Raises:
        ConfigError: With every fault of the config at once.
    """

    zero_optimization: ZeroOptimization = ZeroOptimization()
    bf16: Bf16 = Bf16()
    fp16: Fp16 = Fp16()
    data_types: DataTypes = DataTypes()
    gradient_clipping: Norm = 0.0
    """Largest global gradient norm, applied in `step()` if the caller did not clip; 0 is off. DeepSpeed 0.19
    clips at 1.0 where the key is left out; here nothing is clipped unasked."""
    communication_data_type: WireDtype = "gradients"
    """Dtype in which gradients travel: fp32, bf16 or fp16; left out: the one they have. The sum over ranks is
    taken in fp32 all the same. In fp16 what exceeds 65504 becomes infinite, which only the loss scale of fp16
    parameters finds."""
    prescale_gradients: StrictBool = False
    """Gradients are divided by the number of ranks before they travel, not after the sum. The same bits where
    that is a power of two (and nothing underflows)."""
    gradient_predivide_factor: Factor = 1.0
    """Gradients are divided by this before they travel, and the sum by what is left of the number of ranks.
    The same bits for powers of two."""
    train_batch_size: Count = 1
    """Samples per optimizer step over all ranks: the product of the next two and the number of ranks. One of
    the three that is missing is derived, and the product is checked. Lightning's Trainer checks all three
    against its loader, Accelerate takes the number of steps from here. The engine does nothing by them:
    whoever runs the loop counts micro-batches (`no_sync`)."""
    train_micro_batch_size_per_gpu: Count = 1
    """Samples per forward on one rank. See `train_batch_size`."""
    gradient_accumulation_steps: Count = 1
    """Micro-batches per optimizer step. See `train_batch_size`."""
    accumulate_whole_gradients: StrictBool = False
    """Own key. Under `no_sync` stages 2-3 keep whole gradients too: fewer messages and DDP's very order of
    additions, for the memory of one whole gradient per parameter."""
    broadcast_buffers: StrictBool = True
    """Own key. Buffers are made equal from rank 0 before a synchronised forward, as DDP does."""

    _resolution: Resolution = PrivateAttr()

    # -- construction --

    def __init__(self, **keywords: object) -> None:
        self._build(read_keywords(keywords, KNOWN_KEYS))

    @classmethod
    def load(
        cls,
        source: str | os.PathLike[str] | Mapping[str, object] | ZeroConfig | None = None,
        **keywords: object,
    ) -> ZeroConfig:
        """Read a config.

        Args:
            source: Path of a `ds_config.json`, a dict of the same shape (it is not written to), another
                config (what its user wrote is taken, not what was derived), or None.
            **keywords: Settings that beat those of `source`; None means not given.

        Returns:
            The config, not resolved.

        Raises:
            ConfigError: With every fault at once: unknown, refused, mistyped or contradicting settings.
        """
        settings = settings_of(source)
        config = cls.__new__(cls)
        config._build(settings | read_keywords(keywords, KNOWN_KEYS))
        return config

    @classmethod
    def from_settings(cls, settings: Settings) -> ZeroConfig:
        """Build a config from settings with their origins, for front ends that have taken some out.

        Raises:
            ConfigError: With every fault at once.
        """
        config = cls.__new__(cls)
        config._build(dict(settings))
        return config

    def resolve(self, world_size: int, auto: Mapping[str, object] | None = None) -> ZeroConfig:
        """Complete the config for a run: fill what is "auto", derive and check the batch numbers.

        Derived: the batch number that is missing, by train_batch_size = train_micro_batch_size_per_gpu x
        gradient_accumulation_steps x world size; with one of them given alone, gradient_accumulation_steps is
        1. May be called again, also on the result and with another world size.

        Args:
            world_size: Number of data-parallel ranks.
            auto: Dotted keys and the values a front end has for them; used only where the config says "auto".

        Returns:
            A config without "auto".

        Raises:
            ConfigError: A key is still "auto", a filled-in value is faulty, or the batch numbers do not fit.
        """
        if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
            raise ConfigError(
                what=f"The config cannot be resolved for {world_size!r} ranks.",
                why="The world size counts the ranks that share the batch.",
                fix="Pass 1 or more.",
            )
        settings = dict(self._resolution.settings)
        for dotted in self._resolution.auto_keys:
            if auto is not None and auto.get(dotted) is not None:
                settings[dotted] = Setting(auto[dotted], "front end")
        config = type(self).__new__(type(self))
        config._build(settings, world_size)
        return config

    def _build(self, settings: Settings, world_size: int = 0) -> None:
        examination = self._examine(settings, world_size)
        if examination.faults:
            raise error_of(examination.faults)
        for notice in self.notices:
            log_once(notice)

    def _examine(self, settings: Settings, world_size: int) -> Examination:
        """Fill this new object from settings, completely if there is a world size; tell what is wrong."""
        checked = check_keys(settings, FIELD_KEYS)
        faults = list(checked.faults)
        values = {dotted: setting.value for dotted, setting in checked.honoured.items()}
        if world_size and checked.auto_keys:
            faults.append(_left_auto_fault(checked.auto_keys))
        elif world_size and not faults:
            faults += complete_batch_numbers(values, world_size)
        try:
            super().__init__(**nest(values))
        except ValidationError as error:
            faults += [_fault_of(item["loc"], item["msg"], checked.honoured) for item in error.errors()]
            return Examination(faults, {})
        faults += _contradictions(self, checked.honoured)
        idle = self._keys_without_effect(values)
        notices = (
            *checked.notices,
            *(f"{dotted} = {self._values()[dotted]!r} {why}." for dotted, why in idle.items()),
        )
        known_batch_keys = frozenset(BATCH_KEYS) & values.keys()
        self._resolution = Resolution(settings, checked.auto_keys, notices, known_batch_keys, world_size)
        return Examination(faults, idle)

    def _keys_without_effect(self, written: Mapping[str, object]) -> dict[str, str]:
        """Return why keys that say something else than their defaults change nothing, by key."""
        values = self._values()
        changed = [dotted for dotted in written if values[dotted] != DEFAULTS[dotted]]
        idle = {
            dotted: f"has no effect at stage {self.stage}"
            for dotted in changed
            if self.stage not in STAGES_OF_KEY.get(dotted, (0, 1, 2, 3))
        }
        if self.fp16.loss_scale:
            fixed = f"has no effect: fp16.loss_scale = {self.fp16.loss_scale:g} is fixed"
            idle |= {dotted: fixed for dotted in changed if dotted in DYNAMIC_SCALE_KEYS}
        if self.prescale_gradients and "gradient_predivide_factor" in changed:
            idle["gradient_predivide_factor"] = (
                "has no effect: prescale_gradients divides by all ranks at once"
            )
        return idle

    # -- queries --

    @property
    def stage(self) -> Literal[0, 1, 2, 3]:
        """The ZeRO stage."""
        return self.zero_optimization.stage

    @property
    def shards_params(self) -> bool:
        """Whether parameters are sharded, so that no rank holds the model whole."""
        return self.stage == 3

    def is_leaf(self, module_class: type, fqn: str) -> bool:
        """Return whether the user declared a module of this class or name one unit (`leaf_module`)."""
        leaf, qualified_name = self.zero_optimization.leaf_module, module_class.__qualname__
        is_named = fqn in leaf.names or (bool(leaf.name_suffixes) and fqn.endswith(leaf.name_suffixes))
        return is_named or not {qualified_name, f"{module_class.__module__}.{qualified_name}"}.isdisjoint(
            leaf.classes
        )

    @property
    def auto_keys(self) -> tuple[str, ...]:
        """Dotted keys that are "auto" and wait for a front end's value."""
        return self._resolution.auto_keys

    @property
    def notices(self) -> tuple[str, ...]:
        """What was logged while loading: replaced keys and what replaces them, keys without effect."""
        return self._resolution.notices

    def is_given(self, dotted: str) -> bool:
        """Return whether somebody set this dotted key (a default or a derived value is not given)."""
        return dotted in self._resolution.settings

    def origin_of(self, dotted: str) -> str:
        """Return where a dotted key was set: a file's path, "keyword" ...; "default" if nobody has set it."""
        setting = self._resolution.settings.get(dotted)
        return "default" if setting is None else setting.origin

    def to_dict(self) -> dict[str, Any]:
        """Return the honoured settings as a `ds_config.json` dict that loads again to the same settings.

        Left out are batch numbers nobody gave and nothing derives, and a default that the schema has as null.
        """
        values = self._values() | dict.fromkeys(self.auto_keys, AUTO)
        absent = set(BATCH_KEYS) - self._resolution.known_batch_keys - {*self.auto_keys}
        absent |= {dotted for dotted, value in values.items() if value in UNWRITTEN}
        return nest({dotted: value for dotted, value in values.items() if dotted not in absent})

    def describe(self) -> str:
        """Return the config as text, a line per setting with its origin, to be logged once."""
        world_size, settings = self._resolution.world_size, self._resolution.settings
        lines = [f"zero_strategy config, world size {world_size}:" if world_size else "zero_strategy config:"]
        for dotted, value in self._values().items():
            is_derived = dotted in self._resolution.known_batch_keys
            origin = settings[dotted].origin if dotted in settings else "derived" if is_derived else "default"
            shown = AUTO if dotted in self.auto_keys else json.dumps(value)
            if origin != "default" or dotted not in BATCH_KEYS:
                lines.append(f"  {dotted} = {shown}  ({origin})")
        return "\n".join([*lines, *(f"  {notice}" for notice in self.notices)])

    def _values(self) -> dict[str, object]:
        dump = flatten(self.model_dump(mode="json"), "")
        return {dotted: setting.value for dotted, setting in dump.items()}


def settings_of(source: Any) -> Settings:
    """Return what a source says, with where it stands: see `ZeroConfig.load`.

    Raises:
        ConfigError: It is nothing that a config can be read from, or a file that cannot be read.
    """
    if source is None:
        return {}
    if isinstance(source, ZeroConfig):
        return dict(source._resolution.settings)
    if isinstance(source, Mapping):
        return flatten(source, "config dict")
    if isinstance(source, (str, os.PathLike)):
        return read_file(source)
    raise ConfigError(
        what=f"A config cannot be read from a {type(source).__name__}.",
        why="A config is the path of a ds_config.json, a dict, another ZeroConfig, or keywords.",
        fix='Pass "ds_config.json" or {"zero_optimization": {"stage": 2}}, for example.',
    )


# -- helpers --


def _fields(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    fields: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        block = field.annotation
        if isinstance(block, type) and issubclass(block, BaseModel):
            fields |= _fields(block, f"{prefix}{name}.")
        else:
            fields[prefix + name] = field
    return fields


FIELDS = _fields(ZeroConfig)  # dotted honoured key -> its default and what it does
# As `_values` spells them.
DEFAULTS: dict[str, object] = {
    dotted: list(field.default) if field.default == () else field.default for dotted, field in FIELDS.items()
}
FIELD_KEYS = frozenset(DEFAULTS)
DYNAMIC_SCALE_KEYS = frozenset(f"fp16.{name}" for name in Fp16.model_fields) - {
    "fp16.enabled",
    "fp16.loss_scale",
}
KNOWN_KEYS = FIELD_KEYS | KEY_RULES.keys()


def _contradictions(config: ZeroConfig, settings: Settings) -> list[Fault]:
    """Return what two keys that are valid each say against one another."""
    fp16, faults = config.fp16, []
    if fp16.enabled and config.bf16.enabled:
        said = " and ".join(
            f"{key} = true (from {settings[key].origin})" for key in ("fp16.enabled", "bf16.enabled")
        )
        faults.append(
            Fault(
                f"The config asks for two precisions: {said}.",
                "A parameter is stored in one of them.",
                "Set one to false, or leave it out. bf16 needs no loss scale; fp16 has three more bits.",
            )
        )
    if config.bf16.bf16_master_weights_and_grads != config.bf16.bf16_optimizer_states:
        faults.append(
            Fault(
                f"bf16.bf16_master_weights_and_grads = {config.bf16.bf16_master_weights_and_grads} and "
                f"bf16.bf16_optimizer_states = {config.bf16.bf16_optimizer_states} contradict one another.",
                "Optimizer states have the dtype of the weights that are updated.",
                "Set both to true (8 bytes less a parameter, with Adam), or both to false.",
            )
        )
    if not fp16.loss_scale and not fp16.min_loss_scale:
        faults.append(
            Fault(
                f"fp16.min_loss_scale = 0 (from {settings['fp16.min_loss_scale'].origin}) leaves the dynamic "
                f"loss scale without an end.",
                "Gradients that are NaN would halve it for ever, and every step would be skipped.",
                "Set it above 0, such as 1, its default; or fix the scale by fp16.loss_scale.",
                "fp16.min_loss_scale",
            )
        )
    first = 2.0**fp16.initial_scale_power
    if not fp16.loss_scale and first < fp16.min_loss_scale:
        faults.append(
            Fault(
                f"fp16.min_loss_scale = {fp16.min_loss_scale:g} is above the first scale, 2 ** "
                f"{fp16.initial_scale_power} = {first:g}.",
                "The dynamic scale begins at 2 ** fp16.initial_scale_power and never goes below the other.",
                "Raise fp16.initial_scale_power, or lower fp16.min_loss_scale.",
            )
        )
    return faults


def examine(settings: Settings, world_size: int = 0) -> Examination:
    """Find out what is wrong with settings, and what has no effect, without raising.

    Args:
        settings: As read.
        world_size: Number of ranks, to check the batch numbers with; 0: they are not checked.

    Returns:
        Everything that was found.
    """
    return ZeroConfig.__new__(ZeroConfig)._examine(settings, world_size)


def _left_auto_fault(auto_keys: tuple[str, ...]) -> Fault:
    return Fault(
        f'Still "auto": {", ".join(auto_keys)}.',
        'Only a front end has values for "auto", and none was given for these.',
        "Write " + "; ".join(f"{key}: {AUTO_HINTS[key]}" for key in auto_keys) + ".",
    )


def _fault_of(location: tuple[int | str, ...], message: str, settings: Settings) -> Fault:
    """Turn one of pydantic's errors into a fault with the dotted key, the value and its origin."""
    dotted = ".".join(str(part) for part in location)
    value, origin = settings[dotted]
    said = message.removeprefix("Value error, ").removeprefix("Input ")
    return Fault(
        f"{dotted} = {value!r} (from {origin}) is not valid: it {said}.",
        "The key does not take a value of this type or range.",
        f"Correct it, or remove {dotted} to get its default ({json.dumps(DEFAULTS[dotted])}).",
        dotted,
    )
