"""Public path of the modules in :mod:`tigon.integrations.transformers.modules`."""

from tigon.integrations.transformers.modules import *  # noqa: F403  the names of __all__
from tigon.integrations.transformers.modules import __all__ as __all__
