"""SpecPilot: speculative decoding deployments as fast as the hardware allows, output unchanged."""

__version__ = "0.1.0"
