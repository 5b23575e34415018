"""What torch.distributed has: every public name of it and of its public submodules, with signatures, as JSON.

A name is public when its module's ``__all__`` says so or, without ``__all__``, when it has no underscore in front
and was made in torch.distributed. Run as a program, because importing all of it changes the process.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import sys
import types
import warnings
from typing import Any

ROOT = "torch.distributed"


def modules() -> list[str]:
    """Return the public modules that can be imported, the root first."""
    found = []
    package = importlib.import_module(ROOT)
    for module in pkgutil.walk_packages(package.__path__, ROOT + ".", onerror=lambda name: None):
        parts = module.name.split(".")[2:]
        if not any(part.startswith("_") for part in parts) and is_importable(module.name):
            found.append(module.name)
    return [ROOT, *sorted(found)]


def is_importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except BaseException:  # an optional package is missing, or it is a program
        return False
    return True


def public_names(module: types.ModuleType) -> list[str]:
    declared = getattr(module, "__all__", None)
    if declared is not None:
        return sorted({name for name in declared if hasattr(module, name)})
    names = {name for name, value in vars(module).items() if name[0] != "_" and is_made_there(value, module)}
    if module.__name__ == ROOT:  # which imports all of these
        names |= {name for name in importlib.import_module(f"{ROOT}.distributed_c10d").__all__ if hasattr(module, name)}
    return sorted(names)


def is_made_there(value: Any, module: types.ModuleType) -> bool:
    """Return whether a value comes from the module or, for a package, from within it; native code counts for both."""
    home = getattr(value, "__module__", None)
    if inspect.ismodule(value) or not isinstance(home, str) or not callable(value):
        return False
    if hasattr(module, "__path__") and home.startswith((module.__name__ + ".", "torch._C")):
        return True
    return home == module.__name__


def parameters(value: Any) -> list[list[str]] | None:
    """Return [name, default as text] of each parameter; None when there is no signature to be had."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return None
    return [[parameter.name, default_text(parameter.default)] for parameter in signature.parameters.values()]


def default_text(value: Any) -> str:
    """Return a text that no address, Python version or way to print an Enum changes."""
    if value is inspect.Parameter.empty:
        return ""
    if isinstance(value, (int, float, str, bool, type(None))) and type(value).__module__ == "builtins":
        return repr(value)
    return f"a {type(value).__name__}"


def kind(value: Any) -> str:
    if inspect.isclass(value):
        return "class"
    return "function" if callable(value) else "value"


def members(value: Any) -> list[str]:
    """Return the public methods and properties that a class defines or inherits within torch.distributed."""
    if not inspect.isclass(value):
        return []
    names = set()
    for base in value.__mro__:
        if (base.__module__ or "").startswith(("torch", "_distributed")) and base.__name__ != "pybind11_object":
            names |= {name for name in vars(base) if name[0] != "_"}
    return sorted(names)


def describe(value: Any) -> dict[str, Any]:
    return {"kind": kind(value), "parameters": parameters(value), "members": members(value)}


def everything() -> dict[str, dict[str, Any]]:
    """Return {module: {name: description}}."""
    found = {}
    for name in modules():
        module = sys.modules[name]
        found[name] = {public: describe(getattr(module, public)) for public in public_names(module)}
    return {name: names for name, names in found.items() if names}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    json.dump(everything(), sys.stdout)
