"""Attention of a tree of candidate tokens over a long context and over the tree itself.

``naive`` is the specification (torch, any device); ``launch`` runs the Triton kernels.
"""
