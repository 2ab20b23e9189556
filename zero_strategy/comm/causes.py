"""What a rank says when it ends because of another: the texts of the watch's errors.

Functions from facts to errors; who found the facts, and whom they are told, is the watch's affair.
"""

from __future__ import annotations

import traceback

from zero_strategy.errors import ShardingError, ZeroError, first_line

_TRACEBACK_CHARS = 4000  # the end of a traceback, which is what one looks for, and the store's small change


def brief(error: BaseException) -> str:
    """Return an error in one line or a few: its type and its text."""
    text = str(error.what if isinstance(error, ZeroError) else error)
    return f"{type(error).__name__}{': ' if text else ''}{text}"


def has_failed(rank: int, error: BaseException) -> ShardingError:
    """Return what the other ranks raise when one raises `error`."""
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    return ShardingError(
        what=f"Rank {rank} has failed: {brief(error)}",
        why="All ranks take part in every gather and reduction, so the others cannot go on without it. "
        f"There:\n{''.join(lines)[-_TRACEBACK_CHARS:].rstrip()}",
        fix=f"Find the cause on rank {rank}.",
    )


def after_failure(error: BaseException) -> ShardingError:
    """Return what a rank raises that has failed by `error` and begins a collective after that."""
    return ShardingError(
        what=f"This rank has failed ({brief(error)}), and was then to take part in a collective.",
        why="The other ranks do not: a checkpoint, or whole weights, are gathered from all ranks. "
        "OnExceptionCheckpoint and ModelCheckpoint(save_on_exception=True) cannot save after an error of one "
        "rank.",
        fix="Go on from the last checkpoint; ModelCheckpoint(every_n_train_steps=...) writes more of them.",
    )


def has_died(rank: int, consequence: str) -> ShardingError:
    """Return what is raised when a rank's process is gone and has not said why."""
    return ShardingError(
        what=f"The process of rank {rank} has died without a word. {consequence}",
        why="It has come to the end of its script before this rank has, or was killed (by a signal, or for "
        "memory), or has crashed.",
        fix=f"Look at the output of rank {rank}. If it shows no error: every rank must make the same calls, "
        "saving included (no `if rank == 0:` around them). The machine's log (dmesg) shows kills for memory.",
    )


def has_left(rank: int, consequence: str) -> ShardingError:
    """Return what is raised when a rank has come to its end while another waits for it."""
    return ShardingError(
        what=f"Rank {rank} has ended. {consequence}",
        why="Its process, or its engine, has come to its end before this rank's has.",
        fix="Every rank must make the same calls, with as many batches. Saving, too, is for all ranks, not "
        "for `if trainer.is_global_zero:`.",
    )


def have_parted(what: str) -> ShardingError:
    """Return what is raised when ranks can never meet, as `waits.find_divergence` has found."""
    return ShardingError(
        what=what,
        why="A collective needs all ranks, in one order; these can never meet.",
        fix="Every rank must make the same calls: take save_checkpoint, barrier, broadcast, all_gather, "
        "log(sync_dist=True) and the like out of `if trainer.is_global_zero:`. And it must run the same "
        "modules in the same order, and as many batches, forwards, backwards and steps as the others. A "
        "module that runs on some ranks only must be one unit with its siblings: name its parent in "
        "zero_optimization.leaf_module.classes or .names.",
    )


def was_stopped(rank: int, why: str) -> ShardingError:
    """Return what is raised when a rank was asked to stop and cannot do so together with the others."""
    return ShardingError(
        what=f"Rank {rank} was stopped.",
        why=why,
        fix="Nothing is wrong if it was meant. While ranks train, they stop after a backward, together.",
    )


def unexplained(what: str, error: BaseException) -> ShardingError:
    """Return what is raised when a collective has raised and nothing is known of the other ranks."""
    return ShardingError(
        what=f"{what} did not finish: {first_line(error)}",
        why="Another rank has ended, or ran other code than this one and never joined in. Every rank must "
        "run the same forwards, backwards and steps in the same order.",
        fix="Look at the other ranks' errors first. If there is none: was a call made on one rank only "
        "(save_checkpoint, full_state_dict, clip_grad_norm_ and step are for all ranks)? Do ranks have "
        "different numbers of batches, or does the model choose its modules by a rank's own data? Such "
        "modules are one unit if they are named in zero_optimization.leaf_module. Waiting ends at the "
        "process group's timeout (init_process_group(timeout=...)).",
    )


def was_pickled() -> ShardingError:
    """Return what is raised when something is pickled or copied that leads to process groups."""
    return ShardingError(
        what="Something was pickled or deep-copied that belongs to a ZeroEngine: a sharded module, its "
        "engine, or a strategy or Trainer that has one.",
        why="Process groups, threads and shards are this process's own.",
        fix="To keep weights: engine.full_state_dict(), engine.save_checkpoint(path), or the Trainer's and "
        "Fabric's own ways to save. To copy a module: before it is sharded, or after engine.close() (below "
        "stage 3).",
    )
