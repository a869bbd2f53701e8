"""A second reader of format version 1, from spec/format-v1.md alone: standard library, zstandard, xxhash, numpy."""

import base64
import collections
import datetime as dt
import decimal
import fractions
import hashlib
import json
import math
import pathlib
import re
import struct
import unicodedata
import uuid
import zoneinfo

import numpy as np
import xxhash
import zstandard

NUMPY = {f"{k}{b}": f"<{k[0]}{b // 8}" for k in ("float", "int", "uint") for b in (8, 16, 32, 64)}
NUMPY |= {"bool": "?", "complex64": "<c8", "complex128": "<c16"}
# Types that plain numpy lacks are handed out as unsigned integers or, complex32, pairs of halves.
NUMPY |= {"bfloat16": "<u2", "bits16": "<u2", "complex32": [("re", "<f2"), ("im", "<f2")]}
ONE_BYTE = [f"{s}int{b}" for s in ("", "u") for b in range(1, 8)] + ["bits8", "bits1x8", "bits2x4", "bits4x2"]
ONE_BYTE += ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"]
NUMPY |= dict.fromkeys(ONE_BYTE, "u1")
FACTORIES = {c.__name__: c for c in (int, float, complex, bool, str, bytes, list, dict, set, frozenset, tuple)}
FILLED = {"dict": dict, "odict": collections.OrderedDict, "counter": collections.Counter}
GATHERED = {"tuple": tuple, "set": set, "frozenset": frozenset}
CALLED = {"slice": slice, "range": range, "complex": complex, "fraction": fractions.Fraction, "uuid": uuid.UUID}
CALLED |= {"timedelta": dt.timedelta, "decimal": decimal.Decimal, "zoneinfo": zoneinfo.ZoneInfo}
CALLED |= {"numpy.dtype": np.dtype}
digest = xxhash.xxh3_128_hexdigest


def once(pairs):
    assert len(dict(pairs)) == len(pairs), "a member stands twice"
    return dict(pairs)


def check(data, nbytes, expected):
    assert (len(data), digest(data)) == (nbytes, expected), "bytes differ from their digest"
    return data


def verdict(path):
    data = path.read_bytes()
    seal = re.fullmatch(rb',"self_digest":"([0-9a-f]{32})"\}\n', data[-51:])
    assert len(data) <= 65536 and check(data[:-51], len(data) - 51, seal[1].decode())  # noqa: PT018
    value = json.loads(data, object_pairs_hook=once)
    assert (value["format"], value["version"]) == ("ckptfmt", 1)
    return value


def read_latest(folder, run, rank=0):
    """Return (commit record, state, {name: array}) of the latest generation that is proven; every digest is checked."""
    plain = unicodedata.normalize("NFKD", run).encode("ascii", "ignore").decode().lower()
    slug = re.sub("[^a-z0-9]+", "-", plain).strip("-")[:40].strip("-") or "run"
    base = pathlib.Path(folder, "runs", f"{slug}-{hashlib.sha256(run.encode()).hexdigest()[:10]}")
    repository = verdict(pathlib.Path(folder, "ckptfmt.json"))["repository"]
    hints = [re.fullmatch(r"(\d{8,})-(\d{12,})-([0-9a-f]{32})", p.name) for p in (base / "commits").iterdir()]
    for epoch, seq, key in sorted(((int(h[1]), int(h[2]), h[3]) for h in hints if h), reverse=True):
        if (base / key / "RETIRED.json").exists():
            continue
        commit = verdict(base / key / "COMMIT.json")
        facts = [commit[name] for name in ("verdict", "repository", "epoch", "commit_seq", "key")]
        if facts == ["committed", repository, epoch, seq, key]:
            stored, ref = (base / key / commit["manifest"]["name"]).read_bytes(), commit["manifest"]
            text = zstandard.ZstdDecompressor().decompress(check(stored, ref["bytes"], ref["digest"]))
            manifest = json.loads(text, object_pairs_hook=once)
            assert (manifest["version"], manifest["read_features"], manifest["digest_algorithm"]) == (1, [], "xxh3-128")
            files = [base / (pack["generation"] or key) / pack["name"] for pack in manifest["packs"]]
            for file, pack in zip(files, manifest["packs"], strict=True):
                assert file.stat().st_size == pack["nbytes"]
                check(file.read_bytes()[: pack["header_bytes"]], pack["header_bytes"], pack["header_digest"])
            arrays = read_tensors(manifest, files, rank)
            slots = manifest["trees"]["per_rank"].get(str(rank), {})
            return commit, rebuild(manifest["trees"]["common"], arrays, slots), arrays
    raise LookupError("nothing is proven" if hints else "the run never committed")


