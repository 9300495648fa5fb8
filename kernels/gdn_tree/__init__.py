"""Gated DeltaNet over a tree of candidate tokens: verify every node in one pass, commit one path.

``naive`` is the specification (torch, any device). The Triton kernels compute the same functions.
"""
