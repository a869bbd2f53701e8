"""Which generation: by the catalog, or without one by what COMMIT.json proves.

Never by name, step order, mtime or clock.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from ckptfmt.engine import verdicts
from ckptfmt.engine.opened import Opened, open_proven, open_row
from ckptfmt.engine.site import Site
from ckptfmt.errors import FormatError, InvalidInput, NotCommitted, NotFound
from ckptfmt.format import layout, verdict
from ckptfmt.format.states import State
from ckptfmt.ports.catalog import Catalog
from ckptfmt.ports.records import GenerationRecord

log = logging.getLogger("ckptfmt")


@dataclass(frozen=True)
class Wanted:
    """Which generation of a run: one field is set, or none for the latest committed."""

    id: int | None = None
    step: int | None = None
    tag: str | None = None


def open_wanted(site: Site, run: str | None, wanted: Wanted) -> Opened:
    """Resolve and open. ``NotFound``/``NotCommitted`` tell "none", "none committed" and "not this one" apart."""
    if site.catalog is not None:
        return open_row(site, resolve_row(site.catalog, site.backend.url, run, wanted))
    folder, commit = resolve_proof(site, run, wanted)
    return open_proven(site, folder, commit, stands=True)


def open_folder(site: Site) -> Opened:
    """Open a generation's folder by itself, wherever it was copied to."""
    commit = verdicts.read_commit(site.backend, "")
    if commit is None:
        raise NotFound(f"{site.backend.url} holds no {layout.COMMIT}")
    return open_proven(site, "", commit)


# -- by the catalog ---------------------------------------------------------------------------------
def resolve_row(catalog: Catalog, url: str, run: str | None, wanted: Wanted) -> GenerationRecord:
    if wanted.id is not None:
        return _by_id(catalog, url, run, wanted.id)
    name = only_run(catalog, url, run)
    if wanted.step is not None:
        row, what = catalog.committed_at_step(name, wanted.step), f"step {wanted.step}"
    elif wanted.tag is not None:
        row, what = catalog.tagged(name, wanted.tag), f"tag {wanted.tag!r}"
    else:
        row, what = catalog.latest(name), "latest"
    if row is None:
        raise _none(catalog, url, name, what)
    return row


def _by_id(catalog: Catalog, url: str, run: str | None, number: int) -> GenerationRecord:
    row = catalog.generation(number)
    if row is None or (run is not None and row.run != run):
        elsewhere = f" (it belongs to run {row.run!r})" if row is not None else ""
        raise NotFound(
            f"{url} has no generation {number}{f' in run {run!r}' if run else ''}{elsewhere}; see `ckptfmt ls`"
        )
    if row.state is not State.COMMITTED:
        why = f": {row.abort_reason}" if row.abort_reason else ""
        raise NotCommitted(
            f"generation {number} of run {row.run!r} is {row.state}, not committed{why}; see `ckptfmt ls`"
        )
    return row


def only_run(catalog: Catalog, url: str, run: str | None) -> str:
    names = [record.name for record in catalog.runs()]
    if run is not None:
        if run not in names:
            raise NotFound(f"{url} has no run {run!r}; it has {_listed(names)}")
        return run
    if not names:
        raise NotFound(f"{url} has no run yet: nothing was ever saved there")
    if len(names) > 1:
        raise InvalidInput(f"{url} has several runs: {_listed(names)}; name one with run=... or {url}#<run>")
    return names[0]


def _none(catalog: Catalog, url: str, run: str, what: str) -> NotFound:
    rows = catalog.generations(run=run, limit=5)
    if not rows:
        return NotFound(f"run {run!r} in {url} has no generation yet", kind="empty_run")
    if what != "latest":
        return NotFound(f"run {run!r} in {url} has no committed generation for {what}; see `ckptfmt ls`")
    shown = ", ".join(f"#{row.id} {row.state}{' (quarantined)' if row.quarantined_at else ''}" for row in rows)
    return NotCommitted(
        f"run {run!r} in {url} has generations but none that is committed: {shown}; see `ckptfmt inspect`, and "
        "`ckptfmt recover` after a crash",
        kind="none_committed",
    )


