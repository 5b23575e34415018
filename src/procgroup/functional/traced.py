"""The functions of procgroup.functional inside of JAX's transformations: jit, grad, vmap, scan, cond and while_loop.

A call is one equation of one JAX primitive, whatever the operation. It has the effect of a
``jax.experimental.io_callback(ordered=True)``: JAX neither drops such an equation nor repeats or reorders it. So the
ranks, which trace the same function, make the same calls in the same order. The primitive has rules of its own for
derivatives and batches:

    jvp         every operation here is linear (others are refused): the tangents take the same operation
    transpose   the operation that operations.py lists beside it
    vmap        one call for the whole batch: the batch is one more dimension of each array

Compiled for CPUs or NVIDIA's GPUs, the equation is a custom call of XLA. Its handler (native/bindings/xla.cpp) passes
XLA's buffers to the engine, or on a GPU to NCCL, and no Python runs. The token of the effect is its first argument and
its first result. The handler knows a call by its number. The compiled function keeps the object to which the number
belongs, and with it the group. Where another backend moves the elements, or where the group is in another state of
groups/issue.py, the handler calls ``_run_on``, on a GPU with copies in host memory. For other devices, and for several
devices of one process, the equation is an io_callback.

Calls of one thread run one after the other, in that thread or in one of XLA's, while the function that was called may
have returned already. A call outside of the compiled function must not overtake them: once a call on a group is
compiled, every other call on that group first awaits them (``ProcessGroup.await_before_calls``).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import Primitive, get_opaque_trace_state
from jax.interpreters import ad, batching, mlir

from procgroup import _native
from procgroup.api import default_group
from procgroup.arrays.array_view import DTYPES, ArrayView
from procgroup.errors import DistBackendError
from procgroup.functional.calls import perform as perform_now
from procgroup.functional.fusing import Leaf, LeafName, Leaves
from procgroup.functional.operations import TAG, EngineCall, FunctionalOperation
from procgroup.functional.trees import flatten
from procgroup.groups.group import ProcessGroup
from procgroup.groups.issue import inside_awaited_call


@dataclass(frozen=True)
class TracedCall:
    """A call as JAX keeps it; no operation means a barrier. The group is the one of the moment of the trace.

    ``line`` is the number of the line of the program that was traced, which errors and flight records name.
    """

    operation: FunctionalOperation | None
    group: ProcessGroup
    line: int

    def result_shapes(self, arrays: Sequence[Any]) -> list[tuple[int, ...]]:
        """Return the shapes of the results for arrays, or what has their shapes and dtypes."""
        if self.operation is None:
            return []
        leaves = [_leaf(index, array) for index, array in enumerate(arrays)]
        return [self.operation.result_shape(leaf, self.group.size()) for leaf in leaves]

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        """Make the call with arrays of NumPy; return new ones."""
        if self.operation is None:
            self.group.barrier()
            return []
        results: list[Any] = perform_now(Leaves(list(arrays)), self.operation, self.group)
        return results

    def describe(self) -> str:
        """Return what errors call this call."""
        return "functional.barrier" if self.operation is None else self.operation.describe()


def is_tracing() -> bool:
    """Return whether a JAX transformation is at work in this thread."""
    return bool(get_opaque_trace_state(convention="nnx") != _NOT_TRACING)


def perform(tree: Any, operation: FunctionalOperation, group: ProcessGroup) -> Any:
    """Make an operation part of what is traced; return the tree of its results."""
    values, rebuild = flatten(tree)
    arrays = [_as_jax(LeafName(tree, index), value) for index, value in enumerate(values)]
    call = TracedCall(operation, group, group.calls.source_line())
    call.result_shapes(arrays)  # raises here, in the user's own call
    return rebuild(iter(_call_p.bind(*arrays, call=call) if arrays else []))


def barrier(group: ProcessGroup) -> None:
    """Make a barrier part of what is traced."""
    _call_p.bind(call=TracedCall(None, group, group.calls.source_line()))


def quoted_in(error: RuntimeError) -> BaseException | None:
    """Return the error of a collective that an error of JAX quotes; None when it quotes none."""
    if not isinstance(error, jax.errors.JaxRuntimeError):
        return None
    text = str(error)
    return next((own for own in reversed(_raised) if _quoted(own) in text), None)


_call_p = Primitive("procgroup")
_call_p.multiple_results = True

# What JAX raises for an error in a compiled call has only the error's text. So the last few are kept.
_raised: deque[BaseException] = deque(maxlen=4)

with jax.core.eval_context():
    _NOT_TRACING = get_opaque_trace_state(convention="nnx")

# The effect of an ordered io_callback, as JAX names it, and the type of the token that orders it.
(_EFFECT,) = jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().jaxpr.effects
(_TOKEN,) = jax.make_jaxpr(jax.lax.create_token)().out_avals

_HANDLER = "procgroup_call"
_HANDLED = frozenset(("cpu", "cuda"))  # the platforms that have a handler


def _as_jax(name: LeafName, value: Any) -> Any:
    try:
        found = jax.numpy.asarray(value)
    except TypeError as error:
        raise TypeError(
            f"`{name}` is not an array that JAX can take, and JAX is tracing this call; got {type(value)}."
        ) from error
    if found.dtype.name not in DTYPES:
        raise TypeError(
            f"`{name}` has dtype {found.dtype}, which cannot be sent; expected one of {', '.join(sorted(DTYPES))}."
        )
    return found


def _leaf(index: int, array: Any) -> Leaf:
    """Describe an array that is traced: it has a shape and a dtype, and no elements yet."""
    dtype = np.dtype(array.dtype)
    seen = ArrayView(0, tuple(array.shape), (), dtype.name, dtype.itemsize, True, None)
    return Leaf(index, f"leaf {index}", "jax", seen)


def _run_now(*arrays: Any, call: TracedCall) -> list[Any]:
    """Make a call whose arrays are there, as in a function that is differentiated but not compiled."""
    return [jax.numpy.asarray(result) for result in call.run([np.asarray(array) for array in arrays])]


def _run_as_callback(*arrays: Any, call: TracedCall) -> list[Any]:
    expected = [
        jax.ShapeDtypeStruct(shape, array.dtype)
        for shape, array in zip(call.result_shapes(arrays), arrays, strict=False)
    ]
    results: list[Any] = io_callback(functools.partial(_callback, call), expected, *arrays, ordered=True)
    return results


def _callback(call: TracedCall, *arrays: Any) -> list[Any]:
    try:
        with inside_awaited_call():
            return call.run([np.asarray(array) for array in arrays])
    except BaseException as error:
        _keep(error)
        raise


def _keep(error: BaseException) -> str:
    """Keep an error for ``quoted_in``; return the text by which it is found."""
    _raised.append(error)
    return _quoted(error)


def _quoted(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _abstract_eval(*arrays: Any, call: TracedCall) -> tuple[list[Any], set[Any]]:
    shapes = call.result_shapes(arrays)
    results = [jax.core.ShapedArray(shape, array.dtype) for shape, array in zip(shapes, arrays, strict=False)]
    return results, {_EFFECT}


def _lower(context: Any, *arrays: Any, call: TracedCall) -> Any:
    if default_group.slot() is not default_group.PROCESS_SLOT:
        raise DistBackendError(
            f"{call.describe()} inside of jax.jit: these ranks are threads of one process, and share what JAX "
            "compiles; expected a process for each rank. Start the ranks with `procgroup run`, or call it outside "
            "of jax.jit."
        )
    where = context.module_context.axis_context
    if isinstance(where, mlir.SPMDAxisContext) and where.mesh.size > 1:
        raise NotImplementedError(
            f"{call.describe()} inside of jax.shard_map or jax.pmap over {where.mesh.size} devices of one process: "
            "each device would make the call, in no particular order. Give each device its own rank, as "
            "`procgroup run --nproc-per-node` does, or make the call outside of shard_map."
        )
    call.group.await_before_calls(jax.effects_barrier)
    if not _HANDLED.issuperset(context.module_context.platforms) or getattr(where, "num_devices", 1) > 1:
        return mlir.lower_fun(_run_as_callback, multiple_results=True)(context, *arrays, call=call)
    _register_handlers()
    compiled = _compile(call, context.avals_in, context.avals_out)
    context.module_context.add_keepalive(compiled)
    given = context.replace(avals_in=[_TOKEN, *context.avals_in], avals_out=[_TOKEN, *context.avals_out])
    lower = jax.ffi.ffi_lowering(_HANDLER, has_side_effect=True)
    token, *results = lower(given, context.tokens_in.get(_EFFECT), *arrays, call=np.uint64(compiled.number))
    context.set_tokens_out(context.tokens_in.update_tokens(mlir.TokenSet({_EFFECT: token})))
    return results


@functools.cache
def _register_handlers() -> None:
    """Register a handler for each platform under one name: what is lowered is the same for all of them."""
    jax.ffi.register_ffi_target(_HANDLER, _native.xla_handler(on_gpu=False), platform="cpu")
    jax.ffi.register_ffi_target(_HANDLER, _native.xla_handler(on_gpu=True), platform="CUDA")


def _compile(call: TracedCall, arguments: Sequence[Any], results: Sequence[Any]) -> _native.CompiledCall:
    """Give a call a number. Raises what the group's method would raise for these dtypes."""
    made = EngineCall("barrier") if call.operation is None else call.operation.engine_call()
    return _native.CompiledCall(
        call.group.calls,
        made.op,
        [array.dtype.name for array in arguments],
        root=made.root,
        source=made.source,
        op=made.reduce_op,
        tag=TAG,
        line=call.line,
        run=functools.partial(_run_on, call, arguments, results),
        describe_error=_keep,
    )


