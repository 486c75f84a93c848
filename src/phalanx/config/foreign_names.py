"""Names in other frameworks and their counterparts here, offered as suggestions and not taken.

torchtitan (job_config.py), Megatron-LM (arguments.py), DeepSpeed (JSON configuration), Accelerate and transformers'
Trainer, trl, axolotl, LLaMA-Factory, torchrun. Names of ezpz, wordplay and nanoGPT with a counterpart are in
aliases.py; here are those without one.
"""

from __future__ import annotations

_NAMES = {
    # sizes of the batch and the run
    "layout.micro_batch": (
        "local_batch_size micro_batch_size per_device_train_batch_size "
        "pipeline_parallel_microbatch_size train_micro_batch_size_per_gpu"
    ),
    "layout.accumulation": "accumulate_grad_batches",
    "train.global_batch": "batch global_batch_size train_batch_size",
    "train.steps": "max_steps",
    # the model
    "model.seq_len": (
        "cutoff_len max_length max_position_embeddings max_seq_len max_seq_length n_ctx n_positions sequence_len"
    ),
    "model.window": "sliding_window window_size",
    "model.full_every": "sliding_window_pattern",
    "model.qk_norm": "qk_layernorm use_qk_norm",
    "model.attention_softcap": "attn_logit_softcapping",
    "model.rotary_fraction": "partial_rotary_factor rotary_pct rotary_percent",
    "model.window_rope_theta": "rope_local_base_freq",
    "model.d_model": "hidden hidden_size",
    "model.n_layers": "layers num_hidden_layers num_layers",
    "model.n_heads": "heads num_attention_heads",
    "model.n_kv_heads": "num_key_value_heads num_query_groups",
    "model.head_dim": "d_head d_kv kv_channels",
    "model.d_ff": "ffn_hidden_size intermediate_size",
    "model.vocab_size": "vocab",
    "model.preset": "flavor model_name",
    "model.dropout": (
        "attention_dropout attn_dropout attn_pdrop embd_pdrop hidden_dropout hidden_dropout_prob resid_pdrop"
    ),
    "model.bias": "bias_linear",
    "model.tied": "tie_weights tie_word_embeddings weight_tying",
    "model.activation": "swiglu",
    "model.norm": "normalization",
    "model.norm_eps": "norm_epsilon",
    "model.positions": "position_embedding_type",
    "model.rope_theta": "rope_base rotary_base",
    "model.rope_scaling.kind": "rope_type",
    "model.init_std": "init_method_std",
    "model.moe.n_experts": "num_experts",
    "model.moe.aux_loss": "moe_aux_loss_coeff",
    "model.moe.d_ff": "moe_ffn_hidden_size",
    "model.moe.top_k": "moe_router_topk",
    "model.moe.z_loss": "moe_z_loss_coeff",
    # the layout
    "layout.dp_replicate": "data_parallel_replicate_degree dp_replicate_size",
    "layout.dp_shard": "data_parallel_shard_degree dp_shard_size shard",
    "layout.tp": (
        "autotp_size tensor_model_parallel_size tensor_parallel tensor_parallel_degree tensor_parallel_size tp_size"
    ),
    "layout.sp": "sequence_parallel",
    "layout.pp": (
        "pipeline_model_parallel_size pipeline_parallel pipeline_parallel_degree pipeline_parallel_size pp_size"
    ),
    "layout.schedule": "pipeline_parallel_schedule",
    "layout.pp_chunks": "num_layers_per_virtual_pipeline_stage virtual_pipeline_model_parallel_size",
    "layout.cp": "context_parallel context_parallel_degree context_parallel_size cp_size",
    "layout.cp_ulysses": "sequence_parallel_size ulysses_degree",
    "layout.ep": "expert_parallel expert_model_parallel_size expert_parallel_degree",
    "layout.zero": "zero_optimization zero_stage",
    "layout.reshard": "fsdp_reshard_after_forward",
    "layout.hpz": "zero_hpz_partition_size",
    "layout.quantise_weights": "zero_quantized_weights",
    "layout.quantise_gradients": "zero_quantized_gradients",
    "layout.recompute": (
        "activation_checkpointing fsdp_activation_checkpointing gradient_checkpointing "
        "recompute_activations recompute_granularity"
    ),
    "layout.bucket_mb": "reduce_bucket_size",
    # optimizer
    "optimizer.betas": "adam_beta adam_beta1 adam_beta2",
    "optimizer.name": "optim",
    "optimizer.eps": "adam_eps adam_epsilon",
    "optimizer.clip": "clip_grad gradient_clip gradient_clip_val gradient_clipping max_norm",
    "optimizer.schedule": "decay_type lr_scheduler scheduler lr_decay_style lr_scheduler_type",
    "optimizer.decay_fraction": "decay_ratio",
    "optimizer.warmup_steps": "lr_warmup_iters",
    "optimizer.min_lr_ratio": "min_lr_factor",
    # precision, metrics, checkpoints, data, machine
    "train.precision": "bf16 fp16 mixed_precision mixed_precision_param",
    "train.compile": "torch_compile",
    "train.seed": "seed_everything",
    "train.gradients": "mixed_precision_reduce",
    "train.log_every": "logging_steps steps_per_print",
    "train.eval_every": "eval_steps",
    "checkpoint.every": "save_every save_steps",
    "checkpoint.keep": "keep_latest_k save_total_limit",
    "guard.every": "check_weight_hash_across_dp_replicas_interval",
    "guard.on_nan": "check_for_nan_in_loss_and_grad",
    "guard.on_spike": "check_for_large_grads check_for_spiky_loss",
    "data.path": "data_path dataset_path",
    "data.packing": "sample_packing",
    "data.template": "chat_template",
    "data.text_field": "dataset_text_field",
    "data.val_fraction": "val_set_size val_size",
    "data.workers": "preprocessing_num_workers",
    "data.tokenizer": "merge_file tokenizer_model tokenizer_type vocab_file",
    "train.dpo.beta": "pref_beta",
    "run.dir": "dump_folder folder output_dir",
    "run.trackers": "report_to wandb",
    "run.timeout_s": "ddp_timeout nccl_timeout init_timeout_seconds train_timeout_seconds",
    "cluster.nodes": "num_machines num_nodes",
    "cluster.devices_per_node": "gpus gpus_per_node ngpus",
}
"""Names in other frameworks, without their sections, by our field."""
FIELDS = {name: field for field, names in _NAMES.items() for name in names.split()}
"""Fields of a Job by the last part of a foreign name."""

