"""Throughput of input pipelines on one task."""
