"""The functional core attention against a formula in float64, transformers' eager attentions and torch's SDPA."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

import mindspeed_llm.core  # noqa: F401  the seam comes first
from mindspeed_llm.core.transformer.attention import attention, attention_backward, choose_implementation
from mindspeed_llm.core.transformer.attention_scores import alibi_slopes
from mindspeed_llm.errors import OpUnavailableError

INFINITY = float("inf")
both = pytest.mark.parametrize("implementation", ["flash_cpu", "reference"])


def operands(
    b: int, n: int, groups: int, sq: int, sk: int, d: int, d_v: int | None = None, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and a gradient of the output, as permuted views of megatron-core's ``[s, b, n, d]``."""
    generator = torch.Generator().manual_seed(b + 10 * n + 100 * sq + sk + d)

    def draw(s: int, heads: int, width: int) -> Tensor:
        return torch.randn(s, b, heads, width, generator=generator, dtype=torch.float64).to(dtype).permute(1, 2, 0, 3)

    d_v = d if d_v is None else d_v
    q, k, v = draw(sq, n, d), draw(sk, groups, d), draw(sk, groups, d_v)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), draw(sq, n, d_v)


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention as in the papers: one exponential per visible pair, one sum, no tricks."""
    repeats = q.shape[1] // k.shape[1]
    scores = torch.einsum("bnid,bnjd->bnij", q, k.repeat_interleave(repeats, 1)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    terms = scores.exp() * visible
    total = terms.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[None, :, None, None]
    weights = terms / torch.where(total == 0, 1, total)
    return torch.einsum("bnij,bnjd->bnid", weights, v.repeat_interleave(repeats, 1)), total.squeeze(-1).log()


def band(sq: int, sk: int, left: int | None, right: int | None) -> Tensor:
    """What megatron-core's window shows."""
    distance = torch.arange(sk)[None, :] - (torch.arange(sq)[:, None] + sk - sq)
    visible = torch.ones(sq, sk, dtype=torch.bool)
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
    return visible


def assert_same(
    operands_: tuple[Tensor, Tensor, Tensor, Tensor],
    visible: Tensor,
    implementation: str,
    tolerance: float = 1e-12,
    **call: Any,
) -> None:
    """out, lse and every gradient equal the formula's."""
    q, k, v, d_out = operands_
    sinks = call.get("sinks")
    wanted = [q, k, v] if sinks is None else [q, k, v, sinks]
    out, lse = attention(q, k, v, implementation=implementation, **call)
    scale = call.get("scale") or q.shape[-1] ** -0.5
    expected, expected_lse = formula(q, k, v, visible, scale, sinks, call.get("softcap"))
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=tolerance)
    got = torch.autograd.grad(out, wanted, d_out)
    for ours, theirs in zip(got, torch.autograd.grad(expected, wanted, d_out), strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=10 * tolerance)


