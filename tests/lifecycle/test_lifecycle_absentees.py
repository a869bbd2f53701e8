"""Whom recover names where a generation of several ranks was left unfinished: those whose part is not there."""

from __future__ import annotations

import pytest
from lifecycle_rig import Place, Process

from ckptfmt.engine import verdicts
from ckptfmt.errors import AccessDenied
from ckptfmt.format import layout
from ckptfmt.ports.records import GenerationRecord
from ckptfmt.testing.catalog_job import Job, request
from ckptfmt.testing.faults import Fault


@pytest.fixture
def process(place: Place) -> Process:
    return place.open()


def begun(process: Process, world_size: int) -> tuple[Job, GenerationRecord]:
    catalog = process.catalog._inner
    catalog.ensure_run("run", layout.run_key("run"))
    asked = request(world_size=world_size)
    job = Job(catalog, "run", catalog.acquire_launch("run", asked, lease_seconds=60))
    return job, job.begin(1)


def write_parts(process: Process, row: GenerationRecord, *ranks: int) -> None:
    """What those ranks wrote, and only their coordinator could have told the catalog."""
    folder = verdicts.folder_of(row)
    process.backend.make_folder(folder)
    for rank in ranks:
        process.backend.create(f"{folder}/{layout.part_name(rank)}", b"{}")
        process.backend.create(f"{folder}/r{rank:05d}-p000.safetensors", b"x")


def reason_of(process: Process, job: Job) -> str:
    """Why recover aborted the only generation, which its dry run has said, and the catalog keeps."""
    job.catalog.close_launch(job.launch.id)
    told, done = (process.repository.recover(dry_run=dry_run).actions for dry_run in (True, False))
    assert told == done
    (action,) = done
    assert action.action == "aborted"
    assert process.row().abort_reason == f"incomplete: {action.reason}"
    return action.reason


def test_only_ranks_without_a_part_are_named(process: Process) -> None:
    job, row = begun(process, 4)
    write_parts(process, row, 0, 1, 3)
    reason = reason_of(process, job)
    assert "rank 2 never acknowledged" in reason
    assert "rank 0" not in reason


def test_a_pack_without_its_part_is_no_acknowledgement(process: Process) -> None:
    job, row = begun(process, 3)
    write_parts(process, row, 0)
    process.backend.create(f"{verdicts.folder_of(row)}/r00001-p000.safetensors", b"x")
    assert "ranks 1, 2 never acknowledged" in reason_of(process, job)


def test_what_a_rank_said_of_its_failure_is_told(process: Process) -> None:
    job, row = begun(process, 3)
    write_parts(process, row, 0)
    job.catalog.report_rank(row.id, 2, state="failed", error="its disk is full")
    reason = reason_of(process, job)
    assert "rank 2 failed: its disk is full; rank 1 never acknowledged" in reason


def test_of_many_ranks_the_first_are_named(process: Process) -> None:
    job, row = begun(process, 13)
    write_parts(process, row, 0)
    assert "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 4 more never acknowledged" in reason_of(process, job)


def test_a_coordinator_that_never_told_of_the_parts_is_no_fault_of_the_ranks(process: Process) -> None:
    job, row = begun(process, 2)
    write_parts(process, row, 0, 1)
    reason = reason_of(process, job)
    assert "all parts are there, but the catalog was never told of them" in reason
    assert "never acknowledged" not in reason


def test_storage_that_lists_nothing_hides_no_rank(process: Process) -> None:
    job, row = begun(process, 2)
    write_parts(process, row, 0)

    def forbidden() -> AccessDenied:
        return AccessDenied("listing is forbidden")

    process.backend.add(Fault("list", error=forbidden, times=None))
    assert "ranks 0, 1 never acknowledged" in reason_of(process, job)
