"""The blocks of `ds_config.json` as frozen models: the honoured keys, their defaults and their checks.

Each field is an honoured key; the text below it says what the key does, and goes into the documentation and
`zero-strategy explain` as it stands. Used by `config.py`, which has the top level. Must not know where values
come from.
"""

from __future__ import annotations

import math
import sys
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool

from zero_strategy.errors import ConfigError

ONE_UNIT = "one unit"
PARAMETERS = "parameters"
GRADIENTS = "gradients"
# Defaults that no file can spell: they are left out, or null.
UNWRITTEN = (ONE_UNIT, PARAMETERS, GRADIENTS)


def _integral(value: object) -> int:
    # JSON writers spell element counts 5e8, which is a float; a bool is an int to Python but never a count.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("should be a number, such as 5e8 (without quotes)")
    if isinstance(value, float) and not value.is_integer():
        raise ValueError("should be a whole number")
    return int(value)


def _real(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("should be a number (without quotes)")
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        raise ValueError("should be a number below 1.8e308") from None


def _factor(value: object) -> float:
    # What losses and gradients are multiplied by, in fp32: beyond its normal numbers nothing but zeros and
    # infinities would be left of them.
    factor = _real(value)
    if math.isfinite(factor) and factor > 0 and not 2.0**-126 <= factor <= 2.0**127:
        raise ValueError("should be from 2 ** -126 to 2 ** 127, the range of fp32")
    return factor


def _stage(value: object) -> int:
    if isinstance(value, bool) or value not in (0, 1, 2, 3):
        raise ValueError(
            "should be 0 (shards nothing), 1 (optimizer), 2 (and gradients) or 3 (and parameters)"
        )
    return _integral(value)


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise ValueError('should be a list of names, such as ["MoEBlock"]')
    return tuple(value)


def _grad_accum_dtype(value: object) -> object:
    if value not in (PARAMETERS, "fp32"):
        raise ValueError('should be "fp32", or left out: gradients then accumulate in the parameters\' dtype')
    return value


def _prefetch_numel(value: object) -> object:
    if value == ONE_UNIT:
        return value
    if _integral(value) < 0:
        raise ValueError("should be 0 (none) or more")
    return _integral(value)


def _wire_dtype(value: object) -> object:
    known = {"none": GRADIENTS, "bfp16": "bf16"} | {
        name: name for name in (GRADIENTS, "fp32", "fp16", "bf16")
    }
    if not isinstance(value, str) or value not in known:
        raise ValueError('should be "fp32", "bf16" or "fp16", or left out')
    return known[value]


Count = Annotated[int, BeforeValidator(_integral), Field(ge=1)]
CountOrZero = Annotated[int, BeforeValidator(_integral), Field(ge=0)]
Norm = Annotated[float, BeforeValidator(_real), Field(ge=0, allow_inf_nan=False)]
Factor = Annotated[float, BeforeValidator(_factor), Field(gt=0, allow_inf_nan=False)]
FactorOrZero = Annotated[float, BeforeValidator(_factor), Field(ge=0, allow_inf_nan=False)]
# 2 ** 127 is the largest power of two in fp32, in which losses are scaled.
ScalePower = Annotated[int, BeforeValidator(_integral), Field(ge=0, le=127)]
Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
Stage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_stage)]
PrefetchNumel = Annotated[int | Literal["one unit"], BeforeValidator(_prefetch_numel)]
WireDtype = Annotated[Literal["gradients", "fp32", "fp16", "bf16"], BeforeValidator(_wire_dtype)]
GradAccumDtype = Annotated[Literal["parameters", "fp32"], BeforeValidator(_grad_accum_dtype)]


