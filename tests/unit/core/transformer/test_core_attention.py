"""The core attention module against megatron-core's own, and what megatron-core asks of such a module."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import mindspeed_llm.core  # noqa: F401  the seam comes first
from mindspeed_llm.core.transformer.attention import CoreAttention
from mindspeed_llm.core.transformer.config import SuiteTransformerConfig
from mindspeed_llm.errors import ConfigError

from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random as parallel_random
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.utils import GlobalMemoryBuffer

S, B, HEADS, GROUPS, D = 24, 2, 4, 2, 8


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The global state that a run of one rank has: the model-parallel generator and megatron-core's buffers."""
    monkeypatch.setattr(parallel_random, "_CUDA_RNG_STATE_TRACKER", None)
    monkeypatch.setattr(parallel_random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", False)
    monkeypatch.setattr(parallel_state, "_GLOBAL_MEMORY_BUFFER", GlobalMemoryBuffer())
    parallel_random.model_parallel_cuda_manual_seed(7, tp_rank=0, ep_rank=0, etp_rank=0)


def config(**changes: Any) -> SuiteTransformerConfig:
    fields: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": HEADS * D,
        "num_attention_heads": HEADS,
        "num_query_groups": GROUPS,
        "attention_dropout": 0.0,
        "masked_softmax_fusion": False,
        "params_dtype": torch.float64,
    }
    return SuiteTransformerConfig(**fields | changes)


def module(kind: type, conf: SuiteTransformerConfig, ranks: int = 1, layer: int = 1, **arguments: Any) -> Any:
    groups = cast(ProcessGroupCollection, SimpleNamespace(tp=SimpleNamespace(size=lambda: ranks)))
    return kind(conf, layer, AttnMaskType.causal, "self", pg_collection=groups, **arguments)


def operands(d_v: int = D) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, width: int) -> Tensor:
        return torch.randn(S, B, heads, width, generator=generator, dtype=torch.float64)

    return draw(HEADS, D), draw(GROUPS, D), draw(GROUPS, d_v)


@pytest.mark.parametrize(
    ("changes", "layer"),
    [
        ({}, 1),
        ({"softmax_scale": 0.5}, 1),
        ({"window_size": (5, 0)}, 1),
        ({"window_size": (5, 0), "window_attn_skip_freq": 2}, 1),
        ({"window_size": (5, 0), "window_attn_skip_freq": 2}, 2),
        ({"window_size": (5, 0), "window_attn_skip_freq": [0, 1, 0, 1]}, 1),
        ({"window_size": (5, 0), "window_attn_skip_freq": [0, 1, 0, 1]}, 4),
        ({"softmax_type": "off-by-one"}, 1),
        ({"softmax_type": "learnable"}, 1),
        ({"apply_query_key_layer_scaling": True}, 3),
    ],
)
def test_equals_megatron_core(changes: dict[str, Any], layer: int) -> None:
    conf = config(**changes)
    ours, theirs = (
        module(kind, conf, layer=layer, softmax_scale=conf.softmax_scale)
        for kind in (CoreAttention, DotProductAttention)
    )
    if conf.softmax_type == "learnable":
        with torch.no_grad():
            ours.softmax_offset.copy_(torch.linspace(-1, 1, HEADS))
            theirs.softmax_offset.copy_(ours.softmax_offset)
    q, k, v = operands()
    out = ours(q, k, v, None)
    assert out.shape == (S, B, HEADS * D)
    # megatron-core hides with -10000, which float64's exponential turns into 0.
    torch.testing.assert_close(out, theirs(q, k, v, None), rtol=0, atol=1e-12)


def test_an_infinite_window_side_hides_nothing() -> None:
    """megatron-core documents -1 as infinite; its local attention takes it for one key."""
    q, k, v = operands()
    whole, windowed = (module(CoreAttention, config(window_size=size)) for size in (None, (-1, 0)))
    assert torch.equal(windowed(q, k, v, None), whole(q, k, v, None))


