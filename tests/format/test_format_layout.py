"""Object keys and verdicts."""

from __future__ import annotations

import datetime as dt
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfmt.errors import Corrupt, FormatError, InvalidInput, UnsupportedVersion
from ckptfmt.format import checksum, layout, verdict
from ckptfmt.format.verdict import CatalogClaim, Commit, ManifestRef, Marker, Repair, Retired, TierMark

KEY = "0123456789abcdef0123456789abcdef"
UUID = "00000000-0000-0000-0000-000000000001"
TIER = "00000000-0000-0000-0000-000000000002"
NOW = "2025-01-02T03:04:05.000006Z"


# -- keys -------------------------------------------------------------------------------------------
@given(st.text(st.characters(blacklist_categories=["Cc", "Cs"], blacklist_characters="#@"), min_size=1, max_size=200))
def test_run_keys_are_plain(name: str) -> None:
    key = layout.run_key(name)
    assert layout.validate_key(layout.commit_hint(key, 1, 1, KEY))
    assert key == key.lower()
    assert len(key) <= 40 + 1 + 10


def test_run_keys_differ_where_file_systems_would_not_tell_them_apart() -> None:
    names = ["Llama", "llama", "LLAMA", "lla ma", "lla-ma", "lla_ma", "\u00fc", "u", "..", "."]
    assert len({layout.run_key(name) for name in names}) == len(names)
    assert layout.run_key("Llama 7B").startswith("llama-7b-")
    assert layout.run_key("..").startswith("run-")


@pytest.mark.parametrize("name", ["", "a#b", "a@1", "a\nb", "a\x00", "\ud800", "x" * 201, None, 5])
def test_bad_run_names(name: Any) -> None:
    with pytest.raises(InvalidInput):
        layout.run_key(name)


def test_generation_keys() -> None:
    key = layout.generation_key("token", "run-1", 0)
    assert layout.validate_generation_key(key) == key
    others = [("token", "run-1", 1), ("token", "run-2", 0), ("toke", "nrun-1", 0), ("tokenr", "un-1", 0)]
    assert len({key, *(layout.generation_key(*other) for other in others)}) == 5
    assert layout.launch_digest("token") not in (key, "token")
    with pytest.raises(InvalidInput):
        layout.generation_key("token", "run-1", -1)


def test_keys_stay_what_they_are() -> None:
    # Parents, pins and manifests name these for ever.
    assert layout.generation_key("token", "run-1", 7) == "6eaecd0c064a01187a23970298117a1f"
    assert layout.run_key("llama") == "llama-fc5a1047f5"


@pytest.mark.parametrize("token", ["", "a b", "a\n", "é", "x" * 201, None])
def test_bad_launch_tokens(token: Any) -> None:
    with pytest.raises(InvalidInput, match="launch token"):
        layout.validate_launch_token(token)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/a",
        "a/",
        "a//b",
        ".",
        "..",
        "a/../b",
        "a/.b",
        "a b",
        "a\\b",
        "ä",
        "a\n",
        "c:",
        "a/" * 300 + "a",
        "x" * 201,
        None,
    ],
)
def test_bad_keys(key: Any) -> None:
    with pytest.raises(InvalidInput):
        layout.validate_key(key)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".x", "a\x00", "x" * 201, None, 3])
def test_bad_plain_names(name: Any) -> None:
    with pytest.raises(FormatError):
        layout.validate_plain_name(name)


def test_names_sort_and_fit() -> None:
    hints = [layout.commit_hint("run-0", e, s, KEY) for e, s in [(1, 9), (1, 10), (1, 10**11), (2, 1), (12, 1)]]
    assert hints == sorted(hints)
    assert layout.parse_commit_hint(hints[2].rsplit("/", 1)[1]) == (1, 10**11, KEY)
    assert layout.parse_catalog_claim(layout.catalog_claim(7).rsplit("/", 1)[1]) == 7
    names = [layout.pack_name(0, 0), layout.pack_name(99_999, 999, 2), layout.part_name(3), layout.part_name(3, 1)]
    assert names == ["r00000-p000.safetensors", "r99999-p999-a2.safetensors", "r00003.part.json", "r00003-a1.part.json"]
    beside = [layout.staged_part_name(3), layout.staged_part_name(3, 1), layout.repaired_pack_name(names[1], 1)]
    assert beside == ["r00003.staged.json", "r00003-a1.staged.json", "r99999-p999-a2-r1.safetensors"]
    assert [layout.is_of_rank(name, 3) for name in (*names, *beside)] == [False, False, True, True, True, True, False]
    names += [*beside, layout.repair_name(KEY), layout.TIER]
    for name in [*names, layout.manifest_name(KEY), layout.COMMIT, layout.RETIRED, layout.MARKER]:
        layout.validate_plain_name(name)
    with pytest.raises(InvalidInput):
        layout.catalog_claim(0)


