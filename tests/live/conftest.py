"""Every test in this folder is marked `live` and needs a vLLM of its own.

CAPSIM_VLLM_VENV names the virtual environment that install_vllm.sh has made (default: .vllm in the repository's root).
CAPSIM_REQUIRE_LIVE=1 makes the tests fail, not skip, where it is missing.
"""

import os
from pathlib import Path

import pytest

from .server import installed

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; pytest hands over those of the whole run."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("live")


@pytest.fixture(scope="session", autouse=True)
def venv() -> Path:
    """Return the virtual environment with vLLM, or skip the tests of this folder."""
    location = Path(os.environ.get("CAPSIM_VLLM_VENV", REPOSITORY / ".vllm")).absolute()
    if not installed(location):
        missing = f"no vLLM in {location}: run tests/live/install_vllm.sh {location}, or set CAPSIM_VLLM_VENV"
        if os.environ.get("CAPSIM_REQUIRE_LIVE") == "1":
            pytest.fail(missing, pytrace=False)
        pytest.skip(missing)
    return location
