"""A table of plain values: what `Run.metrics` and `compare` give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas


class Table(list[dict[str, Any]]):
    """A list of rows, each a dict by column. A row lacks what it has no value for."""

    @property
    def columns(self) -> list[str]:
        """In the order in which the rows bring them up."""
        return list(dict.fromkeys(name for row in self for name in row))

    def column(self, name: str) -> list[Any]:
        """One value a row, None where it has none. Raises KeyError where no row has any."""
        if self and name not in self.columns:
            raise KeyError(f"{name!r} is not one of {', '.join(self.columns)}")
        return [row.get(name) for row in self]

    def where(self, **values: Any) -> Table:
        """The rows that have these values, like `metrics.where(stage="train")`."""
        return Table(row for row in self if all(row.get(name) == value for name, value in values.items()))

    def to_pandas(self) -> pandas.DataFrame:
        """Raises ImportError where pandas is not installed."""
        import pandas

        return pandas.DataFrame(list(self), columns=self.columns)
