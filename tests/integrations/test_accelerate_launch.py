"""Scripts that are not changed, started as users do: accelerate launch, zero-strategy launch, torchrun.

Oracle: what the script has found, and its losses under Accelerate's own DDP, started by the same launcher.
Tolerance 0. The processes are real; how long they take to start is most of the time of a test.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.launching import TORCHRUN as LAUNCHER
from tests.launching import assert_all_ended, run_script
from zero_strategy.cli import main

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs" / "accelerate"
ACCELERATE = (str(Path(sysconfig.get_path("scripts"), "accelerate")), "launch")
OURS = ("-m", "zero_strategy", "launch")
TORCHRUN = (*LAUNCHER, "2")

# As for plain Accelerate: nothing in it knows of this library, but the last lines, which look where it is.
SCRIPT = """
import argparse, json, sys
from pathlib import Path
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import set_seed

import neighbour  # beside the script

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path)
parser.add_argument("--state-first", action="store_true")
arguments = parser.parse_args()
torch.set_num_threads(1)
if arguments.state_first:
    PartialState()
accelerator = Accelerator()
set_seed(7)
layers = [torch.nn.Linear(4, 300), torch.nn.Tanh(), torch.nn.Linear(300, 400), torch.nn.Linear(400, 1)]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
data = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
loader = torch.utils.data.DataLoader(data, batch_size=2)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
losses = []
for x, y in loader:
    with accelerator.accumulate(model):
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1e3)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    losses.append(loss.item())

found = {"losses": losses, "processes": accelerator.num_processes, "class": type(accelerator).__name__}
found["name"], found["path"], found["neighbour"] = __name__, sys.path[0], neighbour.VALUE
if found["class"] == "ZeroAccelerator":
    engine = accelerator.engine_of(model)
    found["stage"], found["micro_batches"] = engine.config.stage, accelerator.gradient_accumulation_steps
    kinds = ("reduce_scatter", "all_gather")
    found["sent"] = {kind: engine.ledger.comm[kind]["bytes_sent"] for kind in kinds}
    found["dtype"] = str(next(model.parameters()).dtype)
    found["states"] = engine.ledger.memory["optimizer"]
(arguments.out / f"rank-{accelerator.process_index}.json").write_text(json.dumps(found))
accelerator.end_training()
"""
NUM_WEIGHTS = 4 * 300 + 300 + 300 * 400 + 400 + 400 + 1


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "neighbour.py").write_text("VALUE = 5\n")
    (folder / "train.py").write_text(SCRIPT)
    return folder / "train.py"


def start(*command: str, folder: Path, code: int = 0, **variables: str) -> str:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    environment = {k: v for k, v in os.environ.items() if k not in names}
    # Accelerate's file of a user's answers must not count here.
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "home")}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", **variables}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=150, env=environment, cwd=folder
    )
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def results(folder: Path, num_ranks: int = 2) -> list[dict[str, Any]]:
    paths = sorted(folder.glob("rank-*.json"))
    assert len(paths) == num_ranks
    found = [json.loads(path.read_text()) for path in paths]
    for path in paths:
        path.unlink()
    return found


def assert_trained_together(found: list[dict[str, Any]], stage: int, num_ranks: int = 2) -> None:
    for one in found:
        assert one["processes"] == num_ranks and one["class"] == "ZeroAccelerator"
        assert one["stage"] == stage and one["name"] == "__main__" and one["neighbour"] == 5
        if num_ranks > 1:
            assert min(one["sent"].values()) > 0
            assert one["states"] < 2 * 4 * NUM_WEIGHTS  # a share of two moments
    assert num_ranks == 1 or found[0]["losses"] != found[1]["losses"]  # of batches of their own


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accelerate_launch_with_our_yaml_runs_an_unchanged_script(
    stage: int, script: Path, tmp_path: Path
) -> None:
    yaml = str(CONFIGS / f"zero{stage}.yaml")
    arguments = ("--main_process_port", "0", "-m", "zero_strategy.run", str(script), "--out", str(tmp_path))
    output = start(*ACCELERATE, "--config_file", yaml, *arguments, folder=tmp_path)
    found = results(tmp_path)
    assert_trained_together(found, stage)
    assert "Accelerate: 2 processes train together on cpu." in output and found[0]["path"] == str(
        script.parent
    )


@pytest.mark.slow
def test_an_unchanged_script_has_the_losses_of_ddp_under_every_stage(script: Path, tmp_path: Path) -> None:
    out = ("--main_process_port", "0")
    start(
        *ACCELERATE, "--multi_gpu", "--num_processes", "2", *out, str(script), "--out", str(tmp_path),
        folder=tmp_path, ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    expected = results(tmp_path)
    assert {one["class"] for one in expected} == {"Accelerator"}
    for stage in (1, 2, 3):
        yaml = str(CONFIGS / f"zero{stage}.yaml")
        start(*OURS, "--config_file", yaml, *out, str(script), "--out", str(tmp_path), folder=tmp_path)
        found = results(tmp_path)
        assert_trained_together(found, stage)
        assert [one["losses"] for one in found] == [one["losses"] for one in expected]


DEEPSPEED_YAML = """compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  deepspeed_multinode_launcher: standard
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  gradient_accumulation_steps: 2
  zero_stage: 3
