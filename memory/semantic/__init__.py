"""The derived vector index: encoder and chroma collection in a process of their own.

Nothing here is the truth: every vector can be rebuilt from the store. Importing this package, and
``client``, loads neither chromadb nor sentence-transformers.
"""
