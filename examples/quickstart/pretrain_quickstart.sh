#!/usr/bin/env bash
# Pretrains a small Qwen2.5 on two processes of this machine. Every variable can be set from the environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

NPROC_PER_NODE=${NPROC_PER_NODE:-2}
DATA_DIR=${DATA_DIR:-out/quickstart/data}
CKPT_DIR=${CKPT_DIR:-out/quickstart/checkpoints}
HF_CONFIG=${HF_CONFIG:-examples/quickstart/model}
TRAIN_ITERS=${TRAIN_ITERS:-300}
PYTHON=${PYTHON:-.venv/bin/python}
# One thread per process: two processes on two cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

MODEL_ARGS=(
    --hf-config "$HF_CONFIG"
    --tokenizer-type PretrainedFromHF
    --tokenizer-name-or-path "$HF_CONFIG"
    --make-vocab-size-divisible-by 1
    --init-method-std 0.02
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --use-distributed-optimizer
)
TRAIN_ARGS=(
    --seq-length 256
    --micro-batch-size 8
    --global-batch-size 8
    --train-iters "$TRAIN_ITERS"
    --lr 2e-3
    --min-lr 2e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.07
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
    --attention-dropout 0
    --hidden-dropout 0
    --seed 1234
)
DATA_ARGS=(
    --train-data-path "$DATA_DIR/train_text_document"
    --valid-data-path "$DATA_DIR/valid_text_document"
    --num-workers 0
)
OUTPUT_ARGS=(
    --save "$CKPT_DIR"
    --save-interval "$((TRAIN_ITERS / 2))"
    --log-interval 1
    --log-throughput
    --eval-interval 50
    --eval-iters 6
)

exec "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$NPROC_PER_NODE" pretrain_gpt.py \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAIN_ARGS[@]}" "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@"
