"""Reading by proof from a place where every request costs a round trip: few requests, ranges only, no SQL library."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reading_rig import Watched

import ckptfmt
from ckptfmt import connect
from ckptfmt.cli.resume import resume_of
from ckptfmt.errors import NotFound

Distant = Callable[..., list[Watched]]


@pytest.fixture
def distant(monkeypatch: pytest.MonkeyPatch) -> Distant:
    """From then on every place is far away; the backends that were made."""

    def begin(wrap: Callable[[Any], Watched] | None = None) -> list[Watched]:
        plain, made = connect.backend_for, []

        def backend_for(*given: Any, **options: Any) -> Any:
            backend = plain(*given, **options)
            made.append(Watched(backend, distant=True, local=False) if wrap is None else wrap(backend))
            return made[-1]

        monkeypatch.setattr(connect, "backend_for", backend_for)
        monkeypatch.delenv(connect.CATALOG_VARIABLE, raising=False)
        return made

    return begin


def state() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    names = [f"layer{number}" for number in range(50)]
    return {
        "model": {name: rng.random(100) for name in names},
        "optimizer": {"moments": rng.integers(0, 255, 40 << 20, np.uint8)},
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("repository") / "r"
    for step in range(3):
        ckptfmt.save(state(), place, run="llama", step=step)
    return place


def test_a_subtree_takes_one_listing_and_ranges(root: Path, distant: Distant) -> None:
    made = distant()
    model = ckptfmt.load(f"{root}#llama", subtree="model")
    np.testing.assert_array_equal(model["layer7"], state()["model"]["layer7"])
    (backend,) = made
    # ckptfmt.json, COMMIT.json, RETIRED.json, the manifest; the listing of commits; all of the model at once
    assert backend.asked == {"read": 4, "list": 1, "read_into": 1}
    (_, _, nbytes), *_ = backend.ranges
    assert nbytes < 50 * 100 * 8 + 2 * 4096


def test_one_tensor_is_read_without_the_others(root: Path, distant: Distant) -> None:
    made = distant()
    with ckptfmt.open(f"{root}#llama", mode="r") as repo:
        tensor = repo.latest()["optimizer.moments"]
        np.testing.assert_array_equal(tensor[9 << 20 : 10 << 20], state()["optimizer"]["moments"][9 << 20 : 10 << 20])
    assert sum(nbytes for *_, nbytes in made[0].ranges) <= (8 << 20) + 2 * 4096
    assert made[0].asked["list"] == 1


def test_large_tensors_are_read_in_large_requests(root: Path, distant: Distant) -> None:
    made = distant()
    ckptfmt.load(f"{root}#llama")
    sizes = sorted(nbytes for *_, nbytes in made[0].ranges)
    assert len(sizes) <= 7, "40 MiB, and the small ones"
    assert sizes[-1] <= 16 << 20


def test_many_requests_are_in_flight(root: Path, distant: Distant) -> None:
    gathered = threading.Barrier(5)

    class Together(Watched):
        def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
            gathered.wait(timeout=60)
            super().read_into(key, offset, buffer)

    distant(lambda plain: Together(plain, distant=True, local=False))
    loaded = ckptfmt.load(f"{root}#llama", keys="optimizer.*")
    np.testing.assert_array_equal(loaded["optimizer"]["moments"], state()["optimizer"]["moments"])


def test_a_pack_that_is_gone_is_named_by_the_first_read_and_by_who_inspects(
    root: Path, distant: Distant, tmp_path: Path
) -> None:
    place = tmp_path / "r"
    ckptfmt.save({"a": np.arange(9)}, place, run="llama")
    (pack,) = place.rglob("*.safetensors")
    pack.unlink()
    distant()
    with pytest.raises(NotFound, match=pack.name):
        ckptfmt.load(place)
    connection = connect.open_site(place, mode="r", catalog=None, storage_options=None)
    resume, opened = resume_of(connection.site, "llama")
    assert opened is None
    assert resume.problem is not None
    assert pack.name in resume.problem.message


def test_where_a_request_is_cheap_packs_are_looked_at_when_it_is_opened(root: Path, distant: Distant) -> None:
    made = distant(lambda plain: Watched(plain, distant=False, local=False))
    with ckptfmt.open(f"{root}#llama", mode="r") as repo:
        repo.latest()
    assert made[0].asked["head"] == 1


_NO_SQL = """
import sys
for name in ("sqlalchemy", "alembic", "sqlite3", "_sqlite3", "psycopg"):
    sys.modules[name] = None
import numpy as np
import ckptfmt
model = ckptfmt.load(sys.argv[1], subtree="model", catalog="none")
assert len(model) == 50 and model["layer0"].shape == (100,), model
into = {"model": {name: np.zeros(100) for name in model}}
report = ckptfmt.restore(into, sys.argv[1], keys="model.*", catalog="none")
assert report.step == 2, report
try:
    ckptfmt.load(sys.argv[1])
except ckptfmt.InvalidInput as error:
    assert 'catalog="none"' in str(error), error
else:
    raise AssertionError("a catalog was opened")
with ckptfmt.open(sys.argv[1], mode="r", catalog="none") as repo:
    assert repo.latest().verify().ok
    print([info.step for info in repo.generations()])
"""


def test_no_sql_library_is_needed(root: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != connect.CATALOG_VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", _NO_SQL, f"{root}#llama"], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[2, 1, 0]"
