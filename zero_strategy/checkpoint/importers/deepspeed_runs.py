"""What one rank of DeepSpeed has saved, as runs of elements of named tensors.

Called by `deepspeed`. A rank's files are mapped while its runs are in use, and let go of with them. It checks
that every rank's files fit the first one's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from zero_strategy.checkpoint.importers.deepspeed_files import Files, mixed
from zero_strategy.checkpoint.importers.deepspeed_layout import (
    Fragment,
    numel_of_parts,
    numel_of_whole,
    parts_of_each,
    parts_of_whole,
)
from zero_strategy.checkpoint.importers.deepspeed_optimizer import state_of
from zero_strategy.checkpoint.importers.deepspeed_states import (
    ModelState,
    RankState,
    is_plain,
    malformed,
    naming,
    read_model,
    read_rank,
)
from zero_strategy.checkpoint.records import model_tensor_name, optim_tensor_name
from zero_strategy.checkpoint.save import Run


class RankReader:
    """Reads what each rank has saved.

    Attributes:
        files: Of the save.
        first: Rank 0's optimizer file, whose numbers those of the others are compared with.
        model: Rank 0's model states.
        whole: Tensors that were saved whole: buffers, frozen parameters below stage 3, and others.
        class_name: Of the optimizer; None leaves its state out.
        drop_unknown: See `load_pickled`.
    """

    def __init__(
        self,
        files: Files,
        first: RankState,
        model: ModelState,
        whole: Mapping[str, Tensor],
        class_name: str | None,
        *,
        drop_unknown: bool,
    ) -> None:
        self.files = files
        self.first = first
        self.model = model
        self.whole = whole
        self.class_name = class_name
        self.drop_unknown = drop_unknown

    def runs_of(self, rank: int) -> Iterator[Run]:
        """Yield what a rank has saved.

        Args:
            rank: Of the run that saved it.

        Yields:
            Elements of weights, moments and the like, once over all ranks, mapped from the rank's files.

        Raises:
            CheckpointError: Its files are damaged, or of another save than rank 0's.
        """
        path = self.files.optim[rank]
        state = read_rank(path, drop_unknown=self.drop_unknown)
        with naming(path):
            self._check_same(state)
            for number in range(len(state.weights)):
                yield from self._runs_of_flat(state, number, rank)
        with naming(self.files.model[rank if state.cuts_by_param else 0]):
            if state.cuts_by_param:
                yield from self._frozen_parts(rank)
            if rank == 0:
                for name, tensor in self.whole.items():
                    yield Run(model_tensor_name(name), tuple(tensor.shape), 0, tensor.reshape(-1))

    # -- helpers --

    def _runs_of_flat(self, state: RankState, number: int, rank: int) -> Iterator[Run]:
        weights, shapes = state.weights[number], self.model.shapes[number]
        entries: dict[str, Any] = {}
        if self.class_name is not None:
            entries = state_of(state.state[number], group_of(state, number), self.class_name)
        part_numel = state.part_numel(number)
        for fqn, start, numel, offset in self._fragments(state, number, rank):
            piece = slice(offset, offset + numel)
            yield Run(model_tensor_name(fqn), shapes[fqn], start, weights[piece])
            for key, value in entries.items():
                name = optim_tensor_name(0, fqn, key)
                kind = kind_of(value, weights.numel(), part_numel)
                if kind == "elements":
                    yield Run(name, shapes[fqn], start, value[piece])
                elif kind == "scalar" and start == 0:
                    yield Run(name, (), 0, value.reshape(1))

    def _fragments(self, state: RankState, number: int, rank: int) -> list[Fragment]:
        shapes, found = self.model.shapes[number], state.weights[number].numel()
        world_size = self.first.world_size
        if state.cuts_by_param:
            needed = numel_of_parts(shapes, world_size)
            if found != needed:
                raise _misfit(state, number, found, needed)
            return parts_of_each(shapes, world_size, rank)
        part_numel = state.part_numel(number)
        fragments = parts_of_whole(shapes, state.gaps[number], part_numel, rank)
        needed = max((fragment.offset + fragment.numel for fragment in fragments), default=0)
        too_much = world_size * part_numel - numel_of_whole(shapes, state.gaps[number])
        # The whole is padded to a multiple of twice the number of ranks.
        if (
            part_numel != self.first.part_numel(number)
            or not 0 <= too_much < 2 * world_size
            or needed > found
        ):
            raise _misfit(state, number, found, needed)
        return fragments

    def _frozen_parts(self, rank: int) -> Iterator[Run]:
        model = self.model
        if rank:
            model = read_model(self.files.model[rank], drop_unknown=self.drop_unknown)
        same = ("global_steps", "global_samples", "param_shapes", "frozen_param_shapes")
        differing = [key for key in same if model.content.get(key) != self.model.content.get(key)]
        if differing:
            why = f"The file {model.path.name} has another {differing[0]!r} than {self.model.path.name}."
            raise mixed(self.files.folder, why)
        for fqn, shape in model.frozen_shapes.items():
            fragments = parts_of_each({fqn: shape}, self.first.world_size, rank)
            values = model.frozen.get(fqn)
            for _, start, numel, _ in fragments:
                if values is None or values.numel() < numel:
                    raise malformed(model.path, f"the frozen parameter {fqn!r} is not in it")
                yield Run(model_tensor_name(fqn), shape, start, values.reshape(-1)[:numel])

    def _check_same(self, state: RankState) -> None:
        """Raise if a rank's file is of another save than rank 0's."""
        for what in ("zero_stage", "world_size", "version"):
            ours, theirs = getattr(self.first, what), getattr(state, what)
            if ours != theirs:
                why = f"The file {state.path.name} says {what} {theirs}, {self.first.path.name} says {ours}."
                raise mixed(self.files.folder, why)
        if len(state.weights) != len(self.model.shapes):
            what = f"{len(state.weights)} flat tensors, and the model states have {len(self.model.shapes)}"
            raise mixed(self.files.folder, f"The file {state.path.name} has {what}.")
        ours, theirs = _facts_of_state(self.first), _facts_of_state(state)
        if ours != theirs:
            why = f"The state of the optimizer in {state.path.name} is other than in {self.first.path.name}."
            raise mixed(self.files.folder, why)
        ours, theirs = _steps(self.first), _steps(state)
        if ours != theirs:
            names = f"{state.path.name} was saved after {theirs} steps, {self.first.path.name} after {ours}"
            why = f"The file {names}."
            raise mixed(self.files.folder, why)


def group_of(state: RankState, number: int) -> dict[str, Any]:
    """Return the param group that a flat tensor belongs to; {} if it belongs to none."""
    return next((group for group in state.groups if number in group["params"]), {})


def kind_of(value: object, numel: int, part_numel: int) -> str:
    """Say what an entry of the state of a flat tensor is: "elements", "scalar", "plain" or "other".

    Args:
        value: The entry.
        numel: Elements of the flat tensor on this rank ...
        part_numel: ... and with the padding at its end.
    """
    if not isinstance(value, Tensor):
        return "plain"
    if not is_plain(value):
        return "other"
    if value.dim() == 1 and value.numel() in (numel, part_numel):
        return "elements"
    return "scalar" if value.numel() == 1 else "other"


def _facts_of_state(state: RankState) -> list[dict[str, str]]:
    """Return what every rank has alike of each flat tensor: which entries of which kind."""
    return [
        {
            key: kind_of(value, state.weights[number].numel(), state.part_numel(number))
            for key, value in entries.items()
        }
        for number, entries in enumerate(state.state)
    ]


def _steps(state: RankState) -> list[float]:
    steps = [entries.get("step", group_of(state, i).get("step", 0)) for i, entries in enumerate(state.state)]
    return [float(step) for step in steps]


def _misfit(state: RankState, number: int, found: int, needed: int) -> Exception:
    why = (
        f"its flat tensor {number} has {found} elements, and its parameters need {needed} on each of "
        f"{state.world_size} ranks"
    )
    return malformed(state.path, why)
