"""Axolotl's plugin, over Axolotl where it is installed, else over a stand-in for its base class."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pulse_rl.errors import InputError
from tests.support.framework_stubs import integration

pytestmark = pytest.mark.slow  # transformers takes seconds to import


def plugin() -> Any:
    return integration("axolotl").PulsePlugin()


def test_the_callback_has_the_arguments_of_the_config(tmp_path: Path) -> None:
    registered = plugin()
    written = {"pulse": {"store": str(tmp_path), "stream": "policy", "every": 2, "keep": 8}}
    registered.register(written)
    folder, name = registered.get_input_args().rsplit(".", 1)
    checked = getattr(importlib.import_module(folder), name)(**written)
    (callback,) = registered.add_callbacks_pre_trainer(checked, model=None)
    assert repr(callback).startswith("<PulseCallback of <Publisher of 'policy'")


@pytest.mark.parametrize("given", [None, {}, {"store": "/s"}])
def test_a_config_without_a_store_or_a_stream_is_refused(given: Any) -> None:
    with pytest.raises(InputError, match="no store and stream"):
        plugin().register({"pulse": given})


def test_an_unknown_argument_is_refused(tmp_path: Path) -> None:
    config = SimpleNamespace(pulse={"store": str(tmp_path), "stream": "policy", "evry": 2})
    with pytest.raises(InputError, match="evry"):
        plugin().add_callbacks_pre_trainer(config, model=None)