def read_tensors(manifest, files, rank):
    tensors, boxes, chunk, arrays = manifest["tensors"], manifest["boxes"], manifest["chunk_bytes"], {}
    for i, name in enumerate(tensors["name"]):
        if tensors["rank"][i] not in (-1, rank):
            continue
        array = arrays[name] = np.zeros(tensors["shape"][i], NUMPY[tensors["dtype"][i]])
        covered = 0
        for j in (j for j, row in enumerate(boxes["tensor"]) if row == i):
            start, size, offset = boxes["start"][j], boxes["size"][j], boxes["offset"][j]
            nbytes = math.prod(size) * array.itemsize
            covered += nbytes
            with open(files[boxes["pack"][j]], "rb") as file:
                file.seek(offset)
                data = file.read(nbytes)
            parts = [digest(data[k : k + chunk]) for k in range(0, nbytes, chunk)]
            assert (len(data), "".join(parts)) == (nbytes, boxes["digests"][j]), name
            place = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
            array[place] = np.frombuffer(data, array.dtype).reshape(size)
        assert covered == array.nbytes, name
    return arrays | {other: arrays[name] for other, name in manifest["aliases"].items() if name in arrays}


def rebuild(node, arrays, slots):
    def go(n):
        return rebuild(n, arrays, slots)

    def pairs(p, into):
        for k, v in p:
            into[go(k)] = go(v)
        return into

    if not isinstance(node, dict):
        return list(map(go, node)) if isinstance(node, list) else node
    ((tag, p),) = node.items()
    if tag in ("tensor", "array", "stored_bytes", "stored_bytearray"):
        array = arrays[p if isinstance(p, str) else p[0]]
        return array if tag in ("tensor", "array") else (bytes if tag == "stored_bytes" else bytearray)(array.tobytes())
    if tag in FILLED:
        return pairs(p, FILLED[tag]())
    if tag in GATHERED:
        return GATHERED[tag](map(go, p))
    if tag in CALLED:
        return CALLED[tag](*map(go, p if isinstance(p, list) else [p]))
    if tag == "state_dict":
        value = pairs(p[0], collections.OrderedDict())
        value._metadata = go(p[1])
        return value
    rest = {
        "defaultdict": lambda: pairs(p[1], collections.defaultdict(FACTORIES.get(p[0]))),
        "deque": lambda: collections.deque(map(go, p[0]), p[1]),
        "int": lambda: int(p, 16),
        "float": lambda: struct.unpack("<d", bytes.fromhex(p[4:])[::-1])[0] if p[3:4] == ":" else float(p),
        "str": lambda: base64.b64decode(p).decode("utf-8", "surrogatepass"),
        "bytes": lambda: base64.b64decode(p),
        "bytearray": lambda: bytearray(base64.b64decode(p)),
        "per_rank": lambda: go(slots[p]),
        "path": lambda: getattr(pathlib, p[0])(go(p[1])),
        "datetime": lambda: dt.datetime.fromisoformat(p[0]).replace(fold=p[1], tzinfo=go(p[2])),
        "time": lambda: dt.time.fromisoformat(p[0]).replace(fold=p[1], tzinfo=go(p[2])),
        "date": lambda: dt.date.fromisoformat(p),
        "timezone": lambda: dt.timezone(dt.timedelta(microseconds=p[0]), *([go(p[1])] if p[1] is not None else [])),
        "numpy.scalar": lambda: np.frombuffer(bytes.fromhex(p[1]), NUMPY[p[0]])[0],
        "stateful": lambda: go(p[3]),
    }
    return rest[tag]() if tag in rest else node  # registered and library types: as they stand, tagged
