"""The loss scale: keeps small fp16 gradients above zero, and takes back what was too much.

fp16 holds nothing below 6e-8, and many gradients are. So the loss is multiplied by a scale before the
backward, and the gradients are divided by it in fp32 on their way into the optimizer. The engine owns one
`LossScaler`; it is switched off, with a scale of 1, where no trained parameter is in fp16. Sharded optimizers
ask it what to divide by and tell it whether a step had overflowed. It decides from that alone: it must not
know parameters, and does not communicate. All ranks tell it the same, so all hold the same scale.

[Note: Loss scaling]
`fp16.loss_scale` above 0 is the scale, for good. 0 makes it dynamic, with DeepSpeed's meaning of the keys
(deepspeed/runtime/fp16/loss_scaler.py, `DynamicLossScaler`, and its configuration reference, "fp16"):

- It begins at 2 ** `initial_scale_power`.
- A step with an infinite or NaN gradient is skipped. The first `hysteresis` - 1 of these cost one unit of
  hysteresis each, the following halve the scale, down to `min_loss_scale`.
- After the first good step that follows an overflow, every `loss_scale_window` good steps in a row double the
  scale and restore the hysteresis; `consecutive_hysteresis` restores it with every good step.
- An overflow at `min_loss_scale` is an error: nothing is left to try.

Different here: steps of several optimizers on one loss give one verdict, not one each; the scale is also
taken over by gradients that still wait for their step. Source of the idea: Micikevicius et al.,
arXiv:1710.03740, section 3.2.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from zero_strategy import compat
from zero_strategy.config_blocks import Fp16
from zero_strategy.errors import CheckpointError, ShardingError
from zero_strategy.log import log_event

FACTOR = 2.0  # by which the scale grows and shrinks; a power of two changes no digit of a gradient
MAX_HISTORY = 32  # changes kept for the message of an error


class ScaleChange(NamedTuple):
    """From which step on there was which scale."""

    step: int
    scale: float


class LossScaler:
    """Scales losses, and moves the scale by the verdicts of the steps. See [Note: Loss scaling].

    Attributes:
        is_active: Whether there is anything to scale; else the scale is 1 and nothing is checked.
        scale: What losses are multiplied by now, and what all gradients that exist must be divided by.
        num_steps: Verdicts so far: optimizer steps, skipped ones included.
        num_backwards: How many backwards have ended, of all engines that share it; the same on all ranks.
        last_loss: [] the loss scaled last, before scaling, or None if it was no scalar.
        history: The latest changes of the scale, the first one included while it is among them.
    """

    def __init__(self, settings: Fp16, is_active: bool) -> None:
        """Start at the first scale.

        Args:
            settings: The block `fp16` of the config.
            is_active: Whether a trained parameter is in fp16, or may be.
        """
        self._settings = settings
        self.is_active = is_active
        self.is_dynamic = not settings.loss_scale
        self.scale = self._first_scale() if is_active else 1.0
        self.num_steps = 0
        self.num_backwards = 0
        self.last_loss: Tensor | None = None
        self.history: deque[ScaleChange] = deque([ScaleChange(0, self.scale)], MAX_HISTORY)
        self._good_steps = 0  # since the last overflow
        self._hysteresis_left = settings.hysteresis
        self._judged_at = 0  # value of `num_backwards` at the last verdict
        self._scaled_backward = -1  # the latest backward of a scaled loss ...
        self._is_scaled_running = False  # ... and whether it goes on: others may run inside it
        self._last_verdict = False
        self._on_change: list[weakref.WeakMethod[Callable[[float], None]]] = []

    def listen(self, on_change: Callable[[float], None]) -> None:
        """Register a method to be called with the ratio when the scale changes, to carry gradients over.

        It is not kept alive: engines that share a scaler come and go.
        """
        self._on_change.append(weakref.WeakMethod(on_change))

    def unlisten(self, on_change: Callable[[float], None]) -> None:
        """Undo `listen`."""
        self._on_change = [known for known in self._on_change if known() not in (None, on_change)]

    def activate(self) -> None:
        """Begin to scale, if not done so already: parameters in fp16 are trained from now on."""
        if not self.is_active:
            self.is_active = True
            self._change(self._first_scale())

    # -- runtime --

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale, in fp32 if it was of 16 bits; the loss itself if not active.

        Args:
            loss: What to differentiate, of any shape.
        """
        if not self.is_active:
            return loss
        self.last_loss = loss.detach() if loss.numel() == 1 else None
        scaled = (loss.float() if loss.element_size() < 4 else loss) * self.scale
        if scaled.requires_grad:
            scaled.register_hook(self._note_backward)
        return scaled

    def is_scaled_backward(self) -> bool:
        """Tell whether the backward that runs on this thread is, or is part of, that of a scaled loss."""
        return self._is_scaled_running or self._scaled_backward == compat.current_backward()

    def unscaled_error(self) -> ShardingError:
        """Return the error of gradients that came from a loss that was not scaled."""
        return ShardingError(
            what="The backward of a loss that was not scaled has produced fp16 gradients.",
            why=f"Parameters are in fp16, and step() divides their gradients by the loss scale "
            f"({self.scale:g} now): these would come out that much too small.",
            fix="Call engine.backward(loss) instead of loss.backward(), or "
            "engine.loss_scaler.scale_loss(loss).backward(). Then clear these gradients.",
        )

    def note_backward_end(self) -> None:
        """Note that gradients of one more loss are there, so that the next verdict is a new one."""
        self.num_backwards += 1

    def is_at_floor(self) -> bool:
        """Tell whether one more overflow would leave nothing to try."""
        at_floor = self.scale <= self._settings.min_loss_scale and self._hysteresis_left <= 1
        return self.is_dynamic and at_floor and self._is_news(True)

    def update(self, overflowed: bool) -> None:
        """Take the verdict of a step, the same on all ranks.

        Args:
            overflowed: Whether some gradient was infinite or NaN, so that the step was skipped.
        """
        is_news, is_first = self._is_news(overflowed), self._judged_at != self.num_backwards
        self._last_verdict = overflowed or (self._last_verdict and not is_first)
        self._judged_at = self.num_backwards
        if not self.is_active or not is_news:
            return
        self.num_steps += 1
        if overflowed:
            self._shrink()
        else:
            self._grow()

    # -- state --

    def state_dict(self) -> dict[str, float | int]:
        """Return what a resumed run must know."""
        return {
            "scale": self.scale,
            "num_steps": self.num_steps,
            "good_steps": self._good_steps,
            "hysteresis_left": self._hysteresis_left,
        }

    def check_state(self, state: Mapping[str, float | int]) -> None:
        """Check what `load_state_dict` is to take.

        Raises:
            CheckpointError: It is no state of a loss scaler.
        """
        values = [state.get(key) for key in self.state_dict()]
        if not all(isinstance(value, int | float) and math.isfinite(value) for value in values) or (
            state["scale"] <= 0
        ):
            raise CheckpointError(
                what=f"The state of the loss scaler cannot be used: {dict(state)!r}.",
                why=f"It holds numbers named {', '.join(self.state_dict())}, and a scale is above 0.",
                fix="Use another copy of the checkpoint.",
            )

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Go on where another scaler has stopped; a scale that the config fixes stays.

        Args:
            state: What `state_dict` returned.

        Raises:
            CheckpointError: It is not such a state.
        """
        self.check_state(state)
        if not self.is_active:
            return
        self.num_steps = int(state["num_steps"])
        self._good_steps, self._hysteresis_left = int(state["good_steps"]), int(state["hysteresis_left"])
        if self.is_dynamic:
            self._change(float(state["scale"]))
        self.history = deque([ScaleChange(self.num_steps, self.scale)], MAX_HISTORY)

    # -- helpers --

    def _first_scale(self) -> float:
        settings = self._settings
        return settings.loss_scale or FACTOR**settings.initial_scale_power

    def _is_news(self, overflowed: bool) -> bool:
        """Tell whether a verdict is more than what another optimizer has said of the same loss."""
        is_first = self._judged_at != self.num_backwards
        return is_first or (overflowed and not self._last_verdict)

    def _shrink(self) -> None:
        settings, before = self._settings, self.scale
        self._good_steps = 0
        if not self.is_dynamic:
            fate = "is fixed by fp16.loss_scale"
        elif self._hysteresis_left > 1:
            self._hysteresis_left -= 1
            fate = f"stays (hysteresis, {self._hysteresis_left} left)"
        else:
            self._change(max(before / FACTOR, settings.min_loss_scale))
            fate = f"goes down to {self.scale:g}"
        log_event(f"Step {self.num_steps - 1} was skipped: gradients overflow at {before:g}; it {fate}.")

    def _grow(self) -> None:
        settings = self._settings
        if settings.consecutive_hysteresis:
            self._hysteresis_left = settings.hysteresis
        self._good_steps += 1
        in_window = self._good_steps - 1
        if self.is_dynamic and in_window and in_window % settings.loss_scale_window == 0:
            self._hysteresis_left = settings.hysteresis
            self._change(self.scale * FACTOR)

    def _change(self, scale: float) -> None:
        ratio, self.scale = scale / self.scale, scale
        if ratio != 1.0:
            self.history.append(ScaleChange(self.num_steps, scale))
            for reference in self._on_change:
                on_change = reference()
                if on_change is not None:
                    on_change(ratio)

    def _note_backward(self, grad: Tensor) -> None:
        self._scaled_backward = compat.current_backward()
        self._is_scaled_running = True
        compat.at_end_of_backward(self._note_scaled_end)

    def _note_scaled_end(self) -> None:
        self._is_scaled_running = False
