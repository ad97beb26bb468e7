"""quickdraft: serve one large language model fast, without changing a token."""

__version__ = "0.1.0"
