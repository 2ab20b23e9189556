"""What keys of `ds_config.json` do to gradients and to what follows a step, seen in bytes, events and bits.

Oracles: bytes are those of the padded buckets; gradients are worked out from every rank's own gradient, cast,
divided and summed in rank order in fp32 as the key says; events are those on the engine's collectives. The
tolerance is 0. Keys of stage 3 are in `test_live_parameters.py`, those of fp16 in `test_loss_scaling.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_strategy as zs
from tests.harness import distributed, rank, subtest, world_size
from tests.reference import Naive, Recipe, Zero, assert_same_bits, train_with
from zero_strategy.bucket_grads import BucketGrads
from zero_strategy.comm.collectives import Collectives, Handle

WIDTH = 32
LAYER_NUMEL = WIDTH * WIDTH  # no padding at world size 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Layers(nn.Module):
    """Three weights of 32 x 32; a bucket for each where buckets are that small."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def recipe(dtype: torch.dtype | None = None) -> Recipe:
    return Recipe(build=lambda _: Layers(), dtype=dtype)


def loss_of(model: Any, step: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank())
    x = torch.randn(4, WIDTH, generator=generator).to(model.layers[0].weight.dtype)
    return model(x).float().square().sum() * scale


def everybodys_grads(dtype: torch.dtype | None, scale: float = 1.0) -> list[list[Tensor]]:
    """For each parameter, every rank's own gradient at step 0, in rank order."""
    model: Any = recipe(dtype).model()
    loss_of(model, 0, scale).backward()
    grads = []
    for param in model.parameters():
        versions = [torch.empty_like(param.grad) for _ in range(world_size())]
        dist.all_gather(versions, param.grad)
        grads.append(versions)
    return grads


def mean_of(versions: list[Tensor], wire: torch.dtype, before: float = 1.0) -> Tensor:
    """The mean as it is to be: divided in the wider dtype, cast, summed in fp32, divided, rounded."""
    own = versions[0].dtype
    wide = wire if wire.itemsize > own.itemsize else own
    sent = [(version.to(wide) / before).to(wire).float() for version in versions]
    total = sent[0].clone()
    for version in sent[1:]:
        total += version
    return (total / (len(versions) / before)).to(own)


# -- communication_data_type, prescale_gradients, gradient_predivide_factor --


@distributed(world_size=3)
def test_gradients_travel_in_the_dtype_of_communication_and_are_summed_in_fp32() -> None:
    for own, wire, stages in (
        (None, "bf16", (0, 1, 3)),
        (None, "fp16", (1,)),
        (torch.bfloat16, "fp32", (0, 3)),
    ):
        versions = everybodys_grads(own)
        for stage in stages:
            with subtest(f"stage {stage}, gradients in {own or torch.float32}, on the wire {wire}"):
                zero = Zero(recipe(own), stage=stage, communication_data_type=wire)
                zero.engine.ledger.reset()
                zero.backward(loss_of(zero.model, 0))
                padded = sum(bucket.layout.padded_numel for bucket in zero.engine.buckets)
                sent = zero.engine.ledger.comm["reduce_scatter"]["bytes_sent"]
                assert sent == padded * DTYPES[wire].itemsize * (world_size() - 1) // world_size()
                for grad, everybody in zip(zero.grads().values(), versions, strict=True):
                    assert grad is not None and torch.equal(grad, mean_of(everybody, DTYPES[wire]))
                zero.close()


@distributed(world_size=3)
def test_gradients_are_divided_before_they_travel_by_what_the_keys_say_and_after_by_the_rest() -> None:
    for own in (None, torch.bfloat16):
        versions = everybodys_grads(own)
        for settings, before, stages in (
            ({"prescale_gradients": True}, float(world_size()), (0,)),
            ({"gradient_predivide_factor": 3.0}, 3.0, (0, 2)),
            ({"gradient_predivide_factor": 4.0}, 4.0, (2,)),
        ):
            for stage in stages:
                with subtest(f"stage {stage}, {own}, {settings}"):
                    zero = Zero(recipe(own), stage=stage, **settings)
                    zero.backward(loss_of(zero.model, 0))
                    for grad, everybody in zip(zero.grads().values(), versions, strict=True):
                        assert grad is not None
                        assert torch.equal(grad, mean_of(everybody, grad.dtype, before))
                        if before in (2.0, 4.0):  # a power of two changes no bit
                            assert torch.equal(grad, mean_of(everybody, grad.dtype))
                    zero.close()


