"""What users give as inputs and labels, checked and turned into the arrays that models take.

An input of several arrays is packed into one row, so that clients, files and batches need to know nothing of its parts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.layout import Layout
from rayfed.data.on_disk import LazyRows, as_lazy_rows
from rayfed.data.population import Examples
from rayfed.data.readers.files import note

MISSING = ("", "#N/A", "N/A", "NA", "NULL", "NaN", "None", "nan", "null")
EXACT = 2**24  # up to here float32 holds all whole numbers
STEPS = 2**12  # a column whose range has fewer steps of float32 is a constant with small differences, such as a time
SHARE_LOST = 0.01  # of the different values of a column, which may become equal by chance
LOOKED_AT = 1000  # columns in which values are compared
MOST_CLASSES = 1_000_000  # labels that are larger number something else, and would fill the memory with outputs


def count_classes(where: str, labels: Iterable[np.ndarray], key: str, given: int | None = None) -> int:
    """Return the number of classes of labels that count from 0: `given` by `key`, else the highest label plus 1.

    UsageError if a label is too high for `given` or as a class. The same if no label is 0: there would be a class too
    many.
    """
    lowest = 0
    highest = 0
    filled = [part for part in labels if len(part)]
    if filled:
        lowest = min(int(part.min()) for part in filled)
        highest = max(int(part.max()) for part in filled)
    if given is not None and highest >= given:
        remedy = ""
        if lowest > 0:
            remedy = f"; classes count from 0, so subtract {lowest}"
        allowed = f"there are {given} classes (0..{given - 1})"
        raise UsageError(f"{where}: label {highest}, but {allowed}; see {key}{remedy}")
    if given is None and lowest > 0:
        ways = f"subtract {lowest}, or give {key}={highest + 1} if class 0 has no example"
        raise UsageError(f"{where}: the labels are {lowest} to {highest}; classes count from 0, so {ways}")
    if given is None and highest >= MOST_CLASSES:
        raise UsageError(f"{where}: labels up to {highest} would be {highest + 1} classes, above {MOST_CLASSES}")
    return given or highest + 1


def class_labels(where: str, labels: np.ndarray, place: Callable[[int], str] | None = None) -> np.ndarray:
    """Return labels [n], numbers of any type, as int64. Integers may be floats, as pandas gives columns with gaps.

    Raises:
        UsageError: A label is no integer from 0; the message starts with `place` of the first of these, else `where`.
    """
    numbers = labels.astype(np.float64)
    is_whole = numbers == np.floor(numbers)
    is_class = (numbers >= 0) & (numbers < 2.0**63) & is_whole
    wrong = np.flatnonzero(~is_class)  # also NaN, which is not equal to itself
    if len(wrong):
        label = labels[wrong[0]]
        said = str(label)
        if labels.dtype.kind == "f":
            said = f"{label:g}"
        remedy = ""
        if label == -1:
            remedy = "; write -1 and 1 as 0 and 1, and leave rows out that -1 marks as unlabelled"
        elif label >= 2**63:
            remedy = f"; the highest is {2**63 - 1}"
        if place:
            where = place(int(wrong[0]))
        share = f"{len(wrong)} of {len(labels)} labels are not"
        raise UsageError(f"{where}: label {said}; a class is an integer from 0, which {share}{remedy}")
    return labels.astype(np.int64)


def numbered_words(where: str, words: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the place of each word in the alphabetical order, int64 [n], and the different words in order.

    UsageError if two words differ only in spaces. A word that usually stands for a missing value is noted.
    """
    names, codes = np.unique(words.astype(str), return_inverse=True)
    stripped = np.char.strip(names)
    _, of_stripped, counts = np.unique(stripped, return_inverse=True, return_counts=True)
    alike = np.flatnonzero(counts[of_stripped] > 1)
    if len(alike):
        is_like_first = of_stripped == of_stripped[alike[0]]
        first_two = names[is_like_first].tolist()[:2]
        pair = " and ".join(map(repr, first_two))
        raise UsageError(f"{where} has {pair}, which differ only in spaces; write them alike")
    for row in np.flatnonzero(np.isin(names, MISSING)).tolist():
        count = int((codes == row).sum())
        word = names[row].item()
        note(f"{where}: {word!r} in {count} of {len(codes)} rows is taken for a name")
    return codes.astype(np.int64), tuple(names.tolist())


