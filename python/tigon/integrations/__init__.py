"""Other libraries: transformers, Megatron, Liger, TRL, ``kernels`` and others. Nothing happens without a call."""
