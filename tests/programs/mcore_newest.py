"""The newest Megatron-Core. Its wheels name Python 3.12; what runs here of it is Python of 3.11 and newer."""

from __future__ import annotations

import sys

import mcore
from program import case

PROGRAM, DISTRIBUTION = "Megatron-Core, newest", mcore.DISTRIBUTION
PACKAGES, ALONE = "pytest==9.1.1 triton==3.7.1", "megatron-core==0.19.2"
if sys.version_info < (3, 12):
    ALONE = "--ignore-requires-python --python-version 3.12 --only-binary=:all: --target {site} " + ALONE
CASES = [*mcore.CASES]
CHEAP = True
MOE = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_token_dispatcher_type": "allgather",
    "moe_router_load_balancing_type": "none",
}  # fmt: skip
case(CASES, "GPTModel, experts", "the same", MOE)(
    mcore.train
)  # the router of 0.16 asks for Transformer Engine
