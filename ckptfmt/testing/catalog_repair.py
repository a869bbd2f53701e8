"""Cases on repair: what storage proves, put into rows; counters, holds and identity."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any

import pytest

from ckptfmt.errors import Conflict, Fenced, NotFound
from ckptfmt.format.states import State
from ckptfmt.ports.catalog import Catalog
from ckptfmt.ports.records import AdoptFacts, CatalogIdentity, DurableFacts, PackRecord
from ckptfmt.ports.restoration import ProvenGeneration, ProvenRun, Restoration
from ckptfmt.testing.catalog_job import Job, MakeCatalog, request, require

_COMMITTED_AT = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
_RETIRED_AT = datetime(2026, 1, 3, tzinfo=UTC)


def proven(id: int, seq: int | None, **given: Any) -> ProvenGeneration:
    """A generation as storage tells of it: committed with ``seq``, else aborted."""
    key = str(given.pop("key", f"{id:032x}"))
    given.setdefault("fence", 3)
    durable = DurableFacts(
        f"manifest-{id}.json.zst", f"digest-{id}", 321, 987, None, [PackRecord(key, "p", 0, 1000, "header")]
    )
    adoption = None if seq is None else AdoptFacts(seq, _COMMITTED_AT, given["fence"], given.get("epoch", 1), durable)
    values = {"step": id * 10, "epoch": 1, "world_size": 2, "launch": "d" * 32, "save_number": id, **given}
    if adoption is None:
        values |= {"aborted": values.get("aborted", "disk full"), "launch": None, "save_number": None}
    return ProvenGeneration(key=key, id=id, adoption=adoption, **values)


def plan_of(catalog: Catalog, *found: ProvenGeneration, **given: Any) -> Restoration:
    """A rebuild of the run ``llama`` for the next epoch of the same catalog."""
    identity = catalog.identity()
    seqs = [one.adoption.commit_seq for one in found if one.adoption is not None]
    fences = [one.fence for one in found]
    run = ProvenRun("llama", "llama-key", max(seqs, default=0), max(fences, default=0), found)
    plan = Restoration(
        expected=identity,
        new=CatalogIdentity(identity.uuid, identity.epoch + 1),
        how="merge",
        url="/ckpts",
        runs=(run,),
        id_max=max((one.id for one in found), default=0),
    )
    return dataclasses.replace(plan, **given)


class RepairCases:
    """What a rebuild asks of a catalog."""

    def test_what_storage_proves_gets_rows(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        rows = catalog.restore(
            plan_of(
                catalog,
                proven(5, 2),
                proven(4, 1, retired_at=_RETIRED_AT),
                proven(3, 3, retired_at=_RETIRED_AT, swept=True),
                proven(8, None),
                proven(9, 4, quarantine="its manifest is gone", launch=None, save_number=None),
            )
        )
        assert {(row.id, row.state, row.action) for row in rows} == {
            (5, "committed", "restored"),
            (4, "retired", "restored"),
            (3, "deleted", "restored"),
            (8, "aborted", "restored"),
            (9, "committed", "restored"),
        }
        found = require(catalog.generation(5))
        assert (found.key, found.step, found.commit_seq, found.epoch, found.world_size) == (f"{5:032x}", 50, 2, 1, 2)
        assert (found.committed_at, found.commit_fence, found.manifest_digest) == (_COMMITTED_AT, 3, "digest-5")
        assert found.proven_at is not None
        assert [pack.name for pack in catalog.packs(5)] == ["p"]
        assert require(catalog.generation(4)).retired_at == _RETIRED_AT
        assert require(catalog.generation(8)).abort_reason == "disk full"
        assert require(catalog.generation(9)).quarantine_reason == "its manifest is gone"
        assert require(catalog.latest("llama")).id == 5
        assert catalog.states()[f"{4:032x}"] == (State.RETIRED, 1)
        assert catalog.states()[f"{8:032x}"] == (State.ABORTED, None)

    def test_a_restored_launch_is_found_again(self, make_catalog: MakeCatalog) -> None:
        """By the digest of its token, which is all that storage has of it."""
        catalog = make_catalog()
        catalog.restore(plan_of(catalog, proven(1, 1), proven(2, 2, launch="e" * 32)))
        catalog.restore(plan_of(catalog, proven(3, 3), proven(4, 4, launch="e" * 32)))
        by_launch: dict[int, list[int]] = {}
        for row in catalog.generations(run="llama"):
            by_launch.setdefault(row.launch_id, []).append(row.id)
        assert sorted(by_launch.values()) == [[3, 1], [4, 2]]
        fences = [launch.fence for launch in catalog.launches("llama")]
        assert sorted(fences) == [2, 3]  # one of them was finished by a successor
        assert not any(launch.live for launch in catalog.launches("llama"))

    def test_nothing_is_handed_out_again(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        old = Job.start(catalog)
        kept = old.proven(1)
        before = catalog.runs()[0]
        catalog.restore(plan_of(catalog, proven(40, 7, fence=9)))
        run = catalog.runs()[0]
        assert run.next_commit_seq == 8
        assert run.fence > max(before.fence, 9)
        assert catalog.live_launch("llama") is None
        with pytest.raises(Fenced):
            old.begin(2)
        job = Job.start(catalog)
        assert job.launch.id > old.launch.id + 1
        new = job.proven(3)
        assert new.id > 40
        assert (new.epoch, new.commit_seq) == (2, 8)
        assert [row.id for row in catalog.generations(run="llama", states=[State.COMMITTED])] == [new.id, 40, kept.id]

    def test_what_lost_catalogs_handed_out_is_not_handed_out_again(self, make_catalog: MakeCatalog) -> None:
        """Each rebuild leaves ids free, of which no trace need be left. The epoch tells how many there were."""
        catalog = make_catalog()
        identity = catalog.identity()
        catalog.ensure_run("llama", "llama-key")
        catalog.restore(plan_of(catalog, new=CatalogIdentity(identity.uuid, 4)))
        job = Job.start(catalog)
        assert job.begin().id > 3 * 1_000
        assert min(job.launch.id, job.launch.fence) > 3 * 1_000_000

    def test_rows_that_are_there_are_never_lowered(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        kept = job.proven(1, tags=["best"])
        catalog.pin(kept.id, reason="a paper")
        gone = job.proven(2)
        newest = job.proven(3)
        catalog.mark_swept(catalog.retire(gone.id).id)
        before = [require(catalog.generation(row.id)) for row in (kept, gone, newest)]
        facts = [proven(row.id, row.commit_seq, key=row.key) for row in (kept, gone, newest)]
        rows = catalog.restore(plan_of(catalog, *facts))
        assert {row.action for row in rows} == {"known"}
        assert [require(catalog.generation(row.id)) for row in (kept, gone, newest)] == before
        assert catalog.runs()[0].next_commit_seq == 4

    def test_rows_that_are_behind_follow_storage(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        retired, swept, aborted, still = job.proven(1), job.proven(2), job.aborted(3), job.begin(4)
        open_then = job.begin(5)
        rows = catalog.restore(
            plan_of(
                catalog,
                proven(retired.id, 1, key=retired.key, retired_at=_RETIRED_AT),
                proven(swept.id, None, key=swept.key, aborted="closed"),
                proven(aborted.id, 8, key=aborted.key),
                proven(still.id, None, key=still.key, aborted="given up"),
                proven(open_then.id, 9, key=open_then.key),
            )
        )
        assert {row.id: row.action for row in rows} == {
            retired.id: "retired",
            swept.id: "retired",
            aborted.id: "adopted",
            still.id: "aborted",
            open_then.id: "adopted",
        }
        assert require(catalog.generation(still.id)).abort_reason == "given up"
        assert require(catalog.latest("llama")).id == open_then.id

    def test_two_that_claim_one_place(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        kept = job.proven(1)
        still = job.begin(2)
        rows = catalog.restore(
            plan_of(
                catalog,
                proven(kept.id, 5, key="a" * 32),
                proven(77, 1, key="b" * 32),
                proven(still.id, 1, key=still.key),
                proven(78, 6, key="c" * 32, fence=4),
                proven(79, 6, key="d" * 32, fence=5),
            )
        )
        assert {row.key[0]: row.action for row in rows if row.key != still.key} == {
            "a": "left_out",
            "b": "left_out",
            "c": "left_out",
            "d": "restored",
        }
        assert catalog.generation(77) is None
        assert require(catalog.generation(still.id)).state is State.ABORTED  # or no launch could settle it
        told = [event.detail["key"] for event in catalog.events(run="llama") if event.kind == "left_out"]
        assert sorted(told) == sorted(["a" * 32, "b" * 32, "c" * 32, still.key])

    def test_a_rebuild_that_comes_second_changes_nothing(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        first, second = plan_of(catalog, proven(1, 1)), plan_of(catalog, proven(2, 2))
        catalog.restore(first)
        before = catalog.identity(), catalog.runs(), catalog.generations()
        with pytest.raises(Conflict) as caught:
            catalog.restore(second)
        assert caught.value.kind == "rebuilt_meanwhile"
        assert (catalog.identity(), catalog.runs(), catalog.generations()) == before

    def test_it_becomes_the_catalog_of_the_epoch(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        new = CatalogIdentity("6f0f6f1c-9f0e-4b55-8c0f-0000000000aa", 7)
        catalog.restore(plan_of(catalog, new=new, url="/elsewhere"))
        assert catalog.identity() == new
        assert catalog.root_url() == "/elsewhere"

    def test_a_hold_is_set_by_a_repair_and_cleared_by_hand(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        old, _ = job.proven(1), job.proven(2)
        catalog.close_launch(job.launch.id)
        catalog.restore(plan_of(catalog))
        assert catalog.runs()[0].retention_hold
        with pytest.raises(Conflict, match="hold"):
            catalog.retire(old.id)
        for _ in range(2):
            assert not catalog.set_retention_hold("llama", False).retention_hold
        assert catalog.retire(old.id).state is State.RETIRED
        assert catalog.set_retention_hold("llama", True).retention_hold
        kinds = [event.kind for event in catalog.events(run="llama")]
        assert [kind for kind in kinds if kind in ("rebuild", "hold", "release")] == ["rebuild", "release", "hold"]
        with pytest.raises(NotFound, match="'gpt'"):
            catalog.set_retention_hold("gpt", True)

    def test_where_it_was_opened_is_noted(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        catalog.moved_to("/new")
        assert catalog.root_url() == "/new"
        assert make_catalog(mode="r").root_url() == "/new"

    def test_a_launch_after_a_repair_is_like_any_other(self, make_catalog: MakeCatalog) -> None:
        catalog = make_catalog()
        catalog.restore(plan_of(catalog, proven(1, 1)))
        held = catalog.acquire_launch("llama", request(), lease_seconds=60)
        assert catalog.live_launch("llama") == held
