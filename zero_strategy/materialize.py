"""Moves a model into its buckets, and gives what is on the meta device memory and first values on the way.

Called by the engine, once. It decides in which order buckets adopt their parameters, so that a model built on
meta is never whole on a rank. It must not know the stage, hooks or optimizers.

[Note: First values]
Modules that own meta tensors are filled one after the other, children before their parents, in registration
order: the order in which a constructor calls `reset_parameters` on the way. Their parameters get their memory
where the bucket wants it, so nothing is there twice. A bucket is adopted, and sharded, when nobody within
its unit will write to it any more; the root's buckets, which take small parameters of all units, come last.
So the root and one unit are whole at once.

Every rank fills, and rank 0's values count. With the same seed they are, bit for bit, those of the same model
built on the device of the shards, if the constructors draw random numbers in `reset_parameters` only and
build submodules in the order in which they are registered. They are others if something is drawn elsewhere
(`model.apply(init)` after construction: pass it as `param_init_fn`). What has values keeps them: a real
tensor, and a tied one that its first module has filled. The later module writes to a stand-in then, so that
as many numbers are drawn as ever.

[Note: Weights from files]
Parameters that a source has (first_weights.py) are read, not filled, and before all others. Of a bucket of
nothing else every rank reads its own part, and no more than that is allocated; where parameters stay whole
the parts are gathered. In a bucket that has others too (a new head beside a norm), rank 0 reads them whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.bucket import Bucket
from zero_strategy.bucketing import BucketPlan
from zero_strategy.comm.collectives import Collectives
from zero_strategy.comm.together import agreed
from zero_strategy.comm.topology import usual_device
from zero_strategy.compat import attention_reset, give_memory
from zero_strategy.errors import ConfigError, first_line
from zero_strategy.first_weights import FirstWeights
from zero_strategy.log import log_event

InitFn = Callable[[nn.Module], object]

_CHUNK_NUMEL = 1 << 20  # looked at at once for what was not filled: the comparison needs a byte for each
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def shard_device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """Return where a model's shards live.

    Args:
        model: The model.
        device: What the user asks for; None for where the parameters are that are somewhere. So for meta,
            which `check_first_values` refuses.
    """
    if device is not None and torch.device(device).type != "meta":
        return torch.device(device)
    return next((param.device for param in model.parameters() if not param.is_meta), None) or usual_device()


def check_first_values(
    model: nn.Module, param_init_fn: InitFn | None, device: torch.device | str | None
) -> ConfigError | None:
    """Return why what is on meta cannot be filled, or None."""
    stored = FirstWeights(model)
    if device is not None and torch.device(device).type == "meta":
        return ConfigError(
            what="device='meta' was asked for.",
            why="Shards hold values, and a meta tensor has none.",
            fix="Leave the model on meta and name the device to train on, such as device='cpu'.",
        )
    if param_init_fn is not None and not callable(param_init_fn):
        return ConfigError(
            what=f"param_init_fn is a {type(param_init_fn).__name__}, which cannot be called.",
            why="It is called with each module that owns parameters or buffers on the meta device.",
            fix="Pass a function of one module that fills its own parameters and buffers in place.",
        )
    if error := stored.check(model):
        return error
    claimed: set[int] = set()
    helpless = []
    for name, module in _on_meta(model, stored):
        empty = _empty(module, stored)
        first = [key for key, tensor in empty.items() if id(tensor) not in claimed]
        claimed.update(id(tensor) for tensor in _own(module).values())
        if first and _fill_of(module, param_init_fn) is None:
            helpless.append(f"{name or 'the root'!r} ({type(module).__name__}: {', '.join(first)})")
    if not helpless:
        return None
    return ConfigError(
        what=f"{len(helpless)} modules own parameters or buffers on the meta device and have no "
        f"reset_parameters(): {_first_five(helpless)}.",
        why="A meta tensor has a shape but no values. The engine gives it memory, and the module that owns "
        "it fills it.",
        fix="Give their classes a reset_parameters(self) that fills what they own, or pass "
        "param_init_fn=function(module), to ZeroEngine or ZeroStrategy (for transformers: "
        "model._init_weights). Or build the model on the CPU (or model.to_empty(device='cpu')) and fill it "
        "yourself.",
    )


class Adoption:
    """The order in which modules are filled and buckets adopt them. See [Note: First values]."""

    def __init__(
        self,
        model: nn.Module,
        buckets: Sequence[tuple[Bucket, BucketPlan]],
        device: torch.device,
        param_init_fn: InitFn | None,
    ) -> None:
        """Look at the model; nothing is changed yet.

        Args:
            model: A model that `check_first_values` has passed.
            buckets: Each bucket with its plan, all empty.
            device: Where the shards live.
            param_init_fn: What to call instead of `reset_parameters`.
        """
        self._model = model
        self._device = device
        self._param_init_fn = param_init_fn
        self._stored = FirstWeights(model)
        self._modules = list(_on_meta(model, self._stored))
        self._places = {
            id(param): (bucket, index) for bucket, _ in buckets for index, param in enumerate(bucket.params)
        }
        self._names = {id(tensor): fqn for fqn, tensor in [*model.named_buffers(), *model.named_parameters()]}
        self._meta = {id(t) for module in model.modules() for t in _own(module).values() if t.is_meta}
        self._waits = self._find_waits(buckets)
        self._rooms: dict[Bucket, list[Tensor]] = {}  # of buckets that are being filled

    def run(self, collectives: Collectives) -> Iterator[tuple[Bucket, Tensor]]:
        """Fill and adopt everything. Collective.

        Args:
            collectives: To agree on errors before anybody waits for a broadcast.

        Yields:
            Each bucket whose values were rounded, with this rank's part of them before, [owned_numel] fp32.

        Raises:
            ConfigError: A module could not be filled; on all ranks.
        """
        for buffer in self._model.buffers():
            if not buffer.is_meta:
                buffer.data = buffer.data.to(self._device)
        yield from self._adopt_stored(collectives)
        yield from self._adopt_ready(collectives)
        error: ConfigError | None = None
        for number, (name, module) in enumerate(self._modules, start=1):
            error = error or self._fill(name, module)
            for waiting in self._waits.values():
                waiting.discard(module)
            if number == len(self._modules) or not all(self._waits.values()):
                collectives.agree(error)
            yield from self._adopt_ready(collectives)
        self._stored.close()
        if self._modules and (left := _left_on_meta(self._model)):
            log_event(
                f"Still on the meta device, because neither parameters nor buffers: {_first_five(left)}. To "
                "compute with them, register them as buffers, or assign them in reset_parameters()."
            )

    def _adopt_stored(self, collectives: Collectives) -> Iterator[tuple[Bucket, Tensor]]:
        """Adopt the buckets whose every value is in a file. See [Note: Weights from files]."""
        if not self._stored:
            return
        lines = agreed(collectives, self._stored.describe)
        collectives.require_same(lines, "What is to be loaded")
        buckets = [bucket for bucket in self._waits if all(p in self._stored for p in bucket.params)]
        rooms = agreed(collectives, lambda: [self._read_own(bucket) for bucket in buckets])
        for bucket in buckets:
            del self._waits[bucket]
            unrounded = bucket.adopt_own(rooms.pop(0))
            if unrounded is not None:
                yield bucket, unrounded

    def _read_own(self, bucket: Bucket) -> Tensor:
        own = bucket.room_for_own()
        for piece in bucket.slices:
            part = own[piece.shard_start : piece.shard_start + piece.numel]
            self._stored.read(bucket.params[piece.param_index], piece.param_start, part)
        return own

    def _read_whole(self, bucket: Bucket, is_first: bool) -> None:
        for param in bucket.params:
            if param in self._stored:
                with torch.no_grad():
                    self._make_real(param)
                    if is_first:
                        self._stored.read(param, 0, param.data.view(-1))

    def _adopt_ready(self, collectives: Collectives) -> Iterator[tuple[Bucket, Tensor]]:
        for bucket in [bucket for bucket, waiting in self._waits.items() if not waiting]:
            del self._waits[bucket]
            if any(param in self._stored for param in bucket.params):
                agreed(collectives, partial(self._read_whole, bucket, collectives.rank == 0))
            self._rooms.pop(bucket, None)  # or the memory that values were rounded from would stay
            unrounded = bucket.adopt()
            if unrounded is not None:
                yield bucket, unrounded

    def _find_waits(self, buckets: Sequence[tuple[Bucket, BucketPlan]]) -> dict[Bucket, set[nn.Module]]:
        """Return, for every bucket, the modules that may write to it.

        Those are the owners of its parameters, and what is around them, within the unit if the bucket is
        sharded: `reset_parameters` may reach into submodules.
        """
        waits: dict[Bucket, set[nn.Module]] = {bucket: set() for bucket, _ in buckets}
        scopes = {
            bucket: set(plan.modules[0].modules())
            for bucket, plan in buckets
            if plan.policy.shard_params and not plan.is_root
        }
        for _, module in self._modules:
            for param in module.parameters():
                bucket, _ = self._places[id(param)]
                if bucket not in scopes or module in scopes[bucket]:
                    waits[bucket].add(module)
        return waits

    # -- one module --

    def _fill(self, name: str, module: nn.Module) -> ConfigError | None:
        """Give a module's own meta tensors memory and values; return what went wrong."""
        fill = _fill_of(module, self._param_init_fn)
        if fill is None:
            return None  # all it has is tied to what another module has filled
        own = _own(module)
        empty = _empty(module, self._stored)
        others = [(tensor, tensor._version) for tensor in self._loaded_below(module)]
        try:
            with torch.inference_mode(False), torch.no_grad(), self._device:
                for tensor in empty.values():
                    self._make_real(tensor)
                with _stand_ins(module, {key: own[key] for key in own.keys() - empty.keys()}, self._device):
                    fill()
                _take_back(module, empty)
        except Exception as error:
            return self._fault(name, module, f"failed: {type(error).__name__}: {first_line(error)}")
        if unfilled := [tensor for tensor in empty.values() if _is_unfilled(tensor)]:
            return self._fault(name, module, f"left garbage in {self._name(unfilled)}.")
        if overwritten := [tensor for tensor, version in others if tensor._version != version]:
            return self._fault(name, module, f"overwrote {self._name(overwritten)}, which had values.")
        return None

    def _loaded_below(self, module: nn.Module) -> Iterator[Tensor]:
        """Yield what the submodules of a module have that never was on meta."""
        for inner in module.modules():
            if inner is not module:
                known = [tensor for tensor in _own(inner).values() if not tensor.is_inference()]
                yield from (tensor for tensor in known if id(tensor) not in self._meta)

    def _make_real(self, tensor: Tensor) -> None:
        place = self._places.get(id(tensor))
        memory = None
        if place is not None:
            bucket, index = place
            memory = self._room_of(bucket)[index]
        if memory is None or memory.dtype != tensor.dtype:
            memory = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        _words_of(memory).fill_(_mark_of(memory))
        give_memory(tensor, memory.data)

    def _room_of(self, bucket: Bucket) -> list[Tensor]:
        if bucket not in self._rooms:
            self._rooms[bucket] = bucket.make_room()
        return self._rooms[bucket]

    def _name(self, tensors: list[Tensor]) -> str:
        return _first_five([repr(self._names[id(tensor)]) for tensor in tensors])

    def _fault(self, name: str, module: nn.Module, what: str) -> ConfigError:
        call = "reset_parameters()" if self._param_init_fn is None else "param_init_fn"
        return ConfigError(
            what=f"{call} of module {name or 'the root'!r} ({type(module).__name__}) {what}",
            why="It gives the parameters and buffers their first values that the module itself owns on the "
            "meta device. What has values already, in submodules, keeps them; at stage 3 units before it are "
            "sharded at this moment.",
            fix="Let it fill all that the module owns itself and nothing else, or pass a param_init_fn that "
            "does, or build this module on the CPU.",
        )


