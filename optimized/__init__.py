"""Triton implementations of the methods in `kvtwin.reference`, with the same names and the same results."""
