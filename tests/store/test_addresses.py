"""Addresses of stores: no two are one store, and none shows a secret; what object stores list and
processes that are forked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
import pytest

from pulse_rl import Publisher, Subscriber, gc_stream, open_store, verify_stream
from pulse_rl.errors import InputError, StoreError
from tests.support.commands import Pulse
from tests.support.stores import KEYS, s3_store

SECRET = "hunter2hunter2"
W = {"w": np.arange(3000, dtype=np.uint16)}


@pytest.mark.parametrize(
    ("address", "what"),
    [
        ("s3://bucket/exp#1", "'#'"),
        ("s3://bucket/exp?region=a#1", "'#'"),
        ("file:///tmp/exp#1", "'#'"),
        ("file:///tmp/exp?1", "'?'"),
        ("http://host/exp#1", "'#'"),
        ("s3://bucket/a/../exp", "'..'"),
        ("s3://bucket/a/%2E%2e/exp", "'..'"),
        ("http://host/a/../exp", "'..'"),
        ("file:///tmp/a\n", r"'\\n'"),
    ],
)
def test_no_two_addresses_are_one_store(address: str, what: str) -> None:
    with pytest.raises(InputError, match=f"has {what}") as caught:
        open_store(address)
    assert "Write" in caught.value.hint


def test_marks_in_names_are_written_in_percent(tmp_path: Path) -> None:
    for mark, name in (("%23", "a#1"), ("%3F", "a?1")):
        open_store(f"file://{tmp_path}/a{mark}1").put("x", b"1")
        assert (tmp_path / name / "x").exists()
    open_store(tmp_path / "b" / ".." / "c#").put("x", b"1")  # a path is no address
    assert (tmp_path / "c#" / "x").exists()


SECRETS = (
    f"s3://KEY:a/{SECRET}@b/run s3://{SECRET}@b/run s3://b/run?endpoint=http://u:{SECRET}@host:1 "
    f"s3://b/run?endpoint=http%3A%2F%2Fu:{SECRET}%40host:1 s3://b/run?X-Amz-Signature={SECRET} "
    f"hf://buckets/ns/b/run?endpoint=http://u:{SECRET}@host az://c/run?account_name=a&sig={SECRET} "
    f"az://c/run?account_name=a&%73ig={SECRET} abfs://c:{SECRET}@a.dfs.core.windows.net/run "
    f"https://a.blob.core.windows.net/run?sv=2024&sig={SECRET} ftp://host/x?token={SECRET} "
    f"s3:/user:{SECRET}@host hf://user:{SECRET}@ns/name http://u:{SECRET}@host/x"
)


@pytest.mark.parametrize("address", SECRETS.split())
def test_no_secret_of_an_address_is_shown(address: str) -> None:
    with pytest.raises((InputError, StoreError)) as caught:
        open_store(address)
    assert SECRET not in f"{caught.value} {caught.value.hint}"


def test_an_endpoint_is_shown_without_its_user() -> None:
    options = {"retry_config": {"max_retries": 0}, "client_options": {"allow_http": True}}
    store = open_store(
        "s3://bucket/run", endpoint=f"http://user:{SECRET}@127.0.0.1:1", **KEYS, **options
    )
    with pytest.raises(StoreError) as caught:
        store.head("x")
    assert SECRET not in f"{caught.value} {caught.value.hint} {store!r}"
    assert "…@127.0.0.1:1" in str(caught.value)
    with pytest.raises(InputError, match="has no user") as refused:
        open_store("hf://ns/name", endpoint=f"http://user:{SECRET}@host")
    assert SECRET not in str(refused.value)
    open_store("s3://bucket/run?skip_signature=true&region=us-east-1")  # no secret


@pytest.mark.slow
@pytest.mark.parametrize("marker", ["", "s/", "s/versions/", "s/payloads/", "s/links/"])
def test_empty_objects_that_stand_for_folders_are_passed_over(
    s3: str, pulse: Pulse, monkeypatch: pytest.MonkeyPatch, marker: str
) -> None:
    prefix = "markers-" + marker.replace("/", "-")
    store = s3_store(s3, prefix)
    for stream in ("s", "s-2"):
        Publisher(store, stream=stream).publish(W)
    put = Request(f"{s3}/bucket/{prefix}/{marker}", b"", method="PUT")
    urlopen(put).close()
    with Publisher(store, stream="s") as publisher:
        assert publisher.publish(W).version == 1
    assert all(report.ok for report in verify_stream(store, "s"))
    gc_stream(store, "s", keep=1)
    assert Subscriber(store, stream="s").sync() is not None
    address = f"s3://bucket/{prefix}?endpoint={s3}&region=us-east-1"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    listed = pulse.json("list", address)
    assert {each["stream"] for each in listed["streams"]} == {"s", "s-2"}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_an_object_store_that_was_used_is_refused_after_a_fork(s3: str) -> None:
    program = f"""
import os, sys
from tests.support.stores import s3_store
from pulse_rl.errors import InputError
store = s3_store({s3!r}, "forked")
store.put("x", b"1")
for make in (lambda: store, lambda: s3_store({s3!r}, "another")):
    if not (child := os.fork()):
        try:
            make().get("x")
        except InputError as error:
            os._exit(7 if "spawn" in error.hint else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print(store.get("x"))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.stdout.strip() == b"b'1'", done.stderr
