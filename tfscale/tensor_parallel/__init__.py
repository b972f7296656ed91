"""Layers split over the model axis of a mesh, as Megatron-LM splits them."""

__all__ = []
