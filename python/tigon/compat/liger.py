"""Public path of :mod:`tigon.integrations.liger`."""

from tigon.integrations.liger import VERSION, adopt, install, installed, uninstall

__all__ = ["VERSION", "adopt", "install", "installed", "uninstall"]
