"""Gated delta rule over a chain of tokens: token by token, and in chunks for prefill."""