def _run_on(
    call: TracedCall,
    arguments: Sequence[Any],
    results: Sequence[Any],
    given: Sequence[memoryview],
    made: Sequence[memoryview],
) -> None:
    """Make a call on memory of XLA."""
    arrays = [np.ndarray(one.shape, one.dtype, view) for one, view in zip(arguments, given, strict=True)]
    with inside_awaited_call():
        found = call.run(arrays)
    for one, view, result in zip(results, made, found, strict=True):
        np.ndarray(one.shape, one.dtype, view)[...] = result


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: TracedCall) -> tuple[list[Any], list[Any]]:
    if call.operation is None or call.operation.transposed() is None:
        raise TypeError(
            f"{call.describe()} has no derivative; SUM and AVG have one. Apply jax.lax.stop_gradient to its argument "
            "to take the result for a constant."
        )
    results = _call_p.bind(*primals, call=call)
    changes = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
    # All of them, zeros too: other ranks may depend on other arguments, and all have to make the same call.
    inexact = [index for index, primal in enumerate(primals) if jax.numpy.issubdtype(primal.dtype, np.inexact)]
    found = _call_p.bind(*(ad.instantiate_zeros(tangents[index]) for index in inexact), call=call) if inexact else []
    for index, change in zip(inexact, found, strict=True):
        changes[index] = change
    return results, changes


