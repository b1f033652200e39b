"""HLO's operations on the arrays of one device, in NumPy.

Products, sums and functions of narrow floats are taken in float32 and rounded to the declared type, as the GPU's
kernels do. `Functions` runs the computations that fusions, reductions and sorts call.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from jax import lax
from scipy import special

from ultrascale_jax.hlo.program import Array, Instruction, Module

type Value = Any
"""An array, or a tuple of values."""

FLOATS = {
    **{"f16": np.float16, "f32": np.float32, "f64": np.float64, "bf16": ml_dtypes.bfloat16},
    **{"f8e4m3fn": ml_dtypes.float8_e4m3fn, "f8e5m2": ml_dtypes.float8_e5m2},
}
DTYPES: dict[str, Any] = {
    "pred": np.bool_,
    **{f"s{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"u{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    **FLOATS,
}
"""HLO's name of an element type to NumPy's."""

UNWRITTEN = 2**30 + 7
"""Content of unwritten integers: no index, token or position. Unwritten floats hold NaN, booleans true."""


class Unsupported(NotImplementedError):
    """The program has an instruction that is not known here."""


def dtype_of(array: Array) -> np.dtype:
    """Return NumPy's type of the elements; raises `Unsupported` for one that is not known."""
    if array.dtype not in DTYPES:
        raise Unsupported(f"elements of type {array.dtype}")
    return np.dtype(DTYPES[array.dtype])


def is_float(dtype: np.dtype) -> bool:
    """Return whether NaN is a number of this type."""
    return dtype in map(np.dtype, FLOATS.values())


def unwritten(array: Array) -> np.ndarray:
    """Return numbers that nobody can mistake for a result; all are one in memory, since workspaces have 32 MiB."""
    dtype = dtype_of(array)
    number = np.nan
    if not is_float(dtype):
        number = 1 if dtype.kind == "b" else min(UNWRITTEN, np.iinfo(dtype).max)
    return np.broadcast_to(np.array(number, dtype), array.dims)


def reinterpreted(values: np.ndarray, old: Array, new: Array) -> np.ndarray:
    """Return the bytes of an array in the layout of `old` as an array in the layout of `new`."""
    flat = np.ascontiguousarray(values.transpose(old.layout[::-1])).reshape(-1)
    return laid_out(flat.view(dtype_of(new)), new)


def laid_out(flat: np.ndarray, array: Array) -> np.ndarray:
    """Return a view of elements in the order of memory as the array whose layout that is."""
    major_to_minor = array.layout[::-1]
    physical = flat.reshape([array.dims[dim] for dim in major_to_minor])
    return physical.transpose(np.argsort(major_to_minor))


def widened(values: np.ndarray) -> np.ndarray:
    """Return narrow floats as float32, everything else as it is."""
    return values.astype(np.float32) if is_float(values.dtype) and values.itemsize < 4 else values