# -- helpers --


def _on_meta(model: nn.Module, stored: FirstWeights) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules to fill with their names, children first, as `nn.Module.apply` goes.

    Those are the ones that own tensors on meta whose values are in no file.
    """
    seen: set[nn.Module] = set()

    def descend(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if module in seen:
            return
        seen.add(module)
        for key, child in module.named_children():
            yield from descend(f"{name}.{key}" if name else key, child)
        if _empty(module, stored):
            yield name, module

    return descend("", model)


def _own(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers that a module itself holds, by attribute."""
    pairs = [*module._parameters.items(), *module._buffers.items()]
    return {key: tensor for key, tensor in pairs if tensor is not None}


def _empty(module: nn.Module, stored: FirstWeights) -> dict[str, Tensor]:
    """Return what a module itself holds that has no values and is not read from a file, by attribute."""
    own = _own(module).items()
    return {key: tensor for key, tensor in own if tensor.is_meta and tensor not in stored}


def _left_on_meta(model: nn.Module) -> list[str]:
    """Return the names of plain tensor attributes without values; nobody can tell whether they are used."""
    return [
        f"'{name}.{key}'" if name else repr(key)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor) and value.is_meta
    ]


def _fill_of(module: nn.Module, param_init_fn: InitFn | None) -> Callable[[], object] | None:
    if param_init_fn is not None:
        return partial(param_init_fn, module)
    reset = getattr(module, "reset_parameters", None)
    if reset is None and isinstance(module, nn.MultiheadAttention):
        return attention_reset(module)
    return reset if callable(reset) else None


