"""The loss scale follows DeepSpeed's rules, step by step.

Oracle: the rules as its source has them, played out by hand: which scale each of a row of steps meets, where
"x" is a step that overflows and "." a good one. Tolerance: none, scales are powers of two.
"""

from __future__ import annotations

import pytest
import torch

import zero_strategy as zs
from zero_strategy.config import Fp16
from zero_strategy.loss_scaler import LossScaler


def scaler_of(**settings: object) -> LossScaler:
    return LossScaler(Fp16(**settings), is_active=True)


def loss() -> torch.Tensor:
    return torch.ones((), requires_grad=True)


def scales(scaler: LossScaler, steps: str) -> list[float]:
    """Return the scale that each step's loss was multiplied by."""
    met = []
    for step in steps:
        met.append(scaler.scale_loss(loss()).item())
        scaler.note_backward_end()
        scaler.update(overflowed=step == "x")
    return met


@pytest.mark.parametrize(
    ("settings", "steps", "expected"),
    [
        # The first overflow costs the hysteresis, each later one halves.
        ({"initial_scale_power": 4}, "xxx.", [16, 16, 8, 4]),
        ({"initial_scale_power": 4, "hysteresis": 1}, "xx.", [16, 8, 4]),
        # The step after an overflow (or the first) begins the count: the window is full three steps later.
        ({"initial_scale_power": 4, "loss_scale_window": 3}, "........", [16, 16, 16, 16, 32, 32, 32, 64]),
        (
            {"initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1},
            "..x......",
            [16, 16, 16, 8, 8, 8, 16, 16, 32],
        ),
        # A window restores the hysteresis, a good step alone does not ...
        ({"initial_scale_power": 4, "hysteresis": 2}, "x.x.", [16, 16, 16, 8]),
        ({"initial_scale_power": 4, "hysteresis": 2, "loss_scale_window": 1}, "x..x.", [16, 16, 16, 32, 32]),
        # ... unless it is told to.
        ({"initial_scale_power": 4, "hysteresis": 2, "consecutive_hysteresis": True}, "x.x.", [16] * 4),
        ({"initial_scale_power": 1, "hysteresis": 1, "min_loss_scale": 0.75}, "xx.", [2, 1, 0.75]),
        # A fixed scale stays.
        ({"loss_scale": 100.0, "loss_scale_window": 1, "hysteresis": 1}, "xx....", [100] * 6),
    ],
)
def test_the_scale_follows_the_rules(settings: dict[str, object], steps: str, expected: list[float]) -> None:
    assert scales(scaler_of(**settings), steps) == expected


def test_an_overflow_at_the_floor_is_the_end_only_when_hysteresis_is_used_up() -> None:
    scaler = scaler_of(initial_scale_power=0, hysteresis=2)
    scaler.note_backward_end()
    assert not scaler.is_at_floor()
    scaler.update(overflowed=True)
    scaler.note_backward_end()
    assert scaler.is_at_floor()
    fixed = scaler_of(loss_scale=1.0)
    fixed.note_backward_end()
    assert not fixed.is_at_floor()


def test_two_optimizers_on_one_loss_give_one_verdict() -> None:
    scaler = scaler_of(initial_scale_power=4, hysteresis=1)
    for verdicts, expected in (((True, True), 8), ((False, True), 4), ((True, False, True), 2)):
        scaler.note_backward_end()
        for verdict in verdicts:
            scaler.update(verdict)
        assert scaler.scale == expected


def test_gradients_that_wait_are_told_when_the_scale_changes() -> None:
    scaler = scaler_of(initial_scale_power=4, hysteresis=1, loss_scale_window=1)

    class Waiting:
        def __init__(self) -> None:
            self.ratios: list[float] = []

        def multiply(self, ratio: float) -> None:
            self.ratios.append(ratio)

    waiting, gone = Waiting(), Waiting()
    scaler.listen(waiting.multiply)
    scaler.listen(gone.multiply)
    del gone
    scales(scaler, "x..")
    assert waiting.ratios == [0.5, 2.0]


def test_losses_of_16_bits_are_scaled_in_fp32_and_others_in_their_own() -> None:
    scaler = scaler_of(initial_scale_power=20)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        scaled = scaler.scale_loss(torch.full((), 3.0, dtype=dtype))
        assert scaled.dtype == (dtype if dtype.itemsize >= 4 else torch.float32)
        assert float(scaled) == 3 * 2.0**20
    inactive = LossScaler(Fp16(), is_active=False)
    value = torch.ones(())
    assert inactive.scale_loss(value) is value and inactive.scale == 1.0


def test_a_restored_scaler_goes_on_as_the_saved_one() -> None:
    settings = {"initial_scale_power": 6, "loss_scale_window": 3, "hysteresis": 2}
    saved = scaler_of(**settings)
    scales(saved, "xx..")
    restored = scaler_of(**settings)
    restored.load_state_dict(saved.state_dict())
    assert scales(restored, "...x..") == scales(saved, "...x..")
    assert restored.state_dict() == saved.state_dict()
    fixed = scaler_of(loss_scale=128)
    fixed.load_state_dict(saved.state_dict())
    assert fixed.scale == 128


@pytest.mark.parametrize("state", [{}, {"scale": float("nan")}, {"scale": "big"}])
def test_a_state_that_is_none_is_refused(state: dict[str, object]) -> None:
    good = scaler_of().state_dict()
    broken = {**good, **state} if state else {}
    with pytest.raises(zs.CheckpointError, match="loss scaler"):
        scaler_of().load_state_dict(broken)  # type: ignore[arg-type]