def names_as_integers(where: str, values: np.ndarray) -> np.ndarray:
    """Return the numbers of clients or the like as int64 [n]; words are numbered in alphabetical order."""
    if values.dtype.kind in "US" and values.ndim == 1:
        return numbered_words(where, values)[0]
    is_whole = values.dtype.kind in "biu"
    if values.dtype.kind == "f":
        has_no_fraction = np.isfinite(values) & (values == np.floor(values))
        is_whole = bool(has_no_fraction.all())
    if values.ndim != 1 or not is_whole:
        form = f"{values.dtype} {list(values.shape)}"
        raise UsageError(f"{where}: is {form}; expected integers or words [n]")
    return values.astype(np.int64)


def targets(where: str, labels: np.ndarray, place: Callable[[int], str] | None = None) -> np.ndarray:
    """Return labels [n, ...] as classes, int64 [n], if they are integers [n] from 0, also as floats; else as int64 or
    float32. Words [n] are classes in alphabetical order, and integers [n, 1] are classes [n]. The errors are those of
    `class_labels`."""
    if labels.dtype.kind in "US" and labels.ndim == 1:
        return numbered_words(where, labels)[0]
    if labels.dtype.kind not in "biuf":
        form = f"{labels.dtype} {list(labels.shape)}"
        raise UsageError(f"{where}: are {form}; expected numbers, or one word for each row")
    is_column = labels.ndim == 2 and labels.shape[1] == 1
    if is_column and labels.dtype.kind in "biu":
        labels = labels[:, 0]
    is_float = labels.dtype.kind == "f"
    has_fractions = is_float and np.isfinite(labels).all() and (labels != np.floor(labels)).any()
    if labels.ndim == 1 and not has_fractions:
        return class_labels(where, labels, place)
    if is_float:
        return as_float32(where, labels)
    return labels.astype(np.int64)


def as_float32(where: str, values: np.ndarray, told: str = "") -> np.ndarray:
    """Return numbers [n, ...] as float32, in which models compute; the errors are those of `check_float32`."""
    check_float32(where, values, told)
    with np.errstate(over="ignore"):
        return values.astype(np.float32, copy=False)


def check_float32(where: str, values: np.ndarray, told: str = "") -> None:
    """Raise UsageError if numbers [n, ...], such as times and codes, become equal when they become float32.

    Whole numbers that are rounded and stay different are noted, as those of `told`, else of `where`.
    """
    # bytes of a number that float32 may not hold
    smallest = 4
    if values.dtype.kind == "f":
        smallest = 8
    if not values.size or values.dtype.itemsize < smallest:
        return
    columns = values.reshape(len(values), -1)
    low = columns.min(0).astype(float)
    high = columns.max(0).astype(float)
    largest = np.maximum(np.abs(low), np.abs(high))
    with np.errstate(over="ignore", invalid="ignore"):
        single = largest.astype(np.float32)
        is_coarse = np.spacing(single) * STEPS > high - low
        may_collapse = is_coarse & (high > low)
        looked_at = np.isfinite(single) & ((largest > EXACT) | may_collapse)
    for place in np.flatnonzero(looked_at)[:LOOKED_AT].tolist():
        column = ""
        if columns.shape[1] > 1:
            column = f", column {place}"
        shared = ""
        if told:
            shared = f"{told}{column}"
        numbers = columns[:, place]
        _check_column(f"{where}{column}", numbers, shared, is_coarse=bool(is_coarse[place]))


def _check_column(where: str, values: np.ndarray, told: str, *, is_coarse: bool) -> None:
    """Do what `check_float32` does for one column [n]; `is_coarse`: float32 has few steps in its range."""
    different = np.unique(values)
    rounded = different.astype(np.float32)
    is_whole = bool((different == np.floor(different)).all())
    equal = np.flatnonzero(rounded[1:] == rounded[:-1])
    remedy = "subtract the first of times, number codes from 0, or leave them out"
    if len(equal) > SHARE_LOST * len(different) and (is_whole or is_coarse):
        first_two = different[equal[0] : equal[0] + 2]
        pair = " and ".join(map(_in_full, first_two))
        count = len(different)
        left = f"{count} different values become {count - len(equal)}"
        raise UsageError(f"{where}: {left} as float32, in which models compute, such as {pair}; {remedy}")
    changed = np.flatnonzero(rounded != different)
    if is_whole and len(changed):
        first = changed[0]
        pair = f"{_in_full(different[first])} to {_in_full(rounded[first])}"
        example = ""
        if not told:
            example = f", such as {pair}"
        told = told or where
        note(f"{told}: as float32, whole numbers above {EXACT:,} are rounded{example}; {remedy}")


def _in_full(value: Any) -> str:
    """Return a number with all of its digits."""
    if value == np.floor(value):
        return str(int(value))
    return repr(float(value))


