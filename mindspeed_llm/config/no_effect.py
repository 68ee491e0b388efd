"""Flags that recipes carry and that change nothing here: accepted, and said so once at the start of a run."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

CHOSEN_AT_START = "the fastest implementation for the device is chosen when the run starts"
CHECKPOINT_FORMAT = "checkpoints are written in megatron-core's distributed format"
ALREADY_OFF = "it is always off here"


class NoEffect(NamedTuple):
    """A flag that changes nothing.

    Attributes:
        reason: why.
        takes: how many values follow, 0 or 1.
        only: values with which it changes nothing, where that is not so with every value; another is refused.
    """

    reason: str
    takes: int = 0
    only: tuple[str, ...] = ()


NO_EFFECT: Mapping[str, NoEffect] = MappingProxyType(
    {
        "--use-mcore-models": NoEffect("all models are megatron-core's"),
        "--use-flash-attn": NoEffect(CHOSEN_AT_START),
        "--use-fused-rmsnorm": NoEffect(CHOSEN_AT_START),
        "--use-fused-rotary-pos-emb": NoEffect(CHOSEN_AT_START),
        "--attention-backend": NoEffect(CHOSEN_AT_START, takes=1),
        "--shape-order": NoEffect("each implementation of attention lays out its tensors as it needs them", takes=1),
        "--attention-softmax-in-fp32": NoEffect("the softmax of attention is always computed in fp32"),
        "--no-masked-softmax-fusion": NoEffect(ALREADY_OFF),
        "--no-gradient-accumulation-fusion": NoEffect(ALREADY_OFF),
        "--no-bias-dropout-fusion": NoEffect(ALREADY_OFF),
        "--no-rope-fusion": NoEffect(ALREADY_OFF),
        "--no-persist-layer-norm": NoEffect(ALREADY_OFF),
        "--no-async-tensor-model-parallel-allreduce": NoEffect("megatron-core ignores it"),
        "--no-position-embedding": NoEffect("--position-embedding-type says whether there is a table of positions"),
        "--context-parallel-algo": NoEffect(
            "there is one context-parallel rank",
            takes=1,
            only=("megatron_cp_algo", "ulysses_cp_algo", "hybrid_cp_algo", "kvallgather_cp_algo"),
        ),
        "--longrope-freqs-type": NoEffect(
            "both name the same frequencies, by another order of the factors", takes=1, only=("mul", "outer")
        ),
        "--padded-base-length": NoEffect("attention takes heads of any size", takes=1),
        "--mla-fa-without-pad": NoEffect("attention takes heads of any size"),
        "--moe-grouped-gemm": NoEffect("the experts of a rank are always computed together"),
        "--moe-permutation-async-comm": NoEffect("it is of a token dispatcher that megatron-core no longer has"),
        "--moe-permute-fusion": NoEffect(CHOSEN_AT_START),
        "--use-fused-moe-token-permute-and-unpermute": NoEffect(CHOSEN_AT_START),
        "--shared-expert-gate-output-dimension": NoEffect("this is the gate of shared experts", takes=1, only=("1",)),
        **dict.fromkeys(
            ("--moe-device-level-aux-loss-coeff", "--moe-comm-aux-loss-coeff"),
            NoEffect("without a weight there is no such loss", takes=1, only=("0", "0.0", "0.")),
        ),
        "--output-layer-slice-num": NoEffect("the loss is always computed a few rows of logits at a time", takes=1),
        "--loss-compute-mode": NoEffect("this is how the loss is computed", takes=1, only=("default",)),
        "--handler-name": NoEffect(
            "text for pretraining is read from raw files as it is", takes=1, only=("GeneralPretrainHandler",)
        ),
        "--append-eod": NoEffect("documents of raw files always end with the token that ends a document"),
        "--workers": NoEffect("raw files are prepared on all cores", takes=1),
        "--tokenizer-padding-side": NoEffect("samples of pretraining are never padded", takes=1),
        "--enable-hf2mg-convert": NoEffect("--load takes a Hugging Face folder as it is"),
        "--ckpt-format": NoEffect(CHECKPOINT_FORMAT, takes=1),
        "--use-dist-ckpt": NoEffect(CHECKPOINT_FORMAT),
        "--dist-ckpt-format": NoEffect(CHECKPOINT_FORMAT, takes=1),
        "--auto-detect-ckpt-format": NoEffect("the form of a checkpoint is always seen from its files"),
        "--tokenizer-not-use-fast": NoEffect("a tokenizer is always read by the fast implementation"),
        "--trust-remote-code": NoEffect("code from a model's folder is never run"),
        "--local-rank": NoEffect("the launcher's environment tells the rank", takes=1),
        "--no-one-logger": NoEffect("there is no such service here"),
    }
)
