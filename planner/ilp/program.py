"""A mixed-integer linear program as plain lists: variables, rows, objective. Knows no solver."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass
class Affine:
    """``constant + sum coefficient * variable``."""

    constant: float = 0.0
    terms: dict[int, float] = field(default_factory=dict)

    def add(self, variable: int, coefficient: float) -> None:
        if coefficient:
            self.terms[variable] = self.terms.get(variable, 0.0) + coefficient

    def plus(self, other: Affine, factor: float = 1.0) -> Affine:
        """Add ``factor * other`` to this one."""
        self.constant += factor * other.constant
        for variable, coefficient in other.terms.items():
            self.add(variable, factor * coefficient)
        return self

    def scaled(self, factor: float) -> Affine:
        return Affine().plus(self, factor)

    def value(self, values: Sequence[float]) -> float:
        return self.constant + sum(c * float(values[v]) for v, c in self.terms.items())

    def copy(self) -> Affine:
        return Affine(self.constant, dict(self.terms))


@dataclass(frozen=True)
class Row:
    """``lower <= sum <= upper``."""

    terms: dict[int, float]
    lower: float
    upper: float


@dataclass
class Program:
    """Minimise ``objective``. Variables are numbered; all are >= 0."""

    uppers: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    objective: Affine = field(default_factory=Affine)
    infeasible: str = ""
    """Set where a row cannot hold whatever the variables are."""

    def variable(self, upper: float = 1.0, integer: bool = False) -> int:
        self.uppers.append(upper)
        self.integer.append(integer)
        return len(self.uppers) - 1

    def at_least(self, expression: Affine, bound: float, why: str = "") -> None:
        """``expression >= bound``."""
        if not expression.terms:
            if expression.constant < bound - 1e-9:
                self.infeasible = self.infeasible or why or "a constant row"
            return
        self.rows.append(Row(expression.terms, bound - expression.constant, float("inf")))

    def at_most(self, expression: Affine, bound: float, why: str = "") -> None:
        self.at_least(expression.scaled(-1.0), -bound, why)

    def exactly(self, expression: Affine, bound: float, why: str = "") -> None:
        if not expression.terms:
            if abs(expression.constant - bound) > 1e-9:
                self.infeasible = self.infeasible or why or "a constant row"
            return
        self.rows.append(Row(expression.terms, bound - expression.constant, bound - expression.constant))

    @property
    def size(self) -> tuple[int, int]:
        return len(self.uppers), len(self.rows)


def total(parts: Iterable[Affine]) -> Affine:
    result = Affine()
    for part in parts:
        result.plus(part)
    return result
