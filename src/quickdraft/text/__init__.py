"""Strings and token ids: tokenizer, detokenizer, chat template, stop strings; no model, engine or HTTP."""
