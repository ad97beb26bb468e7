"""Offline training of drafters for a target model (extra `train`): data, features, networks, loops, export.

May import torch; is never imported by serving.
"""
