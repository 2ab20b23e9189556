"""Scripts with a Trainer that are not changed, started as users do: zero-strategy and accelerate launch.

Oracle: what the script has found, and its losses under plain Accelerate's DDP, started by Accelerate's own
launcher. Tolerance 0. The processes are real; how long they take to start is most of the time of a test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.test_accelerate_launch import ACCELERATE, CONFIGS, OURS, results, start

# As for plain transformers: nothing in it knows of this library, but the last lines, which look where it is.
SCRIPT = """
import json, os
from pathlib import Path
import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.set_num_threads(1)
arguments, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
torch.manual_seed(7)
sizes = dict(vocab_size=67, hidden_size=20, intermediate_size=29, num_hidden_layers=2)
heads = dict(num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32)
model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
tokens = torch.randint(3, 67, (24, 9), generator=torch.Generator().manual_seed(5))
data = [{"input_ids": row, "labels": row} for row in tokens]
trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4])
trainer.train()
trainer.evaluate()
trainer.save_model()

logs = trainer.state.log_history
found = {"losses": [log["loss"] for log in logs if "loss" in log], "processes": arguments.world_size}
found["norms"] = [round(log["grad_norm"], 5) for log in logs if "grad_norm" in log]
found["class"] = type(trainer.accelerator).__name__
if found["class"] == "TrainerAccelerator":
    engine = trainer.accelerator.engine_of(model)
    found["stage"] = engine.config.stage
    found["sent"] = [engine.ledger.comm[kind]["bytes_sent"] for kind in ("reduce_scatter", "all_gather")]
    found["states"] = engine.ledger.memory["optimizer"]
    found["micro_batches"] = engine.config.gradient_accumulation_steps
(Path(arguments.output_dir) / f"rank-{arguments.process_index}.json").write_text(json.dumps(found))
"""
NUM_WEIGHTS = 67 * 20 * 2 + 2 * (20 * 20 * 2 + 20 * 10 * 2 + 3 * 20 * 29 + 40) + 20
OPTIONS = (
    "--max_steps", "4", "--per_device_train_batch_size", "2", "--logging_steps", "1", "--save_strategy", "no",
    "--report_to", "none", "--learning_rate", "0.01", "--max_grad_norm", "1e6",
)  # fmt: skip


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def launched(*command: str, folder: Path, **variables: str) -> list[dict[str, Any]]:
    start(*command, *OPTIONS, "--output_dir", str(folder), folder=folder, **variables)
    return results(folder)


def assert_trained_together(found: list[dict[str, Any]], stage: int) -> None:
    for one in found:
        assert one["processes"] == 2 and one["class"] == "TrainerAccelerator" and one["stage"] == stage
        assert min(one["sent"]) > 0 and 0 < one["states"] < 1.2 * 4 * NUM_WEIGHTS


@pytest.mark.slow
def test_zero_strategy_launch_runs_an_unchanged_trainer_script_with_deepspeed_in_its_arguments(
    script: Path, tmp_path: Path
) -> None:
    config = tmp_path / "ds_config.json"
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": "auto"}
    auto = {"gradient_accumulation_steps": "auto", "train_batch_size": "auto", "gradient_clipping": "auto"}
    config.write_text(json.dumps({"zero_optimization": zero, **auto}))
    found = launched(
        *OURS, "--num_processes", "2", "--main_process_port", "0", str(script), "--deepspeed", str(config),
        "--gradient_accumulation_steps", "2", folder=tmp_path,
    )  # fmt: skip
    assert_trained_together(found, 3)
    assert {one["micro_batches"] for one in found} == {2}
    assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.slow
def test_an_unchanged_trainer_script_has_the_losses_of_ddp_under_every_stage(
    script: Path, tmp_path: Path
) -> None:
    port = ("--main_process_port", "0")
    expected = launched(
        *ACCELERATE, "--multi_gpu", "--num_processes", "2", *port, str(script),
        folder=tmp_path, ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    assert {one["class"] for one in expected} == {"Accelerator"} and expected[0]["processes"] == 2
    for stage in (1, 2, 3):
        yaml = ("--config_file", str(CONFIGS / f"zero{stage}.yaml"))
        for command in (
            (*OURS, *yaml, *port),
            (*ACCELERATE, *yaml, *port, "-m", "zero_strategy.run"),
        ):
            found = launched(*command, str(script), folder=tmp_path)
            assert_trained_together(found, stage)
            assert [one["losses"] for one in found] == [one["losses"] for one in expected]
            assert [one["norms"] for one in found] == [one["norms"] for one in expected]


@pytest.mark.slow
def test_nothing_of_transformers_is_imported_or_rebound_until_it_is_asked_for(tmp_path: Path) -> None:
    program = """
import sys
import zero_strategy
import zero_strategy.accelerate
import zero_strategy.transformers
from zero_strategy.transformers import rebinding
assert "transformers" not in sys.modules
from transformers import Trainer, TrainingArguments, trainer
names = ("save_model", "_load_best_model", "create_optimizer")
before = [getattr(Trainer, name) for name in names]
from zero_strategy.transformers import ZeroArgumentsMixin, ZeroTrainerMixin
assert before == [getattr(Trainer, name) for name in names]
assert trainer.Accelerator.__name__ == "Accelerator"
assert not hasattr(TrainingArguments.__post_init__, "__wrapped__")
rebinding.install()
assert trainer.Accelerator.__name__ == "TrainerAccelerator"
assert [getattr(Trainer, name).__wrapped__ for name in names] == before
"""
    start("-c", program, folder=tmp_path)
    late = """
import sys
from zero_strategy.accelerate import rebinding
from zero_strategy.transformers import rebinding as trainers
rebinding.install()
trainers.install()
assert "transformers" not in sys.modules
from transformers import Trainer, TrainingArguments, trainer
assert trainer.Accelerator.__name__ == "TrainerAccelerator"
assert hasattr(Trainer.save_model, "__wrapped__") and hasattr(TrainingArguments.__post_init__, "__wrapped__")
"""
    start("-c", late, folder=tmp_path)
