"""`zero-strategy explain` and docs/config.md say what loading does, of every key of DeepSpeed's reference.

Oracles: the names of the keys in DeepSpeed's configuration reference and in its config classes (August 2026,
copied below); what `ZeroConfig.load` accepts, refuses and notes. Tolerance: none.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zero_strategy.cli import main
from zero_strategy.config import KNOWN_KEYS, ZeroConfig
from zero_strategy.config_explain import config_page, explain
from zero_strategy.config_source import flatten, fold_blocks
from zero_strategy.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]

REFERENCE = {
    "": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer scheduler "
    "managed_gradient_accumulation communication_data_type seq_parallel_communication_data_type "
    "gradient_allreduce_op prescale_gradients gradient_predivide_factor sparse_gradients amp torch_autocast "
    "gradient_clipping tensor_parallel expert_parallel hybrid_engine steps_per_print wall_clock_breakdown "
    "memory_breakdown dump_state log_level autotuning flops_profiler activation_checkpointing aio checkpoint "
    "sparse_attention data_efficiency curriculum_learning tensorboard wandb comet csv_monitor comms_logger "
    "compression_training quantize_training elasticity eigenvalue progressive_layer_drop graph_harvesting "
    "datastates_ckpt disable_allgather zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
    "dataloader_drop_last nebula use_data_before_expert_parallelism pipeline compile timers bfloat16 "
    "load_universal_checkpoint",
    "fp16": "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale "
    "consecutive_hysteresis fp16_master_weights_and_grads",
    "bf16": "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads "
    "bf16_optimizer_states",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype",
    "zero_optimization": "stage contiguous_gradients reduce_scatter reduce_bucket_size allgather_partitions "
    "use_multi_rank_bucket_allreduce allgather_bucket_size overlap_comm load_from_fp32_weights grad_hooks "
    "elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size cpu_offload cpu_offload_param "
    "cpu_offload_use_pin_memory stage3_prefetch_bucket_size stage3_param_persistence_threshold "
    "stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance "
    "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
    "stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential "
    "ignore_unused_parameters legacy_stage1 round_robin_gradients zero_hpz_partition_size mics_shard_size "
    "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param "
    "mics_hierarchical_params_gather memory_efficient_linear pipeline_loading_checkpoint leaf_module "
    "override_module_apply log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory",
}
ALL = [f"{block}.{name}".lstrip(".") for block, names in REFERENCE.items() for name in names.split()]

CONFIG = {
    "zero_optimization": {
        "stage": 2,
        "allgather_bucket_size": 5e8,
        "stage3_max_live_parameters": 7,
        "contiguous_gradients": True,
        "round_robin_gradients": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "stage3_bukket": 3,
    },
    "bf16": {"enabled": "auto"},
    "gradient_clipping": "much",
    "tensorboard": {"enabled": True, "job_name": "run"},
}


def written(tmp_path: Path, config: object) -> str:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    return str(path)


def test_the_page_of_keys_is_up_to_date() -> None:
    page = ROOT.joinpath("docs", "config.md").read_text()
    assert page == config_page(), "write it anew: zero-strategy explain --keys > docs/config.md"


@pytest.mark.parametrize("key", ALL)
def test_every_key_of_the_reference_is_known_and_on_the_page(key: str) -> None:
    folded = fold_blocks(flatten({key: {"x": 1}}, "test"), KNOWN_KEYS)
    assert key in folded or any(known.startswith(f"{key}.") for known in KNOWN_KEYS)
    name = key.rpartition(".")[2]
    assert f"`{name}`" in config_page() or f"`{name}." in config_page()


def test_every_key_of_a_file_gets_its_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", written(tmp_path, CONFIG)]) == 2
    *lines, summary = capsys.readouterr().out.splitlines()
    verdicts = {line[10:].partition(" = ")[0]: line[:10].strip() for line in lines if line[0] != " "}
    zero = "zero_optimization."
    assert verdicts == {
        f"{zero}stage": "honoured",
        f"{zero}allgather_bucket_size": "honoured",
        f"{zero}stage3_max_live_parameters": "no effect",
        f"{zero}contiguous_gradients": "no effect",
        f"{zero}round_robin_gradients": "replaced",
        f"{zero}offload_optimizer": "refused",
        f"{zero}stage3_bukket": "fault",
        "bf16.enabled": "auto",
        "gradient_clipping": "fault",
        "tensorboard": "replaced",
    }
    assert summary == (
        "10 keys: 2 honoured, 2 no effect, 2 replaced, 1 refused, 2 fault, 1 auto. The file does not load."
    )
    text = " ".join(line.strip() for line in lines)
    assert "It has no effect at stage 2." in text and "Here: the loggers of your training framework." in text
    assert "Offloading the optimizer comes in a later version" in text and "Did you mean" in text
    assert "write true or false" in text, "what to write instead of auto"


def test_a_file_that_loads_is_explained_with_exit_code_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"zero_optimization": {"stage": 3, "overlap_comm": True}, "bf16": {"enabled": "auto"}}
    assert main(["explain", written(tmp_path, good)]) == 0
    text = capsys.readouterr().out
    assert "honoured  zero_optimization.overlap_comm = true" in text
    assert text.endswith("\n3 keys: 2 honoured, 1 auto. The file loads.\n")
    assert main(["explain", written(tmp_path, {}), "--world-size", "2"]) == 0
    assert capsys.readouterr().out == "No keys. The file loads.\n"


def test_batch_numbers_are_checked_for_the_world_size_that_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    path = written(tmp_path, batch)
    assert main(["explain", path]) == 0 and main(["explain", path, "--world-size", "2"]) == 0
    capsys.readouterr()
    assert main(["explain", path, "--world-size", "4"]) == 2
    text = capsys.readouterr().out
    assert "world size 4" in text and "train_batch_size to 24" in text
    with pytest.raises(SystemExit) as caught:
        main(["explain", path, "--world-size", "0"])
    assert caught.value.code == 2 and "write 1 or more" in capsys.readouterr().err


def test_two_precisions_are_a_problem_of_no_one_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = {"bf16": {"enabled": True}, "fp16": {"enabled": True}}
    assert main(["explain", written(tmp_path, both), "--json"]) == 2
    content = json.loads(capsys.readouterr().out)
    assert not content["loads"] and [line["verdict"] for line in content["keys"]] == ["honoured"] * 2
    assert "two precisions" in content["problems"][0]["what"]


@pytest.mark.parametrize("key", ALL)
@pytest.mark.parametrize("value", [True, False, 3, "auto", {}])
def test_explaining_and_loading_agree(key: str, value: object) -> None:
    explanation = explain(flatten({key: value}, "test"))
    try:
        notices = ZeroConfig.load({key: value}).notices
    except ConfigError:
        assert not explanation.loads
        return
    assert explanation.loads
    spoken = [line for line in explanation.lines if line.verdict == "replaced" or " no effect" in line.text]
    assert len(spoken) == len(notices)


def test_a_file_that_cannot_be_read_is_explained_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(tmp_path / "none.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    path = tmp_path / "bad.json"
    for content, said in (
        ('{"bf16": {},\n\n "bf16": {}}', "'bf16' stands twice in one block: {} and {} (it is in lines 1, 3)"),
        ('{"bf16": {},\n oops}', "in line 2"),
        ('{"a": ' * 100_000, "not valid"),
        ("9" * 5000, "not valid"),
        ('{"bf16": {"enabled": true}, "bf16.enabled": false}', "bf16.enabled is given twice"),
    ):
        path.write_text(content)
        assert main(["explain", str(path)]) == 2
        message = capsys.readouterr().err
        assert said in message and str(path) in message
    with pytest.raises(SystemExit):
        main(["explain"])


def test_the_page_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--keys"]) == 0
    assert capsys.readouterr().out == config_page()
