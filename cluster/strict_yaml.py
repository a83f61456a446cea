"""YAML whose mappings name each key once."""

from __future__ import annotations

from typing import Any

import yaml


class StrictLoader(yaml.SafeLoader):
    """Refuses a key that is given twice: of two values one would be ignored."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        twice = [key for place, key in enumerate(keys) if key in keys[:place]]
        if twice:
            raise yaml.constructor.ConstructorError(
                problem=f"'{twice[0]}' is given twice: leave one out", problem_mark=node.start_mark
            )
        return super().construct_mapping(node, deep)
