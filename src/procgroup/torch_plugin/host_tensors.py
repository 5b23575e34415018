"""The host tensors of a staged call, divided into *parts*: each part is one of procgroup's calls.

Most calls have one part. Large tensors of element-wise calls are sent in *chunks*, one part for each: while a chunk is
sent between the ranks, the next is copied in and the last one out.
"""

from __future__ import annotations

from typing import Any

import torch

from procgroup.torch_plugin.side_streams import Pairs, SideStreams, host_like

CHUNK_BYTES = 4 << 20
"""The largest size of a chunk. All ranks need the same."""

_IN_CHUNKS = ("allreduce", "broadcast", "reduce")
_IN_PLACE = (*_IN_CHUNKS, "allreduce_coalesced", "send")
_RECEIVES = ("recv", "recv_anysource")
_RESULT_ON_ROOT = ("reduce", "gather_single")


class Part:
    """One call on host tensors, with the copies before and after it."""

    def __init__(self, arguments: list[Any], reads: Pairs, writes: Pairs) -> None:
        self.arguments = arguments
        self.reads = reads
        self.writes = writes
        self.copied: Any = None


def parts_of(name: str, arguments: list[Any], streams: SideStreams, *, is_root: bool) -> tuple[list[Part], Pairs]:
    """Return what is called and copied, and what is copied at the end."""
    reads, writes = _reads_and_writes(name, is_root)
    if name in _IN_CHUNKS and (lengths := _lengths(arguments[0][0])):
        return _chunks(arguments, lengths, streams, reads=reads, writes=writes)
    of_arguments: list[Pairs] = [[] for _ in arguments]
    hosts = [_stand_in(argument, pairs) for argument, pairs in zip(arguments, of_arguments, strict=True)]
    inputs = of_arguments[0 if name in _IN_PLACE else 1] if reads else []
    outputs = of_arguments[0] if writes else []
    return [Part(hosts, inputs, [(tensor, host) for host, tensor in outputs])], []


def _reads_and_writes(name: str, is_root: bool) -> tuple[bool, bool]:
    if name == "broadcast":
        return is_root, not is_root
    return name not in _RECEIVES, is_root if name in _RESULT_ON_ROOT else name != "send"


def _stand_in(argument: Any, pairs: Pairs) -> Any:
    """Return a host tensor for one on the device, and for a list a list of them; any other argument as it is."""
    if isinstance(argument, torch.Tensor):
        pairs.append((host_like(argument), argument.detach()))
        return pairs[-1][0]
    return [_stand_in(one, pairs) for one in argument] if isinstance(argument, (list, tuple)) else argument


def _lengths(tensor: Any) -> list[int]:
    """Return the numbers of elements of the blocks of a large tensor; an empty list for a small one.

    The first block has as many elements as there are full blocks, the second has the rest. So for tensors of different
    sizes one of these two differs, and the mismatch is reported before anything is written.
    """
    count: int = tensor.numel()
    full: int = max(CHUNK_BYTES // tensor.element_size(), 1)
    if count < 2 * full:
        return []
    number = (count - 1) // (full + 1)
    return [number, count - number * (full + 1), *[full] * number]


def _chunks(
    arguments: list[Any], lengths: list[int], streams: SideStreams, *, reads: bool, writes: bool
) -> tuple[list[Part], Pairs]:
    tensor, last = arguments[0][0].detach(), []
    flat = tensor
    if not tensor.is_contiguous():
        with streams.using(streams.into if reads else streams.out):  # where it is written first
            flat = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if reads:  # else it would be written on both, in any order
            streams.copy([(flat, tensor)], streams.into)
        last = [(tensor, flat)] if writes else []
    flat = flat.view(-1)
    hosts = host_like(flat).split(lengths)
    parts = [
        Part([[host], *arguments[1:]], [(host, chunk)] if reads else [], [(chunk, host)] if writes else [])
        for host, chunk in zip(hosts, flat.split(lengths), strict=True)
    ]
    parts[1].writes += parts[0].writes
    parts[0].writes = []
    return parts, last