@distributed(world_size=2)
def test_dividing_before_keeps_gradients_finite_on_a_wire_that_would_overflow() -> None:
    large = 1e7
    for settings, is_finite in (({}, False), ({"gradient_predivide_factor": 2.0**12}, True)):
        with subtest(f"{settings}"):
            zero = Zero(recipe(), stage=2, communication_data_type="fp16", **settings)
            zero.backward(loss_of(zero.model, 0, scale=large))
            grads = [grad for grad in zero.grads().values() if grad is not None]
            assert all(bool(grad.isfinite().all()) for grad in grads) == is_finite
            assert not is_finite or max(float(grad.abs().max()) for grad in grads) > 65504
            zero.close()


@distributed(world_size=2)
def test_the_stages_train_alike_whatever_gradients_travel_as() -> None:
    settings = {
        "communication_data_type": "bf16",
        "gradient_predivide_factor": 3.0,
        "reduce_bucket_size": 1000,
    }
    reference = None
    for stage in range(4):
        with subtest(f"stage {stage}"):
            zero = Zero(recipe(), stage=stage, **settings)
            trace = train_with(zero, loss_of)
            zero.close()
            reference = reference or trace
            assert_same_bits(trace, reference)


# -- bf16 --


@distributed(world_size=2)
def test_bf16_masters_and_states_are_the_arithmetic_of_a_plain_optimizer_on_bf16_weights() -> None:
    everything_bf16 = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    bf16 = recipe(torch.bfloat16)
    reference = train_with(Naive(bf16), loss_of)
    for stage in range(4):
        with subtest(f"stage {stage}"):
            zero = Zero(bf16, stage=stage, bf16={"enabled": True, **everything_bf16})
            assert_same_bits(train_with(zero, loss_of), reference)
            held, share = zero.engine.ledger.memory, 2 if stage else 1
            assert held["master"] == 0 and held["optimizer"] == 2 * 2 * 3 * LAYER_NUMEL // share
            masters = zero.engine.ledger.report().partition("fp32 masters")[2].splitlines()[0].split()
            assert masters[:2] == ["0", "B"]
            zero.close()


@distributed(world_size=2)
def test_checkpoints_go_between_bf16_and_fp32_masters(tmp_path: Path) -> None:
    everything_bf16 = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    bf16 = recipe(torch.bfloat16)
    for number, (source, target) in enumerate(((everything_bf16, {}), ({}, everything_bf16))):
        with subtest(f"from {source} to {target}"):
            saved = Zero(bf16, stage=3, bf16={"enabled": True, **source})
            train_with(saved, loss_of)
            saved.engine.save_checkpoint(tmp_path / str(number))
            loaded = Zero(bf16, stage=2, bf16={"enabled": True, **target})
            loaded.engine.load_checkpoint(tmp_path / str(number))
            pairs = zip(saved.weights().values(), loaded.weights().values(), strict=True)
            assert all(torch.equal(*pair) for pair in pairs)
            train_with(loaded, loss_of)
            wanted = torch.bfloat16 if target else torch.float32
            states = loaded.optimizer.slice_states()
            assert {state.value.dtype for state in states if state.key == "exp_avg"} == {wanted}
            for way in (saved, loaded):
                way.close()


@distributed(world_size=2)
def test_check_grad_overflow_skips_a_step_on_all_ranks_if_one_has_a_nan() -> None:
    for checks, clips in ((True, False), (True, True), (False, False)):
        with subtest(f"check_grad_overflow {checks}, clipping {clips}"):
            bf16 = {"enabled": True, "check_grad_overflow": checks}
            zero = Zero(recipe(), stage=2, bf16=bf16, gradient_clipping=float(clips))
            before = {name: value.clone() for name, value in zero.weights().items()}
            zero.backward(loss_of(zero.model, 0, scale=float("nan") if rank() else 1.0))
            zero.step()
            assert zero.optimizer.step_was_skipped == checks
            after = zero.weights()
            if checks:
                assert all(torch.equal(after[name], before[name]) for name in before)
                zero.backward(loss_of(zero.model, 1))
                zero.step()
                assert not zero.optimizer.step_was_skipped, "the next one is good"
            assert all(bool(value.isfinite().all()) == checks for value in zero.weights().values())
            zero.close()


# -- overlap_comm --


