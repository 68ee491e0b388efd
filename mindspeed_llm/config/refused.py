"""Flags of Megatron-LM and MindSpeed-LLM that this suite lacks, each with the reason that the user is told.

A line of the table is a reason and the names, without dashes, that it refuses; ``*`` stands for any characters. The
first line that fits wins, and a name that is accepted is never looked up here.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

REFUSED: tuple[tuple[str, str], ...] = (
    ("use --micro-batch-size and --global-batch-size", "batch-size"),
    ("use --lr-warmup-fraction", "warmup"),
    ("use --tensor-model-parallel-size", "model-parallel-size"),
    ("use --recompute-activations or --recompute-granularity", "checkpoint-activations"),
    ("use --config FILE", "yaml-cfg"),
    ("use --rope-scaling-type linear with --rope-scaling-factor", "rotary-seq-len-interpolation-factor"),
    ("use --save-hf DIR, which writes a Hugging Face folder at the end", "enable-mg2hf-convert hf-cfg-dir"),
    ("use --save-hf DIR and --save-hf-interval N", "only-convert-last-checkpoint save-layer-by-layer mg-save-dir"),
    ("the layers come from the architecture; a spec module of another suite cannot be run here", "spec"),
    ("use --loss-spike-factor F, which skips such a step", "check-for-spiky-loss"),
    ("a step whose numbers are not finite is always repeated, to find the cause, and ends the run", "rerun-mode"),
    ("the loss is always computed in fp32", "fp16-lm-cross-entropy"),
    ("unknown weights or missing ones always stop a load", "load-checkpoint-loosely *strict-fsdp-dtensor-load"),
    ("there are no legacy models, engines or tokenizers here", "use-legacy-* legacy-tokenizer onnx-safe lazy-mpu-init"),
    ("the native fusion rounds its gradient to bf16; the loss here is computed in fp32", "cross-entropy-*fusion*"),
    (
        "megatron-core 0.16.1 accepts it and then does nothing with it here",
        "tp-comm-* *-tp-comm-* apply-residual-connection-post-layernorm qk-clip*",
    ),
    ("megatron-core 0.16.1 sums residuals in the model's number format all the same", "fp32-residual-connection"),
    (
        "it needs TransformerEngine",
        """te-* fp8-* fp4-* fp8 fp4 *-fp8-* use-te-* tp-only-amax-red first-last-layers-bf16 num-layers-at-*-in-bf16
        activation-func-fp8-input-store use-precision-aware-optimizer store-param-remainders
        reuse-grad-buf-for-mxfp8-param-ag keep-fp8-transpose-cache preserve-fp32-weights delay-wgrad-compute
        *kitchen* disable-parameter-transpose-cache cpu-offloading* apply-rope-fusion
        fused-single-qkv-rope log-max-attention-logit main-grads-dtype main-params-dtype exp-avg*-dtype
        memory-efficient-layer-norm persist-layer-norm use-fused-weighted-squared-relu""",
    ),
    ("it needs CUDA graphs, which are not planned", "*cuda-graph*"),
    (
        "it needs a library or a network of CUDA machines that is not planned",
        """use-nccl-ub nccl-* use-sharp sharp-* *symmetric* high-priority-stream-groups create-all-gather-group
        pipeline-model-parallel-comm-backend use-ring-exchange-p2p disable-bf16-reduced-precision-matmul
        fsdp-double-buffer fsdp-manual-registration hccl-* aiqos* *-msc object-storage-cache-path""",
    ),
    (
        "the implementation is chosen for the device when the run starts; there is no such fused kernel here",
        "masked-softmax-fusion bias-dropout-fusion disable-jit-fuser jit-compile use-fusion-attn-v2 shape-order",
    ),
    (
        "planned with mixture of experts",
        """moe-* *-moe-* num-experts *expert* first-k-dense-replace seq-aux norm-topk-prob n-group topk-group
        routed-scaling-factor router-gating-in-fp32 topk-softmax-in-fp32 fix-router num-zero-experts
        use-fused-moe-* use-global-aux-loss no-use-gmm-fp8 fine-grained-* ep-overlap-*
        trans-hot-expert-group-num n-hash-layers""",
    ),
    (
        "planned with multi-head latent attention and sparse attention",
        """multi-latent-attention multi-head-latent-attention q-lora-rank kv-lora-rank qk-head-dim qk-*-head-dim
        v-head-dim mla-* *mla-* mscale mscale-all-dim rotary-scaling-factor rope-type *dsa-* *indexer* index-* dsa-*
        use-sparse-flash-attn padded-base-length kv-compress compress-ratios o-groups o-lora-rank cache-mla-latents
        apply-rope-no-in-complex""",
    ),
    ("planned with multi-token prediction", "mtp-* *-mtp-*"),
    (
        "planned with context parallelism",
        """context-parallel-algo context-parallel-* cp-* *-cp-* *-cp hierarchical-context-parallel-sizes
        hybrid-context-parallel ulysses-* attention-mask-type attention-mask-on-cpu use-fused-ring-attention-update
        kv-head-repeat-before-uly-alltoall use-ulysses-allgather-kv max-seqlen-per-dp-cp-rank fix-sub-seq-length""",
    ),
    (
        "planned with linear attention and hybrid models",
        """mamba-* use-mamba-mem-eff-path *-mamba-mem-eff-path linear-* is-hybrid-model hybrid-*
        experimental-attention-variant full-attention-interval use-triton-*""",
    ),
    (
        "planned with the pipeline features (uneven layouts, no-op layers, zero bubble, dual pipe)",
        """pipeline-model-parallel-layout noop-layers num-layer-list pipeline-num-transformer-layers schedules-method
        dualpipev-* recompute-in-* optimize-send-recv-comm defer-embedding-wgrad-compute wgrad-deferral-limit
        use-multiparameter-* automated-pipeline overlap-param-gather-with-optimizer-step""",
    ),
    (
        "planned with the memory features",
        """reuse-fp32-param swap-* virtual-optimizer recompute-activation-function* recompute-norm*
        enable-recompute-layers-per-pp-rank recompute-module-list loss-compute-mode loss-chunk-size compress-*
        fine-grained-activation-offloading offload-modules min-offloaded-tensor-size optimizer-cpu-offload
        optimizer-offload-fraction use-torch-optimizer-for-cpu-offload overlap-cpu-optimizer-d2h-h2d *pin-cpu-*
        output-layer-slice-num optimization-level o2-optimizer o2-gradient optimizer-selection ema-decay quant-states
        quant-grads gradient-accumulation-fusion gemm-gradient-accumulation-fusion layerzero*
        num-microbatches-with-partial-activation-checkpoints""",
    ),
    (
        "planned with fully sharded data parallelism",
        """use-torch-fsdp2 torch-fsdp2-* fsdp2-* use-megatron-fsdp use-custom-fsdp data-parallel-sharding-strategy
        outer-dp-sharding-strategy suggested-communication-unit-size *gradient-reduce-div-fusion
        enable-full-sharding-in-hsdp init-model-with-meta-device *preserve-fp32-weights""",
    ),
    (
        "planned with the tensor-parallel features",
        "use-ascend-* use-mc2 coc-* tp-2d tp-x tp-y *-with-matmul *-with-rs unaligned-linear",
    ),
    ("planned with the muon optimizer", "muon-*"),
    (
        "planned with more model families",
        """no-post-layer-norm geglu openai-gelu input-jitter longrope-freqs-type long-mscale short-mscale
        dynamic-factor skip-bias-add swiglu-limit cla-share-factor share-kvstates add-dense-bias
        add-output-layer-bias fc-type alibi-* square-alibi-mask fill-neg-inf sliding-window* rmsnorm-weight-in-fp32
        init-norm-weight-in-fp32 input-layernorm-in-fp32 no-enable-linear-qkv enable-mhc hc-* use-fused-mhc
        heterogeneous-* hetereogenous-* relative-attention-* mrope-section apply-query-key-layer-scaling
        glu-linear-offset activation-func-clamp-value qk-l2-norm attention-output-gate pre-tockens next-tockens
        sparse-mode""",
    ),
    (
        "planned with the data features",
        """tokenizer-sentencepiece-legacy tokenizer-metadata tokenizer-hf-* handler-name
        output-prefix workers append-eod pack per-dataset-sequences-path
        full-validation multiple-validation-sets phase-transition-iterations dataloader-fast-cache-load
        dataloader-defer-npy-index-mmap mid-level-dataset-surplus allow-ambiguous-pad-tokens return-document-ids
        no-shuffle full-shuffle-instruction-dataset vocab-extra-ids no-cut-token cut-max-seqlen""",
    ),
    (
        "planned with the checkpoint features",
        """use-persistent-ckpt-worker ckpt-convert-*
        ckpt-assume-constant-structure auto-detect-ckpt-format dist-ckpt-* distrib-optim-* non-persistent-local-*
        use-checkpoint-args use-mp-args-from-checkpoint-args
        *use-tokenizer-model-from-checkpoint-args replication* load-main-params-from-ckpt *gloo-process-groups
        disable-gloo-group save-wgrads-interval save-dgrads-interval""",
    ),
    (
        "planned with post-training",
        """stage is-instruction-dataset is-pairwise-dataset prompt-type prompt-type-path no-pad-to-seq-lengths
        pad-to-multiple-of padded-samples variable-seq-lengths
        neat-pack tokenizer-padding-side lora-* qlora* lu-lora-* save-lora-to-hf
        dpo-* pref-ftx ref-model refer-model-iter use-wandb sft sft-* rl-* grpo-* langrl-* perform-rl-step refit-method
        kl-* qad-* qat-* enable-thinking""",
    ),
    (
        "planned with inference and evaluation",
        """inference-* *chunked-prefill max-tokens-to-oom flash-decode batch-invariant-mode
        use-inference-optimized-layers
        mlp-chunks-for-prefill rl-inference-* task task-data-path max-new-tokens temperature top-k top-p greedy
        evaluation-batch-size use-kv-cache hf-chat-template history-turns max-length no-chat-template eval-language
        max-eval-samples alternative-prompt origin-postprocess broadcast chain-of-thought instruction-template
        add-eos-token""",
    ),
    (
        "planned with profiling, debugging and high availability",
        """profile profile-* use-pytorch-profiler record-memory-history memory-snapshot-path
        npu-datadump op-cal-tflops log-straggler *straggler* inprocess-* *-ft-* ft-* calc-ft-timeouts
        error-injection-* result-rejected-tracker-filename enable-high-availability
        enable-hbmfault-repair enable-worker-reboot enable-elastic-training distributed-optimizer-no-replica
        ttp-enabled check-weight-hash-across-dp-replicas-interval train-sync-interval run-workload-inspector-server
        log-memory-interval log-device-memory-used log-energy dump-param-to-param-group-map config-logger-dir
        *barrier-with-* test-mode fake-process-group decrease-batch-size-if-needed
        log-params-norm log-progress timing-log-* log-timers-to-tensorboard iterations-to-skip empty-unused-memory-level
        *manual-gc-eval exit-signal-handler-for-dataloader distributed-timeout-seconds-after-init""",
    ),
    (
        "planned with the distributed features",
        """use-tp-pp-dp-mapping *align-grad-reduce ddp-num-buckets reset-bucket-group-order param-and-grad-buffer-pad
        *scatter-gather-tensors-in-pipeline *clone-scatter-output-in-embedding auto-settings* target-nnodes
        layerwise-disaggregated-training""",
    ),
    (
        "out of scope: not a decoder-only language model on torch",
        """bert-* biencoder-* ict-* retriever-* query-in-block-prob indexer-* evidence-data-path titles-data-path
        embedding-path block-data-path use-one-sent-docs output-bert-embeddings mask-prob short-seq-prob sample-rate
        decoder-num-layers decoder-seq-length vision-* dino-* swin-* img-* num-classes num-channels patch-dim
        classes-fraction data-per-class-fraction *data-sharding head-lr-mult mask-type mask-factor iter-per-epoch
        dist-train ai-framework""",
    ),
    (
        "out of scope: a service or mechanism of other machines",
        """adlr-autoresume* app-tag-run-* *one-logger* enable-experimental moe-extended-tp
        *async-tensor-model-parallel-allreduce enable-autocast""",
    ),
)


def refusal(name: str) -> str | None:
    """Why the flag ``name`` (with or without dashes in front) is refused, or None when it is unknown."""
    bare = name.lstrip("-").replace("_", "-")
    for reason, patterns in REFUSED:
        if any(fnmatchcase(bare, pattern) for pattern in patterns.split()):
            return reason
    return None
