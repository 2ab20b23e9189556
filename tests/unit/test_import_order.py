"""The package keeps its layout: who imports whom, who communicates, who knows the stage, how long things are.

Oracle: the rules of the design, written out below as lists with their reasons; sources are parsed only.
Tolerance: none. A module that is planned but not yet there is fine; a module that is in no list is not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = "zero_strategy"
ROOT = Path(__file__).resolve().parents[2] / PACKAGE

# A module imports only from entries before its own. A folder stands for its modules without an entry.
ORDER = [
    "errors", "log", "compat", "tensors",
    "config_keys", "config_source", "config_blocks", "config", "config_explain", "loss_scaler",
    "layout", "bucketing", "estimate",
    "comm.stops", "comm.causes", "comm.waits", "comm.processes", "comm.links", "comm.main_thread",
    "comm.words", "comm.letters", "comm.watch", "comm.topology", "comm.ledger", "comm.ordered",
    "comm.collectives", "comm.together",
    "buffers", "placeholder", "late", "gradient_wire", "bucket_grads", "bucket",
    "first_weights", "materialize", "module_buffers", "precision", "average",
    "passes", "need_order", "live_buckets", "lifecycle", "reducer",
    "optim.places", "optim.elementwise", "optim.clip", "optim.overflow", "optim.step_gradients",
    "optim.full_state", "optim.publish", "optim.slice_step", "optim.sharded_optimizer", "optim.ownership",
    "intact", "bucket_set",
    "checkpoint.durable", "checkpoint.writer_process", "checkpoint.host_copy", "checkpoint.background",
    "checkpoint.pending", "checkpoint.saves",
    "checkpoint.elements", "checkpoint.rng", "checkpoint.folders", "checkpoint.safetensors_io",
    "checkpoint.records", "checkpoint.extra", "checkpoint.own_files", "checkpoint.manifest",
    "checkpoint.staging", "checkpoint.tags",
    "checkpoint.format",
    "checkpoint.inspection", "checkpoint.hf",
    "checkpoint.full_weights", "checkpoint.parts", "checkpoint.averages",
    "checkpoint.stored_weights", "checkpoint.fits", "checkpoint.comparing", "checkpoint.reading",
    "checkpoint.opened", "checkpoint.save",
    "checkpoint.streamed", "checkpoint.output_file", "checkpoint.torch_archive",
    "checkpoint.export_selection", "checkpoint.weight_files", "checkpoint.export_target", "checkpoint.export",
    "checkpoint.consolidate", "checkpoint.sixteen_bit",
    "checkpoint.restricted_pickle", "checkpoint.importers.imported",
    "checkpoint.importers.deepspeed_files", "checkpoint.importers.deepspeed_layout",
    "checkpoint.importers.deepspeed_optimizer", "checkpoint.importers.deepspeed_states",
    "checkpoint.importers.deepspeed_runs", "checkpoint.importers.deepspeed",
    "checkpoint.importers.detect", "checkpoint.importers.run",
    "root_methods", "report", "engine_checks", "engine_state", "engine", "clip_given", "ema",
    "front_ends.importing", "front_ends.upstream",
    "front_ends.settings", "front_ends.grad_scaler", "front_ends.engines", "front_ends.generation",
    "front_ends.mixing",
    "peft.upstream", "peft.adapters", "peft.adalora", "peft.starting", "peft",
    "lightning", "accelerate", "trl.upstream", "trl.bodies", "trl.rebinding", "trl", "transformers",
    "cli", "run",
]  # fmt: skip
# These gather names from below for the user and hold nothing of their own.
EXEMPT = {"", "__main__"}
# The parameter, the gradient and the optimizer side work on a bucket and never on one another.
SIDES = ["lifecycle", "reducer", "optim"]

COLLECTIVES = {
    "all_reduce", "all_reduce_coalesced", "broadcast", "broadcast_object_list", "reduce",
    "all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object", "all_gather_coalesced",
    "gather", "gather_object", "scatter", "scatter_object_list",
    "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single",
    "all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv",
    "native_all_gather", "native_reduce_scatter_sum",  # of compat
    "send_object_list", "recv_object_list", "batch_isend_irecv", "barrier", "monitored_barrier",
}  # fmt: skip

MAY_CALL_COLLECTIVES = {
    "comm": "counts what is sent",
    "compat": "gives the collectives that torch renamed one name, for comm/",
}
MAY_READ_STAGE = {
    "config": "owns it",
    "bucketing": "turns it into three booleans per bucket",
    "estimate": "prints one row of formulas per stage",
    "report": "prints the formulas of the stage",
    "checkpoint.inspection": "prints it",
    "lightning": "names the registered strategies and shows the stage in messages",
}

FRAMEWORKS = {
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "accelerate",
    "transformers",
    "peft",
    "trl",
}
MAY_IMPORT_FRAMEWORKS = {"peft", "lightning", "accelerate", "transformers"}

MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 80


class Import(NamedTuple):
    """One imported module or name: `target` is dotted and complete; `line` is where."""

    target: str
    line: int


class Module(NamedTuple):
    """A source file: `name` is dotted, without the package ("comm.ledger"); `comm/__init__.py` is "comm"."""

    name: str
    path: Path
    tree: ast.Module
    num_lines: int

    def at(self, line: int) -> str:
        return f"{self.path.relative_to(ROOT.parent)}:{line}"


def parse(name: str, path: Path, source: str) -> Module:
    return Module(name, path, ast.parse(source), len(source.splitlines()))


@cache
def all_modules() -> list[Module]:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(parse(name, path, path.read_text()))
    return found


def imports_of(module: Module) -> Iterator[Import]:
    """All imports, also those inside functions and under TYPE_CHECKING, relative ones resolved."""
    own = module.name.split(".") if module.name else []
    folder = own if module.path.name == "__init__.py" else own[:-1]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = [PACKAGE, *folder][: len(folder) + 2 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (Import(f"{base}.{alias.name}", node.lineno) for alias in node.names)


def line_of(name: str) -> int | None:
    """The place of a module, or of a name in one, in ORDER: the longest line that is a prefix of it."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in ORDER:
            return ORDER.index(".".join(parts[:length]))
    return None


