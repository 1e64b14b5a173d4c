"""NeMo AutoModel's patch of a loaded model: its Auto classes run it by themselves, and need CUDA for the rest."""

from program import case, loop, model

PROGRAM, DISTRIBUTION = "NeMo AutoModel", "nemo-automodel"
PACKAGES = "transformers[kernels]==5.18.0 datasets torchdata pyyaml tiktoken ninja peft"
ALONE = "nemo-automodel==0.7.0 megatron-fsdp==0.5.0 torchao==0.16.0 flashoptim"  # these ask for Triton
CASES = []


@case(CASES, "full", "`tigon.compat.liger.install()`, `use_liger_kernel=True`, its default", "llama")
@case(CASES, "full, Phi-3", "the same", "phi3")
def train(with_tigon, folder, family):
    if with_tigon:
        import tigon.compat.liger

        tigon.compat.liger.install()
    import torch
    from nemo_automodel._transformers.kernel_patches import _patch_liger_kernel

    made = model(family)
    if with_tigon:
        made = _patch_liger_kernel(made)
    return loop(made, torch.optim.AdamW(made.parameters(), lr=1e-2))
