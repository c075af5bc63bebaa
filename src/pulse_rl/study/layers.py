"""The layer type of a tensor, by its name.

The first rule that fits decides. A name's parts are what stands between its dots, in lower case.

==========  ==============================================================================================
biases      the last part is ``bias`` or ends with ``_bias``, whatever layer it belongs to
norms       a part contains ``norm``, or is ``ln`` with or without a suffix (``ln_1``, ``ln_f``)
head        a part is ``lm_head``, ``embed_out``, ``score``, ``classifier``, ``v_head``, ``value_head`` or ``head``
embeddings  a part contains ``embed``, or is ``wte``, ``wpe``, ``shared``
attention   a part contains ``attn`` or ``attention``, or is one of q/k/v/o/qkv_proj, ``query``, ``key``, ``value``
mlp         a part contains ``mlp``, ``ffn``, ``feed_forward``, ``intermediate`` or ``expert``, or is one of
            gate/up/down/gate_up_proj, ``fc1``, ``fc2``, ``w1``, ``w2``, ``w3``, or ``output`` (BERT's second matrix)
others      everything else
==========  ==============================================================================================

A head that is tied to the embeddings is stored once, as embeddings.
"""

from __future__ import annotations

import re

LAYERS = ("embeddings", "attention", "mlp", "norms", "head", "biases", "others")

_RULES = tuple(
    (layer, re.compile(rule))
    for layer, rule in (
        ("biases", r"(.*\.)?(bias|[^.]*_bias)"),
        ("norms", r"(.*\.)?([^.]*norm[^.]*|ln(_[^.]*)?)(\..*)?"),
        ("head", r"(.*\.)?(lm_head|embed_out|score|classifier|v_head|value_head|head)(\..*)?"),
        ("embeddings", r"(.*\.)?([^.]*embed[^.]*|wte|wpe|shared)(\..*)?"),
        ("attention", r"(.*\.)?([^.]*(attn|attention)[^.]*|(q|k|v|o|qkv)_proj|query|key|value)(\..*)?"),
        (
            "mlp",
            r"(.*\.)?([^.]*(mlp|ffn|feed_forward|intermediate|expert)[^.]*|(gate|up|down|gate_up)_proj|fc1|fc2|w[123]|output)(\..*)?",
        ),
    )
)


def layer_of(name: str) -> str:
    """The layer type of the tensor called ``name``, one of ``LAYERS``."""
    lower = name.lower()
    return next((layer for layer, rule in _RULES if rule.fullmatch(lower)), "others")
