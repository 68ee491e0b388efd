"""What the suite adds to megatron-core.

Importing this package is how megatron-core enters the process: the device seam is in place before its first module
loads, and the few patches that every run needs (``core/patches.py``) right after.
"""

from mindspeed_llm.device import seam

seam.install()

from mindspeed_llm.core import patches  # noqa: E402  the seam comes first

patches.apply_once()
