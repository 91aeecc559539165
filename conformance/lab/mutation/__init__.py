"""Mutation testing of the suite: ``python -m kvtwin.conformance.lab.mutation``."""
