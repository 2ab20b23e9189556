"""What every test gets: a fixed seed, one thread, and a skip where the hardware it names is missing."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests without a GPU; run the quick folder first, so that a broken basis shows at once."""
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    items.sort(key=lambda item: "/unit/" not in item.path.as_posix())


@pytest.fixture(autouse=True)
def _seed_and_one_thread() -> None:
    torch.manual_seed(42)
    torch.set_num_threads(1)
