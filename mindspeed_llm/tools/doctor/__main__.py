"""``python -m mindspeed_llm.tools.doctor``."""

import sys

from mindspeed_llm.tools.doctor.command import main

sys.exit(main())
