"""Triton implementations of the methods in `kvtwin.reference`: the same names, the same results, at memory speed."""
