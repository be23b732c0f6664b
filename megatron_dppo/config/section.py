"""The base class of all config sections."""

from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, PlainValidator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """Base of all sections: frozen, and a misspelt key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def _named_or_weighted(value: Any) -> str | dict[str, float]:
    if isinstance(value, str):
        return value
    weights = cast("dict[str, Any]", value) if isinstance(value, dict) else None
    if weights is None or not all(type(weight) in (int, float) for weight in weights.values()):
        raise PydanticCustomError("reward", "a name in quotes, or a table of names and their weights")
    return {name: float(weight) for name, weight in weights.items()}


RewardSetting = Annotated[str | dict[str, float], PlainValidator(_named_or_weighted)]
"""One reward by name, or weights by name."""