@pytest.mark.parametrize(
    "name", ["", "1-2-3", f"00000001-000000000001-{KEY}x", f"00000001-000000000001-{KEY}\n", "README"]
)
def test_what_is_no_hint(name: str) -> None:
    assert not layout.is_repair(f"repair-{name}.json")
    assert layout.parse_commit_hint(name) is None
    assert layout.parse_catalog_claim(name) is None


# -- verdicts ---------------------------------------------------------------------------------------
REF = ManifestRef(name="manifest-x.json.zst", digest=KEY, bytes=10)
COMMITTED: dict[str, Any] = {
    "verdict": "committed",
    "repository": UUID,
    "epoch": 1,
    "run": "llama",
    "id": 3,
    "key": KEY,
    "step": 7,
    "commit_seq": 2,
    "parent": KEY,
    "fence": 4,
    "manifest": REF,
    "committed_at": NOW,
}
ABORTED: dict[str, Any] = COMMITTED | {
    "verdict": "aborted",
    "commit_seq": None,
    "manifest": None,
    "committed_at": None,
    "reason": "rank 1 fell silent",
}

OBJECTS = [
    (verdict.encode_marker, verdict.decode_marker, Marker(repository=UUID, created_at=NOW)),
    (
        verdict.encode_claim,
        verdict.decode_claim,
        CatalogClaim(repository=UUID, catalog=UUID, epoch=1, location="external"),
    ),
    (verdict.encode_commit, verdict.decode_commit, Commit(**COMMITTED)),
    (verdict.encode_commit, verdict.decode_commit, Commit(**ABORTED)),
    (verdict.encode_commit, verdict.decode_commit, Commit(**COMMITTED, tiers=(TIER,))),
    (verdict.encode_retired, verdict.decode_retired, Retired(repository=UUID, run="l", id=1, key=KEY, retired_at=NOW)),
]
OF_RUNS = OBJECTS[2:]
STAGE = TierMark(tier=TIER, role="stage", repository=UUID, host="node1", created_at=NOW)
REPLICA = TierMark(tier=TIER, role="replica", repository=UUID, created_at=NOW)
REPAIR = Repair(repository=UUID, key=KEY, packs={"r00000-p000.safetensors": "r00000-p000-r1.safetensors"})
OBJECTS += [
    (verdict.encode_tier_mark, verdict.decode_tier_mark, STAGE),
    (verdict.encode_tier_mark, verdict.decode_tier_mark, REPLICA),
    (verdict.encode_repair, verdict.decode_repair, REPAIR),
]


@pytest.mark.parametrize(("encode", "decode", "value"), OBJECTS)
def test_verdicts_round_trip(encode: Any, decode: Any, value: Any) -> None:
    data = encode(value)
    assert decode(data) == value
    assert encode(decode(data)) == data
    assert data.endswith(b"\n")


@pytest.mark.parametrize(("encode", "decode", "value"), OBJECTS)
def test_any_flipped_bit_and_any_cut_is_noticed(encode: Any, decode: Any, value: Any) -> None:
    data = encode(value)
    for i in range(len(data)):
        with pytest.raises(FormatError):
            decode(data[:i])
        with pytest.raises(FormatError):
            decode(data[:i] + bytes([data[i] ^ 4]) + data[i + 1 :])


def sealed(body: bytes) -> bytes:
    return body + b',"self_digest":"' + checksum.hex_digest(body).encode() + b'"}\n'


