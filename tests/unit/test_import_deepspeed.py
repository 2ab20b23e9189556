"""What DeepSpeed has saved is imported bit for bit, and what cannot be imported is named and never run.

Oracles, made by DeepSpeed 0.19.8 itself (tests/fixtures/make_deepspeed.py): the fp32 weights that its
zero_to_fp32 makes of each checkpoint, and the masters and moments that its engine gave whole when it saved.
Tolerance: none.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.fixtures.deepspeed_model import Tiny
from tests.fixtures.make_deepspeed import CASES, CLIENT_STATE, TAG
from zero_strategy.checkpoint import restricted_pickle
from zero_strategy.checkpoint.extra import decode_extra
from zero_strategy.checkpoint.format import CheckpointReader
from zero_strategy.checkpoint.importers import deepspeed_states
from zero_strategy.checkpoint.importers.deepspeed_optimizer import find_class, settings_of
from zero_strategy.checkpoint.importers.run import ImportOptions, import_checkpoint
from zero_strategy.checkpoint.inspection import find_damage
from zero_strategy.checkpoint.manifest import Manifest
from zero_strategy.cli import main
from zero_strategy.errors import CheckpointError

FIXTURES = Path(__file__).parents[1] / "fixtures" / "deepspeed"
MOMENTS = ("exp_avg", "exp_avg_sq")
FROZEN = {"frozen.weight", "frozen.bias"}


@pytest.fixture
def source(tmp_path: Path) -> Callable[[str], Path]:
    """Copy a checkpoint, to be spoilt."""
    return lambda case: Path(shutil.copytree(FIXTURES / case, tmp_path / case))


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def optimizer_files(folder: Path) -> list[Path]:
    return sorted((folder / TAG).glob("*_optim_states.pt"))


def edit(path: Path, change: Callable[[dict[str, Any]], object], *, legacy: bool = False) -> None:
    """Change what a file of DeepSpeed holds, and leave out what only DeepSpeed could store again."""
    content = restricted_pickle.load_pickled(path, deepspeed_states.STAND_INS)
    own = content.get("optimizer_state_dict", {})
    for key in ("loss_scaler", "param_slice_mappings"):
        own.pop(key, None)
    change(content)
    edited = path.with_suffix(".edited")
    torch.save(content, edited, _use_new_zipfile_serialization=not legacy)
    edited.replace(path)  # the tensors are mapped from the file that was there


def refused(source: Path, out: Path, options: ImportOptions | None = None) -> CheckpointError:
    """Import what cannot be, and return the error; nothing may look like a checkpoint afterwards."""
    with pytest.raises(CheckpointError) as info:
        import_checkpoint(source, out, options)
    assert not (out / "manifest.json").exists()
    return info.value


# -- what is imported ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_weights_and_moments_are_deepspeeds_own_bit_for_bit(case: str, tmp_path: Path) -> None:
    import_checkpoint(FIXTURES / case, tmp_path / "out")
    has_state = case != "stage2-bf16-round-robin"  # which DeepSpeed's engine gives under the wrong names
    state = load_file(FIXTURES / case / "state.safetensors") if has_state else {}
    with CheckpointReader(tmp_path / "out") as reader:
        assert find_damage(reader) == []
        params, buffers = reader.manifest.params, reader.manifest.buffers
        found = {name: reader.read_tensor(f"model/{name}") for name in (*params, *buffers)}
        for name, param in params.items():
            if param.trainable and has_state:
                assert_same(found[name], state[name], name)
                for key in ("exp_avg", "exp_avg_sq"):
                    assert_same(
                        reader.read_tensor(f"optim/0/{name}/{key}"), state[f"{key}/{name}"], f"{key}/{name}"
                    )
                assert_same(reader.read_tensor(f"optim/0/{name}/step"), torch.tensor(3.0), f"step/{name}")
            found |= dict.fromkeys(param.aliases, found[name])
    if case != "stage1-bf16-fp32-gradients":  # which zero_to_fp32 cannot read
        fp32 = load_file(FIXTURES / case / "fp32.safetensors")
        # Of stage 1 zero_to_fp32 leaves out what is frozen.
        assert found.keys() - fp32.keys() == (FROZEN if "stage1" in case else set())
        for name, tensor in fp32.items():
            assert_same(found[name].to(tensor.dtype), tensor, name)


def assert_same(left: Tensor, right: Tensor, name: str) -> None:
    assert left.dtype == right.dtype and torch.equal(left, right), f"{name}: {left} and {right}"


@pytest.mark.parametrize("case", CASES)
def test_names_dtypes_ties_and_what_is_frozen_are_the_models(case: str, tmp_path: Path) -> None:
    import_checkpoint(FIXTURES / case, tmp_path / "out")
    manifest = Manifest.read(tmp_path / "out")
    model = Tiny()
    dtype = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[case.split("-")[1]]
    assert {name: param.shape for name, param in manifest.params.items()} == {
        name: tuple(param.shape) for name, param in model.named_parameters()
    }
    assert {name for name, param in manifest.params.items() if not param.trainable} == {
        "frozen.weight",
        "frozen.bias",
    }
    assert {param.dtype for param in manifest.params.values()} == {dtype}
    assert manifest.params["embed.weight"].aliases == ("head.weight",)
    assert {name: buffer.shape for name, buffer in manifest.buffers.items()} == {
        "scale": (3,),
        "num_calls": (),
    }
    assert (manifest.stage, manifest.world_size) == (int(case[5]), 2)


def test_param_groups_have_the_order_and_the_settings_of_the_users_optimizer(tmp_path: Path) -> None:
    for case in CASES:
        import_checkpoint(FIXTURES / case, tmp_path / case)
        (record,) = Manifest.read(tmp_path / case).optimizers
        assert record.class_name == "AdamW" and record.plain_state == {}
        groups = [dict(group) for group in record.param_groups]
        assert [group.pop("params") for group in groups] == [
            ["embed.weight", "up.weight", "down.weight"],
            ["norm.weight", "norm.bias", "up.bias"],
        ], case
        common: dict[str, Any] = {
            "eps": 1e-8,
            "amsgrad": False,
            "maximize": False,
            "decoupled_weight_decay": True,
        }
        common |= {"lr": 1e-2 * 0.9**3, "initial_lr": 1e-2}
        rounded = [{**group, "lr": pytest.approx(group["lr"], rel=1e-12)} for group in groups]
        assert rounded == [
            {"weight_decay": 0.1, "betas": [0.9, 0.999], **common},
            {"weight_decay": 0.0, "betas": [0.8, 0.95], **common},
        ], case


def test_client_state_scheduler_counters_and_extra_state_of_modules_are_kept(tmp_path: Path) -> None:
    import_checkpoint(FIXTURES / "stage2-bf16", tmp_path / "out")
    with CheckpointReader(tmp_path / "out") as reader:
        encoded: Any = reader.manifest.extra
        decoded: Any = decode_extra(encoded["$modules"], reader.read_tensor)
    assert decoded["modules"] == {"_extra_state": {"num_seen": 12}}
    extra = decoded["user"]
    tensor = extra["client_state"].pop("tensor")
    assert torch.equal(tensor, torch.arange(3))
    assert extra["client_state"] == {**CLIENT_STATE, "shape": [2, 3]}
    assert (extra["global_steps"], extra["global_samples"], extra["skipped_steps"]) == (3, 24, 0)
    assert extra["lr_scheduler"]["last_epoch"] == 3
    source = extra["imported_from"]
    assert {key: source[key] for key in ("format", "version", "stage", "world_size", "tag")} == {
        "format": "deepspeed", "version": "0.19.8", "stage": 2, "world_size": 2, "tag": TAG,
    }  # fmt: skip


def test_the_loss_scale_goes_on_where_it_was(tmp_path: Path) -> None:
    for case in CASES:
        import_checkpoint(FIXTURES / case, tmp_path / case)
        scaler = Manifest.read(tmp_path / case).loss_scaler
        # 2 ** 8, doubled once: the window is 2 steps, and begins with the first good one.
        expected = {"scale": 512.0, "num_steps": 3, "good_steps": 3, "hysteresis_left": 1}
        assert scaler == (expected if "fp16" in case else None), case


def test_the_source_is_only_read(source: Callable[[str], Path], tmp_path: Path) -> None:
    folder = source("stage3-bf16")
    before = hashes(folder)
    for path in folder.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    import_checkpoint(folder, tmp_path / "out")
    assert hashes(folder) == before


def test_tag_folder_outer_folder_and_tag_name_are_the_same_checkpoint(
    source: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = source("stage2-fp32")
    outer = import_checkpoint(folder, tmp_path / "1")
    inner = import_checkpoint(folder / TAG, tmp_path / "2")
    (folder / "latest").unlink()
    only = import_checkpoint(folder, tmp_path / "3")
    shutil.copytree(folder / TAG, folder / "global_step9")
    error = refused(folder, tmp_path / "4")
    assert "2 checkpoints" in error.what and TAG in error.why and "--tag" in error.fix
    named = import_checkpoint(folder, tmp_path / "5", ImportOptions(tag=TAG))
    assert outer.source == inner.source == only.source == named.source
    assert "no tag 'other'" in refused(folder, tmp_path / "6", ImportOptions(tag="other")).what
    (folder / "latest").write_text("global_step7\n")
    error = refused(folder, tmp_path / "7")
    assert "'global_step7'" in error.what and "global_step9" in error.why


def test_configs_of_transformers_beside_the_tag_are_taken(
    source: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = source("stage2-fp32")
    (folder / "config.json").write_text('{"model_type": "llama", "tie_word_embeddings": true}')
    import_checkpoint(folder, tmp_path / "out")
    hf = Manifest.read(tmp_path / "out").hf
    assert hf is not None and hf.config["model_type"] == "llama" and hf.prefix == ""


def test_weights_only_leaves_the_optimizer_and_the_scale_out(tmp_path: Path) -> None:
    report = import_checkpoint(FIXTURES / "stage3-fp16", tmp_path / "out", ImportOptions(weights_only=True))
    manifest = Manifest.read(tmp_path / "out")
    assert report.optimizer is None and manifest.optimizers == () and manifest.loss_scaler is None
    assert not [name for name in manifest.tensors if name.startswith("optim/")]


# -- the optimizer's class -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "config", "wanted", "expected"),
    [
        ({"decoupled_weight_decay": True, "amsgrad": False, "betas": 0}, {}, None, "AdamW"),
        ({"decoupled_weight_decay": False, "amsgrad": False, "betas": 0}, {}, None, "Adam"),
        ({"momentum": 0.9, "nesterov": False}, {"optimizer": {"type": "AdamW"}}, None, "SGD"),
        ({"betas": 0, "bias_correction": True}, {"optimizer": {"type": "Adam"}}, None, "AdamW"),
        (
            {"betas": 0, "bias_correction": True},
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
            None,
            "Adam",
        ),
        ({"betas": 0, "bias_correction": True}, {}, None, "AdamW"),
        ({"betas": 0}, {"optimizer": {"type": "Lion"}}, None, "Lion"),
        ({"betas": 0}, {"optimizer": {"type": "RAdam"}}, None, "RAdam"),
        ({"betas": 0, "bias_correction": True}, {}, "Adam", "Adam"),
    ],
)
def test_the_class_is_told_from_settings_config_or_the_user(
    settings: dict[str, Any], config: dict[str, Any], wanted: str | None, expected: str
) -> None:
    assert find_class([settings], config, wanted).name == expected


def test_a_class_that_was_assumed_is_said_where_it_matters() -> None:
    decays = {"betas": 0, "bias_correction": True, "weight_decay": 0.1}
    note = find_class([decays], {}, None).note
    assert note is not None and "--optimizer Adam" in note
    assert find_class([{**decays, "weight_decay": 0.0}], {}, None).note is None
    with pytest.raises(CheckpointError) as info:
        find_class([{"params": [0], "betas": (0.9, 0.95), "lr": 1.0}], {}, None)
    assert "betas, lr" in info.value.why and "--optimizer AdamW" in info.value.fix


def test_settings_without_a_counterpart_are_refused_or_dropped() -> None:
    group = {
        "params": [0],
        "lr": 0.1,
        "betas": (0.9, 0.95),
        "bias_correction": True,
        "step": 3,
        "fused": True,
    }
    assert settings_of(group, "Adam") == {
        "lr": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0, "amsgrad": False, "maximize": False,
        "decoupled_weight_decay": False,
    }  # fmt: skip
    assert settings_of(group, "MyLion") == {"lr": 0.1, "betas": [0.9, 0.95]}
    with pytest.raises(CheckpointError, match="bias_correction=False"):
        settings_of({**group, "bias_correction": False}, "AdamW")
    with pytest.raises(CheckpointError, match="experts"):
        settings_of({**group, "moe": True}, "AdamW")


# -- what is refused -----------------------------------------------------------------------------------------


class Hostile:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (shutil.copyfile, (__file__, str(self.marker)))


@pytest.mark.parametrize("where", ["client_state", "optimizer", "legacy"])
def test_a_pickle_that_names_anything_else_is_refused_by_name_and_not_run(
    where: str, source: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, marker = source("stage2-fp32"), tmp_path / "was-run"
    path = optimizer_files(folder)[1] if where == "optimizer" else folder / TAG / "mp_rank_00_model_states.pt"
    edit(path, lambda content: content.update(extra=Hostile(marker)), legacy=where == "legacy")
    error = refused(folder, tmp_path / "out")
    assert path.name in error.what and "'shutil.copyfile'" in error.what
    assert "Nothing was run" in error.why
    assert not marker.exists()
    torch.load(path, weights_only=False)  # the usual way does run it
    assert marker.exists()


def test_a_module_that_may_never_be_named_is_refused(source: Callable[[str], Path], tmp_path: Path) -> None:
    class Shell:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.system, (f"touch {tmp_path / 'was-run'}",))

    folder = source("stage3-bf16")
    path = optimizer_files(folder)[0]
    torch.save({"optimizer_state_dict": Shell()}, path)
    error = refused(folder, tmp_path / "out")
    assert "posix.system" in error.what or "nt.system" in error.what
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("case", ["stage1-fp32", "stage3-bf16"])
def test_missing_files_are_named(case: str, source: Callable[[str], Path], tmp_path: Path) -> None:
    folder = source(case)
    for rank in (1, 0):
        missing = optimizer_files(folder)[rank]
        missing.rename(tmp_path / "aside")
        error = refused(folder, tmp_path / "out")
        assert missing.name in error.what and "missing" in error.what
        (tmp_path / "aside").rename(missing)
    model_file = sorted((folder / TAG).glob("*_model_states.pt"))[-1]
    model_file.unlink()
    error = refused(folder, tmp_path / "out")
    assert model_file.name in error.what
    for path in optimizer_files(folder):
        path.unlink()
    if case == "stage3-bf16":
        assert "no optimizer files of ZeRO" in refused(folder, tmp_path / "out").what


def test_truncated_and_foreign_files_are_named(source: Callable[[str], Path], tmp_path: Path) -> None:
    folder = source("stage2-fp32")
    for path in sorted((folder / TAG).glob("*.pt")):
        whole = path.read_bytes()
        for content in (
            whole[:100],
            whole[: len(whole) // 2],
            whole[:-1],
            b"",
            b"not a checkpoint",
            b"PK\x03\x04",
        ):
            path.write_bytes(content)
            error = refused(folder, tmp_path / "out")
            assert path.name in error.what, (path, content[:10])
        torch.save([1, 2], path)
        assert path.name in refused(folder, tmp_path / "out").what
        path.write_bytes(whole)


def test_files_of_several_saves_are_refused(source: Callable[[str], Path], tmp_path: Path) -> None:
    folder = source("stage2-fp32")
    first, second = optimizer_files(folder)

    def error_with(name: str, content: bytes) -> CheckpointError:
        path = folder / TAG / name
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(content)
        error = refused(folder, tmp_path / "out")
        path.write_bytes(before) if before is not None else path.unlink()
        assert "more than one save" in error.what
        return error

    third = first.name.replace("rank_0", "rank_2", 1)
    assert third in error_with(third, first.read_bytes()).why
    assert "bf16_" in error_with(f"bf16_{first.name}", first.read_bytes()).why
    other_model = "zero_pp_rank_0_mp_rank_00_model_states.pt"
    assert "stage 3" in error_with(other_model, b"").why
    stage1 = optimizer_files(FIXTURES / "stage1-fp32")[1]
    assert "zero_stage" in error_with(second.name, stage1.read_bytes()).why
    shutil.copyfile(second, tmp_path / "later.pt")
    edit(tmp_path / "later.pt", one_step_later)
    assert "[4.0, 4.0] steps" in error_with(second.name, (tmp_path / "later.pt").read_bytes()).why


def one_step_later(content: dict[str, Any]) -> None:
    for entries in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        entries["step"] += 1


def test_model_states_of_another_save_are_refused_at_stage_3(
    source: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = source("stage3-bf16")
    path = folder / TAG / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    edit(path, lambda content: content.update(global_steps=4))
    error = refused(folder, tmp_path / "out")
    assert "more than one save" in error.what and "'global_steps'" in error.why and path.name in error.why


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor or pipeline parallelism"),
        ("mp_rank_01_model_states.pt", "tensor or pipeline parallelism"),
        ("layer_03-model_00-model_states.pt", "pipeline parallelism"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "expert parallelism"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "expert parallelism"),
        ("zero/", "universal"),
        ("offloaded_tensors/", "NVMe"),
    ],
)
def test_other_parallelism_is_refused_with_the_reason(
    name: str, kind: str, source: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = source("stage2-fp32")
    if name.endswith("/"):
        (folder / TAG / name).mkdir()
    else:
        (folder / TAG / name).write_bytes(b"")
    error = refused(folder, tmp_path / "out")
    assert kind in error.what


@pytest.mark.parametrize(
    ("names", "what"),
    [
        ([], "nothing that can be imported"),
        (["notes.txt"], "nothing that can be imported"),
        (["manifest.json"], "a checkpoint of zero_strategy"),
        ([".metadata", "__0_0.distcp"], "torch.distributed.checkpoint"),
        (["model.safetensors", "config.json"], "Hugging Face weights"),
        (["pytorch_model.bin"], "torch files"),
        (["latest_universal"], "a universal checkpoint"),
    ],
)
def test_a_folder_of_another_kind_is_named(names: list[str], what: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in names:
        (folder / name).write_text("{}")
    error = refused(folder, tmp_path / "out")
    assert what in error.what
    assert (", ".join(sorted(names)) or "nothing") in error.why


def test_files_and_missing_folders_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_text("")
    assert "is a file" in refused(tmp_path / "a.ckpt", tmp_path / "out").what
    assert "does not exist" in refused(tmp_path / "b", tmp_path / "out").what


def test_shapes_that_do_not_fit_the_flat_tensors_are_refused(
    source: Callable[[str], Path], tmp_path: Path
) -> None:
    for case in ("stage2-fp32", "stage3-fp32"):
        folder = source(case)
        for path in (folder / TAG).glob("*_model_states.pt"):
            edit(
                path, lambda content: content["param_shapes"][0].update({"embed.weight": torch.Size([11, 9])})
            )
        error = refused(folder, tmp_path / "out")
        assert "flat tensor 0" in error.why


# -- what is written -----------------------------------------------------------------------------------------


def test_a_second_run_replaces_its_own_output_and_nothing_else(
    source: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, out = source("stage2-fp32"), tmp_path / "out"
    import_checkpoint(folder, out)
    first = Manifest.read(out)
    import_checkpoint(folder, out)
    second = Manifest.read(out)
    assert first.checkpoint_id != second.checkpoint_id
    assert len(list(out.iterdir())) == 3  # the manifest and two files
    with pytest.raises(CheckpointError, match="another checkpoint"):
        import_checkpoint(FIXTURES / "stage3-bf16", out)
    assert Manifest.read(out).checkpoint_id == second.checkpoint_id
    import_checkpoint(FIXTURES / "stage3-bf16", out, ImportOptions(force=True))
    assert Manifest.read(out).stage == 3
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("")
    assert "thesis.txt" in refused(folder, tmp_path / "full").why
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        import_checkpoint(folder, tmp_path / "file")
    for inside in (folder, folder / TAG, folder / TAG / "out", folder / "out"):
        assert "is the source" in refused(folder, inside).what


def test_the_command_says_what_it_did_and_explains_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["import", str(FIXTURES / "stage2-bf16"), str(out)]) == 0
    printed = capsys.readouterr().out
    assert "format deepspeed, version 0.19.8, stage 2, world_size 2, tag global_step3" in printed
    assert "wrote 8 parameters" in printed and "optimizer: AdamW" in printed
    assert main(["import", str(FIXTURES / "stage2-bf16"), str(out), "--optimizer", "Adam", "--force"]) == 0
    assert "optimizer: Adam\n" in capsys.readouterr().out
    assert main(["import", str(tmp_path / "none"), str(out)]) == 2
    error = capsys.readouterr().err
    assert "does not exist" in error and "why:" in error and "fix:" in error and "Traceback" not in error
