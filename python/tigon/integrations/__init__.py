"""Other libraries: transformers, Liger's interface, TRL, ``kernels``. Nothing happens without a call."""
