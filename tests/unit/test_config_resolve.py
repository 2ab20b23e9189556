"""A config resolves to something complete: batch numbers, values of the front end, where each comes from.

Oracle: the batch rule total = micro x steps x world size, and values written out here. Tolerance: none, since
nothing here is rounded.
"""

from __future__ import annotations

import json

import pytest

from tests.unit.test_config import HF_STAGE_3, HF_VALUES, STAGE_3, refusal
from zero_strategy.config import ZeroConfig
from zero_strategy.errors import ConfigError


@pytest.mark.parametrize(
    ("total", "micro", "steps", "resolved"),
    [
        (24, 2, 4, (24, 2, 4)),
        (24, 2, None, (24, 2, 4)),
        (24, None, 4, (24, 2, 4)),
        (None, 2, 4, (24, 2, 4)),
        (24, None, None, (24, 8, 1)),
        (None, 2, None, (6, 2, 1)),
    ],
)
def test_missing_batch_numbers_are_derived(
    total: int | None, micro: int | None, steps: int | None, resolved: tuple[int, int, int]
) -> None:
    config = ZeroConfig(
        train_batch_size=total, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=steps
    ).resolve(3)
    numbers = (
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
    )
    assert numbers == resolved


def test_derived_batch_numbers_follow_the_world_size() -> None:
    config = ZeroConfig(train_micro_batch_size_per_gpu=2).resolve(2)
    assert config.train_batch_size == 4 and config.resolve(8).train_batch_size == 16
    assert ZeroConfig.load(config, train_micro_batch_size_per_gpu=5).resolve(2).train_batch_size == 10


def test_batch_numbers_that_do_not_multiply_are_refused_with_the_way_out() -> None:
    config = ZeroConfig(train_batch_size=32, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError) as caught:
        config.resolve(2)
    for said in ("world size 2", "= 32", "= 4", "= 2"):
        assert said in caught.value.what
    assert "makes 16, not 32" in caught.value.why
    assert (
        "train_batch_size to 16" in caught.value.fix
        and "gradient_accumulation_steps to 4" in caught.value.fix
    )
    with pytest.raises(ConfigError, match="needs a multiple of 12, not 32"):
        ZeroConfig(train_batch_size=32, train_micro_batch_size_per_gpu=4).resolve(3)


def test_batch_numbers_nobody_gave_stay_out_of_dump_and_description() -> None:
    config = ZeroConfig(stage=1).resolve(2)
    assert "train_batch_size" not in config.to_dict() and "train_" not in config.describe()


def test_auto_is_filled_by_the_front_end_and_filling_is_repeatable() -> None:
    config = ZeroConfig.load(HF_STAGE_3)
    assert set(config.auto_keys) == HF_VALUES.keys()
    for _ in range(2):
        resolved = config.resolve(2, auto=HF_VALUES | {"zero_optimization.stage": 1})
        assert resolved.auto_keys == () and '"auto"' not in json.dumps(resolved.to_dict())
        assert resolved.bf16.enabled and resolved.gradient_clipping == 1.0 and resolved.stage == 3
        assert resolved.zero_optimization.reduce_bucket_size == 4096
    assert resolved.resolve(2).to_dict() == resolved.to_dict()
    assert config.resolve(2, auto=HF_VALUES | {"gradient_clipping": 0.5}).gradient_clipping == 0.5
    assert ZeroConfig.load(config).auto_keys == config.auto_keys


def test_auto_that_is_left_is_refused_with_what_to_write() -> None:
    with pytest.raises(ConfigError) as caught:
        ZeroConfig.load(HF_STAGE_3).resolve(
            2, auto={key: HF_VALUES[key] for key in HF_VALUES if "16." not in key}
        )
    assert caught.value.what == 'Still "auto": fp16.enabled, bf16.enabled.'
    assert "bf16.enabled: true or false" in caught.value.fix


def test_auto_is_refused_where_no_front_end_resolves_it() -> None:
    error = refusal({"zero_optimization": {"stage": "auto", "zero_hpz_partition_size": "auto"}})
    assert "zero_optimization.stage" in error.what and "zero_hpz_partition_size" in error.what
    for name in ("stage3_max_live_parameters", "stage3_max_reuse_distance"):
        error = refusal({"zero_optimization": {"stage": 3, name: "auto"}})
        assert f"zero_optimization.{name} = 'auto' (from config dict) stays unresolved" in error.what
        assert "No front end" in error.why and "remove the key, which gives it its default" in error.fix


def test_value_from_a_front_end_is_checked_like_any_other() -> None:
    with pytest.raises(ConfigError, match=r"fp16\.enabled = 7 \(from front end\) is not valid"):
        ZeroConfig.load(HF_STAGE_3).resolve(2, auto=HF_VALUES | {"fp16.enabled": 7})


def test_resolved_config_holds_no_none_and_no_auto() -> None:
    for config in (ZeroConfig(), ZeroConfig.load(STAGE_3, train_batch_size=4)):
        dumped = json.dumps(config.resolve(2).model_dump(mode="json"))
        assert "null" not in dumped and '"auto"' not in dumped


def test_description_names_every_setting_and_its_origin() -> None:
    text = ZeroConfig.load({"steps_per_print": 5}, stage=3, train_batch_size=4).resolve(2).describe()
    assert "world size 2" in text and "zero_optimization.stage = 3  (keyword)" in text
    assert (
        "overlap_comm = true  (default)" in text and "train_micro_batch_size_per_gpu = 2  (derived)" in text
    )
    assert "steps_per_print" in text


@pytest.mark.parametrize("num_ranks", [0, -2])
def test_impossible_world_size_is_refused(num_ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"for {num_ranks} ranks"):
        ZeroConfig().resolve(num_ranks)
