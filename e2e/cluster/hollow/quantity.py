"""Kubernetes quantities ("500m", "2Gi") as exact numbers."""

from __future__ import annotations

from fractions import Fraction

_SUFFIXES = {
    "Ki": Fraction(2**10),
    "Mi": Fraction(2**20),
    "Gi": Fraction(2**30),
    "Ti": Fraction(2**40),
    "Pi": Fraction(2**50),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "k": Fraction(10**3),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
    "P": Fraction(10**15),
}


def parse(text: str | int) -> Fraction:
    """The value of a quantity; raises ValueError for one that is none."""
    text = str(text)
    for suffix, factor in _SUFFIXES.items():
        if text.endswith(suffix):
            return Fraction(text.removesuffix(suffix)) * factor
    return Fraction(text)


def divide(text: str | int, divisor: str | int) -> int:
    """A quantity in units of ``divisor`` ("0" means 1), rounded up as the downward API does."""
    unit = parse(divisor) or Fraction(1)
    return -((-parse(text)) // unit)
