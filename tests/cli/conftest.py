from tests.cli.fakes import gguf, llm

__all__ = ["gguf", "llm"]
