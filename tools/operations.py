"""The table of operations: each operation that all ranks of a group call, in one row.

``tools/generate.py`` writes from it the public functions (``procgroup.api``), the methods of ProcessGroup
(``procgroup.groups``), the methods of the native group (``native/bindings``), the table that the engine reads
(``native/ops/operation_table.hpp``) and PyTorch's methods (``procgroup.torch_plugin.collectives``). The tests take from
it who the root is, whether an operation reduces, and whether its blocks may differ in size.

    operation    what the engine knows: who gives elements, who gets them, in which arrays
    call         a function with a name of its own; several calls may be one operation (all_gather, all_gather_single)
    block        the elements that one rank gives to another
    root         the rank that gives to all others, or gets from all others
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Ranks = Literal["none", "all", "root", "all but root", "all but first"]
"""The ranks that give elements, or get them."""
Side = Literal["none", "one", "blocks"]
"""The arrays of a rank on one side: none, one array, or a block for each rank."""
Sizes = Literal["equal", "per rank", "per pair"]
"""On which sizes the ranks agree: one; one for each rank, known to all; one for each pair of ranks."""
Sources = Literal["all", "lower and own", "lower"]
"""The ranks whose elements a rank's result combines."""


@dataclass(frozen=True)
class Operation:
    """One operation of the engine. A message goes from one rank to another: it is neither numbered nor agreed on."""

    name: str
    givers: Ranks = "none"
    takers: Ranks = "none"
    input: Side = "none"
    output: Side = "none"
    reduces: bool = False
    sizes: Sizes = "equal"
    sources: Sources = "all"
    is_message: bool = False
    is_listed: bool = True
    """Whether it is among the collectives and messages of ``_native.operations()``."""
    comment: str = ""

    @property
    def root(self) -> str:
        """The side of the root of a collective: "source", "destination", or "" without a root."""
        return "source" if self.givers == "root" else "destination" if self.takers == "root" else ""


OPERATIONS = [
    Operation("barrier"),
    Operation("rank_first", is_listed=False),
    Operation("empty", is_listed=False, comment="of an array on a GPU"),
    Operation("register_mem_pool", is_listed=False),
    Operation("broadcast", "root", "all but root", "one", "one"),
    Operation("reduce", "all", "root", "one", "one", reduces=True),
    Operation("all_reduce", "all", "all", "one", "one", reduces=True),
    Operation("gather", "all", "root", "one", "blocks"),
    Operation("all_gather", "all", "all", "one", "blocks", sizes="per rank"),
    Operation("scatter", "root", "all", "blocks", "one"),
    Operation("reduce_scatter", "all", "all", "blocks", "one", reduces=True, sizes="per rank"),
    Operation("all_to_all", "all", "all", "blocks", "blocks", sizes="per pair"),
    Operation("neighbor_all_to_all", "all", "all", "blocks", "blocks", sizes="per pair"),
    Operation("scan", "all", "all", "one", "one", reduces=True, sources="lower and own"),
    Operation("exscan", "all", "all but first", "one", "one", reduces=True, sources="lower"),
    Operation("send", givers="all", input="one", is_message=True),
    Operation("recv", takers="all", output="one", is_message=True),
]
"""By the engine's number of the operation, which is part of the descriptors that ranks compare."""

OPERATION = {row.name: row for row in OPERATIONS}