distributed_type: DEEPSPEED
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
use_cpu: false
"""


def test_zero_strategy_launch_takes_a_deepspeed_yaml_without_deepspeed(script: Path, tmp_path: Path) -> None:
    yaml = tmp_path / "deepspeed.yaml"
    yaml.write_text(DEEPSPEED_YAML)
    assert not any(name == "deepspeed" for name in os.listdir(sysconfig.get_path("purelib")))
    output = start(
        *OURS, "--config_file", str(yaml), "--main_process_port", "0", str(script), "--out", str(tmp_path),
        "--state-first", folder=tmp_path,
    )  # fmt: skip
    found = results(tmp_path)
    assert_trained_together(found, 3)
    assert {one["micro_batches"] for one in found} == {2} and {one["dtype"] for one in found} == {
        "torch.bfloat16"
    }
    assert f"gradient_accumulation_steps in {yaml}" in output and "zero3_init_flag" in output


@pytest.mark.slow
def test_torchrun_python_and_modules_run_a_script_too(script: Path, tmp_path: Path) -> None:
    run = ("-m", "zero_strategy.run")
    start(*TORCHRUN, *run, "--stage", "2", str(script), "--out", str(tmp_path), folder=tmp_path)
    assert_trained_together(results(tmp_path), 2)
    start(*run, str(script), "--out", str(tmp_path), folder=tmp_path)
    assert_trained_together(results(tmp_path, 1), 3, num_ranks=1)
    start(*run, "--stage", "1", "-m", "train", "--out", str(tmp_path), folder=script.parent)
    assert_trained_together(results(tmp_path, 1), 1, num_ranks=1)
    start(
        *OURS,
        "--num_processes",
        "1",
        "--zero_stage",
        "2",
        str(script),
        "--out",
        str(tmp_path),
        folder=tmp_path,
    )
    assert_trained_together(results(tmp_path, 1), 2, num_ranks=1)
    # What Accelerate's launcher of DeepSpeed sets, where deepspeed is installed.
    variables = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}
    start(*TORCHRUN, *run, str(script), "--out", str(tmp_path), folder=tmp_path, **variables)
    assert_trained_together(results(tmp_path), 1)
    output = start(*run, str(script.with_name("neighbour.py")), folder=tmp_path)
    assert "has made no Accelerator, so nothing was sharded" in output


@pytest.mark.slow
def test_a_launch_with_one_process_where_two_were_asked_for_is_refused_by_name(
    script: Path, tmp_path: Path
) -> None:
    yaml = tmp_path / "cpu.yaml"
    text = (CONFIGS / "zero3.yaml").read_text().replace("MULTI_GPU", "MULTI_CPU")
    yaml.write_text(f"{text}use_cpu: true\n")
    arguments = ("-m", "zero_strategy.run", str(script), "--out", str(tmp_path))
    output = start(*ACCELERATE, "--config_file", str(yaml), *arguments, folder=tmp_path, code=1)
    assert "2 processes were asked for" in output and "and 1 was started" in output and str(yaml) in output


def test_mistakes_of_a_launch_are_answered_before_anything_is_started(script: Path, tmp_path: Path) -> None:
    yaml = tmp_path / "bad.yaml"
    cases = {
        DEEPSPEED_YAML.replace("zero_stage", "zero_stag"): "Unknown key 'zero_stag'",
        DEEPSPEED_YAML.replace("zero_stage: 3", "zero_stage: three"): "zero_stage = 'three'",
        DEEPSPEED_YAML.replace(
            "offload_param_device: none", "offload_param_device: cpu"
        ): "Offloading parameters",
        DEEPSPEED_YAML.replace("DEEPSPEED", "FSDP"): "FSDP is asked for",
    }
    for text, answer in cases.items():
        yaml.write_text(text)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HF_HOME", str(tmp_path))
            with contextlib.redirect_stderr(io.StringIO()) as stderr:
                assert main(["launch", "--config_file", str(yaml), str(script)]) == 2
        assert answer in stderr.getvalue(), stderr.getvalue()


def test_nothing_is_imported_or_rebound_until_it_is_asked_for() -> None:
    program = """
import sys
import zero_strategy
frameworks = {"accelerate", "lightning", "transformers", "pytorch_lightning"}
assert not frameworks & {name.partition(".")[0] for name in sys.modules}
import accelerate
from accelerate.state import PartialState
before = accelerate.Accelerator, PartialState.__init__, accelerate.utils.GatheredParameters
import zero_strategy.accelerate
from zero_strategy.accelerate import ZeroAccelerator, ZeroPlugin
assert (accelerate.Accelerator, PartialState.__init__, accelerate.utils.GatheredParameters) == before
assert accelerate.Accelerator is not ZeroAccelerator
from zero_strategy.accelerate import rebinding
rebinding.install()
rebinding.install()
assert accelerate.Accelerator is ZeroAccelerator is accelerate.accelerator.Accelerator
from accelerate.utils import DummyOptim, DummyScheduler
assert PartialState.__init__.__wrapped__ is before[1] and accelerate.utils.GatheredParameters is not before[2]
"""
    start("-c", program, folder=ROOT)


FAILING_SCRIPT = """
import os
import torch
from accelerate import Accelerator

accelerator = Accelerator()
print(f"rank {accelerator.process_index} is {os.getpid()}", flush=True)
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for step in range(1000):
    if step == 2:
        accelerator.wait_for_everyone()
        print("now", flush=True)
        if accelerator.process_index == 1:
            raise ValueError("a bad sample in batch 2")
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_an_exception_on_one_rank_ends_all_and_is_shown_by_the_others(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING_SCRIPT)
    for stage in ("1", "3"):
        ended = run_script((*TORCHRUN, "-m", "zero_strategy.run", "--stage", stage, str(script)))
        assert_all_ended(ended, "ValueError: a bad sample in batch 2", "rank 1")
