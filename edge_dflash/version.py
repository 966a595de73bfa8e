"""The version, where modules find it that the package itself imports."""

__version__ = "0.1.0"
