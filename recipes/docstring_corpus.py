"""Questions and answers from Python's own standard library: real text that every machine has.

A question is the signature of a public function or method, the answer the first paragraph of its docstring.
The sources are parsed and never run. demo.py calls this; it knows of tokenizers and tensors, but of no model.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

# Never trained on: familiar modules with many docstrings, so that a question about them means something.
HELD_OUT_MODULES = frozenset(
    {
        "argparse",
        "bisect",
        "csv",
        "fractions",
        "heapq",
        "pathlib",
        "random",
        "sched",
        "shutil",
        "statistics",
        "textwrap",
        "zipfile",
    }
)
# Not what a user of the standard library reads: its tests and applications, bundled and installed packages.
SKIPPED_FOLDERS = frozenset(
    {
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "turtledemo",
        "ensurepip",
        "pydoc_data",
        "site-packages",
        "dist-packages",
    }
)
ANSWER_LENGTHS = range(30, 301)  # characters; shorter ones say nothing, longer ones are whole manuals

Batch = dict[str, torch.Tensor]  # input_ids, attention_mask int64, is_answer bool; each [batch_size, width]


def docstring_pairs() -> Iterator[tuple[str, str, str]]:
    """Yield (module, signature, first paragraph of the docstring) of the standard library; run none of it."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        names = path.relative_to(root).with_suffix("").parts
        names = names[:-1] if names[-1] == "__init__" else names
        if not names or any(name.startswith("_") or name in SKIPPED_FOLDERS for name in names):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # a template, or a file written for another Python
            continue
        for signature, answer in documented_functions(tree, ".".join(names)):
            yield names[0], signature, answer


def documented_functions(node: ast.AST, fqn: str) -> Iterator[tuple[str, str]]:
    """Yield (signature, first paragraph) of the public functions and methods below `node`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from documented_functions(child, f"{fqn}.{child.name}")
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            answer = " ".join((ast.get_docstring(child) or "").split("\n\n")[0].split())
            if len(answer) in ANSWER_LENGTHS:
                yield f"def {fqn}.{child.name}({ast.unparse(child.args)})", answer


def split_pairs() -> dict[str, list[tuple[str, str]]]:
    """Part the (answer, signature) pairs by module into "held_out" and "train".

    Each answer is kept once, and one that a held-out module has is not trained on, wherever else it stands.
    """
    held_out: dict[str, str] = {}
    train: dict[str, str] = {}
    for module, signature, answer in docstring_pairs():
        (held_out if module in HELD_OUT_MODULES else train).setdefault(answer, signature)
    only_train = [pair for pair in train.items() if pair[0] not in held_out]
    return {"held_out": list(held_out.items()), "train": only_train}


def chat_prompt(tokenizer: PreTrainedTokenizerBase, signature: str) -> str:
    """Put the question into the model's own chat template."""
    messages = [
        {"role": "system", "content": "You know Python."},
        {"role": "user", "content": f"What does this do?\n{signature}"},
    ]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def fitting_samples(
    tokenizer: PreTrainedTokenizerBase, pairs: Iterable[tuple[str, str]], max_tokens: int
) -> Iterator[tuple[list[int], int]]:
    """Yield (tokens of the whole chat, how many of them come before the answer), leaving out longer ones."""
    for answer, signature in pairs:
        prompt_ids = tokenizer(chat_prompt(tokenizer, signature), add_special_tokens=False)["input_ids"]
        answer_ids = tokenizer(answer + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        if len(prompt_ids) + len(answer_ids) <= max_tokens:
            yield prompt_ids + answer_ids, len(prompt_ids)


def build_batches(samples: list[tuple[list[int], int]], batch_size: int, pad_id: int) -> list[Batch]:
    """Batch samples of like length together, so that little is padding."""
    samples = sorted(samples, key=lambda sample: len(sample[0]))
    batches = []
    for start in range(0, len(samples), batch_size):
        chosen = samples[start : start + batch_size]
        lengths = torch.tensor([[len(ids)] for ids, _ in chosen])
        prompt_lengths = torch.tensor([[num_prompt] for _, num_prompt in chosen])
        width = len(chosen[-1][0])
        position = torch.arange(width)
        batches.append(
            {
                "input_ids": torch.tensor([ids + [pad_id] * (width - len(ids)) for ids, _ in chosen]),
                "attention_mask": (position < lengths).long(),
                "is_answer": (position >= prompt_lengths) & (position < lengths),
            }
        )
    return batches
