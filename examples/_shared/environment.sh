# shellcheck shell=bash
# Variables that recipes and the doctor set where the environment does not.

# Kernels start in the order in which they were issued, which overlapping of communication counts on.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export PYTORCH_NPU_ALLOC_CONF=${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}
# HCCL waits for half an hour, as with MindSpeed-LLM's recipes: 1800 s for a connection, by default 1836 s within an
# operation. The run waits a little longer (--distributed-timeout-minutes), so that HCCL says which peer is missing.
export HCCL_CONNECT_TIMEOUT=${HCCL_CONNECT_TIMEOUT:-1800}
export MINDSPEED_LLM_DISTRIBUTED_TIMEOUT_MINUTES=${MINDSPEED_LLM_DISTRIBUTED_TIMEOUT_MINUTES:-31}
