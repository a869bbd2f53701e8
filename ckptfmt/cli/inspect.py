"""Show a repository, a run (URL#run), a generation (URL#run@id) or a tensor.

A repository and a run answer which generation a resume would take, why, and what is in it. A generation's folder can
be given by itself, wherever it was copied to; and so can checkpoints of other tools: a .safetensors file, a folder of
them, a file of torch.save, a folder with pytorch_model.bin or its numbered files, a torch.distributed.checkpoint
directory, a Zarr v3 group.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from ckptfmt.cli import options

if TYPE_CHECKING:
    from pathlib import Path

    from ckptfmt.cli.places import Place


def configure(parser: ArgumentParser) -> None:
    options.add_url(parser)
    parser.add_argument(
        "--tensor", metavar="NAME", help="one tensor of the generation: its boxes, packs, chunks and digests"
    )
    parser.add_argument("--tensors", action="store_true", help="a generation with all its tensors")
    options.add_storage(parser)
    options.add_output(parser)


def run(arguments: Namespace) -> int:
    from ckptfmt.cli.foreign_place import foreign_path
    from ckptfmt.cli.places import opened_place

    if (path := foreign_path(arguments.url)) is not None:
        return _foreign(path, arguments)
    with opened_place(arguments) as place:
        if arguments.tensor is not None:
            return _tensor(place, arguments)
        if arguments.tensors or place.connection.folder or place.reference.at is not None:
            return _generation(place, arguments)
        if place.reference.run is not None:
            return _run(place, place.reference.run, arguments)
        return _repository(place, arguments)


def _foreign(path: Path, arguments: Namespace) -> int:
    from ckptfmt.cli import foreign_view as f
    from ckptfmt.cli.output import emit

    view = f.foreign_view(path, tensor=arguments.tensor, every=arguments.tensors)
    emit(view, lambda page: f.show_foreign(page, view), as_json=arguments.as_json)
    return 0


def _tensor(place: Place, arguments: Namespace) -> int:
    from ckptfmt.cli import tensor_view as t
    from ckptfmt.cli.output import emit

    view = t.tensor_view(place.open(), place.url, arguments.tensor)
    emit(view, lambda page: t.show_tensor(page, view), as_json=arguments.as_json)
    return 0


def _generation(place: Place, arguments: Namespace) -> int:
    from ckptfmt.cli.exit_codes import problem_code
    from ckptfmt.cli.generation_page import show_generation
    from ckptfmt.cli.generation_view import generation_view
    from ckptfmt.cli.output import emit

    view = generation_view(place, every=arguments.tensors)
    emit(view, lambda page: show_generation(page, view, place.now()), as_json=arguments.as_json)
    return 0 if view.problem is None else problem_code(view.problem.kind)


def _run(place: Place, name: str, arguments: Namespace) -> int:
    from ckptfmt.cli import repository_view as r
    from ckptfmt.cli.exit_codes import problem_code
    from ckptfmt.cli.output import emit

    view = r.run_details(place, name)
    emit(view, lambda page: r.show_details(page, view, place.now()), as_json=arguments.as_json)
    problem = view.run.resume.problem
    return 0 if problem is None else problem_code(problem.kind)


def _repository(place: Place, arguments: Namespace) -> int:
    from ckptfmt.cli import repository_view as r
    from ckptfmt.cli.exit_codes import problem_code
    from ckptfmt.cli.output import emit

    view = r.repository_view(place)
    emit(view, lambda page: r.show_repository(page, view, place.now()), as_json=arguments.as_json)
    problems = [one.resume.problem for one in view.runs if one.resume.problem is not None]
    return problem_code(problems[0].kind) if problems else 0
