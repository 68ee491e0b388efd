"""Checkpoints between Hugging Face's and megatron-core's formats; ``python convert_ckpt.py --help`` lists the flags."""

from __future__ import annotations

import sys

from mindspeed_llm.cli.convert import main

if __name__ == "__main__":
    sys.exit(main())
