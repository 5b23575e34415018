"""The transports of groups, by name, and what each of them does: ``capabilities()``."""

from procgroup import bound_on_first_use

__all__ = ["Capability", "capabilities"]

__getattr__, __dir__ = bound_on_first_use(
    __name__, {"Capability": "capability_table", "capabilities": "capability_table"}
)
