"""average_gradients and broadcast_parameters: new trees of every library, and differences named before a byte moves."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import procgroup as dist
import world
from procgroup.functional.trees import paths
from procgroup.parallel import average_gradients, broadcast_parameters, require_equal_parameters
from procgroup.testing import run_ranks

Layer = namedtuple("Layer", "weights bias")


def tree_of(rank: int) -> dict[str, Any]:
    return {
        "layers": [Layer(np.full((2, 3), rank, np.float32), np.full(3, 10.0 * rank)), Layer(np.array(rank + 1j), None)],
        "half": (np.full(5, rank, np.float16), np.full((1, 2), rank, ml_dtypes.bfloat16), np.zeros((0, 4))),
    }


def play(rank: int, size: int) -> None:
    dist.init_process_group(timeout=30)
    given = tree_of(rank)
    mean = average_gradients(given)
    middle = (size - 1) / 2
    first, second = mean["layers"]
    assert isinstance(first, Layer) and second.bias is None
    np.testing.assert_array_equal(first.weights, np.full((2, 3), middle, np.float32))
    np.testing.assert_array_equal(first.bias, np.full(3, 10 * middle))
    assert second.weights.shape == () and second.weights == middle + 1j
    assert [part.dtype for part in mean["half"]] == [np.float16, ml_dtypes.bfloat16, np.float64]
    assert mean["half"][0].tolist() == [middle] * 5 and mean["half"][2].shape == (0, 4)
    assert first.weights.flags.writeable and given["layers"][0].bias.tolist() == [10.0 * rank] * 3

    root = size - 1
    same = broadcast_parameters({"step": np.array(rank), **given}, root)
    assert same["step"] == root and same["layers"][0].bias.tolist() == [10.0 * root] * 3
    assert broadcast_parameters(np.full(2, rank)).tolist() == [0, 0]
    assert average_gradients([]) == [] and broadcast_parameters(None) is None
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 3, 4])
def test_trees_come_back_as_new_ones_with_the_mean_or_the_roots_arrays(size: int) -> None:
    world.run(play, size)


def test_a_group_of_some_ranks_means_over_these() -> None:
    def play_group() -> float:
        group = dist.new_group([1, 2])
        if dist.get_rank() == 0:
            return 0.0
        assert broadcast_parameters(np.array(dist.get_rank()), 1, group) == 2
        return float(average_gradients(np.array(float(dist.get_rank())), group))

    assert run_ranks(play_group, 3) == [0.0, 1.5, 1.5]


def play_random(seed: int) -> list[bytes]:
    random = np.random.default_rng(seed + dist.get_rank())
    tree = [random.standard_normal(length).astype(dtype) for length in (1, 1000, 7) for dtype in ("f2", "f4", "f8")]
    return [array.tobytes() for array in average_gradients(tree)]


@pytest.mark.parametrize("size", [2, 3, 7])
def test_the_mean_has_the_same_bits_on_every_rank(size: int) -> None:
    results = run_ranks(play_random, size, 5)
    assert results == [results[0]] * size


@pytest.mark.parametrize("name", [pytest.param("torch", marks=pytest.mark.torch), "jax"])
def test_arrays_stay_in_their_library(name: str) -> None:
    pytest.importorskip(name)

    def play_library() -> None:
        library = __import__("torch" if name == "torch" else "jax.numpy", fromlist=["x"])
        for dtype in ("float32", "bfloat16", "complex64"):
            given = {"a": library.ones((2, 3), dtype=getattr(library, dtype)) * dist.get_rank(), "b": np.ones(2)}
            mean = average_gradients(given)
            assert type(mean["a"]) is type(given["a"]) and mean["a"].dtype == given["a"].dtype
            assert type(mean["b"]) is np.ndarray
            assert bool((mean["a"] == 0.5).all()) and bool((given["a"] == dist.get_rank()).all())
            assert bool((broadcast_parameters(given, 1)["a"] == 1).all())

    run_ranks(play_library, 2)


def test_what_jax_knows_as_a_tree_is_one() -> None:
    jax = pytest.importorskip("jax")

    @jax.tree_util.register_pytree_with_keys_class
    class Module:
        def __init__(self, weights: Any, bias: Any) -> None:
            self.weights, self.bias = weights, bias

        def tree_flatten_with_keys(self) -> Any:
            key = jax.tree_util.GetAttrKey
            return [(key("weights"), self.weights), (key("bias"), self.bias)], None

        @classmethod
        def tree_unflatten(cls, _: None, children: Any) -> Any:
            return cls(*children)

    def gradient() -> float:
        module = Module(jax.numpy.full(3, 2.0), None)
        state = (module, {"inner": Module(jax.numpy.array(1.0), jax.numpy.array(0.0))})
        found = jax.grad(lambda it: (it[0].weights.sum() + it[1]["inner"].weights) * dist.get_rank())(state)
        mean = average_gradients(found)
        assert mean[0].bias is None and mean[0].weights.tolist() == [0.5] * 3
        return float(mean[1]["inner"].weights)

    assert run_ranks(gradient, 2) == [0.5, 0.5]
    assert paths([{"a": Module(1, 2)}]) == ["[0]['a'].weights", "[0]['a'].bias"]


def test_leaves_are_called_as_one_writes_them() -> None:
    tree = OrderedDict(b=[1, (2, None)], a=Layer({3: 4}, 5))
    assert paths(tree) == ["['a'].weights[3]", "['a'].bias", "['b'][0]", "['b'][1][0]"]
    assert paths(1) == [""]


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (lambda rank: {"w": np.zeros(2 + rank)}, r"\['w'\] float64 \(2,\), rank 1 has \['w'\] float64 \(3,\)"),
        (lambda rank: {"w": np.zeros(2, "f8" if rank else "f4")}, r"float32 \(2,\).*rank 1 has \['w'\] float64 \(2,\)"),
        (lambda rank: [np.zeros(1)] * (1 + rank), r"this rank has no \[1\], rank 1 has \[1\] float64"),
        (lambda rank: {"a" if rank else "b": np.zeros(1)}, r"this rank has \['b'\] .*rank 1 has no \['b'\]"),
        (
            lambda rank: [np.zeros(1), None if rank else np.zeros(1)],
            r"this rank has \[1\] float64 .*rank 1 has no \[1\]",
        ),
    ],
)
@pytest.mark.parametrize("call", [average_gradients, broadcast_parameters])
def test_trees_that_differ_are_told_before_a_byte_is_sent(call: Any, tree: Callable[[int], Any], text: str) -> None:
    def play_differing() -> float:
        with pytest.raises(dist.CollectiveMismatch) as told:
            call(tree(dist.get_rank()))
        assert told.value.op == call.__name__ and set(told.value.calls) == {0, 1}
        if dist.get_rank() == 0:
            told.match(f"the ranks have different trees: .*{text}.*nothing was sent")
        return float(average_gradients(np.array(float(dist.get_rank()))))

    assert run_ranks(play_differing, 2) == [0.5, 0.5]


def test_ranks_that_mean_different_calls_or_roots_are_told() -> None:
    def play_differing() -> None:
        rank = dist.get_rank()
        with pytest.raises(dist.CollectiveMismatch, match=r"call broadcast_parameters from rank [01]"):
            broadcast_parameters(np.zeros(1), rank)
        with pytest.raises(dist.CollectiveMismatch, match="call average_gradients"):
            (average_gradients if rank else broadcast_parameters)(np.zeros(1))

    run_ranks(play_differing, 2)


def test_leaves_of_one_name_in_another_order_are_told() -> None:
    Turned = namedtuple("Turned", "bias weights")

    def play_differing() -> None:
        kind: Any = Turned if dist.get_rank() else Layer
        with pytest.raises(dist.CollectiveMismatch, match=r"in the order call, \.bias, \.weights"):
            average_gradients(kind(weights=np.zeros(1), bias=np.zeros(1)))

    run_ranks(play_differing, 2)


def test_what_has_no_mean_or_is_no_array_is_named() -> None:
    def play_bad() -> None:
        with pytest.raises(dist.ArgumentError, match=r"\['a'\]\[1\] has dtype int64, which no gradient has"):
            average_gradients({"a": [np.zeros(1), np.zeros(1, np.int64)]})
        with pytest.raises(dist.ArgumentError, match="tree has dtype float8_e5m2, which no gradient has"):
            average_gradients(np.zeros(1, ml_dtypes.float8_e5m2))
        with pytest.raises(TypeError, match=r"`\['loss'\]` to be a numpy.ndarray"):
            average_gradients({"loss": "1.5"})
        assert average_gradients({"loss": 1.5}) == {"loss": 1.5}
        with pytest.raises(ValueError, match="Group rank 1 is not part of group"):
            broadcast_parameters(np.zeros(1), 1)
        with pytest.raises(ValueError, match="Invalid process group specified: -100"):
            average_gradients(np.zeros(1), dist.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]

    run_ranks(play_bad, 1)


def drift(rank: int, size: int) -> str:
    """Change the last bit of one array on one rank."""
    dist.init_process_group(timeout=30)
    tree = tree_of(0)
    require_equal_parameters(tree)
    require_equal_parameters([np.array(np.nan), 3, 0.5, np.asfortranarray(np.ones((2, 3))), np.zeros((0, 2))])
    require_equal_parameters(np.asfortranarray(np.ones((2, 3))) if rank == 0 else np.ones((2, 3)))
    if rank == size - 1:
        tree["half"][0][4] = np.nextafter(tree["half"][0][4], np.float16(1))
    with pytest.raises(dist.CollectiveMismatch) as caught:
        require_equal_parameters(tree)
    with pytest.raises(dist.CollectiveMismatch, match="different trees"):
        require_equal_parameters({"a": np.zeros(2 + rank)})
    require_equal_parameters(tree_of(1))  # the group goes on
    return str(caught.value)


def test_one_bit_that_differs_is_named_on_every_rank() -> None:
    for text in world.run(drift, 3):
        assert "the ranks have different parameters: this rank has ['half'][0] with hash" in text, text
        assert text.endswith("as average_gradients does, and begin with broadcast_parameters."), text


def test_parameters_of_torch_and_jax_are_compared() -> None:
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")

    def compare() -> None:
        require_equal_parameters([torch.arange(6.0).reshape(2, 3).T, torch.ones(2, dtype=torch.bfloat16)])
        require_equal_parameters(jax.numpy.ones(3))
        with pytest.raises(dist.CollectiveMismatch, match="this rank has tree with hash"):
            require_equal_parameters(torch.full((2,), float(dist.get_rank())))

    run_ranks(compare, 2)
