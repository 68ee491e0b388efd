"""The one place that knows CPU, CUDA and Ascend NPU.

``device.current()`` answers for the device of this process; :func:`mindspeed_llm.device.seam.install` lets
megatron-core, which says ``torch.cuda`` everywhere, run on it.
"""

from mindspeed_llm.device.base import Device, current, select

__all__ = ["Device", "current", "select"]
