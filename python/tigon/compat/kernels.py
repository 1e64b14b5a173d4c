"""Public path of :mod:`tigon.integrations.kernels`."""

from tigon.integrations.kernels import install, mapping

__all__ = ["install", "mapping"]
