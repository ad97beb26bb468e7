"""Proofs on the user's own machine: does this model, here, do what quickdraft promises?"""
