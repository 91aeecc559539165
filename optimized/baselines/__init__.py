"""Triton implementations of the methods that the papers compare with, one file each."""
