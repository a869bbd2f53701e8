"""XML that another machine sent."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree


class _WithoutEntities(ElementTree.TreeBuilder):
    """A few bytes of entities fill any memory, so nobody may define any."""

    def doctype(self, name: str, public: str | None, system: str | None) -> None:
        raise ValueError("it has a DTD")


def parsed(body: bytes) -> ElementTree.Element:
    """The root, with all tags without their namespaces. ``ValueError`` where it is no XML, or not whole."""
    try:
        root = ElementTree.fromstring(body.strip(), ElementTree.XMLParser(target=_WithoutEntities()))
    except ElementTree.ParseError as error:
        raise ValueError(str(error)) from error
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root
