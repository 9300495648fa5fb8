"""Trees of candidate tokens: lattices from drafters, policies that cut trees, exact acceptance.

Plain numpy and Python: nothing here knows an engine, a model or a device.
"""