def convert(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Convert as XLA does: floats beyond an integer's range become its limits, and NaN 0."""
    if is_float(values.dtype) and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        wide = np.nan_to_num(widened(values).astype(np.float64))
        return np.clip(wide, limits.min, limits.max).astype(dtype)
    # NumPy has no way from one of ml_dtypes' floats to another.
    return values != 0 if dtype.kind == "b" else widened(values).astype(dtype)


@functools.cache
def _attribute(attributes: str, name: str) -> str:
    match = re.search(
        rf"(?:^|[ ,]){name}=(\{{[^}}]*\}}|[^, ]+)", attributes.partition(", metadata=")[0]
    )
    return match[1].strip('{}%"') if match else ""


def text_of(i: Instruction, name: str) -> str:
    """Return the text of an attribute without its braces; empty where there is none."""
    return _attribute(i.attributes, name)


def ints_of(i: Instruction, name: str) -> tuple[int, ...]:
    """Return the integers of an attribute."""
    return tuple(map(int, re.findall(r"-?\d+", text_of(i, name))))


# Elementwise operations


def _in_float32(function: Callable) -> Callable:
    return lambda x: function(widened(x)).astype(x.dtype)


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if is_float(a.dtype):
        return (widened(a) / widened(b)).astype(a.dtype)
    towards_zero = np.sign(a) * np.sign(b) * (np.abs(a) // np.maximum(np.abs(b), 1))
    return np.where(b == 0, -1, towards_zero).astype(a.dtype)


def _shift(function: Callable, kind: str) -> Callable:
    def shift(a: np.ndarray, by: np.ndarray) -> np.ndarray:
        bits = 8 * a.itemsize
        number = np.asarray(a).view(f"{kind}{a.itemsize}")
        shifted = function(number, np.minimum(by, bits - 1).astype(number.dtype)).view(a.dtype)
        return shifted if kind == "i" else np.where(by < bits, shifted, 0).astype(a.dtype)

    return shift


UNARY: dict[str, Callable] = {
    **{"abs": np.abs, "negate": np.negative, "sign": np.sign, "floor": np.floor, "ceil": np.ceil},
    **{"not": np.invert, "is-finite": np.isfinite, "round-nearest-even": np.rint},
    **{"exponential": _in_float32(np.exp), "exponential-minus-one": _in_float32(np.expm1)},
    **{"log": _in_float32(np.log), "log-plus-one": _in_float32(np.log1p)},
    **{"sqrt": _in_float32(np.sqrt), "rsqrt": _in_float32(lambda x: 1 / np.sqrt(x))},
    **{"cosine": _in_float32(np.cos), "sine": _in_float32(np.sin), "tanh": _in_float32(np.tanh)},
    **{"logistic": _in_float32(special.expit), "erf": _in_float32(special.erf)},
    **dict.fromkeys(("copy", "opt-barrier", "optimization-barrier"), lambda x: x),
}
BINARY: dict[str, Callable] = {
    **{"add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": _divide},
    **{"maximum": np.maximum, "minimum": np.minimum, "power": np.power, "remainder": np.fmod},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor},
    "shift-left": _shift(np.left_shift, "u"),
    "shift-right-logical": _shift(np.right_shift, "u"),
    "shift-right-arithmetic": _shift(np.right_shift, "i"),
}
COMPARISONS = {
    **{"EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal},
    **{"GT": np.greater, "GE": np.greater_equal},
}


def _compare(i: Instruction, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    function = COMPARISONS[text_of(i, "direction")]
    if text_of(i, "type") != "TOTALORDER":
        return function(a, b)
    # As integers, -NaN < -inf < -0 < 0 < inf < NaN.
    bits = [widened(x).view(np.int32) for x in (a, b)]
    return function(*(np.where(x < 0, np.iinfo(np.int32).max ^ x, x) for x in bits))


def _reduce_precision(i: Instruction, x: np.ndarray) -> np.ndarray:
    bits = ints_of(i, "exponent_bits") + ints_of(i, "mantissa_bits")
    narrow: dict[tuple[int, ...], Any] = {(8, 7): ml_dtypes.bfloat16, (5, 10): np.float16}
    return widened(x).astype(narrow.get(bits, np.float32)).astype(x.dtype)


# Shapes


def _constant(i: Instruction) -> np.ndarray:
    if "..." in i.argument:
        raise ValueError(f"%{i.name}: XLA left out the elements; print with print_large_constants")
    [array], words = i.arrays, {"true": "1", "false": "0"}
    numbers = [words.get(word, word) for word in re.split(r"[{},\s]+", i.argument) if word]
    dtype = dtype_of(array)
    parse = float if is_float(dtype) else int
    return np.array([parse(number) for number in numbers]).astype(dtype).reshape(array.dims)


def _iota(i: Instruction) -> np.ndarray:
    [array], dim = i.arrays, (*ints_of(i, "iota_dimension"), 0)[0]
    column = np.arange(array.dims[dim]).reshape([-1] + [1] * (len(array.dims) - dim - 1))
    return np.broadcast_to(column, array.dims).astype(dtype_of(array))


def _broadcast(i: Instruction, x: np.ndarray) -> np.ndarray:
    shape = [1] * len(i.arrays[0].dims)
    for dim, length in zip(ints_of(i, "dimensions"), x.shape, strict=True):
        shape[dim] = length
    return np.broadcast_to(x.reshape(shape), i.arrays[0].dims)


def _slice(i: Instruction, x: np.ndarray) -> np.ndarray:
    parts = re.findall(r"\[([\d:]+)\]", i.attributes.partition(", metadata=")[0])
    return x[tuple(slice(*map(int, part.split(":"))) for part in parts)]


def _place(starts: Sequence[Any], dims: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices of these sizes that begin at `starts`, clamped to the dims."""
    firsts = [min(max(int(s), 0), d - n) for s, d, n in zip(starts, dims, sizes, strict=True)]
    return tuple(slice(first, first + n) for first, n in zip(firsts, sizes, strict=True))


def _dynamic_slice(i: Instruction, x: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    return x[_place(starts, x.shape, ints_of(i, "dynamic_slice_sizes"))]


def _dynamic_update_slice(
    i: Instruction, x: np.ndarray, update: np.ndarray, *starts: np.ndarray
) -> np.ndarray:
    result = x.copy()
    result[_place(starts, x.shape, update.shape)] = update
    return result


def _pad(i: Instruction, x: np.ndarray, fill: np.ndarray) -> np.ndarray:
    edges: list[tuple[int, int, int]] = []
    for part in text_of(i, "padding").split("x") if x.ndim else ():
        low, high, between = (*part.split("_"), 0)[:3]
        edges.append((int(low), int(high), int(between)))
    return np.asarray(lax.pad(x, fill, edges))


def _gather(i: Instruction, x: np.ndarray, indices: np.ndarray) -> np.ndarray:
    numbers = lax.GatherDimensionNumbers(
        offset_dims=ints_of(i, "offset_dims"),
        collapsed_slice_dims=ints_of(i, "collapsed_slice_dims"),
        start_index_map=ints_of(i, "start_index_map"),
        operand_batching_dims=ints_of(i, "operand_batching_dims"),
        start_indices_batching_dims=ints_of(i, "start_indices_batching_dims"),
    )
    sizes, mode = ints_of(i, "slice_sizes"), lax.GatherScatterMode.CLIP
    return np.asarray(lax.gather(x, _index_last(i, indices), numbers, sizes, mode=mode))


def _index_last(i: Instruction, indices: np.ndarray) -> np.ndarray:
    """Put the dim that holds an index's components last, where JAX has it."""
    [dim] = ints_of(i, "index_vector_dim")
    return indices[..., None] if dim == indices.ndim else np.moveaxis(indices, dim, -1)


PLAIN: dict[str, Callable] = {
    **{"constant": _constant, "iota": _iota, "slice": _slice, "broadcast": _broadcast},
    **{"dynamic-slice": _dynamic_slice, "dynamic-update-slice": _dynamic_update_slice},
    **{"pad": _pad, "gather": _gather, "compare": _compare, "reduce-precision": _reduce_precision},
    "reshape": lambda i, x: x.reshape(i.arrays[0].dims),
    "transpose": lambda i, x: x.transpose(ints_of(i, "dimensions")),
    "reverse": lambda i, x: np.flip(x, ints_of(i, "dimensions")),
    "concatenate": lambda i, *xs: np.concatenate(xs, ints_of(i, "dimensions")[0]),
    "convert": lambda i, x: convert(x, dtype_of(i.arrays[0])),
    "bitcast-convert": lambda i, x: x.view(dtype_of(i.arrays[0])),
    "select": lambda i, *operands: np.where(*operands),
    "clamp": lambda i, low, x, high: np.minimum(np.maximum(x, low), high),
    "tuple": lambda i, *xs: xs,
    "get-tuple-element": lambda i, x: x[ints_of(i, "index")[0]],
}
"""Operations of an instruction and its operands."""


# Products and reductions


def product(
    a: np.ndarray,
    b: np.ndarray,
    contracted: tuple[Sequence[int], Sequence[int]],
    batch: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> np.ndarray:
    """Multiply as HLO's dot: batch dims first, then the free dims of `a`, then of `b`; floats in float32."""
    sides, free = [], []
    for x, along, over in zip((a, b), contracted, batch, strict=True):
        free_dims = [dim for dim in range(x.ndim) if dim not in (*along, *over)]
        lengths = [math.prod(x.shape[dim] for dim in dims) for dims in (over, free_dims, along)]
        # NumPy runs a loop instead of BLAS for other strides.
        ordered = widened(x).transpose(*over, *free_dims, *along).reshape(lengths)
        sides.append(np.ascontiguousarray(ordered))
        free += [x.shape[dim] for dim in free_dims]
    shared = [a.shape[dim] for dim in batch[0]]
    return np.matmul(sides[0], sides[1].swapaxes(1, 2)).reshape([*shared, *free])


def _reduce(
    values: Sequence[np.ndarray], initial: Sequence[np.ndarray], dims: Sequence[int], combine: Any
) -> tuple[np.ndarray, ...]:
    """Reduce arrays together over `dims`, by a ufunc or by an associative function of pairs of them."""
    if isinstance(combine, np.ufunc):
        return (combine.reduce(widened(values[0]), axis=tuple(dims), initial=initial[0].item()),)
    kept = [dim for dim in range(values[0].ndim) if dim not in dims]
    shape = [values[0].shape[dim] for dim in kept]
    rows = [
        np.concatenate(
            [np.broadcast_to(first, (1, *shape)), x.transpose(*dims, *kept).reshape(-1, *shape)]
        )
        for x, first in zip(values, initial, strict=True)
    ]
    while (length := len(rows[0])) > 1:
        half = length // 2
        pairs = combine(*(x[:half] for x in rows), *(x[half : 2 * half] for x in rows))
        pairs = pairs if isinstance(pairs, tuple) else (pairs,)
        rows = [np.concatenate([p, x[2 * half :]]) for p, x in zip(pairs, rows, strict=True)]
    return tuple(x[0] for x in rows)


def _sort(values: Sequence[np.ndarray], dim: int, precedes: Callable) -> tuple[np.ndarray, ...]:
    """Sort stably by the program's own comparator: an element's place is the number of elements before it."""
    rows = [np.moveaxis(x, dim, -1) for x in values]
    pairs = itertools.chain.from_iterable((x[..., :, None], x[..., None, :]) for x in rows)
    length = rows[0].shape[-1]
    smaller = np.broadcast_to(precedes(*pairs), (*rows[0].shape, length))  # [..., j, i]: j before i
    earlier = np.arange(length)[:, None] < np.arange(length)
    rank = (smaller | (~smaller.swapaxes(-1, -2) & earlier)).sum(-2)
    order = np.argsort(rank, axis=-1)
    return tuple(np.moveaxis(np.take_along_axis(x, order, -1), -1, dim) for x in rows)


def leaves(value: Value) -> list[Any]:
    """Return the arrays of a value in their order."""
    return (
        [leaf for part in value for leaf in leaves(part)] if isinstance(value, tuple) else [value]
    )


class Functions:
    """The computations of a module as functions of one device's arrays.

    Args:
      module: the program.
      custom_calls: target of a custom call to its function `(instruction, *operands) -> value`.
    """

    def __init__(self, module: Module, custom_calls: dict[str, Callable[..., Value]]):
        self.module, self.custom_calls = module, custom_calls
        self.device = 0
        """The device whose arrays are computed now."""

    def apply(self, computation: str, i: Instruction, operands: Sequence[Value]) -> Value:
        """Return the value of an instruction of `computation`, which has the type that XLA declares.

        Raises `Unsupported` where nothing here computes it.
        """
        try:
            value = self._apply(computation, i, operands)
            arrays = [array for array in i.arrays if array.dtype != "token"]
            for leaf, array in zip(leaves(value), arrays, strict=True):
                if np.shape(leaf) != array.dims or leaf.dtype != dtype_of(array):
                    raise TypeError(f"made {leaf.dtype}{list(np.shape(leaf))}, not {i.type}")
            return value
        except Exception as error:
            error.add_note(f"%{i.name} = {i.type} {i.opcode}({i.argument}{i.attributes[:300]}")
            raise

    def call(self, computation: str, *arguments: Value) -> Value:
        """Return the result of a computation for these parameters."""
        return self._call(computation, arguments, self.apply)

    def elementwise(self, computation: str) -> Any:
        """Return a computation of numbers as a function of arrays: as NumPy's ufunc if it is one."""
        body = self.module.by_name[computation]
        [root] = (i for i in body.values() if i.root)
        function = BINARY.get(root.opcode)
        is_plain = all(body[name].opcode == "parameter" for name in root.operands)
        if is_plain and isinstance(function, np.ufunc):
            return function
        return lambda *arguments: self._call(computation, arguments, self._apply)

    def _call(self, computation: str, arguments: Sequence[Value], apply: Callable) -> Value:
        values, result = {}, None
        for i in self.module.computations[computation]:
            if i.opcode == "parameter":
                values[i.name] = arguments[int(i.argument)]
            else:
                values[i.name] = apply(computation, i, [values[name] for name in i.operands])
            result = values[i.name] if i.root else result
        return result

    def _apply(self, computation: str, i: Instruction, operands: Sequence[Value]) -> Value:
        if i.opcode in UNARY:
            return UNARY[i.opcode](*operands)
        if i.opcode in BINARY:
            return BINARY[i.opcode](*operands)
        if i.opcode in PLAIN:
            return PLAIN[i.opcode](i, *operands)
        if i.opcode in ("fusion", "call"):
            return self.call(i.called[0], *operands)
        if i.opcode == "map":
            return self.elementwise(i.called[0])(*operands)
        if i.opcode == "bitcast":
            [operand], [x] = i.operands, operands
            old, new = self.module.by_name[computation][operand].arrays[0], i.arrays[0]
            return reinterpreted(x, old, new) if new.dims or old.dims else x.view(dtype_of(new))
        if i.opcode == "partition-id":
            return np.uint32(self.device)
        if i.opcode == "dot":
            return self._dot(i, *operands)
        if i.opcode in ("reduce", "reduce-window", "scatter", "sort"):
            return getattr(self, "_" + i.opcode.replace("-", "_"))(i, *operands)
        if i.opcode == "custom-call":
            return self._custom_call(i, *operands)
        raise Unsupported(f"%{i.name}: opcode {i.opcode} of {i.op_name}")

    def _dot(self, i: Instruction, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        contracted = ints_of(i, "lhs_contracting_dims"), ints_of(i, "rhs_contracting_dims")
        batch = ints_of(i, "lhs_batch_dims"), ints_of(i, "rhs_batch_dims")
        return product(a, b, contracted, batch).astype(dtype_of(i.arrays[0]))

    def _reduce(self, i: Instruction, *operands: np.ndarray) -> Value:
        half, combine = len(operands) // 2, self.elementwise(i.called[0])
        results = _reduce(operands[:half], operands[half:], ints_of(i, "dimensions"), combine)
        values = tuple(x.astype(y.dtype) for x, y in zip(results, operands, strict=False))
        return values if i.type.startswith("(") else values[0]

    def _reduce_window(self, i: Instruction, x: np.ndarray, initial: np.ndarray) -> np.ndarray:
        window = re.search(r"window=\{([^}]*)\}", i.attributes)
        assert window  # it always has one
        parts = {
            key: text.split("x") for key, _, text in (p.partition("=") for p in window[1].split())
        }
        if set(parts) - {"size", "pad"}:
            raise Unsupported(f"%{i.name}: window {window[1]}")
        pads = [tuple(map(int, pad.split("_"))) for pad in parts.get("pad", ["0_0"] * x.ndim)]
        padded = np.pad(x, pads, constant_values=initial.item())
        seen = np.lib.stride_tricks.sliding_window_view(padded, [int(n) for n in parts["size"]])
        combine = self.elementwise(i.called[0])
        return _reduce([seen], [initial], range(x.ndim, seen.ndim), combine)[0].astype(x.dtype)

    def _scatter(self, i: Instruction, x: np.ndarray, indices: Any, updates: Any) -> np.ndarray:
        """Combine updates with their places; updates outside `x` are dropped."""
        numbers = lax.ScatterDimensionNumbers(
            update_window_dims=ints_of(i, "update_window_dims"),
            inserted_window_dims=ints_of(i, "inserted_window_dims"),
            scatter_dims_to_operand_dims=ints_of(i, "scatter_dims_to_operand_dims"),
            operand_batching_dims=ints_of(i, "input_batching_dims"),
            scatter_indices_batching_dims=ints_of(i, "scatter_indices_batching_dims"),
        )
        [root] = (inner for inner in self.module.computations[i.called[0]] if inner.root)
        kinds = {"add": lax.scatter_add, "maximum": lax.scatter_max, "minimum": lax.scatter_min}
        scatter = lax.scatter if root.argument == "1" else kinds.get(root.opcode)
        if scatter is None:
            raise Unsupported(f"%{i.name}: scatter by {root.opcode}")
        mode = lax.GatherScatterMode.FILL_OR_DROP
        where = _index_last(i, indices)
        summed = scatter(widened(x), where, widened(updates), numbers, mode=mode)
        return np.asarray(summed).astype(x.dtype)

    def _sort(self, i: Instruction, *operands: np.ndarray) -> Value:
        results = _sort(operands, ints_of(i, "dimensions")[0], self.elementwise(i.called[0]))
        return results if i.type.startswith("(") else results[0]

    def _custom_call(self, i: Instruction, *operands: np.ndarray) -> Value:
        target = text_of(i, "custom_call_target")
        if target == "AllocateBuffer":
            return unwritten(i.arrays[0])
        if target not in self.custom_calls:
            raise Unsupported(f"%{i.name}: custom call {target} of {i.op_name}")
        return self.custom_calls[target](i, *operands)
