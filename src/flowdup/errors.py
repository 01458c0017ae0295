"""Errors meant for a person: one sentence that says what is wrong and what to do."""

from unicodedata import bidirectional, category

_CONTROL = ("Cc", "Cs", "Zl", "Zp")  # kinds of signs that no line can show
_TURNING = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")  # the text after them


class FlowdupError(Exception):
    """The base of every error that a user can mend; the command line ends with its exit code."""

    exit_code = 2


class ConfigError(FlowdupError):
    """A setting is unknown, of the wrong type, out of range, or at odds with another one."""


class DataError(FlowdupError):
    """Client data is missing, malformed, or does not fit the federation."""


class CheckpointError(FlowdupError):
    """A stored file is missing, truncated, tampered with, or of another federation."""


class FolderInUseError(FlowdupError):
    """Another process trains into the same run folder."""


class WorkerError(FlowdupError):
    """A process that did a part of the work is gone; what it had saved is there."""

    exit_code = 1


class TrainingError(FlowdupError):
    """Training cannot go on: it diverged, or no client can take part."""


class GpuMemoryError(FlowdupError):
    """The GPU's memory is full: with less beside it, or on another GPU, the work may be done."""

    exit_code = 1


class MessageError(FlowdupError):
    """What came from a client is not a reply to the task that it was sent."""


class NotFiniteError(MessageError):
    """A client's reply fits, but for numbers that are NaN or infinite."""


class ForeignClientError(FlowdupError):
    """A client's data look like those of no training client, and no model was wanted then."""

    exit_code = 3


class CertificateError(FlowdupError):
    """A bound cannot be given honestly: its assumptions do not hold, or there are too few data."""


class FederationError(FlowdupError):
    """A federation across machines cannot go on: too few nodes, or no coordinator."""

    exit_code = 1


class TrainingWarning(UserWarning):
    """Training goes on, but suffers from something that `flowdup doctor` would name."""


def shorten(value: object, most: int = 60) -> str:
    """A value cut to fit a sentence, however long or deep; a text or an error without quotes."""
    try:
        text = str(value) if isinstance(value, str | Exception) else repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, endless nesting
        text = "something enormous"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def printable(line: str) -> str:
    """A line for a terminal or a comment, which a name that ends the line or steers the terminal
    would break.
    """
    unfit = (category(sign) in _CONTROL or bidirectional(sign) in _TURNING for sign in line)
    return "".join("?" if bad else sign for sign, bad in zip(line, unfit, strict=True))
