"""Tests of the suite itself: judge, interpreter, plugin, packaging, performance gates."""