def test_megatron_mask_applies_besides_causality() -> None:
    q, k, v = operands()
    hidden = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(1)) < 0.5
    hidden.diagonal(dim1=-2, dim2=-1).fill_(False)
    ours, theirs = (module(kind, config()) for kind in (CoreAttention, DotProductAttention))
    future = torch.ones(S, S, dtype=torch.bool).triu(1)
    expected = theirs(q, k, v, hidden | future)
    torch.testing.assert_close(ours(q, k, v, hidden), expected, rtol=0, atol=1e-12)
    anywhere = ours(q, k, v, hidden | future, attn_mask_type=AttnMaskType.arbitrary)
    torch.testing.assert_close(anywhere, expected, rtol=0, atol=1e-12)
    biased = ours(q, k, v, None, attention_bias=torch.zeros(S, S).double().masked_fill(hidden, -torch.inf))
    torch.testing.assert_close(biased, expected, rtol=0, atol=1e-12)
    both = ours(q, k, v, hidden, attention_bias=torch.zeros(1, 1, S, S).double())
    torch.testing.assert_close(both, expected, rtol=0, atol=1e-12)


def test_no_mask_type_sees_everything() -> None:
    q, k, v = operands()
    ours = module(CoreAttention, config())
    one_query = ours(q[-1:], k, v, None, attn_mask_type=AttnMaskType.no_mask)
    torch.testing.assert_close(one_query, ours(q, k, v, None)[-1:], rtol=0, atol=1e-12)
    q_heads, k_heads, v_heads = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(q_heads, k_heads, v_heads, enable_gqa=True)
    expected = expected.permute(2, 0, 1, 3).flatten(2)
    everything = ours(q, k, v, None, attn_mask_type=AttnMaskType.no_mask)
    torch.testing.assert_close(everything, expected, rtol=0, atol=1e-12)


def packed_parameters(bounds: list[int], padded: list[int] | None) -> PackedSeqParams:
    cu = torch.tensor(bounds, dtype=torch.int32)
    packed = PackedSeqParams("thd", cu, cu)
    if padded is not None:
        packed.cu_seqlens_q_padded = packed.cu_seqlens_kv_padded = torch.tensor(padded, dtype=torch.int32)
    return packed


@pytest.mark.parametrize("causal", [True, False])
def test_packed_documents(causal: bool) -> None:
    """Each document equals a call of its own, padded or not; tokens behind the last bound change nothing."""
    mask_type = AttnMaskType.padding_causal if causal else AttnMaskType.padding
    q, k, v = (x[:, 0] for x in operands())
    ours = module(CoreAttention, config(softmax_type="off-by-one"))
    for bounds, padded in (([0, 7, 20, S], None), ([0, 7, 20], None), ([0, 5, 14], [0, 8, 20])):
        out = ours(q, k, v, None, attn_mask_type=mask_type, packed_seq_params=packed_parameters(bounds, padded))
        assert out.shape == (S, HEADS * D)
        assert out.isfinite().all()
        for i in range(len(bounds) - 1):
            start = (padded or bounds)[i]
            stop = start + bounds[i + 1] - bounds[i]
            kind = AttnMaskType.causal if causal else AttnMaskType.no_mask
            alone = ours(*(x[start:stop, None] for x in (q, k, v)), None, attn_mask_type=kind)
            torch.testing.assert_close(out[start:stop], alone[:, 0], rtol=0, atol=1e-12)


def test_packed_in_another_layout_is_refused() -> None:
    q, k, v = operands()
    with pytest.raises(ValueError, match="thd"):
        module(CoreAttention, config())(q, k, v, None, packed_seq_params=PackedSeqParams("sbhd"))


