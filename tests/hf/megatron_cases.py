"""Megatron's tensor parallelism over two processes: what the processes of distributed_cases.py run of it."""

import megatron_tiny as tiny
import torch
import torch.distributed as dist
import torch.nn.functional as F
from two_processes import case, fused

import tigon.megatron as tm

PACKAGE = "megatron"
VARIANTS = {
    "plain": ({},),
    "tied": ({"tied": True},),
    "gelu bias": ({"activation_func": F.gelu, "add_bias_linear": True},),
}


@case(needs=PACKAGE, **VARIANTS)
def megatron_tensor_parallel(options):
    with tiny.megatron(tensor_parallel=2):
        model = tiny.gpt(**options)
        want = tiny.step(model)
        report = tm.apply(model)
        tiny.same(tiny.step(model), want)
        assert [report.count(slot) for slot in ("norm", "mlp", "rope", "loss")] == [5, 2, 2, 1], report
        assert not report.left
        fused(report, 1)
        tm.undo(model)
        assert torch.equal(tiny.step(model)[0], want[0])


@case(needs=PACKAGE, fused=(True,), plain=(False,))
def megatron_by_ligers_names(fuse):
    """apply_liger_kernel_to_megatron: losses of a sharded vocabulary, also where Megatron names no group."""
    from tigon.integrations.liger.megatron import apply_liger_kernel_to_megatron

    with tiny.megatron(tensor_parallel=2), tiny.kept(tiny.places_of_liger()):
        want = tiny.step(tiny.gpt())
        apply_liger_kernel_to_megatron(rms_norm=True, cross_entropy=True, swiglu=True)
        model = tiny.gpt(cross_entropy_loss_fusion=fuse)
        norms = {type(m).__name__ for m in model.modules() if "Norm" in type(m).__name__}
        assert norms == {"LigerMegatronRMSNorm"}, norms
        tiny.same(tiny.step(model), want)


@case(needs=PACKAGE)
def megatron_sequence_parallel():
    """Norms in the specs' slots: Megatron's own refuse sequence parallelism."""
    with tiny.megatron(tensor_parallel=2):
        want = tiny.step(tiny.gpt())
        model = tiny.gpt(tm.gpt_block_spec, sequence_parallel=True)
        report = tm.apply(model)
        loss, grads = tiny.step(model)
        fused(report, 1)
        inputs, *_ = tiny.data()
        logits = model(*inputs)  # read: of all rows
        assert logits.shape == (2, tiny.ROWS, tiny.VOCAB // 2) and report.head_calls.materialised == 1
        partial = [name for name, p in model.named_parameters() if getattr(p, "sequence_parallel", False)]
        assert len(partial) == 5 and all("norm" in name for name in partial), partial
        for name in partial:  # as finalize_model_grads does
            dist.all_reduce(grads[name])
        tiny.same((loss, grads), want)


@case(needs=PACKAGE, mtp=({"mtp": 1},), mup=({"use_mup": True},))
def megatron_sharded_head(options):
    """Multi-token prediction, whose losses are fused too; logits times a number.

    Megatron-Core 0.19 finds its acceptance count by the largest logit of each process: it reads them.
    """
    from megatron.core.transformer import multi_token_prediction

    with tiny.megatron(tensor_parallel=2):
        model = tiny.gpt(**options)
        want = tiny.step(model)
        report = tm.apply(model, norm=False, mlp=False, rope=False)
        tiny.same(tiny.step(model), want)
        calls = report.head_calls
        depths = options.get("mtp", 0)
        read = depths * hasattr(multi_token_prediction, "_vocab_parallel_argmax")
        assert (calls.fused, calls.materialised) == (1 + depths, read), calls
        with torch.no_grad():
            tiny.same((model.eval()(*tiny.data()[0], labels=tiny.data()[1]), {}), (want[0], {}))


@case(needs=PACKAGE)
def megatron_main_grad():
    """The weight's gradient in main_grad, with the gradient that makes Megatron's hooks run."""
    with tiny.megatron(tensor_parallel=2):
        model = tiny.gpt()
        _, want = tiny.step(model)
        weight = model.output_layer.weight
        tm.apply(model)
        model.output_layer.gradient_accumulation_fusion = True
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
        _, grads = tiny.step(model)
        assert weight.grad_added_to_main_grad and grads["output_layer.weight"].shape == weight.shape
        torch.testing.assert_close(weight.main_grad, want["output_layer.weight"], rtol=1e-5, atol=1e-6)


@case(needs=PACKAGE, plain=(0.0,), smoothed=(0.1,))
def megatron_vocab_parallel_cross_entropy(smoothing):
    """Against Megatron's own without smoothing; with it, against the formula of the whole vocabulary."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    with tiny.megatron(tensor_parallel=2):
        generator = torch.Generator().manual_seed(3)
        whole = torch.randn(6, 2, 22, generator=generator)
        target, upstream = torch.arange(12).view(6, 2), torch.randn(6, 2, generator=generator)
        ours, theirs = (whole.chunk(2, -1)[dist.get_rank()].clone().requires_grad_() for _ in range(2))
        loss = tm.vocab_parallel_cross_entropy(ours, target, smoothing)
        loss.backward(upstream)
        if smoothing:
            exact = whole.double().requires_grad_()
            want = tiny.smoothed_loss(exact, target, smoothing)
            want.backward(upstream.double())
            gradient = exact.grad.chunk(2, -1)[dist.get_rank()].float()
        else:
            want = vocab_parallel_cross_entropy(theirs.clone(), target)  # writes over its logits
            want.backward(upstream)
            gradient = theirs.grad
            assert torch.equal(tm.fused_vocab_parallel_cross_entropy(ours, target), loss)
        torch.testing.assert_close(loss, want.float(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours.grad, gradient, rtol=1e-6, atol=1e-6)


@case(needs=PACKAGE)
def megatron_groups_of_one():
    """A head that no process shares, in a world of two."""
    with tiny.megatron(tensor_parallel=1):
        model = tiny.gpt(tensor_model_parallel_size=1)
        want = tiny.step(model)
        report = tm.apply(model)
        tiny.same(tiny.step(model), want)
        assert report.head_calls.fused == 1 and not report.left
