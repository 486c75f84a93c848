"""Forty typical bugs of parallel training, each as an edit of one function: what `phalanx verify` must find.

They are not the easy ones. Most leave the loss of the first step as it is, and many are known from other frameworks:
Megatron-LM 673, 906, 1464, 2142, 7452; torchtitan 1373, 1805, 2206, 2387, 3280, 4054; torchtune 2641; pytorch 160285;
Automodel 1412; OpenPipe/ART 619. Each bug's `named` is in what verify says, which is what differs, the module or
parameter, what it looks like, the axis and the collectives, with " | " between.
"""

from __future__ import annotations

from verify.plant import Bug

TINY = "model.n_layers=2 model.d_model=16 model.n_heads=4 model.seq_len=16"
LLAMA = (
    f"{TINY} model.n_kv_heads=2 model.norm=rmsnorm model.positions=rope model.activation=swiglu "
    "model.bias=false model.tied=false"
)
EXPERTS = (
    "model.moe.n_experts=4 model.moe.top_k=2 model.moe.d_ff=8 model.moe.n_shared=1 model.moe.aux_loss=0.01 "
    "model.moe.z_loss=0.001 model.moe.bias_balanced=true"
)
LATENT = (
    f"{LLAMA} model.n_kv_heads=0 model.mla.q_rank=12 model.mla.kv_rank=8 model.mla.rope_head_dim=4 "
    "model.mla.nope_head_dim=4 model.mla.v_head_dim=4"
)
MODELS = {
    "gpt": f"{TINY} model.dropout=0.1",
    "llama": LLAMA,
    "experts": f"{LLAMA} {EXPERTS}",
    "latent": LATENT,
    "chosen keys": f"{LATENT} model.sparse.top_k=5 model.sparse.index_heads=2 model.sparse.index_head_dim=8",
    "shared keys": f"{LLAMA} model.n_layers=4 model.shared_keys=2 model.layer_embedding=4 model.vocab_size=251",
    "further tokens": f"{LLAMA} model.n_layers=4 model.mtp=2 model.tied=true",
    "adapters": f"{LLAMA} model.lora.rank=2",
}
"""The models' settings, by name."""

