"""Rank 0 speaks and the others whisper; spans show in profiles and cost nothing without one.

Oracle: the records and events that the logging module and torch's profiler collect. Tolerance: none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import pytest
import torch

from zero_strategy.log import LOGGER, log_event, log_once, span


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    log_once.cache_clear()


@pytest.mark.parametrize(
    ("variable", "value", "level"),
    [("RANK", "0", logging.INFO), ("RANK", "3", logging.DEBUG), ("LOCAL_RANK", "1", logging.DEBUG)],
)
def test_rank_0_logs_at_info_and_others_at_debug(
    variable: str, value: str, level: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(variable, value)
    with caplog.at_level(logging.DEBUG, LOGGER.name):
        log_event("sharded 100 % of 7 elements")
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (level, "sharded 100 % of 7 elements")
    ]


def test_same_message_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOGGER.name):
        for message in ("a", "b", "a", "a"):
            log_once(message)
    assert [record.message for record in caplog.records] == ["a", "b"]


def _configure_root(level: int) -> None:
    logging.basicConfig(level=level, format="[%(message)s]", force=True)


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        (lambda: None, "hello\n"),  # nobody configured logging: shown all the same
        (lambda: _configure_root(logging.INFO), "[hello]\n"),
        (lambda: _configure_root(logging.WARNING), ""),
        (lambda: LOGGER.setLevel(logging.WARNING), ""),
        (lambda: logging.disable(logging.INFO), ""),
        (lambda: os.environ.update(RANK="1"), ""),
    ],
    ids=["unconfigured", "info", "warning", "own-level", "disabled", "rank-1"],
)
def test_events_are_shown_unless_the_user_says_otherwise(
    setup: Callable[[], None],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(logging.root, "handlers", [])  # without pytest's own
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    try:
        setup()
        log_event("hello")
    finally:
        LOGGER.setLevel(logging.NOTSET)  # also forgets which levels are on
        logging.disable(logging.NOTSET)
    assert capsys.readouterr() == ("", expected)


def test_span_labels_a_profile() -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        for label in (span("ZeRO::unshard", "layers.0"), span("ZeRO::step")):
            with label:
                torch.ones(2).sum()
    names = {event.name for event in profile.events()}
    assert {"ZeRO::unshard layers.0", "ZeRO::step"} <= names


def test_span_without_a_profiler_is_one_shared_object() -> None:
    assert span("ZeRO::unshard", "a") is span("ZeRO::reduce", "b")
    with span("ZeRO::unshard"), span("ZeRO::reduce"):
        pass
