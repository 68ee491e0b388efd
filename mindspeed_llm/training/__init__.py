"""The run: set up, step, loop, state, reports, saves."""

import mindspeed_llm.core  # noqa: F401  the device seam comes before megatron-core