BUGS = (
    # Micro-batches, and what the loss is divided by.
    Bug(
        "the last micro-batch of a step is dropped",
        "accumulation=4",
        "parallel.data:Replica.gradients",
        (("losses = [", "micros = micros[: max(1, len(micros) - 1)]\n    losses = ["),),
        "no rank computed it for rows",
    ),
    Bug(
        "accumulation divides the loss once more",
        "dp_replicate=2,accumulation=2",
        "train.step:Stepper.factor",
        (("/ (global_tokens or 1)", "/ (global_tokens or 1) / len(micro_batches)"),),
        "0.5 × the expected values: divided by",
    ),
    Bug(
        "each rank's loss is a mean over its own tokens, and gradients are the mean of those",
        "dp_replicate=2",
        "train.step:Stepper.factor",
        (
            (
                "/ (global_tokens or 1)",
                "/ sum((each.targets >= 0).sum() for each in micro_batches) / self.mesh.data_ranks",
            ),
        ),
        "| loss |",
    ),
    Bug(
        "the loss is multiplied by the context-parallel ranks",
        "cp=2",
        "train.step:Stepper.factor",
        (("/ (global_tokens or 1)", "* self.job.layout.cp / (global_tokens or 1)"),),
        "2 × the expected values: summed twice",
        model="llama",
    ),
    Bug(
        "the loss that is reported is that of one context-parallel rank's tokens",
        "tp=2,cp=2",
        "parallel.mesh:Mesh.owns_loss",
        (('self.coordinates["tp"] == 0', 'self.coordinates["tp"] == self.coordinates["cp"] == 0'),),
        "loss | None",
        model="llama",
    ),
    Bug(
        "the last chunk of the tokens of a chunked loss is left out",
        "loss_chunk=24,accumulation=2",
        "parallel.vocabulary:_Chunked.forward",
        (
            ("torch.empty_like(x)", "torch.zeros_like(x)"),
            ("range(0, len(x), how.chunk)", "range(0, len(x) - how.chunk, how.chunk)"),
        ),
        "| loss |",
    ),
    Bug(
        "each context-parallel rank takes the log-probability of a pair's answer from its own tokens",
        "cp=2",
        "parallel.objective:PairLoss.__call__",
        (("self.cp.all_reduce(whole).wait()", "pass"),),
        "| loss |",
        "data.corpus=preferences data.path=pairs.jsonl",
        "llama",
    ),
    # Data parallelism, ZeRO and FSDP.
    Bug(
        "shards are not summed over the replicas",
        "dp_replicate=2,dp_shard=2,zero=1",
        "parallel.zero:BucketReplica.collect",
        (("b.replicate.size > 1", "b.replicate.size > 2"),),
        "not summed over dp_replicate",
        parts=True,
    ),
    Bug(
        "the elements of a ZeRO shard are off by one",
        "dp_shard=2,zero=1",
        "parallel.zero:BucketReplica._gradient",
        (("bucket.reduced[start", "bucket.reduced.roll(1)[start"),),
        "dp_shard reduce_scatter",
    ),
    Bug(
        "with ZeRO-2 a micro-batch's shard replaces that of the one before it",
        "dp_shard=2,zero=2,accumulate=sharded,accumulation=2",
        "parallel.zero:Bucket.settle",
        (("self.reduced += self.arriving", "self.reduced.copy_(self.arriving)"),),
        "dp_shard reduce_scatter",
    ),
    Bug(
        "one bucket's parameters are not gathered after the optimizer",
        "dp_shard=2,zero=1,accumulation=2",
        "parallel.zero:BucketReplica.publish",
        (("[*self.buckets,", "[*(self.buckets if frozen else self.buckets[:-1]),"),),
        "the update of step 1 has not reached it",
        parts=True,
    ),
    Bug(
        "parameters are gathered before the optimizer has written them",
        "dp_shard=2,zero=1",
        "train.step:Stepper.finish",
        (
            ("norm, inputs =", "self.replica.publish(); self.replica.arrive()\n    norm, inputs ="),
            ("heartbeat.enter(Phase.EXCHANGE)\n    self.replica.publish()", "heartbeat.enter(Phase.EXCHANGE)"),
        ),
        "the update of step 1 has not reached it",
        parts=True,
    ),
    Bug(
        "gradients are summed in fp32, whatever the parameters have",
        "dp_shard=2,zero=2",
        "parallel.apply:apply_data_parallel",
        (("torch.float32 if job", "torch.float32 if True or job"),),
        "rounded to a lower precision",
    ),
    Bug(
        "the second copy of the parameters is not dropped after a step",
        "dp_shard=4,zero=3,hpz=2,accumulation=2",
        "parallel.fsdp:Gather.drop",
        (("self.copy = None", "pass"),),
        "hpz all_gather",
        model="llama",
    ),
    Bug(
        "FSDP divides the experts' gradients by the ranks, which the loss did already",
        "dp_shard=4,ep=2,zero=3",
        "parallel.fsdp:ShardedReplica.__init__",
        (("divide_factor(1.0)", "divide_factor(2.0 if _of_experts(group) else 1.0)"),),
        "moe.experts.up.weight",
        model="experts",
    ),
    Bug(
        "weight decay follows the shape of a rank's shard, which is flat",
        "dp_shard=2,zero=1",
        "parallel.parameter_shards:ParameterShard.decays",
        (("len(self.tensor_slice.whole) >= 2", "self.value.dim() >= 2"),),
        "| embed.weight |",
    ),
    # Norm and clipping.
    Bug(
        "weights that every tensor rank holds whole are counted once a rank in the norm",
        "tp=2",
        "parallel.parameter_shards:counted",
        (("if f.tensor_slice.first and not f.copy", "if not f.copy"),),
        "norm | embed.weight",
    ),
    Bug(
        "each pipeline rank clips by the norm of its own stages",
        "pp=2,accumulation=4",
        "parallel.mesh:Mesh.is_sharded",
        (('("pp", "dp_shard", "cp", "tp")', '("dp_shard", "cp", "tp")'),),
        "norm | embed.weight",
        model="llama",
    ),
    Bug(
        "a tied embedding is counted by both of its pipeline ranks in the norm",
        "pp=2,accumulation=4",
        "parallel.data:LocalModel.shard",
        (("copy = self.stages is not None and ", "copy = False and self.stages is not None and "),),
        "norm | embed.weight",
    ),
    Bug(
        "the squares of the norm are summed in fp32",
        "dp_replicate=2",
        "train.optimizer:square_sum",
        (("torch.stack(norms).double().square().sum()", "torch.stack(norms).float().square().sum().double()"),),
        "rounded to a lower precision",
    ),
    # Tensor and sequence parallelism.
    Bug(
        "with sequence parallelism the gradients of norms are not summed over the tensor ranks",
        "tp=2,sp=true",
        "parallel.apply:apply_tensor_parallel",
        (("is_summed(layout.sp)", "is_summed(False)"),),
        "blocks.0.attn_norm.weight",
        model="llama",
        parts=True,
    ),
    Bug(
        "every tensor rank adds the bias to its summand",
        "tp=2",
        "parallel.tensor:RowParallelLinear.forward",
        (("y + self.bias", "y + self.bias + self.bias.detach() * (self.parallel.tp.size - 1)"),),
        "blocks.0.attn.wo |",
    ),
    Bug(
        "tensor ranks hold key and value heads in another order than query heads",
        "tp=4",
        "partition.tensor_slices:slice_of",
        (("rank // copies * size, size", "rank % (tp // copies) * size, size"),),
        "blocks.0.attn.wk |",
        model="llama",
    ),
    Bug(
        "the gradients of key and value heads with copies on several tensor ranks are not summed",
        "tp=4",
        "parallel.apply:apply_tensor_parallel",
        (("parts.partials.append(PartialGradients(mesh.neighbours", "(lambda _: 0)(PartialGradients(mesh.neighbours"),),
        "blocks.0.attn.wk.weight",
        model="llama",
        parts=True,
    ),
    Bug(
        "the padding of a cut vocabulary has a part in the softmax",
        "tp=2",
        "parallel.vocabulary:losses_and_slopes",
        (("if vocab < first + rows:", "if vocab < first:"),),
        "| loss |",
    ),
    Bug(
        "a tensor rank takes the first token of its part of the vocabulary for another's in the loss",
        "tp=2,dp_replicate=2",
        "parallel.vocabulary:losses_and_slopes",
        (("(targets >= first) & (targets < first + rows)", "(targets > first) & (targets < first + rows)"),),
        "| loss |",
        model="llama",
    ),
    Bug(
        "norms over all heads are those of each tensor rank's heads",
        "tp=2",
        "parallel.tensor:_summed",
        (("tp.all_reduce(together).wait()", "together *= tp.size"),),
        "blocks.0.attn.core.q |",
        "model.qk_norm=width",
        "llama",
    ),
    Bug(
        "the gradients of matrices that compress for all heads are not summed over the tensor ranks",
        "tp=2",
        "parallel.apply:apply_tensor_parallel",
        (("for name in slices if", 'for name in slices if "router" in name and'),),
        "blocks.0.attn.wq_a.weight",
        model="latent",
        parts=True,
    ),
    Bug(
        "tensor ranks drop the same places of different heads",
        "tp=2",
        "train.step:Stepper.tensors",
        (("part = tp.rank, tp.size", "part = 0, tp.size"),),
        "blocks.0.attn.core | tokens 0–15, heads 2–3 of rank 1",
    ),
    Bug(
        "the gradients of adapters' B are not summed over the tensor ranks that hold parts of A",
        "tp=2",
        "parallel.apply:apply_tensor_parallel",
        (("for name in slices if", 'for name in slices if not name.endswith("lora_b.weight") and'),),
        "attn.wo.lora_b.weight",
        model="adapters",
        parts=True,
    ),
    # Experts.
    Bug(
        "the gradients of routers are not summed over the tensor ranks",
        "tp=2",
        "parallel.apply:apply_tensor_parallel",
        (("for name in slices if", 'for name in slices if "router" not in name and'),),
        "moe.router.weight",
        model="experts",
        parts=True,
    ),
    Bug(
        "every tensor rank adds the whole gradient of the load-balancing loss",
        "tp=2",
        "parallel.tensor:connect",
        (("else 1 / parallel.tp.size", "else 1.0"),),
        "moe.router |",
        model="experts",
    ),
    Bug(
        "context-parallel ranks balance the load of their own tokens",
        "cp=2",
        "parallel.context:SplitSequences.sum",
        (("self.cp.all_reduce(total).wait()", "pass"),),
        "moe.router |",
        model="experts",
    ),
    Bug(
        "an expert's capacity is that of a context-parallel rank's tokens",
        "cp=2",
        "model.moe:MixtureOfExperts._within_capacity",
        (("sequences.whole(chosen)", "chosen"), ("sequences.mine(within)", "within")),
        "moe.experts |",
        "model.moe.capacity=1",
        "experts",
    ),
    Bug(
        "rows that arrive are taken to be in the order of experts, and are in that of ranks",
        "dp_shard=2,ep=2",
        "parallel.expert:RowFlight.compute",
        (("transpose_blocks(self.out.wait(self.take()), self.blocks)", "self.out.wait(self.take())"),),
        "moe.experts |",
        model="experts",
    ),
    Bug(
        "a token that is sent once has the gates of other ranks' experts, too",
        "dp_shard=2,ep=2,dispatch=tokens",
        "parallel.expert:arrived",
        (("gates.where(here, 0)", "gates"),),
        "moe",
        model="experts",
    ),
    Bug(
        "both halves of a micro-batch that overlap get the shared experts' output of the first",
        "dp_shard=2,ep=2,ep_overlap=true",
        "parallel.expert:OverlappedHalves.__call__",
        (("zip(flights, shared, halves", "zip(flights, shared[:1] * 2, halves"),),
        "blocks.0 | rows",
        model="experts",
    ),
    Bug(
        "routers count the padding of packed conversations",
        "dp_replicate=2",
        "train.step:Stepper.tensors",
        (("if (self.job.model.moe.n_experts or self.job.model.sparse.top_k) and", "if False and"),),
        "moe.experts |",
        "data.corpus=chat data.path=chats.jsonl data.packing=true data.document_mask=true",
        "experts",
    ),
    # Context parallelism.
    Bug(
        "every context-parallel rank's first token has position 0",
        "cp=2",
        "parallel.objective:MicroTensors.positions",
        (("if self.places is None", "if True"),),
        "turned to another position",
        model="llama",
    ),
    Bug(
        "the output of earlier blocks of a ring is not rescaled when a later one has larger scores",
        "cp=2",
        "parallel.ring:_merge",
        (("o.mul_((lse - both).exp().unsqueeze(-1)).add_(", "o.add_("),),
        "blocks.0.attn.core |",
        model="llama",
    ),
    Bug(
        "places of the ring are taken to be in the reverse order of the zig-zag",
        "cp=4",
        "parallel.ring:zigzag",
        (("if source < place:", "if source > place:"),),
        "blocks.0.attn.core |",
        model="llama",
    ),
    Bug(
        "heads come back from the Ulysses exchange in the wrong order",
        "cp=2,cp_ulysses=2",
        "parallel.context:_gather_heads",
        (("_exchanged(parts, ulysses)", "_exchanged(parts, ulysses).flip(0)"),),
        "blocks.0.attn.core |",
        model="llama",
    ),
    Bug(
        "the gradients of keys and values lose what the last place of the ring contributes",
        "cp=2",
        "parallel.ring:Around._take_in",
        (("gradients += received", "pass"),),
        "attn.core.v |",
        model="llama",
    ),
    Bug(
        "a query of another rank's keys sees one key more than the window has",
        "cp=2",
        "model.attention:visible",
        (("(queries - window)[:, None] < keys", "(queries - window)[:, None] <= keys"),),
        "blocks.0.attn.core |",
        "model.window=5",
        "llama",
    ),
    Bug(
        "documents do not bound attention to other ranks' keys",
        "cp=2",
        "parallel.context:ContextAttention.attend",
        (("Reach(self.window, documents, self.scoring)", "Reach(self.window, None, self.scoring)"),),
        "blocks.0.attn.core |",
        "data.document_mask=true",
        "llama",
    ),
    Bug(
        "targets are the next tokens of a rank's own tokens, across the ends of its parts",
        "cp=2",
        "train.step:Stepper.tensors",
        (
            (
                "tokens[:, places], targets[:, places]",
                "tokens[:, places], tokens[:, places].roll(-1, 1).where(targets[:, places] >= 0, -100)",
            ),
        ),
        "| loss |",
        model="llama",
    ),
    # Pipelines.
    Bug(
        "the gradients of a tied embedding are not summed over the ends of the pipeline",
        "pp=2,accumulation=4",
        "parallel.apply:sum_between_stages",
        (("holders(name)))) > 1", "holders(name)))) > 2"),),
        "not summed over pp",
        parts=True,
    ),
    Bug(
        "a rank runs the layers of its interleaved chunks in each other's place",
        "pp=2,schedule=interleaved_1f1b,accumulation=4",
        "parallel.stages:Stages.__post_init__",
        (("tuple(map(str, self.cut[number]))", "tuple(map(str, self.cut[number ^ 2]))"),),
        "ran it after blocks.3",
        "model.n_layers=4",
        "llama",
    ),
    Bug(
        "the layers of a stage run in reverse order",
        "pp=2,accumulation=4",
        "parallel.stages:Stages.__post_init__",
        (("tuple(map(str, self.cut[number]))", "tuple(map(str, self.cut[number][::-1]))"),),
        "ran it after blocks.1",
        model="llama",
    ),
    Bug(
        "put-off weight gradients read inputs that a later micro-batch has overwritten",
        "pp=2,schedule=zb_h1,accumulation=4",
        "parallel.linear:DeferredWeightGrads.take",
        (
            (
                "product = multiply, gradient, x, weight",
                "x = vars(self).setdefault('kept', {}).setdefault(weight, torch.empty_like(x)).copy_(x)\n"
                "    product = multiply, gradient, x, weight",
            ),
        ),
        "blocks.2.attn.wq.weight",
        model="llama",
    ),
    Bug(
        "the keys and values of a slice do not get the gradients of later slices",
        "pp=2,schedule=terapipe,pp_slices=4,accumulation=2",
        "parallel.objective:Earlier.again",
        (("if leaf.grad is not None:", "if leaf.grad is not None and number:"),),
        "blocks.2.attn.wv |",
        model="llama",
    ),
    Bug(
        "the learning rate of an unflushed step is that of the step before it",
        "pp=2,schedule=pipedream,accumulation=4",
        "train.drivers:UnflushedSteps._settle",
        (
            (
                "optimizer.step(computed.inputs.lr,",
                "last = vars(self).get('last', computed.inputs.lr)\n"
                "        vars(self)['last'] = computed.inputs.lr\n"
                "        optimizer.step(last,",
            ),
        ),
        "the update of step 3 has not reached it",
        model="llama",
    ),
    Bug(
        "validation cuts sequences into slices, which only training does",
        "cp=2,pp=2,schedule=terapipe,pp_slices=2,accumulation=2",
        "train.step:Stepper.tensors",
        (("1 if validates else self.slices", "self.slices"),),
        "validation | None",
        model="llama",
    ),
    Bug(
        "experts without a token keep the gradient that was in memory",
        "dp_shard=4,ep=2",
        "model.moe:GroupedProduct.weight_gradient",
        (("x.new_zeros(self.experts, outputs, inputs)", "x.new_full((self.experts, outputs, inputs), 1e-3)"),),
        "moe.experts.up.weight",
        model="experts",
    ),
    Bug(
        "the summed gradients of norms reach the first tensor rank alone",
        "tp=2,sp=true",
        "parallel.data:Replica._sum_partials",
        (
            (
                "gradient.copy_(summed.view_as(gradient))",
                "partial.axis.rank or gradient.copy_(summed.view_as(gradient))",
            ),
        ),
        "blocks.0.attn_norm.weight",
        model="llama",
        parts=True,
    ),
    # Recomputation, offloading, and optimizers of whole matrices.
    Bug(
        "the second forward pass of a recomputed block has other dropout masks",
        "recompute=full,accumulation=2",
        "parallel.recompute:run_traced",
        (
            (
                "checkpoint(compute,",
                "checkpoint((lambda calls: lambda *given: (calls.append(0), compute(*[\n"
                "        type(each)(each.seed, each.step + len(calls) - 1, each.sample_ids)\n"
                "        if hasattr(each, 'sample_ids') else each for each in given]))[1])([]),",
            ),
        ),
        "blocks.1.mlp.down |",
    ),
    Bug(
        "the backward pass reads offloaded activations before their copy has ended",
        "accumulation=2,offload=activations",
        "parallel.offload:SavedStorage.fetch",
        (
            (
                "self.host.up(self.copy, self.bytes)",
                "self.bytes.zero_()\n    self.host.up(self.copy[: self.size // 2], self.bytes[: self.size // 2])",
            ),
        ),
        "blocks.0.mlp.down |",
    ),
    Bug(
        "gradients leave for the optimizer on the host before the last micro-batch has added its own",
        "accumulation=2,offload=optimizer",
        "parallel.data:Replica._ready",
        (("if self.final and", "if"),),
        "| embed.weight |",
        model="llama",
    ),
    Bug(
        "a matrix whose update is made orthogonal is put together from tensor ranks' slices in reverse",
        "tp=2",
        "parallel.parameter_shards:_assembled",
        (("part.start, part.size)", "part.whole[part.dim] - part.start - part.size, part.size)"),),
        "blocks.0.attn.wq.weight",
        "optimizer.name=muon",
        "llama",
    ),
    # Whole experts on tensor ranks.
    Bug(
        "tensor ranks with whole experts share the load-balancing loss as if each had all tokens",
        "tp=2,ep=2,etp=1,sp=true",
        "parallel.tensor:connect",
        (("1 if parallel.folds else 1 / parallel.tp.size", "1 / parallel.tp.size"),),
        "moe.router |",
        model="experts",
    ),
    Bug(
        "a tensor rank with whole experts takes its tokens for those of the first sequences",
        "tp=2,ep=2,etp=1,sp=true",
        "parallel.expert:FoldedSequences._numbers",
        (("self._run(numbers).flatten()", "numbers.flatten()[: x.shape[0] * x.shape[1]]"),),
        "moe.router |",
        model="experts",
    ),
    Bug(
        "rows go to experts in the order in which data ranks would hold them, with tensor ranks among these",
        "dp_shard=2,tp=2,ep=4,etp=1,sp=true",
        "partition.tensor_slices:in_order_of_ranks",
        (("return (within // each * tp + of_tensor_rank) * each + within % each", "return experts"),),
        "moe.experts",
        model="experts",
    ),
    # Documents dealt to the positions of a ring.
    Bug(
        "a ring's ranks hold the tokens of the zig-zag, and attend as if they had those that were dealt to them",
        "cp=2",
        "train.step:Stepper.tensors",
        (("places = torch.tensor([position for run in runs for position in run], device=self.device)", "pass"),),
        "blocks.0.attn.core |",
        "data.document_mask=true",
        "llama",
    ),
    Bug(
        "short documents in a row, which are computed in one call, are not masked from each other",
        "cp=2",
        "partition.documents:DocumentCut._diagonal",
        (("masked=not alone", "masked=False"),),
        "blocks.0.attn.core |",
        "data.document_mask=true",
        "llama",
    ),
    # The indexer of sparse attention.
    Bug(
        "each tensor rank's indexer learns from the heads of this rank",
        "tp=2",
        "model.sparse:_Chosen.backward",
        (("core.sum_heads(target)", "pass"),),
        "attn.core.index",
        model="chosen keys",
        parts=True,
    ),
    Bug(
        "gathered keys, of which the indexer chooses, are in the order of the context-parallel ranks",
        "cp=2",
        "parallel.context:_GatherSequences.forward",
        (("[:, order.argsort()]", "[:, order.sort()[0]]"),),
        "blocks.0.attn.core |",
        model="chosen keys",
    ),
    Bug(
        "context-parallel ranks take their queries to be the last tokens of the sequence",
        "cp=2",
        "parallel.context:WholeSequences.places",
        (("self.cp.rank, device)", "0, device)"),),
        "blocks.0.attn.core |",
        model="chosen keys",
    ),
    # Layers that share keys, and have embeddings of their own.
    Bug(
        "a stage sends the projections for later layers' embeddings without a way back for their gradient",
        "pp=2,accumulation=2",
        "model.transformer:Transformer.sent",
        (("beside.projected)", "beside.projected.detach())"),),
        "layer_inputs",
        model="shared keys",
    ),
    Bug(
        "the layer that lends its keys gets no gradient from the layers that read them",
        "tp=2",
        "model.attention:SharedKeys.extend",
        (("self.lent[layer] = keys, values", "self.lent[layer] = keys.detach(), values"),),
        "blocks.1.attn",
        model="shared keys",
    ),
    # Modules for further tokens.
    Bug(
        "modules for further tokens read the tokens one place after a context-parallel rank's own",
        "cp=2",
        "train.step:Stepper.tensors",
        (("each.map(lambda x: x[:, places])", "each.map(lambda x: x.roll(-1, 1)[:, places])"),),
        "blocks.2",
        model="further tokens",
    ),
    Bug(
        "the gradient of a chunked loss of further tokens has the scale of the loss of the next ones",
        "pp=2,loss_chunk=24,accumulation=2",
        "parallel.objective:Objective._of_further",
        (("self.chunked_further", "self.chunked"),),
        "| embed.weight |",
        model="further tokens",
    ),
    # Completions.
    Bug(
        "the loss of completions is the mean of those of the micro-batch",
        "dp_replicate=2",
        "parallel.objective:PolicyLoss.__call__",
        (("(weight * loss).where(valid, 0).sum()", "(weight * loss).where(valid, 0).sum() / len(losses)"),),
        "| loss |",
        "data.corpus=prompts data.path=prompts.jsonl train.grpo.reward=exact",
        "llama",
    ),
    Bug(
        "context-parallel ranks compare the log-probabilities of their tokens with those of the first tokens",
        "cp=2",
        "train.step:Stepper.tensors",
        (("policy[:, places]", "policy[:, : len(places)]"),),
        "| loss |",
        "data.corpus=prompts data.path=prompts.jsonl train.grpo.reward=exact",
        "llama",
    ),
)
