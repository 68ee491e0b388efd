"""One core attention for all: causal, masked, packed, windowed, with sinks or soft-capping, any grouping of KV heads.

:func:`attention` and :func:`attention_backward` are the functional core; both speak in log-sum-exp, so that partial
results over slices of the keys can be merged and differentiated (ring context parallelism). :class:`CoreAttention` is
the module for megatron-core's layer specs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_llm.core.transformer import attention_reference, flash_cpu
from mindspeed_llm.core.transformer.attention_scores import (
    ScoreRule,
    accumulate_dtype,
    alibi_slopes,
    sequence_first,
    sink_gradient,
)
from mindspeed_llm.core.transformer.config import SuiteTransformerConfig
from mindspeed_llm.errors import ConfigError, OpUnavailableError

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint

# The (query, key) slices of each document of a packed batch; None for a batch that is not packed.
Documents = list[tuple[slice, slice]]


@dataclass(frozen=True)
class AttentionImplementation:
    """One row of :data:`IMPLEMENTATIONS`: who can compute what, where.

    Attributes:
        name: what the caller can ask for.
        devices: torch device types it runs on; None for all.
        softcap: it can soft-cap scores.
        dropout: it can drop probabilities.
        forward: as :func:`attention_reference.forward`.
        backward: as :func:`attention_reference.backward`.
    """

    name: str
    devices: frozenset[str] | None
    softcap: bool
    dropout: bool
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]

    def can_run(self, device: str, *, softcap: bool, dropout: bool) -> bool:
        """Whether it answers such a call."""
        on_device = self.devices is None or device in self.devices
        return on_device and (self.softcap or not softcap) and (self.dropout or not dropout)


# The first row that can run does. CUDA and NPU have no row of their own yet and run the reference: unchecked there.
IMPLEMENTATIONS = (
    AttentionImplementation("flash_cpu", frozenset({"cpu"}), False, False, flash_cpu.forward, flash_cpu.backward),
    AttentionImplementation("reference", None, True, True, attention_reference.forward, attention_reference.backward),
)


def choose_implementation(
    device: str, *, softcap: bool, dropout: bool, name: str | None = None
) -> AttentionImplementation:
    """The row of :data:`IMPLEMENTATIONS` that a call on ``device`` runs.

    Raises:
        OpUnavailableError: the row asked for by ``name`` does not exist or cannot do it.
    """
    for row in IMPLEMENTATIONS:
        if name in (None, row.name) and row.can_run(device, softcap=softcap, dropout=dropout):
            return row
    raise OpUnavailableError(
        "no such attention implementation for this call",
        got=f"{name} on {device}, softcap={softcap}, dropout={dropout}",
        allowed=[row.name for row in IMPLEMENTATIONS],
    )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    cu_seqlens_q: Tensor | Sequence[int] | None = None,
    cu_seqlens_kv: Tensor | Sequence[int] | None = None,
    window: tuple[int, int] | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention with its log-sum-exp, differentiable in ``q``, ``k``, ``v`` and ``sinks`` (not in ``mask``).

    Args:
        q: ``[b, n, sq, d]``; any strides, a permuted ``[s, b, n, d]`` is not copied and the output has its layout.
        k: ``[b, n_kv, sk, d]``, ``n`` a multiple of ``n_kv``.
        v: ``[b, n_kv, sk, d_v]``.
        causal, window, mask, softcap, slopes: see :class:`ScoreRule`.
        cu_seqlens_q, cu_seqlens_kv: for packed documents, the bounds ``0 = c_0 <= c_1 <= ... <= sq`` (``sk``) of each;
            a query sees only the keys of its own document, and causality and window count from that document.
            ``cu_seqlens_kv`` defaults to ``cu_seqlens_q``.
        sinks: ``[n]``, one learnt extra term ``exp(sink)`` in each head's softmax denominator; zeros: off-by-one.
        scale: factor on ``q . k``, by default ``d ** -0.5``.
        dropout_p: probability that an attention weight is dropped, drawn from the device's current generator.
        implementation: a row of :data:`IMPLEMENTATIONS` by name, by default the first that can run.

    Returns:
        ``out [b, n, sq, d_v]`` in q's dtype, and ``lse [b, n, sq]`` float32 (float64 for float64 operands): the natural
        logarithm of the softmax denominator, sinks included; it carries no gradient. A query that sees nothing gives
        ``out`` 0 and ``lse`` minus infinity.

    Raises:
        ValueError: shapes or bounds that do not fit together.
        OpUnavailableError: see :func:`choose_implementation`.
    """
    rule = _rule(q, k, causal=causal, mask=mask, window=window, softcap=softcap, scale=scale, slopes=slopes)
    documents = _documents(cu_seqlens_q, cu_seqlens_kv, q, k, mask)
    row = choose_implementation(q.device.type, softcap=softcap is not None, dropout=dropout_p > 0, name=implementation)
    keeps = _draw_keeps(q, k, documents, dropout_p) if dropout_p > 0 else None
    return _Attention.apply(q, k, v, sinks, rule, documents, keeps, dropout_p, row)


