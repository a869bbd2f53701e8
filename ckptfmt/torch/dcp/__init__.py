"""Generations as a storage of ``torch.distributed.checkpoint``: pass ``GenerationWriter`` to ``dcp.save`` and
``dcp.async_save``, ``GenerationReader`` to ``dcp.load``.

The plan is DCP's: its planner says which rank writes which box and which value. Packs, digests, manifest and commit are
those of every generation, so what DCP saved is listed, verified, loaded and restored like all others, and what a
``Checkpointer`` saved is loaded by DCP. Values that are no tensors are stored as the typed state tree, without pickle.
"""

from ckptfmt.torch.dcp.reader import GenerationReader
from ckptfmt.torch.dcp.writer import GenerationWriter

__all__ = ["GenerationReader", "GenerationWriter"]
