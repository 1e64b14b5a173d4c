"""Other libraries: transformers, Megatron, Liger's interface, TRL, ``kernels``. Nothing happens without a call."""
