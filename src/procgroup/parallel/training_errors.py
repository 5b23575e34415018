"""The errors of data-parallel training, under their documented import path; procgroup.errors defines them."""

from procgroup.errors import BackwardFailed, GraphChanged, InputsExhausted, ModelMismatch, RanksApart

__all__ = ["BackwardFailed", "GraphChanged", "InputsExhausted", "ModelMismatch", "RanksApart"]
