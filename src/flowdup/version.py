"""flowdup's version, in one place: packages are built from it, results name it."""

__version__ = "0.2.0"