@both
@pytest.mark.parametrize(("n", "groups"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_grouped_heads(implementation: str, n: int, groups: int, causal: bool) -> None:
    assert_same(
        operands(2, n, groups, 67, 67, 16), band(67, 67, None, 0 if causal else None), implementation, causal=causal
    )


@both
@pytest.mark.parametrize(("sq", "sk"), [(1, 40), (24, 40), (40, 24), (1, 1)])
def test_causal_is_aligned_at_the_end(implementation: str, sq: int, sk: int) -> None:
    """A cached prefix (sq < sk) is seen in full; queries before the first key (sq > sk) see nothing."""
    assert_same(operands(2, 4, 2, sq, sk, 8), band(sq, sk, None, 0), implementation, causal=True)


def alibi_of_transformers(heads: int, keys: int) -> Tensor:
    """``[heads, 1, keys]`` float64: slope times the key's position, as Bloom adds it."""
    bias = build_alibi_tensor(torch.ones(1, keys, dtype=torch.long), heads, torch.float32)
    return bias.view(heads, 1, keys).double()


@pytest.mark.parametrize("heads", [1, 3, 4, 16, 40, 112])
def test_slopes(heads: int) -> None:
    torch.testing.assert_close(
        alibi_slopes(heads).double(), alibi_of_transformers(heads, 2)[:, 0, 1], rtol=1e-6, atol=0
    )


@both
@pytest.mark.parametrize(("sq", "sk", "window"), [(33, 33, None), (24, 40, None), (700, 700, None), (600, 700, 30)])
def test_alibi(implementation: str, sq: int, sk: int, window: int | None) -> None:
    """Long enough for several tiles; the bias counts from the query's own key, so its softmax is transformers'."""
    q, k, v, d_out = operands(1, 3, 3, sq, sk, 8)
    slopes = alibi_slopes(3).double()
    own = torch.arange(sq)[:, None] + sk - sq
    bias = alibi_of_transformers(3, sk) - alibi_of_transformers(3, sk)[:, :, 1, None] * own
    visible = band(sq, sk, window, 0)
    limits = None if window is None else (window, 0)
    out, lse = attention(q, k, v, implementation=implementation, causal=True, window=limits, slopes=slopes)
    expected, expected_lse = formula(q, k, v, visible, 8**-0.5, bias=bias)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-6)
    got = torch.autograd.grad(out, [q, k, v], d_out)
    for ours, theirs in zip(got, torch.autograd.grad(expected, [q, k, v], d_out), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@both
def test_scale(implementation: str) -> None:
    assert_same(operands(1, 2, 2, 33, 33, 8), band(33, 33, None, 0), implementation, causal=True, scale=0.07)


@both
@pytest.mark.parametrize(("d", "d_v"), [(24, 16), (16, 24)])
def test_value_head_size_of_its_own(implementation: str, d: int, d_v: int) -> None:
    assert_same(operands(2, 4, 2, 50, 50, d, d_v), band(50, 50, None, 0), implementation, causal=True)


@both
@pytest.mark.parametrize("shape", [(70, 70), (2, 1, 70, 70), (1, 4, 70, 70), (4, 70, 70), (2, 1, 1, 70), (70, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_masks(implementation: str, shape: tuple[int, ...], causal: bool) -> None:
    hidden = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.6
    visible = ~hidden & band(70, 70, None, 0 if causal else None)
    case = operands(2, 4, 2, 70, 70, 16)
    assert_same(case, visible, implementation, causal=causal, mask=hidden)
    additive = torch.zeros(shape, dtype=torch.float64).masked_fill(hidden, -INFINITY)
    assert_same(case, visible, implementation, causal=causal, mask=additive)
    if shape[-1] == shape[-2]:
        turned = additive.mT.contiguous().mT
        assert_same(case, visible, implementation, causal=causal, mask=turned)


@both
@pytest.mark.parametrize(
    ("dtype", "mask_dtype", "tolerance"),
    [
        (torch.bfloat16, torch.float32, 2e-2),
        (torch.float16, torch.bfloat16, 3e-3),
        (torch.float32, torch.bfloat16, 2e-5),
        (torch.float32, torch.float64, 2e-5),
        (torch.float64, torch.float32, 1e-12),
    ],
)
def test_a_mask_of_another_dtype(
    implementation: str, dtype: torch.dtype, mask_dtype: torch.dtype, tolerance: float
) -> None:
    """A large bias: rounded to bfloat16 it would move scores by up to 0.25."""
    bias = (70 * torch.rand(1, 2, 60, 60, generator=torch.Generator().manual_seed(4))).to(mask_dtype)
    q, k, v, d_out = operands(1, 2, 2, 60, 60, 8, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected, _ = formula(exact[0], exact[1], exact[2], bias.double().exp(), 8**-0.5)
    got, _ = attention(q, k, v, mask=bias, implementation=implementation)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance)
    for ours, theirs in zip(
        torch.autograd.grad(got, (q, k, v), d_out), torch.autograd.grad(expected, exact, d_out.double()), strict=True
    ):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=10 * tolerance)


@both
def test_rows_that_are_not_contiguous(implementation: str) -> None:
    """Elements of a head that are not neighbours in memory; a long sequence, as the kernel works in blocks."""
    case = operands(1, 4, 2, 600, 600, 16)
    q, k, v, d_out = (x.detach().mT.contiguous().mT for x in case)
    strided = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), d_out)
    assert q.stride(3) != 1
    assert_same(strided, band(600, 600, None, 0), implementation, causal=True)


@both
def test_finite_bias(implementation: str) -> None:
    """ALiBi-like: exp(score + bias) is exp(score) times exp(bias)."""
    bias = torch.randn(1, 4, 40, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert_same(
        operands(2, 4, 2, 40, 40, 8), bias.exp() * band(40, 40, None, 0), implementation, causal=True, mask=bias
    )


def test_a_bias_that_wants_a_gradient_is_refused() -> None:
    q, k, v, _ = operands(1, 2, 2, 8, 8, 8)
    with pytest.raises(ValueError, match="gradient"):
        attention(q, k, v, mask=torch.zeros(8, 8, dtype=torch.float64, requires_grad=True))


@both
def test_rows_that_see_nothing(implementation: str) -> None:
    """out 0, lse -inf, finite gradients, also with a sink (where the sink is all that is left)."""
    hidden = torch.zeros(90, 90, dtype=torch.bool)
    hidden[:7] = True
    hidden[50] = True
    case = operands(2, 4, 2, 90, 90, 16)
    assert_same(case, ~hidden, implementation, mask=hidden)
    q, k, v, _ = case
    out, lse = attention(q, k, v, mask=hidden, implementation=implementation)
    assert (out[:, :, hidden.all(1)] == 0).all()
    assert (lse[:, :, hidden.all(1)] == -INFINITY).all()
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert_same(case, ~hidden, implementation, mask=hidden, sinks=sinks)


@both
@pytest.mark.parametrize("window", [(0, 0), (5, 0), (3, 4), (-1, 2), (6, -1), (59, 59), (60, 60), (200, 0), (-1, -1)])
@pytest.mark.parametrize("causal", [True, False])
def test_windows(implementation: str, window: tuple[int, int], causal: bool) -> None:
    left, right = (None if side < 0 else side for side in window)
    right = 0 if causal else right
    for sq, sk in ((61, 61), (20, 61)):
        case = operands(1, 4, 2, sq, sk, 8)
        assert_same(case, band(sq, sk, left, right), implementation, causal=causal, window=window)


@pytest.mark.parametrize(("sq", "sk", "window"), [(900, 900, (100, 0)), (900, 900, (30, 17)), (600, 900, (257, 0))])
def test_windows_cut_into_tiles(sq: int, sk: int, window: tuple[int, int]) -> None:
    case = operands(1, 2, 1, sq, sk, 4)
    visible = band(sq, sk, *window)
    assert_same(case, visible, "flash_cpu", window=window)
    hidden = torch.rand(1, 1, sq, sk, generator=torch.Generator().manual_seed(3)) < 0.9
    assert_same(case, visible & ~hidden, "flash_cpu", window=window, mask=hidden)


@both
@pytest.mark.parametrize("window", [None, (9, 0)])
def test_packed_documents_are_separate_calls(implementation: str, window: tuple[int, int] | None) -> None:
    bounds = [0, 1, 30, 30, 64, 90]
    visible = torch.zeros(90, 90, dtype=torch.bool)
    for start, stop in itertools.pairwise(bounds):
        size = stop - start
        visible[start:stop, start:stop] = band(size, size, window[0] if window else None, 0)
    case = operands(2, 4, 2, 90, 90, 8)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    call: dict[str, Any] = {"causal": True, "window": window}
    assert_same(case, visible, implementation, cu_seqlens_q=bounds, **call)
    assert_same(case, visible, implementation, cu_seqlens_q=torch.tensor(bounds), sinks=sinks, **call)


@both
def test_packed_queries_and_keys_of_different_lengths(implementation: str) -> None:
    queries, keys = [0, 10, 10, 25, 32], [0, 20, 33, 33, 40]
    visible = torch.zeros(32, 40, dtype=torch.bool)
    for i in range(4):
        sq, sk = queries[i + 1] - queries[i], keys[i + 1] - keys[i]
        visible[queries[i] : queries[i + 1], keys[i] : keys[i + 1]] = band(sq, sk, None, 0)
    case = operands(1, 4, 2, 32, 40, 8)
    assert_same(case, visible, implementation, causal=True, cu_seqlens_q=queries, cu_seqlens_kv=keys)


@pytest.mark.parametrize("bounds", [[0, 5], [1, 8], [0, 6, 4, 8], []])
def test_bounds_that_do_not_cover_the_tokens_are_refused(bounds: list[int]) -> None:
    q, k, v, _ = operands(1, 2, 2, 8, 8, 8)
    with pytest.raises(ValueError, match="cu_seqlens"):
        attention(q, k, v, cu_seqlens_q=bounds)


@both
def test_sinks(implementation: str) -> None:
    sinks = torch.tensor([0.0, 3.0, -2.0, 0.5], dtype=torch.float64, requires_grad=True)
    assert_same(operands(2, 4, 2, 45, 45, 8), band(45, 45, None, 0), implementation, causal=True, sinks=sinks)


def test_sinks_as_gpt_oss() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    q, k, v, d_out = operands(2, 8, 2, 40, 40, 16)
    sinks = torch.linspace(-2, 2, 8, dtype=torch.float64).requires_grad_()
    mask = torch.zeros(40, 40, dtype=torch.float64).masked_fill(~band(40, 40, 11, 0), -INFINITY)
    module = SimpleNamespace(num_key_value_groups=4, sinks=sinks, training=False)
    theirs, _ = eager_attention_forward(module, q, k, v, mask, scaling=0.25)  # pyright: ignore[reportArgumentType]
    theirs_grad = torch.autograd.grad(theirs, (q, k, v, sinks), d_out.transpose(1, 2))
    ours, _ = attention(q, k, v, causal=True, window=(11, 0), sinks=sinks)
    ours_grad = torch.autograd.grad(ours, (q, k, v, sinks), d_out)
    for a, b in zip((ours.transpose(1, 2), *ours_grad), (theirs, *theirs_grad), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_softcap() -> None:
    assert_same(
        operands(2, 4, 2, 45, 45, 8), band(45, 45, 20, 0), "reference", causal=True, window=(20, 0), softcap=1.5
    )


def test_softcap_as_gemma2() -> None:
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    q, k, v, d_out = operands(2, 4, 2, 40, 40, 16, dtype=torch.float32)
    mask = torch.zeros(40, 40).masked_fill(~band(40, 40, None, 0), -INFINITY)
    module = SimpleNamespace(num_key_value_groups=2, training=False)
    theirs, _ = eager_attention_forward(module, q, k, v, mask, scaling=0.3, softcap=2.0)  # pyright: ignore[reportArgumentType]
    theirs_grad = torch.autograd.grad(theirs, (q, k, v), d_out.transpose(1, 2))
    ours, _ = attention(q, k, v, causal=True, scale=0.3, softcap=2.0)
    ours_grad = torch.autograd.grad(ours, (q, k, v), d_out)
    for a, b in zip((ours.transpose(1, 2), *ours_grad), (theirs, *theirs_grad), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_further_from_float64_than_torch(dtype: torch.dtype) -> None:
    """Per dtype, the RMS error of the output and of each gradient is at most 1.25x torch SDPA's own."""
    exact = [x.detach().double().requires_grad_() for x in operands(2, 6, 2, 300, 300, 32, dtype=dtype)]
    q, k, v, d_out = exact
    expected, expected_lse = formula(q, k, v, band(300, 300, None, 0), 32**-0.5)
    expected_all = (expected, *torch.autograd.grad(expected, (q, k, v), d_out))
    q, k, v, d_out = (x.detach().to(dtype).requires_grad_() for x in exact)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    theirs_all = (theirs, *torch.autograd.grad(theirs, (q, k, v), d_out))
    for implementation in ("flash_cpu", "reference"):
        ours, lse = attention(q, k, v, causal=True, implementation=implementation)
        assert lse.dtype == torch.float32
        # torch's half-precision kernel takes a fast exponential.
        fast = implementation == "flash_cpu" and dtype != torch.float32
        torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=2e-4 if fast else 3e-6)
        ours_all = (ours, *torch.autograd.grad(ours, (q, k, v), d_out))
        for a, b, c in zip(ours_all, theirs_all, expected_all, strict=True):
            assert a.dtype == dtype
            assert (a.double() - c).norm() <= 1.25 * (b.double() - c).norm()


@both
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_ring_of_two_key_slices(implementation: str, dtype: torch.dtype, tolerance: float, with_sinks: bool) -> None:
    """Two slices of the keys, merged by log-sum-exp; backward of each from the merged result."""
    s, half = 120, 60
    q, k, v, d_out = (x.detach().to(dtype) for x in operands(2, 4, 2, s, s, 16))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    sinks = torch.linspace(-1, 2, 4, dtype=torch.float64).requires_grad_() if with_sinks else None
    expected, expected_lse = formula(exact[0], exact[1], exact[2], band(s, s, None, 0), 0.25, sinks)
    wanted = exact if sinks is None else [*exact, sinks]
    expected_grad = torch.autograd.grad(expected, wanted, d_out.double())
    # Seen from the first slice, its queries are causal and the second half sees all; the second slice's keys are hidden
    # from the first half of the queries: rows that see nothing in one slice and something in the other.
    calls = [
        (k[:, :, :half], v[:, :, :half], ~band(s, s, None, 0)[:, :half]),
        (k[:, :, half:], v[:, :, half:], ~band(s, s, None, 0)[:, half:]),
    ]
    parts = [attention(q, a, b, mask=mask, implementation=implementation) for a, b, mask in calls]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.detach().to(dtype)[None, :, None])
    out = sum((part * (part_lse - lse).exp().unsqueeze(-1) for part, part_lse in parts), torch.zeros_like(q))
    gradients = [
        attention_backward(
            d_out,
            q,
            a,
            b,
            out,
            lse,
            mask=mask,
            sinks=sinks.detach().to(dtype) if sinks is not None and number == 0 else None,
            implementation=implementation,
        )
        for number, (a, b, mask) in enumerate(calls)
    ]
    dq = gradients[0][0] + gradients[1][0]
    dk = torch.cat((gradients[0][1], gradients[1][1]), 2)
    dv = torch.cat((gradients[0][2], gradients[1][2]), 2)
    got = [dq, dk, dv] if sinks is None else [dq, dk, dv, gradients[0][3]]
    assert gradients[1][3] is None
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=tolerance)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)
    for ours, theirs in zip(got, expected_grad, strict=True):
        assert ours is not None
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=10 * tolerance)


