"""The version of kgopt: setup.py and the package both read it here."""

__version__ = "0.1.0"
