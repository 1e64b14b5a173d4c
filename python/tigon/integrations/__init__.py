"""Other libraries: transformers, Megatron, Liger, TRL, ``kernels``. Nothing happens without a call."""
