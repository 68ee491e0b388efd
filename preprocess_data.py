"""Text files -> Megatron's .bin and .idx. The same as the console script."""

from __future__ import annotations

import sys

from mindspeed_llm.cli.preprocess import main

if __name__ == "__main__":
    sys.exit(main())
