"""Tests of the tool itself: judge, harness, interpreter, command line, documents. Not in the wheel."""
