"""What the TRL tests share: a tiny model and tokenizer in a folder, data, trainers, and what a run leaves.

`None` for the stage is TRL's own trainer on plain Accelerate, which wraps in DDP; any stage is the same
trainer with `ZeroTrainerMixin`. Nothing is persistent at stage 3, which `assert_sharded` checks.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from datasets import Dataset, load_from_disk
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tests.harness import rank
from tests.integrations.accelerate_support import reset
from tests.integrations.trainer_support import SMALL_BUCKETS, llama
from zero_strategy.transformers import ZeroPlugin, ZeroTrainerMixin

WORDS = [f"w{number}" for number in range(60)]
KINDS = {"sft": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig), "grpo": (GRPOTrainer, GRPOConfig)}
DEFAULTS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "per_device_train_batch_size": 2,
    "max_steps": 3,
    "learning_rate": 0.01,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "max_grad_norm": 1e6,
}
OF_KIND: dict[str, dict[str, Any]] = {
    "sft": {"max_length": 12},
    "dpo": {"max_length": 12},
    "grpo": {"num_generations": 2, "max_completion_length": 5, "beta": 0.1, "temperature": 1.0},
}


def model_folder(tmp_path: Path) -> Path:
    """Save a tiny random model and a tokenizer of whole words, as a hub would have them."""
    folder = tmp_path / "model"
    os.environ |= {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "TQDM_DISABLE": "1"}
    reset()
    if rank() == 0:
        vocab = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
        words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=words,
            pad_token="<pad>",
            bos_token="<s>",
            eos_token="</s>",
            unk_token="<unk>",
        )
        tokenizer.save_pretrained(folder)
        llama().save_pretrained(folder)
    dist.barrier()
    return folder


def texts(number: int, seed: int, least: int = 3) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(number):
        length = int(torch.randint(least, 8, (), generator=generator))
        picked = torch.randint(len(WORDS), (length,), generator=generator)
        found.append(" ".join(WORDS[index] for index in picked.tolist()))
    return found


def data_of(kind: str, number: int = 16) -> Dataset:
    if kind == "sft":
        return Dataset.from_dict({"text": texts(number, 1)})
    columns = {"prompt": texts(number, 2)}
    if kind == "dpo":
        columns |= {"chosen": texts(number, 3), "rejected": texts(number, 4)}
    return Dataset.from_dict(columns)


def on_disk(kind: str, folder: Path) -> Dataset:
    """The data in a folder that all ranks see, where what is computed of it is kept too."""
    if rank() == 0 and not (folder / kind).exists():
        data_of(kind).save_to_disk(folder / kind)
    dist.barrier()
    return load_from_disk(folder / kind)


def sum_of_words(completions: list[str], **columns: Any) -> list[float]:
    """A reward that hardly two completions share."""
    numbers = [[int(word[1:]) for word in text.split() if word[1:].isdigit()] for text in completions]
    return [float(sum(some) % 11) for some in numbers]


def lora() -> peft.LoraConfig:
    return peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")


def trainer_of(kind: str, stage: int | None, folder: Path, out: Path, **settings: Any) -> Any:
    """Return a trainer of TRL's, on plain Accelerate or with an engine.

    Args:
        kind: "sft", "dpo" or "grpo".
        stage: None for plain Accelerate.
        folder: Of the model.
        out: For what it writes.
        **settings: For the arguments; `peft_config`, `model` and `ref_model` for the trainer.
    """
    reset()
    trainer_class, arguments_class = KINDS[kind]
    given = {name: settings.pop(name) for name in ("peft_config", "ref_model") if name in settings}
    model = settings.pop("model", None) or LlamaForCausalLM.from_pretrained(folder)
    arguments = arguments_class(output_dir=str(out), **{**DEFAULTS, **OF_KIND[kind], **settings})
    if kind == "grpo":
        given["reward_funcs"] = sum_of_words
    given |= {
        "model": model,
        "args": arguments,
        "train_dataset": on_disk(kind, out),
        "processing_class": PreTrainedTokenizerFast.from_pretrained(folder),
    }
    if stage is None:
        return trainer_class(**given)
    mixed = type(f"Zero{trainer_class.__name__}", (ZeroTrainerMixin, trainer_class), {})
    return mixed(zero_plugin=ZeroPlugin(stage=stage, **SMALL_BUCKETS), **given)
