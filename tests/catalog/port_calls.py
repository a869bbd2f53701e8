"""One plausible call of every method of the catalog's port."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptfmt.ports.records import CatalogIdentity, RankReport
from ckptfmt.ports.restoration import Restoration
from ckptfmt.testing.catalogs import COPY, Job, request


def every_call(catalog: Any, job: Job) -> dict[str, Callable[[], object]]:
    """By name; those that do not touch the database are left out. None has been made when this returns."""
    generation = job.committed()
    id, fence, launch = generation.id, job.fence, job.launch.id
    facts = job.facts(generation)
    identity = catalog.identity()
    plan = Restoration(identity, CatalogIdentity(identity.uuid, identity.epoch + 1), "merge", "/ckpts", (), 0)
    return {
        "identity": lambda: catalog.identity(),
        "root_url": lambda: catalog.root_url(),
        "moved_to": lambda: catalog.moved_to("/new"),
        "set_retention_hold": lambda: catalog.set_retention_hold("llama", True),
        "restore": lambda: catalog.restore(plan),
        "states": lambda: catalog.states(),
        "ensure_run": lambda: catalog.ensure_run("new", "new-1"),
        "runs": lambda: catalog.runs(),
        "live_launch": lambda: catalog.live_launch("llama"),
        "launches": lambda: catalog.launches("llama"),
        "launch": lambda: catalog.launch(launch),
        "last_committed_of": lambda: catalog.last_committed_of(launch),
        "unproven": lambda: catalog.unproven("llama"),
        "note": lambda: catalog.note("llama", generation_id=id, kind="noted", detail={}),
        "acquire_launch": lambda: catalog.acquire_launch("llama", request(), lease_seconds=1, displace=launch),
        "renew_lease": lambda: catalog.renew_lease(launch, lease_seconds=1),
        "close_launch": lambda: catalog.close_launch(launch),
        "set_restored_from": lambda: catalog.set_restored_from(launch, generation.key),
        "begin_save": lambda: catalog.begin_save(
            launch, n=50, step=1, key="k", ranks=[0], deadline_seconds=None, fence=fence, token=job.launch.token
        ),
        "skip_save": lambda: catalog.skip_save(launch, n=51, step=1, fence=fence, token=job.launch.token),
        "report_rank": lambda: catalog.report_rank(id, 0, state="staged"),
        "report_ranks": lambda: catalog.report_ranks(id, [RankReport(0, "staged")]),
        "join_launch": lambda: catalog.join_launch("llama", request(token=job.launch.token), rank=0),
        "post": lambda: catalog.post(launch, "hello", 0, {}),
        "posts": lambda: catalog.posts(launch, "hello"),
        "forget_posts": lambda: catalog.forget_posts(launch, "hello"),
        "ranks": lambda: catalog.ranks(id),
        "mark_durable": lambda: catalog.mark_durable(id, facts, fence=fence),
        "commit": lambda: catalog.commit(id, fence=fence),
        "set_proven": lambda: catalog.set_proven(id),
        "abort": lambda: catalog.abort(id, stage="s", rank=None, reason="r", fence=fence),
        "adopt": lambda: catalog.adopt(id, job.verdict(generation), fence=fence),
        "retire": lambda: catalog.retire(id),
        "mark_swept": lambda: catalog.mark_swept(id),
        "packs": lambda: catalog.packs(id),
        "pack_users": lambda: catalog.pack_users(generation.key, "p"),
        "database_now": lambda: catalog.database_now(),
        "tag": lambda: catalog.tag(id, "best"),
        "untag": lambda: catalog.untag(id, "best"),
        "pin": lambda: catalog.pin(id, reason="r"),
        "unpin": lambda: catalog.unpin(id),
        "quarantine": lambda: catalog.quarantine(id, reason="r"),
        "generation": lambda: catalog.generation(id),
        "generation_by_key": lambda: catalog.generation_by_key(generation.key),
        "generations": lambda: catalog.generations(),
        "latest": lambda: catalog.latest("llama"),
        "committed_at_step": lambda: catalog.committed_at_step("llama", 1),
        "tagged": lambda: catalog.tagged("llama", "best"),
        "open_reader": lambda: catalog.open_reader(id, host="h", pid=1, ttl_seconds=1),
        "close_reader": lambda: catalog.close_reader(1),
        "events": lambda: catalog.events(),
        "report_progress": lambda: catalog.report_progress(id, 0, 7),
        "ensure_tier": lambda: catalog.ensure_tier(COPY, role="replica", url="/copy", host=None),
        "forget_tier": lambda: catalog.forget_tier(COPY),
        "tiers": lambda: catalog.tiers(),
        "note_replicas": lambda: catalog.note_replicas(id, COPY, []),
        "mark_replicated": lambda: catalog.mark_replicated(id, COPY),
        "drop_replicas": lambda: catalog.drop_replicas(id, COPY),
        "replicas": lambda: catalog.replicas(id),
        "unreplicated": lambda: catalog.unreplicated("llama", COPY),
        "bytes_held": lambda: catalog.bytes_held(),
        "view": lambda: catalog.view("stalls"),
    }
