"""A catalog that went back in time, as the store shows it."""

from __future__ import annotations

from protocol_model import vector as v

PUT_BACK = 2


def behind(s: bytes | bytearray) -> bool:
    """Whether storage shows what the catalog does not know (``CatalogBehind``)."""
    return s[v.ROLLED] == PUT_BACK and any(contradicts(s, g) for g in range(v.GENERATIONS))


def contradicts(s: bytes | bytearray, g: int) -> bool:
    """Storage holds a verdict or a tombstone that this row of the catalog cannot have led to.

    A committed verdict of what is not committed; any verdict where there is no row (its id is above the catalog's
    highest); an aborted verdict of what is committed or still open; a tombstone of what is committed.
    """
    state, folder = s[v.ROWS[g] + v.STATE], v.FOLDERS[g]
    found = s[folder + v.COMMIT]
    if v.proves(found) and s[v.ROWS[g] + v.SEQ] == 0:
        return not numbered_twice(s, g)
    if state == v.COMMITTED:
        return found == v.ABORTED_VERDICT or s[folder + v.STONE] != 0
    if state in v.OPEN:
        return found == v.ABORTED_VERDICT
    return found != 0 and state == v.NO_ROW


def numbered_twice(s: bytes | bytearray, g: int) -> bool:
    """Storage proves this generation under a number that the catalog has given to another one since.

    It cannot be restored into the catalog; it stays readable by proof, and is never deleted.
    """
    found = s[v.FOLDERS[g] + v.COMMIT]
    if not v.proves(found):
        return False
    number = v.verdict_facts(found)[:2]
    return any(other != g and (s[row + v.SEQ], s[row + v.ROW_EPOCH]) == number for other, row in enumerate(v.ROWS))
