"""Public path of :mod:`tigon.integrations.verl`."""

from tigon.integrations.verl import LogProbHead, install, uninstall

__all__ = ["LogProbHead", "install", "uninstall"]
