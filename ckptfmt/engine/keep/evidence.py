"""What storage alone proves of each generation: read for a rebuild of the catalog, nothing is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from ckptfmt.engine import protocol, verdicts
from ckptfmt.engine.opened import read_manifest
from ckptfmt.engine.site import Site
from ckptfmt.engine.survey import RunSurvey, nbytes_of, survey
from ckptfmt.engine.sweep import TOMBSTONES
from ckptfmt.errors import BackendError, FormatError, NotFound
from ckptfmt.format import layout, verdict
from ckptfmt.format.manifest import Manifest
from ckptfmt.format.states import State
from ckptfmt.ports.catalog import States
from ckptfmt.ports.records import AdoptFacts, DurableFacts
from ckptfmt.ports.restoration import ProvenGeneration, ProvenRun


@dataclass
class Evidence:
    """All that was found. ``left_out`` and ``unfinished`` are folders, with what is known of them."""

    runs: dict[str, ProvenRun] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Folder -> why it has no part in the catalog: damaged or foreign verdicts."""
    unfinished: dict[str, str] = field(default_factory=dict)
    """Folder -> what is in it: no verdict, so nothing proves that it was ever committed, nor that it was not."""
    unhinted: list[tuple[str, str, int, int]] = field(default_factory=list)
    """(run key, key, epoch, seq) of committed generations that no listing of hints would find."""
    id_max: int = 0


def gather(site: Site, known: States) -> Evidence:
    """Read every verdict under the root, and the manifests of generations that are not in ``known`` as committed.

    Storage that cannot be reached is an error (``BackendError``); what is damaged is told in the result.
    """
    found = Evidence()
    for run in survey(site.backend):
        _gather_run(site, run, known, found)
    found.id_max += len(found.left_out) + len(found.unfinished)  # each of them had an id once
    return found


def _gather_run(site: Site, run: RunSurvey, known: States, found: Evidence) -> None:
    hinted = {hint.key for hint in run.hints}
    proven: list[ProvenGeneration] = []
    name = None
    for key, names in run.folders.items():
        commit = _verdict(site, run, key, names, found)
        if commit is None:
            continue
        name = commit.run
        found.id_max = max(found.id_max, commit.id)
        one = _weigh(site, run, commit, names, known.get(key))
        proven.append(one)
        if commit.verdict == "committed" and key not in hinted and commit.commit_seq is not None:
            found.unhinted.append((run.run_key, key, commit.epoch, commit.commit_seq))
    if name is None:
        return
    seqs = [hint.seq for hint in run.hints] + [one.adoption.commit_seq for one in proven if one.adoption is not None]
    fences = [one.fence for one in proven]
    found.runs[name] = ProvenRun(name, run.run_key, max(seqs, default=0), max(fences, default=0), tuple(proven))


def _verdict(site: Site, run: RunSurvey, key: str, names: Mapping[str, int], found: Evidence) -> verdict.Commit | None:
    """The verdict on one folder, if it counts; else the folder is put where it belongs."""
    folder = layout.generation_folder(run.run_key, key)
    if layout.COMMIT not in names:
        if layout.RETIRED in names:
            found.left_out[folder] = f"it has a tombstone, but no {layout.COMMIT}"
        elif names:
            whole = any(name.startswith("manifest-") for name in names)
            found.unfinished[folder] = f"{len(names)} objects, {nbytes_of(names)} bytes, " + (
                "a manifest" if whole else "no manifest: never committed"
            )
        return None
    try:
        commit = verdicts.read_commit(site.backend, folder)
    except FormatError as error:
        found.left_out[folder] = str(error)
        return None
    if commit is None:
        return None
    reason = verdicts.why_elsewhere(commit, site, run.run_key, key)
    if reason is not None:
        found.left_out[folder] = reason
        return None
    return commit


def _weigh(
    site: Site,
    run: RunSurvey,
    commit: verdict.Commit,
    names: Mapping[str, int],
    known: tuple[State, int | None] | None,
) -> ProvenGeneration:
    folder = layout.generation_folder(run.run_key, commit.key)
    manifest: Manifest | None = None
    problem = retired_at = adoption = None
    if commit.verdict == "committed":
        swept_by_gc = layout.RETIRED in names and not set(names) - TOMBSTONES
        if not swept_by_gc and (known is None or known[1] is None):
            manifest, problem = _manifest(site, run, folder, commit)
        adoption = _adoption(commit, manifest, names)
    if layout.RETIRED in names:
        try:
            stone = verdicts.read_retired(site.backend, folder)
            retired_at = datetime.fromisoformat(stone.retired_at) if stone is not None else None
        except FormatError as error:
            problem = problem or f"its tombstone is damaged: {error}"
    return ProvenGeneration(
        key=commit.key,
        id=commit.id,
        step=commit.step,
        epoch=commit.epoch,
        fence=commit.fence,
        world_size=len(manifest.ranks) if manifest is not None else max(1, _parts(names)),
        adoption=adoption,
        launch=None if manifest is None else manifest.launch,
        save_number=None if manifest is None else manifest.save_number,
        created_at=None if manifest is None else datetime.fromisoformat(manifest.created_at),
        retired_at=retired_at,
        swept=not set(names) - TOMBSTONES and (commit.verdict == "aborted" or retired_at is not None),
        aborted=(commit.reason or "aborted") if commit.verdict == "aborted" else None,
        quarantine=problem if commit.verdict == "committed" else None,
    )


def _manifest(site: Site, run: RunSurvey, folder: str, commit: verdict.Commit) -> tuple[Manifest | None, str | None]:
    """The manifest that a verdict names, and what is wrong with it or with its packs."""
    if commit.manifest is None:
        return None, "its verdict names no manifest"
    try:
        manifest = read_manifest(site, folder, commit.manifest.name, commit.manifest.digest, commit.key)
    except (FormatError, NotFound) as error:
        return None, str(error)
    except BackendError as error:
        if error.transient:
            raise
        return None, str(error)
    for pack in manifest.packs:
        place = commit.key if pack.generation is None else pack.generation
        nbytes = run.folders.get(place, {}).get(pack.name)
        if nbytes != pack.nbytes:
            have = "is not there" if nbytes is None else f"has {nbytes} bytes"
            return manifest, f"pack {place}/{pack.name} {have}, recorded are {pack.nbytes} bytes"
    return manifest, None


def _adoption(commit: verdict.Commit, manifest: Manifest | None, names: Mapping[str, int]) -> AdoptFacts | None:
    if commit.manifest is None or commit.commit_seq is None or commit.committed_at is None:
        return None
    ref = commit.manifest
    if manifest is not None:
        durable = protocol.durable_facts(manifest, commit.key, ref.name, ref.digest, ref.bytes)
    else:  # what the verdict says, and of the packs what can be seen
        packs = sum(nbytes for name, nbytes in names.items() if name.endswith(".safetensors"))
        durable = DurableFacts(ref.name, ref.digest, ref.bytes, packs, commit.parent)
    return AdoptFacts(
        commit_seq=commit.commit_seq,
        committed_at=datetime.fromisoformat(commit.committed_at),
        commit_fence=commit.fence,
        epoch=commit.epoch,
        durable=replace(durable, tiers=verdict.tiers_of(commit)),
    )


def _parts(names: Mapping[str, int]) -> int:
    return sum(name.endswith(".part.json") for name in names)