@distributed(world_size=2)
def test_overlap_comm_false_waits_for_each_reduction_before_the_backward_goes_on() -> None:
    for overlap in (True, False):
        with subtest(f"overlap_comm {overlap}"):
            zero = Zero(recipe(), stage=2, reduce_bucket_size=LAYER_NUMEL, overlap_comm=overlap)
            events: list[str] = []
            for number, bucket in enumerate(zero.engine.buckets):
                note_reduction(bucket, str(number), events)
            zero.backward(loss_of(zero.model, 0))
            alone = [
                "stash 2",
                "start 2",
                "end 2",
                "stash 1",
                "start 1",
                "end 1",
                "stash 0",
                "start 0",
                "end 0",
            ]
            beside = [
                "stash 2",
                "start 2",
                "stash 1",
                "end 2",
                "start 1",
                "stash 0",
                "end 1",
                "start 0",
                "end 0",
            ]
            assert events == (beside if overlap else alone)
            zero.close()


def note_reduction(bucket: Any, name: str, events: list[str]) -> None:
    """Note when gradients come in and when a reduction starts and ends."""
    grads = bucket.grads
    stash, start_reduce, accept = grads.stash, grads.start_reduce, grads._accept

    def noted(event: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(f"{event} {name}")
            return method(*args, **kwargs)

        return call

    grads.stash = noted("stash", stash)
    grads.start_reduce = noted("start", start_reduce)
    grads._accept = noted("end", accept)


# -- allgather_bucket_size --


class Gathers:
    """Watches the all-gathers of an engine.

    Attributes:
        started: Elements of each, in order.
        most_numel: The most elements that were on their way at once.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.started: list[int] = []
        self.most_numel = 0
        self._numel = 0
        all_gather = collectives.all_gather

        def watched(flat: Tensor, name: str, *, part: range | None = None) -> Handle:
            numel = flat.numel() if part is None else len(part) * world_size()
            self.started.append(numel)
            self._numel += numel
            self.most_numel = max(self.most_numel, self._numel)
            handle = all_gather(flat, name, part=part)
            return Handle([], lambda: self._end(handle, numel))

        collectives.all_gather = watched  # type: ignore[method-assign]

    def _end(self, handle: Handle, numel: int) -> None:
        handle.wait()
        self._numel -= numel


@distributed(world_size=2)
def test_no_more_than_allgather_bucket_size_is_on_its_way_after_a_step() -> None:
    layer = LAYER_NUMEL
    # limit -> sizes of the gathers, and the most at once
    orders = {
        layer // 4: ([layer // 4] * 12, layer // 4),
        layer - 64: ([layer - 64, 64] * 3, layer - 64),
        layer: ([layer] * 3, layer),
        2 * layer: ([layer] * 3, 2 * layer),
        500_000_000: ([layer] * 3, 3 * layer),
    }
    reference = None
    for stage in (1, 2):
        for limit in orders if stage == 1 else (layer - 64, 2 * layer):
            sizes, most_numel = orders[limit]
            with subtest(f"stage {stage}, {limit} elements"):
                settings = {"reduce_bucket_size": layer, "allgather_bucket_size": limit}
                zero = Zero(recipe(), stage=stage, **settings)
                gathers = Gathers(zero.engine.collectives)
                zero.engine.ledger.reset()
                zero.backward(loss_of(zero.model, 0))
                zero.step()
                assert gathers.started == sizes and gathers.most_numel == most_numel
                calls = zero.engine.ledger.comm["all_gather"]
                assert calls == {"calls": len(sizes), "bytes_sent": 3 * layer * 4 // 2}
                weights = zero.weights()
                reference = reference or weights
                assert all(torch.equal(weights[name], reference[name]) for name in weights)
                zero.close()


@distributed(world_size=3)
def test_a_bucket_published_in_parts_is_whole_and_right_on_every_rank() -> None:
    """Shards of a size that the parts do not divide, parameters of odd shapes."""
    expected = train_with(Zero(Recipe(), stage=0), awkward_loss).weights[-1]
    for stage in (1, 2, 3):
        zero = Zero(Recipe(), stage=stage, allgather_bucket_size=100, stage3_param_persistence_threshold=60)
        train_with(zero, awkward_loss)
        for name, param in zero.model.named_parameters():
            if stage < 3:  # whole on every rank, not rank 0 alone
                wanted = expected[name].clone() if rank() == 0 else torch.empty_like(param)
                dist.broadcast(wanted, src=0)
                assert torch.equal(param, wanted), (stage, name)
        weights = zero.weights()
        assert rank() or all(torch.equal(weights[name], expected[name]) for name in expected)
        zero.close()


def awkward_loss(model: Any, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank())
    vocabulary = next(model.parameters()).shape[0]
    logits: Tensor = model(torch.randint(0, vocabulary, (2, 5), generator=generator))
    return logits.float().square().mean()


# -- sub_group_size --


@distributed(world_size=2)
def test_the_optimizer_steps_no_more_than_sub_group_size_masters_at_a_time() -> None:
    owned = LAYER_NUMEL // 2
    for limit, groups in ((0, [1, 1, 1]), (owned, [1, 1, 1]), (2 * owned, [2, 1]), (25_000_000, [3])):
        with subtest(f"{limit} elements, {owned} in a shard"):
            settings = {"reduce_bucket_size": LAYER_NUMEL, "sub_group_size": limit}
            zero = Zero(recipe(torch.bfloat16), stage=2, **settings)
            seen: list[list[int]] = []
            note_steps(zero.users, seen)
            zero.backward(loss_of(zero.model, 0))
            zero.step()
            # Of what is stepped at a time there are fp32 gradients, and of nothing else.
            assert seen == [[owned] * number for number in groups]
            zero.close()


def note_steps(optimizer: Any, seen: list[list[int]]) -> None:
    """Note the elements of the fp32 gradients of each step of a user's optimizer."""
    step = optimizer.step

    def noted(*args: Any) -> Any:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        seen.append([param.grad.numel() for param in params if param.grad.dtype == torch.float32])
        return step(*args)

    optimizer.step = noted


# -- keys that something else replaces: what one gets instead --


@distributed(world_size=2)
def test_gradients_are_contiguous_whatever_contiguous_gradients_says() -> None:
    for setting in (True, False):
        with subtest(f"contiguous_gradients {setting}"):
            zero = Zero(recipe(), stage=1, contiguous_gradients=setting)
            notices = [text for text in zero.engine.config.notices if "contiguous_gradients" in text]
            assert bool(notices) == (not setting), "true is what happens anyway"
            with zero.no_sync():
                zero.backward(loss_of(zero.model, 0))
            (bucket,) = zero.engine.buckets
            assert bucket.grads.full is not None and bucket.grads.full.is_contiguous()
            plain: Any = recipe().model()
            loss_of(plain, 0).backward()
            for param, place in zip(plain.parameters(), bucket.views(bucket.grads.full), strict=True):
                assert torch.equal(param.grad, place)
            assert all(param.grad is None for param in zero.model.parameters())
            zero.close()


@distributed(world_size=[2, 3])
def test_every_rank_owns_as_many_gradients_of_every_bucket_without_round_robin_gradients() -> None:
    zero = Zero(Recipe(), stage=2, reduce_bucket_size=500, round_robin_gradients=True)
    (notice,) = [text for text in zero.engine.config.notices if "round_robin_gradients = True" in text]
    assert "equal range of every bucket" in notice
    owned = torch.tensor([bucket.owned_numel for bucket in zero.engine.buckets])
    everybody = [torch.empty_like(owned) for _ in range(world_size())]
    dist.all_gather(everybody, owned)
    assert len(owned) > 2 and all(torch.equal(other, owned) for other in everybody)
    zero.close()


@distributed(world_size=2)
def test_whole_16_bit_weights_are_there_for_saving_whatever_the_key_for_it_says() -> None:
    for setting in (True, False):
        with subtest(f"stage3_gather_16bit_weights_on_model_save {setting}"):
            model = Layers()
            names = {name: value.shape for name, value in model.state_dict().items()}
            config = zs.ZeroConfig(
                stage=3, bf16=True, stage3_gather_16bit_weights_on_model_save=setting,
                stage3_param_persistence_threshold=0,
            )  # fmt: skip
            engine = zs.ZeroEngine(model, config)
            weights = engine.full_state_dict()
            assert {name: value.shape for name, value in weights.items()} == ({} if rank() else names)
            assert all(value.dtype == torch.bfloat16 for value in weights.values())
            engine.close()


# -- gradient_clipping --


@distributed(world_size=2)
def test_gradient_clipping_bounds_the_global_norm_in_step_if_nobody_has_clipped() -> None:
    for stage in (0, 2, 3):
        with subtest(f"stage {stage}"):
            clipped, by_hand = Zero(recipe(), stage=stage, gradient_clipping=0.1), Zero(recipe(), stage=stage)
            for way in (clipped, by_hand):
                way.backward(loss_of(way.model, 0))
            assert float(by_hand.clip_norm(0.1)) > 0.1
            for way in (clipped, by_hand):
                way.step()
            assert 0 < clipped.optimizer.clip_coefficient < 1
            pairs = zip(clipped.weights().values(), by_hand.weights().values(), strict=True)
            assert all(torch.equal(*pair) for pair in pairs)
            for way in (clipped, by_hand):
                way.close()


def test_events_are_noted_on_buckets_as_they_are() -> None:
    """The names that `note_reduction` replaces are methods of a bucket's gradients."""
    assert all(callable(getattr(BucketGrads, name)) for name in ("stash", "start_reduce", "_accept"))
