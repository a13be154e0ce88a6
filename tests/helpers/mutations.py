"""Hostile inputs, made from valid ones by a seeded generator: bytes, JSON, YAML, pickles, Parquet tables and arrays."""

import copy
import io
import json
import pickletools
import random
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

NAMES = (
    *("", ".", "..", "../../x", "/etc/passwd", "/dev/zero", "~", "~nosuchuser", "a\x1b[31mb", "a\nb", "a\r\\input{x}"),
    *("\\input{/etc/passwd}", "<script>", "x" * 5000, "\ud800", "\x00", "\u202e", "order", "mean", "value", "=1+1"),
)
NUMBERS = (
    *(0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 10**400, 7 * 10**4199),
    *(0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf"), -float("inf")),
)
INTERESTING_BYTES = (b"\x00", b"\xff", b"\x7f", b"\x80", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x00\x00\x00\x80")


def mutated_bytes(whole: bytes, rng: random.Random) -> bytes:
    """Return bytes damaged in one to four places."""
    for _ in range(rng.randint(1, 4)):
        whole = _damaged_once(whole, rng)
    return whole


def _damaged_once(whole: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(whole) + 1)
    end = min(len(whole), start + rng.choice((1, 1, 2, 4, 8, 64)))
    kind = rng.choice(("cut", "flip", "insert", "delete", "replace", "repeat", "swap", "digits"))
    if kind == "cut":
        return whole[:start]
    if kind == "flip":
        flipped = bytes(byte ^ (1 << rng.randrange(8)) for byte in whole[start:end])
        return whole[:start] + flipped + whole[end:]
    if kind == "insert":
        return whole[:start] + rng.randbytes(end - start + 1) + whole[start:]
    if kind == "delete":
        return whole[:start] + whole[end:]
    if kind == "replace":
        chosen = rng.choice(INTERESTING_BYTES)
        return whole[:start] + chosen + whole[start + len(chosen) :]
    if kind == "repeat":
        return whole[:end] + whole[start:end] * rng.choice((1, 2, 1000)) + whole[end:]
    if kind == "digits":
        return whole[:start] + str(rng.choice(NUMBERS[:12])).encode()[:500] + whole[end:]
    other = rng.randrange(len(whole) + 1)
    return whole[:start] + whole[other : other + end - start] + whole[end:]


def mutated_json(whole: bytes, rng: random.Random) -> bytes:
    """Return JSON with other values, fields that are missing or other fields, or damaged bytes."""
    if rng.random() < 0.15:
        return mutated_bytes(whole, rng)
    return dumped(mutated_value(json.loads(whole), rng))


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def mutated_value(value: Any, rng: random.Random) -> Any:
    """Return a nested value of JSON with one to three changes."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        value = _changed(value, rng)
    return value


def _changed(value: Any, rng: random.Random) -> Any:
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.05:
        return hostile(rng)
    key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    if isinstance(value[key], (dict, list)) and rng.random() < 0.7:
        value[key] = _changed(value[key], rng)
    elif rng.random() < 0.6:
        value[key] = hostile(rng)
    elif isinstance(value, dict) and rng.random() < 0.5:
        value[rng.choice(NAMES)] = value.pop(key)
    else:
        del value[key]
    return value


def hostile(rng: random.Random) -> Any:
    """Return a value that a reader may not expect."""
    deep: list[Any] = []
    for _ in range(rng.choice((1, 200))):
        deep = [deep]
    simple = (None, True, False, [], {}, [1, "a", None], {"a": {"b": 1}}, deep)
    return rng.choice((rng.choice(simple), rng.choice(NAMES), rng.choice(NUMBERS), rng.randint(-5, 300)))


_YAML = (
    *(
        "&a ",
        "*a",
        "<<: *a\n",
        "? ",
        "- ",
        ": ",
        "{",
        "}",
        "[",
        "]",
        "!!python/object/apply:os.system [ls]",
        "!!binary ",
    ),
    *("!!set {a}", "!!timestamp ", "2001-99-99", "|\n", ">\n", "%YAML 1.1\n---\n", "...\n", "#", '"', "'", "\t", "~"),
    *(
        "[" * 400,
        "9" * 4299,
        "9" * 5000,
        "1e999",
        ".nan",
        "\u2028",
        "\x07",
        "grid: [1, 2]\n",
        "name: x\n",
        "rounds: 3\n",
    ),
    *(
        "seeds: [1]\n",
        "arms:\n- rounds: 2\n",
        "search: {kind: random, samples: 3}\n",
        "{uniform: [1, 0]}",
        "{grid: {}}",
    ),
)


def mutated_yaml(whole: bytes, rng: random.Random) -> bytes:
    """Return YAML with tokens, lines or bytes that are inserted, repeated or removed."""
    if rng.random() < 0.2:
        return mutated_bytes(whole, rng)
    text = whole.decode()
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(text) + 1)
        end = min(len(text), place + rng.randrange(12)) if rng.random() < 0.5 else place
        token = rng.choice((*_YAML, str(rng.choice(NUMBERS)), rng.choice(NAMES)))
        text = text[:place] + token + text[end:]
    return text.encode("utf-8", "surrogatepass")


def mutated_text(whole: bytes, rng: random.Random) -> bytes:
    """Return lines of words and numbers with other ones."""
    if rng.random() < 0.3:
        return mutated_bytes(whole, rng)
    lines = whole.decode("utf-8", "replace").split("\n")
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(lines))
        words = lines[place].replace("\t", " ").split(" ")
        word = rng.randrange(len(words))
        words[word] = rng.choice(
            (str(rng.choice(NUMBERS))[:3000], rng.choice(NAMES), "", ":", "1:2:3", words[word] * 3)
        )
        lines[place] = rng.choice((" ".join(words), lines[place] + "\n" + lines[place], "", ",".join(words)))
    return "\n".join(lines).encode("utf-8", "replace")


_OPCODES = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes]
_GLOBALS = (
    b"cos\nsystem\n",
    b"cnumpy\ndtype\n",
    b"cnumpy\nndarray\n",
    b"cbuiltins\nbytearray\n",
    b"c_codecs\nencode\n",
)


def mutated_pickle(whole: bytes, rng: random.Random) -> bytes:
    """Return a pickle with opcodes that are removed, repeated, moved or inserted, or damaged bytes."""
    if rng.random() < 0.3:
        return mutated_bytes(whole, rng)
    starts = [position for _, _, position in pickletools.genops(whole)]
    parts = [whole[start:end] for start, end in zip(starts, [*starts[1:], len(whole)], strict=True)]
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(parts))
        length = struct.pack("<Q", rng.choice((0, 5, 2**31, 3 * 10**11, 2**63)))
        inserted = (rng.choice(_OPCODES), rng.choice(_GLOBALS), rng.choice(parts), b"\x8e" + length, b"r" + length[:4])
        kind = rng.choice(("insert", "remove", "replace", "repeat"))
        if kind == "insert":
            parts.insert(place, rng.choice(inserted))
        elif kind == "replace":
            parts[place] = rng.choice(inserted)
        elif kind == "repeat":
            parts[place] *= rng.choice((2, 1000))
        elif len(parts) > 1:
            del parts[place]
    return b"".join(parts)


def mutated_parquet(whole: bytes, rng: random.Random) -> bytes:
    """Return a Parquet file with other columns or values, of which all checksums are right, or damaged bytes."""
    if rng.random() < 0.3:
        return mutated_bytes(whole, rng)
    table = pq.read_table(io.BytesIO(whole))
    for _ in range(rng.randint(1, 2)):
        table = _changed_table(table, rng)
    out = io.BytesIO()
    pq.write_table(table, out, write_page_checksum=True)
    return out.getvalue()


def _changed_table(table: pa.Table, rng: random.Random) -> pa.Table:
    place = rng.randrange(table.num_columns) if table.num_columns else 0
    kind = rng.choice(("values", "values", "values", "values", "rename", "drop", "rows", "metadata", "repeat"))
    if kind == "metadata":
        metadata = dict(table.schema.metadata or {})
        metadata[b"rayfed.schema"] = rng.choice((b"1", b"2", b"\xff\xfe", b"9" * 5000))
        metadata[rng.choice((b"huggingface", b"pandas"))] = rng.choice((b"{", b"[]", b'{"info": 5}', b"\xff"))
        return table.replace_schema_metadata(metadata)
    if kind == "rows":
        return table.slice(0, rng.choice((0, 1)))
    if kind == "repeat":
        return pa.concat_tables([table] * 2)
    if not table.num_columns:
        return table
    names = list(table.column_names)
    if kind == "rename":
        names[place] = rng.choice([name for name in (*NAMES, *names) if name != "\ud800"])
        return table.rename_columns(names)
    if kind == "drop":
        return table.remove_column(place)
    return table.set_column(place, names[place], _column(table.num_rows, table.column(place), rng))


def _column(rows: int, before: pa.ChunkedArray, rng: random.Random) -> pa.Array | pa.ChunkedArray:
    """Return a column with hostile values: of the same type, or of another one."""
    numbers = [number for number in NUMBERS if isinstance(number, int) and -(2**63) <= number < 2**63]
    names = [name for name in NAMES if name != "\ud800"]
    makers: tuple[Callable[[], Any], ...] = (
        lambda: pa.nulls(rows, before.type),
        lambda: pa.nulls(rows),
        lambda: pa.array([rng.choice(names) for _ in range(rows)], pa.string()),
        lambda: pa.array([rng.choice(names) for _ in range(rows)]).dictionary_encode(),
        lambda: pa.array([rng.choice(numbers) for _ in range(rows)], pa.int64()),
        lambda: pa.array([rng.randint(-3, 300) for _ in range(rows)], pa.int32()),
        lambda: pa.array([rng.choice((2**64 - 1, 0)) for _ in range(rows)], pa.uint64()),
        lambda: pa.array([float(rng.choice(NUMBERS[-7:])) for _ in range(rows)], pa.float64()),
        lambda: pa.array([[1, 2]] * rows),
        lambda: pa.array([[[1.0], [2.0, 3.0]]] * rows),
        lambda: pa.array([{"bytes": b"\x89PNG", "path": "x"}] * rows),
        lambda: pa.array([b"\xff\xfe\x00" * 3] * rows, pa.binary()),
        lambda: pa.array([rng.choice((10**12, -(10**12))) for _ in range(rows)], pa.timestamp("ms")),
        lambda: pa.array([True, False, None] * rows)[:rows],
    )
    try:
        if rng.random() < 0.4:  # the type of the column, so that other checks are reached
            return rng.choice(makers)().cast(before.type)
        return rng.choice(makers)()
    except (pa.ArrowException, OverflowError, ValueError):
        return pa.nulls(rows, before.type)


def mutated_npz(whole: bytes, rng: random.Random) -> bytes:
    """Return an .npz file of which an array's header says something else, or damaged bytes."""
    if rng.random() < 0.25:
        return mutated_bytes(whole, rng)
    with zipfile.ZipFile(io.BytesIO(whole)) as stored:
        members = {name: stored.read(name) for name in stored.namelist()}
    name = rng.choice(list(members))
    kind = rng.choice(("header", "bytes", "drop", "rename", "values"))
    if kind == "drop":
        del members[name]
    elif kind == "rename":
        members[rng.choice(("../x.npy", "images.npy", "x", "/abs.npy"))] = members.pop(name)
    elif kind == "bytes":
        members[name] = mutated_bytes(members[name], rng)
    elif kind == "header":
        members[name] = _npy_header(rng) + members[name][128:]
    else:
        members[name] = _npy(_hostile_array(np.lib.format.read_array(io.BytesIO(members[name])), rng))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as packed:
        for member, content in members.items():
            packed.writestr(member, content)
    return out.getvalue()


def _npy_header(rng: random.Random) -> bytes:
    kind = rng.choice(
        ("|u1", "<f8", ">i4", "|O", "<U3", "|V8", "<M8[ns]", "<c16", "", "x", [("a", "|O")], ("<f4", (2,)))
    )
    sides = [rng.choice((0, 1, 3, -1, 10**9, 10**13, 2**63, True, 1.5)) for _ in range(rng.randrange(5))]
    header = repr({"descr": kind, "fortran_order": rng.choice((True, False, 7)), "shape": tuple(sides)})
    header = rng.choice((header, header[:-3], "__import__('os')", "{" * 200, header + "0" * 20_000))
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) % 2**16) + header.encode()


