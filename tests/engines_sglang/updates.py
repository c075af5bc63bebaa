"""What `test_package` runs in a process of its own: ``python -m tests.engines_sglang.updates FOLDER
SIZE TIED``."""

from __future__ import annotations

import json
import socket
import sys
import urllib.request
from pathlib import Path

from tests.support.stub_packages import install

# Of the version of the torch that is installed: transformers asks.
install("torchvision", "0.28.0")

import pytest  # noqa: E402

from pulse_rl import PulseError  # noqa: E402
from pulse_rl.engines.sglang import LOADER, EngineHandle, connect, is_sglang  # noqa: E402  # noqa: E402
from pulse_rl.errors import ConcurrentUse, EngineError, EngineUnavailable  # noqa: E402
from tests.engines.policy import Policy  # noqa: E402

from .package import Server, serving  # noqa: E402


def main(folder: Path, size: int, tied: bool) -> None:
    policy = Policy(folder, tied=tied)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serving(policy.checkpoint, size, folder, port, custom_weight_loader=[LOADER]) as server:
        assert is_sglang(server.url, 30)
        with connect(server.url, store=policy.store, stream="policy", timeout_seconds=60) as handle:
            twenty_updates(policy, server, handle)
            a_failed_update_is_rolled_back(policy, server, handle)
            thirty_versions_at_once(policy, server, handle)
            a_flipped_bit_is_found_and_repaired(policy, server, handle)
            a_refused_flush_retracts(policy, server, handle)
            released_memory_is_filled_again(policy, server, handle)
            with pytest.raises(ConcurrentUse):
                connect(server.url, store=policy.store, stream="policy", timeout_seconds=60)
        what_sglang_refuses(server)
    print("done")


def equal(policy: Policy, server: Server) -> bool:
    """Whether every live parameter of every worker is that of a fresh load of the policy's
    checkpoint."""
    return not any(server.ask(("differing", policy.save("now"))))


def twenty_updates(policy: Policy, server: Server, handle: EngineHandle) -> None:
    for number in range(1, 21):
        policy.step()
        done = handle.sync()
        assert (done.version, done.previous, done.full) == (number, number - 1, False)
    assert equal(policy, server)
    assert handle.audit() == ()
    assert answer(server, "model_info")["weight_version"] == "20"


def a_failed_update_is_rolled_back(policy: Policy, server: Server, handle: EngineHandle) -> None:
    before = policy.save("now")
    policy.step()
    server.ask("break")
    with pytest.raises(PulseError, match="RuntimeError: lost"):
        handle.sync()
    assert not any(server.ask(("differing", before)))
    assert answer(server, "model_info")["weight_version"] == "20"
    assert handle.sync() is not None
    assert equal(policy, server)


def thirty_versions_at_once(policy: Policy, server: Server, handle: EngineHandle) -> None:
    for _ in range(30):
        policy.step(0.01)
    done = handle.sync()
    assert (done.version, equal(policy, server)) == (policy.version, True)


def a_flipped_bit_is_found_and_repaired(
    policy: Policy, server: Server, handle: EngineHandle
) -> None:
    weight = dict(server.first.runner.model.named_parameters())[
        "model.layers.1.self_attn.qkv_proj.weight"
    ]
    weight.data.view(-1).view(dtype=weight.dtype)[3] += 1
    assert handle.audit() == ("model.layers.1.self_attn.q_proj.weight",)
    done = handle.sync()
    assert (done.full, equal(policy, server), handle.audit()) == (True, True, ())


def a_refused_flush_retracts(policy: Policy, server: Server, handle: EngineHandle) -> None:
    policy.step()
    handle._in_flight = "wait"
    server.first.running = 1
    done = handle.sync()
    assert done is not None
    assert equal(policy, server)
    assert server.first.paused == ""
    server.first.running = 0
    handle._in_flight = "keep"


def released_memory_is_filled_again(policy: Policy, server: Server, handle: EngineHandle) -> None:
    assert post(server, "release_memory_occupation", {})[0] == 200
    with pytest.raises(EngineUnavailable, match="sleeps"):
        handle.sync()
    assert post(server, "resume_memory_occupation", {"tags": ["weights"]})[0] == 200
    done = handle.sync()
    assert (done.full, equal(policy, server)) == (True, True)
    assert post(server, "resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})[0] == 200


def what_sglang_refuses(server: Server) -> None:
    """In SGLang's words, which the handle's errors rest on."""
    status, told = post(server, "weights_checker", {"action": "other"})
    assert (status, told["message"]) == (400, "Unsupported action='other'")
    body = {
        "serialized_named_tensors": ["gAJdcQAu"] * (1 + len(server.others)),
        "load_format": LOADER,
    }
    status, told = post(server, "update_weights_from_tensor", body)
    assert status == 400
    assert "must run between begin_weight_update" in told["message"]
    assert post(server, "begin_weight_update", {"selector": "target"})[0] == 200
    assert post(server, "begin_weight_update", {"selector": "target"})[0] == 400
    status, told = post(server, "update_weights_from_tensor", body)
    assert status == 400
    assert "follows no stream" in told["message"]
    assert post(server, "end_weight_update", {})[0] == 200
    if not server.others:
        server.first.runner.weight_updater.custom_weight_loaders.clear()
        post(server, "begin_weight_update", {"selector": "target"})
        told = post(server, "update_weights_from_tensor", body)[1]
        assert told["message"] == f"start the server with --custom-weight-loader {LOADER}"
    with pytest.raises(EngineError, match="has no route /weights_checker"):
        connect(server.url + "/nothing", store="s", stream="policy")


def post(server: Server, route: str, body: object) -> tuple[int, dict[str, str]]:
    request = urllib.request.Request(
        f"{server.url}/{route}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as done:
            return done.status, json.loads(done.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def answer(server: Server, route: str) -> dict[str, str]:
    with urllib.request.urlopen(f"{server.url}/{route}") as done:
        found: dict[str, str] = json.loads(done.read())
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "tied")
