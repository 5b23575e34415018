"""Start ranks: ``procgroup run``, ``python -m procgroup.launch``, ``spawn`` and ``elastic_launch``.

The public names are bound when they are first used, so that importing the package costs nothing.
"""

from procgroup import bound_on_first_use

_MODULE_OF_NAME = {"LaunchConfig": "elastic", "elastic_launch": "elastic"}

__all__ = list(_MODULE_OF_NAME)

__getattr__, __dir__ = bound_on_first_use(__name__, _MODULE_OF_NAME)
