"""Requests made from their types, so that a new task kind or control request is tested without a list of them."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from hypothesis import strategies as st
from msgspec import inspect as of

from transferd.tasks import ReadStorageTask, TokenIds, WriteStorageTask
from transferd.wire import protocol as wire

BODIES: tuple[type, ...] = get_args(wire.Body)
LONGEST = 8  # characters of a text and entries of a list, where the type allows fewer
# `encode_request` sends these as other types.
_OTHER_TYPES = {"salt": st.just(""), "prefix": st.just(True)}

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=LONGEST)


def tag_of(kind: type) -> str:
    """The name of the type on the wire."""
    return str(kind.__struct_config__.tag)  # type: ignore[attr-defined]


def built(kind: type) -> st.SearchStrategy[Any]:
    """Any request of this type: each field has any value that its type allows."""
    fixed = _OTHER_TYPES if kind in (ReadStorageTask, WriteStorageTask) else {}
    fields = {one.name: fixed.get(one.name, _values(one.type)) for one in _fields(kind)}
    return st.builds(kind, **fields)


def least(kind: type) -> Any:
    """One valid request of this type, with its defaults, and the least in each field that has none."""
    values = {one.name: _least(one.type) for one in _fields(kind) if one.required}
    return kind(**values | ({"salt": "s"} if kind in (wire.SaltedRead, wire.SaltedWrite) else {}))


def _fields(kind: type) -> tuple[of.Field, ...]:
    info = of.type_info(kind)
    assert isinstance(info, of.StructType)
    return info.fields


def _values(kind: of.Type) -> st.SearchStrategy[Any]:
    match kind:
        case of.UnionType():
            return st.one_of(*map(_values, kind.types))
        case of.StrType():
            return st.text(st.characters(exclude_categories=["Cs"]), min_size=kind.min_length or 0, max_size=LONGEST)
        case of.IntType():
            return st.integers(-(2**62) if kind.ge is None else kind.ge, 2**62 if kind.le is None else kind.le)
        case of.FloatType():
            lowest = kind.gt if kind.ge is None else kind.ge
            return st.floats(lowest, kind.le, exclude_min=kind.gt is not None, allow_nan=False, allow_infinity=False)
        case of.BoolType():
            return st.booleans()
        case of.NoneType():
            return st.none()
        case of.LiteralType():
            return st.sampled_from(kind.values)
        case of.ListType():
            return st.lists(_values(kind.item_type), max_size=LONGEST)
        case of.VarTupleType():
            return st.lists(_values(kind.item_type), max_size=LONGEST).map(tuple)
        case of.TupleType():
            return st.tuples(*map(_values, kind.item_types))
        case of.DictType():
            return st.dictionaries(_values(kind.key_type), _values(kind.value_type), max_size=LONGEST)
        case of.AnyType():
            return st.none() | st.booleans() | text
        case of.RawType():
            return st.dictionaries(text, text, max_size=LONGEST).map(msgspec.msgpack.encode).map(msgspec.Raw)
        case of.CustomType(cls=cls) if cls is TokenIds:
            return st.lists(st.integers(-(2**63), 2**63 - 1), max_size=LONGEST).map(TokenIds)
    if type(kind).__name__ == "UnsetType":
        return st.just(msgspec.UNSET)
    raise NotImplementedError(f"no values of {kind} are known: add them here")


def _least(kind: of.Type) -> Any:
    match kind:
        case of.StrType():
            return "x" * max(1, kind.min_length or 0)
        case of.IntType():
            return kind.ge or 0
        case of.FloatType():
            return 1.0
        case of.BoolType():
            return False
        case of.LiteralType():
            return kind.values[0]
        case of.ListType():
            return []
        case of.DictType():
            return {}
        case of.RawType():
            return msgspec.Raw(msgspec.msgpack.encode({}))
        case of.CustomType(cls=cls) if cls is TokenIds:
            return TokenIds([1])
    raise NotImplementedError(f"no value of {kind} is known: add it here")
