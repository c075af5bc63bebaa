"""Ways to misconfigure an object store: each ends soon, in words that name the remedy; and the ways
that work."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulse_rl import Bits, Publisher, Subscriber, gc_stream, open_store
from pulse_rl.errors import InputError, StoreError, StoreFull, StoreUnavailable
from tests.support.commands import Pulse
from tests.support.proxy import Proxy, Rule, proxied
from tests.support.stores import KEYS, names, s3_store

pytestmark = pytest.mark.slow
SOON = 15.0


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home of its own, without any setting of a cloud; the folder of the AWS command line."""
    for name in os.environ:
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".aws").mkdir()
    return tmp_path / ".aws"


@pytest.fixture
def proxy(s3: str) -> Iterator[Proxy]:
    with proxied(s3) as made:
        yield made


def says(proxy: Proxy, status: int, code: str, *, method: str = ".*", path: str = "") -> None:
    """Such requests are refused with this code of S3, all others forwarded."""
    proxy.heal()
    proxy.add(Rule("answer", method, path, times=1_000_000, status=status, code=code))


def refused(
    match: str,
    hint: str,
    address: str = "s3://bucket/x",
    *,
    error: type[StoreError] = StoreError,
    **options: Any,
) -> None:
    """The first look of a worker and the first version of a trainer are refused, soon, and in a
    line; side by side, as some wait for an answer."""
    calls = (
        lambda: Subscriber(open_store(address, **options), stream="s").sync(),
        lambda: Publisher(open_store(address, **options), stream="s").publish(
            {"w": np.zeros(4, np.uint16)}
        ),
    )

    def refuse(call: Callable[[], object]) -> None:
        began = time.monotonic()
        with pytest.raises(error, match=match) as caught:
            call()
        assert time.monotonic() - began < SOON
        assert "\n" not in str(caught.value)
        assert hint in caught.value.hint
        assert caught.value.retryable == issubclass(error, StoreUnavailable)

    with ThreadPoolExecutor() as pool:
        list(pool.map(refuse, calls))