def test_multi_latent_arguments() -> None:
    """MLA passes k_channels and v_channels, and a value head size of its own."""
    q, k, v = operands(d_v=5)
    ours = module(CoreAttention, config(), k_channels=D, v_channels=5, softmax_scale=0.3)
    theirs = module(DotProductAttention, config(), softmax_scale=0.3)
    padded = torch.cat((v, torch.zeros(S, B, GROUPS, D - 5, dtype=v.dtype)), -1)
    expected = theirs(q, k, padded, None).view(S, B, HEADS, D)[..., :5].flatten(2)
    torch.testing.assert_close(ours(q, k, v, None), expected, rtol=0, atol=1e-12)


def test_soft_capping_is_read_from_the_config() -> None:
    q, k, v = operands()
    capped = module(CoreAttention, config(attn_logit_softcapping=1e6))
    torch.testing.assert_close(capped(q, k, v, None), module(CoreAttention, config())(q, k, v, None), rtol=0, atol=1e-9)
    # tanh saturates: only signs are left of the scores.
    tight = module(CoreAttention, config(attn_logit_softcapping=1.0), softmax_scale=1e9)(q, k, v, None)
    signs = torch.einsum("snd,tnd->nst", q[:, 0], k[:, 0].repeat_interleave(2, 1)).sign()
    weights = signs.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    expected = torch.einsum("nst,tnd->snd", weights, v[:, 0].repeat_interleave(2, 1)).flatten(1)
    torch.testing.assert_close(tight[:, 0], expected, rtol=0, atol=1e-6)


def test_sinks_are_marked_tensor_parallel_and_differ_by_rank() -> None:
    """megatron-core counts an unmarked parameter's gradient on the first rank only."""
    sinks = module(CoreAttention, config(softmax_type="learnable"), ranks=2).softmax_offset
    assert sinks.shape == (HEADS // 2,)
    assert (sinks.tensor_model_parallel, sinks.partition_dim, sinks.partition_stride) == (True, 0, 1)
    parallel_random.model_parallel_cuda_manual_seed(7, tp_rank=1, ep_rank=0, etp_rank=0)
    other = module(CoreAttention, config(softmax_type="learnable"), ranks=2).softmax_offset
    assert not torch.equal(sinks, other)
    fixed = module(CoreAttention, config(softmax_type="off-by-one"))
    assert list(fixed.parameters()) == []
    assert fixed.state_dict() == {}


def test_dropout_follows_the_model_parallel_generator() -> None:
    """Drawn from the fork: repeats with it, moves with it, differs by rank, leaves the default generator alone."""
    q, k, v = operands()
    dropping = module(CoreAttention, config(attention_dropout=0.25))

    def draw(rank: int) -> Tensor:
        parallel_random.model_parallel_cuda_manual_seed(7, tp_rank=rank, ep_rank=0, etp_rank=0)
        return dropping(q, k, v, None)

    first = draw(0)
    state = torch.get_rng_state()
    second = dropping(q, k, v, None)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first, second)
    assert torch.equal(draw(0), first)
    assert not torch.equal(draw(1), first)
    dropping.eval()
    assert torch.equal(dropping(q, k, v, None), module(CoreAttention, config())(q, k, v, None))


def test_dropout_under_sequence_parallelism_draws_from_the_layer_s_fork() -> None:
    """TransformerBlock forks around the whole layer then: a second fork would repeat the layer's first numbers."""
    q, k, v = operands()
    conf = config(attention_dropout=0.25)
    dropping = module(CoreAttention, conf)
    conf.sequence_parallel = True
    torch.manual_seed(3)
    first = dropping(q, k, v, None)
    torch.manual_seed(3)
    assert torch.equal(dropping(q, k, v, None), first)
    assert not torch.equal(dropping(q, k, v, None), first)


def test_context_parallelism_is_refused() -> None:
    conf = config()
    conf.context_parallel_size = 2
    with pytest.raises(ConfigError, match="context-parallel-size 2"):
        module(CoreAttention, conf)
