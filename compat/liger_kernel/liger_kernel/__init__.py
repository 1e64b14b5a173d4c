"""``liger_kernel`` by Tigon: every name comes from ``tigon.compat.liger``."""

from tigon.compat.liger import adopt

adopt(__name__)
