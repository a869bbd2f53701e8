"""``ckptfmt inspect``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckptfmt.cli import options

if TYPE_CHECKING:
    from ckptfmt.cli.places import Place


def inspect(
    url: options.Url,
    tensor: Annotated[
        str | None, typer.Option(metavar="NAME", help="One tensor of the generation: boxes, packs, chunks, digests.")
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor, not only the largest.")] = False,
    catalog: options.Catalog = None,
    storage_option: options.StorageOption = None,
    as_json: options.Json = False,
) -> int:
    """Show a repository, a run (URL#run), a generation (URL#run@id) or a tensor.

    A repository and a run answer which generation a resume would take, why, and what is in it. A generation's folder
    can be given by itself, wherever it was copied to.
    """
    from ckptfmt.cli.places import opened_place

    with opened_place(url, catalog=catalog, storage_option=storage_option) as place:
        if tensor is not None:
            return _tensor(place, tensor, as_json)
        if tensors or place.connection.folder or place.reference.at is not None:
            return _generation(place, tensors, as_json)
        if place.reference.run is not None:
            return _run(place, place.reference.run, as_json)
        return _repository(place, as_json)


def _tensor(place: Place, name: str, as_json: bool) -> int:
    from ckptfmt.cli import tensor_view as t
    from ckptfmt.cli.output import emit

    view = t.tensor_view(place.open(), place.url, name)
    emit(view, lambda page: t.show_tensor(page, view), as_json=as_json)
    return 0


def _generation(place: Place, every: bool, as_json: bool) -> int:
    from ckptfmt.cli import generation_view as g
    from ckptfmt.cli.exit_codes import problem_code
    from ckptfmt.cli.output import emit

    view = g.generation_view(place, every=every)
    emit(view, lambda page: g.show_generation(page, view, place.now()), as_json=as_json)
    return 0 if view.problem is None else problem_code(view.problem.kind)


def _run(place: Place, run: str, as_json: bool) -> int:
    from ckptfmt.cli import repository_view as r
    from ckptfmt.cli.exit_codes import problem_code
    from ckptfmt.cli.output import emit

    view = r.run_details(place, run)
    emit(view, lambda page: r.show_details(page, view, place.now()), as_json=as_json)
    problem = view.run.resume.problem
    return 0 if problem is None else problem_code(problem.kind)


def _repository(place: Place, as_json: bool) -> int:
    from ckptfmt.cli import repository_view as r
    from ckptfmt.cli.exit_codes import problem_code
    from ckptfmt.cli.output import emit

    view = r.repository_view(place)
    emit(view, lambda page: r.show_repository(page, view, place.now()), as_json=as_json)
    problems = [run.resume.problem for run in view.runs if run.resume.problem is not None]
    return problem_code(problems[0].kind) if problems else 0
