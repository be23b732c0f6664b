"""The table layout x feature -> worst relative error, as the tests measured it."""

from layout_cases import Case

TABLE: list[tuple[Case, dict[str, float]]] = []


def rows_of(case: Case, worst: dict[str, float]) -> tuple[Case, dict[str, float]]:
    """A row to be written."""
    return case, worst


def worst_of(errors: dict[str, dict[str, float]]) -> dict[str, float]:
    """The largest error of each kind; none of what was not measured."""
    return {kind: max(values.values()) for kind, values in errors.items() if values}