@contextmanager
def _stand_ins(module: nn.Module, kept: dict[str, Tensor], device: torch.device) -> Iterator[None]:
    """Put other tensors in the place of those of a module that must keep their values."""
    for key, tensor in kept.items():
        stand_in = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        is_param = isinstance(tensor, nn.Parameter)
        _put(module, key, nn.Parameter(stand_in, tensor.requires_grad) if is_param else stand_in)
    try:
        yield
    finally:
        for key, tensor in kept.items():
            _put(module, key, tensor)


def _take_back(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Keep the identity of tensors where somebody has assigned others, and take over the values."""
    found = _own(module)
    for key, tensor in tensors.items():
        if found.get(key) is not tensor:
            if key not in found or found[key].shape != tensor.shape:
                raise ValueError(f"{key!r} has no tensor of shape {tuple(tensor.shape)} any more")
            tensor.copy_(found[key])
            _put(module, key, tensor)


def _put(module: nn.Module, key: str, tensor: Tensor) -> None:
    holder: dict[str, Any] = module._parameters if key in module._parameters else module._buffers
    holder[key] = tensor


def _words_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bits as integers, [numel] (twice that if it is complex), in the same memory."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return plain.detach().reshape(-1).view(_WORDS[plain.element_size()])


def _mark_of(tensor: Tensor) -> int:
    """Return the word that stands for "not written": a NaN that no computation makes, or an odd integer."""
    word = _words_of(tensor)
    is_float = tensor.is_floating_point() or tensor.is_complex()
    byte = 0xFF if is_float else 0xA5
    return int.from_bytes(bytes([byte]) * word.element_size(), "little", signed=word.dtype.is_signed)


def _is_unfilled(tensor: Tensor) -> bool:
    """Tell whether a tensor that was marked still has a mark somewhere."""
    if tensor.numel() == 0:
        return False
    mark = _mark_of(tensor)
    chunks = _words_of(tensor).split(_CHUNK_NUMEL)
    if tensor.dtype in (torch.int8, torch.uint8):  # any value may be meant
        return tensor._version == 0 and all(bool((chunk == mark).all()) for chunk in chunks)
    return any(bool((chunk == mark).any()) for chunk in chunks)


def _first_five(texts: list[str]) -> str:
    more = len(texts) - 5
    return ", ".join(texts[:5]) + (f" and {more} more" if more > 0 else "")