def test_backward_from_given_results_of_packed_documents() -> None:
    q, k, v, d_out = operands(1, 4, 2, 50, 50, 8)
    call: dict[str, Any] = {"causal": True, "cu_seqlens_q": [0, 20, 50], "window": (7, 0)}
    out, lse = attention(q, k, v, **call)
    with torch.no_grad():
        got = attention_backward(d_out, q, k, v, out, lse, **call)
    for ours, theirs in zip(got[:3], torch.autograd.grad(out, (q, k, v), d_out), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("cu_seqlens", [None, [0, 30, 80]])
def test_dropout_is_an_unbiased_mask_on_the_weights(cu_seqlens: list[int] | None) -> None:
    """With v the identity the output *is* the weights: each is dropped or scaled by 1 / (1 - p)."""
    q, k, _, _ = operands(8, 4, 4, 80, 80, 8)
    v = torch.eye(80, dtype=torch.float64).expand(8, 4, 80, 80)
    torch.manual_seed(5)
    whole, _ = attention(q, k, v, causal=True, cu_seqlens_q=cu_seqlens)
    dropped, _ = attention(q, k, v, causal=True, cu_seqlens_q=cu_seqlens, dropout_p=0.3)
    visible = whole > 0
    kept = dropped[visible] > 0
    torch.testing.assert_close(dropped[visible][kept], (whole / 0.7)[visible][kept])
    count = int(visible.sum())
    assert abs(kept.double().mean().item() - 0.7) < 5 * (0.3 * 0.7 / count) ** 0.5
    again, _ = attention(q, k, v, causal=True, cu_seqlens_q=cu_seqlens, dropout_p=0.3)
    assert not torch.equal(again, dropped)
    torch.manual_seed(5)
    repeated, _ = attention(q, k, v, causal=True, cu_seqlens_q=cu_seqlens, dropout_p=0.3)
    assert torch.equal(repeated, dropped)


def test_gradient_through_dropout() -> None:
    """Finite differences of a function whose mask is fixed by the seed."""
    q, k, v, _ = operands(1, 4, 2, 7, 7, 3)

    def fixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(1)
        return attention(q, k, v, causal=True, dropout_p=0.4, softcap=2.0)[0]

    assert torch.autograd.gradcheck(fixed, (q, k, v))


def test_output_is_in_megatron_order_without_a_copy() -> None:
    q, k, v, _ = operands(2, 4, 2, 40, 40, 16, dtype=torch.bfloat16)
    calls: list[dict[str, Any]] = [{}, {"cu_seqlens_q": [0, 40]}, {"window": (3, 0)}]
    for call in calls:
        out, _ = attention(q, k, v, causal=True, **call)
        assert out.permute(2, 0, 1, 3).is_contiguous()


def test_a_gradient_without_layout() -> None:
    """``out.sum().backward()`` gives a gradient of stride 0."""
    q, k, v, _ = operands(1, 2, 2, 40, 40, 16)
    out, _ = attention(q, k, v, causal=True)
    expected, _ = formula(q, k, v, band(40, 40, None, 0), 0.25)
    for ours, theirs in zip(
        torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_which_implementation_runs() -> None:
    def name(device: str, softcap: bool = False, dropout: bool = False) -> str:
        return choose_implementation(device, softcap=softcap, dropout=dropout).name

    assert name("cpu") == "flash_cpu"
    assert name("cpu", softcap=True) == name("cpu", dropout=True) == name("cuda") == name("npu") == "reference"
    q, k, v, _ = operands(1, 2, 2, 8, 8, 8)
    with pytest.raises(OpUnavailableError, match="flash_cpu"):
        attention(q, k, v, softcap=3.0, implementation="flash_cpu")
    with pytest.raises(OpUnavailableError, match="reference"):
        attention(q, k, v, implementation="no such")