def is_module(name: str) -> bool:
    return name != "" and any(name == module.name for module in all_modules())


def is_within(name: str, folders: set[str] | dict[str, str]) -> bool:
    return any(name == folder or name.startswith(folder + ".") for folder in folders)


def side_of(name: str) -> str | None:
    return next((side for side in SIDES if is_within(name, {side})), None)


# -- rules: each yields one sentence per breach --------------------------------------------------------------


def order_breaches(module: Module) -> Iterator[str]:
    own = line_of(module.name)
    is_folder = module.path.name == "__init__.py"
    if own is None and not is_folder and module.name not in EXEMPT:
        yield f"{module.at(1)}: {module.name} has no place in ORDER; give it one"
    for target, line in imports_of(module):
        if not is_within(target, {PACKAGE}) or module.name in EXEMPT:
            continue
        target = target[len(PACKAGE) + 1 :]
        # A folder's own file may gather its modules; for the others it counts as the folder's last line.
        inside = is_within(target, {module.name}) or (own is not None and line_of(target) == own)
        place = line_of(target)
        if place is None:
            last = [
                i for i, entry in enumerate(ORDER) if is_within(entry, {target.rpartition(".")[0] or target})
            ]
            place = last[-1] if last else None
        if place is None:
            if not is_module(target.rpartition(".")[0]):  # a module without a place is reported as such
                yield f"{module.at(line)}: imports {target or PACKAGE}, which is nothing in ORDER"
        elif not inside and own is not None and place >= own:
            yield f"{module.at(line)}: {module.name} imports {target}, which is not above it"
        if side_of(module.name) and side_of(target) not in (None, side_of(module.name)):
            yield f"{module.at(line)}: the {module.name} side imports the {target} side"


def collective_breaches(module: Module) -> Iterator[str]:
    if is_within(module.name, MAY_CALL_COLLECTIVES):
        return
    for target, line in imports_of(module):
        base, _, name = target.rpartition(".")
        if base.startswith(("torch.distributed", f"{PACKAGE}.compat")) and name in COLLECTIVES:
            yield f"{module.at(line)}: imports {target}; collectives are called in comm/ only"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES:
            owner = ast.unparse(node.value)
            if owner in ("dist", "c10d", "distributed", "compat") or owner.startswith("torch.distributed"):
                yield f"{module.at(node.lineno)}: {owner}.{node.attr}; collectives are called in comm/ only"


def stage_breaches(module: Module) -> Iterator[str]:
    if is_within(module.name, MAY_READ_STAGE):
        return
    keywords = [node for node in ast.walk(module.tree) if isinstance(node, ast.keyword)]
    passed_on = [
        keyword.value for keyword in keywords if keyword.arg == "stage"
    ]  # f(stage=x.stage) decides nothing
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr == "stage" and node not in passed_on:
            yield f"{module.at(node.lineno)}: reads {ast.unparse(node)}; ask a bucket's two booleans instead"


def framework_breaches(module: Module) -> Iterator[str]:
    if is_within(module.name, MAY_IMPORT_FRAMEWORKS):
        return
    for target, line in imports_of(module):
        if target.split(".")[0] in FRAMEWORKS:
            yield f"{module.at(line)}: imports {target}; frameworks are imported in front ends only"


