"""What every backend must do, as a test class to inherit.

    class TestMine(BackendConformance):
        @pytest.fixture
        def backend(self, tmp_path): ...            # empty, ready for writing
        def raw_read(self, backend, key): ...       # the four raw methods go round the backend,
        def raw_write(self, backend, key, data): ...   # so that it can't vouch for itself
        def raw_delete(self, backend, key): ...
        def raw_list(self, backend): ...

Keys live in folders that the suite makes first; a backend without folders ignores that.
"""

from __future__ import annotations

from ckptfmt.ports.backend import Backend
from ckptfmt.testing.backend_creates import CreateConformance
from ckptfmt.testing.backend_reads import HOSTILE_KEYS, ReadConformance
from ckptfmt.testing.backend_writers import WriterConformance

__all__ = ["HOSTILE_KEYS", "BackendConformance"]


class BackendConformance(CreateConformance, WriterConformance, ReadConformance):
    """The whole suite. Inherit, give the fixture ``backend`` and the raw methods."""

    def test_traits_are_told(self, backend: Backend) -> None:
        traits = backend.traits
        assert backend.url.startswith(f"{traits.scheme}://")
        assert traits.durable
        assert traits.alignment >= 1
        assert all(isinstance(name, str) for name in backend.storage_options)

    def test_space_is_a_number_or_unknown(self, backend: Backend) -> None:
        free = backend.space()
        assert free is None or free > 0