def test_one_object_is_not_taken_for_another() -> None:
    encoded = [encode(value) for encode, _, value in OBJECTS]
    for i, (_, decode, _) in enumerate(OBJECTS):
        for j, data in enumerate(encoded):
            if OBJECTS[i][0] is not OBJECTS[j][0]:
                with pytest.raises(FormatError):
                    decode(data)


def test_unknown_members_are_ignored_and_newer_versions_refused() -> None:
    body = verdict.encode_marker(OBJECTS[0][2])[:-51]
    assert verdict.decode_marker(sealed(body + b',"colour":"blue"')) == OBJECTS[0][2]
    with pytest.raises(UnsupportedVersion, match="version 2"):
        verdict.decode_marker(sealed(body.replace(b'"version":1', b'"version":2')))


def test_duplicates_are_refused_even_if_sealed() -> None:
    body = verdict.encode_marker(OBJECTS[0][2])[:-51]
    with pytest.raises(FormatError, match="twice"):
        verdict.decode_marker(sealed(body + b',"version":1'))


@pytest.mark.parametrize("body", [b"[1", b"null", b'{"format":5', b"{", b'{"format":"ckptfmt"'])
def test_sealed_nonsense(body: bytes) -> None:
    with pytest.raises(FormatError):
        verdict.decode_commit(sealed(body))


@pytest.mark.parametrize("run", ["a#b", "a@7", "a\n", "\x00"])
@pytest.mark.parametrize(("encode", "decode", "value"), OF_RUNS)
def test_a_verdict_on_a_run_that_cannot_be_is_refused(encode: Any, decode: Any, value: Any, run: str) -> None:
    """Whoever asks for the folder of its run would stumble over it."""
    with pytest.raises(InvalidInput, match="is of no run"):
        encode(msgspec.structs.replace(value, run=run))
    body = msgspec.json.encode(msgspec.structs.replace(value, run=run))[:-1]
    with pytest.raises(FormatError, match="is of no run"):
        decode(sealed(body))


def test_long_objects_are_refused_unread() -> None:
    with pytest.raises(FormatError, match="65536"):
        verdict.decode_commit(b" " * 65537)


