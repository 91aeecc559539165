"""Triton implementations of the baselines that the papers compare with, one file each."""
