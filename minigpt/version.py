"""The version of the package, apart from its public names, which any file may import."""

__version__ = "0.1.0"
