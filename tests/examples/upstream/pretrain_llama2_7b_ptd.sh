#!/bin/bash
# shellcheck disable=all # as such recipes are written
# The shape of MindSpeed-LLM's Llama recipes and of Megatron-LM's (groups as arrays), of a size for tests.
export CUDA_DEVICE_MAX_CONNECTIONS=1
export PYTORCH_NPU_ALLOC_CONF=expandable_segments:True

GPUS_PER_NODE=2
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6001}
NNODES=1
NODE_RANK=0
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))

CKPT_SAVE_DIR=${CKPT_SAVE_DIR:-"your model save ckpt path"}
DATA_PATH=${DATA_PATH:-"your data path"}
TOKENIZER_MODEL=${TOKENIZER_MODEL:-"your tokenizer path"}
CKPT_LOAD_DIR=${CKPT_LOAD_DIR:-"your model ckpt path"}

TP=1
PP=2

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
    --node_rank $NODE_RANK
    --master_addr $MASTER_ADDR
    --master_port $MASTER_PORT
)

MODEL_ARGS=(
    --use-mcore-models
    --num-layers 4
    --hidden-size 64
    --ffn-hidden-size 128
    --num-attention-heads 4
    --group-query-attention
    --num-query-groups 2
    --seq-length 32
    --max-position-embeddings 128
    --position-embedding-type rope # no table of positions
    --no-position-embedding
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --make-vocab-size-divisible-by 1
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$TOKENIZER_MODEL"
    --vocab-size 328
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 4
    --train-iters 4
    --lr 1e-3
    --min-lr 1.0e-4
    --lr-decay-style cosine
    --lr-warmup-iters 1
    --weight-decay 0.1
    --clip-grad 1.0
    --bf16
)
if [[ $TP -gt 1 ]]; then
    TRAINING_ARGS+=(--sequence-parallel)
fi

PARALLEL_ARGS=(
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size $PP
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

DATA_ARGS=(
    --data-path "$DATA_PATH"
    --split 98,2,0
)

LOGGING_ARGS=(
    --log-interval 1
    --save-interval 4
    --eval-interval 4
    --eval-iters 1
    --save "$CKPT_SAVE_DIR"
    --load "$CKPT_LOAD_DIR"
    --no-load-optim
    --no-load-rng
)

torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    ${MODEL_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    ${PARALLEL_ARGS[@]} \
    ${DATA_ARGS[@]} \
    ${LOGGING_ARGS[@]} \
    --distributed-backend nccl | tee logs/train_llama2_7b.log