class Block(BaseModel):
    """What all blocks are alike in: nothing can be changed, and nothing unknown is taken."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def __setattr__(self, name: str, value: object) -> None:
        if name in type(self).model_fields:
            raise ConfigError(
                what=f"{name} of {type(self).__name__} cannot be set to {value!r}.",
                why="A config is frozen: the engine was built from what it says.",
                fix=f"Make another one: ZeroConfig.load(config, {name}={value!r}).",
            )
        super().__setattr__(name, value)


class LeafModule(Block):
    """Modules that are one unit at stage 3: nothing below them is unsharded on its own."""

    classes: Names = ()
    """Class names, plain (`MixtralSparseMoeBlock`) or with their module (`pkg.models.MoEBlock`)."""
    names: Names = ()
    """Fully qualified names of modules in the model."""
    name_suffixes: Names = ()
    """Endings of such names, so that one entry serves every layer."""


class ZeroOptimization(Block):
    """The block `zero_optimization`."""

    stage: Stage = 0
    """0 shards nothing, 1 the optimizer state, 2 gradients too, 3 parameters too. Default as in DeepSpeed."""
    # 8 million in fp32 are just below 32 MiB, where the dynamic threshold of glibc ends: mallopt(3),
    # M_MMAP_THRESHOLD, says at most DEFAULT_MMAP_THRESHOLD_MAX = 4 * 1024 * 1024 * sizeof(long) bytes.
    reduce_bucket_size: Count = 8_000_000
    """Elements per bucket: what is reduced, gathered and sharded together. DeepSpeed's default is 5e8; here
    it is smaller, because it bounds what a bucket in flight holds unsharded, and because glibc keeps no block
    above 32 MiB: each would be cleared page by page in every step. A wire of high latency wants more."""
    overlap_comm: StrictBool = True
    """Reductions run while backward goes on, and the gathers after a step (of what stays whole) while the
    next forward does; false: each is waited for at once. The numbers are the same."""
    allgather_bucket_size: Count = 500_000_000
    """Elements all-gathered at a time after a step; a larger bucket travels in parts. Default as in
    DeepSpeed."""
    sub_group_size: CountOrZero = 8_000_000
    """Master elements the optimizer steps at a time, at least one bucket. Bounds the fp32 copies of 16-bit
    gradients that exist during a step, which DeepSpeed's default of 1e9 hardly does."""
    stage3_max_live_parameters: CountOrZero = 1_000_000_000
    """Elements that may be whole or on their way at a time, padding included; nothing is gathered ahead or
    kept beyond it. What modules that run at the same time need is whole all the same; a unit that needs more
    with the root is named in the log. Not counted: persistent parameters, `unsharded_params`. Default as in
    DeepSpeed."""
    stage3_max_reuse_distance: CountOrZero = 0
    """A bucket stays whole if its next use in the last pass's order is fewer elements away; 0: never.
    DeepSpeed's default of 1e9 keeps what it can whole from forward to backward: fewer gathers, and at stage 3
    the memory of stage 2. Here that is for you to choose."""
    stage3_prefetch_bucket_size: PrefetchNumel = "one unit"
    """Elements gathered ahead of use, in the last pass's order; 0: none. Left out: the next unit (a layer),
    whatever its size, so that no more than two and the root are whole. DeepSpeed's default is 5e7."""
    stage3_param_persistence_threshold: CountOrZero = 100_000
    """Parameters with fewer elements stay whole at stage 3. Default as in DeepSpeed."""
    stage3_model_persistence_threshold: CountOrZero = sys.maxsize
    """Elements that stay whole so, all together; the smallest parameters come first. Default as in
    DeepSpeed."""
    stage3_gather_16bit_weights_on_model_save: StrictBool = False
    """Let `engine.save_16bit_model()` gather the weights at stage 3; it is refused there otherwise. Single
    files of Lightning and Fabric and `engine.full_state_dict()` hold whole weights in any case."""
    leaf_module: LeafModule = LeafModule()


class Bf16(Block):
    """The block `bf16`."""

    enabled: StrictBool = False
    """If true, parameters are cast to bf16; the optimizer updates fp32 masters."""
    bf16_master_weights_and_grads: StrictBool = False
    """The optimizer updates bf16 parameters themselves: no fp32 masters, and what is smaller than 1/256 of a
    weight is lost. Needs bf16_optimizer_states, since states have the dtype of what is updated."""
    bf16_optimizer_states: StrictBool = False
    """Optimizer states are in bf16; together with bf16_master_weights_and_grads, never alone."""
    check_grad_overflow: StrictBool = False
    """A step whose gradients are infinite or NaN on any rank is skipped on all, and logged; in fp16 it always
    is. DeepSpeed's default is true; here a NaN reaches the weights, as in torch, unless you ask."""


class Fp16(Block):
    """The block `fp16`: the other keys count wherever trained parameters are in fp16. See `loss_scaler`."""

    enabled: StrictBool = False
    """If true, parameters are cast to fp16, the optimizer updates fp32 masters, and losses are scaled."""
    loss_scale: FactorOrZero = 0.0
    """What losses are multiplied by, for good; 0: it is found out and kept up to date (dynamic)."""
    initial_scale_power: ScalePower = 16
    """The dynamic scale begins at 2 to the power of this. Default as in DeepSpeed, like all in this block."""
    loss_scale_window: Count = 1000
    """Good steps in a row after which the dynamic scale is doubled."""
    hysteresis: Count = 2
    """Overflows until the dynamic scale is halved; it is halved by each one from then on."""
    consecutive_hysteresis: StrictBool = False
    """Any good step restores the hysteresis; else only a doubling does."""
    min_loss_scale: FactorOrZero = 1.0
    """The dynamic scale does not go below; an overflow there is an error. 0 only where the scale is fixed."""


class DataTypes(Block):
    """The block `data_types`."""

    grad_accum_dtype: GradAccumDtype = "parameters"
    """Dtype of reduced gradients: the parameters' own (left out or null), or fp32."""
