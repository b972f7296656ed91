"""Activations divided along the sequence, between the divided layers."""

__all__ = []
