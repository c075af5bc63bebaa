"""The entry point in ``vllm.general_plugins``: makes the weight-transfer backend ``pulse`` known to a vLLM process."""

from __future__ import annotations


def register() -> None:
    """Called by vLLM in each of its processes, possibly more than once. Imports nothing but vLLM's own factory."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
    except ImportError:  # a vLLM without weight transfer: there is nothing to register with
        return
    from .plain import BACKEND, keep_plain_weights
    from .processing import remember_before_processing

    if BACKEND not in Factory._registry:
        Factory.register_engine(BACKEND, "pulse_rl.integrations.vllm.engine", "PulseWeightTransferEngine")
    keep_plain_weights()
    remember_before_processing()
