"""Tests for your own implementations of this library's interfaces: so far, of `Store`.

::

    from uuid import uuid4

    from my_store import MyStore
    from pulse_rl.testing import StoreConformance


    class TestMyStore(StoreConformance):
        def new_store(self):
            return MyStore(f"bucket/{uuid4()}")

        def peer_of(self, store):
            return MyStore(store.address)

In a file that pytest collects, this is the complete test. A fixture with ``autouse=True`` in the class can store, for
example, ``tmp_path`` on ``self`` for ``new_store``. pytest is not required: with ``unittest.TestCase`` as a second
base, the same class runs under unittest.
"""

from __future__ import annotations

from .expect import Guarantee
from .store import StoreConformance

__all__ = ["Guarantee", "StoreConformance"]
