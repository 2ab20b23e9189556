"""What the Trainer calls to write and read checkpoints.

`CheckpointHooks` stands in front of a `DDPStrategy`, below `ZeroStrategy`. It decides what goes into a
checkpoint beside what Lightning puts there, and in which order one is taken over; how either kind is written
and read is `checkpoint_files`' business. It must not know how the engine is built or run.

[Note: Random numbers]
Lightning restores where loops and data loaders stood, not the random number generators. A checkpoint to
resume from therefore holds every rank's. They are restored with the optimizers, so that an epoch begins with
the draws (of samplers and of data loaders) it would have begun with. Where the checkpoint was written inside
an epoch its loader has drawn already, and draws again when the loop sets it up: there they are restored once
more, before the first training step.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from zero_strategy.checkpoint import rng
from zero_strategy.checkpoint.full_weights import MorePreciseWeights
from zero_strategy.checkpoint.opened import OpenCheckpoint
from zero_strategy.comm.together import agreed
from zero_strategy.engine import ZeroEngine
from zero_strategy.errors import CheckpointError
from zero_strategy.front_ends.engines import has_16_bit_weights
from zero_strategy.lightning import checkpoint_files
from zero_strategy.lightning.checkpoint_callbacks import CheckpointCallbacks, is_amid_fit
from zero_strategy.lightning.checkpoint_files import MASTERS_KEY
from zero_strategy.lightning.finetuning import restore_param_groups
from zero_strategy.lightning.stock_callbacks import trained_weights_key
from zero_strategy.log import log_event

RNG_KEY = "zero_strategy_rng"  # in a file: the state of each rank's random number generators
# Taken over at once, so they may stay mapped from the file; anybody may keep the rest.
MAPPED_KEYS = ("state_dict", "current_model_state", "optimizer_states", MASTERS_KEY)

_Base: Any = object


class CheckpointHooks(_Base):  # type: ignore[misc]
    """The part of `ZeroStrategy` that has to do with checkpoints; it stands on the other part's `engine`."""

    def __init__(self, stage: int | None = None, config: Any = None, **keywords: Any) -> None:
        self._opened: OpenCheckpoint | None = None  # the folder that is being loaded
        self._rng_at_first_step: dict[str, Any] | None = None  # See [Note: Random numbers]
        self._checkpoint_callbacks: CheckpointCallbacks | None = None  # in a fit with asynchronous saves
        super().__init__(stage, config, **keywords)

    def setup_environment(self) -> None:
        """Forget what a former run has not come to: it may have made no step, or have failed in between."""
        self._forget_loading()
        super().setup_environment()

    @property
    def _is_sharded(self) -> bool:
        """Whether checkpoints are written as folders: as the user has said, else by the size of the state."""
        asked: str | None = self._state_dict_type
        if asked is not None:
            return asked == "sharded"
        is_stock = type(self.checkpoint_io).__name__ == "TorchCheckpointIO"
        can_be_folder = is_stock and not _saves_remotely(self.lightning_module.trainer)
        return can_be_folder and checkpoint_files.prefers_folders(self.engine)

    # -- saving --

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Gather the whole state dict. Collective; CPU tensors on rank 0, {} elsewhere.

        With `state_dict_type="sharded"` {} everywhere: weights go into the folder from where they are.
        """
        weights: dict[str, Any] = {} if self._is_sharded else self.engine.full_state_dict()
        return weights

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Gather an optimizer's state in torch's own format. Collective; no tensors but on rank 0.

        With `state_dict_type="sharded"` {} everywhere, as for weights.
        """
        unwrapped = getattr(optimizer, "_optimizer", optimizer)  # of a LightningOptimizer
        state: dict[str, Any] = {} if self._is_sharded else unwrapped.state_dict()
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write one file through the `CheckpointIO`, on rank 0, or a folder. Collective.

        Beside what Lightning has put there, a file to resume from holds the state of every rank's random
        number generators and the fp32 masters of 16-bit weights. A folder has both anyway.
        """
        engine: ZeroEngine = self.engine
        resumable = "optimizer_states" in checkpoint
        if resumable:
            _note_open_window(self.lightning_module.trainer)
        if self._is_sharded:
            checkpoint_files.refuse_storage_options(storage_options)
            checkpoint_files.save_folder(
                engine,
                filepath,
                checkpoint,
                weights_only=not resumable,
                asynchronous=self._async_save and is_amid_fit(self.lightning_module.trainer, filepath),
            )
            return
        if resumable:
            checkpoint[RNG_KEY] = engine.collectives.gather_json(rng.get_state(self.root_device))
        if checkpoint.get("optimizer_states") and has_16_bit_weights(engine):
            checkpoint[MASTERS_KEY] = engine.full_state_dict(dtype=torch.float32, trainable_only=True)
        io, first = self.checkpoint_io, self.is_global_zero
        agreed(
            engine.collectives,
            lambda: checkpoint_files.save_file(io, filepath, checkpoint, storage_options) if first else None,
        )

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a file or a folder, on rank 0; while a save goes on, when that is complete, if ever."""
        if not self.is_global_zero:
            return
        remove = partial(checkpoint_files.remove, self.checkpoint_io, filepath)
        engines = self._engines_now()
        if engines:
            engines[0].saves.after(remove)
        else:
            remove()

    def _begin_saves(self) -> None:
        if self._async_save:
            self._checkpoint_callbacks = CheckpointCallbacks(
                self.lightning_module.trainer, self.namespace, self.engine.saves
            )

    def _end_saves(self, is_agreed: bool) -> None:
        """Wait for the last save. Collective, unless the run ends by an exception that is not `is_agreed`.

        Other ranks may not get here then; the end of the program waits all the same, each rank for itself.
        """
        if self._checkpoint_callbacks is None:
            return
        self._checkpoint_callbacks.end()
        self._checkpoint_callbacks = None
        if is_agreed or self.lightning_module.trainer.state.status != "interrupted":
            self.engine.wait_for_checkpoint()

    # -- loading, in the order of a run --

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: weights are loaded into shards, so the engine must exist."""
        return True

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of either kind, whatever this strategy writes. Collective.

        Returns:
            What Lightning has put there. The weights of a folder are a dict that reads them when looked at.
        """
        engine: ZeroEngine = self.engine
        self._forget_loading()
        engine.wait_for_checkpoint()  # it may be the one that is asked for
        if weights_only is None:
            weights_only = _asked_weights_only(self.lightning_module.trainer)
        if checkpoint_files.is_folder(checkpoint_path):
            self._opened, content = checkpoint_files.open_folder(
                engine, checkpoint_path, weights_only=weights_only
            )
            weights = self._opened.weights()
            key = self._trained_weights_key(content)
            if key != "state_dict":
                # Lightning's averaging has put the average under "state_dict" and loads the trained weights
                # from here, on every rank, with a plain dict's methods.
                content[key] = self._opened.whole_weights()
            weights.update(content.get("state_dict", {}))  # what on_save_checkpoint has added
            content = {**content, "state_dict": weights}
        else:
            io = self.checkpoint_io
            share = (self.global_rank, self.world_size)
            content = agreed(
                engine.collectives,
                lambda: _owned(
                    checkpoint_files.load_file(io, checkpoint_path, weights_only=weights_only, share=share)
                ),
            )
        try:
            _require_lightnings(content, checkpoint_path)
        except CheckpointError:
            self._forget_loading()
            raise
        return content

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take weights over into shards, as `on_load_checkpoint` has left them. Collective."""
        weights = checkpoint["state_dict"]
        if self._opened is None:
            self.engine.load_full_state_dict(weights, strict=strict)
            return
        with self._opened as opened:
            opened.load_weights(weights, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take over masters, optimizer states and random number generators. Collective."""
        self._restore_param_groups(checkpoint)
        if MASTERS_KEY in checkpoint:
            weights = checkpoint[self._trained_weights_key(checkpoint)]
            merged = agreed(self.engine.collectives, lambda: _with_masters(weights, checkpoint[MASTERS_KEY]))
            self.engine.load_full_state_dict(merged, strict=False)
        states = checkpoint["optimizer_states"]
        if states:
            self._load_optimizers(states)
        else:
            log_event("The checkpoint has no optimizer states (any more): the optimizers begin anew.")
        self._load_rng(checkpoint)
        self._opened = None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step, the first after a resume inside an epoch with the random numbers of its time."""
        if self._rng_at_first_step is not None:
            rng.set_state(self._rng_at_first_step, self.root_device)
            self._rng_at_first_step = None
        return super().training_step(*args, **kwargs)

    # -- helpers --

    def _forget_loading(self) -> None:
        if self._opened is not None:
            self._opened.close()
        self._opened = self._rng_at_first_step = None

    def _trained_weights_key(self, checkpoint: Mapping[str, Any]) -> str:
        return trained_weights_key(self.lightning_module.trainer, self.namespace, checkpoint)

    def _restore_param_groups(self, checkpoint: Mapping[str, Any]) -> None:
        """Let finetuning callbacks put back the groups they had added; what was frozen gets masters then."""
        before = list(self.engine.buckets)
        restore_param_groups(self.lightning_module.trainer, self.namespace)
        if self._opened is None:
            return
        is_average = self._trained_weights_key(checkpoint) != "state_dict"
        if is_average or self.engine.buckets != before:
            with self._opened as opened:
                # Read anew they have their masters, of which `load_state_dict` knows nothing.
                opened.load_weights(
                    opened.weights() if is_average else checkpoint["state_dict"], strict=False
                )

    def _load_optimizers(self, states: list[dict[str, Any]]) -> None:
        if len(states) != len(self.optimizers):
            raise CheckpointError(
                what=f"The checkpoint has {len(states)} optimizers, the module {len(self.optimizers)}.",
                why="Their states are matched by position.",
                fix="Let configure_optimizers return what it did when the file was written, or load weights "
                "only: load_from_checkpoint, then fit without ckpt_path.",
            )
        if self._opened is not None:
            with self._opened as opened:
                opened.load_optimizers()
        for optimizer, state in zip(self.optimizers, states, strict=True):
            # A folder's are {}, unless `on_load_checkpoint` has put something there.
            if state or self._opened is None:
                optimizer.load_state_dict(state)

    def _load_rng(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore this rank's random number generators. See [Note: Random numbers]."""
        own = self._rng_of_file(checkpoint.get(RNG_KEY))
        if self._opened is not None:
            with self._opened as opened:
                own = opened.load_rng()
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        inside_epoch = progress["current"]["ready"] > 0 and not progress["is_last_batch"]
        self._rng_at_first_step = own if inside_epoch else None

    def _rng_of_file(self, states: list[dict[str, Any]] | None) -> dict[str, Any] | None:
        """Restore and return this rank's state; None of a file that another strategy has written."""
        if states is None or not rng.can_go_on("The checkpoint", len(states), self.world_size):
            return None
        own = states[self.global_rank]
        agreed(self.engine.collectives, lambda: rng.set_state(own, self.root_device))
        return own


