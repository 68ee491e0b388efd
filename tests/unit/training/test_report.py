"""What reports say of experts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from mindspeed_llm.config.option import names
from mindspeed_llm.config.resolve import from_values
from mindspeed_llm.training import report

CFG = from_values(
    {
        "num_layers": 3,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "add_bias_linear": False,
        "num_moe_experts": 2,
        "moe_layer_freq": (0, 1, 1),
    }
)
PLAIN = dict.fromkeys(
    names(
        """iteration consumed_samples lm_loss grad_norm learning_rate weight_decay loss_scale global_batch_size
        num_micro_batches skipped nan elapsed_ms tokens_per_s tflops_per_rank max_memory_bytes"""
    ),
    1,
)
ROW: dict[str, Any] = {
    "kind": "train",
    **PLAIN,
    "mfu": None,
    "load_balancing_loss": 1.25,
    "z_loss": 0.5,
    "experts": {
        "layers": (1, 2),
        "load_balancing_loss": (1.0, 1.5),
        "z_loss": (0.25, math.inf),
        "tokens": ((3, 1), (2, 2)),
        "entropy": (0.56, 0.69),
        "dropped": (0.0, 0.5),
    },
}


def test_the_line_names_the_losses_that_there_are() -> None:
    line = report.log_line(CFG, ROW, 10)
    wanted = " lm loss: 1.000000E+00 | load_balancing_loss: 1.250000E+00 | z_loss: 5.000000E-01 | loss scale: 1.0 |"
    assert wanted in line


def test_dashboards_get_each_layer_by_its_number() -> None:
    scalars = report.dashboard_scalars(CFG, ROW)
    moe = {name: value for name, value in scalars.items() if name.startswith("moe/")}
    shown = ("load_balancing_loss", "z_loss", "entropy", "dropped")
    wanted = {f"moe/{name}_layer_{at}": ROW["experts"][name][at - 1] for name in shown for at in (1, 2)}
    assert moe == wanted
    assert (scalars["load_balancing_loss"], scalars["z_loss"]) == (1.25, 0.5)


def test_metrics_stay_json(tmp_path: Path) -> None:
    sink = report.MetricsFile(tmp_path / "metrics.jsonl")
    sink.write(ROW)
    sink.close()
    (row,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert row["experts"]["z_loss"] == [0.25, None]
    assert row["experts"]["tokens"] == [[3, 1], [2, 2]]
