"""Import Grain and Orbax on first use, without the handler that they put on the root logger.

`quiet_imports.grain` and `quiet_imports.ocp` are the libraries; their import takes half a second. They log at import,
by absl, which calls `logging.basicConfig`; a program's own call would then do nothing.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import grain
    from orbax.checkpoint import v1 as ocp

__all__ = ["grain", "ocp"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    handlers = logging.root.handlers[:]
    try:
        if name == "grain":
            library = importlib.import_module("grain")
        else:
            library = importlib.import_module("orbax.checkpoint").v1
    finally:
        logging.root.handlers[:] = handlers
    globals()[name] = library
    return library
