"""Offline preparation of models: finding and fetching their files, and writing random ones."""
