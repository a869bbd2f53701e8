"""Cases on texts that not every database can keep: they come from file names and foreign messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from ckptfmt.errors import CkptError
from ckptfmt.ports.catalog import Catalog
from ckptfmt.ports.records import GenerationRecord, RankReport, ReplicaPack
from ckptfmt.testing.catalog_job import Job, MakeCatalog, request, require
from ckptfmt.testing.catalog_repair import plan_of, proven

_TEXTS = {"a\0b": r"a\x00b", "a\ud800b": r"a\ud800b", "a\udc80\0": r"a\udc80\x00"}
"""What no database keeps, and what is kept of it."""


def writing_calls(catalog: Catalog, job: Job, text: str) -> dict[str, Callable[[], object]]:
    """Every method that writes texts, with ``text`` wherever it takes one. None has been made when this returns."""
    committed, writing, hopeless = job.committed(2), job.written(1), job.begin(4)
    begun: dict[str, Any] = {"n": 90, "step": 3, "ranks": [0], "deadline_seconds": None, "fence": job.fence}
    token, launch, facts = job.launch.token, job.launch.id, job.facts(writing)
    pack = dataclasses.replace(facts.packs[0], name=text, header_digest=text)
    odd = dataclasses.replace(
        facts, manifest_name=text, manifest_digest=text, parent_key=text, packs=[pack], tiers=[text]
    )
    report = RankReport(0, "durable", text, text, staged_tier=text)
    job.replicated(committed)
    copy = ReplicaPack(committed.key, facts.packs[0].name, text)
    who = dataclasses.replace(request(token=text, world_size=2), host=text, boot_id=text, pid_started=text)
    note: dict[str, Any] = {text: [text, {"deep": text}]}
    broken = [proven(500, 7, quarantine=text), proven(501, None, aborted=text)]
    return {
        "moved_to": lambda: catalog.moved_to(text),
        "ensure_run": lambda: catalog.ensure_run(text, text),
        "join_launch": lambda: catalog.join_launch(
            job.run, dataclasses.replace(who, token=token, boot_id=job.launch.boot_id), rank=1
        ),
        "set_restored_from": lambda: catalog.set_restored_from(launch, text),
        "begin_save": lambda: catalog.begin_save(launch, key=text, tags=[text], token=token, **begun),
        "report_ranks": lambda: catalog.report_ranks(hopeless.id, [report]),
        "mark_durable": lambda: catalog.mark_durable(writing.id, odd, fence=job.fence),
        "adopt": lambda: catalog.adopt(
            writing.id, dataclasses.replace(job.verdict(writing), durable=odd), fence=job.fence
        ),
        "abort": lambda: catalog.abort(hopeless.id, stage=text, rank=0, reason=text, fence=job.fence),
        "tag": lambda: catalog.tag(committed.id, text),
        "untag": lambda: catalog.untag(committed.id, text),
        "pin": lambda: catalog.pin(committed.id, reason=text),
        "quarantine": lambda: catalog.quarantine(committed.id, reason=text),
        "open_reader": lambda: catalog.open_reader(committed.id, host=text, pid=1, ttl_seconds=60),
        "post": lambda: catalog.post(launch, text, 0, note),
        "forget_posts": lambda: catalog.forget_posts(launch, text),
        "note": lambda: catalog.note(job.run, generation_id=None, kind=text, detail=note),
        "acquire_launch": lambda: catalog.acquire_launch(job.run, who, lease_seconds=60, displace=launch),
        "ensure_tier": lambda: catalog.ensure_tier(text, role="stage", url=text, host=text),
        "note_replicas": lambda: catalog.note_replicas(committed.id, text, [copy]),
        "drop_replicas": lambda: catalog.drop_replicas(committed.id, text, packs=[text]),
        "forget_tier": lambda: catalog.forget_tier(text),
        "restore": lambda: catalog.restore(plan_of(catalog, *broken)),
    }


class TextCases:
    """What a catalog keeps of any text."""

    @pytest.mark.parametrize("text", _TEXTS)
    def test_no_text_is_too_odd_for_a_method(self, make_catalog: MakeCatalog, text: str) -> None:
        """It is kept in the form that every database keeps, or refused with an error of ours. A repeated call meets
        what the first one left as with any other text."""
        catalog = make_catalog()
        refused: list[tuple[str, str]] = []
        for name, call in writing_calls(catalog, Job.start(catalog, world_size=2), text).items():
            for _ in range(2):
                try:
                    call()
                except CkptError as error:
                    refused.append((name, error.kind))
        # A run keeps the name that it was given, or none; and a tag can be taken away once.
        assert refused == [("ensure_run", "conflict"), ("ensure_run", "conflict"), ("untag", "not_found")], refused

    @pytest.mark.parametrize(("text", "kept"), _TEXTS.items())
    def test_reasons_are_kept_and_found_again(self, make_catalog: MakeCatalog, text: str, kept: str) -> None:
        catalog = make_catalog()
        job = Job.start(catalog)
        done = job.committed(1, tags=[text])
        assert require(catalog.tagged("llama", text)).id == done.id
        for _ in range(2):  # the second time nothing is new
            catalog.tag(done.id, text)
            catalog.pin(done.id, reason=text)
            catalog.quarantine(done.id, reason=text)
            aborted = catalog.abort(self._open(job), stage="persist", rank=0, reason=text, fence=job.fence)
        assert aborted.abort_reason == kept
        marked = require(catalog.generation(done.id))
        assert (marked.tags, marked.quarantine_reason) == ((kept,), kept)
        kinds = [event.kind for event in catalog.events(generation_id=done.id)]
        assert [kinds.count(kind) for kind in ("tag", "pin", "quarantine")] == [1, 1, 1]
        pins = [event.detail for event in catalog.events(generation_id=done.id) if event.kind == "pin"]
        assert pins == [{"reason": kept}]
        catalog.untag(done.id, text)
        assert require(catalog.generation(done.id)).tags == ()

    @pytest.mark.parametrize(("text", "kept"), _TEXTS.items())
    def test_what_storage_tells_is_kept(self, make_catalog: MakeCatalog, text: str, kept: str) -> None:
        catalog = make_catalog()
        catalog.restore(plan_of(catalog, proven(500, 7, quarantine=text), proven(501, None, aborted=text)))
        found = [require(catalog.generation(id)) for id in (500, 501)]
        assert [row.quarantine_reason or row.abort_reason for row in found] == [kept, kept]

    def _open(self, job: Job) -> int:
        generation: GenerationRecord = job.begin(5)
        return generation.id
