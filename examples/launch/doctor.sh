#!/usr/bin/env bash
# The doctor on all processes of a run: to be started in place of a recipe, with the recipe's variables (nodes and
# NPUS_PER_NODE).
# Flags are the doctor's: --save, --data-path, --distributed-timeout-minutes, --json.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source-path=SCRIPTDIR source=../_shared/environment.sh
source examples/_shared/environment.sh

PYTHON=${PYTHON:-.venv/bin/python}
exec "$PYTHON" -m torch.distributed.run --nnodes "${NNODES:-1}" --node_rank "${NODE_RANK:-0}" \
    --master_addr "${MASTER_ADDR:-localhost}" --master_port "${MASTER_PORT:-29500}" \
    --nproc_per_node "${NPUS_PER_NODE:-1}" -m mindspeed_llm.tools.doctor "$@"