Kind = Literal[
    "array",
    "arrays",
    "arrays of root",
    "arrays of neighbors",
    "root",
    "root or first",
    "op",
    "splits",
    "shape",
    "periodic",
]
"""What a parameter is, and so how it is checked:

    array             one array of this rank
    arrays            a list of one array for each rank
    arrays of root    such a list on the root, None on the other ranks
    arrays of neighbors   a list of two arrays for each dimension of a mesh
    root              a global or a group rank; it is required
    root or first     the same; the default is global rank 0
    op                a reduce op
    splits            the number of rows of each rank's block; None: equal blocks
    shape             the extents of a Cartesian mesh of all ranks
    periodic          whether each dimension of the mesh is a ring: one bool, or one for each dimension
"""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a call, by its name in the public function (torch.distributed's) and in ProcessGroup."""

    kind: Kind
    public: str
    method: str


def array(public: str, method: str = "array") -> Parameter:
    return Parameter("array", public, method)


def arrays(public: str, method: str) -> Parameter:
    return Parameter("arrays", public, method)


SOURCE = Parameter("root", "src", "root")
DESTINATION = Parameter("root", "dst", "root")
SOURCE_OR_FIRST = Parameter("root or first", "src", "root")
DESTINATION_OR_FIRST = Parameter("root or first", "dst", "root")
OP = Parameter("op", "op", "op")


@dataclass(frozen=True)
class Call:
    """One function: its parameters in the order of ProcessGroup's method, before ``async_op`` and ``timeout``."""

    name: str
    operation: str
    module: str
    """The module of procgroup.api."""
    parameters: tuple[Parameter, ...]
    method_doc: str
    public_doc: str
    retains: bool = False
    """Whether it takes ``retain``: a call that fails then leaves its array as it was."""

    @property
    def row(self) -> Operation:
        return OPERATION[self.operation]

    @property
    def is_uneven(self) -> bool:
        """Whether the blocks of different ranks may differ in size."""
        return self.row.sizes != "equal" and (
            not self.name.endswith("_single") or any(one.kind == "splits" for one in self.parameters)
        )


CALLS = [
    Call(
        "barrier",
        "barrier",
        "collectives",
        (),
        "Wait until every rank has called barrier.",
        "Wait until every rank has called it. ``device_ids`` is accepted for compatibility and has no effect.",
    ),
    Call(
        "broadcast",
        "broadcast",
        "collectives",
        (array("tensor"), SOURCE),
        "Copy the array of ``root`` into every rank's array.",
        "Copy the array of ``src`` into every rank's ``tensor``.",
    ),
    Call(
        "gather",
        "gather",
        "collectives",
        (array("tensor"), Parameter("arrays of root", "gather_list", "outputs"), DESTINATION_OR_FIRST),
        "Copy the array of each rank ``r`` into ``outputs[r]`` on ``root``; the others give no outputs.",
        """Copy the array of each group rank ``r`` into ``gather_list[r]`` on ``dst``, global rank 0 by default.

        All arrays have the dtype and size of ``tensor``. Raises ValueError when ``gather_list`` is missing on
        ``dst``, given elsewhere or not one array per rank. Raises CollectiveMismatch on every rank, with no array
        changed, if dtype, size or ``dst`` differ. After a small call, ranks other than ``dst`` raise it in a later
        call.""",
    ),
    Call(
        "scatter",
        "scatter",
        "collectives",
        (array("tensor"), Parameter("arrays of root", "scatter_list", "inputs"), SOURCE_OR_FIRST),
        "Copy ``inputs[r]`` of ``root`` into the array of each rank ``r``; the others give no inputs.",
        """Copy ``scatter_list[r]`` of ``src``, global rank 0 by default, into ``tensor`` of each group rank ``r``.

        All arrays have the dtype and size of ``tensor``. Raises ValueError when ``scatter_list`` is missing on
        ``src``, given elsewhere or not one array per rank. Raises CollectiveMismatch on every rank, with no array
        changed, if dtype, size or ``src`` differ. After a small call, ``src`` and the ranks that agree with it raise it
        in a later call, and the latter have received their data.""",
    ),
    Call(
        "all_gather",
        "all_gather",
        "collectives",
        (arrays("tensor_list", "outputs"), array("tensor")),
        "Copy the array of each rank ``r`` into ``outputs[r]`` on every rank.",
        """Copy the array of each group rank ``r`` into ``tensor_list[r]`` on every rank.

        The ranks' arrays have one dtype and may have different sizes: ``tensor_list[r]`` is as large as the array of
        rank ``r``. Raises ValueError unless there is one array per rank; on every rank CollectiveMismatch, changing
        nothing, when the sizes or dtypes do not fit.""",
    ),
    Call(
        "all_gather_single",
        "all_gather",
        "collectives",
        (array("output_tensor", "output"), array("input_tensor")),
        "Copy the arrays of all ranks, one after the other, into every rank's ``output``.",
        """Copy the arrays of all ranks, one after the other in group order, into every rank's ``output_tensor``.

        The output has as many elements as all inputs together: for inputs of shape (n, ...) and world size w its shape
        is (w * n, ...), which concatenates them, or (w, n, ...), which stacks them. Raises ArgumentError for another
        size; on every rank CollectiveMismatch, changing nothing, when dtype or size differ between the ranks.""",
    ),
    Call(
        "all_to_all",
        "all_to_all",
        "collectives",
        (arrays("output_tensor_list", "outputs"), arrays("input_tensor_list", "inputs")),
        "Send ``inputs[r]`` to each rank ``r``, and receive from rank ``r`` into ``outputs[r]``.",
        """Send ``input_tensor_list[r]`` to each group rank ``r``; receive from it into ``output_tensor_list[r]``.

        All arrays have one dtype. The sizes may differ, but rank a must send to rank b the size that b expects from a.
        Raises ValueError unless there is one array per rank; CollectiveMismatch, changing nothing, when two ranks
        expect different sizes.""",
    ),
    Call(
        "all_to_all_single",
        "all_to_all",
        "collectives",
        (
            array("output", "output"),
            array("input"),
            Parameter("splits", "output_split_sizes", "output_splits"),
            Parameter("splits", "input_split_sizes", "input_splits"),
        ),
        """Send block ``r`` of the array to each rank ``r``, and receive block ``r`` of ``output`` from it.

        Splits are numbers of rows along the first dimension; None means equal blocks.""",
        """Send part ``r`` of ``input`` to each group rank ``r``; receive part ``r`` of ``output`` from it.

        Split sizes count rows, along the first dimension; without them (None or an empty list) the parts are equal.
        Raises ArgumentError when the splits do not add up to the first dimension or are not one per rank, and without
        splits when the first dimension is not divisible by the world size; CollectiveMismatch, changing nothing, when
        two ranks expect different sizes.""",
    ),
    Call(
        "neighbor_all_to_all",
        "neighbor_all_to_all",
        "collectives",
        (
            Parameter("arrays of neighbors", "output_tensor_list", "outputs"),
            Parameter("arrays of neighbors", "input_tensor_list", "inputs"),
            Parameter("shape", "shape", "shape"),
            Parameter("periodic", "periodic", "periodic"),
        ),
        """Exchange arrays with the ranks next to this one on a Cartesian mesh.

        ``inputs[2 * d]`` goes to the neighbour before this rank along dimension ``d``, ``inputs[2 * d + 1]`` to the one
        behind it, and what they send comes into the same places of ``outputs``.""",
        """Exchange arrays with the neighbours of this rank on a Cartesian mesh of all ranks of the group.

        The ranks are the elements of an array of ``shape``, in C order, as in MPI_Cart_create and in a DeviceMesh.
        ``input_tensor_list[2 * d]`` goes to the rank before this one along dimension ``d``, and
        ``input_tensor_list[2 * d + 1]`` to the rank behind it; what these send comes into the same places of
        ``output_tensor_list``. That is the order of MPI_Neighbor_alltoall (MPI 4.1, section 8.6.2). ``periodic`` is a
        bool, or one for each dimension: whether the last rank is the neighbour of the first. At a border without a
        neighbour the arrays are not used, and may be None.

        All arrays have one dtype; the sizes may all differ, but both ranks of a pair must give the same size. Raises
        ArgumentError unless the extents of ``shape`` multiply to the number of ranks and no arrays overlap; ValueError
        unless the lists have two arrays for each dimension; CollectiveMismatch on every rank, changing nothing, when
        shape, periodicity, dtype or the sizes of a pair differ.""",
    ),
    Call(
        "all_reduce",
        "all_reduce",
        "reductions",
        (array("tensor"), OP),
        "Combine the arrays of all ranks, element by element, into every rank's array.",
        """Combine the arrays of all ranks, element by element, into every rank's ``tensor``.

        The result is bit-identical on all ranks. Elements are combined in rank order where all ranks share memory or
        none do. In a group that spans hosts, the ranks of each host are combined first, unless the group has
        ``deterministic="order"``. 16-bit floats are combined in float32. Raises CollectiveMismatch on every rank,
        changing nothing, when op, dtype or count differ.""",
        retains=True,
    ),
    Call(
        "reduce",
        "reduce",
        "reductions",
        (array("tensor"), DESTINATION, OP),
        "Combine the arrays of all ranks into that of ``root``; the others' arrays keep their values.",
        "Combine the arrays of all ranks into that of ``dst``; the other ranks' arrays keep their values.",
        retains=True,
    ),
    Call(
        "reduce_scatter",
        "reduce_scatter",
        "reductions",
        (array("output", "output"), arrays("input_list", "inputs"), OP),
        "Combine ``inputs[r]`` of all ranks into the output of each rank ``r``.",
        """Combine ``input_list[r]`` of all ranks, element by element, into ``output`` of each group rank ``r``.

        All arrays have one dtype; the sizes may differ along the list, and are the same on all ranks: ``input_list[r]``
        is as large as the output of rank ``r``. Raises ValueError unless there is one array per rank; on every rank
        CollectiveMismatch, changing nothing, when op, dtype or sizes do not fit.""",
    ),
    Call(
        "reduce_scatter_single",
        "reduce_scatter",
        "reductions",
        (array("output", "output"), array("input"), OP),
        "Combine the arrays of all ranks; block ``r`` of the result goes to the output of rank ``r``.",
        """Combine ``input`` of all ranks, element by element; ``output`` of each group rank ``r`` gets part ``r``.

        The input has as many elements as all outputs together, the parts one after the other: for outputs of shape
        (n, ...) and world size w its shape is (w * n, ...) or (w, n, ...). Raises ArgumentError for another size; on
        every rank CollectiveMismatch, changing nothing, when op, dtype or size differ between the ranks.""",
    ),
    Call(
        "scan",
        "scan",
        "reductions",
        (array("tensor"), OP),
        "Combine the arrays of all lower ranks and this one, element by element, into this rank's array.",
        """Combine the arrays of the ranks up to this one, element by element, into this rank's ``tensor``.

        The inclusive prefix reduction, as MPI_Scan (MPI 4.1, section 6.11.1): rank r gets tensor_0 op ... op tensor_r,
        in rank order whatever the layout; AVG divides by r + 1. Raises CollectiveMismatch on every rank, changing
        nothing, when op, dtype or count differ.""",
        retains=True,
    ),
    Call(
        "exscan",
        "exscan",
        "reductions",
        (array("tensor"), OP),
        "Combine the arrays of all lower ranks into this rank's array, which is the input, too; rank 0's is kept.",
        """Combine the arrays of the ranks below into ``tensor``, which is the input, too; rank 0's keeps its values.

        The exclusive prefix reduction, as MPI_Exscan (MPI 4.1, section 6.11.2): rank r gets tensor_0 op ... op
        tensor_r-1, in rank order; AVG divides by r. Every rank passes its own input, rank 0 too: zeros there would
        leave it out of all sums. So begin with a copy, and clear rank 0's afterwards: ``before = x.copy();
        exscan(before)``, then ``if rank == 0: before[...] = 0``. Raises as ``scan`` does.""",
        retains=True,
    ),
]


@dataclass(frozen=True)
class TorchCall:
    """One method that torch.distributed calls of a backend, beside those that torch_plugin/calls.py has."""

    name: str
    call: str
    """ProcessGroup's method."""
    options: str
    """torch's class of options."""
    tensors: tuple[str, ...]
    """The parameters with tensors, the outputs first. Of two, the profiler shows the second one."""
    arguments: str
    """The arguments of ProcessGroup's method. ``tensor`` is the only one of the last list of tensors."""
    doc: str
    further: tuple[str, ...] = ()
    """Further positional parameters, before the options."""
    fields: tuple[str, ...] = ()
    """The parameters "op" and "root", which torch's older forms have in place of options."""
    takes_timeout: bool = True
    is_listed: bool = False
    """Whether the tensors are in lists: of this rank's one tensor, or of one list of tensors."""
    title: str = ""
    """The name of its events in torch's profiler, if it isn't that of ``call``."""


TORCH_CALLS = [
    TorchCall(
        "broadcast",
        "broadcast",
        "BroadcastOptions",
        ("tensors",),
        "tensor, opts.rootRank",
        "Copy the tensor of the root to every rank.",
        fields=("root",),
        is_listed=True,
    ),
    TorchCall(
        "reduce",
        "reduce",
        "ReduceOptions",
        ("tensors",),
        "tensor, opts.rootRank, reduce_op(opts.reduceOp)",
        "Combine the tensors of all ranks into that of the root.",
        fields=("op", "root"),
        is_listed=True,
    ),
    TorchCall(
        "allreduce_coalesced",
        "all_reduce_coalesced",
        "AllreduceCoalescedOptions",
        ("tensors",),
        "tensors, reduce_op(opts.reduceOp)",
        "Combine each of the tensors in place.",
        takes_timeout=False,
    ),
    TorchCall(
        "allgather",
        "all_gather",
        "AllgatherOptions",
        ("output_tensors", "input_tensors"),
        "only(output_tensors), tensor",
        "Copy the tensor of each rank ``r`` into ``output_tensors[0][r]`` on every rank; sizes may differ.",
        is_listed=True,
    ),
    TorchCall(
        "allgather_coalesced",
        "all_gather_coalesced",
        "AllgatherOptions",
        ("output_lists", "input_list"),
        "output_lists, input_list",
        "Copy tensor ``i`` of each rank ``r`` into ``output_lists[r][i]`` on every rank.",
        takes_timeout=False,
    ),
    TorchCall(
        "all_gather_single",
        "all_gather_single",
        "AllgatherOptions",
        ("output", "input"),
        "output, input",
        "Copy the tensors of all ranks, one after the other, into every rank's ``output``.",
    ),
    TorchCall(
        "all_gather_single_coalesced",
        "all_gather_single_coalesced",
        "AllgatherOptions",
        ("outputs", "inputs"),
        "outputs, inputs",
        "Make an all_gather_single of each output and input.",
        takes_timeout=False,
    ),
    TorchCall(
        "gather",
        "gather",
        "GatherOptions",
        ("output_tensors", "input_tensors"),
        "tensor, only(output_tensors) if output_tensors else None, opts.rootRank",
        "Copy the tensor of each rank ``r`` into ``output_tensors[0][r]`` on the root; the others give none.",
        fields=("root",),
        is_listed=True,
    ),
    TorchCall(
        "scatter",
        "scatter",
        "ScatterOptions",
        ("output_tensors", "input_tensors"),
        "tensor, only(input_tensors) if input_tensors else None, opts.rootRank",
        "Copy ``input_tensors[0][r]`` of the root into the tensor of each rank ``r``; the others give none.",
        fields=("root",),
        is_listed=True,
    ),
    TorchCall(
        "reduce_scatter",
        "reduce_scatter",
        "ReduceScatterOptions",
        ("output_tensors", "input_tensors"),
        "tensor, only(input_tensors), reduce_op(opts.reduceOp)",
        "Combine ``input_tensors[0][r]`` of all ranks into the output of each rank ``r``; sizes may differ.",
        fields=("op",),
        is_listed=True,
    ),
    TorchCall(
        "reduce_scatter_single",
        "reduce_scatter_single",
        "ReduceScatterOptions",
        ("output", "input"),
        "output, input, reduce_op(opts.reduceOp)",
        "Combine the inputs of all ranks; part ``r`` of the result goes to the output of rank ``r``.",
    ),
    TorchCall(
        "reduce_scatter_single_coalesced",
        "reduce_scatter_single_coalesced",
        "ReduceScatterOptions",
        ("outputs", "inputs"),
        "outputs, inputs, reduce_op(opts.reduceOp)",
        "Make a reduce_scatter_single of each output and input.",
        takes_timeout=False,
    ),
    TorchCall(
        "alltoall",
        "all_to_all",
        "AllToAllOptions",
        ("output_tensors", "input_tensors"),
        "output_tensors, input_tensors",
        "Send ``input_tensors[r]`` to each rank ``r``, and receive ``output_tensors[r]`` from it.",
        takes_timeout=False,
    ),
    TorchCall(
        "all_to_all_single",
        "all_to_all_single",
        "AllToAllOptions",
        ("output", "input"),
        "output, input, output_split_sizes, input_split_sizes",
        "Send part ``r`` of the input to each rank ``r``, and receive part ``r`` of the output from it.",
        further=("output_split_sizes", "input_split_sizes"),
        title="all_to_all",
    ),
]