def _listed(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:20]))
    return f"{shown}, ..." if len(names) > 20 else shown or "none"


# -- by proof ---------------------------------------------------------------------------------------
def resolve_proof(site: Site, run: str | None, wanted: Wanted) -> tuple[str, verdict.Commit]:
    if wanted.tag is not None:
        raise InvalidInput(
            f"{site.backend.url} is read by proof, without a catalog: tags are not on storage; give an id or step"
        )
    name = proven_run(site, run)
    if wanted.id is not None:
        return _proven_id(site, name, wanted.id)
    for folder, commit in proven(site, layout.run_key(name)):
        if wanted.step is None or commit.step == wanted.step:
            return folder, commit
    what = "latest" if wanted == Wanted() else f"{wanted}"
    raise NotCommitted(f"run {name!r} in {site.backend.url}: storage proves no committed generation for {what}")


def _proven_id(site: Site, run: str, number: int) -> tuple[str, verdict.Commit]:
    """The generation with this id. Damage to another one is no reason to refuse it."""
    run_key = layout.run_key(run)
    damage: FormatError | None = None
    for hint in _hints(site, run_key):
        try:
            found = _proved(site, run_key, hint)
        except FormatError as error:
            damage = damage or error
            continue
        if found is not None and found[1].id == number:
            return found
    if damage is not None:
        raise damage  # this may be the one
    raise NotCommitted(f"run {run!r} in {site.backend.url}: storage proves no committed generation {number}")


def proven(site: Site, run_key: str) -> Iterator[tuple[str, verdict.Commit]]:
    """Committed generations newest first, by one listing of hints; hints that COMMIT.json doesn't prove are skipped."""
    for hint in _hints(site, run_key):
        found = _proved(site, run_key, hint)
        if found is not None:
            yield found


def _hints(site: Site, run_key: str) -> list[layout.CommitHint]:
    """Newest first."""
    names = (info.key.rpartition("/")[2] for info in site.backend.list(layout.commits_folder(run_key)))
    return sorted((hint for name in names if (hint := layout.parse_commit_hint(name)) is not None), reverse=True)


def _proved(site: Site, run_key: str, hint: layout.CommitHint) -> tuple[str, verdict.Commit] | None:
    """What COMMIT.json says of the generation that a hint names; None unless it is committed, and still is."""
    folder = layout.generation_folder(run_key, hint.key)
    commit = verdicts.read_commit(site.backend, folder)
    if commit is None:
        _tell_skipped(site, run_key, hint, f"{folder}/{layout.COMMIT} is not there")
        return None
    if commit.verdict != "committed" or commit.repository != site.repository:
        return None
    verdicts.check_belongs(commit, hint.key, folder)
    if (commit.epoch, commit.commit_seq) != (hint.epoch, hint.seq):
        _tell_skipped(site, run_key, hint, f"{folder}/{layout.COMMIT} tells another place in the order")
        return None
    return None if verdicts.is_retired(site.backend, folder, hint.key) else (folder, commit)


def _tell_skipped(site: Site, run_key: str, hint: layout.CommitHint, why: str) -> None:
    """A hint is made after the verdict, so one that nothing proves tells of a loss. It is no reason to stop reading."""
    name = layout.commit_hint(run_key, hint.epoch, hint.seq, hint.key)
    log.warning("%s: %s is passed over, an older commit may be taken for the latest: %s", site.backend.url, name, why)


def proven_runs(site: Site) -> list[str]:
    """Names of the runs of which storage proves a commit, sorted."""
    names = set()
    for key in site.backend.list_folders(layout.RUNS):
        first = next(proven(site, key), None)
        if first is not None:
            names.add(first[1].run)
    return sorted(names)


def proven_run(site: Site, run: str | None) -> str:
    if run is not None:
        return run
    names = proven_runs(site)
    if not names:
        raise NotFound(f"storage proves no committed generation in {site.backend.url}")
    if len(names) > 1:
        raise InvalidInput(f"{site.backend.url} has several runs: {_listed(names)}; name one with run=...")
    return names[0]
