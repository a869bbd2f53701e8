"""Run by .ci/try-wheel with the Python of an empty environment that holds the wheel and no torch.

python try_wheel.py WHEEL SDIST REPOSITORY
"""

import importlib.resources
import importlib.util
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path


def check_contents(wheel: Path, sdist: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    versions = [name for name in names if name.startswith("ckptfmt/migrations/versions/") and "__init__" not in name]
    assert "ckptfmt/py.typed" in names, "the wheel lacks py.typed"
    assert versions, "the wheel lacks the migrations"
    assert {"ckptfmt/catalog/__init__.py", "ckptfmt/backends/__init__.py", "ckptfmt/migrations/env.py"} <= names
    strangers = {name.split("/")[0] for name in names} - {"ckptfmt"}
    assert all(name.endswith(".dist-info") for name in strangers), f"the wheel brings {strangers}"
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert not [member.name for member in members if member.issym() or member.islnk()], "the sdist holds links"
    seen = [member.name.partition("/")[2] for member in members if member.isfile()]
    assert len(seen) == len(set(seen))
    assert names - {name for name in names if ".dist-info/" in name} <= set(seen), "the wheel has what the sdist lacks"


def check_use(repository: Path) -> None:
    assert importlib.util.find_spec("torch") is None, "this environment was to be without torch"
    import numpy as np

    import ckptfmt

    assert importlib.resources.files("ckptfmt").joinpath("py.typed").is_file()
    state = {"weights": np.arange(1 << 20, dtype=np.float32), "epoch": 3, "names": ("a", "b")}
    saved = ckptfmt.save(state, str(repository), run="wheel", step=7)
    loaded = ckptfmt.load(f"{repository}#wheel")
    assert loaded["epoch"] == 3
    assert loaded["names"] == ("a", "b")
    assert np.array_equal(loaded["weights"], state["weights"])
    print(f"saved and loaded generation {saved.id} with numpy alone")


def check_commands(repository: Path) -> None:
    for command in (["--help"], ["ls", repository], ["inspect", repository], ["verify", repository]):
        print("$ ckptfmt", *command, flush=True)
        subprocess.run(["ckptfmt", *map(str, command)], check=True)


if __name__ == "__main__":
    wheel, sdist, repository = map(Path, sys.argv[1:])
    check_contents(wheel, sdist)
    check_use(repository)
    check_commands(repository)
    print("the wheel works")
