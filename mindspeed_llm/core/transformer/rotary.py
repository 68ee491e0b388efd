"""Rotary frequencies of every scaling scheme that Hugging Face configurations name."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch

from mindspeed_llm.core.transformer.config import SuiteTransformerConfig

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding


def inverse_frequencies(config: SuiteTransformerConfig, dim: int, base: float, seq_length: int) -> torch.Tensor:
    """The angle per position of each pair of dimensions.

    Args:
        config: gives the scaling scheme and its constants.
        dim: rotated dimensions of a head.
        base: theta.
        seq_length: tokens in the sequence; ``dynamic`` and ``longrope`` look at it.

    Returns:
        ``[dim / 2]`` float32.

    Formulas: plain [Su et al. 2021]; linear [Chen et al. 2023]; dynamic NTK and yarn [Peng et al. 2023]; longrope [Ding
    et al. 2024]; llama3 as in Meta's llama-models ``apply_scaling``.
    """
    scheme = config.rope_scaling_type
    factor = config.rope_scaling_factor
    if scheme == "dynamic":
        trained = config.rope_scaling_original_max_position_embeddings
        stretch = factor * max(seq_length, trained) / trained - (factor - 1)
        base = base * stretch ** (dim / (dim - 2))
    plain = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if scheme == "linear":
        return plain / factor
    if scheme == "longrope":
        beyond = seq_length > config.rope_scaling_original_max_position_embeddings
        return plain / torch.tensor(config.long_factor if beyond else config.short_factor, dtype=torch.float32)
    if scheme == "llama3":
        return _llama3(config, plain)
    if scheme == "yarn":
        return _yarn(config, plain, dim, base)
    return plain


def _llama3(config: SuiteTransformerConfig, plain: torch.Tensor) -> torch.Tensor:
    trained = config.rope_scaling_original_max_position_embeddings
    low, high = config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor
    wavelength = 2 * math.pi / plain
    smooth = ((trained / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * plain / config.rope_scaling_factor + smooth * plain


def _yarn(config: SuiteTransformerConfig, plain: torch.Tensor, dim: int, base: float) -> torch.Tensor:
    trained = config.rope_scaling_original_max_position_embeddings

    def dimension_of(rotations: float) -> float:
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension_of(config.rope_scaling_beta_fast), dimension_of(config.rope_scaling_beta_slow)
    if config.rope_scaling_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / config.rope_scaling_factor * ramp + plain * (1 - ramp)


LOCAL = 1
"""Where in the angles of :class:`ScaledRotaryEmbedding` those of layers with a window stand, beside all others'."""


class ScaledRotaryEmbedding(RotaryEmbedding):
    """megatron-core's rotary embedding with the frequencies of :func:`inverse_frequencies`.

    A model whose windowed layers turn at another theta (``rotary_base_local``) gets two kinds of angles in one tensor,
    of which each layer's attention takes its own.
    """

    def __init__(
        self, config: SuiteTransformerConfig, rotary_percent: float, rotary_base: float, cp_group: Any
    ) -> None:
        super().__init__(
            kv_channels=config.qk_pos_emb_head_dim if config.kv_lora_rank else config.kv_channels,  # pyright: ignore
            rotary_percent=rotary_percent,
            rotary_interleaved=config.rotary_interleaved,
            rotary_base=rotary_base,  # pyright: ignore[reportArgumentType]  Hugging Face writes 10000.0
            use_cpu_initialization=config.use_cpu_initialization,
            cp_group=cp_group,
        )
        self.suite_config = config
        self.rotary_base = rotary_base
        self.dim = 2 * self.inv_freq.numel()
        self._angles: dict[tuple[Any, ...], torch.Tensor] = {}
        self.local: ScaledRotaryEmbedding | None = None
        if config.rotary_base_local is not None:
            plain = copy.copy(config)
            plain.rotary_base_local = plain.rope_scaling_type = None
            self.local = ScaledRotaryEmbedding(plain, rotary_percent, config.rotary_base_local, cp_group)

    def get_emb(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """Angles ``[max_seq_len, 1, 1, dim]`` of the positions from ``offset`` on."""
        frequencies = inverse_frequencies(self.suite_config, self.dim, self.rotary_base, offset + max_seq_len)
        self.inv_freq = frequencies.to(self.inv_freq.device)
        return super().get_emb(max_seq_len, offset)

    def forward(
        self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None
    ) -> torch.Tensor:
        """Angles ``[s, 1, 1, dim]``, or ``[2, s, 1, 1, dim]`` with those of windowed layers last; kept from call to
        call.

        megatron-core caches on the class, which keeps every model and process group of the process alive.
        """
        key = (max_seq_len, offset, packed_seq, cp_group)
        if key not in self._angles:
            uncached = RotaryEmbedding.forward.__wrapped__  # type: ignore[attr-defined]
            angles = uncached(self, max_seq_len, offset, packed_seq, cp_group)
            if self.local is not None:
                angles = torch.stack([angles, self.local(max_seq_len, offset, packed_seq, cp_group)])
            self._angles[key] = angles
        return self._angles[key]
