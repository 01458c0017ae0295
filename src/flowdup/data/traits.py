"""Traits: what is known of a client beside its data, such as a rotation or a site."""

from math import isfinite

import numpy as np

from flowdup.errors import DataError, shorten

Trait = str | int | float

_LONGEST_TEXT = 1000  # letters of a client's name, of a trait's and of its value


def check_traits(client: str, given: dict[str, Trait], who: str) -> dict[str, Trait]:
    """A client's traits, numpy's scalars as Python's; DataError for what no file or table can show,
    of its name as well.
    """
    if not isinstance(client, str) or len(client) > _LONGEST_TEXT:
        raise DataError(
            f"a client is named {shorten(client)}: give a text of {_LONGEST_TEXT} letters"
        )
    if not isinstance(given, dict):
        raise DataError(f"{who} has traits that are no dict: give names and their values")
    traits = {}
    for name, value in given.items():
        plain = value.item() if isinstance(value, np.generic) else value
        right = isinstance(name, str) and len(name) <= _LONGEST_TEXT
        if isinstance(plain, str):
            right = right and len(plain) <= _LONGEST_TEXT
        elif isinstance(plain, int):
            right = right and abs(plain) < 2**63
        else:
            right = right and isinstance(plain, float) and isfinite(plain)
        if not right:
            raise DataError(
                f"{who} has the trait {shorten(name)} = {shorten(value)}: give a short text, a "
                "finite float or an integer of 64 bits, under a short text"
            )
        traits[name] = plain
    return traits
