"""Micro-benchmarks of the machine at hand: what they time, and how a cluster's profile follows from it."""