def size_breaches(module: Module) -> Iterator[str]:
    if module.num_lines > MAX_FILE_LINES:
        yield f"{module.at(1)}: {module.num_lines} lines; a file has at most {MAX_FILE_LINES}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield f"{module.at(node.lineno)}: {node.name}: {num_lines} lines, not <= {MAX_FUNCTION_LINES}"


RULES = [order_breaches, collective_breaches, stage_breaches, framework_breaches, size_breaches]


# -- tests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_has_no(rule) -> None:
    breaches = [breach for module in all_modules() for breach in rule(module)]
    assert not breaches, "\n".join(breaches)


def test_these_tests_read_the_modules_of_the_package() -> None:
    assert "errors" in [module.name for module in all_modules()]


@pytest.mark.parametrize(
    ("name", "source", "breach"),
    [
        (
            "layout",
            "from zero_strategy.engine import ZeroEngine",
            "imports engine.ZeroEngine, which is not above it",
        ),
        ("layout", "def f():\n    import zero_strategy.bucket", "layout.py:2: layout imports bucket"),
        ("layout", "from . import bucket", "layout imports bucket"),
        ("layout", "from .optim import clip", "layout imports optim.clip"),
        ("layout", "import zero_strategy.cli", "layout imports cli"),
        ("layout", "from zero_strategy import ZeroEngine", "imports ZeroEngine, which is nothing in ORDER"),
        ("comm.ledger", "from .collectives import Collectives", "comm.ledger imports comm.collectives"),
        ("comm.ledger", "from zero_strategy.comm import Collectives", "comm.ledger imports comm.Collectives"),
        ("comm.ledger", "from ..engine import ZeroEngine", "comm.ledger imports engine"),
        ("optim.clip", "from ..reducer import GradReducer", "the optim.clip side imports the reducer"),
        (
            "optim.clip",
            "from zero_strategy import lifecycle",
            "the optim.clip side imports the lifecycle side",
        ),
        (
            "reducer",
            "from zero_strategy.lifecycle import ParamLifecycle",
            "the reducer side imports the lifecycle",
        ),
        ("notes", "x = 1", "notes has no place in ORDER"),
        ("reducer", "dist.all_reduce(x)", "dist.all_reduce; collectives are called in comm/ only"),
        ("engine", "torch.distributed.barrier()", "torch.distributed.barrier; collectives"),
        ("engine", "from torch.distributed import broadcast as b", "imports torch.distributed.broadcast"),
        ("bucket", "from .compat import native_all_gather", "imports zero_strategy.compat.native_all_gather"),
        ("engine", "import torch\nif self.config.stage == 3: ...", "engine.py:2: reads self.config.stage"),
        ("engine", "def f():\n    import lightning.pytorch as pl", "imports lightning.pytorch; frameworks"),
        ("engine", "from transformers.utils import x", "imports transformers.utils.x; frameworks"),
        ("engine", "x = 1\n" * 501, "501 lines; a file has at most 500"),
        ("engine", "def long():\n" + "    x = 1\n" * 80, "long: 81 lines"),
    ],
)
def test_breach_is_found(name: str, source: str, breach: str) -> None:
    module = parse(name, ROOT.joinpath(*name.split(".")).with_suffix(".py"), source)
    breaches = [text for rule in RULES for text in rule(module)]
    assert any(breach in text for text in breaches), breaches


@pytest.mark.parametrize(
    ("name", "source"),
    [
        (
            "bucket",
            "from zero_strategy.comm.collectives import Collectives\nfrom .layout import BucketLayout",
        ),
        ("bucket", "from .comm import Collectives"),
        ("comm.ordered", "import torch.distributed as dist\ndist.all_to_all_single(a, b)"),
        (
            "lightning.strategy",
            "from .registry import register\nimport lightning.pytorch as pl\nself.config.stage",
        ),
        ("optim.sharded_optimizer", "from .clip import clip\nfrom ..precision import LossScaler"),
        ("checkpoint.save", "from zero_strategy.optim.sharded_optimizer import ShardedOptimizer"),
        ("__main__", "from zero_strategy.cli import main"),
        ("engine", "Parts(stage=self.config.stage)"),
        ("engine", "self.bucket.broadcast(x)\nimport torch.distributed as dist\ndist.get_rank()"),
    ],
)
def test_allowed_source_has_no_breach(name: str, source: str) -> None:
    module = parse(name, ROOT.joinpath(*name.split(".")).with_suffix(".py"), source)
    assert [text for rule in RULES for text in rule(module)] == []


def test_folder_file_may_gather_its_own_modules() -> None:
    module = parse(
        "comm",
        ROOT / "comm" / "__init__.py",
        "from .ledger import Ledger\nfrom zero_strategy.comm import topology",
    )
    assert [text for rule in RULES for text in rule(module)] == []
