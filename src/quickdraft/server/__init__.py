"""The OpenAI-compatible HTTP server: shapes, translation, streaming. Decides no token."""