def side_by_side(*cases: dict[str, Any]) -> None:
    """Refusals of which each waits."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda case: refused(**case), cases))


def test_a_bucket_that_does_not_exist(s3: str) -> None:
    refused("no bucket 'nowhere'", "Create it", "s3://nowhere/x", endpoint=s3, **KEYS)


def test_no_credentials(s3: str) -> None:
    cases: tuple[dict[str, Any], ...] = (
        {"match": "AWS_ACCESS_KEY_ID.*~/.aws", "hint": "AWS_PROFILE", "endpoint": s3},
        {"match": "GOOGLE_APPLICATION", "hint": "gcloud auth", "address": "gs://bucket/x"},
        {
            "match": "AZURE_",
            "hint": "AZURE_STORAGE_ACCOUNT_KEY",
            "address": "az://bucket/x",
            "account_name": "a",
        },
    )
    side_by_side(*({**case, "match": f"no credentials.*{case['match']}"} for case in cases))


def test_no_account_and_no_bucket() -> None:
    refused("no storage account", "account_name", "az://container/x")
    refused("not the address of a bucket", "BUCKET", "s3:///x")


def test_a_profile_that_does_not_exist(
    no_settings: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (no_settings / "credentials").write_text(
        "[mine]\naws_access_key_id = a\naws_secret_access_key = b\n"
    )
    refused("no AWS profile 'yours'", "mine", f"s3://bucket/x?endpoint={s3}&profile=yours")
    monkeypatch.setenv("AWS_PROFILE", "theirs")
    refused("no AWS profile 'theirs'", "mine", f"s3://bucket/x?endpoint={s3}")


def test_a_profile_without_keys(no_settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (no_settings / "config").write_text("[profile sso]\nsso_session = corp\n")
    monkeypatch.setitem(sys.modules, "boto3", None)
    refused("SSO", "aws configure export-credentials --profile sso", "s3://bucket/x?profile=sso")


def test_wrong_keys_an_old_token_and_a_wrong_clock(proxy: Proxy) -> None:
    for status, code, match, hint in (
        (403, "InvalidAccessKeyId", "access key", "Check the key"),
        (403, "SignatureDoesNotMatch", "secret key", "AWS_SECRET_ACCESS_KEY"),
        (400, "ExpiredToken", "have expired", "Renew"),
        (403, "RequestTimeTooSkewed", "clock", "Set the clock"),
    ):
        says(proxy, status, code)
        refused(match, hint, endpoint=proxy.endpoint, **KEYS)


def test_another_region(proxy: Proxy) -> None:
    for status, code in ((301, "PermanentRedirect"), (400, "AuthorizationHeaderMalformed")):
        says(proxy, status, code)
        refused("another region", "region=", endpoint=proxy.endpoint, **KEYS)


def test_a_port_at_which_nothing_listens_and_one_that_is_silent() -> None:
    with socket.socket() as silent, socket.socket() as taken:
        for each in (silent, taken):
            each.bind(("127.0.0.1", 0))
        silent.listen(20)
        where, nowhere = (f"http://127.0.0.1:{each.getsockname()[1]}" for each in (silent, taken))
        away: Any = {"error": StoreUnavailable, **KEYS}
        cases = (
            {"endpoint": nowhere, "match": "nothing answers at", "hint": "running"},
            {"endpoint": where, "match": "does not answer in time", "hint": "port"},
            {"endpoint": "http://no-host.invalid", "match": "host of", "hint": "name"},
        )
        side_by_side(*(case | away for case in cases))


def test_https_to_a_server_that_speaks_http(s3: str) -> None:
    endpoint = s3.replace("http", "https", 1)
    refused("does not speak https", "http://", endpoint=endpoint, **KEYS)


def test_a_server_that_is_no_object_store(proxy: Proxy) -> None:
    says(proxy, 405, "MethodNotAllowed")
    refused("no such object store", "console", endpoint=proxy.endpoint, **KEYS)


def test_a_setting_that_there_is_not(s3: str) -> None:
    refused("endpiont", "?endpoint=", f"s3://bucket/x?endpiont={s3}", **KEYS)
    for secret in ("secret_access_key", "account_key", "sas_token"):
        with pytest.raises(InputError, match=secret) as caught:
            open_store(f"s3://bucket/x?{secret}=hidden")
        assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("method", "path", "right"),
    [
        ("PUT", "", "s3:PutObject"),
        ("GET|HEAD", "payloads/|versions/0", "s3:GetObject"),
        ("GET", "list-type", "ListBucket"),
    ],
)
def test_a_policy_that_forbids_a_call(proxy: Proxy, method: str, path: str, right: str) -> None:
    options: Any = {"endpoint": proxy.endpoint, **KEYS}
    place = f"s3://bucket/policy-{right.rpartition(':')[2]}"
    with Publisher(open_store(place, **options), stream="s") as publisher:
        publisher.publish({"w": np.arange(9, dtype=np.uint16)})
    says(proxy, 403, "AccessDenied", method=method, path=path)
    state = {"w": np.arange(9, dtype=np.uint16)}

    def use() -> None:
        Subscriber(open_store(place, **options), stream="s").sync()
        Publisher(open_store(place, **options), stream="s").publish(state)

    with pytest.raises(StoreError, match="not allowed to") as caught:
        use()
    assert right in caught.value.hint
    assert not caught.value.retryable


def test_a_policy_without_delete_keeps_everything_but_gc(proxy: Proxy) -> None:
    store = open_store("s3://bucket/no-delete", endpoint=proxy.endpoint, **KEYS)
    says(proxy, 403, "AccessDenied", method="DELETE")
    proxy.add(Rule("answer", "POST", r"\?delete", times=1_000_000))
    weights = np.arange(2000, dtype=np.uint16)
    with Publisher(store, stream="s", anchor_ratio=0.0) as publisher:
        for step in range(3):
            publisher.publish({"w": Bits(weights ^ (np.arange(2000) == step), "BF16")})
    assert Subscriber(store, stream="s").sync() is not None
    with pytest.raises(StoreError, match="not allowed to delete") as caught:
        gc_stream(store, "s", keep=1)
    assert "s3:DeleteObject" in caught.value.hint


def test_the_command_line_ends_where_waiting_does_not_help(
    pulse: Pulse, tmp_path: Path, s3: str
) -> None:
    store = f"s3://nowhere/x?endpoint={s3}&region=us-east-1&skip_signature=true"
    began = time.monotonic()
    pulse.refused(
        "follow",
        store,
        "--stream",
        "s",
        "--out",
        tmp_path / "out",
        kind="store",
        match="no bucket 'nowhere'",
    )
    pulse.refused("list", store, kind="store", match="no bucket 'nowhere'")
    assert time.monotonic() - began < SOON


def test_an_address_or_a_profile_is_all_that_is_needed(
    no_settings: Path, s3: str, pulse: Pulse
) -> None:
    keys = "aws_access_key_id = test\naws_secret_access_key = test\n"
    (no_settings / "credentials").write_text(f"[minio]\n{keys}")
    (no_settings / "config").write_text(
        f"[profile minio]\nregion = us-east-1\nendpoint_url = {s3}\n"
    )
    open_store("s3://bucket/easy?profile=minio").put("s/a", b"x")
    assert open_store("s3://bucket/easy", profile="minio").get("s/a") == b"x"
    (no_settings / "credentials").write_text(f"[default]\n{keys}")
    assert names(open_store(f"s3://bucket/easy?endpoint={s3}&region=us-east-1"), "") == ["s/a"]
    assert pulse.json("list", f"s3://bucket/easy?endpoint={s3}&region=us-east-1")["streams"] == []
    assert "profile" not in repr(open_store(f"s3://bucket/easy?endpoint={s3}", **KEYS))


def test_a_profile_with_a_process_is_asked_through_boto3(
    no_settings: Path, s3: str, tmp_path: Path
) -> None:
    pytest.importorskip("boto3")
    script = tmp_path / "keys.py"
    script.write_text('print(\'{"Version": 1, "AccessKeyId": "a", "SecretAccessKey": "b"}\')')
    (no_settings / "config").write_text(
        f"[profile p]\nregion = us-east-1\ncredential_process = {sys.executable} {script}\n"
    )
    store = open_store(f"s3://bucket/process?endpoint={s3}&profile=p")
    store.put("a", b"x")
    assert store.get("a") == b"x"


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId", "InvalidToken"])
def test_keys_that_were_replaced_in_the_profile_are_found(
    no_settings: Path, proxy: Proxy, code: str
) -> None:
    """Rotation writes new keys and then deletes the old ones; it ended the processes that had
    these."""

    def write(key: str) -> None:
        lines = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\n"
        (no_settings / "credentials").write_text(lines)

    write("old")
    store = open_store(f"s3://bucket/keys?endpoint={proxy.endpoint}&region=us-east-1")
    store.put("a", b"x")
    proxy.add(Rule("answer", times=1, code=code))
    with pytest.raises(StoreError, match=r"key|expired|valid"):
        store.get("a")
    write("new")
    proxy.add(Rule("answer", times=1, code=code))
    assert store.get("a") == b"x"


def test_a_long_way_is_taken_by_few_requests_and_many_connections(proxy: Proxy) -> None:
    """docs/evidence.md: a small object is stored at once, a long range is read in pieces, side by
    side."""
    store, data = s3_store(proxy.endpoint, "long"), np.random.default_rng(0).bytes((12 << 20) + 5)
    store.put("small", [data[:7], memoryview(data)[7:1000]])
    assert store.get("small") == data[:1000]
    assert [method for method, *_ in proxy.requests] == ["PUT", "GET"]
    store.put("a", [data[: 5 << 20], data[5 << 20 :]])
    proxy.heal()
    assert store.get("a", 5, len(data)) == data[5:]
    assert [method for method, *_ in proxy.requests] == ["GET"] * 3
    with pytest.raises(StoreError):
        store.get("a", 6, len(data) + 1)


@pytest.mark.parametrize(
    ("status", "code", "error", "words"),
    [
        (403, "QuotaExceeded", StoreFull, "QuotaExceeded"),
        (403, "InvalidObjectState", StoreError, "archived"),
        (402, "AccountSuspended", StoreError, "AccountSuspended"),
        (413, "EntityTooLarge", StoreError, "client_max_body_size"),
        (400, "InvalidRequest", StoreError, "InvalidRequest"),
        (400, "RequestTimeout", StoreUnavailable, "RequestTimeout"),
        (409, "OperationAborted", StoreUnavailable, "another request"),
        (503, "SlowDown", StoreUnavailable, "SlowDown"),
    ],
)
def test_the_servers_code_says_whether_a_request_is_repeated(
    proxy: Proxy, status: int, code: str, error: type[StoreError], words: str
) -> None:
    store = s3_store(proxy.endpoint, "codes")
    store.put("a", b"x")
    says(proxy, status, code)
    with pytest.raises(StoreError) as caught:
        store.put("a", b"y")
    assert type(caught.value) is error
    assert words in f"{caught.value} {caught.value.hint}"


def test_an_outage_is_ridden_out_and_logged_once(
    proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    options: Any = {"endpoint": proxy.endpoint, "retry_timeout": 60, **KEYS}
    store = open_store("s3://bucket/outage", **options)
    store.put("a", b"x")
    proxy.add(Rule("refuse", ".*", "", times=30))
    assert store.get("a") == b"x"
    assert caplog.text.count("trying again") == 1
    assert caplog.text.count("works again") == 1


def test_a_store_that_is_back_is_asked_again_within_four_seconds() -> None:
    """obstore's own longest wait between two tries is 15 s."""
    store: Any = open_store("s3://bucket/run", **KEYS)
    config = store._lasting.retry_config
    assert config["backoff"]["max_backoff"] <= timedelta(seconds=4)


