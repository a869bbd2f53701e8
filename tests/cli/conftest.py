from pathlib import Path

import pytest
from cli_fixtures import save_steps


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three generations of one run, for tests that only read. Ids 1, 2 and 3, steps 10, 20 and 30."""
    url = tmp_path_factory.mktemp("cli") / "ckpts"
    assert save_steps(url, 10, 20, 30) == [1, 2, 3]
    return url