_DATA_PARALLEL = "dp_replicate=N for DDP, dp_shard=N with zero=1, 2 or 3 for ZeRO and FSDP"
_NOTHING = "there is nothing to set"
_SAMPLING = "that is an option of `phalanx generate`: --temperature, --top-p, --top-k, --max-new-tokens"
_PROFILE = "train.profile.steps=[10, 12] profiles these steps, train.profile.python=true also with pyinstrument"
_HABITS = {
    "framework": "PyTorch is the only framework",
    "experiment": "wordplay's experiments are job files here; experiment=shakespeare is taken, or name the fields",
    "eval_only": "a run trains; `phalanx generate RUN` reads its checkpoint",
    "eval_iters": "train.eval_samples counts sequences: eval_iters × batch_size of them",
    "test_batch_size": "train.eval_samples is the number of sequences of a validation",
    "always_save_checkpoint": "checkpoint.every saves at any loss, checkpoint.keep_best also keeps the best",
    "meta_init": f"{_NOTHING}: parameters are created on the meta device",
    "compile_mode": "train.compile uses torch.compile's default mode",
    "act_mem_budget": "layout.recompute is none, products, selective or full; layout.recompute_cut names it per layer",
    **dict.fromkeys(
        ("num_workers", "dataloader_num_workers"),
        f"{_NOTHING}: a thread of each rank reads batches ahead (data.prefetch)",
    ),
    "datasets": "data.path is the data set and data.corpus how it is read; data.mix takes several",
    "train_on_inputs": "data.loss_on=all also trains on what is no answer",
    **dict.fromkeys(("assistant_only_loss", "completion_only_loss"), "data.loss_on=answers is the default of rows"),
    **dict.fromkeys(("max_prompt_length", "truncation_mode"), "sequences end at model.seq_len, as data.too_long says"),
    **dict.fromkeys(
        ("loss_type", "pref_loss"), "pairs are compared by DPO: train.dpo; other losses are not implemented"
    ),
    "finetuning_type": "model.lora.rank above 0 trains adapters; otherwise all weights are trained",
    **dict.fromkeys(
        ("adapter", "lora_target_linear"), "model.lora.rank above 0 trains adapters, those of model.lora.targets"
    ),
    "overwrite_output_dir": "--fresh starts a run over, and keeps the one that is there under another name",
    "warmup_ratio": "optimizer.warmup_steps is that share of train.steps",
    **dict.fromkeys(
        ("eval_strategy", "evals_per_epoch"), "train.eval_every is the number of steps between validations"
    ),
    **dict.fromkeys(
        ("save_strategy", "saves_per_epoch"), "checkpoint.every is the number of steps between checkpoints"
    ),
    "per_device_eval_batch_size": "train.eval_samples is the number of sequences of a validation",
    **dict.fromkeys(
        ("recompute_method", "recompute_num_layers"), "layout.recompute_cut names the layers that recompute"
    ),
    "warmup": "optimizer.warmup_steps is the learning rate's warm-up",
    "depth_init": "weights start at model.init_std, residual outputs at init_std / sqrt(2 n_layers)",
    "ckpt_dir": "checkpoints are in the run's directory: set run.dir and run.name, or checkpoint.remote",
    "ckpt_stage_dir": f"{_NOTHING}: checkpoints are written from a copy in host memory",
    "dataset_root": "data.path is the corpus, data.dir the folder of its token shards",
    "root_path": "data.path is the corpus, data.dir the folder of its token shards",
    "hf_split": "no data sets are downloaded from the hub; data.val_fraction is the share of the corpus for validation",
    "hf_limit": "data.limit_mb uses a part of the corpus",
    "tokenizer_name": "data.tokenizer is char, byte, bpe (trained on the corpus), or the path of a tokenizer.json",
    **dict.fromkeys(
        ("base_model", "model_name_or_path"),
        "model.from is a run or a Hugging Face folder to start from; `phalanx import hf hub:OWNER/NAME --out RUN` "
        "downloads one",
    ),
    **dict.fromkeys(("lora_rank", "lora_r"), "that is model.lora.rank"),
    "use_cache": f"{_NOTHING}: `phalanx generate` keeps keys and values, training needs none",
    "neftune_noise_alpha": "noise on embeddings is not implemented; model.dropout is the model's",
    "group_by_length": "data.packing puts several conversations into one sample",
    **dict.fromkeys(
        ("early_stopping_patience", "early_stopping"),
        "a run is as long as train.steps; checkpoint.keep_best keeps the checkpoint with the lowest validation loss",
    ),
    "lora_alpha": "that is model.lora.alpha",
    **dict.fromkeys(("lora_target", "lora_target_modules", "target_modules"), "that is model.lora.targets"),
    "lora_dropout": "adapters have no dropout: model.dropout is the model's",
    **dict.fromkeys(("layer_sizes", "input_size", "output_size"), "models are transformers: model.d_model, model.d_ff"),
    **dict.fromkeys(("profile", "pytorch_profiler", "pyinstrument_profiler", "rank_zero_only", "acc_events"), _PROFILE),
}
"""Names of ezpz and wordplay that no field corresponds to."""
ADVICE = {
    **dict.fromkeys(
        (
            "backend",
            "ddp",
            "deepspeed",
            "distributed_type",
            "ds_config_path",
            "fsdp",
            "fsdp_config",
            "fsdp_version",
            "strategy",
        ),
        f"set the layout instead: {_DATA_PARALLEL}",
    ),
    **dict.fromkeys(
        ("fsdp_sharding_strategy", "sharding_strategy"),
        "FULL_SHARD is zero=3, SHARD_GRAD_OP zero=2, HYBRID_SHARD dp_replicate with dp_shard",
    ),
    "use_distributed_optimizer": "that is zero=1 with dp_shard=N",
    **dict.fromkeys(("data_parallel_size", "dp"), f"set one of the two: {_DATA_PARALLEL}"),
    "offload_optimizer": "that is layout.offload=optimizer",
    **dict.fromkeys(
        ("cpu_offload", "enable_cpu_offload", "fsdp_offload_params", "offload_param", "offload_params"),
        "that is layout.offload=optimizer+parameters with zero=3; layout.offload=optimizer suffices for most models",
    ),
    **dict.fromkeys(
        ("activation_offloading", "cpu_offloading", "enable_activation_offload", "offload_activations"),
        "that is layout.offload=activations",
    ),
    "cpu_offloading_num_layers": "that is layout.offload_blocks, with layout.offload=activations",
    **dict.fromkeys(
        ("num_processes", "world_size"),
        "the number of processes is the product of the layout's axes, or -1 in dp_replicate or dp_shard takes the rest",
    ),
    **dict.fromkeys(("overlap_comm", "overlap_grad_reduce", "overlap_param_gather"), f"{_NOTHING}: it always overlaps"),
    **dict.fromkeys(
        ("label_smoothing", "label_smoothing_factor"), "label smoothing of the cross-entropy is not implemented"
    ),
    **dict.fromkeys(("temperature", "top_p", "max_new_tokens"), _SAMPLING),
    **dict.fromkeys(("ema", "ema_decay", "swa"), "averages of the weights over steps are not implemented"),
    **dict.fromkeys(("shuffle", "shuffle_seed"), f"{_NOTHING}: samples come in an order drawn from train.seed"),
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit", "quantization", "quantization_bit", "quantization_config"),
        "models are trained from whole weights: train.precision",
    ),
    **dict.fromkeys(
        ("mtp", "mtp_num_layers", "num_nextn_predict_layers"), "prediction of several tokens is not implemented"
    ),
    "init_from": "a run resumes from its own newest checkpoint; to start from others, `phalanx import hf "
    "hub:openai-community/gpt2 --out runs/gpt2` and model.from=runs/gpt2",
    **dict.fromkeys(("load", "resume", "resume_from_checkpoint"), "a run resumes by itself; --fresh starts over"),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), "a run is as long as train.steps"),
    "disable_bias_linear": "that is model.bias=false",
    "untie_embeddings_and_output_weights": "that is model.tied=false",
    "group_query_attention": "model.n_kv_heads says it: fewer of them than n_heads",
    **dict.fromkeys(
        ("project", "wandb_project"), "that is the variable WANDB_PROJECT; run.trackers=wandb sends metrics to W&B"
    ),
    **dict.fromkeys(
        (
            "flash_attention",
            "flash_attn",
            "use_flash_attn",
            "use_flash_attention",
            "attn_implementation",
            "use_flash_attention_2",
            "sdp_attention",
            "xformers_attention",
        ),
        f"{_NOTHING}: attention never stores its scores where torch has a kernel for it (docs/explanation/memory.md)",
    ),
    **_HABITS,
    **dict.fromkeys(
        ("local_rank", "master_addr", "master_port", "node_rank", "rdzv_backend"),
        "start the command with torchrun, srun or mpiexec, which say it",
    ),
}
"""Advice about names that no single field corresponds to."""
