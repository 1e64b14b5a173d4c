"""``tigon.compat.liger``, ``.trl``, ``.kernels``: public paths of :mod:`tigon.integrations`."""
