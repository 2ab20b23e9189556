"""Consolidation writes what plain transformers and safetensors load, and never more or less than asked.

Oracles: the model that was saved, loaded again with `from_pretrained` or safetensors' `load_model`; its
weights in the model's dtype. Tolerance: none, a conversion from the fp32 master rounds as `Tensor.to` does.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from tests.synthetic_checkpoint import Description, edit_manifest, same_bits, save, small_state
from zero_strategy.checkpoint import staging
from zero_strategy.checkpoint.consolidate import consolidate
from zero_strategy.checkpoint.export import MARKER_NAME, ExportOptions
from zero_strategy.checkpoint.folders import lock_folder
from zero_strategy.checkpoint.hf import hf_record
from zero_strategy.errors import CheckpointError

transformers = pytest.importorskip("transformers")

INDEX_NAME = "model.safetensors.index.json"


class Wrapper(nn.Module):
    """A training module around a Hugging Face model, with a head of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.value_head = nn.Linear(16, 1)


def tiny_llama(*, tied: bool) -> nn.Module:
    torch.manual_seed(42)
    config = transformers.LlamaConfig(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    model = transformers.LlamaForCausalLM(config)
    assert isinstance(model, nn.Module)
    return model


def save_model(folder: Path, model: nn.Module, *, world_size: int = 3, model_dtype: str = "bfloat16") -> None:
    """Save a model's fp32 weights as masters of parameters of `model_dtype`."""
    state = {name: param.detach() for name, param in model.named_parameters()}
    owners = {id(param): name for name, param in model.named_parameters()}
    aliases: dict[str, tuple[str, ...]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        owner = owners[id(param)]
        if name != owner:
            aliases[owner] = (*aliases.get(owner, ()), name)
    persistent = {name: tensor for name, tensor in model.named_buffers() if name in model.state_dict()}
    description = Description(
        dtypes=dict.fromkeys(state, model_dtype),
        aliases=aliases,
        buffers=frozenset(persistent),
        hf=hf_record(model),
    )
    save(folder, state | persistent, world_size, description)


def weights_of(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        weights |= load_file(path)
    return weights


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("max_shard_size_bytes", [5 * 10**9, 3000])
def test_plain_from_pretrained_loads_the_very_weights(
    tmp_path: Path, tied: bool, max_shard_size_bytes: int
) -> None:
    model = tiny_llama(tied=tied)
    save_model(tmp_path / "checkpoint", model)
    options = ExportOptions(max_shard_size_bytes=max_shard_size_bytes)
    report = consolidate(tmp_path / "checkpoint", tmp_path / "out", options)
    if max_shard_size_bytes == 3000:
        assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == report.num_bytes
        assert set(index["weight_map"]) == set(weights_of(tmp_path / "out"))
    else:
        assert names_in(tmp_path / "out") == {
            "model.safetensors",
            "config.json",
            "generation_config.json",
            MARKER_NAME,
        }
    assert report.tied == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    expected = model.state_dict()
    assert set(loaded.state_dict()) == set(expected)
    for name, tensor in loaded.state_dict().items():
        assert same_bits(tensor, expected[name].to(torch.bfloat16)), name
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert loaded.config.architectures == ["LlamaForCausalLM"]


def test_weights_tied_by_hand_against_the_config_are_written_under_every_name(tmp_path: Path) -> None:
    model = tiny_llama(tied=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    save_model(tmp_path / "checkpoint", model)
    report = consolidate(tmp_path / "checkpoint", tmp_path / "out")
    assert report.tied == {}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert same_bits(loaded.lm_head.weight.detach(), model.lm_head.weight.detach().bfloat16())


def test_the_prefix_of_the_hugging_face_model_is_stripped_and_the_rest_left_out(tmp_path: Path) -> None:
    wrapper = Wrapper(tiny_llama(tied=True))
    save_model(tmp_path / "checkpoint", wrapper, model_dtype="float32")
    report = consolidate(tmp_path / "checkpoint", tmp_path / "out")
    assert report.left_out == ("value_head.weight", "value_head.bias")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, wrapper.model(tokens).logits)
    everything = consolidate(tmp_path / "checkpoint", tmp_path / "all", ExportOptions(strip_prefix=""))
    assert everything.left_out == ()
    assert "value_head.bias" in weights_of(tmp_path / "all")
    head = ExportOptions(strip_prefix="value_head.")
    consolidate(tmp_path / "checkpoint", tmp_path / "head", head)
    assert set(weights_of(tmp_path / "head")) == {"weight", "bias"}
    with pytest.raises(CheckpointError, match=r"'student\.'.*names are: model.model.embed") as caught:
        consolidate(tmp_path / "checkpoint", tmp_path / "none", ExportOptions(strip_prefix="student."))
    assert "strip-prefix" in caught.value.fix
    assert not (tmp_path / "none").exists()


def test_of_two_hugging_face_models_the_one_that_trains_counts() -> None:
    teacher, student = tiny_llama(tied=True).requires_grad_(False), tiny_llama(tied=True)
    record = hf_record(nn.ModuleDict({"teacher": teacher, "student": student}))
    assert record is not None and record.prefix == "student."
    assert hf_record(nn.Linear(2, 2)) is None


def test_a_model_without_hugging_face_config_loads_with_safetensors_load_model(tmp_path: Path) -> None:
    def build(seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Embedding(7, 15), nn.BatchNorm1d(15), nn.Linear(15, 7, bias=False))
        model[2].weight = model[0].weight
        return model

    model = build(1)
    save_model(tmp_path / "checkpoint", model, model_dtype="float32")
    report = consolidate(tmp_path / "checkpoint", tmp_path / "out")
    assert report.tied == {"2.weight": "0.weight"}
    assert names_in(tmp_path / "out") == {"model.safetensors", MARKER_NAME}
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "2.weight": "0.weight"}
    loaded = build(2)
    missing, unexpected = load_model(loaded, tmp_path / "out" / "model.safetensors")
    assert not missing and not unexpected
    for name, tensor in loaded.state_dict().items():
        assert same_bits(tensor, model.state_dict()[name]), name


def test_dtype_converts_floating_parameters_and_leaves_buffers(tmp_path: Path) -> None:
    state = small_state()
    state["block.weight"] = torch.randn(7, 15)
    save(tmp_path / "checkpoint", state, 3, Description(buffers=frozenset({"step", "mask"})))
    consolidate(tmp_path / "checkpoint", tmp_path / "out", ExportOptions(dtype=torch.float16))
    for name, tensor in weights_of(tmp_path / "out").items():
        converts = name in ("block.weight", "block.bias", "empty")
        assert same_bits(tensor, state[name].half() if converts else state[name]), name


def test_the_config_says_the_dtype_that_was_written(tmp_path: Path) -> None:
    save_model(tmp_path / "checkpoint", tiny_llama(tied=True))
    for dtype, name in ((None, "bfloat16"), (torch.float16, "float16"), (torch.float32, "float32")):
        consolidate(tmp_path / "checkpoint", tmp_path / "out", ExportOptions(dtype=dtype))
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config.get("dtype", config.get("torch_dtype")) == name
        assert config["hidden_size"] == 16


def test_values_that_float16_cannot_hold_are_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint", {"w": torch.tensor([1.0, 7e4, float("inf")])}, 1)
    with pytest.raises(CheckpointError) as caught:
        consolidate(tmp_path / "checkpoint", tmp_path / "out", ExportOptions(dtype=torch.float16))
    assert "1 elements of 'w'" in caught.value.what
    assert "bf16" in caught.value.fix
    assert names_in(tmp_path) == {"checkpoint"}


def test_trainable_only_writes_no_frozen_parameter_and_no_buffer(tmp_path: Path) -> None:
    description = Description(frozen=frozenset({"block.bias", "empty"}), buffers=frozenset({"mask"}))
    save(tmp_path / "checkpoint", small_state(), 3, description)
    consolidate(tmp_path / "checkpoint", tmp_path / "out", ExportOptions(trainable_only=True))
    assert set(weights_of(tmp_path / "out")) == {"block.weight", "step", "counter"}
    save(tmp_path / "frozen", {"w": torch.zeros(2)}, 1, Description(frozen=frozenset({"w"})))
    with pytest.raises(CheckpointError, match="trainable"):
        consolidate(tmp_path / "frozen", tmp_path / "none", ExportOptions(trainable_only=True))


def test_a_checkpoint_without_its_frozen_parameters_is_no_whole_model_and_gets_no_config(
    tmp_path: Path,
) -> None:
    save_model(tmp_path / "checkpoint", tiny_llama(tied=True))
    consolidate(tmp_path / "checkpoint", tmp_path / "whole")
    assert "config.json" in names_in(tmp_path / "whole")
    names = ["base.0.weight", "base.1.weight", "base.2.weight"]
    edit_manifest(tmp_path / "checkpoint", lambda document: document.update(frozen_left_out=names))
    with pytest.raises(CheckpointError, match=r"without 3 frozen parameters: base\.0\.weight, base"):
        consolidate(tmp_path / "checkpoint", tmp_path / "out", ExportOptions(force=True))
    assert not (tmp_path / "out").exists()
    consolidate(tmp_path / "checkpoint", tmp_path / "adapters", ExportOptions(trainable_only=True))
    assert names_in(tmp_path / "adapters") == {"model.safetensors", MARKER_NAME}


def test_an_output_inside_a_checkpoint_is_refused_also_with_force(tmp_path: Path) -> None:
    save(tmp_path / "runs" / "a", {"w": torch.ones(2)}, 1)
    (tmp_path / "link").symlink_to(tmp_path / "runs" / "a")
    for out in ("runs/a/in", "runs/a/deep/er", "link/in"):
        with pytest.raises(CheckpointError, match="is inside the checkpoint"):
            consolidate(tmp_path / "runs" / "a", tmp_path / out, ExportOptions(force=True))
    assert len(names_in(tmp_path / "runs" / "a")) == 2


def test_side_files_are_copied_and_weights_and_stale_configs_are_not(tmp_path: Path) -> None:
    save_model(tmp_path / "checkpoint", tiny_llama(tied=True))
    source = tmp_path / "source"
    (source / "additional_chat_templates").mkdir(parents=True)
    (source / "additional_chat_templates" / "tool.jinja").write_text("{{ tools }}")
    kept = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt", "modeling_x.py"]
    weights = ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "w.gguf", ".hidden"]
    for name in [*kept, *weights]:
        (source / name).write_text("source")
    (source / "config.json").write_text('{"model_type": "gpt2"}')
    consolidate(tmp_path / "checkpoint", tmp_path / "out", ExportOptions(hf_files=source))
    expected = {*kept, "additional_chat_templates", "config.json", "generation_config.json", MARKER_NAME}
    assert names_in(tmp_path / "out") == expected | {"model.safetensors"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"
    assert (tmp_path / "out" / "additional_chat_templates" / "tool.jinja").read_text() == "{{ tools }}"
    for wrong in ("nowhere", "checkpoint/manifest.json"):
        with pytest.raises(CheckpointError, match=wrong):
            options = ExportOptions(hf_files=tmp_path / wrong)
            consolidate(tmp_path / "checkpoint", tmp_path / "none", options)
    assert not (tmp_path / "none").exists()


def test_the_config_of_hf_files_serves_where_the_checkpoint_has_none(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint", {"w": torch.zeros(2)}, 1)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text('{"model_type": "gpt2", "torch_dtype": "float16"}')
    consolidate(tmp_path / "checkpoint", tmp_path / "out", ExportOptions(hf_files=tmp_path / "source"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"model_type": "gpt2", "torch_dtype": "float32"}


def test_a_second_run_replaces_the_first_without_stale_shards_and_keeps_what_the_user_added(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    save(tmp_path / "checkpoint", {"a": torch.ones(100), "b": torch.ones(100)}, 2)
    consolidate(tmp_path / "checkpoint", out, ExportOptions(max_shard_size_bytes=400))
    assert "model-00002-of-00002.safetensors" in names_in(out)
    (out / "README.md").write_text("mine")
    consolidate(tmp_path / "checkpoint", out, ExportOptions(dtype=torch.bfloat16))
    assert names_in(out) == {"model.safetensors", MARKER_NAME, "README.md"}
    assert same_bits(weights_of(out)["b"], torch.ones(100).bfloat16())
    assert names_in(tmp_path) == {"checkpoint", "out"}


def test_the_output_of_another_checkpoint_is_replaced_by_force_only(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = save(tmp_path / "checkpoint", {"a": torch.zeros(100)}, 2)
    consolidate(tmp_path / "checkpoint", out)
    before = (out / "model.safetensors").read_bytes()
    save(tmp_path / "checkpoint", {"a": torch.ones(100)}, 2)
    with pytest.raises(CheckpointError, match=f"holds weights of checkpoint {first.checkpoint_id}") as caught:
        consolidate(tmp_path / "checkpoint", out)
    assert "--force" in caught.value.fix
    assert (out / "model.safetensors").read_bytes() == before
    consolidate(tmp_path / "checkpoint", out, ExportOptions(force=True))
    assert torch.equal(weights_of(out)["a"], torch.ones(100))
    (out / MARKER_NAME).write_text("[]")
    with pytest.raises(CheckpointError, match="not written from this source"):
        consolidate(tmp_path / "checkpoint", out)


def test_a_run_stopped_while_it_replaces_shards_leaves_no_mixture_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ExportOptions(max_shard_size_bytes=400, force=True)
    replace, num_left = os.replace, 0

    def stop_in_between(source: Path, target: Path) -> None:
        nonlocal num_left
        num_left -= 1
        if num_left == 0:
            raise OSError("stopped")
        replace(source, target)

    for stop_at in range(1, 6):  # three shards, the index, the marker
        for value in (0.0, 1.0):
            save(tmp_path / f"{value}", {name: torch.full((100,), value) for name in "abc"}, 2)
        consolidate(tmp_path / "0.0", tmp_path / "out", options)
        with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="stopped"):
            num_left = stop_at
            patch.setattr(os, "replace", stop_in_between)
            consolidate(tmp_path / "1.0", tmp_path / "out", options)
        if (tmp_path / "out" / INDEX_NAME).exists():
            assert {float(value.sum()) for value in weights_of(tmp_path / "out").values()} == {100.0}
        assert names_in(tmp_path) == {"0.0", "1.0", "out"}


def test_what_a_killed_run_has_left_is_deleted_and_a_run_that_goes_on_is_waited_for(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint", {"a": torch.ones(3)}, 1)
    kept = {f".out.{'89abcdef' * 2}.partial", ".out.mine.partial", f".other.{'0123abcd' * 2}.partial"}
    for name in (f".out.{'0123abcd' * 2}.partial", *kept):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
    lock = lock_folder(tmp_path / f".out.{'89abcdef' * 2}.partial")
    with pytest.raises(CheckpointError, match=r"Another save into .*out is going on"):
        consolidate(tmp_path / "checkpoint", tmp_path / "out")
    lock.release()
    kept.remove(f".out.{'89abcdef' * 2}.partial")
    consolidate(tmp_path / "checkpoint", tmp_path / "out")
    assert names_in(tmp_path) == {"checkpoint", "out"} | kept


def test_everything_is_on_the_disk_before_the_folder_is_moved_into_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the calls: what was flushed, by its inode, when the folder got its name, and what is afterwards."""
    save(tmp_path / "checkpoint", {"a": torch.ones(30), "b": torch.ones(30)}, 2)
    side = tmp_path / "side"
    (side / "additional_chat_templates").mkdir(parents=True)
    for name in ("tokenizer.json", "additional_chat_templates/a.jinja"):
        (side / name).write_text("{}")
    fsync, rename, flushed, at_rename = os.fsync, os.rename, set(), set()

    def recording_fsync(descriptor: int) -> None:
        fsync(descriptor)
        flushed.add(os.fstat(descriptor).st_ino)

    def recording_rename(source: Path, target: Path) -> None:
        at_rename.update(flushed)
        flushed.clear()
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "rename", recording_rename)
    out = tmp_path / "deep" / "er" / "out"
    consolidate(tmp_path / "checkpoint", out, ExportOptions(hf_files=side, max_shard_size_bytes=120))
    written = {path: path.stat().st_ino for path in (out, *out.rglob("*"))}
    assert len(written) == 8 and set(written.values()) <= at_rename, written
    around = {path.stat().st_ino for path in (tmp_path, tmp_path / "deep", tmp_path / "deep" / "er")}
    assert around <= flushed


def test_a_folder_that_is_in_its_place_is_not_reported_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "checkpoint", {"a": torch.ones(3)}, 2)
    sync_folder = staging.sync_folder

    def refuse(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError("no")
        sync_folder(folder)

    monkeypatch.setattr(staging, "sync_folder", refuse)
    consolidate(tmp_path / "checkpoint", tmp_path / "out")
    assert names_in(tmp_path / "out") == {"model.safetensors", MARKER_NAME}


def test_of_several_checkpoints_the_latest_is_consolidated(tmp_path: Path) -> None:
    for number in (1, 2):
        save(tmp_path / "runs" / f"step-{number}", {"a": torch.full((3,), float(number))}, 2)
    with pytest.raises(CheckpointError, match="holds 2 checkpoints"):
        consolidate(tmp_path / "runs", tmp_path / "out")
    (tmp_path / "runs" / "latest").write_text("step-1\n")
    consolidate(tmp_path / "runs", tmp_path / "out")
    assert torch.equal(weights_of(tmp_path / "out")["a"], torch.ones(3))


def test_a_folder_with_other_files_is_refused_unless_forced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    save(tmp_path / "checkpoint", {"a": torch.ones(3)}, 2)
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"thesis\.txt") as caught:
        consolidate(tmp_path / "checkpoint", out)
    assert "--force" in caught.value.fix
    assert names_in(out) == {"thesis.txt"}
    consolidate(tmp_path / "checkpoint", out, ExportOptions(force=True))
    assert names_in(out) == {"thesis.txt", "model.safetensors", MARKER_NAME}
    with pytest.raises(CheckpointError, match="holds a checkpoint"):
        consolidate(tmp_path / "checkpoint", tmp_path / "checkpoint", ExportOptions(force=True))
    with pytest.raises(
        CheckpointError, match="or several"
    ):  # of which the checkpoint's own parent is the outer folder
        consolidate(tmp_path / "checkpoint", tmp_path, ExportOptions(force=True))
    with pytest.raises(CheckpointError, match="is a file"):
        consolidate(tmp_path / "checkpoint", out / "thesis.txt", ExportOptions(force=True))


def test_a_damaged_checkpoint_leaves_no_output_and_an_earlier_one_untouched(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint", {"a": torch.ones(100), "b": torch.ones(100)}, 2)
    consolidate(tmp_path / "checkpoint", tmp_path / "earlier")
    path = next((tmp_path / "checkpoint").glob("rank-00001-*"))
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    before = {file.name: file.read_bytes() for file in (tmp_path / "earlier").iterdir()}
    for out in ("earlier", "new"):
        with pytest.raises(CheckpointError, match=path.name):
            consolidate(tmp_path / "checkpoint", tmp_path / out)
    assert {file.name: file.read_bytes() for file in (tmp_path / "earlier").iterdir()} == before
    assert names_in(tmp_path) == {"checkpoint", "earlier"}


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_and_folders_get_the_permissions_the_umask_says(tmp_path: Path, umask: int) -> None:
    save(tmp_path / "checkpoint", {"a": torch.ones(3), "b": torch.ones(3)}, 1)
    (tmp_path / "side").mkdir()
    (tmp_path / "side" / "tokenizer.json").write_text("{}")
    (tmp_path / "side" / "tokenizer.json").chmod(0o600)
    previous = os.umask(umask)
    try:
        options = ExportOptions(max_shard_size_bytes=12, hf_files=tmp_path / "side")
        consolidate(tmp_path / "checkpoint", tmp_path / "out", options)
    finally:
        os.umask(previous)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~umask
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o666 & ~umask}


def test_a_link_in_the_output_is_replaced_and_what_it_points_to_is_not(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint", {"a": torch.ones(3)}, 1)
    outside = tmp_path / "outside"
    outside.write_text("mine")
    out = tmp_path / "out"
    out.mkdir()
    for name in ("model.safetensors", MARKER_NAME, "model-00001-of-00002.safetensors"):
        (out / name).symlink_to(outside)
    consolidate(tmp_path / "checkpoint", out, ExportOptions(force=True))
    assert outside.read_text() == "mine"
    assert names_in(out) == {"model.safetensors", MARKER_NAME} and not (out / MARKER_NAME).is_symlink()
