"""The tables of the spec and the code say the same."""

from __future__ import annotations

import pathlib
import re

from ckptfmt.format import dtypes, tree, tree_decoder, tree_scalars
from ckptfmt.format.manifest import Manifest
from ckptfmt.format.part import Part
from ckptfmt.format.tables import BoxTable, ClaimTable, PackRow, TensorTable
from ckptfmt.format.verdict import CatalogClaim, Commit, Marker, Repair, Retired, TierMark

SPEC = (pathlib.Path(__file__).parents[2] / "spec" / "format-v1.md").read_text()


def table(mark: str) -> list[list[str]]:
    text = SPEC.split(f"<!-- {mark} -->")[1].split("<!-- end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.strip().splitlines()]
    return rows[2:]


def test_element_types() -> None:
    rows = [[cell.strip("`") for cell in row] for row in table("dtypes")]
    expected = [
        [d.name, str(d.itemsize), d.stored, ", ".join(map(str, d.stored_suffix))] for d in dtypes.DTYPES.values()
    ]
    assert rows == expected


def test_refused_types() -> None:
    assert {row[0].strip("`"): row[1] for row in table("refused")} == dict(dtypes.REFUSED)


def test_tags() -> None:
    listed = {tag for row in table("tags") for tag in re.findall("`([^`]+)`", row[0])}
    known = {*tree_scalars.DECODERS, *tree_decoder.REBUILDERS, *tree.REFERENCE_TAGS, "per_rank"}
    library = {tag for tag in listed if tag.startswith("torch.")}
    assert listed - library == known
    assert library == {f"torch.{kind}" for kind in ("Size", "dtype", "device", "memory_format", "layout")}


def test_members() -> None:
    words = set(re.findall("`([a-z_]+)`", SPEC)) | set(re.findall(r"[{, ]([a-z_]+)(?=[,}])", SPEC))
    verdicts = (Marker, CatalogClaim, Commit, Retired, TierMark, Repair)
    for struct in (Manifest, Part, TensorTable, BoxTable, ClaimTable, PackRow, *verdicts):
        missing = set(struct.__struct_fields__) - words
        assert not missing, f"{struct.__name__}: the spec lacks {missing}"


def test_numbers() -> None:
    from ckptfmt.format import boxes, layout, pack, tables, verdict
    from ckptfmt.format.verdict import _SEAL_BYTES

    for number in (
        f"at most {verdict.BYTES_MAX:,} bytes",
        f"{_SEAL_BYTES} bytes in all",
        f"multiple of {pack.ALIGNMENT}",
        f"{layout.KEY_LENGTH_MAX} in all",
        f"at most {layout.COMPONENT_LENGTH_MAX} characters a component",
        f"more than {boxes.IRREGULAR_MAX} boxes",
        f"at most {tree.DEPTH_MAX} deep",
        f"over {tree.INLINE_BYTES_MAX} bytes",
        f"more than {tables.DIMENSIONS_MAX} dimensions",
    ):
        assert number in SPEC, number