def attention_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    cu_seqlens_q: Tensor | Sequence[int] | None = None,
    cu_seqlens_kv: Tensor | Sequence[int] | None = None,
    window: tuple[int, int] | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    slopes: Tensor | None = None,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients from a given ``out`` and ``lse``, without dropout.

    They need not be those of these keys alone: with ``out`` and ``lse`` merged over all slices of the keys, ``dk`` and
    ``dv`` are the whole gradient of this slice, and the ``dq`` of the slices add up.

    Args:
        d_out: ``[b, n, sq, d_v]``; the others as :func:`attention`.
        sinks: give it in one slice's call only; ``out`` and ``lse`` include it in every call.

    Returns:
        ``dq, dk, dv``, and ``dsinks`` (None without ``sinks``).
    """
    rule = _rule(q, k, causal=causal, mask=mask, window=window, softcap=softcap, scale=scale, slopes=slopes)
    documents = _documents(cu_seqlens_q, cu_seqlens_kv, q, k, mask)
    row = choose_implementation(q.device.type, softcap=softcap is not None, dropout=False, name=implementation)
    dq, dk, dv = _run_backward(row, d_out, q, k, v, out, lse, rule, documents, None, 0.0)
    return dq, dk, dv, None if sinks is None else sink_gradient(d_out, out, lse, sinks)


class _Attention(torch.autograd.Function):
    """Keeps q, k, v, out and lse: what backward recomputes from."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        rule: ScoreRule,
        documents: Documents | None,
        keeps: list[Tensor] | None,
        dropout_p: float,
        row: AttentionImplementation,
    ) -> tuple[Tensor, Tensor]:
        out, lse = _run_forward(row, q, k, v, rule, sinks, documents, keeps, dropout_p)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.call = (row, rule, documents, keeps, dropout_p)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, _d_lse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        row, rule, documents, keeps, dropout_p = ctx.call
        dq, dk, dv = _run_backward(row, d_out, q, k, v, out, lse, rule, documents, keeps, dropout_p)
        d_sinks = sink_gradient(d_out, out, lse, sinks) if sinks is not None and ctx.needs_input_grad[3] else None
        return dq, dk, dv, d_sinks, None, None, None, None, None