def test_a_stream_that_can_be_read_again_is_sent_again(proxy: Proxy) -> None:
    """As the shards of an anchor are: here of 9 MB, in parts."""
    options: Any = {"endpoint": proxy.endpoint, "retry_timeout": 60, **KEYS}
    options["retry_config"] = {"max_retries": 0, "retry_timeout": timedelta(seconds=9)}
    store = open_store("s3://bucket/again", **options)
    state = {"w": np.random.default_rng(0).integers(0, 1 << 16, 4_500_000, np.uint16)}
    with Publisher(store, stream="s") as publisher:
        publisher.publish({"w": state["w"][:4_400_000]})
        proxy.add(Rule("refuse", "PUT|POST", "safetensors", times=2))
        publisher.publish(state, anchor=True)
        proxy.add(Rule("refuse", "PUT|POST", "once", times=2))
        with pytest.raises(StoreUnavailable):  # what can be read once only
            store.put("once", iter([bytes(9 << 20)]))
    worker = Subscriber(store, stream="s")
    worker.sync()
    assert np.array_equal(worker.state.read("w"), state["w"])


@pytest.mark.parametrize(
    ("variable", "value", "match"),
    [
        ("AWS_ENDPOINT_URL", " ", "AWS_ENDPOINT_URL is set, and empty"),
        ("AWS_ENDPOINT_URL_S3", "minio:9000", "has no scheme"),
        ("AWS_ENDPOINT_URL", "http://a\nb", "control character"),
    ],
)
def test_settings_of_the_environment_are_checked(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, match: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(InputError, match=match):
        open_store("s3://bucket/x", **KEYS)


def test_white_space_around_keys_is_no_part_of_them(
    monkeypatch: pytest.MonkeyPatch, s3: str
) -> None:
    for name, value in (("ACCESS_KEY_ID", "a\n"), ("SECRET_ACCESS_KEY", "b\n"), ("REGION", " e ")):
        monkeypatch.setenv(f"AWS_{name}", value)
    store = open_store("s3://bucket/space", endpoint=f"{s3}\n")
    store.put("a", b"x")
    assert store.get("a") == b"x"
