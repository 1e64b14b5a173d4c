"""Public path of :mod:`tigon.integrations.trl`."""

from tigon.integrations.trl import LogProbHead, install, uninstall

__all__ = ["LogProbHead", "install", "uninstall"]