def check_channels_first(where: str, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> None:
    """Raise UsageError if images [n, ...] of uint8 have their channels last, as PIL and NumPy give them."""
    are_images = dtype == np.uint8 and len(shape) == 4
    if are_images and shape[1] > 4 >= shape[3]:
        expected = "images are [n, channels, height, width], so give x.transpose(0, 3, 1, 2)"
        raise UsageError(f"{where}: uint8 {list(shape)}, channels last; {expected}")


def check_inputs(where: str, part: Examples) -> None:
    """Raise UsageError if a model cannot work with inputs: images of another form, NaN or infinity."""
    check_channels_first(where, part.x.shape, part.dtype)
    if part.dtype == np.uint8 and len(part.shape) < 2:
        raise UsageError(f"{where}: uint8 {list(part.x.shape)}; uint8 is for images [n, c, h, w], so use float32")
    count = 0
    if part.dtype.kind == "f":
        count = sum(map(not_finite, part.blocks()))
    if count:
        remedy = "are too large for float32; remove or replace them"
        raise UsageError(f"{where}: {count} of {len(part)} inputs hold NaN or infinity, or {remedy}")


def check_finite(where: str, labels: np.ndarray) -> None:
    """Raise UsageError if labels are floats and some of them are NaN or infinity."""
    count = 0
    if labels.dtype.kind == "f":
        count = not_finite(labels)
    if count:
        raise UsageError(f"{where}: {count} of {len(labels)} labels hold NaN or infinity; remove or replace them")


def not_finite(values: np.ndarray) -> int:
    """Return how many rows of `values` [n, ...] hold NaN or infinity."""
    if values.size:
        is_finite = np.isfinite(values).reshape(len(values), -1).all(1)
        return int((~is_finite).sum())
    return 0


def as_array(where: str, given: Any) -> np.ndarray:
    """Return an array or a tensor as an array whose byte order and strides torch takes; UsageError if it is none."""
    if hasattr(given, "toarray"):
        raise UsageError(f"{where} is sparse ({type(given).__name__}); give it by .toarray()")
    if isinstance(given, np.ma.MaskedArray) and given.mask.any():
        raise UsageError(f"{where} has {given.mask.sum()} masked values; fill them in, or leave these rows out")
    try:
        if hasattr(given, "detach"):  # a tensor
            is_short = given.is_floating_point() and given.element_size() < 4  # NumPy has no bfloat16
            if is_short:
                given = given.float()
            given = given.detach().cpu()
        values = np.asarray(given)
        return np.asarray(values, values.dtype.newbyteorder("="), order="C")
    except (ValueError, TypeError, RuntimeError) as error:  # rows of uneven lengths, or a dtype that only torch has
        remedy = ""
        if "inhomogeneous" in str(error):
            remedy = "; rayfed.padded makes rows of one length"
        reason = " ".join(str(error).split())
        raise UsageError(f"{where} is no array of numbers ({reason}){remedy}") from error


def model_inputs(where: str, given: Any, told: str = "") -> np.ndarray:
    """Return inputs [n, ...] as numbers with which networks compute: float32, uint8, bool or signed integers.

    Notes start with `told`, else with `where`.
    """
    x = as_array(where, given)
    if x.dtype.kind not in "biuf":
        raise UsageError(f"{where} has the type {x.dtype}; give numbers, such as x.astype('float32')")
    if x.dtype.kind == "f":
        return as_float32(where, x, told)
    largest_signed = np.iinfo(np.int64).max
    if x.dtype == np.uint64 and (x > largest_signed).any():
        raise UsageError(f"{where} has {x.max()} of uint64, which no tensor of int64 holds; number these values anew")
    if x.dtype.kind == "u" and x.itemsize > 1:
        if x.itemsize > 2:
            return x.astype(np.int64)
        return x.astype(np.int32)
    return x


def is_tree(x: Any) -> bool:
    """Return whether inputs are given as several arrays."""
    return isinstance(x, (Mapping, tuple))


class PackedFiles:
    """Arrays of which some lie in files, as one file of packed rows: rows are packed when they are read."""

    dtype = np.dtype(np.int32)

    def __init__(self, layout: Layout, parts: Sequence[np.ndarray | LazyRows]):
        self.layout = layout
        self.parts = parts
        self.shape = (len(parts[0]), layout.words)
        self.row_bytes = 4 * layout.words

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Fill `out` [n, words] with `rows`."""
        self.layout.pack([part[rows] for part in self.parts], out)


def packed(where: str, tree: Any, layout: Layout | None = None, told: str = "") -> tuple[np.ndarray | LazyRows, Layout]:
    """Return the rows of a dict or a tuple of arrays [n, ...], and their layout.

    Args:
        where: What the inputs belong to, for messages.
        tree: The arrays. Floats become float32; pixels of uint8 are scaled to [0, 1] when the model is called.
        layout: The layout that they must have, that of the first client; None: any.
        told: What the inputs belong to, for notes; empty: `where`.

    Raises:
        UsageError: They are no arrays of numbers of one length, or have another layout.
    """
    if not is_tree(tree) or not tree:
        expected = str(layout or "a dict or a tuple of arrays")
        raise UsageError(f"{where}: expected {expected}, got {type(tree).__name__}")
    parts = {}
    for name, part in _named_parts(tree, layout).items():
        told_part = f"{told or where}[{name}]"
        parts[name] = _column(f"{where}[{name}]", part, told_part)
    own = _layout_of(where, parts, by_name=isinstance(tree, Mapping))
    columns = list(parts.values())
    count = len(columns[0])
    if layout is not None and count and own != layout:
        raise UsageError(f"{where}: got {_form(own)}; expected {_form(layout)}")
    layout = layout or own
    if not count:
        return np.zeros((0, layout.words), np.int32), layout
    if any(isinstance(part, LazyRows) for part in columns):
        file = PackedFiles(layout, columns)
        return LazyRows(file, np.arange(count)), layout
    return layout.pack([part[:] for part in columns]), layout


def _named_parts(tree: Any, layout: Layout | None) -> dict[str, Any]:
    """Return the parts of an input by their names; they are in the order of `layout` if it has the same ones."""
    by_name = isinstance(tree, Mapping)
    if by_name:
        named = {}
        for name, part in tree.items():
            named[str(name)] = part
    else:
        named = {str(number): part for number, part in enumerate(tree)}
    if layout is not None and by_name == layout.by_name:
        expected_names = [leaf.name for leaf in layout.leaves]
        if set(expected_names) == set(named):
            return {name: named[name] for name in expected_names}
    return named


def _layout_of(where: str, parts: Mapping[str, np.ndarray | LazyRows], *, by_name: bool) -> Layout:
    """Return the layout of the parts of an input; UsageError if they have different lengths."""
    first, *others = parts
    for name in others:
        if len(parts[name]) != len(parts[first]):
            rows = f"{len(parts[first])} rows of {first} and {len(parts[name])} of {name}"
            raise UsageError(f"{where}: {rows}")
    kinds = []
    for name, part in parts.items():
        shape = tuple(part.shape[1:])
        kinds.append((name, _kind(part.dtype), shape))
    return Layout.of(kinds, by_name=by_name)


def _form(layout: Layout) -> str:
    parts = ", ".join(f"{leaf} of {leaf.dtype}" for leaf in layout.leaves)
    kind = "tuple"
    if layout.by_name:
        kind = "dict"
    return f"a {kind} of {parts}"


def _kind(dtype: "np.dtype[Any]") -> str:
    """Return the dtype in which the model gets a part."""
    if dtype.name in ("float32", "int64", "int32", "bool", "uint8"):
        return dtype.name
    if dtype.kind == "f":
        return "float32"
    if dtype.itemsize > 2:
        return "int64"
    return "int32"


def _column(where: str, given: Any, told: str) -> np.ndarray | LazyRows:
    """Return a part [n, ...] as an array, or as rows of a file."""
    part = as_lazy_rows(given)
    if not isinstance(part, LazyRows):
        part = model_inputs(where, part, told)
    check_inputs(where, Examples(part, np.zeros(len(part))))
    return part


def padded(
    sequences: Sequence[Any], length: int | None = None, *, name: str = "input_ids", mask: str = "attention_mask"
) -> dict[str, np.ndarray]:
    """Return sequences of several lengths as one input, and where they are as another one.

    Args:
        sequences: Arrays [t, ...] of one type, which are padded with 0 behind their end.
        length: The length of all rows; None: the longest of `sequences`. All clients must have one length.
        name: The name of the input, an array [n, length, ...].
        mask: The name of the mask, int64 [n, length], which is 1 where a sequence is.
    """
    arrays = [np.asarray(sequence) for sequence in sequences]
    if length is None:
        length = max(map(len, arrays), default=0)
    rows = []
    for array in arrays:
        behind = [(0, length - len(array))]
        others = [(0, 0)] * (array.ndim - 1)
        rows.append(np.pad(array, behind + others))
    ends = np.array([len(array) for array in arrays])
    if rows:
        values = np.stack(rows)
    else:
        values = np.zeros((0, length), np.int64)
    is_filled = np.arange(length) < ends[:, None]
    return {name: values, mask: is_filled.astype(np.int64)}
