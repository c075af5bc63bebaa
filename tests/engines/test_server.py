"""A server follows a stream: over HTTP, beside requests in flight, through restarts, and by the
command."""

from __future__ import annotations

import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import pulse_rl
from pulse_rl import PulseError, Subscriber
from pulse_rl.engines.handle import EngineSync
from pulse_rl.engines.vllm import connect
from pulse_rl.errors import ConcurrentUse, EngineError, EngineUnavailable
from tests.support.programs import ran

from .policy import Policy
from .server import checksums, complete, free_port, server


def test_a_server_is_driven_and_its_users_errors_are_clear(policy: Policy, tmp_path: Path) -> None:
    other, wide, empty, file = (str(tmp_path / name) for name in ("other", "wide", "empty", "file"))
    Path(file).touch()
    pulse_rl.Publisher(wide, stream="policy").publish(policy.model.float().state_dict())
    policy.model.bfloat16()
    small = {
        name: weight[..., :-1].contiguous() for name, weight in policy.model.state_dict().items()
    }
    pulse_rl.Publisher(other, stream="policy").publish(small)

    with server(policy.checkpoint, tmp_path / "server.log") as url:
        before = checksums(url)
        refusals = {
            other: "does not take",
            wide: "float32",
            empty: "nothing was synced",
            file: "is not a folder",
        }
        for store, words in refusals.items():
            with (
                pytest.raises(PulseError, match=words) as refusal,
                connect(url, store=store, stream="policy") as handle,
            ):
                handle.sync()
            assert "\n" not in str(refusal.value)
        assert checksums(url) == before
        assert complete(url)["choices"]

        with connect(url, store=policy.store, stream="policy") as handle:
            with pytest.raises(ConcurrentUse, match="another handle"):
                connect(url, store=policy.store, stream="policy")
            with ThreadPoolExecutor(1) as pool:
                running = pool.submit(complete, url, 60)
                policy.step()
                with handle.admit(0) as generation:
                    report = handle.sync()
                    assert report.version == 1
                    assert len(running.result()["choices"][0]["token_ids"]) == 60
                assert generation.start_version == 0
                assert (generation.end_version, generation.spans_update) == (1, True)
                with handle.admit(minimum=1) as generation:
                    assert complete(url)["choices"]
                assert generation.end_version == 1
                assert (generation.end_root, generation.spans_update) == (report.root, False)
            assert str(urllib.request.urlopen(f"{url}/weight_info").read()).count("1") == 1
            assert handle.audit() == ()
        follow_by_command(policy, url)
        followed = checksums(url)
        with connect(url, store=policy.store, stream="policy") as handle:
            report = handle.sync()
            assert (report.version, report.full) == (policy.version, True), (
                "what another session left is not believed"
            )
            assert handle.audit() == ()
            assert checksums(url) == followed


def test_who_reaches_the_port_names_what_the_operator_allowed(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, other = tmp_path / "cache", tmp_path / "other"
    pulse_rl.Publisher(str(other), stream="policy").publish(policy.model.state_dict())
    monkeypatch.setenv("PULSE_ENGINE_ALLOWED", f"{policy.store} {cache}")
    with server(policy.checkpoint, tmp_path / "server.log") as url:
        for store, named in (
            (str(other), {}),
            (policy.store, {"cache": str(other)}),
            (policy.store, {"base": "/etc"}),
        ):
            with pytest.raises(PulseError, match="is not allowed on this engine"):
                connect(url, store=store, stream="policy", **named).sync()
        assert not (other / "pulse-cache").exists()
        policy.step()
        with connect(url, store=policy.store, stream="policy", cache=str(cache)) as handle:
            report = handle.sync()
            assert report.version == 1
        assert (cache / "pulse-cache").exists()


def follow_by_command(policy: Policy, url: str) -> None:
    policy.step()
    program = "import sys; from pulse_rl.cli import main; sys.exit(main())"
    options = ("--stream", "policy", "--engine", url, "--once")
    assert f"version {policy.version} is live" in ran(
        "-c", program, "follow", policy.store, *options
    )


def test_late_restarted_and_away_servers_catch_up(policy: Policy, tmp_path: Path) -> None:
    """The handle is told nothing: the server comes back at the same address, from the first
    checkpoint."""
    port = free_port()
    for _ in range(3):
        policy.step()
    seen: list[EngineSync] = []
    with server(policy.checkpoint, tmp_path / "first.log", port=port) as url:
        handle = connect(url, store=policy.store, stream="policy")
        handle.follow(on_sync=seen.append, poll_seconds=0.1)
        wait_for(lambda: bool(seen) and seen[-1].version == 3)
    with pytest.raises(EngineUnavailable, match="no answer"):
        connect(url, store=policy.store, stream="policy")
    for _ in range(50):
        policy.step(density=0.01)
    with server(policy.checkpoint, tmp_path / "second.log", port=port) as url:
        wait_for(lambda: seen[-1].version == policy.version)
        assert (seen[-1].previous, seen[-1].full) == (0, False)
        assert handle.audit() == ()
        live = checksums(url)
        handle.close()
    with server(policy.save("last"), tmp_path / "fresh.log", pulse=False) as url:
        fresh = checksums(url)
        with pytest.raises(EngineError, match="backend pulse"):
            connect(url, store=policy.store, stream="policy")
    assert {name: live[name] for name in fresh if "norm" in name} == {
        n: s for n, s in fresh.items() if "norm" in n
    }


def test_a_followed_folder_is_served(policy: Policy, tmp_path: Path) -> None:
    """Its config, tokenizer and weights are the stream's: nothing of it was written by
    transformers."""
    policy.step()
    with Subscriber(policy.store, stream="policy") as worker:
        worker.sync()
        worker.save(tmp_path / "followed")
    expected = policy.log_probabilities_of_all()[-1]
    with server(str(tmp_path / "followed"), tmp_path / "server.log", pulse=False) as url:
        (choice,) = complete(url, tokens=1)["choices"]
    assert choice["text"].strip() == f"t{choice['token_ids'][0]}"
    assert abs(choice["logprobs"]["token_logprobs"][0] - expected[choice["token_ids"][0]]) < 0.1
    assert expected.max() - expected[choice["token_ids"][0]] < 0.1


@pytest.mark.slow
def test_a_server_without_the_routes_says_so(policy: Policy, tmp_path: Path) -> None:
    with server(policy.checkpoint, tmp_path / "server.log", dev=False) as url:
        with pytest.raises(EngineError, match="no route") as refusal:
            connect(url, store=policy.store, stream="policy")
        assert "VLLM_SERVER_DEV_MODE=1" in refusal.value.hint
        assert complete(url)["choices"]


def wait_for(reached: Any, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, "not reached"
        assert threading.active_count() > 1
        time.sleep(0.1)
