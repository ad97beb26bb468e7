"""The command line: one file per command, imported when chosen.

Modules here import only typer, config, types and errors at the top; whatever costs time (numpy,
the engine, the server, rich) is imported inside the function that needs it.
"""
