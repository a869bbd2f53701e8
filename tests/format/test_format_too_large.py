"""What no reader would read is not written: the save fails, instead of a restore."""

from __future__ import annotations

import manifest_fixtures as fix
import pytest

from ckptfmt.errors import FormatError
from ckptfmt.format import manifest, part
from ckptfmt.format.manifest import decode_manifest, encode_sound, validate
from ckptfmt.format.trees import Trees


@pytest.mark.parametrize("limit", ["JSON_BYTES_MAX", "MANIFEST_BYTES_MAX"])
def test_a_manifest_that_is_too_large_is_refused_by_its_writer(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = validate(fix.manifest())
    monkeypatch.setattr(manifest, limit, 100)
    with pytest.raises(FormatError, match=f"{fix.KEY} is too large to be read again: .* boxes of 4 tensors"):
        encode_sound(sound)


def test_a_state_that_would_look_like_a_bomb_is_refused_by_its_writer() -> None:
    names = [[name, {"tensor": name}] for name in fix.manifest().tensors.name]
    tree = {"dict": [*names, ["zeros", [0] * (9 << 20)]]}
    sound = validate(fix.manifest(trees=Trees(common=tree)))
    with pytest.raises(FormatError, match="put long lists into tensors"):
        encode_sound(sound)


def test_a_large_state_is_read_again() -> None:
    names = [[name, {"tensor": name}] for name in fix.manifest().tensors.name]
    tree = {"dict": [*names, ["numbers", list(range(3 << 20))]]}
    stored = encode_sound(validate(fix.manifest(trees=Trees(common=tree))))
    assert len(decode_manifest(stored).trees.common["dict"][-1][1]) == 3 << 20


def test_a_part_that_is_too_large_is_refused_by_its_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    value = fix.part()
    part.encode_part(value)
    monkeypatch.setattr(part, "PART_BYTES_MAX", 100)
    with pytest.raises(FormatError, match="at most 100 are read"):
        part.encode_part(value)
