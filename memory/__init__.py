"""Structured memory of optimisation knowledge: typed entries, their evidence, search, transfer.

Nothing is read, opened or loaded at import. The package knows no engine, no ledger and no cost
model: step shares, a receipt verifier and a predictor come in as arguments.
"""