def _transpose(cotangents: Sequence[Any], *arrays: Any, call: TracedCall) -> list[Any]:
    assert call.operation is not None
    transposed = call.operation.transposed()
    assert transposed is not None
    size = call.group.size()
    given = [call.operation.cotangent(ad.instantiate_zeros(cotangent), size) for cotangent in cotangents]
    found = _call_p.bind(*given, call=TracedCall(transposed, call.group, call.line))
    return [change if ad.is_undefined_primal(array) else None for change, array in zip(found, arrays, strict=True)]


def _batch(arrays: Sequence[Any], dimensions: Sequence[Any], *, call: TracedCall) -> tuple[list[Any], list[Any]]:
    """Make one call for a batch: its dimension comes after the one that has an element per rank."""
    operation = call.operation
    assert operation is not None  # a barrier has no arrays
    inside, outside = int(operation.takes_one_per_rank), int(operation.returns_one_per_rank)
    moved = [
        array if dimension is None else jax.numpy.moveaxis(array, dimension, inside)
        for array, dimension in zip(arrays, dimensions, strict=True)
    ]
    places = [None if dimension is None else outside for dimension in dimensions]
    return _call_p.bind(*moved, call=call), places


_call_p.def_impl(_run_now)
_call_p.def_effectful_abstract_eval(_abstract_eval)
mlir.register_lowering(_call_p, _lower)
ad.primitive_jvps[_call_p] = _jvp
ad.primitive_transposes[_call_p] = _transpose
batching.primitive_batchers[_call_p] = _batch
