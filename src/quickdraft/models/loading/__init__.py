"""models/loading"""