@pytest.mark.parametrize(
    "change",
    [
        {"manifest": None},
        {"commit_seq": None},
        {"committed_at": None},
        {"reason": "x"},
        {"key": "x"},
        {"key": KEY + "\n"},
        {"key": KEY.upper()},
        {"repository": "x"},
        {"id": 0},
        {"epoch": 0},
        {"fence": -1},
        {"committed_at": "2025-01-02 03:04:05"},
        {"committed_at": NOW.replace("Z", "+00:00")},
        {"run": ""},
        {"verdict": "maybe"},
        {"step": 2**63},
        {"id": True},
        {"manifest": ManifestRef(name="../x", digest=KEY, bytes=1)},
        {"manifest": ManifestRef(name="x", digest=KEY, bytes=0)},
    ],
)
def test_bad_commits_are_never_written(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        verdict.encode_commit(Commit(**COMMITTED | change))


@pytest.mark.parametrize("change", [{"reason": None}, {"commit_seq": 1}, {"manifest": REF}, {"committed_at": NOW}])
def test_bad_aborts_are_never_written(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        verdict.encode_commit(Commit(**ABORTED | change))


@pytest.mark.parametrize(
    ("value", "data"),
    [
        (
            STAGE,
            b'{"format":"ckptfmt","version":1,"object":"tier","tier":"00000000-0000-0000-0000-000000000002",'
            b'"role":"stage","repository":"00000000-0000-0000-0000-000000000001","host":"node1",'
            b'"created_at":"2025-01-02T03:04:05.000006Z","self_digest":"133e6fc1bcdae3797e03accffe40803b"}\n',
        ),
        (
            REPLICA,
            b'{"format":"ckptfmt","version":1,"object":"tier","tier":"00000000-0000-0000-0000-000000000002",'
            b'"role":"replica","repository":"00000000-0000-0000-0000-000000000001","host":null,'
            b'"created_at":"2025-01-02T03:04:05.000006Z","self_digest":"2e85c881557758a3215e8d79cb9f2b8c"}\n',
        ),
        (
            REPAIR,
            b'{"format":"ckptfmt","version":1,"object":"repair","repository":"00000000-0000-0000-0000-000000000001",'
            b'"key":"0123456789abcdef0123456789abcdef",'
            b'"packs":{"r00000-p000.safetensors":"r00000-p000-r1.safetensors"},"self_digest":"0a3afc65ff96fcd7afd5a897b54ce6b8"}\n',
        ),
        (
            Commit(**COMMITTED, tiers=(TIER,)),
            b'{"format":"ckptfmt","version":1,"object":"commit","verdict":"committed",'
            b'"repository":"00000000-0000-0000-0000-000000000001","epoch":1,"run":"llama","id":3,'
            b'"key":"0123456789abcdef0123456789abcdef","step":7,"commit_seq":2,'
            b'"parent":"0123456789abcdef0123456789abcdef","fence":4,"manifest":{"name":"manifest-x.json.zst",'
            b'"digest":"0123456789abcdef0123456789abcdef","bytes":10},"committed_at":"2025-01-02T03:04:05.000006Z",'
            b'"reason":null,"tiers":["00000000-0000-0000-0000-000000000002"],"self_digest":"9ec43bf5c941b90f45cbf230998cdcb5"}\n',
        ),
    ],
)
def test_golden_bytes_of_tiers(value: Any, data: bytes) -> None:
    """What lies on storage is read for ever."""
    (encode, decode), *_ = [(encode, decode) for encode, decode, kind in OBJECTS if type(kind) is type(value)]
    assert encode(value) == data
    assert decode(data) == value


def test_a_commit_without_tiers_is_what_it_was() -> None:
    data = verdict.encode_commit(Commit(**COMMITTED))
    assert b"tiers" not in data
    assert verdict.decode_commit(data).tiers is msgspec.UNSET
    assert verdict.tiers_of(Commit(**COMMITTED)) == ()
    assert verdict.tiers_of(Commit(**COMMITTED, tiers=(TIER,))) == (TIER,)
    many = tuple(f"{n:08d}{TIER[8:]}" for n in range(65))
    for tiers in ((), ("x",), (TIER, TIER), (TIER, UUID), many):
        with pytest.raises(InvalidInput):
            verdict.encode_commit(Commit(**COMMITTED, tiers=tiers))
    with pytest.raises(InvalidInput):
        verdict.encode_commit(Commit(**ABORTED, tiers=(TIER,)))


@pytest.mark.parametrize(
    "change", [{"host": None}, {"host": ""}, {"role": "durable"}, {"tier": "x"}, {"created_at": ""}]
)
def test_bad_marks_of_tiers_are_never_written(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        verdict.encode_tier_mark(msgspec.structs.replace(STAGE, **change))


@pytest.mark.parametrize(
    "packs",
    [{}, {"a": "a"}, {"a": "b", "b": "c"}, {"a": "c", "b": "c"}, {"a": "../b"}, {"a/b": "c"}, {"a": ""}],
)
def test_bad_repairs_are_never_written(packs: dict[str, str]) -> None:
    with pytest.raises((InvalidInput, FormatError)):
        verdict.encode_repair(msgspec.structs.replace(REPAIR, packs=packs))
    body = msgspec.json.encode(msgspec.structs.replace(REPAIR, packs=packs))[:-1]
    with pytest.raises(FormatError):
        verdict.decode_repair(sealed(body))


def test_timestamps() -> None:
    moment = dt.datetime(2025, 1, 2, 4, 4, 5, 6, tzinfo=dt.timezone(dt.timedelta(hours=1)))
    assert verdict.timestamp(moment) == NOW
    with pytest.raises(InvalidInput, match="time zone"):
        verdict.timestamp(dt.datetime(2025, 1, 2))


def test_structs_survive_a_failed_digest_with_the_right_kind() -> None:
    data = bytearray(verdict.encode_commit(Commit(**COMMITTED)))
    data[20] ^= 1
    with pytest.raises(Corrupt) as caught:
        verdict.decode_commit(bytes(data))
    assert caught.value.kind == "corrupt"
