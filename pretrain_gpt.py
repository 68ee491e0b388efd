"""Pretrain a GPT-style model; ``python pretrain_gpt.py --help`` lists the flags."""

import sys

from mindspeed_llm.cli.pretrain import main

if __name__ == "__main__":
    sys.exit(main())
