"""The free functions: one save, one load, one restore, one open."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from ckptfmt import connect
from ckptfmt.engine.load.load import Framework
from ckptfmt.engine.load.names import Rename
from ckptfmt.engine.load.ranks import RankMap
from ckptfmt.engine.patterns import Patterns
from ckptfmt.engine.reports import RestoreReport
from ckptfmt.errors import InvalidInput
from ckptfmt.generation import Generation
from ckptfmt.reading import find
from ckptfmt.reference import At, merge, parse_reference
from ckptfmt.repository import Repository, open_repository
from ckptfmt.tiering import Place, TierOrder

State = Any
Options = Mapping[str, Any] | None
Url = str | os.PathLike[str]


def open(
    url: Url,
    *,
    mode: connect.Mode = "w",
    catalog: str | None = None,
    stage: Place | None = None,
    replicas: Sequence[Place] = (),
    durable_on: int = 1,
    bytes_max: int | None = None,
    bandwidth_max: int | None = None,
    storage_options: Options = None,
) -> Repository:
    """Open a repository. ``"w"`` creates it if absent; ``"r"`` creates, migrates and recovers nothing.

    ``url`` is a path, a URL, or a reference ``<repository>#<run>[@<id>|@step:N|@tag:T]``, whose run and generation
    become the defaults.

    Saves go through the ``stage``, a folder on a fast disk of this host, where one is given: their memory is free once
    they are there, and they are copied to ``url`` in the background. A stage is a path, a URL, or a mapping of ``url``,
    ``bytes_max`` (of this repository there) and ``keep`` (how many commits of a run stay for fast restores, default 1).
    ``replicas`` are further places that get every generation after its commit: each a path, a URL, or a mapping of
    ``url`` and ``storage_options``. With ``durable_on=k`` the first ``k - 1`` of them have to have it before. Of all
    copies between these places ``bandwidth_max`` bounds the bytes per second. ``bytes_max`` bounds the bytes of all
    generations: a save that would pass it fails (``OutOfSpace`` of the kind "quota") before it writes anything.

    Raises ``NotFound`` (mode "r"), ``Conflict`` if another catalog governs the root, or a stage or replica belongs to
    another repository, ``CatalogError`` for a schema of another version.
    """
    if isinstance(replicas, str | os.PathLike | Mapping):
        raise InvalidInput("replicas: give a list of places")
    reference = parse_reference(url)
    return open_repository(
        reference.url,
        mode=mode,
        run=reference.run,
        at=reference.at,
        catalog=catalog,
        storage_options=storage_options,
        tiers=TierOrder(stage, tuple(replicas), durable_on, bytes_max, bandwidth_max),
    )


def save(
    state: State,
    url: Url,
    *,
    run: str = "default",
    step: int = 0,
    metadata: Any = None,
    tags: Sequence[str] = (),
    catalog: str | None = None,
    storage_options: Options = None,
) -> Generation:
    """Save ``state`` as a new generation of ``run``; blocks until it is committed and proven.

    Raises ``SaveFailed`` with the cause chained, ``UnsupportedValue`` naming the path of what cannot be stored,
    ``Conflict`` while a live launch holds the run.
    """
    reference = parse_reference(url)
    if reference.at is not None:
        raise InvalidInput(f"{url}: a save makes a new generation; leave out {reference.at!r}")
    named = merge(reference, run=None if run == "default" and reference.run is not None else run, at=None)
    with (
        open_repository(
            named.url, mode="w", run=named.run, at=None, catalog=catalog, storage_options=storage_options
        ) as repository,
        repository.checkpointer() as checkpointer,
    ):
        pending = checkpointer.save(state, step=step, metadata=metadata, tags=tags)
        if pending is None:
            raise AssertionError("a save that waits was skipped")
        return pending.result()


def load(
    url: Url,
    *,
    run: str | None = None,
    at: At = None,
    subtree: str | None = None,
    keys: Patterns | None = None,
    exclude: Patterns | None = None,
    device: Any | None = None,
    framework: Framework = "saved",
    verify: bool = True,
    rank: int | None = None,
    catalog: str | None = None,
    storage_options: Options = None,
) -> State:
    """Build a saved state anew: the whole, the part at ``subtree``, or with the tensors that the patterns select.

    ``device`` None is the CPU, whatever the tensors were saved from. ``framework="saved"`` gives torch tensors where
    torch was saved and is installed, else numpy arrays. All bytes are verified unless ``verify=False``. Tensors of one
    load share memory: it is freed when the last of them goes. Tied tensors come back as one object, those that are
    spread over ranks whole. Of what each rank kept for itself (``PerRank``, ``Rng``) comes that of the saved rank
    ``rank``, which has to be named if there is more than one.
    Raises ``NotFound``, ``NotCommitted``, ``Mismatch``, ``Corrupt`` (tensor, object, offset), ``Unverifiable``.
    """
    reference = merge(parse_reference(url), run=run, at=at)
    connection = connect.open_site(reference.url, mode="r", catalog=catalog, storage_options=storage_options)
    with closing(connection):
        return find(connection, reference.run, reference.at).load(
            subtree=subtree, keys=keys, exclude=exclude, device=device, framework=framework, verify=verify, rank=rank
        )


def restore(
    into: State,
    url: Url,
    *,
    run: str | None = None,
    at: At = None,
    strict: bool = True,
    cast: bool = False,
    keys: Patterns | None = None,
    rename: Rename | None = None,
    atomic: bool = True,
    map: RankMap | None = None,
    catalog: str | None = None,
    storage_options: Options = None,
) -> RestoreReport:
    """Fill a live state in place: modules and tensors in their own memory, objects through ``load_state_dict``,
    plain values by assignment.

    Everything is checked against the manifest first: ``Mismatch`` lists every difference and nothing was touched.
    With ``atomic`` all bytes are read and verified before the first is copied; ``atomic=False`` needs no second copy of
    the state, and an error says which tensors were already changed. ``keys`` selects live names, ``rename`` maps saved
    names to live ones (a function, or a mapping of dotted prefixes), ``cast`` allows dtype changes and reports them.

    Tensors that are spread over ranks, saved or live, in whatever layout, take their share: only chunks that hold some
    of it are read. What each rank kept for itself (``PerRank``, ``Rng``) goes to the same rank at the same world size;
    at another one it is a ``Mismatch``, unless ``map`` says whose each rank gets (a function, or a mapping: rank ->
    saved rank, or None to keep what is live). The rank is that of torch.distributed where it is initialised, else of
    $RANK and $WORLD_SIZE.
    """
    reference = merge(parse_reference(url), run=run, at=at)
    connection = connect.open_site(reference.url, mode="r", catalog=catalog, storage_options=storage_options)
    with closing(connection):
        return find(connection, reference.run, reference.at).restore(
            into, strict=strict, cast=cast, keys=keys, rename=rename, atomic=atomic, map=map
        )
