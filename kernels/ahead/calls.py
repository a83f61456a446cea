"""What Python calls of the compiled kernels: functions, and the types of their arguments as text.

A file of such calls tells what to compile before anything is called. One that is out of date costs
time and nothing else: what it lacks is compiled when it is called.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numba.core.types
from numba.core.dispatcher import Dispatcher

types: Any = numba.core.types  # whose stubs lack tuples

# A type as JSON has it: "int64"; "float32[2C]", an array by its dimensions and layout; a list for
# a tuple; {"class": "module:name", "fields": [...]} for a named one.
Text = str | list[Any] | dict[str, Any]
# Calls by a name for what they have in common: kernels that call the same others.
Groups = dict[str, list["Call"]]

SERVED = Path(__file__).with_name("served.json")


@dataclass(frozen=True, slots=True)
class Call:
    """A function as ``module:name``, and the types of its arguments as text."""

    function: str
    arguments: list[Text]

    @property
    def folder(self) -> str:
        """Which folder of kernels the function is in."""
        return self.function.split(".")[2]

    @property
    def types(self) -> tuple[Any, ...]:
        """What numba calls the arguments' types. Raises ValueError for text that names none."""
        return tuple(map(type_of_text, self.arguments))

    @property
    def dispatcher(self) -> Any:
        """The compiled function itself. Raises ImportError or LookupError where there is none."""
        module, _, name = self.function.partition(":")
        for each in _dispatchers(import_module(module)):
            if each.py_func.__qualname__ == name:
                return each
        raise LookupError(f"there is no compiled function {self.function}")


def read_calls(path: Path = SERVED) -> Groups:
    """The calls in a file; by default those of a served demo model with its draft model."""
    groups = json.loads(path.read_text(encoding="utf-8"))
    return {name: [Call(**each) for each in calls] for name, calls in groups.items()}


def is_compiled(call: Call) -> bool:
    """Whether the cache has the code for this machine."""
    cache = call.dispatcher._cache
    key = cache._index_key(call.types, call.dispatcher.targetctx.codegen())
    return key in cache._cache_file._load_index()


def missing_calls(groups: Groups) -> Groups:
    """Those that the cache does not have. Functions that exist no more are left out."""
    return {name: missing for name, calls in groups.items() if (missing := list(_missing(calls)))}


def _missing(calls: Iterable[Call]) -> Iterator[Call]:
    for call in calls:
        try:
            if not is_compiled(call):
                yield call
        except (ImportError, LookupError, ValueError):
            continue


def _dispatchers(module: Any) -> Iterator[Any]:
    """The compiled functions that are defined in ``module``."""
    for value in list(vars(module).values()):
        if isinstance(value, Dispatcher) and value.py_func.__module__ == module.__name__:
            yield value


def text_of_type(kind: Any) -> Text:
    """A type as text. Raises ValueError for those that no kernel is called with."""
    if isinstance(kind, types.Array):
        if not (kind.mutable and kind.aligned):
            raise ValueError(f"arrays that are read-only or not aligned have no text: {kind}")
        return f"{kind.dtype}[{kind.ndim}{kind.layout}]"
    if isinstance(kind, types.BaseNamedTuple):
        made = kind.instance_class
        fields = [text_of_type(each) for each in kind.types]
        return {"class": f"{made.__module__}:{made.__qualname__}", "fields": fields}
    if isinstance(kind, types.BaseTuple):
        return [text_of_type(each) for each in kind.types]
    if isinstance(kind, types.Number | types.Boolean):
        return str(kind)
    raise ValueError(f"no text stands for {kind}")


def type_of_text(text: Text) -> Any:
    """The type that `text_of_type` wrote. Raises ValueError, ImportError or LookupError."""
    if isinstance(text, list):
        return types.BaseTuple.from_types([type_of_text(each) for each in text])
    if isinstance(text, dict):
        module, _, name = text["class"].partition(":")
        made = vars(import_module(module))[name]
        return types.BaseTuple.from_types([type_of_text(each) for each in text["fields"]], made)
    scalar, array, shape = text.partition("[")
    kind = getattr(types, scalar, None)
    if not isinstance(kind, types.Number | types.Boolean):
        raise ValueError(f"{text!r} names no type")
    if not array:
        return kind
    dimensions, layout = shape[:-2], shape[-2:-1]
    return types.Array(kind, int(dimensions), layout)