def _npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, array, allow_pickle=False)
    return out.getvalue()


def _hostile_array(array: np.ndarray, rng: random.Random) -> np.ndarray:
    kinds = ("u1", "u8", "i8", "f2", "f4", "f8", "c8", "?", "U3", "S2", "M8[s]")
    changed = array.astype(rng.choice(kinds)) if rng.random() < 0.7 else array.copy()
    if changed.size and changed.dtype.kind in "uif":
        values = {"u": (2**64 - 1, 255, 0), "i": (-1, 2**63 - 1, 7), "f": (np.nan, np.inf, -1e38, 0.5)}
        with np.errstate(all="ignore"):
            value = np.array(rng.choice(values[changed.dtype.kind])).astype(changed.dtype)
        changed.reshape(-1)[rng.randrange(changed.size)] = value
    shapes = [changed, changed[:0], changed[None], changed.reshape(-1), changed[:-1]]
    return rng.choice(shapes)


def mutated_idx(whole: bytes, rng: random.Random) -> bytes:
    """Return an IDX file with other sizes in its header, or damaged bytes."""
    if rng.random() < 0.4:
        return mutated_bytes(whole, rng)
    place = 4 * rng.randrange(4)
    number = struct.pack(">I", rng.choice((0, 1, 27, 29, 2**31, 2**32 - 1, 0x0801, 0x0D03)))
    return whole[:place] + number + whole[place + 4 :]