def _run_forward(
    row: AttentionImplementation,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: ScoreRule,
    sinks: Tensor | None,
    documents: Documents | None,
    keeps: list[Tensor] | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    if documents is None:
        return row.forward(q, k, v, rule, sinks, keeps[0] if keeps else None, dropout_p)
    out = sequence_first(q, v.shape[3])
    lse = torch.empty(q.shape[:3], dtype=accumulate_dtype(q.dtype), device=q.device)
    for number, (rows, columns) in enumerate(documents):
        keep = keeps[number] if keeps else None
        out[:, :, rows], lse[:, :, rows] = row.forward(
            q[:, :, rows], k[:, :, columns], v[:, :, columns], rule, sinks, keep, dropout_p
        )
    return out, lse


def _run_backward(
    row: AttentionImplementation,
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rule: ScoreRule,
    documents: Documents | None,
    keeps: list[Tensor] | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if documents is None:
        return row.backward(d_out, q, k, v, out, lse, rule, keeps[0] if keeps else None, dropout_p)
    dq, dk, dv = (sequence_first(x, x.shape[3]) for x in (q, k, v))
    for number, (rows, columns) in enumerate(documents):
        dq[:, :, rows], dk[:, :, columns], dv[:, :, columns] = row.backward(
            d_out[:, :, rows],
            q[:, :, rows],
            k[:, :, columns],
            v[:, :, columns],
            out[:, :, rows],
            lse[:, :, rows],
            rule,
            keeps[number] if keeps else None,
            dropout_p,
        )
    return dq, dk, dv


def _rule(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool,
    mask: Tensor | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    scale: float | None,
    slopes: Tensor | None,
) -> ScoreRule:
    if q.dim() != 4 or k.dim() != 4 or q.shape[1] % k.shape[1] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q [b, n, sq, d] and k [b, n_kv, sk, d] do not fit: {tuple(q.shape)} and {tuple(k.shape)}")
    if mask is not None and mask.requires_grad:
        raise ValueError("an attention mask or bias that requires a gradient would silently get none")
    factor = q.shape[3] ** -0.5 if scale is None else scale
    return ScoreRule(scale=factor, softcap=softcap, causal=causal, window=window, mask=mask, slopes=slopes)


def _documents(
    cu_seqlens_q: Tensor | Sequence[int] | None,
    cu_seqlens_kv: Tensor | Sequence[int] | None,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
) -> Documents | None:
    if cu_seqlens_q is None:
        return None
    if mask is not None:
        raise ValueError("a mask and cu_seqlens cannot be given together")
    query_bounds = _bounds(cu_seqlens_q, q.shape[2])
    key_bounds = _bounds(cu_seqlens_q if cu_seqlens_kv is None else cu_seqlens_kv, k.shape[2])
    if len(query_bounds) != len(key_bounds):
        raise ValueError(f"{len(query_bounds) - 1} documents of queries, {len(key_bounds) - 1} of keys")
    spans = zip(query_bounds, query_bounds[1:], key_bounds, key_bounds[1:], strict=False)
    return [(slice(q0, q1), slice(k0, k1)) for q0, q1, k0, k1 in spans if q0 < q1 or k0 < k1]


def _bounds(cu_seqlens: Tensor | Sequence[int], length: int) -> list[int]:
    bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    if bounds[:1] != [0] or bounds[-1] != length or bounds != sorted(bounds):
        raise ValueError(f"cu_seqlens must rise from 0 to the number of tokens {length}, not {bounds}")
    return bounds


def _draw_keeps(q: Tensor, k: Tensor, documents: Documents | None, dropout_p: float) -> list[Tensor]:
    """Boolean ``[b, n, sq, sk]`` per document (one for a batch that is not packed): the weights that stay."""
    whole = [(slice(0, q.shape[2]), slice(0, k.shape[2]))]
    return [
        torch.empty(
            *q.shape[:2], rows.stop - rows.start, columns.stop - columns.start, dtype=torch.bool, device=q.device
        ).bernoulli_(1 - dropout_p)
        for rows, columns in documents or whole
    ]


_CAUSAL_TYPES = frozenset({AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right})


class CoreAttention(MegatronModule):
    """``core_attention`` of megatron-core's self-, cross- and multi-latent attention.

    Args:
        config: reads ``attention_dropout``, ``window_size`` with ``window_attn_skip_freq``, ``softmax_type`` and our
            ``attn_logit_softcapping`` and ``alibi``. ``apply_query_key_layer_scaling`` divides and multiplies by the
            layer's number around a half-precision product; scores are float32 here, so the two cancel and nothing is
            done.
        layer_number: counted from 1.
        attn_mask_type: what :meth:`forward` takes when it is not told.
        attention_type: unused, as in megatron-core.
        softmax_scale: by default the inverse root of the key's head size.
        k_channels, v_channels: unused, the tensors say it themselves.
        cp_comm_type: unused without context parallelism.

    Raises:
        ConfigError: context parallelism, which has core attentions of its own.
    """

    def __init__(
        self,
        config: SuiteTransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        del attention_type, k_channels, v_channels, cp_comm_type
        if config.context_parallel_size > 1:
            raise ConfigError(
                "this core attention works on whole sequences",
                got=f"--context-parallel-size {config.context_parallel_size}",
                allowed=1,
            )
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
        self.tp_group = pg_collection.tp
        self.softmax_scale = softmax_scale
        self.softcap = config.attn_logit_softcapping
        self.dropout_p = config.attention_dropout if attention_dropout is None else attention_dropout
        self.window = layer_window(config, layer_number)
        self.slopes: Tensor | None
        self.register_buffer("slopes", self._my_slopes(config), persistent=False)
        self._make_sinks(config)

    def _my_slopes(self, config: SuiteTransformerConfig) -> Tensor | None:
        if not config.alibi:
            return None
        return alibi_slopes(config.num_attention_heads).chunk(self.tp_group.size())[self.tp_group.rank()]

    def _make_sinks(self, config: SuiteTransformerConfig) -> None:
        self.softmax_offset: Tensor | None
        heads = config.num_attention_heads // self.tp_group.size()
        if config.softmax_type == "vanilla":
            self.softmax_offset = None
        elif config.softmax_type == "off-by-one":
            self.register_buffer("softmax_offset", torch.zeros(heads, dtype=config.params_dtype), persistent=False)
        else:
            parameter = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            # Without the mark the grad norm counts the sinks of the first tensor-parallel rank only.
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
            if config.perform_initialization and config.init_method is not None:
                with _model_parallel_rng():
                    config.init_method(parameter)
            self.softmax_offset = parameter

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: ``[s, b, n, d]``; packed: ``[t, n, d]``.
            key: ``[s, b, n_kv, d]``; packed: ``[t, n_kv, d]``.
            value: ``[s, b, n_kv, d_v]``; packed: ``[t, n_kv, d_v]``.
            attention_mask: boolean, True hides, broadcastable to ``[b, n, sq, sk]``; it applies besides the mask type's
                causality. Pass None when causality says it all: that is the fast path. Ignored for packed batches,
                whose bounds say it.
            attn_mask_type: by default the constructor's.
            attention_bias: added to the scores, broadcastable to ``[b, n, sq, sk]``; gets no gradient.
            packed_seq_params: the bounds of packed documents, ``qkv_format`` ``"thd"``.

        Returns:
            ``[s, b, n * d_v]``; packed: ``[t, n * d_v]``.
        """
        causal = (attn_mask_type or self.attn_mask_type) in _CAUSAL_TYPES
        dropout_p = self.dropout_p if self.training else 0.0
        # With sequence parallelism the whole layer already runs inside the fork (TransformerBlock.forward).
        fork = dropout_p > 0 and not self.config.sequence_parallel
        with _model_parallel_rng() if fork else contextlib.nullcontext():
            if packed_seq_params is not None:
                bounds_q, bounds_kv = _packed_bounds(packed_seq_params, query.shape[0], key.shape[0])
                out, _ = attention(
                    *(x.transpose(0, 1).unsqueeze(0) for x in (query, key, value)),
                    causal=causal,
                    cu_seqlens_q=bounds_q,
                    cu_seqlens_kv=bounds_kv,
                    window=self.window,
                    sinks=self.softmax_offset,
                    softcap=self.softcap,
                    scale=self.softmax_scale,
                    slopes=self.slopes,
                    dropout_p=dropout_p,
                )
                return out.squeeze(0).transpose(0, 1).reshape(query.shape[0], -1)
            out, _ = attention(
                *(x.permute(1, 2, 0, 3) for x in (query, key, value)),
                causal=causal,
                mask=_joined_mask(attention_mask, attention_bias),
                window=self.window,
                sinks=self.softmax_offset,
                softcap=self.softcap,
                scale=self.softmax_scale,
                slopes=self.slopes,
                dropout_p=dropout_p,
            )
        return out.permute(2, 0, 1, 3).flatten(2)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The learnt sinks, sharded over tensor-parallel ranks; nothing otherwise."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


def _model_parallel_rng() -> contextlib.AbstractContextManager[None]:
    """Draws that differ between tensor-parallel ranks."""
    return cast(CudaRNGStatesTracker, get_cuda_rng_tracker()).fork()


def layer_window(config: SuiteTransformerConfig, layer_number: int) -> tuple[int, int] | None:
    """The layer's ``(left, right)`` window; None for a layer that attends everywhere."""
    if config.window_size is None:
        return None
    skip = config.window_attn_skip_freq
    if skip is not None and not is_layer_window_attention(config.window_size, skip, layer_number):
        return None
    left, right = config.window_size
    return left, right


def _joined_mask(attention_mask: Tensor | None, attention_bias: Tensor | None) -> Tensor | None:
    if attention_mask is None or attention_bias is None:
        return attention_mask if attention_bias is None else attention_bias
    return attention_bias.masked_fill(attention_mask, float("-inf"))


def _packed_bounds(packed: PackedSeqParams, queries: int, keys: int) -> tuple[list[int], list[int]]:
    """Document bounds of queries and keys; the padding behind each document becomes a document of its own."""
    if packed.qkv_format != "thd" or packed.cu_seqlens_q is None:
        raise ValueError(f"packed sequences come as qkv_format 'thd' with cu_seqlens_q, not {packed.qkv_format!r}")
    cu_kv = packed.cu_seqlens_kv if packed.cu_seqlens_kv is not None else packed.cu_seqlens_q
    query_bounds = _with_padding(packed.cu_seqlens_q.tolist(), packed.cu_seqlens_q_padded, queries)
    padded_kv = packed.cu_seqlens_kv_padded
    key_bounds = _with_padding(cu_kv.tolist(), padded_kv if padded_kv is not None else packed.cu_seqlens_q_padded, keys)
    return query_bounds, key_bounds


def _with_padding(bounds: list[int], padded: Tensor | None, length: int) -> list[int]:
    """``[start, end, start, end, ...]`` of documents and the padding behind them."""
    starts = bounds[:-1] if padded is None else padded.tolist()[:-1]
    ends = [start + bounds[i + 1] - bounds[i] for i, start in enumerate(starts)]
    return [*(edge for span in zip(starts, ends, strict=True) for edge in span), length]
