"""The config accepts, replaces or refuses every key aloud; `test_config_resolve` has what it resolves to.

Oracle: the blocks that users of DeepSpeed write, written out here, and the table of keys. Tolerance: none,
since nothing here is rounded.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from zero_strategy.config import DEFAULTS, FIELD_KEYS, KNOWN_KEYS, ZeroConfig
from zero_strategy.config_keys import AUTO_HINTS, KEY_RULES, STAGES_OF_KEY
from zero_strategy.errors import ConfigError
from zero_strategy.log import log_once

STAGE_1 = {"zero_optimization": {"stage": 1}}
STAGE_2 = {
    "zero_optimization": {
        "stage": 2,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_bucket_size": 5e8,
        "allgather_bucket_size": 5e8,
    }
}
STAGE_3 = {
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "stage3_prefetch_bucket_size": 5e7,
        "stage3_param_persistence_threshold": 1e5,
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
}
# As Hugging Face documents it, apart from the blocks that are refused.
HF_STAGE_3 = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
HF_VALUES = {
    "fp16.enabled": False,
    "bf16.enabled": True,
    "zero_optimization.reduce_bucket_size": 64 * 64,
    "zero_optimization.stage3_prefetch_bucket_size": 3686,
    "zero_optimization.stage3_param_persistence_threshold": 640,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
}


@pytest.fixture(autouse=True)
def _say_everything_again() -> None:
    log_once.cache_clear()


def refusal(source: object = None, **keywords: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        ZeroConfig.load(source, **keywords)  # type: ignore[arg-type]
    assert caught.value.what and caught.value.why and caught.value.fix
    return caught.value


# -- what loads --


@pytest.mark.parametrize(("block", "stage"), [(STAGE_1, 1), (STAGE_2, 2), (STAGE_3, 3)])
def test_stage_blocks_load_as_written(block: dict[str, object], stage: int, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(block))
    from_file, from_dict = ZeroConfig.load(path), ZeroConfig.load(block)
    assert from_file.stage == from_dict.stage == stage
    assert from_file.to_dict() == from_dict.to_dict()


def test_whole_floats_become_element_counts() -> None:
    zero = ZeroConfig.load(STAGE_2).zero_optimization
    assert zero.reduce_bucket_size == 500_000_000 and isinstance(zero.reduce_bucket_size, int)


def test_comment_lines_and_underscored_keys_are_comments(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(
        '// why this file exists\n{"_comment": "x",\n # more\n "zero_optimization": {"_s": 9, "stage": 2}}'
    )
    assert ZeroConfig.load(path).stage == 2


def test_flat_keywords_equal_nested_blocks() -> None:
    flat = ZeroConfig(stage=3, overlap_comm=False, bf16=True, gradient_clipping=1, offload_optimizer="none")
    nested = ZeroConfig.load(
        {
            "zero_optimization": {"stage": 3, "overlap_comm": False, "offload_optimizer": {"device": "none"}},
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
        }
    )
    assert flat.to_dict() == nested.to_dict()


def test_keywords_beat_the_source_and_none_is_not_given() -> None:
    config = ZeroConfig.load(STAGE_3, stage=2, overlap_comm=None, leaf_module={"names": ["model.moe"]})
    zero = config.zero_optimization
    assert (config.stage, zero.overlap_comm, zero.leaf_module.names) == (2, True, ("model.moe",))


def test_source_dict_is_not_written_to_nor_shared() -> None:
    source = {
        "zero_optimization": {"stage": 3, "leaf_module": {"classes": ["Moe"]}},
        "gradient_clipping": "auto",
    }
    before = copy.deepcopy(source)
    config = ZeroConfig.load(source, bf16=True).resolve(2, auto={"gradient_clipping": 0.5})
    assert source == before
    source["zero_optimization"]["leaf_module"]["classes"].append("Other")  # type: ignore[index]
    assert ZeroConfig.load(config).zero_optimization.leaf_module.classes == ("Moe",)


def test_config_survives_pickling_copying_and_reloading() -> None:
    config = ZeroConfig.load(STAGE_3, train_batch_size=8).resolve(2)
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)
    assert ZeroConfig.load(config.to_dict()).resolve(2).to_dict() == config.to_dict()


def test_config_is_frozen_at_every_level() -> None:
    config = ZeroConfig(stage=3)
    for block, name in ((config, "gradient_clipping"), (config.zero_optimization, "stage")):
        with pytest.raises(ConfigError, match=f"{name} .* cannot be set to 1"):
            setattr(block, name, 1)


def test_leaf_modules_are_found_by_class_name_and_ending() -> None:
    config = ZeroConfig(
        leaf_module={
            "classes": ["torch.nn.modules.linear.Linear", "Conv1d"],
            "names": ["moe"],
            "name_suffixes": [".mlp"],
        }
    )
    assert config.is_leaf(nn.Linear, "") and config.is_leaf(nn.Conv1d, "x")
    assert config.is_leaf(nn.Module, "moe") and config.is_leaf(nn.Module, "layers.3.mlp")
    assert not config.is_leaf(nn.Bilinear, "moe.0")
    assert not ZeroConfig().is_leaf(nn.Linear, "")


def test_keys_of_which_one_replaces_the_other_say_so() -> None:
    (notice,) = ZeroConfig(prescale_gradients=True, gradient_predivide_factor=4.0).notices
    assert "gradient_predivide_factor = 4.0 has no effect" in notice and "prescale_gradients" in notice
    assert ZeroConfig(gradient_predivide_factor=4.0).notices == ()


@pytest.mark.parametrize(("written", "read"), [("bfp16", "bf16"), ("none", "gradients"), (None, "gradients")])
def test_the_dtype_of_communication_is_read_as_deepspeed_spells_it(written: object, read: str) -> None:
    assert ZeroConfig.load({"communication_data_type": written}).communication_data_type == read


def test_null_accumulation_dtype_is_the_parameters_own() -> None:
    assert (
        ZeroConfig.load({"data_types": {"grad_accum_dtype": None}}).data_types.grad_accum_dtype
        == "parameters"
    )
    assert ZeroConfig(data_types={"grad_accum_dtype": "fp32"}).data_types.grad_accum_dtype == "fp32"


# -- every key speaks --


@pytest.mark.parametrize("dotted", sorted(KEY_RULES))
def test_no_known_key_is_ignored_in_silence(dotted: str) -> None:
    asking = {"on": "yes"}  # no rule takes this for "nothing asked"
    if KEY_RULES[dotted].verdict == "refused":
        assert KEY_RULES[dotted].reason in refusal({dotted: asking}).why
    else:
        (notice,) = ZeroConfig.load({dotted: asking}).notices
        assert dotted in notice and KEY_RULES[dotted].reason in notice


ALONE_REFUSED: dict[str, dict[str, object]] = {
    "bf16.bf16_master_weights_and_grads": {"bf16.bf16_optimizer_states": True},
    "bf16.bf16_optimizer_states": {"bf16.bf16_master_weights_and_grads": True},
}


@pytest.mark.parametrize("key", ALONE_REFUSED)
def test_masters_and_states_are_both_in_bf16_or_neither(key: str) -> None:
    error = refusal({key: True})
    assert all(name in error.what for name in ALONE_REFUSED) and "both to true" in error.fix


@pytest.mark.parametrize("dotted", sorted(FIELD_KEYS))
def test_every_honoured_key_is_set_by_its_name(dotted: str) -> None:
    other = {bool: lambda v: not v, int: lambda v: v + 1, float: lambda v: v + 0.5, list: lambda v: ["A"]}
    default = DEFAULTS[dotted]
    spelled = {"parameters": "fp32", "gradients": "fp32", "one unit": 7}
    value = spelled[default] if isinstance(default, str) else other[type(default)](default)
    config = ZeroConfig.load({dotted: value} | ALONE_REFUSED.get(dotted, {}))
    block = config.to_dict()
    for name in dotted.split("."):
        block = block[name]
    assert block == value and block != default


def test_tables_name_only_known_keys() -> None:
    assert AUTO_HINTS.keys() <= KNOWN_KEYS and STAGES_OF_KEY.keys() <= FIELD_KEYS


def test_replaced_key_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "zero_strategy"):
        for _ in range(3):
            ZeroConfig.load({"steps_per_print": 10}).resolve(2)
    (record,) = caplog.records
    assert "steps_per_print = 10" in record.message and "loggers" in record.message


def test_keys_replaced_by_the_same_thing_share_a_line() -> None:
    (notice,) = ZeroConfig.load({"tensorboard": {"enabled": True}, "wandb": {"enabled": True}}).notices
    assert "tensorboard" in notice and "wandb" in notice


def test_keys_of_a_dynamic_scale_have_no_effect_beside_a_fixed_one_and_loading_says_so() -> None:
    (notice,) = ZeroConfig.load({"fp16": {"enabled": True, "loss_scale": 128, "hysteresis": 3}}).notices
    assert "fp16.hysteresis = 3 has no effect" in notice and "fp16.loss_scale = 128" in notice
    assert not ZeroConfig.load({"fp16": {"enabled": True, "loss_scale": 0, "hysteresis": 3}}).notices


@pytest.mark.parametrize(
    "block",
    [
        {
            "zero_optimization": {
                "offload_optimizer": {"device": "none", "pin_memory": True},
                "offload_param": {},
            }
        },
        {"zero_optimization": {"zero_quantized_weights": False, "zero_hpz_partition_size": 1}},
        {"prescale_gradients": False, "gradient_predivide_factor": 1.0, "communication_data_type": None},
        {"tensorboard": {"enabled": False, "job_name": "x"}, "flops_profiler": {"enabled": False}},
        {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}},
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": False}, "amp": {"enabled": False}},
        {"sequence_parallel_size": 1},
    ],
)
def test_block_that_asks_for_nothing_loads_without_a_word(block: dict[str, object]) -> None:
    assert ZeroConfig.load(block).notices == ()


def test_key_without_effect_at_the_stage_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "zero_strategy"):
        config = ZeroConfig(stage=2, stage3_prefetch_bucket_size=7)
    assert config.notices == ("zero_optimization.stage3_prefetch_bucket_size = 7 has no effect at stage 2.",)
    assert [record.message for record in caplog.records] == [*config.notices]
    assert ZeroConfig(stage=3, stage3_prefetch_bucket_size=7).notices == ()


# -- what is refused --


@pytest.mark.parametrize(
    ("source", "unknown", "meant"),
    [
        ({"gradient_clipp1ng": 1}, "gradient_clipp1ng", "gradient_clipping"),
        ({"zero_optimisation": {"stage": 2, "x": 1}}, "zero_optimisation", "zero_optimization"),
        (
            {"zero_optimization": {"stage3_prefetch_bukket_size": 1}},
            "zero_optimization.stage3_prefetch_bukket_size",
            "zero_optimization.stage3_prefetch_bucket_size",
        ),
        (
            {"zero_optimization": {"param_persistence_threshold": 1}},
            "zero_optimization.param_persistence_threshold",
            "zero_optimization.stage3_param_persistence_threshold",
        ),
        ({"stage": 3}, "stage", "zero_optimization.stage"),
        ({"bf16": {"enable": True}}, "bf16.enable", "bf16.enabled"),
        ({"contiguous_gradients": True}, "contiguous_gradients", "zero_optimization.contiguous_gradients"),
        ({"offload_optimizer": "cpu"}, "offload_optimizer", "zero_optimization.offload_optimizer"),
        ({"comment": "x"}, "comment", None),
    ],
)
def test_unknown_key_is_refused_with_the_nearest_known(
    source: object, unknown: str, meant: str | None
) -> None:
    error = refusal(source)
    assert f"Unknown config key {unknown} " in error.what
    if meant is not None:
        assert error.fix == f"Did you mean {meant}?"


def test_misspelt_keyword_is_refused_too() -> None:
    error = refusal(overlap_com=False)
    assert "from keyword" in error.what and "zero_optimization.overlap_comm?" in error.fix


@pytest.mark.parametrize("stage", [True, 4, -1, "3", 2.5, [3]])
def test_unknown_stage_is_refused_with_the_choices(stage: object) -> None:
    error = refusal(stage=stage)
    assert f"zero_optimization.stage = {stage!r}" in error.what
    assert all(f"{choice} (" in error.what for choice in (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("source", "dotted"),
    [
        ({"zero_optimization": {"reduce_bucket_size": "5e8"}}, "zero_optimization.reduce_bucket_size"),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, "zero_optimization.reduce_bucket_size"),
        ({"zero_optimization": {"sub_group_size": 1.5}}, "zero_optimization.sub_group_size"),
        ({"zero_optimization": {"sub_group_size": float("inf")}}, "zero_optimization.sub_group_size"),
        ({"zero_optimization": {"overlap_comm": "true"}}, "zero_optimization.overlap_comm"),
        ({"zero_optimization": {"leaf_module": {"classes": "Moe"}}}, "zero_optimization.leaf_module.classes"),
        ({"gradient_clipping": -1}, "gradient_clipping"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping"),
        ({"gradient_clipping": {"a": 1}}, "gradient_clipping"),
        ({"gradient_clipping": True}, "gradient_clipping"),
        ({"train_batch_size": True}, "train_batch_size"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype"),
        (
            {"zero_optimization": {"stage3_prefetch_bucket_size": -1}},
            "zero_optimization.stage3_prefetch_bucket_size",
        ),
        (
            {"zero_optimization": {"stage3_prefetch_bucket_size": "5e7"}},
            "zero_optimization.stage3_prefetch_bucket_size",
        ),
        (
            {"zero_optimization": {"stage3_max_live_parameters": "1e9"}},
            "zero_optimization.stage3_max_live_parameters",
        ),
        ({"communication_data_type": "fp8"}, "communication_data_type"),
        ({"communication_data_type": 16}, "communication_data_type"),
        ({"gradient_predivide_factor": 0}, "gradient_predivide_factor"),
        ({"prescale_gradients": "yes"}, "prescale_gradients"),
    ],
)
def test_wrong_value_is_refused_with_its_dotted_key_and_origin(source: object, dotted: str) -> None:
    error = refusal(source)
    assert (
        error.what.startswith(f"{dotted} = ") and "(from config dict)" in error.what and dotted in error.fix
    )


@pytest.mark.parametrize("key", ["offload_optimizer", "offload_param"])
@pytest.mark.parametrize("value", ["cpu", {"device": "nvme", "nvme_path": "/local_nvme"}])
def test_offload_is_refused_until_it_is_built(key: str, value: object) -> None:
    error = refusal(stage=3, **{key: value})
    assert f"zero_optimization.{key}" in error.what and "never ignored" in error.why


def test_two_precisions_are_refused_in_one_message_with_both_sources(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('{"fp16": {"enabled": true}}')
    assert ZeroConfig.load(path).fp16.enabled and not ZeroConfig.load(path).bf16.enabled
    with pytest.raises(ConfigError) as caught:
        ZeroConfig.load(path, bf16=True)
    assert f"fp16.enabled = true (from {path})" in caught.value.what
    assert "bf16.enabled = true (from keyword)" in caught.value.what
    with pytest.raises(ConfigError, match="two precisions"):
        ZeroConfig.load(HF_STAGE_3).resolve(2, auto=HF_VALUES | {"fp16.enabled": True})


def test_what_fp16_cannot_do_is_refused_by_reason() -> None:
    assert "does not change what is passed" in refusal(fp16={"enabled": True, "auto_cast": True}).why
    error = refusal(fp16={"enabled": True, "fp16_master_weights_and_grads": True})
    assert "1/2048" in error.why
    error = refusal(fp16={"enabled": True, "initial_scale_power": 3, "min_loss_scale": 16})
    assert "fp16.min_loss_scale = 16" in error.what and "2 ** 3 = 8" in error.what
    error = refusal(fp16={"enabled": True, "min_loss_scale": 0})
    assert "fp16.min_loss_scale = 0 (from keyword)" in error.what and "NaN" in error.why
    assert ZeroConfig(fp16={"enabled": True, "loss_scale": 128, "min_loss_scale": 0}).fp16.loss_scale == 128
    assert "fp16.loss_scale = -1" in refusal(fp16={"enabled": True, "loss_scale": -1}).what


def test_all_faults_are_reported_in_one_error() -> None:
    error = refusal(
        {"zero_optimization": {"stage": 7, "cpu_offload": True}, "unheard": 1}, reduce_bucket_size="x"
    )
    for named in (
        "4 faults",
        "stage = 7",
        "cpu_offload",
        "unheard",
        "reduce_bucket_size = 'x' (from keyword)",
    ):
        assert named in error.what
    assert "(4)" in error.why and "(4)" in error.fix


def test_same_key_given_twice_is_refused() -> None:
    assert "3 and 2" in refusal(stage=3, zero_optimization={"stage": 2}).what.replace("2 and 3", "3 and 2")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"bf16": }', "line 1"),
        ('{"bf16": {},\n "bf16": {}}', "twice"),
        ("[1]", "holds a list"),
        (None, "cannot be read"),
    ],
)
def test_unusable_file_is_refused_with_its_path_or_key(
    content: str | None, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "ds_config.json"
    if content is not None:
        path.write_text(content)
    assert said in refusal(path).what


def test_other_sources_are_refused() -> None:
    assert "int" in refusal(3).what
    assert "not a block" in refusal({"zero_optimization": True}).what
    assert "key 3" in refusal({3: 1}).what


class Uncopyable:
    def __deepcopy__(self, memo: object) -> object:
        raise TypeError("cannot be copied")


def test_values_that_json_has_no_spelling_for_are_refused_by_key_and_type() -> None:
    for key in ("zero_optimization.stage", "fp16.enabled", "train_batch_size", "comet", "amp"):
        for value in (torch.tensor([1, 2]), Uncopyable(), {1}, b"1", [torch.tensor([1, 2])]):
            inner = value[0] if isinstance(value, list) else value
            error = refusal({key: value})
            assert key in error.what and type(inner).__name__ in error.what


def test_numbers_that_no_float_or_fp32_holds_are_refused_by_key() -> None:
    for key in ("fp16.loss_scale", "fp16.min_loss_scale", "gradient_clipping", "gradient_predivide_factor"):
        for value in (10**400, -(10**400)):
            assert key in refusal({key: value}).what
    for key in ("fp16.loss_scale", "fp16.min_loss_scale", "gradient_predivide_factor"):
        for value in (1e300, 1e-300):
            assert "2 ** 127" in refusal({key: value}).what


def test_a_front_ends_batch_number_that_is_no_count_is_refused_and_not_rounded() -> None:
    key = "train_micro_batch_size_per_gpu"
    for value in (2.5, True, math.inf, math.nan, "3"):
        with pytest.raises(ConfigError) as info:
            ZeroConfig.load({key: "auto"}).resolve(2, auto={key: value})
        assert key in info.value.what
    for world_size in (2.5, True, "2", None):
        with pytest.raises(ConfigError):
            ZeroConfig().resolve(world_size)  # type: ignore[arg-type]


def test_a_path_that_is_none_is_refused() -> None:
    assert "cannot be read" in refusal("\0").what
