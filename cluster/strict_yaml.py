"""YAML whose mappings name each key once, and whose numbers are what they look like."""

from __future__ import annotations

import re
from typing import Any

import yaml

# What reading it raises: of values that are none of their type's, of nests that are too deep.
NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)
MERGE = "tag:yaml.org,2002:merge"


class StrictLoader(yaml.SafeLoader):
    """Refuses a key that is given twice: of two values one would be ignored."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        own = [key for key, _ in node.value if key.tag != MERGE]
        keys = [self.construct_object(key, deep=deep) for key in own]
        twice = [key for place, key in enumerate(keys) if key in keys[:place]]
        if twice:
            raise yaml.constructor.ConstructorError(
                problem=f"'{twice[0]}' is given twice: leave one out", problem_mark=node.start_mark
            )
        return super().construct_mapping(node, deep)


def _plain_number(loader: StrictLoader, node: Any) -> int:
    """In YAML 1.1 ``010`` is 8 and ``12:30`` is 750: what was meant is not known."""
    number = loader.construct_yaml_int(node)
    if re.match(r"[-+]?(0[0-7_]|\d[\d_]*:)", node.value):
        raise yaml.constructor.ConstructorError(
            problem=f"{node.value} would be {number}: write the number that is meant, or quote it",
            problem_mark=node.start_mark,
        )
    return number


StrictLoader.add_constructor("tag:yaml.org,2002:int", _plain_number)