def _asked_weights_only(trainer: Any) -> bool | None:
    """Return the `weights_only` that was given to fit, validate, test or predict.

    Lightning 2.6 hands it on only to strategies that restore before they set up: for the others its
    `Trainer._run` keeps it as an argument that nobody reads, and no hook is told of it. So it is read there,
    from the frames below. Where Lightning hands it on, or has no such argument, this is not asked or None.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_run" and frame.f_locals.get("self") is trainer:
            asked: bool | None = frame.f_locals.get("weights_only")
            return asked
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _saves_remotely(trainer: Any) -> bool:
    """Whether checkpoints go to where only a `CheckpointIO` can write."""
    callbacks = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
    return any(checkpoint_files.is_remote(path) for path in (trainer.default_root_dir, *callbacks) if path)


def _note_open_window(trainer: Any) -> None:
    if not trainer.lightning_module.automatic_optimization:
        return
    progress = trainer.fit_loop.epoch_loop.batch_progress
    num_open = progress.current.ready % trainer.accumulate_grad_batches
    if num_open and not progress.is_last_batch:
        log_event(
            f"Saved inside an accumulation window: the gradients of {num_open} of "
            f"{trainer.accumulate_grad_batches} micro-batches are not in the checkpoint, and a run resumed "
            f"from it steps without them."
        )


def _require_lightnings(content: Mapping[str, Any], path: Any) -> None:
    if "state_dict" in content and "pytorch-lightning_version" in content:
        return
    raise CheckpointError(
        what=f"{path} is no checkpoint of a Trainer: it has {sorted(map(str, content))[:8]}.",
        why="A Trainer's has the weights in 'state_dict', and 'pytorch-lightning_version'.",
        fix="Load weights alone into the module before the run: module.load_state_dict(...), or, from a "
        "folder that engine.save_checkpoint wrote, trainer.strategy.engine.load_checkpoint(...) in "
        "on_fit_start.",
    )


def _owned(content: dict[str, Any]) -> dict[str, Any]:
    """Copy what callbacks, hyper-parameters and hooks may keep longer than the file stays as it is."""
    rest = {key: value for key, value in content.items() if key not in MAPPED_KEYS}
    return {**content, **checkpoint_files.own(rest)}


def _with_masters(weights: Mapping[str, Any], masters: Mapping[str, Any]) -> MorePreciseWeights:
    """Return the weights that have masters, as `on_load_checkpoint` may have edited them."""
    there = {name: weights[name] for name in masters if name in weights}
    return MorePreciseWeights(there, masters.get)
