"""Flags that recipes carry and that change nothing here: accepted, and said so once at the start of a run."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

CHOSEN_AT_START = "the fastest implementation for the device is chosen when the run starts"
CHECKPOINT_FORMAT = "checkpoints are written in megatron-core's distributed format"
ALREADY_OFF = "it is always off here"


class NoEffect(NamedTuple):
    """Why a flag changes nothing, and how many values it takes (0 or 1)."""

    reason: str
    takes: int = 0


NO_EFFECT: Mapping[str, NoEffect] = MappingProxyType(
    {
        "--use-mcore-models": NoEffect("all models are megatron-core's"),
        "--use-flash-attn": NoEffect(CHOSEN_AT_START),
        "--use-fused-rmsnorm": NoEffect(CHOSEN_AT_START),
        "--use-fused-rotary-pos-emb": NoEffect(CHOSEN_AT_START),
        "--attention-backend": NoEffect(CHOSEN_AT_START, takes=1),
        "--attention-softmax-in-fp32": NoEffect("the softmax of attention is always computed in fp32"),
        "--no-masked-softmax-fusion": NoEffect(ALREADY_OFF),
        "--no-gradient-accumulation-fusion": NoEffect(ALREADY_OFF),
        "--no-bias-dropout-fusion": NoEffect(ALREADY_OFF),
        "--no-rope-fusion": NoEffect(ALREADY_OFF),
        "--no-persist-layer-norm": NoEffect(ALREADY_OFF),
        "--no-async-tensor-model-parallel-allreduce": NoEffect("megatron-core ignores it"),
        "--no-position-embedding": NoEffect("--position-embedding-type says whether there is a table of positions"),
        "--enable-hf2mg-convert": NoEffect("--load takes a Hugging Face folder as it is"),
        "--ckpt-format": NoEffect(CHECKPOINT_FORMAT, takes=1),
        "--use-dist-ckpt": NoEffect(CHECKPOINT_FORMAT),
        "--dist-ckpt-format": NoEffect(CHECKPOINT_FORMAT, takes=1),
        "--tokenizer-not-use-fast": NoEffect("a tokenizer is always read by the fast implementation"),
        "--trust-remote-code": NoEffect("code from a model's folder is never run"),
        "--local-rank": NoEffect("the launcher's environment tells the rank", takes=1),
        "--no-one-logger": NoEffect("there is no such service here"),
    }
)
