"""Addresses of stores: no two are one store, and none shows a secret; what object stores list and
processes that are forked."""

from __future__ import annotations

import subprocess
import sys
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
        ("file:///tmp/exp#1", "'#'"),
        ("file:///tmp/exp?1", "'?'"),
        ("s3://bucket/a/../exp", "'..'"),
        ("s3://bucket/a/%2E%2e/exp", "'..'"),
        ("file:///tmp/a\n", r"'\\n'"),
    ],
)
def test_no_two_addresses_are_one_store(address: str, what: str) -> None:
    with pytest.raises(InputError, match=f"has {what}"):
        open_store(address)


SECRETS = (
    f"s3://KEY:a/{SECRET}@b/run s3://{SECRET}@b/run s3://b/run?endpoint=http://u:{SECRET}@host:1 "
    f"s3://b/run?endpoint=http%3A%2F%2Fu:{SECRET}%40host:1 s3://b/run?X-Amz-Signature={SECRET} "
    f"hf://buckets/ns/b/run?endpoint=http://u:{SECRET}@host az://c/run?account_name=a&sig={SECRET} "
    f"az://c/run?account_name=a&%73ig={SECRET} abfs://c:{SECRET}@a.dfs.core.windows.net/run "
    f"https://a.blob.core.windows.net/run?sv=2024&sig={SECRET} ftp://host/x?token={SECRET} "
    f"s3:/user:{SECRET}@host hf://user:{SECRET}@ns/name http://u:{SECRET}@host/x "
    f"http:/me:{SECRET}@host file://me:{SECRET}@host/x ftp://me:1/{SECRET}@host"
)
HOSTS = ("host:x", "host/?a", "ho st", "[::1", "host", "/host:1", "host/#a")


@pytest.mark.parametrize(
    "address",
    SECRETS.split() + [f"http://me:{w}{SECRET}@{host}" for host in HOSTS for w in ("", "1/")],
)
def test_no_secret_of_an_address_is_shown(address: str) -> None:
    with pytest.raises((InputError, StoreError)) as caught:
        open_store(address)
    assert SECRET not in f"{caught.value} {caught.value.hint}"


def test_an_endpoint_is_shown_without_its_user() -> None:
    address = f"http://user:{SECRET}@127.0.0.1:1"
    store = open_store("s3://b/run", endpoint=address, retry_config={"max_retries": 0}, **KEYS)
    with pytest.raises(StoreError) as caught:
        store.head("x")
    assert SECRET not in f"{caught.value} {caught.value.hint} {store!r}"
    with pytest.raises(InputError, match="has no user"):
        open_store("hf://ns/name", endpoint=f"http://user:{SECRET}@host")
    open_store("s3://bucket/run?skip_signature=true&region=us-east-1")  # no secret


@pytest.mark.slow
@pytest.mark.parametrize(
    "marker",
    [
        *("", "s/", "s/versions/", "s/payloads/", "s/links/"),
        *("/x", "s//x", "s/versions//x", "s/payloads//x", "s/links//x", "s-2//x"),
    ],
)
def test_markers_of_folders_and_keys_with_empty_parts_are_passed_over(
    s3: str, pulse: Pulse, monkeypatch: pytest.MonkeyPatch, marker: str
) -> None:
    prefix = "markers-" + marker.replace("/", "-")
    store = s3_store(s3, prefix)
    for stream in ("s", "s-2"):
        Publisher(store, stream=stream).publish(W)
    urlopen(Request(f"{s3}/bucket/{prefix}/{marker}", b"", method="PUT")).close()
    with Publisher(store, stream="s") as publisher:
        assert publisher.publish(W).version == 1
    assert all(report.ok for report in verify_stream(store, "s"))
    gc_stream(store, "s", keep=1)
    assert Subscriber(store, stream="s").sync() is not None
    address = f"s3://bucket/{prefix}?endpoint={s3}&region=us-east-1"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    assert {each["stream"] for each in pulse.json("list", address)["streams"]} == {"s", "s-2"}


@pytest.mark.slow
def test_an_object_store_that_was_used_is_refused_after_a_fork(s3: str) -> None:
    program = f"""
import os
from tests.support.stores import s3_store
s3_store({s3!r}, "forked").put("x", b"1")
if os.fork():
    os.wait()
else:
    s3_store({s3!r}, "forked").get("x")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert b"spawn" in done.stderr
