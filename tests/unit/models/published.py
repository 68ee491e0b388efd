"""What is published about the models that ``--hf-config NAME`` knows, and what transformers makes of them."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from mindspeed_llm.checkpoint.convert.record import shortened
from mindspeed_llm.config.layers import layers_of_experts
from mindspeed_llm.models.registry import CONFIG, family_for, packaged_configs
from tests.oracles import ORACLES

Shapes = Mapping[str, tuple[int, ...]]


class Facts(NamedTuple):
    """Size, and what the sizes of the weights do not tell.

    Attributes:
        parameters: of the model card, or of the model's page.
        epsilon: of the norms.
        theta: base of the rotary positions; None without them.
        positions: longest sequence that the configuration names.
        factor: of a stretched context.
        window: tokens that a layer with a window sees, itself among them; None where no layer has one.
        index: tensors that the published index file lists, and their bytes, where those are known.

    Where they stand: litgpt 0.5.13's table (Llama, CodeLlama, Gemma, Mistral, OLMo 2, Phi, Qwen2.5, Qwen3, SmolLM2),
    NeMo's (Qwen2), mlc-llm's model_preset.py (ChatGLM3, Baichuan2 7B, GPT-2, InternLM2 7B, InternLM2.5 7B Chat,
    MiniCPM, Phi-3.5, OLMo 2 32B, Qwen1.5 1.8B), makers' own config.json with the size of the model's page (Mixtral,
    Qwen MoE, DeepSeek, Kimi, Hunyuan, Ling,
    GPT-OSS), MindSpeed-LLM's scripts (GLM-4, GLM-4-0414, InternLM, Baichuan2 13B,
    Qwen1.5, Yi), lmdeploy's guide (InternLM2 Chat 20B), Meta's params.json (Llama 1), cards and papers (Bloom,
    Gemma 3 270M, Seed-OSS, SmolLM3).
    """

    parameters: int
    epsilon: float
    theta: float | None
    positions: int
    factor: float | None = None
    window: int | None = None
    index: tuple[int, int] | None = None


_LONG = 131072
PUBLISHED = {
    "Baichuan2-7B": Facts(7_505_973_248, 1e-6, 1e4, 4096),
    "Baichuan2-13B": Facts(13_896_668_160, 1e-6, None, 4096),
    "Bloom-560M": Facts(559_214_592, 1e-5, None, 2048),
    "Bloom-1B1": Facts(1_065_314_304, 1e-5, None, 2048),
    "Bloom-1B7": Facts(1_722_408_960, 1e-5, None, 2048),
    "Bloom-3B": Facts(3_002_557_440, 1e-5, None, 2048),
    "Bloom-7B1": Facts(7_069_016_064, 1e-5, None, 2048),
    "ChatGLM3-6B": Facts(6_243_584_000, 1e-5, 1e4, 8192),
    "CodeLlama-7B": Facts(6_738_546_688, 1e-5, 1e6, 16384),
    "CodeLlama-13B": Facts(13_016_028_160, 1e-5, 1e6, 16384),
    "CodeLlama-34B": Facts(33_743_970_304, 1e-5, 1e6, 16384),
    "DeepSeek-V2": Facts(235_741_434_880, 1e-6, 1e4, 163840, 40),
    "DeepSeek-V2-Lite": Facts(15_706_484_224, 1e-6, 1e4, 163840, 40),
    "GLM-4-9B": Facts(9_399_951_360, 1.5625e-7, 1e4, 8192),
    "GLM-4-9B-0414": Facts(9_400_279_040, 1e-5, 1e4, 32768),
    "GLM-4-9B-Chat": Facts(9_399_951_360, 1.5625e-7, 5e6, _LONG),
    "GLM-4-32B-0414": Facts(32_566_081_536, 1e-5, 1e4, 32768),
    "GPT-2": Facts(124_439_808, 1e-5, None, 1024),
    "GPT-2-medium": Facts(354_823_168, 1e-5, None, 1024),
    "GPT-2-large": Facts(774_030_080, 1e-5, None, 1024),
    "GPT-2-xl": Facts(1_557_611_200, 1e-5, None, 1024),
    "GPT-OSS-20B": Facts(20_914_757_184, 1e-5, 150000, _LONG, 32, window=128),
    "GPT-OSS-120B": Facts(116_829_156_672, 1e-5, 150000, _LONG, 32, window=128),
    "Gemma-2B": Facts(2_506_172_416, 1e-6, 1e4, 8192, index=(164, 5_012_344_832)),
    "Gemma-7B": Facts(8_537_680_896, 1e-6, 1e4, 8192),
    "Gemma-2-2B": Facts(2_614_341_888, 1e-6, 1e4, 8192, window=4096),
    "Gemma-2-9B": Facts(9_241_705_984, 1e-6, 1e4, 8192, window=4096),
    "Gemma-2-27B": Facts(27_227_128_320, 1e-6, 1e4, 8192, window=4096),
    "Gemma-3-270M": Facts(268_098_176, 1e-6, 1e6, 32768, window=512),
    "Gemma-3-1B": Facts(999_885_952, 1e-6, 1e6, 32768, window=512),
    # theta is stretched once for all by alpha 1000, for heads of 128.
    "Hunyuan-A13B": Facts(80_393_183_232, 1e-5, 1e4 * 1000 ** (128 / 126), 32768),
    "InternLM2-1.8B": Facts(1_889_110_016, 1e-5, 1e6, 32768, 2),
    "InternLM2-7B": Facts(7_737_708_544, 1e-5, 1e6, 32768, 2),
    "InternLM2-Chat-20B": Facts(19_861_149_696, 1e-5, 1e6, 32768, 3),
    "InternLM2.5-1.8B": Facts(1_889_110_016, 1e-5, 1e6, 32768, 2),
    "InternLM2.5-7B-Chat": Facts(7_737_708_544, 1e-5, 1e6, 32768, 2),
    "InternLM3-8B": Facts(8_804_241_408, 1e-5, 5e7, 32768, 6),
    "Kimi-K2": Facts(1_026_408_232_448, 1e-6, 5e4, _LONG, 32),
    "Ling-mini-2.0": Facts(16_255_643_392, 1e-6, 6e5, 32768),
    "Ling-flash-2.0": Facts(102_889_705_216, 1e-6, 6e5, 32768),
    "Ling-1T": Facts(999_705_328_640, 1e-6, 6e5, 32768),
    "Llama-1-7B": Facts(6_738_415_616, 1e-6, 1e4, 2048),
    "Llama-1-13B": Facts(13_015_864_320, 1e-6, 1e4, 2048),
    "Llama-1-30B": Facts(32_528_943_616, 1e-6, 1e4, 2048),
    "Llama-1-65B": Facts(65_285_660_672, 1e-5, 1e4, 2048),
    "Llama-2-7B": Facts(6_738_415_616, 1e-5, 1e4, 4096),
    "Llama-2-13B": Facts(13_015_864_320, 1e-5, 1e4, 4096),
    "Llama-2-70B": Facts(68_976_648_192, 1e-5, 1e4, 4096),
    "Llama-3-8B": Facts(8_030_261_248, 1e-5, 5e5, 8192),
    "Llama-3-70B": Facts(70_553_706_496, 1e-5, 5e5, 8192),
    "Llama-3.1-8B": Facts(8_030_261_248, 1e-5, 5e5, _LONG, 8),
    "Llama-3.1-70B": Facts(70_553_706_496, 1e-5, 5e5, _LONG, 8),
    "Llama-3.2-1B": Facts(1_235_814_400, 1e-5, 5e5, _LONG, 32),
    "Llama-3.2-3B": Facts(3_212_749_824, 1e-5, 5e5, _LONG, 32),
    "Llama-3.3-70B": Facts(70_553_706_496, 1e-5, 5e5, _LONG, 8),
    "MiniCPM-2B": Facts(2_724_880_896, 1e-5, 1e4, 4096),
    "Mistral-7B-v0.1": Facts(7_241_732_096, 1e-5, 1e4, 32768, window=4096),
    "Mistral-7B-v0.3": Facts(7_248_023_552, 1e-5, 1e6, 32768),
    "Mixtral-8x7B": Facts(46_702_792_704, 1e-5, 1e6, 32768),
    "Mixtral-8x22B": Facts(140_620_634_112, 1e-5, 1e6, 65536),
    "OLMo-2-7B": Facts(7_298_617_344, 1e-6, 5e5, 4096),
    "OLMo-2-13B": Facts(13_716_198_400, 1e-6, 5e5, 4096),
    "OLMo-2-32B": Facts(32_234_279_936, 1e-6, 5e5, 4096),
    "Phi-3-mini-4k": Facts(3_821_079_552, 1e-5, 1e4, 4096, window=2047, index=(195, 7_642_159_104)),
    "Phi-3.5-mini": Facts(3_821_079_552, 1e-5, 1e4, _LONG, 32, window=262144),
    "Phi-4": Facts(14_659_507_200, 1e-5, 250000, 16384),
    "Phi-4-mini": Facts(3_836_021_760, 1e-5, 1e4, _LONG, 32, window=262144),
    "Qwen1.5-0.5B": Facts(463_987_712, 1e-6, 1e6, 32768),
    "Qwen1.5-1.8B": Facts(1_836_828_672, 1e-6, 1e6, 32768),
    "Qwen1.5-7B": Facts(7_721_324_544, 1e-6, 1e6, 32768),
    "Qwen1.5-14B": Facts(14_167_290_880, 1e-6, 1e6, 32768),
    "Qwen1.5-32B": Facts(32_512_218_112, 1e-6, 1e6, 32768),
    "Qwen1.5-72B": Facts(72_287_920_128, 1e-6, 1e6, 32768),
    "Qwen1.5-MoE-A2.7B": Facts(14_315_784_192, 1e-6, 1e6, 8192),
    "Qwen2-0.5B": Facts(494_032_768, 1e-6, 1e6, _LONG),
    "Qwen2-1.5B": Facts(1_543_714_304, 1e-6, 1e6, _LONG),
    "Qwen2-7B": Facts(7_615_616_512, 1e-6, 1e6, _LONG),
    "Qwen2-72B": Facts(72_706_203_648, 1e-5, 1e6, _LONG),
    "Qwen2-57B-A14B": Facts(57_408_658_944, 1e-6, 1e6, _LONG),
    "Qwen2.5-0.5B": Facts(494_032_768, 1e-6, 1e6, 32768),
    "Qwen2.5-1.5B": Facts(1_543_714_304, 1e-6, 1e6, _LONG),
    "Qwen2.5-3B": Facts(3_085_938_688, 1e-6, 1e6, 32768),
    "Qwen2.5-7B": Facts(7_615_616_512, 1e-6, 1e6, _LONG),
    "Qwen2.5-14B": Facts(14_770_033_664, 1e-5, 1e6, _LONG),
    "Qwen2.5-32B": Facts(32_763_876_352, 1e-5, 1e6, _LONG),
    "Qwen2.5-72B": Facts(72_706_203_648, 1e-5, 1e6, _LONG),
    "Qwen3-0.6B": Facts(596_049_920, 1e-6, 1e6, 40960),
    "Qwen3-1.7B": Facts(1_720_574_976, 1e-6, 1e6, 40960),
    "Qwen3-4B": Facts(4_022_468_096, 1e-6, 1e6, 40960),
    "Qwen3-8B": Facts(8_190_735_360, 1e-6, 1e6, 40960),
    "Qwen3-14B": Facts(14_768_307_200, 1e-6, 1e6, 40960),
    "Qwen3-32B": Facts(32_762_123_264, 1e-6, 1e6, 40960),
    "Qwen3-30B-A3B": Facts(30_532_122_624, 1e-6, 1e6, 40960),
    "Qwen3-235B-A22B": Facts(235_093_634_560, 1e-6, 1e6, 40960),
    "Seed-OSS-36B": Facts(36_151_104_512, 1e-6, 1e7, 524288),
    "SmolLM2-135M": Facts(134_515_008, 1e-5, 1e5, 8192),
    "SmolLM2-360M": Facts(361_821_120, 1e-5, 1e5, 8192),
    "SmolLM2-1.7B": Facts(1_711_376_384, 1e-5, 130000, 8192),
    "SmolLM3-3B": Facts(3_075_098_624, 1e-6, 5e6, 65536),
    "Yi-6B": Facts(6_061_035_520, 1e-5, 5e6, 4096),
    "Yi-34B": Facts(34_388_917_248, 1e-5, 5e6, 4096),
    "Yi-1.5-6B": Facts(6_061_035_520, 1e-6, 5e6, 4096, index=(291, 12_122_071_040)),
    "Yi-1.5-9B": Facts(8_829_407_232, 1e-6, 5e6, 4096),
    "Yi-1.5-34B": Facts(34_388_917_248, 1e-6, 5e6, 4096),
}
_LAYER = re.compile(r"^(.*\.(?:layers|h)\.)(\d+)(\..*)$")


def hf_config(name: str) -> dict[str, Any]:
    """The packaged config.json."""
    return json.loads((packaged_configs()[name] / CONFIG).read_text(encoding="utf-8"))


@functools.cache
def layer_kinds(name: str) -> list[bool]:
    """Of each layer, whether it has experts."""
    config = hf_config(name)
    return layers_of_experts(family_for(config).config_to_values(config))


@functools.cache
def shallow(name: str) -> Any:
    """Its first layers, two or until there is one of each kind, as transformers builds them, without memory; of
    families that it lacks, the oracle."""
    config, kinds = hf_config(name), layer_kinds(name)
    family = family_for(config)
    config = shortened(config, family, len(kinds), max(2, *(1 + kinds.index(kind) for kind in kinds)))
    with torch.device("meta"):
        if family.name in ORACLES:
            return ORACLES[family.name].build(config)
        kind = AutoConfig.for_model(config.pop("model_type"), **config)
        return AutoModelForCausalLM.from_config(kind, trust_remote_code=False)


@functools.cache
def stored_shapes(name: str) -> Shapes:
    """Every tensor that ``save_pretrained`` writes, ties left out, at the model's full depth."""
    config, model, kinds = hf_config(name), shallow(name), layer_kinds(name)
    family = family_for(config)
    # A tied parameter appears once; what was registered first is what is written.
    stored = set(model.state_dict())
    tensors = dict(model.named_parameters()) | {key: b for key, b in model.named_buffers() if key in stored}
    if family.name in ORACLES:
        tensors = ORACLES[family.name].relay(tensors, config)
    else:
        tensors = revert_weight_conversion(model, tensors)
    result: dict[str, tuple[int, ...]] = {}
    for key, tensor in tensors.items():
        match = _LAYER.match(key)
        if match is None:
            result[key] = tuple(tensor.shape)
            continue
        kind = kinds[int(match[2])]
        first = f"{match[1]}{kinds.index(kind)}{match[3]}"
        assert tensor.shape == tensors[first].shape, "layers of a kind are alike"
        if key == first:
            for layer in (layer for layer, other in enumerate(kinds) if other == kind):
                result[f"{match[1]}{layer}{match[3]}"] = tuple(tensor.shape)
    return result
