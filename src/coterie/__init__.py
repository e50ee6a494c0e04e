"""Differentially private federated multi-task learning, with one model per client.

The public names are listed once, in `__init__.pyi`, and loaded on first use, so that planning a
budget does not load torch. Importing this package changes nothing in the process.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]
