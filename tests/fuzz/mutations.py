"""Changes to bytes, to trees of JSON or TOML, and to texts, all drawn from one `random.Random`."""

import copy
import json
import math
from random import Random
from typing import Any

HUGE = 10**18
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63),
    *(2**64 - 1, -(2**63), HUGE, 10**400, 0.0, -0.0, 0.5, -1.5, 1e-320, 1e38, 1e39, 1e300, 1e308),
    *("", "x", "0", "..", "../x", "/etc/passwd", "\0", "\ud800", "nan", "é" * 50, "a" * 5000),
    *("<script>alert(1)</script>", "uint8", "float32", "object", "mlp", "cnn", "resnet18"),
    *("fedavg", "pefll", "psi/x", [], {}, [0], [1, 8, 8], [-1], [HUGE, HUGE], [[]], [None]),
    *({"a": 1}, {"name": "fedavg"}, [[[[[1]]]]], ["x"] * 100, [0.5] * 1000),
)
NOT_JSON = (math.nan, math.inf, -math.inf)


def odd(random: Random) -> Any:
    return copy.deepcopy(random.choice(ODD))


def like(random: Random, value: Any) -> Any:
    """Something of the same type."""
    same = [other for other in ODD if type(other) is type(value)]
    if type(value) is int:
        same += [value + 1, value - 1, 2 * value, 7, 10, 64, 100, 1000, 10**5, 10**7]
    elif type(value) is float:
        same += [value / 2, 2 * value, 0.1, 0.9, 1.0, 10.0]
    elif type(value) is str:
        same += ["batched", "sequential", "hashed", "dense", "identity", "adam", "digits", "auto"]
    return random.choice(same) if same else odd(random)


def change_bytes(random: Random, content: bytes) -> bytes:
    data = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 5, 20))):
        place = random.randrange(len(data) + 1)
        length = random.choice((1, 2, 4, 8, 64, 1024))
        how = random.randrange(8)
        if how == 0 and place < len(data):
            data[place] ^= 1 << random.randrange(8)
        elif how == 1:
            del data[place:]
        elif how == 2:
            del data[place : place + length]
        elif how == 3:
            data[place:place] = random.randbytes(length)
        elif how == 4:
            data[place : place + length] = b"\xff" * length
        elif how == 5:
            data[place : place + length] = bytes(length)
        elif how == 6:
            other = random.randrange(len(data) + 1)
            data[place : place + length] = data[other : other + length]
        else:
            value = random.choice((0, 1, 127, 2**16, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1))
            data[place : place + 8] = value.to_bytes(8, random.choice(("little", "big")))
    return bytes(data)


def change_text(random: Random, text: str) -> str:
    """A text with pieces dropped, doubled or put in."""
    for _ in range(random.choice((1, 1, 2, 4))):
        place, length = random.randrange(len(text) + 1), random.choice((1, 3, 20, 200))
        piece = random.choice(
            (
                *(
                    "[",
                    "]",
                    "{",
                    "}",
                    '"',
                    "'",
                    "=",
                    ".",
                    "\n",
                    "#",
                    "0",
                    "-",
                    "e999",
                    "nan",
                    "inf",
                ),
                *(
                    "[" * 5000,
                    "{a=" * 3000,
                    "a." * 3000,
                    "9" * 5000,
                    "\0",
                    "\x7f",
                    "\ufeff",
                    "true",
                ),
                text[place : place + length],
                "",
            )
        )
        cut = place + length * random.randrange(2)
        text = text[:place] + piece + text[cut:]
    return text


def change_tree(random: Random, tree: Any) -> Any:
    """The tree with one to three of its parts changed."""
    tree = copy.deepcopy(tree)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        tree = _change_once(random, tree)
    return tree


def _change_once(random: Random, tree: Any) -> Any:
    places = list(_places(tree))
    if not places:
        return odd(random)
    holder, key = random.choice(places)
    how = random.randrange(10)
    if how < 5:
        holder[key] = odd(random)
    elif how == 5:
        del holder[key]
    elif how == 6 and isinstance(holder, dict):
        holder[random.choice(("", "x", f"{key}x", "psi/x", "__metadata__"))] = holder.pop(key)
    elif how == 7:
        holder[key] = [holder[key]] if random.randrange(2) else {"x": holder[key]}
    elif how == 8:
        other, place = random.choice(places)
        if place in other if isinstance(other, dict) else place < len(other):
            holder[key] = copy.deepcopy(other[place])
    elif type(holder[key]) in (int, float):
        value = holder[key]
        holder[key] = random.choice((-value, value + 1, value * 10, value / 2, value * 10**6))
    return tree


def _places(tree: Any, depth: int = 0) -> Any:
    inside = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in inside:
        yield tree, key
        if depth < 12:
            yield from _places(value, depth + 1)


def json_text(random: Random, tree: Any) -> bytes:
    """A tree as JSON, now and then as JSON that the standard does not know, or without end."""
    how = random.randrange(40)
    if how == 0:
        return b"[" * random.choice((10, 2000, 100_000))
    if how == 1:
        return b'{"a":' * random.choice((10, 2000, 100_000))
    if how == 2:
        tree = [random.choice(NOT_JSON), tree]
    text = json.dumps(tree)
    if how == 3:
        text = text.replace("{", '{"round": 1, "round": 2, ', 1)
    if how == 4:
        text = text.replace("1", "1" * 6000, 1)
    return text.encode()


def to_toml(tree: dict[str, Any]) -> str:
    """A tree as one line of TOML per setting; what TOML has no word for becomes a text."""
    return "\n".join(f"{_key(key)} = {toml_value(value)}" for key, value in tree.items())


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, int | float):
        return repr(value)
    return json.dumps("" if value is None else value).replace("\x7f", "")


def _key(key: str) -> str:
    return json.dumps(key)
