"""A GPT of Megatron-Core under tensor parallelism: Megatron's own parts, then `tigon.megatron.apply`.

    torchrun --standalone --nproc-per-node 2 examples/megatron_gpt.py
    torchrun --standalone --nproc-per-node 2 examples/megatron_gpt.py --sequence-parallel

On GPUs where there are enough of them (NCCL, bfloat16), else on the CPU (gloo). Both runs begin from the same
weights and see the same batches; the text and its tokenizer are those of the other examples. Sequence
parallelism takes Tigon's norms in the specs in both runs: Megatron's local ones refuse it. The model is a
HybridModel of attention and MLP layers in turn; before Megatron-Core 0.19, which deprecates it, a GPTModel.
"""

from __future__ import annotations

import contextlib
import warnings
from importlib.util import find_spec

import many_processes
from sft_data import arguments, load_tokenizer, overrides, packed_dataset

SMALL = {"num_layers": 2, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 4}


@contextlib.contextmanager
def groups(device: str, ranks: int):
    """Megatron's groups; where there is no GPU, its questions for one are answered with the CPU."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed, random

    if device == "cpu":
        torch.cuda.current_device = lambda: "cpu"
        torch.cuda.current_stream = lambda device=None: None
        random.CudaRNGStatesTracker.fork = lambda self, *a, **k: contextlib.nullcontext()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    if device == "cuda":
        model_parallel_cuda_manual_seed(0)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def build(args, vocab: int, ranks: int, device: str, *, on_cpu: bool = True):
    """The model, the same in both runs, its weights drawn on the CPU; SwiGLU, RMSNorm, rotary embedding."""
    import torch
    import torch.nn.functional as F
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    sizes = {name: value for name, value in overrides(args).items() if name in SMALL}
    sizes = {**SMALL, **sizes}
    hybrid = find_spec("megatron.core.models.hybrid") is not None
    pattern = "*-" * sizes["num_layers"]
    if hybrid:  # it counts attention and MLP as two layers
        sizes |= {"num_layers": len(pattern), "is_hybrid_model": True}
    config = TransformerConfig(
        **sizes,
        tensor_model_parallel_size=ranks,
        sequence_parallel=args.sequence_parallel,
        use_cpu_initialization=on_cpu,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        bias_activation_fusion=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        # Megatron's fused form rounds the gradient of the logits to bfloat16, whatever they are.
        cross_entropy_loss_fusion=dtype == torch.bfloat16,
        cross_entropy_fusion_impl="native",
    )
    make = hybrid_model if hybrid else gpt_model
    return make(
        config,
        pattern,
        vocab,
        args.seq,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).to(device)


def hybrid_model(config, pattern: str, vocab: int, seq: int, **options):
    """Of Megatron's local layers, without Transformer Engine."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    import tigon.megatron

    spec = tigon.megatron.hybrid_stack_spec(config, norms=config.sequence_parallel)
    return HybridModel(config, spec, vocab, seq, hybrid_layer_pattern=pattern, **options)


def gpt_model(config, pattern: str, vocab: int, seq: int, **options):
    """Each of its layers is attention and MLP."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    import tigon.megatron

    local = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec = tigon.megatron.gpt_block_spec(config) if config.sequence_parallel else local
    return GPTModel(config, spec, vocab, seq, **options)


def run(args, train, vocab: int, ranks: int, device: str, tigon: bool) -> dict:
    """A curve."""
    import torch

    import tigon.megatron as tigon_megatron

    model = build(args, vocab, ranks, device)
    if tigon:
        report = tigon_megatron.apply(model)
        if many_processes.first():
            print(report)
    adam = torch.optim.AdamW(model.parameters(), lr=args.lr)
    step = step_of(model, adam, args.batch, args.seq, device)

    def of_rows(i: int) -> float:
        rows = [row["input_ids"] for row in train[i * args.batch : (i + 1) * args.batch]]
        return step(torch.tensor(rows, device=device))

    return many_processes.train(of_rows, args.steps, device, "Tigon" if tigon else "stock")


def step_of(model, adam, batch: int, seq: int, device: str):
    """A step on token ids ``[batch, seq]``, which returns the loss."""
    import torch
    import torch.distributed as dist

    positions = torch.arange(seq, device=device).expand(batch, -1)
    mask = torch.ones(1, 1, seq, seq, dtype=torch.bool, device=device).triu(1)
    partial = [p for p in model.parameters() if getattr(p, "sequence_parallel", False)]

    def step(ids) -> float:
        losses = model(ids, positions, mask, labels=ids.roll(-1, 1))[:, :-1]  # the last has no next token
        loss = losses.mean()
        loss.backward()
        for p in partial:  # as Megatron's finalize_model_grads
            dist.all_reduce(p.grad)
        adam.step()
        adam.zero_grad()
        return float(loss.detach())

    return step


def main(words: list[str] | None = None) -> int:
    """Both curves."""
    parser = arguments(__doc__, steps=8, seq=128)
    parser.add_argument("--sequence-parallel", action="store_true")
    args = parser.parse_args(words)
    import torch.distributed as dist

    warnings.simplefilter("ignore")  # Megatron's, of what is not installed
    device = many_processes.start()
    ranks = dist.get_world_size()
    tokenizer, _ = many_processes.in_turn(lambda: load_tokenizer(args))
    train, _ = packed_dataset(args, tokenizer)
    vocab = -(-len(tokenizer) // ranks) * ranks  # Megatron counts its padding as classes
    with groups(device, ranks):
        curves = [run(args, train, vocab, ranks, device, tigon) for tigon in (False, True)]
    return many_processes.compare(args, "megatron_gpt", *curves)


if __name__ == "__main__":
    raise SystemExit(main())
