"""Architectures, written once over ops, and the loading of their files."""
