"""Every example of the README runs."""

import os
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp  # once, before forks
from forked import at_once

import ckptfmt
from ckptfmt.demo.postgres import free_port

README = (Path(__file__).parents[2] / "README.md").read_text()
STEPS = 1200


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


class Stage:
    """What the examples take for granted: a model that trains, and a place for ``/ckpts``."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.steps_done: list[int] = []
        self.names: dict[str, Any] = {"torch": torch, "ckptfmt": ckptfmt, "steps": STEPS, "step": 7}
        self.names["path"] = str(place / "state.pt")
        self.build(seed=0)

    def build(self, *, seed: int) -> None:
        torch.manual_seed(seed)
        model = torch.nn.Sequential()
        model.add_module("embed", torch.nn.Embedding(32, 4))
        opt = torch.optim.AdamW(model.parameters())
        sched = torch.optim.lr_scheduler.StepLR(opt, 100)

        def train_step() -> None:
            model(torch.randint(32, (2,))).square().sum().backward()
            opt.step()
            opt.zero_grad()
            sched.step()
            self.steps_done.append(len(self.steps_done))

        self.names |= {"model": model, "opt": opt, "sched": sched, "train_step": train_step}

    def run(self, code: str) -> None:
        exec(compile(code.replace("/ckpts", str(self.place / "ckpts")), "README.md", "exec"), self.names)

    def values(self) -> dict[str, Any]:
        model, opt = self.names["model"], self.names["opt"]
        return {"model": model.state_dict(), "optimizer": opt.state_dict()["state"]}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return bool(torch.equal(one, other))


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_the_change_from_torch_save_is_four_lines_and_both_sides_work(stage: Stage) -> None:
    (diff,) = blocks("diff")
    lines = [line for line in diff.splitlines() if line]
    assert len(lines) == 4
    stage.names["train_step"]()
    for sign in "-+":
        save, load = (line[1:] for line in lines if line.startswith(sign))
        before = stage.values()
        stage.run(save)
        stage.build(seed=1)
        stage.names["step"] = None
        assert not same(stage.values(), before)
        stage.run(load)
        assert same(stage.values(), before)
        assert stage.names["step"] == 7


def test_loop_then_inference(stage: Stage) -> None:
    loop, _, _, inference, slices, *_ = blocks("python")
    stage.run(loop)
    assert len(stage.steps_done) == STEPS
    with ckptfmt.open(stage.place / "ckpts", mode="r") as repo:
        assert [one.step for one in repo.generations(run="llama")] == [1000, 500]

    # A second start of the same program goes on behind the last save, and saves no step twice.
    stage.build(seed=1)
    stage.steps_done.clear()
    stage.run(loop)
    assert len(stage.steps_done) == STEPS - 1001

    saved = ckptfmt.load(f"{stage.place / 'ckpts'}#llama", subtree="model")
    stage.build(seed=2)
    stage.run(inference)
    assert same(stage.names["model"].state_dict(), dict(saved))

    stage.run(slices)
    assert torch.equal(torch.as_tensor(stage.names["rows"]), saved["embed.weight"][:16])


def test_a_fast_disk_first(stage: Stage) -> None:
    stage.run(blocks("python")[2])
    for name in ("ckpts", "ckpts-copy"):
        assert ckptfmt.load(f"{stage.place / name}#llama", catalog="none").keys() == {"model", "optimizer"}
    assert list((stage.place / "ckpts-stage").glob("*/runs/*/*/*.safetensors"))


def as_rank(place: Path, port: int, ranks: int, steps: int, rank: int) -> dict[str, Any]:
    """One rank that runs the example until ``steps``: what it resumed from, and what it has in the end."""
    told = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in told.items()})
    torch.set_num_threads(1)
    stage = Stage(place)
    names = stage.names
    names |= {"steps": steps, "share": 8 // ranks}

    def train_step() -> None:
        names["model"](torch.full((2,), rank)).square().sum().backward()
        names["opt"].step()
        names["opt"].zero_grad()
        names["loader"]["position"] += 8

    names["train_step"] = train_step
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch about itself
        stage.run(blocks("python")[1].replace("every_steps=500", "every_steps=5"))
    weight = names["model"].get_parameter("embed.weight").full_tensor()
    step = names["done"].step if names["done"] else None
    found = {"resumed": step, "position": names["loader"]["position"], "weight": weight.tolist()}
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")
def test_many_ranks_then_fewer(tmp_path: Path) -> None:
    Stage(tmp_path)  # optimizers import much: once, before forks
    four = at_once(partial(as_rank, tmp_path, free_port(), 4, 11), 4)
    assert [one["resumed"] for one in four] == [None] * 4
    assert [one["position"] for one in four] == [88, 90, 92, 94]
    with ckptfmt.open(tmp_path / "ckpts", mode="r") as repo:
        assert [(one.step, one.world_size) for one in repo.generations(run="llama")] == [(10, 4), (5, 4)]

    two = at_once(partial(as_rank, tmp_path, free_port(), 2, 11), 2)
    assert [one["resumed"] for one in two] == [10] * 2
    assert [one["position"] for one in two] == [88, 92]
    assert all(one["weight"] == four[0]["weight"] for one in two)


def test_every_example_is_run() -> None:
    """A new block needs a test: five are run here, those for other tools in test_readme_tools, which counts them."""
    fences = re.findall(r"^```(\w+)$", README, flags=re.MULTILINE)
    assert set(fences) == {"diff", "python", "sh"}
    assert (fences.count("diff"), fences.count("sh")) == (1, 1)
    before, _, tools = README.partition("\n## In other tools\n")
    assert before.count("\n```python\n") == 5
    assert "\n```python\n" not in tools[tools.index("\n## ") :]


def test_named_files_exist() -> None:
    root = Path(__file__).parents[2]
    pages = re.findall(r"`((?:format|catalog|cli)[\w-]*\.md)`", README)
    assert len(pages) == 3
    for page in pages:
        assert (root / "spec" / page).is_file(), f"README names spec/{page}"
    for target in re.findall(r"`make ([\w-]+)`", README):
        assert re.search(rf"^{target}:", (root / "Makefile").read_text(), re.MULTILINE), f"README names make {target}"
