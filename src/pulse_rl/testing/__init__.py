"""Tests to run against your own implementation of an interface of this library: so far, of `Store`.

::

    from uuid import uuid4

    from my_store import MyStore
    from pulse_rl.testing import StoreConformance


    class TestMyStore(StoreConformance):
        def new_store(self):
            return MyStore(f"bucket/{uuid4()}")

        def peer_of(self, store):
            return MyStore(store.address)

In a file that pytest collects, this is the whole test. A fixture with ``autouse=True`` in the class can keep, say,
``tmp_path`` on ``self`` for ``new_store``. Nothing here needs pytest: with ``unittest.TestCase`` as a second base, the
same class runs under unittest.
"""

from __future__ import annotations

from .expect import Guarantee
from .store import StoreConformance

__all__ = ["Guarantee", "StoreConformance"]
