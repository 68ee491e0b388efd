"""Flags of Megatron-LM and MindSpeed-LLM that this suite lacks, each with the reason that the user is told.

In a row's names ``*`` stands for any characters, and the first row that fits wins. A flag that fits a row and is
accepted all the same is accepted only where it changes nothing, such as ``--context-parallel-size 1``: the row says
what its other values wait for.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple

LATER = "later"


class Refused(NamedTuple):
    """Names that are refused alike.

    Attributes:
        reason: why, or with what the flag comes.
        names: the flags without dashes.
        comes: the step of ``docs/feature-map.md`` that brings it, or :data:`LATER`; empty where it is not to come.
        trains_alike: whether a run without it computes the same model in the same steps, and only needs other time,
            memory or reports.
    """

    reason: str
    names: str
    comes: str = ""
    trains_alike: bool = False

    @property
    def told(self) -> str:
        """What the user is told."""
        return f"{self.reason}, {self.comes}" if self.comes else self.reason


REFUSED: tuple[Refused, ...] = (
    Refused("use --micro-batch-size and --global-batch-size", "batch-size"),
    Refused("use --lr-warmup-fraction", "warmup"),
    Refused("use --tensor-model-parallel-size", "model-parallel-size"),
    Refused("use --recompute-activations or --recompute-granularity", "checkpoint-activations"),
    Refused("use --config FILE", "yaml-cfg"),
    Refused("use --rope-scaling-type linear with --rope-scaling-factor", "rotary-seq-len-interpolation-factor"),
    Refused("use --save-hf DIR, which writes a Hugging Face folder at the end", "enable-mg2hf-convert hf-cfg-dir"),
    Refused(
        "use --save-hf DIR and --save-hf-interval N", "only-convert-last-checkpoint save-layer-by-layer mg-save-dir"
    ),
    Refused("use --loss-spike-factor F, which skips such a step", "check-for-spiky-loss", trains_alike=True),
    Refused(
        "a step whose numbers are not finite is always repeated, to find the cause, and ends the run",
        "rerun-mode",
        trains_alike=True,
    ),
    Refused("the loss is always computed in fp32", "fp16-lm-cross-entropy", trains_alike=True),
    Refused(
        "unknown weights or missing ones always stop a load",
        "load-checkpoint-loosely *strict-fsdp-dtensor-load",
        trains_alike=True,
    ),
    Refused(
        "there are no legacy models, engines or tokenizers here",
        "use-legacy-* legacy-tokenizer onnx-safe lazy-mpu-init",
    ),
    Refused(
        "the native fusion rounds its gradient to bf16, and the loss here is computed in fp32: planned with fused ops",
        "cross-entropy-*fusion*",
        "step 9",
        trains_alike=True,
    ),
    Refused(
        "megatron-core 0.16.1 accepts it and then does nothing with it here",
        "tp-comm-* *-tp-comm-*",
        trains_alike=True,
    ),
    Refused(
        "megatron-core 0.16.1 accepts it and then does nothing with it here",
        "apply-residual-connection-post-layernorm qk-clip*",
    ),
    Refused(
        "megatron-core 0.16.1 sums residuals in the model's number format all the same", "fp32-residual-connection"
    ),
    Refused(
        "planned with the memory features",
        "use-precision-aware-optimizer main-grads-dtype main-params-dtype exp-avg*-dtype o2-optimizer o2-gradient",
        "step 10",
    ),
    Refused(
        "it needs TransformerEngine",
        """te-* fp8-* fp4-* fp8 fp4 *-fp8-* use-te-* tp-only-amax-red first-last-layers-bf16 num-layers-at-*-in-bf16
        activation-func-fp8-input-store reuse-grad-buf-for-mxfp8-param-ag keep-fp8-transpose-cache
        preserve-fp32-weights delay-wgrad-compute *kitchen* disable-parameter-transpose-cache
        apply-rope-fusion fused-single-qkv-rope log-max-attention-logit memory-efficient-layer-norm
        persist-layer-norm use-fused-weighted-squared-relu""",
    ),
    Refused("it needs CUDA graphs, which are not planned", "*cuda-graph*", trains_alike=True),
    Refused(
        "it needs a library or a network of CUDA machines that is not planned",
        """use-nccl-ub nccl-* use-sharp sharp-* *symmetric* high-priority-stream-groups create-all-gather-group
        pipeline-model-parallel-comm-backend use-ring-exchange-p2p disable-bf16-reduced-precision-matmul
        fsdp-double-buffer fsdp-manual-registration hccl-* aiqos* *-msc object-storage-cache-path""",
        trains_alike=True,
    ),
    Refused(
        "the implementation is chosen for the device when the run starts; there is no such fused kernel here",
        "masked-softmax-fusion bias-dropout-fusion disable-jit-fuser jit-compile use-fusion-attn-v2",
        trains_alike=True,
    ),
    Refused(
        "planned with the memory features",
        "moe-zero-memory* moe-layer-recompute moe-unperm2-mem-optim-swap",
        "step 10",
        trains_alike=True,
    ),
    Refused(
        "planned with overlapped messages of experts",
        "*moe-*-overlap-comm moe-fb-overlap overlap-moe-expert-parallel-comm ep-overlap-*",
        "step 6",
        trains_alike=True,
    ),
    Refused(
        "it needs TransformerEngine", "moe-router-fusion moe-router-padding-for-* no-use-gmm-fp8", trains_alike=True
    ),
    Refused("it needs CUDA graphs, which are not planned", "moe-pad-experts-for-cuda-graph-*", trains_alike=True),
    Refused(
        "the flex dispatcher sends tokens through DeepEP or HybridEP, libraries for CUDA that are not planned",
        "moe-enable-deepep moe-flex-dispatcher-backend moe-deepep-num-sms moe-hybridep-num-sms",
        trains_alike=True,
    ),
    Refused("there is one way to compute a rank's experts", "moe-use-legacy-grouped-gemm", trains_alike=True),
    Refused("use --moe-expert-capacity-factor", "moe-token-dropping"),
    Refused("use --moe-tp-extend-ep or --expert-tensor-parallel-size 1", "moe-extended-tp", trains_alike=True),
    Refused("use --moe-router-num-groups and --moe-router-group-topk", "moe-router-topk-limited-devices"),
    Refused(
        "wanted with more of mixture of experts",
        """moe-alltoall-mc2 balanced-moe-* trans-hot-expert-group-num *expert-placement* print-expert-load
        fine-grained-expert-* num-zero-experts n-hash-layers moe-device-level-aux-loss-coeff
        moe-comm-aux-loss-coeff use-global-aux-loss moe-latent-size *moe-*upcycling*
        shared-expert-gate-output-dimension""",
        LATER,
    ),
    Refused(
        "planned with mixture of experts",
        """moe-enable-routing-replay input-jitter swiglu-limit glu-linear-offset
        activation-func-clamp-value qk-l2-norm cla-share-factor share-kvstates""",
        "step 6",
    ),
    Refused(
        "use --rope-scaling-type yarn, --rope-scaling-factor, --rope-scaling-mscale, --rope-scaling-mscale-all-dim",
        "mscale mscale-all-dim rotary-scaling-factor rope-type",
    ),
    Refused(
        "planned with more of latent attention",
        "mla-* *mla-* cache-mla-latents",
        "step 6",
    ),
    Refused(
        "wanted with sparse attention and hyper-connections",
        """*dsa-* *indexer* index-* use-sparse-flash-attn kv-compress compress-ratios compress-rope-theta o-groups
        o-lora-rank apply-rope-no-in-complex sliding-window-size enable-mhc hc-* use-fused-mhc
        use-triton-mhc max-batch-size original-seq-len rope-factor rope-theta scale-fmt
        use-triton-swiglu-limit""",
        LATER,
    ),
    Refused(
        "the layers come from the architecture: the specs of more families are planned with them", "spec", "step 6"
    ),
    Refused("planned with multi-token prediction", "mtp-* *-mtp-*", "step 6"),
    Refused(
        "planned with context parallelism",
        """context-parallel-* cp-* *-cp-* *-cp hierarchical-context-parallel-sizes hybrid-context-parallel ulysses-*
        attention-mask-type use-fused-ring-attention-update kv-head-repeat-before-uly-alltoall
        use-ulysses-allgather-kv max-seqlen-per-dp-cp-rank fix-sub-seq-length""",
        "step 7",
    ),
    Refused("wanted with adaptive context parallelism", "attention-mask-on-cpu", LATER),
    Refused(
        "wanted with linear attention and hybrid models",
        """mamba-* use-mamba-mem-eff-path *-mamba-mem-eff-path linear-* is-hybrid-model hybrid-*
        experimental-attention-variant full-attention-interval use-triton-* no-enable-linear-qkv
        attention-output-gate rmsnorm-weight-in-fp32""",
        LATER,
    ),
    Refused("planned with no-op layers", "noop-layers", "step 6"),
    Refused(
        "planned with uneven pipelines",
        "pipeline-model-parallel-layout num-layer-list pipeline-num-transformer-layers",
        "step 6",
        trains_alike=True,
    ),
    Refused(
        "wanted with more pipeline schedules",
        """schedules-method dualpipev-* optimize-send-recv-comm defer-embedding-wgrad-compute wgrad-deferral-limit
        use-multiparameter-* automated-pipeline* overlap-param-gather-with-optimizer-step""",
        LATER,
        trains_alike=True,
    ),
    Refused(
        "planned with fused ops",
        "gradient-accumulation-fusion gemm-gradient-accumulation-fusion",
        "step 9",
        trains_alike=True,
    ),
    Refused(
        "planned with the memory features",
        """reuse-fp32-param swap-* virtual-optimizer recompute-activation-function* recompute-norm* recompute-in-*
        enable-recompute-layers-per-pp-rank recompute-module-list loss-chunk-size loss-compute-mode
        fine-grained-activation-offloading offload-modules min-offloaded-tensor-size optimizer-cpu-offload
        optimizer-offload-fraction use-torch-optimizer-for-cpu-offload overlap-cpu-optimizer-d2h-h2d
        *pin-cpu-* store-param-remainders cpu-offloading* num-microbatches-with-partial-activation-checkpoints""",
        "step 10",
        trains_alike=True,
    ),
    Refused(
        "wanted with more optimizers and lossless compression",
        "compress-* optimization-level optimizer-selection ema-decay quant-states quant-grads layerzero* muon-*",
        LATER,
    ),
    Refused(
        "planned with fully sharded data parallelism",
        """use-torch-fsdp2 torch-fsdp2-* fsdp2-* use-megatron-fsdp use-custom-fsdp data-parallel-sharding-strategy
        outer-dp-sharding-strategy suggested-communication-unit-size *gradient-reduce-div-fusion
        enable-full-sharding-in-hsdp init-model-with-meta-device *preserve-fp32-weights""",
        "step 10",
        trains_alike=True,
    ),
    Refused(
        "wanted with the tensor-parallel features",
        "use-ascend-* use-mc2 coc-* tp-2d tp-x tp-y *-with-matmul *-with-rs unaligned-linear",
        LATER,
        trains_alike=True,
    ),
    Refused(
        "planned with more dense families",
        """no-post-layer-norm openai-gelu long-mscale short-mscale dynamic-factor
        skip-bias-add add-dense-bias add-output-layer-bias fc-type alibi-* square-alibi-mask fill-neg-inf
        init-norm-weight-in-fp32 input-layernorm-in-fp32""",
        "step 5",
    ),
    Refused(
        "wanted with more kinds of layers and masks",
        """heterogeneous-* hetereogenous-* relative-attention-* mrope-section apply-query-key-layer-scaling
        pre-tockens next-tockens sparse-mode""",
        LATER,
    ),
    Refused("use --data-cache-path DIR, where raw files of --data-path are prepared", "output-prefix"),
    Refused(
        "megatron-core reads data files through a memory map, which processes share",
        "enable-share-memory",
        trains_alike=True,
    ),
    Refused(
        "planned with instruction tuning",
        """pack handler-name no-shuffle full-shuffle-instruction-dataset no-cut-token cut-max-seqlen
        dataset-additional-keys stage is-instruction-dataset prompt-type prompt-type-path
        no-pad-to-seq-lengths pad-to-multiple-of padded-samples variable-seq-lengths neat-pack
        tokenizer-padding-side enable-thinking sft sft-*""",
        "step 8",
    ),
    Refused(
        "wanted with more data features",
        """iterations-to-skip decrease-batch-size-if-needed tokenizer-sentencepiece-legacy
        tokenizer-metadata tokenizer-hf-* per-dataset-sequences-path
        full-validation multiple-validation-sets phase-transition-iterations dataloader-fast-cache-load
        dataloader-defer-npy-index-mmap mid-level-dataset-surplus allow-ambiguous-pad-tokens
        return-document-ids vocab-extra-ids""",
        LATER,
    ),
    Refused("use convert_ckpt.py, which makes each form of a checkpoint from the others", "ckpt-convert-*"),
    Refused(
        "wanted with more checkpoint features",
        """use-persistent-ckpt-worker ckpt-assume-constant-structure dist-ckpt-save-* dist-ckpt-strictness
        distrib-optim-* non-persistent-local-* use-checkpoint-args use-mp-args-from-checkpoint-args
        *use-tokenizer-model-from-checkpoint-args replication* load-main-params-from-ckpt
        *gloo-process-groups disable-gloo-group save-wgrads-interval save-dgrads-interval""",
        LATER,
    ),
    Refused(
        "wanted with post-training beyond instruction tuning",
        """is-pairwise-dataset lora-* qlora* lu-lora-* save-lora-to-hf dpo-* pref-ftx ref-model refer-model-iter
        use-wandb rl-* grpo-* langrl-* perform-rl-step refit-method kl-* qad-* qat-*""",
        LATER,
    ),
    Refused(
        "wanted with inference and evaluation",
        """inference-* *chunked-prefill max-tokens-to-oom flash-decode batch-invariant-mode
        use-inference-optimized-layers mlp-chunks-for-prefill task task-data-path max-new-tokens
        temperature top-k top-p greedy evaluation-batch-size use-kv-cache hf-chat-template history-turns
        max-length no-chat-template eval-language max-eval-samples alternative-prompt origin-postprocess
        broadcast chain-of-thought instruction-template add-eos-token""",
        LATER,
    ),
    Refused(
        "wanted with profiling, debugging and high availability",
        """profile profile-* use-pytorch-profiler record-memory-history memory-snapshot-path npu-datadump
        op-cal-tflops log-straggler *straggler* inprocess-* *-ft-* ft-* calc-ft-timeouts error-injection-*
        result-rejected-tracker-filename enable-high-availability enable-hbmfault-repair
        enable-worker-reboot enable-elastic-training distributed-optimizer-no-replica ttp-enabled
        check-weight-hash-across-dp-replicas-interval train-sync-interval run-workload-inspector-server
        log-memory-interval log-device-memory-used log-energy dump-param-to-param-group-map
        config-logger-dir *barrier-with-* test-mode fake-process-group
        log-params-norm log-progress timing-log-* log-timers-to-tensorboard
        empty-unused-memory-level *manual-gc-eval exit-signal-handler-for-dataloader
        distributed-timeout-seconds-after-init""",
        LATER,
        trains_alike=True,
    ),
    Refused(
        "wanted with the distributed features",
        """use-tp-pp-dp-mapping *align-grad-reduce ddp-num-buckets reset-bucket-group-order param-and-grad-buffer-pad
        *scatter-gather-tensors-in-pipeline *clone-scatter-output-in-embedding auto-settings*
        target-nnodes layerwise-disaggregated-training num-distributed-optimizer-instances""",
        LATER,
        trains_alike=True,
    ),
    Refused(
        "out of scope: not a decoder-only language model on torch",
        """bert-* biencoder-* ict-* retriever-* query-in-block-prob indexer-* evidence-data-path titles-data-path
        embedding-path block-data-path use-one-sent-docs output-bert-embeddings mask-prob short-seq-prob
        sample-rate decoder-num-layers decoder-seq-length vision-* dino-* swin-* img-* num-classes
        num-channels patch-dim classes-fraction data-per-class-fraction *data-sharding head-lr-mult
        mask-type mask-factor iter-per-epoch dist-train ai-framework""",
    ),
    Refused(
        "out of scope: a service or mechanism of other machines",
        """adlr-autoresume* app-tag-run-* enable-one-logger one-logger-* enable-experimental
        async-tensor-model-parallel-allreduce
        disable-async-tensor-model-parallel-allreduce enable-autocast""",
        trains_alike=True,
    ),
)


def refusal(name: str) -> Refused | None:
    """Why the flag ``name`` (with or without dashes in front) is refused, or None when it is unknown."""
    bare = name.lstrip("-").replace("_", "-")
    for row in REFUSED:
        if any(fnmatchcase(bare, pattern) for pattern in row.names.split()):
            return row
    return None
